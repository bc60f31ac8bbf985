"""prime-rl's token exports: a JSON line a sequence, the sampled tokens' log-probs alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from deltad._checks import parse_json

from .assemble import Position, Sampling, assemble, brief, whole
from .errors import EngineError, formed
from .missing import Missing, Mode
from .response import EngineResponse

_ENGINE = "prime-rl"

SCHEMA_VERSION: Final = 1
"""`schema_version` of the exports that are read."""


@formed(_ENGINE)
def read_prime_rl(
    records: Any,
    *,
    mode: Mode = "processed",
    temperature: float | None = None,
) -> list[EngineResponse]:
    """Read what prime-rl wrote under `token_exports/step_*/rank_*.jsonl`.

    A record has columns of one length: `token_ids`, `loss_mask`, `inference_logprobs` (of the
    sampled token; 0 where the mask is False) and more, which `deltad import` uses. There is no
    top-K. Tokens whose mask is False were not trained on, so they are left out; the exporter
    writes null where a log-prob was not finite.

    Parameters
    ----------
    records
        A record, several, or lines of JSON (an open file).
    mode
        By default `processed`, which prime-rl sets its vLLM to.
    temperature
        Of the sampling; records do not say.

    Returns
    -------
    list of EngineResponse
        One a record, with K = 0.

    Raises
    ------
    EngineError
        What does not have this form, with record and position; another `schema_version`.
    """
    sampling = Sampling(mode=mode, temperature=temperature)
    return [_read(record, index, sampling) for index, record in enumerate(_records(records))]


def _records(records: Any) -> Iterable[Any]:
    """Records, parsed where they are lines."""
    if isinstance(records, Mapping | str):
        records = records.splitlines() if isinstance(records, str) else [records]
    for index, record in enumerate(records):
        if not isinstance(record, str | bytes):
            yield record
            continue
        if not record.strip():
            continue
        try:
            yield parse_json(record)
        except ValueError as error:
            raise EngineError(
                _ENGINE, f"a line must be JSON: {error}", request=f"line {index + 1}"
            ) from error


def _read(record: Any, index: int, sampling: Sampling) -> EngineResponse:
    """One record."""
    name = str(index)
    if not isinstance(record, Mapping):
        raise EngineError(_ENGINE, f"a record must be an object, got {brief(record)}", request=name)
    if record.get("schema_version") != SCHEMA_VERSION:
        raise EngineError(
            _ENGINE,
            f"`schema_version` must be {SCHEMA_VERSION}, got {brief(record.get('schema_version'))}",
            request=name,
        )
    columns = {key: record.get(key) for key in ("token_ids", "loss_mask", "inference_logprobs")}
    for key, column in columns.items():
        if not isinstance(column, Sequence) or isinstance(column, str):
            raise EngineError(_ENGINE, f"`{key}` must be a list, got {brief(column)}", request=name)
    lengths = {key: len(column or ()) for key, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise EngineError(_ENGINE, f"columns must be of one length, got {lengths}", request=name)
    token_ids, mask, logprobs = (list(column or ()) for column in columns.values())
    ids = [whole(_ENGINE, token, "`token_ids`", name, at) for at, token in enumerate(token_ids)]
    for at, keep in enumerate(mask):
        if keep not in (0, 1):
            raise EngineError(
                _ENGINE, f"`loss_mask` must be true or false, got {brief(keep)}", request=name,
                position=at,
            )  # fmt: skip
    places = [at for at, keep in enumerate(mask) if keep]
    return assemble(
        _ENGINE,
        [Position(ids[at], logprobs[at]) for at in places],
        sampling=sampling,
        missing=[Missing(None, "topk", "not-returned")],
        prompt_ids=ids[: places[0]] if places else ids,
        request=name,
    )
