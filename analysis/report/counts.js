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
  const putUndetermined = (name, sum) =>
    putCount(`${name}-undetermined`, totals.bounded ? sum.undetermined : NaN);
  const putShare = (name, value) => put(name, share(value), value);
  putCount("tokens", totals.tokens);
  for (const set of ["outside", "disagreement"]) {
    const base = rate(totals[set]);
    putCount(set, totals[set].tokens);
    putUndetermined(set, totals[set]);
    putShare(`${set}-base`, base);
    putShare(`${set}-guess`, Math.max(base, 1 - base));
  }
  for (const side of ["criterion", "baseline"]) {
    const sum = totals[side];
    put(`${side}-name`, asked[side]);
    putCount(`${side}-kept`, sum.tokens);
    putUndetermined(side, sum);
    putCount(`${side}-unsafe`, sum.increase);
    putCount(`${side}-contracting`, sum.decrease);
    putShare(`${side}-rate`, sum.rate);
    put(`${side}-seeds`, `${sum.seeds} of ${totals.seeds.length}`, sum.seeds);
    putShare(`${side}-fraction`, rate(sum, "decrease"));
  }
  const { paired } = totals;
  const { lower, tied, higher, seeds } = paired;
  put("paired", `${lower} / ${tied} / ${higher} of ${plural(seeds, "seed")}`, `${lower} ${tied} ${higher}`);
  put("difference", signedShare(paired.difference), paired.difference);
  place.querySelector("[data-weighted]").hidden = !totals.weighted;
}

/* Where no arm has bounds on the error of ΔD, nothing is said of what is undetermined. */
function leaveOutBounds(place) {
  for (const spot of place.querySelectorAll("[data-bounds]")) spot.remove();
  for (const head of place.querySelectorAll('[scope="colgroup"]')) head.colSpan -= 1;
}

function drawSeeds(body, totals, hasBounds) {
  body.replaceChildren(
    ...totals.seeds.map((seed) => {
      const cells = [seed.tokens, seed.outside.tokens, seed.disagreement.tokens];
      for (const side of ["criterion", "baseline"]) {
        const { tokens, undetermined, increase, decrease } = seed[side];
        cells.push(tokens);
        if (hasBounds) cells.push(totals.bounded ? undetermined : NaN);
        cells.push(increase, decrease, share(rate(seed[side])));
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
