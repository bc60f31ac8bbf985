"""The command that makes a dump of files which another framework wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from .options import QUIET, Call, Option, command, place
from .terminal import OptionError, Status, complain, is_url, sink

if TYPE_CHECKING:
    from deltad.probes.offline import Imported, Source

FORMATS: Final = ("scoring", "prime-rl", "nemo-rl", "vllm", "sglang", "openai", "llama.cpp")
"""Forms of SOURCE."""

MODES: Final = ("raw", "tempered", "processed")
"""What an engine had done to the logits: nothing, the temperature, that and truncation."""

READ: Final = (
    Option("RUN", [place], "Files or folders with the responses, and last the folder of the dump, "
           "or its URL.", ..., metavar="SOURCE… RUN"),
    Option("--format", FORMATS, "Form of SOURCE: scoring, prime-rl, nemo-rl, or the responses of "
           "an engine: vllm, sglang, openai, llama.cpp.", "scoring", metavar="NAME"),
    Option("--pre", [Path], "Scores before the step; may be given several times."),
    Option("--post", [Path], "Scores after the step; may be given several times."),
    Option("--join", [Path], "More fields of the same responses, advantages say."),
    Option("--requests", Path, "Write what has to be scored there, and no dump: no RUN is given."),
    Option("--arm", str, "Name of the update that was applied.", "actual"),
    Option("--seed", int, "Independent repetition.", 0),
    Option("--step", int, "Optimizer step of records that say none.", 0),
    Option("--existing", ("refuse", "replace", "append"),
           "What to do where RUN has this arm and seed.", "refuse"),
    Option("--metadata", Path, "JSON with more of the dump's metadata."),
)  # fmt: skip
"""What is read, and where it goes."""

SAID: Final[Mapping[str, Sequence[Option]]] = {
    "": (
        Option("--model", str, "The policy; a folder's config gives n.", metavar="NAME|DIR"),
        Option("--vocab-size", int, "n of the model.", shown="the model's", min=1),
        Option("--temperature", float, "That all log-probs are at.",
               shown="the metadata's, else 1"),
        Option("--top-k", int, "K.", shown="RUN's, else the longest list", min=1),
    ),
    "behavior": (
        Option("--engine", str, "The behavior policy's.", metavar="NAME"),
        Option("--precision", str, "The behavior policy's.", metavar="NAME"),
        Option("--logprobs-mode", MODES, "What the engine had done to its logits.",
               shown="the engine's own, where SOURCE is its responses"),
        Option("--support", ("union", "replaced-last"), "Whether the sampled token took the place "
               "of the K-th in the lists.", shown="union"),
    ),
    "readout": (
        Option("--logits-rounded", bool, "Logits were rounded to bfloat16 before the log-sum-exp."),
    ),
    "update": (
        Option("--mask", str, "Mask of the update.", metavar="NAME", shown="the arm's name"),
        Option("--threshold", float, "δ of that mask."),
        Option("--divergence", ("kl", "tv"), "Divergence of that mask's region."),
    ),
}  # fmt: skip
"""What may be said in the metadata, by the object there that it stands in."""


@command(*READ, *(each for said in SAID.values() for each in said), QUIET)
def import_(call: Call) -> None:
    """Make a dump of what another framework wrote: responses, and how the policy scores them.

    Exit status 1 where a file's content is bad; then every fault is listed by file, line,
    response and token, and nothing is written.

    Example: deltad import examples/responses.jsonl RUN --vocab-size 16
    """
    from deltad.probes.offline import OfflineError, ScoringFiles, import_dump, write_requests
    from deltad.probes.offline.block import UpdateError

    *sources, run = call.run if call.requests is None else (*call.run, None)
    roles = {"pre": call.pre, "post": call.post, "join": call.join}
    _check(call, sources, run, roles)
    try:
        source = _source(call, sources)
        if run is None:
            with call.progress(source.size, "bytes") as bar, sink(call.requests) as file:
                count = write_requests(source, file, progress=bar.advance)
            call.note(f"{count} responses to score are in {call.requests}")
            return
        scores = {
            role: ScoringFiles(given, score=role != "join", step=call.step)
            for role, given in roles.items()
            if given
        }
        described = _described(source, call)
        size = sum(each.size for each in (source, *scores.values()))
        with call.progress(size, "bytes") as bar:
            done = import_dump(
                source, run, metadata=described, **scores, arm=call.arm, seed=call.seed,
                top_k=call.top_k, existing=call.existing, progress=bar.advance,
            )  # fmt: skip
    except OfflineError as error:
        for fault in error.faults or (error,):
            complain(fault)
        if len(error.faults) > 1:
            call.note("nothing was written")
        raise typer.Exit(Status.BAD_CONTENT) from None
    except UpdateError as error:
        raise OptionError(
            f"{error}: give `--mask`, `--threshold` and `--divergence` as the update had them"
        ) from error
    _say(done, run, call)


def _check(
    call: Call, sources: Sequence[Path], run: Path | None, roles: Mapping[str, Sequence[Path]]
) -> None:
    """Refuse files that cannot be read or cannot mean what they are given for, and bad names."""
    from deltad.dumps.consistency import ZERO_STEP
    from deltad.dumps.layout import check_arm, check_seed
    from deltad.probes.offline.files import NO_FILE
    from deltad.probes.offline.records import INT32

    if not sources:
        raise OptionError("SOURCE… RUN must be files with the responses, and the dump's folder")
    if call.step not in INT32:
        raise OptionError(f"`--step` must be an int32, got {call.step}")
    try:
        check_arm(call.arm)
        check_seed(call.seed)
    except ValueError as error:
        raise OptionError(str(error)) from error
    for path in (*sources, *(each for given in roles.values() for each in given)):
        if is_url(path):
            raise OptionError(f"{path}: only RUN may be a URL; copy these files here")
        if not path.exists():
            raise OptionError(f"{path} does not exist")
        if not path.is_file() and not path.is_dir():
            raise OptionError(f"{path} {NO_FILE}")
    if run is not None and run.exists() and not run.is_dir():
        raise OptionError(f"RUN must be a folder, but {run} is a file")
    for role, given in roles.items():
        if given and run is None:
            raise OptionError(f"`--{role}` has no part in `--requests`: leave it out")
    if run is None and call.requests.exists() and any(map(call.requests.samefile, sources)):
        raise OptionError(
            f"{call.requests} holds the responses: name another file for `--requests`"
        )
    for path in roles["post"]:
        if call.arm != ZERO_STEP and any(map(path.samefile, roles["pre"])):
            raise OptionError(
                f"{path} is given as the scores before the step and after it: then nothing "
                f"changed, which only the arm {ZERO_STEP} may say"
            )


def _source(call: Call, paths: list[Path]) -> Source:
    """The reader of the form."""
    from deltad.probes.offline import EngineFiles, NemoRL, PrimeRL, ScoringFiles

    if call.format == "scoring":
        return ScoringFiles(paths, step=call.step)
    if call.format == "prime-rl":
        return PrimeRL(paths)
    if call.format == "nemo-rl":
        return NemoRL(paths)
    return EngineFiles(
        call.format, paths, step=call.step, mode=call.logprobs_mode, temperature=call.temperature,
        top_k=call.top_k,
    )  # fmt: skip


def _described(source: Source, call: Call) -> dict[str, Any]:
    """The metadata: what the form knows, what the file says, what the options say."""
    from deltad.masks import CRITERIA

    found: dict[str, Any] = {
        name: dict(getattr(source, name, {})) for name in ("behavior", "update")
    }
    if call.metadata is not None:
        for key, value in _json_object(call.metadata, "--metadata").items():
            if key in SAID and not isinstance(value, dict):
                raise OptionError(f"`--metadata`: `{key}` of {call.metadata} must be a JSON object")
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    said = {key: call.given(options) for key, options in SAID.items()}
    if call.logprobs_mode:
        said["behavior"]["logprobs_mode"] += "_logprobs"
    if call.arm in (*CRITERIA, "none"):
        said["update"].setdefault("mask", call.arm)
    found |= said.pop("")
    for key, given in said.items():
        found[key] = {**found.get(key, {}), **given}
    config = Path(str(found.get("model") or "")) / "config.json"
    if "vocab_size" not in found and config.is_file():
        described = _json_object(config, "--model")
        described = described.get("text_config") or described
        if "vocab_size" in described:
            found["vocab_size"] = described["vocab_size"]
    if "vocab_size" not in found:
        raise OptionError(
            "the size of the vocabulary must be known: give `--vocab-size`, or a folder with a "
            "config.json by `--model`"
        )
    known = ("model", "tokenizer", "vocab_size", "temperature", "versions", *said)
    extra = {key: value for key, value in found.items() if key not in known}
    described = {key: value for key, value in found.items() if key in known}
    top_k = extra.pop("top_k", None) if call.top_k else None
    _check_described({**described, "top_k": top_k or 1, "extra": extra})
    return {**described, "extra": extra}


def _check_described(values: dict[str, Any]) -> None:
    """Refuse impossible metadata: a bad value is an option's, whichever it came by."""
    from deltad.divergence import DIVERGENCES
    from deltad.dumps import Metadata
    from deltad.dumps.consistency import SUPPORTS
    from deltad.dumps.rules import is_number

    try:
        known = Metadata(**values)
        known.to_json()
        if known.top_k > known.vocab_size:
            raise ValueError(f"`top_k` must be at most `vocab_size`, got {known.top_k}")
        for name, value, choices in (
            ("support", known.behavior.get("support", "union"), SUPPORTS),
            ("divergence", known.update.get("divergence", "kl"), tuple(DIVERGENCES)),
        ):
            if value not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")
        threshold = known.update.get("threshold")
        if threshold is not None and (not is_number(threshold) or threshold < 0):
            raise ValueError(f"`threshold` must be a number of at least 0, got {threshold!r}")
    except ValueError as error:
        raise OptionError(f"the dump's metadata: {error}") from error


