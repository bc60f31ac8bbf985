/* Decisions and counts at any threshold, from the float64 numbers that the analysis uses.
 *
 * Outside: D > δ. Masked: outside by the criterion's own proximity, and Â · direction > 0; what
 * no threshold moves (clip-higher, neighbours' weights) was decided before.
 * In disagreement: outside, and exactly one of criterion and baseline masks. All strictly.
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

  /* Mark every token and count: {threshold, criterion, baseline, arm (a number)}. */
  judge(asked) {
    this.asked = asked;
    const { tokens, flags } = this;
    const { d_pre } = tokens.columns;
    const delta = tokens.columns[`delta_d_${asked.arm}`];
    const ours = this.rules.get(asked.criterion);
    const theirs = this.rules.get(asked.baseline);
    const seeds = tokens.header.seeds.map(emptySeed);
    for (let i = 0; i < tokens.count; i++) {
      let mark = 0;
      if (ours.masks(i, asked.threshold)) mark |= CRITERION_MASKS;
      if (theirs.masks(i, asked.threshold)) mark |= BASELINE_MASKS;
      if (d_pre[i] > asked.threshold) {
        mark |= OUTSIDE;
        const seed = seeds[tokens.seedOf[i]];
        /* Where there is no ΔD every count that it decides is NaN. */
        const unknown = Number.isNaN(delta[i]);
        const increase = unknown ? NaN : Number(delta[i] > 0);
        seed.outside += 1;
        seed.outsideIncrease += increase;
        const oursMask = (mark & CRITERION_MASKS) !== 0;
        if (oursMask !== ((mark & BASELINE_MASKS) !== 0)) {
          mark |= DISAGREEMENT;
          seed.disagreement += 1;
          seed.disagreementIncrease += increase;
          const keeper = oursMask ? seed.baseline : seed.criterion;
          keeper.kept += 1;
          keeper.unsafe += increase;
          keeper.contracting += unknown ? NaN : Number(delta[i] < 0);
          if (increase) mark |= oursMask ? BASELINE_UNSAFE : CRITERION_UNSAFE;
        }
      }
      flags[i] = mark;
    }
    return summary(seeds);
  }
}

function emptySeed({ seed, tokens }) {
  const side = () => ({ kept: 0, unsafe: 0, contracting: 0 });
  return {
    seed,
    tokens,
    outside: 0,
    outsideIncrease: 0,
    disagreement: 0,
    disagreementIncrease: 0,
    criterion: side(),
    baseline: side(),
  };
}

function rate({ kept, unsafe }) {
  return kept ? unsafe / kept : NaN;
}

function summary(seeds) {
  const sum = (pick) => seeds.reduce((total, seed) => total + pick(seed), 0);
  const totals = { seeds };
  for (const name of ["tokens", "outside", "outsideIncrease", "disagreement", "disagreementIncrease"])
    totals[name] = sum((seed) => seed[name]);
  for (const side of ["criterion", "baseline"]) {
    const rates = seeds.map((seed) => rate(seed[side])).filter((each) => !Number.isNaN(each));
    const [kept, unsafe, contracting] = ["kept", "unsafe", "contracting"].map((name) =>
      sum((seed) => seed[side][name]),
    );
    totals[side] = {
      kept,
      unsafe,
      contracting,
      seeds: rates.length,
      rate: rates.length ? rates.reduce((a, b) => a + b) / rates.length : NaN,
      contractingFraction: kept ? contracting / kept : NaN,
    };
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
