"""The first section of the page: what the dump says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from deltad.analysis.question import Resolved
from deltad.analysis.words import title

if TYPE_CHECKING:
    from deltad.dumps import Dump, Metadata


def summary(dump: Dump, resolved: Resolved) -> str:
    """What the dump is, and what the page asks of it.

    Parameters
    ----------
    dump : Dump
        Only its footers are read.
    resolved : Resolved
        The question; facts are those of the criterion's arm.

    Returns
    -------
    str
        The question in a line, and a list of facts, as HTML.
    """
    question, arm = resolved.question, resolved.criterion_arm
    metadata = dump.metadata(arm)
    seeds = dump.seeds(arm)
    seen = sum(dump.rows_seen(arm, seed) for seed in seeds)
    stored = sum(dump.rows(arm, seed) for seed in seeds)
    behavior, update = metadata.behavior, metadata.update
    facts = {
        "model": metadata.model,
        "tokenizer": metadata.tokenizer if metadata.tokenizer != metadata.model else "",
        "behavior policy": _listed(behavior, "engine", "precision", "quantization"),
        "staleness": _said(behavior.get("staleness")),
        "sampling": f"temperature {metadata.temperature:g}" + _truncation(behavior),
        "log-probs": _said(behavior.get("logprobs_mode")),
        "readout": _readout(metadata.readout),
        "update": _listed(update, "optimizer") + _named(update, lr="lr", batch="batch"),
        "arms": ", ".join(dump.arms),
        "vocabulary and top-K": f"{metadata.vocab_size:,} ids, K = {metadata.top_k}",
        "seeds": f"{len(seeds):,}",
        "tokens": f"{seen:,} seen, {stored:,} stored of each arm",
        "stored": _stored(metadata),
        "recorded": metadata.created,
    }
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in facts.items()
        if value
    )
    asked = f"{title(question)} · protocol {question.protocol}"
    return f'<p class="asked">{escape(asked)}</p><dl class="facts">{items}</dl>'


def _stored(metadata: Metadata) -> str:
    """The rule by which rows were stored, and what follows."""
    rule = metadata.stored_above
    if rule is None:
        return "all tokens: responses are whole, any threshold can be asked"
    return (
        f"tokens with {rule[0]} above {rule[1]:g}: thresholds stop there, and responses have gaps"
    )


def _readout(readout: Mapping[str, Any]) -> str:
    """How the policy's log-probs were computed."""
    words = _named(readout, hidden_dtype="hidden states", head_dtype="head").removeprefix(", ")
    if readout.get("logits_rounded"):
        words += ", logits rounded to bfloat16"
    return words


def _truncation(behavior: Mapping[str, Any]) -> str:
    """What sampling left out; nothing where it left out nothing."""
    top_p, top_k = behavior.get("top_p"), behavior.get("top_k")
    words = "" if top_p in (None, 1) else f", top-p {top_p}"
    return words if top_k in (None, -1, 0) else f"{words}, top-k {top_k}"


def _said(value: Any) -> str:
    """A value of the metadata as text."""
    return "" if value is None else str(value)


def _listed(values: Mapping[str, Any], *keys: str) -> str:
    """Some values of the metadata, those that are there."""
    return ", ".join(str(values[key]) for key in keys if values.get(key) is not None)


def _named(values: Mapping[str, Any], **names: str) -> str:
    """Some values with what they are, a comma before each."""
    return "".join(
        f", {name} {values[key]}".replace("  ", " ")
        for key, name in names.items()
        if values.get(key) is not None
    )
