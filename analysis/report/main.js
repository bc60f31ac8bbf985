/* Put the page together. */

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
