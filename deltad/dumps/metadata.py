"""What a file says about itself: the JSON under the key `deltad` in its footer."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief
from typing import Any, Final

from deltad import __version__
from deltad._checks import parse_json
from deltad.support import LOGPROB_TOLERANCE, ROUNDED_LOGITS_TOLERANCE

from .errors import DumpError, first_line
from .rules import (
    DERIVED_VERSION,
    Near,
    Pair,
    check_derived,
    check_sampling,
    check_stored,
    check_vectors,
    is_number,
    near_of,
)

FORMAT: Final = 1
"""Major version of the dump format that this package reads and writes."""

METADATA_KEY: Final = b"deltad"
"""Key of the metadata in a Parquet footer."""

_INT32: Final = 2**31 - 1  # ids are int32, and so is a list's length
_NEEDED: Final = ("format", "top_k", "vocab_size", "temperature", "stored", "rows_seen")
_OBJECTS: Final = ("behavior", "readout", "update", "stored", "versions")
_TEXTS: Final = ("deltad", "model", "tokenizer", "created")
_OPTIONAL_OBJECTS: Final = {
    "derived": check_derived,
    "vectors": check_vectors,
    "sampling": check_sampling,
}
_SAMPLING: Final = {"sequences": 1, "every": 1, "seed": 0}  # what each key says by default
_LEFT_OUT: Final = ("ranks", *_OPTIONAL_OBJECTS)  # where they say nothing


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The description that every file of a dump carries.

    Attributes
    ----------
    top_k : int
        K, the length of the lists.
    vocab_size : int
        n, from the model's config.
    temperature : float
        Sampling temperature that all distributions are at.
    model, tokenizer : str
        Names or paths.
    behavior : mapping
        Engine, precision, staleness, `logprobs_mode`, top-p, top-k, `support`.
    readout : mapping
        How the policy's log-probs were computed; `logits_rounded` is true where logits were
        rounded to bfloat16 before the log-sum-exp.
    update : mapping
        The applied update: `mask`, `threshold`, `divergence`, optimizer, lr, batch.
    stored : mapping
        Which rows were kept: `{"rule": "all"}`;
        `{"rule": "above", "divergence": "kl", "threshold": 0.05}`; or `{"rule": "disagreement",
        "divergence": "kl", "threshold": 0.15, "criterion": "predictive-kl-aggregated",
        "baseline": "ratio", "outside": 412}`, the tokens outside that exactly one of the two
        masks, and how many were outside of those seen for this file.
    rows_seen : int
        Tokens looked at for this file; its row count where all are stored.
    versions : mapping
        Of the packages involved.
    created : str
        Time of writing, ISO 8601.
    ranks : int, optional
        Number of processes that each write files of every arm and seed, numbered from 0; a
        reader then knows when one's are missing. None where it is not said.
    derived : mapping, optional
        By which definitions the derived columns were filled: `{"version": 1, "divergence":
        "kl", "arithmetic": "5d3c0a1f"}`; see `deltad.dumps.derived`. None without them.
    vectors : mapping, optional
        Which rows keep their vectors: `{"rule": "all"}`, the same as None, or
        `{"rule": "near", "divergence": "kl", "threshold": 0.01, "sample": 0.01}`: those with D
        before the step of at least the threshold, and a random share of the rest.
    sampling : mapping, optional
        How what was recorded was chosen at random: `{"sequences": 0.25, "every": 4, "seed": 0}`,
        the share of sequences, the steps from one recorded to the next, the choice's seed. Rows
        then have the column `weight`. None where all sequences of all steps were.
    format : int
        Major version of the format.
    deltad : str
        Version of this package that wrote the file.
    extra : mapping
        Keys that this version does not know, kept as they are.

    Raises
    ------
    ValueError
        A value is impossible; the message names the key.
    """

    top_k: int
    vocab_size: int
    temperature: float = 1.0
    model: str = ""
    tokenizer: str = ""
    behavior: Mapping[str, Any] = field(default_factory=dict)
    readout: Mapping[str, Any] = field(default_factory=dict)
    update: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, Any] = field(default_factory=lambda: {"rule": "all"})
    rows_seen: int = 0
    versions: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    ranks: int | None = None
    derived: Mapping[str, Any] | None = None
    vectors: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] | None = None
    format: int = FORMAT
    deltad: str = __version__
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_format(self.format)
        for key, least, most in (
            ("top_k", 1, _INT32),
            ("vocab_size", 1, _INT32),
            ("rows_seen", 0, 2**63 - 1),
            ("ranks", 1, _INT32),
        ):
            value = getattr(self, key)
            if key == "ranks" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"`{key}` must be an integer of at least {least}, got {brief(value)}"
                )
            if value > most:
                raise ValueError(f"`{key}` must be at most {most}, got {brief(value)}")
        if not is_number(self.temperature) or not self.temperature > 0:
            raise ValueError(
                f"`temperature` must be a positive number, got {brief(self.temperature)}"
            )
        for key in _OBJECTS:
            if not isinstance(getattr(self, key), Mapping):
                raise ValueError(f"`{key}` must be an object, got {brief(getattr(self, key))}")
        for key in _TEXTS:
            if not isinstance(getattr(self, key), str):
                raise ValueError(f"`{key}` must be a string, got {brief(getattr(self, key))}")
        check_stored(self.stored)
        for key, check in _OPTIONAL_OBJECTS.items():
            value = getattr(self, key)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ValueError(f"`{key}` must be an object, got {brief(value)}")
            check(value)
        if clash := sorted(self.extra.keys() & _KNOWN):
            raise ValueError(f"`extra` must hold unknown keys only, got {', '.join(clash)}")

    @property
    def logprob_tolerance(self) -> float:
        """Excess of a log-prob over 0 (nats) and of a mass over 1 that counts as rounding."""
        if self.readout.get("logits_rounded"):
            return ROUNDED_LOGITS_TOLERANCE
        return LOGPROB_TOLERANCE

    @property
    def choice(self) -> tuple[object, ...]:
        """By which rule tokens were stored; arms of one rule hold the same tokens of a seed."""
        rule = ("rule", "divergence", "threshold", "criterion", "baseline")
        sampling = self.sampling or {}
        return (
            *(self.stored.get(key) for key in rule),
            *(sampling.get(key, default) for key, default in _SAMPLING.items()),
        )

    @property
    def stored_above(self) -> tuple[str, float] | None:
        """Divergence and threshold above which rows were stored; None where all were.

        Under the rule "disagreement" too, where not all rows above are there; see `stored_pair`.
        """
        if self.stored["rule"] == "all":
            return None
        return str(self.stored["divergence"]), float(self.stored["threshold"])

    @property
    def stored_pair(self) -> Pair | None:
        """The pair whose disagreement tokens alone were stored; None under other rules."""
        if self.stored["rule"] != "disagreement":
            return None
        return Pair(
            str(self.stored["divergence"]),
            float(self.stored["threshold"]),
            str(self.stored["criterion"]),
            str(self.stored["baseline"]),
        )

    @property
    def stored_outside(self) -> int | None:
        """Tokens seen outside the region of `stored_pair`; None where rows tell."""
        return None if self.stored["rule"] != "disagreement" else int(self.stored["outside"])

    @property
    def derived_divergence(self) -> str | None:
        """Divergence of the derived columns; None without them or under other definitions."""
        if self.derived is None or self.derived["version"] != DERIVED_VERSION:
            return None
        return str(self.derived["divergence"])

    @property
    def near(self) -> Near | None:
        """The rule by which vectors were left out; None where no rule did."""
        if self.vectors is None or self.vectors["rule"] == "all":
            return None
        return near_of(self.vectors)

    def to_json(self) -> str:
        """Write as the JSON of a footer.

        Returns
        -------
        str
            One object; unknown keys follow the known ones, and what is not said is left out.

        Raises
        ------
        ValueError
            A value has no JSON.
        """
        values = {key: getattr(self, key) for key in _KNOWN_ORDER}
        values = {
            key: value for key, value in values.items() if value is not None or key not in _LEFT_OUT
        }
        try:
            return json.dumps({**values, **self.extra}, default=_plain, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metadata must be JSON: {error}") from error

    @classmethod
    def from_json(cls, text: str | bytes, path: str | Path) -> Metadata:
        """Read the JSON of a footer.

        Parameters
        ----------
        text : str or bytes
            The JSON.
        path : str or Path
            The file it is from, for the error.

        Returns
        -------
        Metadata
            Keys that this version does not know are in `extra`.

        Raises
        ------
        DumpError
            Not JSON, a key missing or impossible, or a format that this version cannot read.

        Examples
        --------
        >>> known = Metadata(top_k=2, vocab_size=9).to_json()
        >>> Metadata.from_json(known, "part-0-0.parquet").top_k
        2
        """
        try:
            found = parse_json(text)
        except ValueError as error:
            raise DumpError(
                path, f"the metadata under the key `deltad` is not JSON ({first_line(error)})"
            ) from error
        if not isinstance(found, dict):
            raise DumpError(
                path,
                "the metadata under the key `deltad` must be a JSON object, "
                f"found {type(found).__name__}",
            )
        try:
            # The format first: another one may lack the keys of this.
            _check_format(found.get("format"))
            if missing := [key for key in _NEEDED if key not in found]:
                raise ValueError(f"`{missing[0]}` is missing")
            known = {key: found[key] for key in _KNOWN_ORDER if found.get(key) is not None}
            known["format"] = FORMAT
            known.setdefault("deltad", "")
            for key in _NEEDED:
                known.setdefault(key, found[key])
            extra = {key: value for key, value in found.items() if key not in _KNOWN}
            return cls(**known, extra=extra)
        except ValueError as error:
            raise DumpError(path, f"in the metadata, {error}", kind="metadata") from error


_KNOWN_ORDER: Final = (
    "format", "deltad", "top_k", "vocab_size", "temperature", "model", "tokenizer", "behavior",
    "readout", "update", "stored", "rows_seen", "versions", "created", "ranks", "derived",
    "vectors", "sampling",
)  # fmt: skip
_KNOWN: Final = frozenset(_KNOWN_ORDER)
if {item.name for item in dataclasses.fields(Metadata)} != _KNOWN | {"extra"}:
    raise AssertionError("every field of Metadata has its place in the JSON")


def _check_format(found: object) -> None:
    """Refuse a major format other than ours, by name."""
    if not is_number(found) or math.floor(found) != FORMAT:
        raise ValueError(
            f"`format` must be {FORMAT}, the only one this version of deltad reads, "
            f"found {brief(found)}"
        )


def _plain(value: object) -> object:
    """Turn mappings, NumPy scalars and arrays into what JSON knows."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON")
