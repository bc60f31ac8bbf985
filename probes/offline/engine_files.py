"""Responses as engines gave them, in files: the behavior side of an import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from deltad._checks import parse_json
from deltad.probes.engines import READERS, EngineError, EngineResponse, shared_metadata
from deltad.probes.errors import first_line

from .faults import Fault, Faults, OfflineError, Origin
from .files import Progress, expand, json_lines
from .join import shortened
from .records import Lists, Record

ENGINES: Final = ("vllm", "sglang", "openai", "llama.cpp")
"""Engines whose responses can lie in files; of `deltad.probes.engines.READERS`."""

MODES: Final = ("raw", "tempered", "processed")
"""What `mode` may be; see `deltad.probes.engines.response.Mode`."""

_AT_TEMPERATURE: Final = ("tempered", "processed")


class EngineFiles:
    """Files of responses of one engine: a JSON object a line, or JSON documents (`.json`).

    A request is a group and gets a number, in the order of the files, from 0; so does each
    response, by which advantages and scores name it: `sequence` 0, 1, 2, ….

    Parameters
    ----------
    engine : str
        Of `ENGINES`.
    paths : iterable of Path
        Files, or folders of them.
    step : int
        Optimizer step that the responses were used for.
    mode : str, optional
        Of `MODES`, where the engine's default is not meant.
    temperature : float, optional
        Sampling temperature.
    top_k : int, optional
        Cut longer lists to it.

    Attributes
    ----------
    behavior : dict
        Metadata of the first response.

    Raises
    ------
    OfflineError
        Another engine or mode, or a first response that cannot be read.
    """

    def __init__(
        self,
        engine: str,
        paths: Iterable[Path],
        *,
        step: int = 0,
        mode: str | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
    ) -> None:
        if engine not in ENGINES:
            raise OfflineError(f"an engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        if mode is not None and mode not in MODES:
            raise OfflineError(f"`mode` must be one of {', '.join(MODES)}, got {mode!r}")
        self.paths = expand(paths)
        self._read = READERS[engine].read
        self._step, self._top_k = step, top_k
        known = {"mode": mode, "temperature": temperature}
        self._options = {name: value for name, value in known.items() if value is not None}
        faults = Faults()
        self._first = next((each for _, _, each in self._responses(faults)), None)
        if self._first is None:
            faults.check()
            names = ", ".join(shortened(self.paths))
            raise OfflineError(f"the files hold no response: {names}")
        described = shared_metadata([self._first])
        self.behavior = {
            name: value
            for name, value in described.items()
            if name not in ("missing", "temperature")
        }

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(path.stat().st_size for path in self.paths)

    def records(self, faults: Faults, progress: Progress | None = None) -> Iterator[Record]:
        """Read the responses; see `ScoringFiles.records`."""
        for sequence, (origin, group, response) in enumerate(self._responses(faults, progress)):
            record = self._record(response, origin, group, sequence, faults)
            if record is not None:
                yield record

    def _responses(
        self, faults: Faults, progress: Progress | None = None
    ) -> Iterator[tuple[Origin, int, EngineResponse]]:
        """Every completion with its place and the number of its request."""
        group = 0
        for path in self.paths:
            for origin, found in _objects(path, faults, progress):
                try:
                    responses = self._read(found, **self._options)
                except EngineError as error:
                    faults.add(Fault(origin, error.reason, error.request, error.position))
                    responses = []
                for response in responses:
                    yield origin, group, response
                group += 1

    def _record(
        self,
        response: EngineResponse,
        origin: Origin,
        group: int,
        sequence: int,
        faults: Faults,
    ) -> Record | None:
        """A response as a record; None where it cannot be one."""
        record = Record(origin, self._step, sequence, group)
        before = faults.count
        if self._top_k is not None:
            response = response.cut(self._top_k)
        try:
            if self._first is not None:
                shared_metadata([self._first, response])
        except EngineError as error:
            faults.add(record.fault(error.reason))
        if response.mode not in _AT_TEMPERATURE and response.temperature != 1.0:
            said = "unknown" if response.temperature is None else f"{response.temperature:g}"
            faults.add(
                record.fault(
                    "log-probs must be at the sampling temperature, but their mode is "
                    f"{response.mode!r} and the temperature is {said}: give `--temperature` and "
                    "`--logprobs-mode`, or have the engine return processed log-probs"
                )
            )
        for name, absent in (
            ("token_id", response.token_ids < 0),
            ("behavior_logprob", np.isnan(response.logprobs)),
        ):
            for at in np.flatnonzero(absent).tolist():
                reasons = [
                    f"{gap.reason} {gap.detail}".strip()
                    for gap in response.missing
                    if gap.position in (None, at) and gap.field in name
                ]
                faults.add(
                    record.fault(
                        f"the engine did not say it ({', '.join(reasons) or 'no reason known'})",
                        position=at,
                        name=name,
                    )
                )
        if faults.count > before:
            return None
        columns: dict[str, Any] = {
            "token_id": response.token_ids,
            "behavior_logprob": response.logprobs,
        }
        if response.listed:
            lengths = (response.topk_ids >= 0).sum(axis=1)
            lengths = np.where(lengths == 0, -1, lengths).astype(np.int64)
            columns["topk_ids"] = Lists(response.topk_ids, lengths)
            columns["topk_behavior_logprobs"] = Lists(response.topk_logprobs, lengths)
        if response.prompt_ids is not None:
            columns["prompt_ids"] = response.prompt_ids
        return Record(origin, self._step, sequence, group, columns)


def _objects(
    path: Path, faults: Faults, progress: Progress | None
) -> Iterator[tuple[Origin, dict[str, Any]]]:
    """Objects of JSON lines, or of a document that is one or a list of them."""
    if path.suffix.lower() != ".json":
        yield from json_lines(path, faults, progress)
        return
    try:
        text = path.read_bytes()
        found = parse_json(text)
    except (OSError, ValueError) as error:
        faults.add(Fault(path, f"must be JSON ({first_line(error)})"))
        return
    if progress is not None:
        progress(len(text))
    for number, each in enumerate(found if isinstance(found, list) else [found], 1):
        origin = Origin(path, number, "entry")
        if isinstance(each, dict):
            yield origin, each
        else:
            faults.add(Fault(origin, f"must be a JSON object, found {type(each).__name__}"))
