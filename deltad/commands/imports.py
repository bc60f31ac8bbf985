"""The command that makes a dump of files which another framework wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer

from .options import Quiet
from .places import as_place, is_url
from .terminal import BAD_CONTENT, OptionError, complain, note, progress_bar, sink

if TYPE_CHECKING:
    from deltad.probes.offline import Imported, ScoringFiles, Source

FORMATS: Final = ("scoring", "prime-rl", "nemo-rl", "vllm", "sglang", "openai", "llama.cpp")
"""Forms of SOURCE."""

MODES: Final = ("raw", "tempered", "processed")
"""What an engine had done to the logits: nothing, the temperature, that and truncation."""

_FILE: Final = "FILE"

Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="SOURCE… RUN",
        help="Files or folders with the responses, and last the folder of the dump, or its URL.",
        show_default=False,
        parser=as_place,
    ),
]


def import_(
    paths: Paths,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Form of SOURCE: scoring, prime-rl, nemo-rl, or the responses of an engine: vllm, "
            "sglang, openai, llama.cpp.",
        ),
    ] = "scoring",
    pre: Annotated[
        list[Path] | None,
        typer.Option(metavar=_FILE, help="Scores before the step; may be given several times."),
    ] = None,
    post: Annotated[
        list[Path] | None,
        typer.Option(metavar=_FILE, help="Scores after the step; may be given several times."),
    ] = None,
    join: Annotated[
        list[Path] | None,
        typer.Option(metavar=_FILE, help="More fields of the same responses, advantages say."),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            metavar=_FILE, help="Write what has to be scored there, and no dump: no RUN is given."
        ),
    ] = None,
    arm: Annotated[str, typer.Option(help="Name of the update that was applied.")] = "actual",
    seed: Annotated[int, typer.Option(help="Independent repetition.")] = 0,
    step: Annotated[int, typer.Option(help="Optimizer step of records that say none.")] = 0,
    model: Annotated[
        str, typer.Option(metavar="NAME|DIR", help="The policy; a folder's config gives n.")
    ] = "",
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="n of the model.", show_default="the model's")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="K.", show_default="RUN's, else the longest list"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="That all log-probs are at.", show_default="the metadata's, else 1"),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="The behavior policy's.")] = "",
    precision: Annotated[str, typer.Option(metavar="NAME", help="The behavior policy's.")] = "",
    mode: Annotated[
        str,
        typer.Option(
            "--logprobs-mode",
            metavar="|".join(MODES),
            help="What the engine had done to its logits.",
            show_default="the engine's own, where SOURCE is its responses",
        ),
    ] = "",
    support: Annotated[
        str,
        typer.Option(
            metavar="union|replaced-last",
            help="Whether the sampled token took the place of the K-th in the lists.",
            show_default="union",
        ),
    ] = "",
    mask: Annotated[
        str, typer.Option(metavar="NAME", help="Mask of the update.", show_default="the arm's name")
    ] = "",
    threshold: Annotated[float | None, typer.Option(help="δ of that mask.")] = None,
    divergence: Annotated[
        str, typer.Option(metavar="kl|tv", help="Divergence of that mask's region.")
    ] = "",
    rounded: Annotated[
        bool,
        typer.Option(
            "--logits-rounded", help="Logits were rounded to bfloat16 before the log-sum-exp."
        ),
    ] = False,
    metadata: Annotated[
        Path | None,
        typer.Option(metavar=_FILE, help="JSON with more of the dump's metadata."),
    ] = None,
    existing: Annotated[
        str,
        typer.Option(
            metavar="refuse|replace|append", help="What to do where RUN has this arm and seed."
        ),
    ] = "refuse",
    quiet: Quiet = False,
) -> None:
    """Make a dump of what another framework wrote: responses, and how the policy scores them.

    Exit status 1 where a file's content is bad; then every fault is listed by file, line,
    response and token, and nothing is written.
    """
    from deltad.dumps.layout import check_arm, check_seed
    from deltad.dumps.writer import Existing
    from deltad.masks import CRITERIA
    from deltad.probes.offline import OfflineError, ScoringFiles, import_dump
    from deltad.probes.offline.block import UpdateError
    from deltad.probes.offline.files import NO_FILE
    from deltad.probes.offline.records import INT32

    sources, run = (paths, None) if requests is not None else (paths[:-1], paths[-1])
    if not sources:
        raise OptionError("SOURCE… RUN must be files with the responses, and the dump's folder")
    if existing not in get_args(Existing):
        raise OptionError(
            f"`--existing` must be one of {', '.join(get_args(Existing))}, got {existing!r}"
        )
    for path in (*sources, *(pre or ()), *(post or ()), *(join or ())):
        if is_url(path):
            raise OptionError(f"{path}: only RUN may be a URL; copy these files here")
        if not path.exists():
            raise OptionError(f"{path} does not exist")
        if not path.is_file() and not path.is_dir():
            raise OptionError(f"{path} {NO_FILE}")
    if step not in INT32:
        raise OptionError(f"`--step` must be an int32, got {step}")
    _check_places(run, requests, sources, {"pre": pre, "post": post, "join": join}, arm)
    try:
        check_arm(arm)
        check_seed(seed)
    except ValueError as error:
        raise OptionError(str(error)) from error
    try:
        source = _source(form, sources, step, mode or None, temperature, top_k)
        if run is None:
            _write_requests(source, requests, quiet)
            return
        scores: dict[str, ScoringFiles | None] = {
            role: ScoringFiles(given, score=role != "join", step=step) if given else None
            for role, given in (("pre", pre), ("post", post), ("join", join))
        }
        described = _described(
            metadata,
            source,
            {
                "": {
                    "model": model,
                    "vocab_size": vocab_size,
                    "temperature": temperature,
                    "top_k": top_k,
                },
                "behavior": {
                    "engine": engine,
                    "precision": precision,
                    "logprobs_mode": f"{mode}_logprobs" if mode else "",
                    "support": support,
                },
                "readout": {"logits_rounded": rounded or None},
                "update": {
                    "mask": mask or (arm if arm in CRITERIA or arm == "none" else ""),
                    "threshold": threshold,
                    "divergence": divergence,
                },
            },
        )
        files = [source, *(each for each in scores.values() if each is not None)]
        with progress_bar(sum(each.size for each in files), "bytes", quiet=quiet) as bar:
            done = import_dump(
                source, run, metadata=described, **scores, arm=arm, seed=seed, top_k=top_k,
                existing=existing, progress=bar.advance,  # type: ignore[arg-type]
            )  # fmt: skip
    except OfflineError as error:
        for fault in error.faults or (error,):
            complain(str(fault))
        if len(error.faults) > 1:
            note("nothing was written", quiet=quiet)
        raise typer.Exit(BAD_CONTENT) from None
    except UpdateError as error:
        raise OptionError(
            f"{error}: give `--mask`, `--threshold` and `--divergence` as the update had them"
        ) from error
    _say(done, run, arm, seed, quiet)


def _source(
    form: str,
    paths: list[Path],
    step: int,
    mode: str | None,
    temperature: float | None,
    top_k: int | None,
) -> Source:
    """The reader of a form."""
    from deltad.probes.offline import EngineFiles, NemoRL, PrimeRL, ScoringFiles

    for option, value, choices in (("format", form, FORMATS), ("logprobs-mode", mode, MODES)):
        if value is not None and value not in choices:
            raise OptionError(f"`--{option}` must be one of {', '.join(choices)}, got {value!r}")
    if form == "scoring":
        return ScoringFiles(paths, step=step)
    if form == "prime-rl":
        return PrimeRL(paths)
    if form == "nemo-rl":
        return NemoRL(paths)
    return EngineFiles(form, paths, step=step, mode=mode, temperature=temperature, top_k=top_k)


def _write_requests(source: Source, output: Path | None, quiet: bool) -> None:
    """Write what has to be scored."""
    from deltad.probes.offline import write_requests

    with progress_bar(source.size, "bytes", quiet=quiet) as bar, sink(output) as file:
        count = write_requests(source, file, progress=bar.advance)
    note(f"{count} responses to score are in {output}", quiet=quiet)


def _described(
    path: Path | None, source: Source, options: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The metadata: what the form knows, what the file says, what the options say."""
    found: dict[str, Any] = {
        name: dict(getattr(source, name, {})) for name in ("behavior", "update")
    }
    if path is not None:
        for key, value in _json_object(path, "--metadata").items():
            if key in options and not isinstance(value, dict):
                raise OptionError(f"`--metadata`: `{key}` of {path} must be a JSON object")
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    for key, values in options.items():
        given = {name: value for name, value in values.items() if value not in ("", None)}
        if key:
            found[key] = {**found.get(key, {}), **given}
        else:
            found |= given
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
    top_k = extra.pop("top_k", None) if options[""]["top_k"] else None
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
    sources: list[Path],
    given: dict[str, list[Path] | None],
    arm: str,
) -> None:
    """Refuse files that cannot mean what they are given for."""
    from deltad.dumps.consistency import ZERO_STEP

    if run is not None and run.exists() and not run.is_dir():
        raise OptionError(f"RUN must be a folder, but {run} is a file")
    if requests is not None:
        for option, paths in given.items():
            if paths:
                raise OptionError(f"`--{option}` has no part in `--requests`: leave it out")
        if requests.exists() and any(requests.samefile(path) for path in sources):
            raise OptionError(f"{requests} holds the responses: name another file for `--requests`")
        return
    before, after = given["pre"] or [], given["post"] or []
    for path in after:
        if arm != ZERO_STEP and any(path.samefile(other) for other in before):
            raise OptionError(
                f"{path} is given as the scores before the step and after it: then nothing "
                f"changed, which only the arm {ZERO_STEP} may say"
            )


