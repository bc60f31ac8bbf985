/* Decisions and counts at any threshold, from the float64 numbers that the analysis uses.
 *
 * Outside: D > δ. A rule masks where its region exceeds δ, or a threshold of its own, and
 * Â · push > 0; a rule that no two columns can say was decided when the page was made.
 * In disagreement: outside, and exactly one of criterion and baseline masks. All strictly.
 * Undetermined: |ΔD| below the bound on its error; neither an increase nor a decrease, and in no
 * rate. In rates a token counts as many times as it stands for.
 */

const OUTSIDE = 1;
const DISAGREEMENT = 2;
const CRITERION_UNSAFE = 4;
const BASELINE_UNSAFE = 8;

/* What tokens are marked by: the class of the mark, and how it is said. */
const MARKS = [
  { flag: OUTSIDE, name: "outside", said: () => "outside" },
  { flag: DISAGREEMENT, name: "disagreement", said: () => "in disagreement" },
  { flag: CRITERION_UNSAFE, name: "unsafe", said: (asked) => `▲ unsafe keep of ${asked.criterion}` },
  { flag: BASELINE_UNSAFE, name: "unsafe-baseline", said: (asked) => `△ unsafe keep of ${asked.baseline}` },
];
const SETS = ["outside", "disagreement", "criterion", "baseline"];

class Judge {
  constructor(tokens) {
    this.tokens = tokens;
    this.flags = new Uint8Array(tokens.count);
    this.rules = new Map(tokens.header.rules.map((rule) => [rule.name, this.rule(rule)]));
  }

  rule(entry) {
    const { columns } = this.tokens;
    if (entry.keep) {
      const keep = columns[entry.keep];
      return { ...entry, known: (i) => keep[i] !== 2, masks: (i) => keep[i] === 0 };
    }
    const [region, push, own] = [columns[entry.region], columns[entry.push], entry.threshold];
    return {
      ...entry,
      known: (i) => !Number.isNaN(region[i]),
      masks: (i, threshold) => region[i] > (own ?? threshold) && columns.advantage[i] * push[i] > 0,
    };
  }

  get threshold() {
    return this.asked.threshold;
  }

  /* What an arm's update did: "delta_d", "in_loss" or "undetermined" of the arm that was chosen. */
  of(name) {
    return this.tokens.columns[`${name}_${this.asked.arm}`];
  }

  delta(i) {
    return this.of("delta_d")[i];
  }

  inLoss(i) {
    return this.of("in_loss")[i] === 1;
  }

  /* Whether bounds on the error of ΔD were recorded in any arm. */
  get hasBounds() {
    return this.tokens.header.arms.some((_, arm) => `undetermined_${arm}` in this.tokens.columns);
  }

  isUndetermined(i) {
    return this.of("undetermined")?.[i] === 1;
  }

  marks(i) {
    return MARKS.filter(({ flag }) => this.flags[i] & flag);
  }

  /* The marks of a token in words. */
  said(i) {
    const found = this.marks(i).map(({ said }) => said(this.asked));
    return this.isUndetermined(i) ? [...found, "ΔD undetermined"] : found;
  }

  /* Mark every token and count: {threshold, criterion, baseline, arm (a number)}. */
  judge(asked) {
    this.asked = asked;
    const { tokens, flags } = this;
    const [undetermined, delta] = [this.of("undetermined"), this.of("delta_d")];
    const { weight } = tokens.columns;
    const ours = this.rules.get(asked.criterion);
    const theirs = this.rules.get(asked.baseline);
    const seeds = tokens.header.seeds.map(({ seed, tokens, known }) => {
      const sets = Object.fromEntries(SETS.map((name) => [name, tally()]));
      if (!known) for (const name in sets.outside) sets.outside[name] = NaN;
      return { seed, tokens, ...sets };
    });
    let [least, most] = [Infinity, -Infinity];
    for (let i = 0; i < tokens.count; i++) {
      flags[i] = 0;
      if (!(tokens.d[i] > asked.threshold)) continue;
      flags[i] = OUTSIDE;
      const seed = seeds[tokens.seedOf[i]];
      const change = undetermined?.[i] === 1 ? null : Math.sign(delta[i]);
      const stands = weight?.[i] ?? 1;
      least = Math.min(least, stands);
      most = Math.max(most, stands);
      count(seed.outside, change, stands);
      const masked = ours.masks(i, asked.threshold);
      if (masked === theirs.masks(i, asked.threshold)) continue;
      flags[i] |= DISAGREEMENT;
      count(seed.disagreement, change, stands);
      count(masked ? seed.baseline : seed.criterion, change, stands);
      if (change > 0) flags[i] |= masked ? BASELINE_UNSAFE : CRITERION_UNSAFE;
    }
    return { ...summary(seeds), bounded: undetermined !== undefined, weighted: least < most };
  }
}

/* Tokens by what the update did to their D; `weight` of the determined, and of these of each. */
function tally() {
  return { tokens: 0, undetermined: 0, increase: 0, decrease: 0, weight: 0, up: 0, down: 0 };
}

/* By the sign of ΔD, null where undetermined. Where it is NaN, so is every count that it decides. */
function count(into, change, stands) {
  into.tokens += 1;
  if (change === null) {
    into.undetermined += 1;
    return;
  }
  const unknown = Number.isNaN(change);
  const increase = unknown ? NaN : Number(change > 0);
  const decrease = unknown ? NaN : Number(change < 0);
  into.increase += increase;
  into.decrease += decrease;
  into.weight += stands;
  into.up += increase * stands;
  into.down += decrease * stands;
}

/* Share of the determined tokens that increase ("up"), or decrease ("down"). */
function rate(sums, change = "up") {
  return sums.weight ? sums[change] / sums.weight : NaN;
}

function mean(values) {
  return values.length ? values.reduce((a, b) => a + b) / values.length : NaN;
}

function summary(seeds) {
  const totals = { seeds, tokens: seeds.reduce((total, seed) => total + seed.tokens, 0) };
  for (const set of SETS) {
    totals[set] = tally();
    for (const seed of seeds) {
      for (const name in totals[set]) totals[set][name] += seed[set][name];
      seed[set].rate = rate(seed[set]);
    }
    const rates = seeds.map((seed) => seed[set].rate).filter((each) => !Number.isNaN(each));
    totals[set].seeds = rates.length;
    totals[set].rate = mean(rates);
  }
  const pairs = seeds
    .map((seed) => seed.criterion.rate - seed.baseline.rate)
    .filter((difference) => !Number.isNaN(difference));
  const [lower, tied, higher] = [-1, 0, 1].map((sign) => pairs.filter((d) => Math.sign(d) === sign).length);
  totals.paired = { seeds: pairs.length, lower, tied, higher, difference: mean(pairs) };
  return totals;
}
