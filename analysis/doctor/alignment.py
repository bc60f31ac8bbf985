"""Which tokens the two sides speak of: misaligned rows, ids that mean other tokens."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .evidence import FEWEST, Bools, Evidence, Floats, Ints, correlation
from .findings import DISTANCE, Cause, Finding, finding
from .sampling import is_cut

DISTANCES: Final = (1, -1, 2, -2, 3, -3)  # shifts that are tried
PAIRS: Final = 4000  # pairs of rows looked at for one shift


@Cause(
    "lost-rows", 0, size="", needs="arms",
    advice="Record these arms again, or copy what is missing from where they were recorded; "
    "`deltad check RUN` names the seeds and tokens.",
)  # fmt: skip
def lost_rows(evidence: Evidence) -> Finding | None:
    """The arms of the dump do not hold the same tokens, so they cannot be compared."""
    unlike = evidence.sample.unlike
    return finding(1.0, len(evidence), found=unlike) if unlike else None


@Cause(
    "shift", 4, size="d", needs="neighbors",
    advice="Align labels and logits (the logits at t − 1 predict the token at t), and compare the "
    "prompt's ids on both sides: chat template, BOS, EOS, left padding.",
    explains=DISTANCE
    | {"vocabulary", "truncation", "topk-convention", "impossible-values", "concentration"},
)  # fmt: skip
def shift(evidence: Evidence) -> Finding | None:
    """The policy's rows are misaligned with the behavior's."""
    if not len(evidence.rows):
        return None
    if evidence.misplaced > 0.2:
        return _rolled(evidence)
    share, d, pairs, start = 0.0, 0, 0, False
    tried = {}
    for distance in DISTANCES:
        nearer, position = _votes(evidence, distance)
        if len(nearer):
            tried[str(distance)] = float(nearer.mean())
        # Of all rows, and of the first ones alone where they tell more
        for chosen, margin in ((nearer, 0.0), (nearer[position < abs(distance)], 0.05)):
            if len(chosen) >= 10 and (not pairs or chosen.mean() > share + margin):
                share, d, pairs, start = float(chosen.mean()), distance, len(chosen), margin > 0
    if share > 0.6 and (share - 0.5) * 2 * np.sqrt(pairs) > 3:
        return finding(
            min(0.98, 0.5 + 0.5 * share), pairs, d,
            pattern="the first rows of responses" if start else "all rows",
            nearer_to_t_minus_d=share, pairs=pairs, tried=tried,
        )  # fmt: skip
    return _entropy_shift(evidence) or _misaligned_start(evidence, tried)


def _votes(evidence: Evidence, d: int) -> tuple[Bools, Ints]:
    """Whether π at t follows μ at t − d or at t, where it takes sides; position of t."""
    rows, others = evidence.neighbours(d)
    if len(rows) > PAIRS:
        pick = np.linspace(0, len(rows) - 1, PAIRS).astype(np.int64)
        rows, others = rows[pick], others[pick]
    taken, some = _sides(
        evidence, rows, evidence.looked_up(others, evidence.ids[rows], evidence.mu)
    )
    return taken, evidence.sample["position"][rows][some]


def _sides(evidence: Evidence, rows: Ints, theirs: Floats) -> tuple[Bools, Bools]:
    """Whether π follows other values than the row's own μ, over the ids that both have.

    By correlation, which no temperature and no offset changes, and by distance. Of the rows that
    take sides, and which these are, shape (row,).
    """
    own, policy = evidence.mu[rows], evidence.pi[rows]
    shared = evidence.usable[rows] & np.isfinite(theirs)
    gap = np.abs(np.where(shared, theirs - own, 0.0))
    # Only where the two differ can π take sides.
    tells = (shared.sum(axis=1) >= 3) & (gap.max(axis=1, initial=0) > 1.0)
    with_own, with_theirs = (correlation(policy, each, shared) for each in (own, theirs))
    to_own, to_theirs = (
        np.where(shared, np.abs(policy - each), 0.0).sum(axis=1) for each in (own, theirs)
    )
    others = (with_theirs > np.maximum(with_own + 0.25, 0.6)) & (to_theirs < 0.7 * to_own)
    mine = (with_own > with_theirs) | (to_own < to_theirs)
    some = tells & (others | mine)
    return others[some], some


def _rolled(evidence: Evidence) -> Finding | None:
    """The policy's scalar at t is its list's entry where the token at t − d is listed."""
    slot = np.where(evidence.is_listed, evidence.sampled_slot.argmax(axis=1), -1)
    shares, pairs = {}, {}
    for d in DISTANCES:
        rows, others = evidence.neighbours(d)
        tells = (slot[others] >= 0) & (slot[others] != slot[rows])
        rows, others = rows[tells], others[tells]
        if len(rows) >= 6:
            gap = np.abs(evidence.pi[rows, slot[others]] - evidence.pi_token[rows])
            shares[d], pairs[d] = float((gap < 1e-4).mean()), len(rows)
    d = max(shares, key=lambda each: shares[each], default=0)
    if not shares or shares[d] < 0.7:
        return None
    return finding(
        0.97, pairs[d], d,
        pattern="rows stored at another place", agree_at_t_minus_d=shares[d], pairs=pairs[d],
        tried={str(each): share for each, share in shares.items()},
    )  # fmt: skip


def _entropy_shift(evidence: Evidence) -> Finding | None:
    """π's entropy at t follows that of μ's list at t − d, and not that at t.

    Needs no id that two lists share, as their log-probs do.
    """
    if "pre_entropy" not in evidence.sample.columns:
        return None
    policy = evidence.sample["pre_entropy"].astype(np.float64)
    used = evidence.listed & evidence.sound["topk_behavior_logprobs"]
    logs = np.where(used, np.minimum(evidence.mu, 0.0), 0.0)
    p = np.where(used, np.exp(logs), 0.0)
    rest = np.maximum(1 - p.sum(axis=1), 1e-12)
    behavior = -(p * logs).sum(axis=1) - rest * np.log(rest)
    known = np.isfinite(policy) & used.any(axis=1)
    there, here, pairs = {}, {}, {}
    for d in DISTANCES:
        rows, others = evidence.neighbours(d)
        both = known[rows] & known[others]
        if both.sum() >= FEWEST:
            rows, others = rows[both], others[both]
            there[d], here[d] = correlation(
                np.stack([policy[rows], policy[rows]]),
                np.stack([behavior[others], behavior[rows]]),
                np.ones((2, len(rows)), np.bool_),
            ).tolist()
            pairs[d] = len(rows)
    if not there:
        return None
    d = max(there, key=lambda each: there[each])
    r, own = there[d], here[d]
    # Fisher's z of the two, whose difference has variance 2 / n.
    z = np.arctanh(min(r, 0.999)) - np.arctanh(max(own, -0.999))
    if r < 0.7 or own > 0.5 * r or z * np.sqrt(pairs[d] / 2) < 5:
        return None
    return finding(
        min(0.97, 0.6 + 0.4 * r), pairs[d], d,
        pattern="entropies", correlation_at_t_minus_d=r, correlation_at_t=own, pairs=pairs[d],
        tried={str(each): value for each, value in there.items()},
    )  # fmt: skip


def _misaligned_start(evidence: Evidence, tried: dict[str, float]) -> Finding | None:
    """Rows at the beginning of responses hold unrelated distributions, later ones do not."""
    if is_cut(evidence):
        return None  # few slots are left, and correlations mean little
    position = evidence.sample["position"][evidence.rows]
    for length in (3, 2, 1):
        later, edge = position >= length, position == length - 1
        if edge.sum() < 4 or later.sum() < 10:
            continue
        # One in twenty of the later rows is worse than this.
        worse = evidence.drift > max(float(np.quantile(evidence.drift[later], 0.95)), 0.6)
        places = [position == each for each in range(length)]
        share = min(float(worse[each].mean()) for each in places if each.any())
        score = (share - 0.05) * np.sqrt(edge.sum() / (0.05 * 0.95))
        # Responses share their first states, so updates move these most: with AdamW up to 0.68 were
        # worse in a sound seed, 0.87 and more where they were misaligned.
        if share > 0.75 and score > 4:
            return finding(
                0.8, (position < length).sum(), length,
                pattern="the first rows of responses hold other distributions",
                unrelated_at_start=share, unrelated_later=0.05, tried=tried,
            )  # fmt: skip
    return None


@Cause(
    "vocabulary", 5, size="size",
    advice="Compare the config's vocab_size, the tokenizer's length and the head's rows on both "
    "sides: cut padded rows before the log-softmax, and load one tokenizer everywhere.",
    explains=DISTANCE | {"impossible-values", "shift", "truncation", "topk-convention"},
)  # fmt: skip
def vocabulary(evidence: Evidence) -> Finding | None:
    """Both sides do not mean the same tokens by the same ids."""
    return _out_of_range(evidence) or _moved_ids(evidence) or _wrong_ids(evidence)


def _out_of_range(evidence: Evidence) -> Finding | None:
    """Ids that the vocabulary does not have, listed or sampled."""
    size, listed = evidence.metadata.vocab_size, evidence.impossible
    sampled = (evidence.token >= size) | (evidence.token < 0)
    rows = listed.any(axis=1) | sampled
    if not rows.any():
        return None
    bad = np.concatenate([evidence.ids[listed], evidence.token[sampled]])
    mass = np.exp(np.where(listed, np.minimum(evidence.mu, 0), -np.inf)).sum(axis=1)
    return finding(
        0.97, rows.sum(), rows.mean(),
        pattern="ids that the vocabulary does not have", vocab_size=size,
        largest_id=bad.max(), smallest_id=bad.min(), listed=listed.sum(), sampled=sampled.sum(),
        mean_mass_there=np.nanmean(mass[listed.any(axis=1)]) if listed.any() else 0.0,
    )  # fmt: skip


def _moved_ids(evidence: Evidence) -> Finding | None:
    """π at id j is μ at id j − o: one side's ids are o further."""
    rows = evidence.rows
    if len(rows) > PAIRS:
        rows = rows[np.linspace(0, len(rows) - 1, PAIRS).astype(np.int64)]
    share, offset, judged = 0.0, 0, 0
    for each in (1, -1, 2, -2):
        theirs = evidence.looked_up(rows, evidence.ids[rows] - each, evidence.mu)
        taken, _ = _sides(evidence, rows, theirs)
        # A fault moves the ids of every row; drift mostly those of few, a tenth and less.
        enough = len(taken) >= 10 and taken.sum() >= 0.15 * len(rows)
        if enough and taken.mean() > share:
            share, offset, judged = float(taken.mean()), each, len(taken)
    # On ids that are numbers, drift itself goes by an id or two.
    if share < (0.8 if abs(offset) == 1 else 0.92):
        return None
    return finding(
        0.9, judged, offset,
        pattern="ids are moved by a constant on one side", offset=offset,
        rows_nearer_to_moved_ids=share, rows_judged=judged,
    )  # fmt: skip