def _json_object(path: Path, option: str) -> dict[str, Any]:
    """The object in a file of JSON."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"`{option}`: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise OptionError(f"`{option}`: {path} must be JSON ({error})") from error
    if not isinstance(found, dict):
        raise OptionError(f"`{option}`: {path} must hold a JSON object")
    return found


def _say(done: Imported, run: Path, arm: str, seed: int, quiet: bool) -> None:
    """What was written, in a line, and what is good to know."""
    read = {("pre", "post"): "before and after", ("pre",): "before"}.get(done.readings)
    typer.echo(
        f"{run}: arm {arm}, seed {seed}: {done.responses} responses, {done.tokens} tokens, "
        f"top-{done.top_k}; the policy was read "
        + (f"{read} the step" if read else "neither before nor after the step")
    )
    if done.without_lists:
        note(f"{done.without_lists} tokens have no top-K lists: their D is unknown", quiet=quiet)
    if done.left_out:
        note(f"{done.left_out} tokens that were not sampled are left out", quiet=quiet)
    if done.ignored:
        note(f"passed over, having no meaning here: {', '.join(done.ignored)}", quiet=quiet)
    if "post" not in done.readings:
        note(
            "without the policy after the step there is no ΔD: `tokens`, `compare`, `sweep`, "
            "`doctor` and `report` say what they can",
            quiet=quiet,
        )
