"""Token records that trainers write themselves, read as they are: prime-rl and NeMo-RL.

Both give log μ and log π of the sampled token, and neither any other id: the dumps have no
lists, so that D over top-K is not known and the masks by the ratio or by the binary divergence
are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from .faults import BadValueError, Fault, Faults, OfflineError, Origin
from .files import Progress, expand, json_lines
from .records import Record, numbers

PRIME_SCHEMA: Final = 1
"""Version of prime-rl's records that is read."""

_PRIME_FIELDS: Final = (
    "export_step", "rank", "export_sequence_idx", "token_ids", "loss_mask", "advantages",
    "inference_logprobs", "trainer_logprobs",
)  # fmt: skip
_NEMO_FIELDS: Final = (
    "token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs",
)  # fmt: skip
_NEMO_NAME: Final = re.compile(r"train_data_step(\d+)\.jsonl")


class _Files:
    """JSON lines of a trainer, a whole sequence each."""

    behavior: Mapping[str, Any]
    update: Mapping[str, Any]

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = expand(paths)
        self._groups: dict[tuple[int, bytes], str] = {}

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(path.stat().st_size for path in self.paths)

    def records(self, faults: Faults, progress: Progress | None = None) -> Iterator[Record]:
        """Read the responses; see `ScoringFiles.records`."""
        for path in self.paths:
            for origin, raw in json_lines(path, faults, progress):
                try:
                    record = self._record(raw, origin)
                except BadValueError as error:
                    faults.add(Fault(origin, str(error)))
                else:
                    if record is not None:
                        yield record

    def _record(self, raw: Mapping[str, Any], origin: Origin) -> Record | None:
        """One sequence, or None where no token of it was trained on."""
        raise NotImplementedError

    def _cut(
        self, raw: Mapping[str, Any], origin: Origin, step: int, sequence: str, names: _Names
    ) -> Record | None:
        """The response of a sequence: from the first token that was sampled to the last."""
        given: dict[str, Any] = {}
        for name, (field, kind) in names.items():
            if raw.get(field) is None:
                continue
            try:
                given[name] = numbers(raw[field], kind)
            except BadValueError as error:
                where = "" if error.index is None else f" at token {error.index}"
                raise BadValueError(f"`{field}`{where} {error}") from None
        length = len(given["token_id"])
        for name, values in given.items():
            if len(values) != length:
                raise BadValueError(
                    f"`{names[name][0]}` must have an entry for each of the {length} tokens, "
                    f"found {len(values)}"
                )
        sampled = np.flatnonzero(given["response_mask"])
        if not len(sampled):
            return None
        if sampled[0] == 0:
            raise BadValueError("the first token cannot have been sampled: it has no prompt")
        columns = {name: values[sampled[0] : sampled[-1] + 1] for name, values in given.items()}
        prompt = given["token_id"][: sampled[0]]
        group = self._groups.setdefault((step, prompt.tobytes()), f"{step}.{len(self._groups)}")
        return Record(origin, step, sequence, group, {**columns, "prompt_ids": prompt})


_Names = dict[str, tuple[str, str]]
"""Our name of a field, theirs, and the kind of its values."""