def _json_object(path: Path, option: str) -> dict[str, Any]:
    """The object in a file of JSON."""
    from deltad._checks import parse_json

    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"`{option}`: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise OptionError(f"`{option}`: {path} must be JSON ({error})") from error
    if not isinstance(found, dict):
        raise OptionError(f"`{option}`: {path} must hold a JSON object")
    return found


def _say(done: Imported, run: Path, call: Call) -> None:
    """What was written, in a line, and what is good to know."""
    read = {("pre", "post"): "before and after", ("pre",): "before"}.get(done.readings)
    typer.echo(
        f"{run}: arm {call.arm}, seed {call.seed}: {done.responses} responses, "
        f"{done.tokens} tokens, top-{done.top_k}; the policy was read "
        + (f"{read} the step" if read else "neither before nor after the step")
    )
    if done.without_lists:
        call.note(f"{done.without_lists} tokens have no top-K lists: their D is unknown")
    if done.left_out:
        call.note(f"{done.left_out} tokens that were not sampled are left out")
    if done.ignored:
        call.note(f"passed over, having no meaning here: {', '.join(done.ignored)}")
    if "post" not in done.readings:
        call.note(
            "without the policy after the step there is no ΔD: `tokens`, `compare`, "
            "`table --over`, `watch` and `doctor` say what they can"
        )
