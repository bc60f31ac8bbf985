/* The keyboard and the pointer, over the responses. */

function listenToTokens(list, inspector) {
  const tokenOf = (event) => {
    const span = event.target.closest?.("[data-token]");
    return span ? Number(span.dataset.token) : -1;
  };
  list.place.addEventListener("pointerover", (event) => {
    const i = tokenOf(event);
    if (i >= 0 && event.pointerType === "mouse") inspector.show(i);
  });
  list.place.addEventListener("pointerleave", () => {
    if (list.place.contains(document.activeElement) && list.isShown(list.current))
      inspector.show(list.current);
  });
  list.place.addEventListener("click", (event) => {
    const i = tokenOf(event);
    if (i >= 0) go(list, inspector, i);
  });
  list.place.addEventListener("focusin", (event) => {
    const i = tokenOf(event);
    if (i < 0) return;
    list.current = i;
    list.markCurrent();
    describe(list, event.target, i);
    inspector.show(i);
  });
}

/* Say to those who cannot see the marks what they say. */
function describe(list, span, i) {
  const said = [list.tokens.shown(i), `D ${written(list.tokens.d[i])}`, ...list.judge.said(i)];
  span.setAttribute("aria-label", said.join(", "));
}

function go(list, inspector, i) {
  if (i < 0) return;
  list.focus(i);
  inspector.show(i);
}

function listenToKeys(list, inspector, controls) {
  const help = document.getElementById("help");
  document.querySelector("[data-help]").addEventListener("click", () => help.showModal());
  const here = () => (list.isShown(list.current) ? list.current : list.order.length ? list.tokens.start[list.order[0]] : -1);
  const disagrees = (i) => (list.judge.flags[i] & DISAGREEMENT) !== 0;
  const isHit = (i) => list.hits === null || list.hits[i] === 1;
  const ends = (i) => {
    const s = list.tokens.sequenceOf[i];
    return [list.tokens.start[s], list.tokens.start[s + 1] - 1];
  };
  const anywhere = {
    j: (i) => list.responseBeside(i, 1),
    k: (i) => list.responseBeside(i, -1),
    n: (i) => list.find(i, 1, disagrees),
    p: (i) => list.find(i, -1, disagrees),
    "]": (i) => list.find(i, 1, isHit),
    "[": (i) => list.find(i, -1, isHit),
  };
  const onToken = {
    ArrowRight: (i) => list.beside(i, 1),
    ArrowLeft: (i) => list.beside(i, -1),
    ArrowDown: (i) => list.vertical(i, 1),
    ArrowUp: (i) => list.vertical(i, -1),
    Home: (i) => ends(i)[0],
    End: (i) => ends(i)[1],
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const target = event.target;
    if (target.matches?.("input:not([type=range]), select, textarea")) {
      if (event.key === "Escape") target.blur();
      return;
    }
    const inList = list.place.contains(target);
    const step = anywhere[event.key] ?? (inList ? onToken[event.key] : undefined);
    if (step) {
      event.preventDefault();
      const from = here();
      if (from >= 0) go(list, inspector, inList || !"jknp".includes(event.key) ? step(from) : first(from, event.key));
    } else if (event.key === "?") help.showModal();
    else if (event.key === "c") controls.nextColour();
    else if (event.key === "Escape") inspector.close();
    else if (event.key === "/") {
      event.preventDefault();
      controls.get("text").focus();
    } else if (event.key === "Enter" && inList) inspector.show(here());
  });
  /* From outside of the responses a key first goes to where one was, if that fits. */
  function first(from, key) {
    if ("jk".includes(key) || disagrees(from)) return from;
    return anywhere[key](from);
  }
}

function listenToTheme() {
  const root = document.documentElement;
  const button = document.querySelector("[data-theme-toggle]");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const say = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(isDark()));
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    say();
  });
  system.addEventListener("change", say);
  say();
}

/* Within a notebook a link to a place of the page would leave it. */
function listenToLinks() {
  for (const link of document.querySelectorAll('a[href^="#"]'))
    link.addEventListener("click", (event) => {
      event.preventDefault();
      document.querySelector(link.getAttribute("href"))?.scrollIntoView();
    });
}

async function start() {
  listenToTheme();
  listenToLinks();
  const viewer = document.getElementById("viewer");
  if (!viewer) return;
  const begun = performance.now();
  try {
    const header = readHeader();
    const tokens = new Tokens(header, await readColumns(header));
    const judge = new Judge(tokens);
    const list = new ResponseList(document.querySelector("[data-responses]"), tokens, judge);
    const inspector = new Inspector(document.querySelector("[data-inspector]"), tokens, judge);
    const controls = new Controls(viewer, tokens, judge, list, inspector);
    listenToTokens(list, inspector);
    listenToKeys(list, inspector, controls);
    controls.decide({ refilter: true });
    viewer.dataset.ready = (performance.now() - begun).toFixed(0);
  } catch (error) {
    const note = el("p", { class: "failed", role: "alert" }, `The token viewer cannot start: ${error.message}`);
    viewer.prepend(note);
    throw error;
  }
}

start();
