/* The responses, in pieces that are written only near where one looks. */

const PIECE_TOKENS = 400; // one piece holds about as many, and not more than PIECE_RESPONSES
const PIECE_RESPONSES = 24;
const LINE = 27; // pixels, for a first guess of heights
const HEAD = 22;

class ResponseList {
  constructor(place, tokens, judge) {
    this.place = place;
    this.tokens = tokens;
    this.judge = judge;
    this.scale = null;
    this.hits = null; // a byte a token where a filter chooses tokens
    this.current = -1;
    this.spans = new Map(); // what is written at the moment, by token
    this.selected = null;
    this.placeOf = new Int32Array(tokens.sequences).fill(-1);
    this.order = [];
    this.pieces = [];
    this.seen = new IntersectionObserver((entries) => this.scrolled(entries), {
      root: place,
      rootMargin: "1200px 0px",
    });
  }

  /* Show these sequences, in this order. */
  show(order, hits) {
    this.seen.disconnect();
    this.spans.clear();
    this.selected = null;
    this.order = order;
    this.hits = hits;
    this.placeOf.fill(-1);
    order.forEach((s, at) => (this.placeOf[s] = at));
    this.pieces = this.cut(order).map((parts, at) => {
      const element = el("div", { class: "piece", "data-piece": at });
      element.style.height = `${this.guess(parts)}px`;
      return { parts, element, filled: false };
    });
    this.place.replaceChildren(...this.pieces.map((piece) => piece.element));
    this.place.scrollTop = 0;
    if (this.pieces.length) this.fill(this.pieces[0]);
    for (const piece of this.pieces) this.seen.observe(piece.element);
    if (!this.isShown(this.current)) this.current = order.length ? this.tokens.start[order[0]] : -1;
    this.markCurrent();
  }

  /* Parts of responses [{s, from, to}], a list of them for every piece. */
  cut(order) {
    const pieces = [];
    let parts = [];
    let held = 0;
    const close = () => {
      if (parts.length) pieces.push(parts);
      parts = [];
      held = 0;
    };
    for (const s of order) {
      const [start, end] = [this.tokens.start[s], this.tokens.start[s + 1]];
      for (let from = start; from < end; from += PIECE_TOKENS) {
        const to = Math.min(end, from + PIECE_TOKENS);
        if (held + to - from > PIECE_TOKENS || parts.length === PIECE_RESPONSES) close();
        parts.push({ s, from, to });
        held += to - from;
      }
    }
    close();
    return pieces;
  }

  guess(parts) {
    const wide = Math.max(20, (this.place.clientWidth || 800) / 9);
    return parts.reduce((sum, { from, to }) => {
      const letters = (to - from) * (this.tokens.hasText ? 5 : 6);
      return sum + HEAD + LINE * Math.ceil(letters / wide);
    }, 0);
  }

  scrolled(entries) {
    for (const entry of entries) {
      const piece = this.pieces[entry.target.dataset.piece];
      if (piece?.element !== entry.target) continue;
      if (entry.isIntersecting) this.fill(piece);
      else this.empty(piece);
    }
  }

  fill(piece) {
    if (piece.filled) return;
    piece.filled = true;
    piece.element.style.height = "";
    piece.element.replaceChildren(...piece.parts.map((part) => this.response(part)));
    this.markCurrent();
  }

  empty(piece) {
    if (!piece.filled || piece.element.contains(document.activeElement)) return;
    piece.element.style.height = `${piece.element.offsetHeight}px`;
    piece.element.replaceChildren();
    for (const { from, to } of piece.parts) for (let i = from; i < to; i++) this.spans.delete(i);
    piece.filled = false;
  }

  response({ s, from, to }) {
    const { tokens } = this;
    const first = from === tokens.start[s];
    const name = `${this.tokens.group(s)} · response ${tokens.columns.response_sequence[s]}`;
    const body = el("div", { class: "line", role: "listbox", "aria-label": name });
    let text = "";
    let last = first ? -1 : tokens.columns.position[from - 1];
    for (let i = from; i < to; i++) {
      const gap = tokens.columns.position[i] - last - 1;
      if (gap > 0) body.append(this.gap(gap));
      last = tokens.columns.position[i];
      body.append(this.token(i));
      const said = tokens.text(i);
      if (said?.endsWith("\n")) body.append(el("br"));
      if (said) text += said;
    }
    if (readsRightToLeft(text)) body.dir = "rtl";
    const block = el("article", { class: "response", "data-sequence": s });
    if (first && this.opensGroup(s)) block.append(this.groupHead(s));
    block.append(first ? this.head(s) : el("div"), body);
    return block;
  }

  /* Whether a response is the first of its group in the order shown. */
  opensGroup(s) {
    const before = this.order[this.placeOf[s] - 1];
    if (before === undefined) return true;
    const { response_seed, response_step, response_group } = this.tokens.columns;
    return [response_seed, response_step, response_group].some((of) => of[s] !== of[before]);
  }

  groupHead(s) {
    return el("header", {}, el("span", { class: "quiet" }, this.tokens.group(s)), ...this.promptOf(s));
  }

