/* What a reader sets, and what follows from it. */

const SLIDER_STEPS = 1000;

class Controls {
  constructor(place, tokens, judge, list, inspector) {
    Object.assign(this, { place, tokens, judge, list, inspector });
    this.quantities = quantities(tokens, judge);
    const { header } = tokens;
    const largest = tokens.d.reduce((top, d) => (d > top ? d : top), 0);
    this.least = header.floor > 0 ? header.floor : 0.001;
    this.most = Math.max(1.5 * header.threshold, largest, 2 * this.least, 0.3);
    this.threshold = header.threshold;
    this.pending = 0;
    buildCounts(place, judge.hasBounds);
    this.fillIn();
    this.listen();
  }

  get(name) {
    return this.place.querySelector(`[data-set="${name}"]`);
  }

  fillIn() {
    const { header } = this.tokens;
    const names = header.rules.map(({ name }) => [name, name]);
    this.options("criterion", names, header.criterion);
    this.options("baseline", names, header.baseline);
    this.options("arm", header.arms.map((name, at) => [String(at), name]), "0");
    const colours = Object.entries(this.quantities).map(([name, { label }]) => [name, label]);
    this.options("colour", colours, "d_pre");
    const masked = header.rules.map(({ name }) => [MASKED + name, `masked by ${name}`]);
    this.options("decision", [...DECISIONS, ...masked], "");
    this.options("sort", SORTS, "recorded");
    const seeds = header.seeds.map(({ seed }) => [String(seed), String(seed)]);
    this.options("seed", [["", "all"], ...seeds], "");
    this.get("slider").max = SLIDER_STEPS;
    this.get("threshold").min = header.floor;
    if (!this.tokens.hasText) this.get("text").placeholder = "token id";
    this.showThreshold();
  }

  options(name, entries, chosen) {
    this.get(name).replaceChildren(
      ...entries.map(([value, label]) => el("option", { value, selected: value === chosen }, label)),
    );
  }

  listen() {
    this.get("slider").addEventListener("input", (event) =>
      this.setThreshold(this.atSlider(Number(event.target.value))),
    );
    this.get("threshold").addEventListener("change", (event) => {
      const typed = event.target.value.trim();
      this.setThreshold(typed === "" ? NaN : Number(typed));
    });
    this.place
      .querySelector("[data-reset]")
      .addEventListener("click", () => this.setThreshold(this.tokens.header.threshold));
    for (const name of ["criterion", "baseline", "arm"])
      this.get(name).addEventListener("change", () => this.later({ refilter: true }));
    this.get("colour").addEventListener("change", () => this.recolour());
    for (const name of ["decision", "sort", "seed"])
      this.get(name).addEventListener("change", () => this.refilter());
    for (const name of ["step", "group", "sequence", "text"])
      this.get(name).addEventListener("input", () => this.refilter());
    this.place.querySelector("[data-clear]").addEventListener("click", () => this.clear());
  }

  /* The slider's thresholds: three digits, evenly spaced in the logarithm. */
  atSlider(place) {
    if (place <= 0) return this.tokens.header.floor;
    const value = this.least * (this.most / this.least) ** (place / SLIDER_STEPS);
    return Math.max(this.tokens.header.floor, Number(value.toPrecision(3)));
  }

  onSlider(threshold) {
    if (threshold <= this.least) return threshold <= this.tokens.header.floor ? 0 : 1;
    const place = Math.log(threshold / this.least) / Math.log(this.most / this.least);
    return Math.round(SLIDER_STEPS * Math.min(1, place));
  }

  setThreshold(asked) {
    const { floor, floor_reason, unit } = this.tokens.header;
    const note = this.place.querySelector("[data-note]");
    note.textContent = "";
    if (Number.isNaN(asked)) note.textContent = "δ must be a number.";
    else if (asked < floor)
      note.textContent = `δ stops at ${floor}${unit ? ` ${unit}` : ""}: ${floor_reason}.`;
    else if (asked === floor && floor > 0) note.textContent = `The least δ here: ${floor_reason}.`;
    if (!Number.isNaN(asked)) this.threshold = Math.max(floor, asked);
    this.showThreshold();
    this.later({ refilter: this.get("decision").value !== "" || this.isSortedByFlags() });
  }

  isSortedByFlags() {
    return this.get("sort").value in FLAGGED;
  }

  showThreshold() {
    this.get("threshold").value = String(this.threshold);
    this.get("slider").value = this.onSlider(this.threshold);
    const { unit } = this.tokens.header;
    this.get("slider").setAttribute("aria-valuetext", `δ = ${this.threshold}${unit ? ` ${unit}` : ""}`);
  }

