/* Numbers and tokens in writing, and elements made of them. Text is always a text node. */

const DASH = "–";

function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function minus(text) {
  return text.replace("-", "−");
}

/* Four digits, a sign where asked for, powers of ten where it is very small or large. */
function written(value, signed = false) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? DASH : minus(String(value));
  const size = Math.abs(value);
  const text =
    size !== 0 && (size < 1e-4 || size >= 1e5) ? value.toExponential(2) : rounded(value, size);
  return minus(signed && value > 0 ? `+${text}` : text);
}

function rounded(value, size) {
  const digits = size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return value.toFixed(digits);
}

/* Three digits, as few as will do. */
function brief(value, signed = false) {
  const text = String(Number(value.toPrecision(3)));
  return minus(signed && value > 0 ? `+${text}` : text);
}

function share(value) {
  return Number.isFinite(value) ? value.toFixed(3) : DASH;
}

function signedShare(value) {
  return Number.isFinite(value) ? minus((value > 0 ? "+" : "") + value.toFixed(3)) : DASH;
}

function percent(p) {
  if (p === null || !Number.isFinite(p)) return DASH;
  if (p > 0 && p < 5e-5) return "<0.01";
  return (100 * p).toFixed(2);
}

function whole(count) {
  return Number.isNaN(count) ? DASH : count.toLocaleString("en");
}

function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/* What cannot be seen gets a sign that can: spaces, newlines, controls, marks of direction. */
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00a0\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ue000-\uf8ff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll(" ", "·").replace(UNSEEN, (found) => {
    const code = found.charCodeAt(0);
    if (code === 10) return "⏎";
    if (code === 13) return "␍";
    if (code === 9) return "⇥";
    if (code < 32) return String.fromCharCode(0x2400 + code);
    if (code === 127) return "␡";
    return `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/g;
const LETTERS = /\p{L}/gu;

function readsRightToLeft(text) {
  return 2 * (text.match(RIGHT_TO_LEFT) ?? []).length > (text.match(LETTERS) ?? []).length;
}
