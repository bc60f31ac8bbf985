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
  const { flags, asked } = list.judge;
  const marks = [];
  if (flags[i] & OUTSIDE) marks.push("outside");
  if (flags[i] & DISAGREEMENT) marks.push("in disagreement");
  if (flags[i] & CRITERION_UNSAFE) marks.push(`unsafe keep of ${asked.criterion}`);
  if (flags[i] & BASELINE_UNSAFE) marks.push(`unsafe keep of ${asked.baseline}`);
  if (list.judge.isUndetermined(i)) marks.push("ΔD undetermined");
  const d = written(list.tokens.columns.d_pre[i]);
  span.setAttribute("aria-label", [list.tokens.shown(i), `D ${d}`, ...marks].join(", "));
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
