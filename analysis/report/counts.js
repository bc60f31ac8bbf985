/* The counts beside the threshold, as the analysis makes them. */

function drawCounts(place, totals, asked) {
  const put = (name, text) => {
    for (const spot of place.querySelectorAll(`[data-count="${name}"]`))
      if (spot.textContent !== text) spot.textContent = text;
  };
  put("tokens", whole(totals.tokens));
  put("outside", whole(totals.outside));
  put("disagreement", whole(totals.disagreement));
  for (const set of ["outside", "disagreement"]) {
    const base = totals[set] ? totals[`${set}Increase`] / totals[set] : NaN;
    put(`${set}-base`, share(base));
    put(`${set}-guess`, share(Math.max(base, 1 - base)));
    put(`${set}-increase`, whole(totals[`${set}Increase`]));
  }
  for (const side of ["criterion", "baseline"]) {
    const sum = totals[side];
    put(`${side}-name`, asked[side]);
    for (const name of ["kept", "unsafe", "contracting"]) put(`${side}-${name}`, whole(sum[name]));
    put(`${side}-rate`, share(sum.rate));
    put(`${side}-seeds`, `${sum.seeds} of ${totals.seeds.length}`);
    put(`${side}-fraction`, share(sum.contractingFraction));
  }
  const { paired } = totals;
  put("paired", `${paired.lower} / ${paired.tied} / ${paired.higher} of ${plural(paired.seeds, "seed")}`);
  put("difference", signedShare(paired.difference));
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
