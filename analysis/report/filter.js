/* Which responses are shown, in which order, and which of their tokens are meant. */

const DECISIONS = [
  ["", "all tokens"],
  ["outside", "outside"],
  ["disagreement", "in disagreement"],
  ["unsafe", "▲△ unsafe keeps"],
  ["unsafe-criterion", "▲ unsafe keeps of the criterion"],
  ["unsafe-baseline", "△ unsafe keeps of the baseline"],
  ["not-in-loss", "not in the applied loss"],
];
const MASKED = "masked:";

/* Flags by what decisions and orders are called. */
const FLAGGED = {
  outside: OUTSIDE,
  disagreement: DISAGREEMENT,
  unsafe: CRITERION_UNSAFE | BASELINE_UNSAFE,
  "unsafe-criterion": CRITERION_UNSAFE,
  "unsafe-baseline": BASELINE_UNSAFE,
};

const SORTS = [
  ["recorded", "as recorded"],
  ["disagreement", "most in disagreement"],
  ["unsafe", "most unsafe keeps"],
  ["outside", "most outside"],
  ["d", "largest D"],
  ["delta", "largest |ΔD|"],
  ["length", "longest"],
];

/* What chooses tokens, as a function of a token; null where nothing does. */
function tokenTest(tokens, judge, { decision, text }) {
  const tests = [];
  const flagged = FLAGGED[decision];
  if (flagged) tests.push((i) => (judge.flags[i] & flagged) !== 0);
  else if (decision === "not-in-loss") tests.push((i) => !judge.inLoss(i));
  else if (decision.startsWith(MASKED)) {
    const rule = judge.rules.get(decision.slice(MASKED.length));
    tests.push((i) => rule.masks(i, judge.threshold));
  }
  if (text !== "") tests.push(textTest(tokens, text));
  if (!tests.length) return null;
  return (i) => tests.every((test) => test(i));
}

function textTest(tokens, wanted) {
  const { token_id, text } = tokens.columns;
  if (!text) return (i) => String(token_id[i]) === wanted.trim();
  const low = wanted.toLowerCase();
  const found = tokens.header.texts.map(
    (each) => each.toLowerCase().includes(low) || visible(each).toLowerCase().includes(low),
  );
  return (i) => found[text[i]];
}

/* {order, hits, tokens}: sequences to show, a byte a token or null, how many tokens are meant. */
function filtered(tokens, judge, asked) {
  const { columns } = tokens;
  const test = tokenTest(tokens, judge, asked);
  const hits = test ? new Uint8Array(tokens.count) : null;
  const only = [
    ["seed", (s) => tokens.seed(s)],
    ["step", (s) => columns.response_step[s]],
    ["group", (s) => columns.response_group[s]],
    ["sequence", (s) => columns.response_sequence[s]],
  ].filter(([name]) => asked[name] !== null);
  const order = [];
  let meant = 0;
  for (let s = 0; s < tokens.sequences; s++) {
    if (!only.every(([name, value]) => value(s) === asked[name])) continue;
    let any = test === null;
    for (let i = tokens.start[s]; i < tokens.start[s + 1]; i++) {
      if (test === null) meant += 1;
      else if (test(i)) {
        hits[i] = 1;
        meant += 1;
        any = true;
      }
    }
    if (any) order.push(s);
  }
  sortSequences(order, tokens, judge, asked.sort);
  return { order, hits, tokens: meant };
}

function sortSequences(order, tokens, judge, by) {
  if (by === "recorded") return;
  const flag = FLAGGED[by];
  const keys = new Float64Array(tokens.sequences);
  for (const s of order) {
    let key = 0;
    for (let i = tokens.start[s]; i < tokens.start[s + 1]; i++) {
      if (flag) key += judge.flags[i] & flag ? 1 : 0;
      else if (by === "length") key += 1;
      else {
        const size = by === "d" ? tokens.d[i] : Math.abs(judge.delta(i));
        if (size > key) key = size;
      }
    }
    keys[s] = key;
  }
  order.sort((a, b) => keys[b] - keys[a] || a - b);
}
