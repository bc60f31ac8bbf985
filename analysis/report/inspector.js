/* What is known of one token: numbers, decisions, and the top-K of three policies. */

const POLICIES = { mu: "μ", pi: "π before", post: "π after" };

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
    const where = `${tokens.group(s)} · response ${columns.response_sequence[s]} · position ${columns.position[i]}`;
    return el(
      "div",
      { class: "token-title" },
      el("bdi", { class: "glyph" }, tokens.shown(i)),
      el("span", { class: "quiet" }, `id ${columns.token_id[i]}`),
      el("div", { class: "quiet where" }, where),
    );
  }

  badges(i) {
    const said = this.judge.said(i);
    if (Number.isNaN(this.tokens.d[i])) said.unshift("D unknown: no top-K log-probs stored");
    else if (!(this.judge.flags[i] & OUTSIDE)) said.unshift("inside");
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
      ["D before", written(tokens.d[i])],
      ["D after", written(tokens.d[i] + delta)],
      ["ΔD", written(delta, true)],
      ["Ḋ", written(tokens.shownDirection[i], true), header.shown.label],
    ];
    if (columns.d_dot_local) {
      const local = columns.d_dot_local[i];
      rows.push(["Ḋ local", written(local, true)]);
      rows.push(["Ḋ global", written(tokens.shownDirection[i] - local, true)]);
    }
    for (const [label, name] of [["entropy before", "pre_entropy"], ["entropy after", "post_entropy"]])
      if (columns[name]) rows.push([label, written(tokens.nats(name, i))]);
    return el(
      "dl",
      { class: "numbers" },
      ...rows.map(([label, value, title]) =>
        el("div", { title }, el("dt", {}, label), el("dd", {}, value)),
      ),
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
    const rest = { rest: true };
    let top = 1e-9;
    for (const name in POLICIES) {
      const known = found.map((entry) => entry[name]).filter(Number.isFinite);
      rest[name] = known.length ? Math.max(0, known.reduce((left, each) => left - each, 1)) : NaN;
      top = Math.max(top, ...known);
    }
    const heads = Object.entries(POLICIES).map(([name, text]) => el("th", { scope: "col", class: name }, text));
    return el(
      "table",
      { class: "topk" },
      el("caption", {}, `Top-${tokens.header.details.top_k} of μ, in per cent; π after the update of arm ${tokens.header.arm}`),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "token"), ...heads,
        el("th", { scope: "col", class: "bars" }, el("span", { class: "hidden" }, "bars")))),
      el("tbody", {}, ...[...found, rest].map((entry) => this.row(i, entry, top))),
    );
  }

  row(i, entry, top) {
    const { tokens } = this;
    const sampled = entry.id === tokens.columns.token_id[i];
    const bars = Object.keys(POLICIES).map((name) => {
      const bar = el("i", { class: name });
      bar.style.width = `${Math.min(100, (100 * (entry[name] || 0)) / top)}%`;
      return bar;
    });
    const unread = !entry.rest && !tokens.textOfId.has(entry.id);
    const name = entry.rest ? "all others" : tokens.shownId(entry.id);
    const words = entry.beyond ? " sampled, beyond the top-K" : " sampled";
    return el(
      "tr",
      { class: entry.rest ? "rest" : sampled ? "sampled" : null },
      el("th", { scope: "row", title: entry.rest ? null : `id ${entry.id}` },
        sampled ? "▸ " : null,
        el("bdi", { class: unread ? "unread" : null }, name),
        sampled ? el("span", { class: "hidden" }, words) : null),
      ...Object.keys(POLICIES).map((each) => el("td", {}, percent(entry[each]))),
      el("td", { class: "bars", "aria-hidden": "true" }, ...bars),
    );
  }

  whyNoTopK(i) {
    const { details } = this.tokens.header;
    if (details.least === null || Number.isNaN(this.tokens.d[i]))
      return "The dump stores no top-K log-probs of this token.";
    return (
      `The page has room for the top-K of ${plural(details.rows, "token")}, those with the ` +
      `largest D (above ${written(details.least)}); this is not one of them.`
    );
  }
}