def _wrong_ids(evidence: Evidence) -> Finding | None:
    """Some ids are always wrong, the others never: ids mean other tokens on one side."""
    usable = evidence.usable & (evidence.mu > np.log(0.02))
    if usable.sum() < FEWEST:
        return None
    rows, slots = np.nonzero(usable)
    broken = np.abs(evidence.pi[rows, slots] - evidence.mu[rows, slots]) > 2.5
    # Once per prompt and id, so that siblings do not vote together.
    votes: Any = np.stack([evidence.ids[rows, slots], evidence.cluster[rows], broken], axis=1)
    ids, _, wrong = np.unique(votes, axis=0).T
    distinct, place, count = np.unique(ids, return_inverse=True, return_counts=True)
    several = count >= 3
    if several.sum() < 4:
        return None
    share = np.bincount(place.reshape(-1), weights=wrong)[several] / count[several]
    always, never = share > 0.8, share < 0.2
    if always.sum() < 2 or wrong.mean() < 0.03:
        return None
    lost = np.median(evidence.mass("behavior") - evidence.mass("pre"))
    everything = always.mean() > 0.9 and lost > 0.4
    split = (always | never).mean()
    if not everything and (split < 0.75 or not never.any()):
        return None
    found = distinct[several][always]
    return finding(
        0.9 if everything or split > 0.85 else 0.75,
        np.isin(evidence.ids, found).any(axis=1).sum(), always.mean(),
        pattern="ids mean other tokens on one side", ids_judged=several.sum(),
        ids_always_wrong=always.sum(), ids_never_wrong=never.sum(), examples=found[:5],
        median_correlation=np.median(evidence.correlation) if len(evidence.rows) else 1.0,
    )  # fmt: skip