  head(s) {
    const { tokens } = this;
    const { advantage } = tokens.columns;
    let [low, high] = [Infinity, -Infinity];
    for (let i = tokens.start[s]; i < tokens.start[s + 1]; i++) {
      low = Math.min(low, advantage[i]);
      high = Math.max(high, advantage[i]);
    }
    const sign = low > 0 ? "up" : high < 0 ? "down" : "";
    const said = low === high ? brief(low, true) : `${brief(low, true)} … ${brief(high, true)}`;
    return el(
      "div",
      { class: "head" },
      el("span", {}, `response ${tokens.columns.response_sequence[s]}`),
      el("span", { class: `advantage ${sign}` }, `Â ${said}`),
    );
  }

  promptOf(s) {
    const prompt = this.tokens.prompt(s);
    if (!prompt) return [];
    const answer =
      prompt.answer === null ? null : el("span", { class: "answer" }, `answer ${prompt.answer}`);
    const text = prompt.prompt.trim();
    if (text.length <= 140 && !text.includes("\n"))
      return [el("div", { class: "prompt" }, el("bdi", {}, text), answer)];
    const end = text.slice(-110).split("\n").at(-1);
    return [
      el(
        "details",
        { class: "prompt" },
        el("summary", {}, el("bdi", {}, `… ${end}`), answer),
        el("pre", { dir: "auto" }, text),
      ),
    ];
  }

  gap(missing) {
    return el(
      "span",
      { class: "gap", title: `${plural(missing, "token")} not on the page`, role: "presentation" },
      `⋯${missing}`,
    );
  }

  token(i) {
    const span = el("span", { role: "option", "data-token": i, tabindex: -1 }, this.tokens.shown(i));
    span.className = this.look(i);
    this.spans.set(i, span);
    return span;
  }

  /* The classes of a token: its colour, and its marks, which are shapes. */
  look(i) {
    let name = this.tokens.hasText ? "t" : "t id";
    for (const mark of this.judge.marks(i)) name += ` ${mark.name}`;
    if (this.hits && !this.hits[i]) name += " faint";
    return name + this.scale.colour(i);
  }

  /* Colour and mark again what is written at the moment. */
  repaint() {
    for (const [i, span] of this.spans) {
      const name = this.look(i);
      if (span.className !== name) span.className = name;
    }
  }

  isShown(i) {
    return i >= 0 && this.placeOf[this.tokens.sequenceOf[i]] >= 0;
  }

  element(i) {
    return this.spans.get(i);
  }

  /* Write the piece that holds a token, if need be, and give its element. */
  reveal(i) {
    const s = this.tokens.sequenceOf[i];
    const piece = this.pieces.find(({ parts }) =>
      parts.some((part) => part.s === s && part.from <= i && i < part.to),
    );
    if (!piece) return null;
    this.fill(piece);
    return this.element(i);
  }

  /* Make a token the one that Tab reaches. */
  markCurrent() {
    const span = this.element(this.current);
    if (span === this.selected) return;
    this.selected?.removeAttribute("aria-selected");
    if (this.selected) this.selected.tabIndex = -1;
    this.selected = span;
    if (!span) return;
    span.setAttribute("aria-selected", "true");
    span.tabIndex = 0;
  }

  focus(i) {
    const span = this.reveal(i);
    if (!span) return;
    this.current = i;
    this.markCurrent();
    span.focus({ preventScroll: true });
    span.scrollIntoView({ block: "nearest", behavior: "instant" });
  }

  /* The token `steps` (1 or −1) on in the order shown; −1 at the end. */
  beside(i, steps) {
    const s = this.tokens.sequenceOf[i];
    const next = i + steps;
    if (next >= this.tokens.start[s] && next < this.tokens.start[s + 1]) return next;
    const other = this.order[this.placeOf[s] + steps];
    if (other === undefined) return -1;
    return steps > 0 ? this.tokens.start[other] : this.tokens.start[other + 1] - 1;
  }

  /* The first token of a response further on. */
  responseBeside(i, steps) {
    const other = this.order[this.placeOf[this.tokens.sequenceOf[i]] + steps];
    return other === undefined ? -1 : this.tokens.start[other];
  }

  /* The next token, in the order shown, of which something holds. */
  find(i, steps, holds) {
    for (let at = this.beside(i, steps); at >= 0; at = this.beside(at, steps))
      if (holds(at)) return at;
    return -1;
  }

  /* The token in the line above (−1) or below (1) that stands nearest. */
  vertical(i, steps) {
    const here = this.element(i)?.getBoundingClientRect();
    if (!here) return -1;
    const middle = (here.left + here.right) / 2;
    let best = -1;
    let bestDistance = Infinity;
    let line = null;
    for (let at = this.beside(i, steps); at >= 0; at = this.beside(at, steps)) {
      const box = this.reveal(at)?.getBoundingClientRect();
      if (!box) break;
      const beyond = steps > 0 ? box.top > here.top + 4 : box.top < here.top - 4;
      if (!beyond) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) > 4) break;
      const distance = Math.abs((box.left + box.right) / 2 - middle);
      if (distance < bestDistance) [best, bestDistance] = [at, distance];
    }
    return best;
  }
}
