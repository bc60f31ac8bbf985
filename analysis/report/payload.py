"""What the token viewer is given: columns of numbers, and a header that says what they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltad.analysis.engine import Progress
from deltad.analysis.question import Question, QuestionError, Resolved
from deltad.analysis.words import unit
from deltad.dumps import read_prompts
from deltad.masks import Criterion

from .details import Details, details_of
from .encode import QUANTUM, TYPES, encode, quantised
from .gather import (
    UNBOUNDED,
    Columns,
    Rule,
    arm_rows,
    main_direction,
    pre_divergences,
    rules_for,
)  # fmt: skip
from .scope import chosen_seeds, floor_for, floor_reason, same_tokens, shown_arms, stored_floor

if TYPE_CHECKING:
    from deltad.dumps import Dump

MAX_TOKENS: Final = 100_000
"""Tokens of the page unless told otherwise."""

_LOGPROBS: Final = ("behavior_logprob", "pre_logprob", "post_logprob")
_ENTROPIES: Final = ("pre_entropy", "post_entropy")
_SEQUENCE: Final = ("seed_index", "step", "group", "sequence")


@dataclass(frozen=True, eq=False)
class Payload:
    """The token viewer's data.

    Attributes
    ----------
    header : dict
        Plain objects: the question, arms, criteria with the columns that decide, seeds with
        their `rows_seen`, texts, prompts, what was left out and why.
    columns : dict of str to ndarray
        By name; see `encode.TYPES` for their types.
    """

    header: dict[str, Any]
    columns: Columns

    def encoded(self) -> dict[str, str]:
        """The columns as text, by name."""
        return {name: encode(values) for name, values in self.columns.items()}


def build_payload(
    dump: Dump,
    question: Question | None = None,
    *,
    seeds: Collection[int] = (),
    tokens: int = MAX_TOKENS,
    progress: Progress | None = None,
) -> Payload:
    """Read the tokens that the page shows.

    Parameters
    ----------
    dump : Dump
        An open dump; every row of the columns used is checked.
    question : Question, optional
        Region, pair and protocol; under `own` the page shows the criterion's arm.
    seeds : collection of int
        Only these; all where empty.
    tokens : int
        At most so many tokens. Where there are more, those with the largest D are kept, and
        the page's threshold stops where some would be missing.
    progress : callable, optional
        Told the number of rows of every block read.

    Returns
    -------
    Payload
        Of no rows where nothing is stored.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer the question, or has no such seed.
    DumpError
        A row holds an impossible value.
    """
    if tokens < 1:
        raise QuestionError(f"`tokens` must be at least 1, got {tokens}")
    resolved = (question or Question()).resolve(dump, needs=("pre",))
    arm = resolved.criterion_arm
    chosen = chosen_seeds(dump, arm, seeds)
    floor, least_stored = stored_floor(dump, arm, chosen), None
    stored = sum(dump.rows(arm, seed) for seed in chosen)
    if stored > tokens:
        d_pre = pre_divergences(dump, arm, chosen, resolved.question.divergence, progress=progress)
        least_stored, floor = floor, max(floor, floor_for(d_pre, tokens))
    above = floor if stored > tokens else None
    arms, left_out = shown_arms(dump, arm, chosen)
    rules = rules_for(dump, arm, resolved.question.divergence)
    rows = arm_rows(dump, arm, chosen, resolved, rules, main=True, above=above, progress=progress)
    judged: dict[str, Columns] = {}
    for other in arms:
        theirs = rows
        if other != arm:
            theirs = arm_rows(
                dump, other, chosen, resolved, (), main=False, above=above, progress=progress
            )
            if not same_tokens(rows, theirs):
                left_out[other] = "its tokens are not those of the other arms"
                continue
        judged[other] = theirs
    rules = [rule for rule in rules if _decides(rule, rows, resolved)]
    columns = _columns(rows, rules, resolved, list(judged.values()))
    header: dict[str, Any] = {
        "format": 1,
        **_asked(resolved, floor),
        "shown_direction": main_direction(resolved),
        "floor": floor,
        "floor_reason": floor_reason(dump, arm, floor, least_stored),
        "arm": arm,
        "arms": list(judged),
        "left_out": left_out,
        "criteria": [_criterion(rule) for rule in rules],
        "seeds": [{"seed": seed, "tokens": dump.rows_seen(arm, seed)} for seed in chosen],
        "all_seeds": len(dump.seeds(arm)),
        "stored": stored,
        "rows": len(columns["token_id"]),
        "quantum": QUANTUM,
    }
    _add_texts(header, columns, rows)
    header["prompts"] = _prompts(dump, chosen, columns)
    size = sum(len(encode(values)) for values in columns.values())
    details = details_of(rows, left=size) if rows else None
    if details is not None:
        columns.update(details.columns)
    header["details"] = _details_header(details, dump.top_k)
    header["columns"] = {
        name: {"type": TYPES[values.dtype.name], "length": int(values.size)}
        for name, values in columns.items()
    }
    return Payload(header, columns)


def _columns(
    rows: Columns,
    rules: Sequence[Rule],
    resolved: Resolved,
    judged: Sequence[Columns],
) -> Columns:
    """The columns of the page, but for texts and details; the rows of every arm as `judged`."""
    if not rows:
        decisive = ("d_pre", "r_minus_1", *_decisive(rules, resolved))
        rows = {name: np.empty(0, "u1" if "masked" in name else "f8") for name in decisive}
        rows |= {name: np.empty(0, np.int32) for name in (*_SEQUENCE, "position", "token_id")}
        rows |= {"advantage": np.empty(0, np.float32)}
    changed = np.zeros(len(rows["token_id"]), dtype=np.bool_)
    for name in _SEQUENCE:
        changed[1:] |= rows[name][1:] != rows[name][:-1]
    changed[:1] = True
    starts = np.flatnonzero(changed)
    columns: Columns = {
        "sequence_start": np.append(starts, len(changed)).astype(np.int32),
        **{f"sequence_{name}": rows[name][starts].astype(np.int32) for name in _SEQUENCE},
        "position": rows["position"].astype(np.int32),
        "token_id": rows["token_id"].astype(np.int32),
        "advantage": rows["advantage"],
        "d_pre": rows["d_pre"],
        "r_minus_1": rows["r_minus_1"],
    }
    for name in _decisive(rules, resolved):
        columns[name] = rows[name]
    if "d_dot_local" in rows:
        columns["d_dot_local"] = rows["d_dot_local"]
    for index, theirs in enumerate(judged):
        columns[f"delta_d_{index}"] = theirs.get("delta_d", np.empty(0))
        columns[f"in_loss_{index}"] = theirs.get("in_loss", np.empty(0)).astype(np.uint8)
        undetermined = theirs.get("undetermined", np.empty(0))
        if (undetermined != UNBOUNDED).any():
            columns[f"undetermined_{index}"] = undetermined
    weight = rows.get("weight", np.empty(0))
    if (weight[1:] != weight[:-1]).any():
        columns["weight"] = weight
    for names, sign in ((_LOGPROBS, -1), (_ENTROPIES, 1)):
        for name in names:
            if name in rows:
                columns[name] = quantised(sign * rows[name].astype(np.float64))
    return columns


def _decides(rule: Rule, rows: Columns, resolved: Resolved) -> bool:
    """Whether a rule is asked for, or masks something under some threshold."""
    if rule.decider.name in (resolved.question.criterion, resolved.question.baseline):
        return True
    return not rule.masked or bool(rows and (rows[rule.masked] == 1).any())


def _decisive(rules: Sequence[Rule], resolved: Resolved) -> list[str]:
    """The columns that decide, beside those that every page has."""
    names = [main_direction(resolved), *(name for rule in rules for name in rule.columns)]
    return [name for name in dict.fromkeys(names) if name not in ("d_pre", "r_minus_1")]


def _criterion(rule: Rule) -> dict[str, Any]:
    """What the page knows of a criterion."""
    decider = rule.decider
    says = (
        f"masks where {decider.proximity} and Â · ({decider.direction}) > 0"
        if isinstance(decider, Criterion)
        else f"weighs {decider.formula}"
    )
    return {
        "name": decider.name,
        "proximity": rule.proximity,
        "direction": rule.direction,
        "masked": rule.masked,
        "says": f"{says} · {decider.source}",
    }


def _asked(resolved: Resolved, floor: float) -> dict[str, Any]:
    """The question, and the threshold that the page begins with."""
    question = resolved.question
    return {
        "divergence": question.divergence,
        "unit": unit(question).strip(),
        "threshold": max(question.threshold, floor),
        "asked_threshold": question.threshold,
        "criterion": question.criterion,
        "baseline": question.baseline,
        "protocol": question.protocol,
    }


def _add_texts(header: dict[str, Any], columns: Columns, rows: Columns) -> None:
    """The decoded tokens: each text once, and an index a token."""
    header["texts"] = []
    if "token" not in rows:
        return
    texts, index = np.unique(rows["token"].astype(str), return_inverse=True)
    header["texts"] = texts.tolist()
    columns["text"] = index.astype(np.int32)


def _prompts(dump: Dump, seeds: Sequence[int], columns: Columns) -> list[dict[str, Any]]:
    """The prompts of the groups on the page."""
    groups = (columns[f"sequence_{name}"].tolist() for name in ("seed_index", "group"))
    wanted = set(zip(*groups, strict=True))
    found = []
    for index, seed in enumerate(seeds):
        for prompt in read_prompts(dump.path, seed=seed):
            if (index, prompt.group) in wanted:
                found.append(
                    {
                        "seed_index": index,
                        "group": prompt.group,
                        "prompt": prompt.prompt,
                        "answer": prompt.answer,
                    }
                )
    return found


def _details_header(details: Details | None, top_k: int) -> dict[str, Any]:
    """What the page says of the top-K lists."""
    if details is None:
        return {"rows": 0, "top_k": top_k, "least": None, "with_vectors": 0}
    return {
        "rows": len(details.columns["detail_row"]),
        "top_k": top_k,
        "least": None if math.isnan(details.least) else details.least,
        "with_vectors": details.with_vectors,
    }
