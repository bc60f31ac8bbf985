/* The counts beside the threshold, as the analysis makes them. */

function drawCounts(place, totals, asked) {
  /* What is written is rounded; `data-value` holds every digit. */
  const put = (name, text, value = "") => {
    for (const spot of place.querySelectorAll(`[data-count="${name}"]`)) {
      spot.textContent = text;
      spot.dataset.value = value;
    }
  };
  const putCount = (name, value) => put(name, whole(value), value);
  const putShare = (name, value) => put(name, share(value), value);
  putCount("tokens", totals.tokens);
  for (const set of ["outside", "disagreement"]) {
    const base = totals[set] ? totals[`${set}Increase`] / totals[set] : NaN;
    putCount(set, totals[set]);
    putShare(`${set}-base`, base);
    putShare(`${set}-guess`, Math.max(base, 1 - base));
  }
  for (const side of ["criterion", "baseline"]) {
    const sum = totals[side];
    put(`${side}-name`, asked[side]);
    for (const name of ["kept", "unsafe", "contracting"]) putCount(`${side}-${name}`, sum[name]);
    putShare(`${side}-rate`, sum.rate);
    put(`${side}-seeds`, `${sum.seeds} of ${totals.seeds.length}`, sum.seeds);
    putShare(`${side}-fraction`, sum.contractingFraction);
  }
  const { paired } = totals;
  const { lower, tied, higher, seeds } = paired;
  put("paired", `${lower} / ${tied} / ${higher} of ${plural(seeds, "seed")}`, `${lower} ${tied} ${higher}`);
  put("difference", signedShare(paired.difference), paired.difference);
}

function drawSeeds(body, totals) {
  body.replaceChildren(
    ...totals.seeds.map((seed) => {
      const cells = [seed.tokens, seed.outside, seed.disagreement];
      for (const side of ["criterion", "baseline"]) {
        const { kept, unsafe, contracting } = seed[side];
        cells.push(kept, unsafe, contracting, share(rate(seed[side])));
      }
      return el(
        "tr",
        { "data-seed": seed.seed },
        el("th", { scope: "row" }, String(seed.seed)),
        ...cells.map((cell) => el("td", {}, typeof cell === "number" ? whole(cell) : cell)),
      );
    }),
  );
}
