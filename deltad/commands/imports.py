"""The command that makes a dump of files which another framework wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import typer

from deltad._checks import parse_json

from .options import QUIET, Call, Group, argument, command, option
from .terminal import BAD_CONTENT, OptionError, complain, is_url, note, sink

if TYPE_CHECKING:
    from deltad.probes.offline import Imported, ScoringFiles, Source

FORMATS: Final = ("scoring", "prime-rl", "nemo-rl", "vllm", "sglang", "openai", "llama.cpp")
"""Forms of SOURCE."""

MODES: Final = ("raw", "tempered", "processed")
"""What an engine had done to the logits: nothing, the temperature, that and truncation."""

SOURCES_AND_RUN: Final = argument(
    list[Path], "Files or folders with the responses, and last the folder of the dump, or its URL.",
    "SOURCE… RUN",
)  # fmt: skip

READ: Final[Group] = {
    "source_form": option(
        str, "scoring",
        "Form of SOURCE: scoring, prime-rl, nemo-rl, or the responses of an engine: vllm, sglang, "
        "openai, llama.cpp.", "--format", metavar="NAME",
    ),
    "pre": option(
        list[Path] | None, None, "Scores before the step; may be given several times.",
        metavar="FILE",
    ),
    "post": option(
        list[Path] | None, None, "Scores after the step; may be given several times.",
        metavar="FILE",
    ),
    "join": option(
        list[Path] | None, None, "More fields of the same responses, advantages say.",
        metavar="FILE",
    ),
    "requests": option(
        Path | None, None, "Write what has to be scored there, and no dump: no RUN is given.",
        metavar="FILE",
    ),
    "arm": option(str, "actual", "Name of the update that was applied."),
    "seed": option(int, 0, "Independent repetition."),
    "step": option(int, 0, "Optimizer step of records that say none."),
    "existing": option(
        str, "refuse", "What to do where RUN has this arm and seed.",
        metavar="refuse|replace|append",
    ),
    "metadata": option(
        Path | None, None, "JSON with more of the dump's metadata.", metavar="FILE"
    ),
}  # fmt: skip
"""What is read, and where it goes."""

SAID: Final[Mapping[str, Group]] = {
    "": {
        "model": option(
            str, "", "The policy; a folder's config gives n.", metavar="NAME|DIR"
        ),
        "vocab_size": option(
            int | None, None, "n of the model.", min=1, show_default="the model's"
        ),
        "temperature": option(
            float | None, None, "That all log-probs are at.",
            show_default="the metadata's, else 1",
        ),
        "top_k": option(int | None, None, "K.", min=1, show_default="RUN's, else the longest list"),
    },
    "behavior": {
        "engine": option(str, "", "The behavior policy's.", metavar="NAME"),
        "precision": option(str, "", "The behavior policy's.", metavar="NAME"),
        "logprobs_mode": option(
            str, "", "What the engine had done to its logits.", metavar="|".join(MODES),
            show_default="the engine's own, where SOURCE is its responses",
        ),
        "support": option(
            str, "", "Whether the sampled token took the place of the K-th in the lists.",
            metavar="union|replaced-last", show_default="union",
        ),
    },
    "readout": {
        "logits_rounded": option(
            bool, False, "Logits were rounded to bfloat16 before the log-sum-exp."
        ),
    },
    "update": {
        "mask": option(
            str, "", "Mask of the update.", metavar="NAME", show_default="the arm's name"
        ),
        "threshold": option(float | None, None, "δ of that mask."),
        "divergence": option(
            str, "", "Divergence of that mask's region.", metavar="kl|tv"
        ),
    },
}  # fmt: skip
"""What may be said in the metadata, by the object there that it stands in."""


@command(READ, *SAID.values(), QUIET, run=SOURCES_AND_RUN)
def import_(call: Call) -> None:
    """Make a dump of what another framework wrote: responses, and how the policy scores them.

    Exit status 1 where a file's content is bad; then every fault is listed by file, line,
    response and token, and nothing is written.

    Example: deltad import examples/responses.jsonl RUN --vocab-size 16
    """
    from deltad.dumps.layout import check_arm, check_seed
    from deltad.dumps.writer import Existing
    from deltad.probes.offline import OfflineError, ScoringFiles, import_dump
    from deltad.probes.offline.block import UpdateError
    from deltad.probes.offline.records import INT32

    arm, seed, step = call.arm, call.seed, call.step
    sources = call.run if call.requests is not None else call.run[:-1]
    run = None if call.requests is not None else call.run[-1]
    roles = {role: getattr(call, role) or [] for role in ("pre", "post", "join")}
    if not sources:
        raise OptionError("SOURCE… RUN must be files with the responses, and the dump's folder")
    if call.existing not in get_args(Existing):
        choices = ", ".join(get_args(Existing))
        raise OptionError(f"`--existing` must be one of {choices}, got {call.existing!r}")
    if step not in INT32:
        raise OptionError(f"`--step` must be an int32, got {step}")
    _check_places(run, call.requests, sources, roles, arm)
    try:
        check_arm(arm)
        check_seed(seed)
    except ValueError as error:
        raise OptionError(str(error)) from error
    try:
        source = _source(call, list(sources))
        if run is None:
            _write_requests(source, call)
            return
        scores: dict[str, ScoringFiles | None] = {
            role: ScoringFiles(given, score=role != "join", step=step) if given else None
            for role, given in roles.items()
        }
        described = _described(source, call)
        files = [source, *(each for each in scores.values() if each is not None)]
        with call.progress(sum(each.size for each in files), "bytes") as bar:
            done = import_dump(
                source, run, metadata=described, **scores, arm=arm, seed=seed, top_k=call.top_k,
                existing=call.existing, progress=bar.advance,
            )  # fmt: skip
    except OfflineError as error:
        for fault in error.faults or (error,):
            complain(str(fault))
        if len(error.faults) > 1:
            note("nothing was written", quiet=call.quiet)
        raise typer.Exit(BAD_CONTENT) from None
    except UpdateError as error:
        raise OptionError(
            f"{error}: give `--mask`, `--threshold` and `--divergence` as the update had them"
        ) from error
    _say(done, run, call)


def _source(call: Call, paths: list[Path]) -> Source:
    """The reader of the form."""
    from deltad.probes.offline import EngineFiles, NemoRL, PrimeRL, ScoringFiles

    form, mode = call.source_form, call.logprobs_mode or None
    for name, value, choices in (("format", form, FORMATS), ("logprobs-mode", mode, MODES)):
        if value is not None and value not in choices:
            raise OptionError(f"`--{name}` must be one of {', '.join(choices)}, got {value!r}")
    if form == "scoring":
        return ScoringFiles(paths, step=call.step)
    if form == "prime-rl":
        return PrimeRL(paths)
    if form == "nemo-rl":
        return NemoRL(paths)
    return EngineFiles(
        form, paths, step=call.step, mode=mode, temperature=call.temperature, top_k=call.top_k
    )


def _write_requests(source: Source, call: Call) -> None:
    """Write what has to be scored."""
    from deltad.probes.offline import write_requests

    with call.progress(source.size, "bytes") as bar, sink(call.requests) as file:
        count = write_requests(source, file, progress=bar.advance)
    note(f"{count} responses to score are in {call.requests}", quiet=call.quiet)


def _described(source: Source, call: Call) -> dict[str, Any]:
    """The metadata: what the form knows, what the file says, what the options say."""
    from deltad.masks import CRITERIA

    found: dict[str, Any] = {
        name: dict(getattr(source, name, {})) for name in ("behavior", "update")
    }
    path = call.metadata
    if path is not None:
        for key, value in _json_object(path, "--metadata").items():
            if key in SAID and not isinstance(value, dict):
                raise OptionError(f"`--metadata`: `{key}` of {path} must be a JSON object")
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    said = dict(call.values)
    said["logits_rounded"] = said["logits_rounded"] or None
    said["mask"] = said["mask"] or (call.arm if call.arm in (*CRITERIA, "none") else "")
    if said["logprobs_mode"]:
        said["logprobs_mode"] += "_logprobs"
    for key, names in SAID.items():
        given = {name: said[name] for name in names if said[name] not in ("", None)}
        found |= {key: {**found.get(key, {}), **given}} if key else given
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
    known = {"model", "tokenizer", "vocab_size", "temperature", "versions"}
    known |= {"behavior", "readout", "update"}
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
        support = known.behavior.get("support", "union")
        if support not in SUPPORTS:
            raise ValueError(f"`support` must be one of {', '.join(SUPPORTS)}, got {support!r}")
        divergence = known.update.get("divergence")
        if divergence is not None and divergence not in tuple(DIVERGENCES):
            names = ", ".join(DIVERGENCES)
            raise ValueError(f"`divergence` must be one of {names}, got {divergence!r}")
        threshold = known.update.get("threshold")
        if threshold is not None and (not is_number(threshold) or threshold < 0):
            raise ValueError(f"`threshold` must be a number of at least 0, got {threshold!r}")
    except ValueError as error:
        raise OptionError(f"the dump's metadata: {error}") from error


def _check_places(
    run: Path | None,
    requests: Path | None,
    sources: Sequence[Path],
    roles: Mapping[str, Sequence[Path]],
    arm: str,
) -> None:
    """Refuse files that cannot be read, or cannot mean what they are given for."""
    from deltad.dumps.consistency import ZERO_STEP
    from deltad.probes.offline.files import NO_FILE

    for path in (*sources, *(each for given in roles.values() for each in given)):
        if is_url(path):
            raise OptionError(f"{path}: only RUN may be a URL; copy these files here")
        if not path.exists():
            raise OptionError(f"{path} does not exist")
        if not path.is_file() and not path.is_dir():
            raise OptionError(f"{path} {NO_FILE}")
    if run is not None and run.exists() and not run.is_dir():
        raise OptionError(f"RUN must be a folder, but {run} is a file")
    if requests is not None:
        for role, paths in roles.items():
            if paths:
                raise OptionError(f"`--{role}` has no part in `--requests`: leave it out")
        if requests.exists() and any(requests.samefile(path) for path in sources):
            raise OptionError(f"{requests} holds the responses: name another file for `--requests`")
        return
    for path in roles["post"]:
        if arm != ZERO_STEP and any(path.samefile(other) for other in roles["pre"]):
            raise OptionError(
                f"{path} is given as the scores before the step and after it: then nothing "
                f"changed, which only the arm {ZERO_STEP} may say"
            )


def _json_object(path: Path, option: str) -> dict[str, Any]:
    """The object in a file of JSON."""
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
        note(
            f"{done.without_lists} tokens have no top-K lists: their D is unknown", quiet=call.quiet
        )
    if done.left_out:
        note(f"{done.left_out} tokens that were not sampled are left out", quiet=call.quiet)
    if done.ignored:
        note(f"passed over, having no meaning here: {', '.join(done.ignored)}", quiet=call.quiet)
    if "post" not in done.readings:
        note(
            "without the policy after the step there is no ΔD: `tokens`, `compare`, "
            "`table --over`, `watch` and `doctor` say what they can",
            quiet=call.quiet,
        )
