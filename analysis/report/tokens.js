/* The tokens of the page: where each lies, what it says, what is known of it. */

class Tokens {
  constructor(header, columns) {
    this.header = header;
    this.columns = columns;
    this.d = columns["value-divergence"];
    this.shownDirection = columns[header.shown.column];
    this.count = header.rows;
    this.start = columns.response_start;
    this.sequences = this.start.length - 1;
    this.sequenceOf = new Int32Array(this.count);
    this.seedOf = new Int32Array(this.count);
    for (let s = 0; s < this.sequences; s++) {
      this.sequenceOf.fill(s, this.start[s], this.start[s + 1]);
      this.seedOf.fill(columns.response_seed[s], this.start[s], this.start[s + 1]);
    }
    this.detailOf = new Int32Array(this.count).fill(-1);
    columns.detail_row?.forEach((token, row) => (this.detailOf[token] = row));
    this.textOfId = new Map();
    if (columns.text)
      for (let i = 0; i < this.count; i++)
        if (!this.textOfId.has(columns.token_id[i]))
          this.textOfId.set(columns.token_id[i], header.texts[columns.text[i]]);
    this.prompts = new Map();
    for (const prompt of header.prompts) this.prompts.set(`${prompt.seed}/${prompt.group}`, prompt);
  }

  get hasText() {
    return this.columns.text !== undefined;
  }

  seed(s) {
    return this.header.seeds[this.columns.response_seed[s]].seed;
  }

  group(s) {
    const { response_step, response_group } = this.columns;
    return `seed ${this.seed(s)} · step ${response_step[s]} · group ${response_group[s]}`;
  }

  prompt(s) {
    const { response_seed, response_group } = this.columns;
    return this.prompts.get(`${response_seed[s]}/${response_group[s]}`);
  }

  /* The decoded text of a token; undefined where the dump has none. */
  text(i) {
    return this.hasText ? this.header.texts[this.columns.text[i]] : undefined;
  }

  shown(i) {
    return this.hasText ? visible(this.text(i)) : `${this.columns.token_id[i]}`;
  }

  /* How an id of the vocabulary is shown: by its text where some token of the page gives it. */
  shownId(id) {
    return this.textOfId.has(id) ? visible(this.textOfId.get(id)) : `#${id}`;
  }

  ratio(i) {
    return this.columns["value-ratio"][i] + 1;
  }

  /* A quantised number of nats; NaN where it is not there. */
  nats(name, i) {
    return this.natsOf(this.columns[name]?.[i] ?? UNKNOWN);
  }

  natsOf(steps) {
    if (steps === UNKNOWN) return NaN;
    return steps === UNKNOWN - 1 ? Infinity : steps * this.header.quantum;
  }

  /* The top-K of a token as [{id, mu, pi, post}], the sampled one among them; null without. */
  topK(i) {
    const row = this.detailOf[i];
    if (row < 0) return null;
    const { detail_ids, detail_mu, detail_pi, detail_post, token_id } = this.columns;
    const k = this.header.details.top_k;
    const found = [];
    for (let at = row * k; at < (row + 1) * k; at++) {
      if (detail_ids[at] < 0) continue;
      const mu = detail_mu[at];
      const pi = (mu + detail_pi[at]) & UNKNOWN;
      const post = (pi + detail_post[at]) & UNKNOWN;
      const [a, b, c] = [mu, pi, post].map((steps) => Math.exp(-this.natsOf(steps)));
      found.push({ id: detail_ids[at], mu: a, pi: b, post: c });
    }
    if (!found.some((entry) => entry.id === token_id[i])) {
      const [mu, pi, post] = ["behavior_logprob", "pre_logprob", "post_logprob"].map((name) =>
        Math.exp(-this.nats(name, i)),
      );
      found.push({ id: token_id[i], mu, pi, post, beyond: true });
    }
    return found;
  }
}