  /* Once a frame at most, however fast the slider moves. */
  later(what) {
    this.todo = { ...this.todo, ...(what.refilter ? what : {}) };
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      const todo = this.todo;
      this.todo = {};
      this.decide(todo);
    });
  }

  decide({ refilter }) {
    const begun = performance.now();
    const asked = {
      threshold: this.threshold,
      criterion: this.get("criterion").value,
      baseline: this.get("baseline").value,
      arm: Number(this.get("arm").value),
    };
    const totals = this.judge.judge(asked);
    drawCounts(this.place, totals, asked);
    const chosen = new Set([asked.criterion, asked.baseline]);
    const notes = [...chosen].map((name) => this.judge.rules.get(name).note);
    this.place.querySelector("[data-fixed]").textContent = notes.join(" ").trim();
    this.place.dataset.countMs = (performance.now() - begun).toFixed(1);
    if (refilter) {
      this.recolour(false);
      this.refilter();
    } else this.list.repaint();
    this.inspector.refresh();
    this.place.dataset.totalMs = (performance.now() - begun).toFixed(1);
    this.place.dataset.decided = String(this.threshold);
  }

  recolour(repaint = true) {
    const quantity = this.quantities[this.get("colour").value];
    this.list.scale = new Scale(quantity, this.tokens.count);
    drawLegend(document.querySelector("[data-legend]"), this.list.scale);
    if (repaint) this.list.repaint();
  }

  refilter() {
    const number = (name) => {
      const value = this.get(name).value.trim();
      return value === "" ? null : Number(value);
    };
    const asked = { decision: this.get("decision").value, text: this.get("text").value };
    for (const name of ["seed", "step", "group", "sequence"]) asked[name] = number(name);
    asked.sort = this.get("sort").value;
    const found = filtered(this.tokens, this.judge, asked);
    this.list.show(found.order, found.hits);
    const said =
      `${whole(found.order.length)} of ${plural(this.tokens.sequences, "response")}, ` +
      `${plural(found.tokens, "token")}`;
    document.querySelector("[data-found]").textContent = found.order.length
      ? said
      : `${said}: nothing fits these filters`;
  }

  clear() {
    for (const name of ["decision", "seed", "step", "group", "sequence", "text"]) this.get(name).value = "";
    this.get("sort").value = "recorded";
    this.refilter();
  }

  nextColour() {
    const select = this.get("colour");
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    this.recolour();
  }
}

const SIDES = { criterion: "▲", baseline: "△" };

/* Columns about what a side keeps; `short` heads those that are there by seed, too. */
const KEPT = [
  { name: "kept", head: "kept", short: "kept", of: (sum) => sum.tokens },
  { name: "undetermined", head: "undetermined, in no rate", short: "undet.", of: (sum) => sum.undetermined },
  { name: "unsafe", head: "unsafe, ΔD > 0", short: "unsafe", of: (sum) => sum.increase },
  { name: "contracting", head: "contracting, ΔD < 0", short: "contr.", of: (sum) => sum.decrease },
  { name: "fraction", head: "contracting fraction, pooled", of: (sum) => rate(sum, "down"), say: share },
  { name: "rate", head: "unsafe-keep rate, mean over seeds", short: "rate", of: (sum) => sum.rate, say: share },
  { name: "seeds", head: "seeds with a rate", of: (sum) => sum.seeds },
];

/* Where no arm has bounds on the error of ΔD, nothing is said of what is undetermined. */
function buildCounts(place, hasBounds) {
  if (!hasBounds) {
    for (const spot of place.querySelectorAll("[data-bounds]")) spot.remove();
    KEPT.splice(1, 1);
  }
  const head = (text, more) => el("th", { scope: "col", ...more }, text);
  const name = (side) => [`${SIDES[side]} `, el("span", { "data-count": `${side}-name` })];
  const sides = Object.keys(SIDES);
  place.querySelector("[data-sides]").append(
    el("thead", {}, el("tr", {}, head("of the kept disagreement tokens"), ...KEPT.map((each) => head(each.head)))),
    el("tbody", {}, ...sides.map((side) =>
      el("tr", {}, el("th", { scope: "row" }, ...name(side)),
        ...KEPT.map((each) => el("td", { "data-count": `${side}-${each.name}` }))))),
  );
  const short = KEPT.filter((each) => each.short);
  place.querySelector("[data-by-seed]").append(
    el("thead", {},
      el("tr", {}, ...["seed", "tokens", "outside", "in disagreement"].map((text) => head(text, { rowspan: 2 })),
        ...sides.map((side) => el("th", { scope: "colgroup", colspan: short.length }, ...name(side)))),
      el("tr", {}, ...sides.flatMap(() => short.map((each) => head(each.short))))),
    el("tbody", { "data-seeds": true }),
  );
}

/* What is written is rounded; `data-value` holds every digit. */
function drawCounts(place, totals, asked) {
  const put = (name, value, text = whole(value)) => {
    for (const spot of place.querySelectorAll(`[data-count="${name}"]`)) {
      spot.textContent = text;
      spot.dataset.value = value;
    }
  };
  const of = (column, sum) => (column.name === "undetermined" && !totals.bounded ? NaN : column.of(sum));
  put("tokens", totals.tokens);
  for (const set of ["outside", "disagreement"]) {
    const base = rate(totals[set]);
    const guess = Math.max(base, 1 - base);
    put(set, totals[set].tokens);
    put(`${set}-undetermined`, totals.bounded ? totals[set].undetermined : NaN);
    put(`${set}-base`, base, share(base));
    put(`${set}-guess`, guess, share(guess));
  }
  for (const side in SIDES) {
    put(`${side}-name`, "", asked[side]);
    for (const each of KEPT) {
      const value = of(each, totals[side]);
      put(`${side}-${each.name}`, value, (each.say ?? whole)(value));
    }
  }
  const { lower, tied, higher, seeds, difference } = totals.paired;
  put("paired", `${lower} ${tied} ${higher}`, `${lower} / ${tied} / ${higher} of ${plural(seeds, "seed")}`);
  put("difference", difference, signedShare(difference));
  place.querySelector("[data-weighted]").hidden = !totals.weighted;
  place.querySelector("[data-seeds]").replaceChildren(
    ...totals.seeds.map((seed) => {
      const cells = [seed.tokens, seed.outside.tokens, seed.disagreement.tokens].map(whole);
      for (const side in SIDES)
        for (const each of KEPT)
          if (each.short) cells.push((each.say ?? whole)(of(each, seed[side])));
      return el(
        "tr",
        { "data-seed": seed.seed },
        el("th", { scope: "row" }, String(seed.seed)),
        ...cells.map((text) => el("td", {}, text)),
      );
    }),
  );
}
