/* The quantity that tokens are coloured by. Signed ones have two hues, others one.
 *
 * Steps follow the square root, up to the value that 2 % of the tokens exceed.
 */

const SIDE_STEPS = 4; // a signed quantity has as many below 0 and above
const STEPS = 7;

function quantities(tokens, judge) {
  const { columns, header } = tokens;
  const unit = header.unit ? ` (${header.unit})` : "";
  const all = {
    d_pre: { label: `D before${unit}`, value: (i) => tokens.d[i] },
    delta_d: { label: `ΔD${unit}`, signed: true, value: (i) => judge.delta(i) },
    ratio: {
      label: "r, log scale",
      signed: true,
      value: (i) => Math.log1p(columns["value-ratio"][i]),
      written: (value) => brief(Math.exp(value)),
    },
    d_dot: { label: header.shown.label, signed: true, value: (i) => tokens.shownDirection[i] },
    advantage: { label: "advantage Â", signed: true, value: (i) => columns.advantage[i] },
  };
  if (columns.pre_entropy)
    all.entropy = { label: "entropy before (nats)", value: (i) => tokens.nats("pre_entropy", i) };
  all.none = { label: "nothing", value: () => NaN };
  return all;
}

class Scale {
  constructor(quantity, count) {
    this.quantity = quantity;
    const sizes = new Float64Array(count);
    let known = 0;
    for (let i = 0; i < count; i++) {
      const size = Math.abs(quantity.value(i));
      if (Number.isFinite(size)) sizes[known++] = size;
    }
    const ranked = sizes.subarray(0, known).sort();
    this.cap = known ? ranked[Math.floor(0.98 * (known - 1))] || ranked[known - 1] || 1 : 1;
  }

  /* The class of a token's colour; empty where its value is not known. */
  colour(i) {
    const value = this.quantity.value(i);
    if (Number.isNaN(value)) return "";
    const place = Math.sqrt(Math.min(1, Math.abs(value) / this.cap));
    if (!this.quantity.signed) return ` s${Math.min(STEPS - 1, Math.floor(place * STEPS))}`;
    const step = Math.round(place * SIDE_STEPS);
    return step === 0 ? " z" : value < 0 ? ` n${step}` : ` p${step}`;
  }

  /* Steps from low to high: their class, and the value at which each begins. */
  steps() {
    const { signed } = this.quantity;
    const from = (place) => Math.sign(place) * place * place * this.cap;
    if (!signed)
      return Array.from({ length: STEPS }, (_, k) => ({ name: `s${k}`, from: from(k / STEPS) }));
    return Array.from({ length: 2 * SIDE_STEPS + 1 }, (_, at) => {
      const k = at - SIDE_STEPS;
      return {
        name: k === 0 ? "z" : k < 0 ? `n${-k}` : `p${k}`,
        from: from((k - 0.5) / SIDE_STEPS),
      };
    });
  }
}

function drawLegend(place, scale) {
  const { quantity } = scale;
  const say = quantity.written ?? ((value) => brief(value, quantity.signed));
  const steps = scale.steps();
  const swatches = steps.map((step, at) => {
    const low = at === 0 && quantity.signed ? "less" : say(step.from);
    const high = at === steps.length - 1 ? "more" : say(steps[at + 1].from);
    return el("span", { class: `swatch ${step.name}`, title: `${low} to ${high}` });
  });
  const ends = quantity.signed
    ? [say(-scale.cap), say(0), say(scale.cap)]
    : [say(0), say(scale.cap / 4), say(scale.cap)];
  place.replaceChildren(
    el("span", { class: "swatches", "aria-hidden": "true" }, ...swatches),
    el("span", { class: "ends" }, ...ends.map((text) => el("span", {}, text))),
  );
  place.hidden = quantity.label === "nothing";
  place.setAttribute("aria-label", `${quantity.label}: from ${ends[0]} over ${ends[1]} to ${ends[2]}`);
}
