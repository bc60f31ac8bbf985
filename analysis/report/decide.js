/* Decisions and counts at any threshold, from the float64 numbers that the analysis uses.
 *
 * Outside: D > δ. Masked: outside by the criterion's own proximity, and Â · direction > 0; what
 * no threshold moves (clip-higher, neighbours' weights) was decided before.
 * In disagreement: outside, and exactly one of criterion and baseline masks. All strictly.
 * Undetermined: |ΔD| below the bound on its error, decided before too; neither an increase nor
 * a decrease, and in no rate. In rates a token counts as many times as it stands for.
 */

const OUTSIDE = 1;
const DISAGREEMENT = 2;
const CRITERION_MASKS = 4;
const BASELINE_MASKS = 8;
const CRITERION_UNSAFE = 16;
const BASELINE_UNSAFE = 32;

class Judge {
  constructor(tokens) {
    this.tokens = tokens;
    this.flags = new Uint8Array(tokens.count);
    this.rules = new Map(tokens.header.criteria.map((rule) => [rule.name, this.rule(rule)]));
  }

  rule(entry) {
    const { columns } = this.tokens;
    if (entry.masked) {
      const masked = columns[entry.masked];
      return { ...entry, known: (i) => masked[i] !== 2, masks: (i) => masked[i] === 1 };
    }
    const advantage = columns.advantage;
    const proximity = columns[entry.proximity];
    const direction = columns[entry.direction];
    return {
      ...entry,
      known: (i) => !Number.isNaN(proximity[i]),
      masks: (i, threshold) => proximity[i] > threshold && advantage[i] * direction[i] > 0,
    };
  }

  get threshold() {
    return this.asked.threshold;
  }

  delta(i) {
    return this.tokens.columns[`delta_d_${this.asked.arm}`][i];
  }

  inLoss(i) {
    return this.tokens.columns[`in_loss_${this.asked.arm}`][i] === 1;
  }

  /* Whether bounds on the error of ΔD were recorded in any arm. */
  get hasBounds() {
    const { columns, header } = this.tokens;
    return header.arms.some((_, arm) => `undetermined_${arm}` in columns);
  }

  isUndetermined(i) {
    return this.tokens.columns[`undetermined_${this.asked.arm}`]?.[i] === 1;
  }

  /* Mark every token and count: {threshold, criterion, baseline, arm (a number)}. */
  judge(asked) {
    this.asked = asked;
    const { tokens, flags } = this;
    const { d_pre, weight } = tokens.columns;
    const undetermined = tokens.columns[`undetermined_${asked.arm}`];
    const delta = tokens.columns[`delta_d_${asked.arm}`];
    const ours = this.rules.get(asked.criterion);
    const theirs = this.rules.get(asked.baseline);
    const seeds = tokens.header.seeds.map(emptySeed);
    let [least, most] = [Infinity, -Infinity];
    for (let i = 0; i < tokens.count; i++) {
      let mark = 0;
      if (ours.masks(i, asked.threshold)) mark |= CRITERION_MASKS;
      if (theirs.masks(i, asked.threshold)) mark |= BASELINE_MASKS;
      if (d_pre[i] > asked.threshold) {
        mark |= OUTSIDE;
        const seed = seeds[tokens.seedOf[i]];
        const change = undetermined?.[i] === 1 ? null : Math.sign(delta[i]);
        const stands = weight?.[i] ?? 1;
        least = Math.min(least, stands);
        most = Math.max(most, stands);
        count(seed.outside, change, stands);
        const oursMask = (mark & CRITERION_MASKS) !== 0;
        if (oursMask !== ((mark & BASELINE_MASKS) !== 0)) {
          mark |= DISAGREEMENT;
          count(seed.disagreement, change, stands);
          count(oursMask ? seed.baseline : seed.criterion, change, stands);
          if (change > 0) mark |= oursMask ? BASELINE_UNSAFE : CRITERION_UNSAFE;
        }
      }
      flags[i] = mark;
    }
    return { ...summary(seeds), bounded: undetermined !== undefined, weighted: least < most };
  }
}

function emptySeed({ seed, tokens }) {
  const [outside, disagreement, criterion, baseline] = Array.from({ length: 4 }, tally);
  return { seed, tokens, outside, disagreement, criterion, baseline };
}

/* Tokens by what the update did to their D; `weights` of the determined ones. */
function tally() {
  const weights = { determined: 0, increase: 0, decrease: 0 };
  return { tokens: 0, undetermined: 0, increase: 0, decrease: 0, weights };
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
  into.weights.determined += stands;
  into.weights.increase += increase * stands;
  into.weights.decrease += decrease * stands;
}

function together(tallies) {
  const sum = tally();
  for (const each of tallies) {
    for (const name of ["tokens", "undetermined", "increase", "decrease"]) sum[name] += each[name];
    for (const name of Object.keys(sum.weights)) sum.weights[name] += each.weights[name];
  }
  return sum;
}

/* Share of the determined tokens that increase, or decrease. */
function rate({ weights }, change = "increase") {
  return weights.determined ? weights[change] / weights.determined : NaN;
}

function summary(seeds) {
  const totals = { seeds, tokens: seeds.reduce((total, seed) => total + seed.tokens, 0) };
  for (const set of ["outside", "disagreement", "criterion", "baseline"])
    totals[set] = together(seeds.map((seed) => seed[set]));
  for (const side of ["criterion", "baseline"]) {
    const rates = seeds.map((seed) => rate(seed[side])).filter((each) => !Number.isNaN(each));
    totals[side].seeds = rates.length;
    totals[side].rate = rates.length ? rates.reduce((a, b) => a + b) / rates.length : NaN;
  }
  const pairs = seeds
    .map((seed) => rate(seed.criterion) - rate(seed.baseline))
    .filter((difference) => !Number.isNaN(difference));
  totals.paired = {
    seeds: pairs.length,
    lower: pairs.filter((each) => each < 0).length,
    tied: pairs.filter((each) => each === 0).length,
    higher: pairs.filter((each) => each > 0).length,
    difference: pairs.length ? pairs.reduce((a, b) => a + b) / pairs.length : NaN,
  };
  return totals;
}
