/* What is known of one token: numbers, decisions, and the top-K of three policies. */

class Inspector {
  constructor(place, tokens, judge) {
    this.place = place;
    this.tokens = tokens;
    this.judge = judge;
    this.token = -1;
    place.querySelector("[data-close]").addEventListener("click", () => this.close());
    this.body = place.querySelector("[data-body]");
  }

  show(i) {
    if (i === this.token && this.place.classList.contains("open")) return;
    this.token = i;
    this.refresh();
    this.place.classList.add("open");
  }

  close() {
    this.place.classList.remove("open");
  }

  refresh() {
    if (this.token < 0) return;
    const i = this.token;
    this.body.replaceChildren(
      this.title(i),
      this.badges(i),
      this.numbers(i),
      this.decisions(i),
      this.distribution(i),
    );
  }

  title(i) {
    const { tokens } = this;
    const { columns } = tokens;
    const s = tokens.sequenceOf[i];
    const where =
      `seed ${tokens.seed(s)} · step ${columns.sequence_step[s]} · group ` +
      `${columns.sequence_group[s]} · response ${columns.sequence_sequence[s]} · ` +
      `position ${columns.position[i]}`;
    return el(
      "div",
      { class: "token-title" },
      el("bdi", { class: "glyph" }, tokens.shown(i)),
      el("span", { class: "quiet" }, `id ${columns.token_id[i]}`),
      el("div", { class: "quiet where" }, where),
    );
  }

  badges(i) {
    const { criterion, baseline } = this.judge.asked;
    const flags = this.judge.flags[i];
    const said = [
      Number.isNaN(this.tokens.columns.d_pre[i])
        ? "D unknown: no top-K stored"
        : flags & OUTSIDE
          ? "outside"
          : "inside",
    ];
    if (flags & DISAGREEMENT) said.push("in disagreement");
    if (flags & CRITERION_UNSAFE) said.push(`▲ unsafe keep of ${criterion}`);
    if (flags & BASELINE_UNSAFE) said.push(`△ unsafe keep of ${baseline}`);
    if (this.judge.isUndetermined(i)) said.push("ΔD below the bound on its error");
    said.push(this.judge.inLoss(i) ? "in the applied loss" : "not in the applied loss");
    return el("div", { class: "badges" }, ...said.map((text) => el("span", {}, text)));
  }

  numbers(i) {
    const { tokens, judge } = this;
    const { columns, header } = tokens;
    const delta = judge.delta(i);
    const rows = [
      ["r = π/μ", written(tokens.ratio(i))],
      ["Â", written(columns.advantage[i], true)],
      ["D before", written(columns.d_pre[i])],
      ["D after", written(columns.d_pre[i] + delta)],
      ["ΔD", written(delta, true)],
      [`Ḋ ${header.shown_direction.replace("d_dot_", "")}`, written(tokens.direction(i), true)],
    ];
    if (columns.d_dot_local) {
      const local = columns.d_dot_local[i];
      rows.push(["Ḋ local", written(local, true)]);
      rows.push(["Ḋ global", written(tokens.direction(i) - local, true)]);
    }
    for (const [label, name] of [["entropy before", "pre_entropy"], ["entropy after", "post_entropy"]])
      if (columns[name]) rows.push([label, written(tokens.nats(name, i))]);
    return el(
      "dl",
      { class: "numbers" },
      ...rows.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value))),
    );
  }

  decisions(i) {
    const { judge } = this;
    const { criterion, baseline, threshold } = judge.asked;
    const lines = [...judge.rules.values()].map((rule) => {
      const known = rule.known(i);
      const masks = known && rule.masks(i, threshold);
      const chosen = rule.name === criterion || rule.name === baseline;
      return el(
        "li",
        { class: chosen ? "chosen" : null, title: rule.says },
        el("span", {}, rule.name),
        el("span", { class: masks ? "masks" : "keeps" }, !known ? "unknown" : masks ? "✕ masks" : "✓ keeps"),
      );
    });
    return el("div", {}, el("h4", {}, `Decisions at δ = ${threshold}`), el("ul", { class: "decisions" }, ...lines));
  }

  distribution(i) {
    const { tokens } = this;
    const found = tokens.topK(i);
    if (found === null) return el("p", { class: "quiet" }, this.whyNoTopK(i));
    found.sort((a, b) => b.mu - a.mu || b.pi - a.pi);
    const rest = { mu: 1, pi: 1, post: 1, rest: true };
    for (const entry of found)
      for (const name of ["mu", "pi", "post"]) rest[name] -= Number.isNaN(entry[name]) ? 0 : entry[name];
    for (const name of ["mu", "pi", "post"]) rest[name] = Math.max(0, rest[name]);
    const top = Math.max(...found.flatMap(({ mu, pi, post }) => [mu, pi, post]).filter(Number.isFinite), 1e-9);
    const arm = tokens.header.arm;
    return el(
      "table",
      { class: "topk" },
      el("caption", {}, `Top-${tokens.header.details.top_k} of μ, in per cent; π after the update of arm ${arm}`),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "token"),
          el("th", { scope: "col", class: "mu" }, "μ"),
          el("th", { scope: "col", class: "pi" }, "π before"),
          el("th", { scope: "col", class: "post" }, "π after"),
          el("th", { scope: "col", class: "bars" }, el("span", { class: "hidden" }, "bars")),
        ),
      ),
      el("tbody", {}, ...[...found, rest].map((entry) => this.row(i, entry, top))),
    );
  }

  row(i, entry, top) {
    const sampled = entry.id === this.tokens.columns.token_id[i];
    const bars = ["mu", "pi", "post"].map((name) => {
      const bar = el("i", { class: name });
      bar.style.width = `${Math.min(100, (100 * (entry[name] || 0)) / top)}%`;
      return bar;
    });
    const name = entry.rest ? "all others" : this.tokens.shownId(entry.id);
    return el(
      "tr",
      { class: entry.rest ? "rest" : sampled ? "sampled" : null },
      el(
        "th",
        { scope: "row", title: entry.rest ? null : `id ${entry.id}` },
        sampled ? "▸ " : null,
        el("bdi", { class: name.startsWith("#") && !this.tokens.textOfId.has(entry.id) ? "unread" : null }, name),
        sampled ? el("span", { class: "hidden" }, entry.beyond ? " sampled, beyond the top-K" : " sampled") : null,
      ),
      ...["mu", "pi", "post"].map((each) => el("td", {}, percent(entry[each]))),
      el("td", { class: "bars", "aria-hidden": "true" }, ...bars),
    );
  }

  whyNoTopK(i) {
    const { details } = this.tokens.header;
    if (Number.isNaN(this.tokens.columns.d_pre[i]))
      return "The dump stored no top-K log-probs of this token.";
    return (
      `The page has room for the top-K of ${plural(details.rows, "token")}, those with the ` +
      `largest D (above ${written(details.least)}); this is not one of them.`
    );
  }
}