class PrimeRL(_Files):
    """prime-rl's token export: `token_exports/step_<n>/rank_<r>.jsonl`.

    Log-probs there stand at their own token. A prompt is what lies before the first token that
    was trained on; sequences of one step with the same prompt are a group. `in_loss` is what
    prime-rl's own mask left.

    Parameters
    ----------
    paths : iterable of Path
        Files, step folders, or `token_exports` as a whole.

    Raises
    ------
    OfflineError
        A step folder that prime-rl has not declared complete by its file STABLE.
    """

    behavior: Mapping[str, Any] = {"engine": "prime-rl"}
    update: Mapping[str, Any] = {"mask": "prime-rl"}

    def __init__(self, paths: Iterable[Path]) -> None:
        paths = list(paths)
        super().__init__(paths)
        folders = {path.parent for path in self.paths if path not in paths}
        for folder in sorted(folders):
            if folder.name.startswith("step_") and not (folder / "STABLE").exists():
                raise OfflineError(
                    f"{folder} has no file STABLE, so prime-rl is still writing it: leave it out, "
                    "or name its files one by one if the run was broken off"
                )
        self._run: Any = ()

    def _record(self, raw: Mapping[str, Any], origin: Origin) -> Record | None:
        _need(raw, _PRIME_FIELDS, "prime-rl's token export")
        version = raw.get("schema_version")
        if version != PRIME_SCHEMA:
            raise BadValueError(f"`schema_version` must be {PRIME_SCHEMA}, found {version!r}")
        run = raw.get("run_id")
        if self._run == ():
            self._run = run
        if run != self._run:
            raise BadValueError(
                f"`run_id` must be the same in all records, found {run!r} after {self._run!r}: "
                "import the runs one by one"
            )
        step, rank, index = (
            _whole(raw, name) for name in ("export_step", "rank", "export_sequence_idx")
        )
        record = self._cut(
            raw, origin, step, f"{rank}.{index}",
            {
                "token_id": ("token_ids", "i"),
                "response_mask": ("loss_mask", "b"),
                "advantage": ("advantages", "f"),
                "behavior_logprob": ("inference_logprobs", "f"),
                "pre_logprob": ("trainer_logprobs", "f"),
                "pre_entropy": ("entropy", "f"),
            },
        )  # fmt: skip
        if record is None:
            return None
        masked = raw.get("is_masked")
        kept = np.ones(len(record.columns["token_id"]), dtype=np.bool_)
        if isinstance(masked, list):
            start = len(record.columns["prompt_ids"])
            kept = np.array([each is not True for each in masked[start : start + len(kept)]])
        if len(kept) != len(record.columns["token_id"]):
            raise BadValueError("`is_masked` must have an entry for each token")
        columns = {**record.columns, "in_loss": kept}
        return Record(origin, step, record.sequence, record.group, columns)


class NemoRL(_Files):
    """NeMo-RL's log of what it trained on: `train_data_step<n>.jsonl`.

    `prev_logprobs` are the policy's before the first optimizer step of the batch, which is the
    state before the step where a batch is one step. The step is in the file's name.

    Parameters
    ----------
    paths : iterable of Path
        Files, or the folder of logs.
    """

    behavior: Mapping[str, Any] = {"engine": "nemo-rl"}
    update: Mapping[str, Any] = {}

    def _record(self, raw: Mapping[str, Any], origin: Origin) -> Record | None:
        _need(raw, _NEMO_FIELDS, "NeMo-RL's log")
        name = _NEMO_NAME.fullmatch(origin.path.name)
        if name is None:
            raise BadValueError("the file must be named train_data_step<n>.jsonl, to know the step")
        length = raw.get("input_lengths")
        if isinstance(length, int):  # what lies behind is padding
            raw = {
                key: value[:length] if isinstance(value, list) and key in _NEMO_FIELDS else value
                for key, value in raw.items()
            }
        record = self._cut(
            raw, origin, int(name[1]), str(raw.get("idx", origin.number)),
            {
                "token_id": ("token_ids", "i"),
                "response_mask": ("token_loss_mask", "b"),
                "advantage": ("advantages", "f"),
                "behavior_logprob": ("generation_logprobs", "f"),
                "pre_logprob": ("prev_logprobs", "f"),
            },
        )  # fmt: skip
        if record is None or raw.get("sample_loss_mask", 1):
            return record
        unused = np.zeros(len(record.columns["token_id"]), dtype=np.bool_)
        columns = {**record.columns, "in_loss": unused}
        return Record(origin, record.step, record.sequence, record.group, columns)


def _need(raw: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    """Refuse a record without a field."""
    for name in names:
        if raw.get(name) is None:
            raise BadValueError(f"`{name}` is missing, which a record of {what} has")


def _whole(raw: Mapping[str, Any], name: str) -> int:
    """A whole number of a record."""
    value = raw[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValueError(f"`{name}` must be a whole number, found {value!r}")
    return value
