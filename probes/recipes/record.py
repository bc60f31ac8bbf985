"""From a recipe to a dump: which seeds are missing, workers that record them, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from deltad.dumps import METADATA_KEY, DumpError, Metadata, Near, is_recorded, unfinished
from deltad.dumps.aside import remove_leftovers
from deltad.dumps.content import Vectors
from deltad.dumps.lock import is_empty, locked
from deltad.dumps.storage import open_parquet, place, remove_tree
from deltad.probes.selection import Keep, Selection

from .recipe import Recipe, RecipeError
from .workers import Progress, Report, default_workers, run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

ZERO_STEP = "zero-step"
"""`deltad.probes.arms.ZERO_STEP`, without torch."""

STORED: Mapping[str, Mapping[str, Any]] = {
    "above": {"rule": "above", "divergence": "kl", "threshold": 0.05},
    "all": {"rule": "all"},
}
"""What `store` means in the dump's metadata, where every token is read after the step."""

CUT = ("near", "outside", "disagreement")
"""Further values of `store`: what they leave out is not read after the step either."""

VECTORS: Mapping[str, Vectors] = {"all": "all", "near": Near()}
"""What `vectors` means for a writer."""


@dataclass(frozen=True)
class RecordJob:
    """What a worker process is handed."""

    recipe: Recipe
    folder: Path
    stored: Mapping[str, Any]
    ladder_tokens: int | None = None
    vectors: Vectors = "all"
    cut: str | None = None

    def prepare(self, report: Report) -> None:
        """Do what all seeds share, and see that recorded ones started from the same policy."""
        from .describe import start_of
        from .engine import check_installed

        use_one_thread()
        check_installed(self.recipe.engine)
        self.recipe.prepare(report)
        recorded = list(_recorded(self.folder))
        if recorded:
            start = start_of(self.recipe, self.recipe.load().model.state_dict())
            for path, metadata in recorded:
                refuse_another_start(path, metadata.extra.get("start"), start)

    def open(self, report: Report) -> Callable[[int, Report], None]:
        """Load the recipe's model; the function records one seed."""
        from .chain import Chain

        use_one_thread()
        chain = Chain.load(self.recipe, report)
        return lambda seed, report: chain.record(
            self.folder,
            seed,
            self.stored,
            report,
            ladder_tokens=self.ladder_tokens,
            vectors=self.vectors,
            cut=self.cut,
        )


def record(
    recipe: Recipe,
    run_folder: str | Path,
    *,
    seeds: int | Iterable[int] | None = None,
    workers: int | None = None,
    resume: bool = False,
    store: str = "above",
    vectors: str = "all",
    ladder_tokens: int | None = None,
    quiet: bool = False,
) -> list[int]:
    """Record a recipe's seeds into a dump.

    Parameters
    ----------
    recipe
        What to do.
    run_folder
        The dump, a folder or a URL; made if need be.
    seeds
        How many, from 0, or which; by default the recipe's number.
    workers
        Processes; by default as many as cores, never more than seeds. 0 works in this process.
        The files are the same whatever the number.
    resume
        Record only the seeds that are not complete, into a dump of the same recipe.
    store
        "above" keeps the tokens with D above 0.05 nats (KL), "all" keeps every token and adds
        decoded tokens and prompts. "near" (D above 0.01), "outside" (D above the recipe's
        threshold) and "disagreement" (of these, tokens that exactly one of the ratio and the
        prediction masks) also cut the forward after the step to what they keep.
    vectors
        "all" keeps the vectors of every token stored; "near" those of tokens with D of at least
        0.01 nats (KL), and of a hundredth of the others.
    ladder_tokens
        Measure the ladder of every step of every arm but zero-step, with the own and the
        sequence's gradient of so many of a step's stored tokens; None for no ladder.
    quiet
        No progress bar.

    Returns
    -------
    list of int
        The seeds that were recorded now.

    Raises
    ------
    RecipeError
        The folder is not empty and `resume` is not set, or it holds another recipe's dump, or
        something that the recipe needs is missing.
    WorkerError
        A seed failed or a worker died; what else was recorded is kept.
    InUseError
        Another process records into the folder.
    KeyboardInterrupt
        Complete seeds are kept and nothing half-written stays.
    """
    if store not in (*STORED, *CUT):
        raise RecipeError(f"`store` must be one of {', '.join((*STORED, *CUT))}, got {store!r}")
    if vectors not in VECTORS:
        raise RecipeError(f"`vectors` must be one of {', '.join(VECTORS)}, got {vectors!r}")
    folder, stored = place(run_folder), _stored(recipe, store)
    wanted = _wanted(recipe, seeds)
    if workers is not None and workers < 0:
        raise RecipeError(f"`workers` must be at least 0, got {workers}")
    if ladder_tokens is not None and ladder_tokens < 0:
        raise RecipeError(f"`ladder_tokens` must be at least 0, got {ladder_tokens}")
    if not resume:
        _refuse_what_is_there(folder)
    else:
        _refuse_another_recipe(recipe, stored, VECTORS[vectors], ladder_tokens, folder)
    missing = [seed for seed in wanted if not is_complete(recipe, folder, seed)]
    if not missing:
        return []
    count = default_workers() if workers is None else workers
    cut = store if store in CUT else None
    job = RecordJob(recipe, folder, stored, ladder_tokens, VECTORS[vectors], cut)
    with locked(folder):
        if not resume:
            _refuse_what_is_there(folder)
        missing = [seed for seed in missing if not is_complete(recipe, folder, seed)]
        try:
            with _progress(recipe.name, missing, quiet=quiet) as watch, threads_put_back(not count):
                run(job, missing, workers=count, watch=watch)
        except RecipeError:
            raise  # nothing was begun, so what is there stays as it is
        except BaseException:
            _tidy(recipe, folder, missing)
            raise
        _tidy(recipe, folder, missing)
    return missing


def _refuse_what_is_there(folder: Path) -> None:
    """Refuse a folder that holds something already."""
    if not is_empty(folder):
        raise RecipeError(
            f"{folder} is not empty: resume it, or choose another folder for a new dump"
        )


def is_complete(recipe: Recipe, folder: Path, seed: int) -> bool:
    """Whether every arm that the seed should have is there, and was closed."""
    return all(is_recorded(folder, arm=arm, seed=seed) for arm in recipe.arms_of(seed))


def _wanted(recipe: Recipe, seeds: int | Iterable[int] | None) -> list[int]:
    """Seeds asked for."""
    if seeds is None:
        seeds = recipe.default_seeds
    found = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise RecipeError(f"`seeds` must be at least one distinct number from 0 on, got {seeds}")
    return found


def _words(vectors: Vectors) -> str:
    """The rule of vectors as an option or a sentence has it."""
    if isinstance(vectors, Near):
        return f"near {vectors.divergence} {vectors.threshold:g}, sample {vectors.sample:g}"
    return vectors


def _stored(recipe: Recipe, store: str) -> Mapping[str, Any]:
    """What `store` means in the dump's metadata."""
    if store in STORED:
        return STORED[store]
    return Selection(
        keep=cast(Keep, store), threshold=recipe.threshold, divergence=recipe.divergence
    ).stored


def _without_counts(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A rule of storage without what was counted under it."""
    return {key: value for key, value in stored.items() if key != "outside"}


def _refuse_another_recipe(
    recipe: Recipe,
    stored: Mapping[str, Any],
    vectors: Vectors,
    ladder_tokens: int | None,
    folder: Path,
) -> None:
    """Refuse a dump that was recorded otherwise, naming the first field that differs."""
    now = recipe.to_json() | {
        "stored": _without_counts(stored),
        "vectors": _words(vectors),
        "ladder_tokens": ladder_tokens,
    }
    for path, metadata in _recorded(folder):
        before = metadata.extra.get("recipe")
        if not isinstance(before, dict):
            raise RecipeError(f"{path} was not recorded by a recipe: choose another folder")
        ladder = metadata.extra.get("ladder") or {}
        then = before | {
            "stored": _without_counts(metadata.stored),
            "vectors": _words(metadata.near or "all"),
            "ladder_tokens": ladder.get("tokens"),
        }
        if path.parent.parent.name == f"arm={ZERO_STEP}":  # has no ladder in any case
            then["ladder_tokens"] = ladder_tokens
        for field in [*now, *then]:
            if then.get(field) != now.get(field):
                raise RecipeError(
                    f"{folder} was recorded with another recipe: {field} is "
                    f"{then.get(field)!r} there and {now.get(field)!r} now; choose another "
                    "folder, or the options of before"
                )


def refuse_another_start(place: Path, then: Any, now: Mapping[str, Any]) -> None:
    """Refuse to go on from another policy than the one that a file says it started from.

    Raises
    ------
    RecipeError
        They differ, or the file does not say.
    """
    before = then.get("policy_sha256") if isinstance(then, dict) else None
    if not isinstance(before, str):
        raise RecipeError(
            f"{place} does not say which policy it started from, so more seeds may start from "
            "another one: choose another folder"
        )
    if before != now["policy_sha256"]:
        raise RecipeError(
            f"{place} started from the policy with SHA-256 {before}, and this recipe now starts "
            f"from {now['policy_sha256']}: choose another folder (a policy that is pre-trained on "
            "another processor, or by another torch, is another policy)"
        )


def _recorded(folder: Path) -> Iterator[tuple[Path, Metadata]]:
    """Metadata of the files of a dump, complete or not."""
    for path in sorted(folder.glob("arm=*/seed=*/part-*.parquet")):
        try:
            with open_parquet(path) as file:
                found = file.metadata.metadata or {}
        except (pa.ArrowException, OSError) as error:
            raise DumpError(
                path, f"cannot be read ({error}): delete it to record it anew"
            ) from error
        yield path, Metadata.from_json(found.get(METADATA_KEY, b"{}"), path)


def use_one_thread() -> None:
    """One thread for torch: a seed then computes the same bits wherever it runs."""
    import torch

    torch.set_num_threads(1)


@contextmanager
def threads_put_back(here: bool) -> Iterator[None]:
    """Put torch's number of threads back, where the work is done in this process."""
    if not here:
        yield
        return
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tidy(recipe: Recipe, folder: Path, seeds: list[int]) -> None:
    """Remove what is not whole: files aside, seeds of which an arm is missing, empty folders."""
    remove_leftovers(folder, "")
    for seed in seeds:
        if is_complete(recipe, folder, seed):
            continue
        for part in folder.glob(f"arm=*/seed={seed}"):
            remove_tree(part)
        remove_tree(folder / "_prompts" / f"seed={seed}")
        for note in unfinished(folder, seed=seed):
            note.take()
    for each in (*folder.glob("arm=*"), folder / "_prompts", folder):
        if each.is_dir() and not any(each.iterdir()):
            each.rmdir()


@contextmanager
def _progress(name: str, seeds: list[int], *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Progress on standard error: bars on a terminal, in a log a line a seed."""
    if quiet:
        yield lambda message: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Log(console, name, len(seeds))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console) as bars:
        yield _Watcher(bars, name, len(seeds))


class _Log:
    """Turns messages into lines: what is prepared, and each seed that is done."""

    def __init__(self, console: Console, name: str, count: int) -> None:
        self._console, self._name, self._count, self._done = console, name, count, 0
        self._preparing = ""

    def __call__(self, message: Progress) -> None:
        """Print a line where there is something new."""
        if message.seed is None and message.text != self._preparing and message.text:
            self._preparing = message.text
            self._print(message.text)
        if message.seed is not None and message.done:
            self._done += 1
            self._print(f"seed {message.seed} recorded, {self._done} of {self._count}")

    def _print(self, text: str) -> None:
        """Print one line, never wrapped."""
        self._console.print(f"{self._name}: {text}", soft_wrap=True, highlight=False)


class _Watcher:
    """Turns messages into two progress bars, of the preparation and of the seeds."""

    def __init__(self, bars: Bars, name: str, count: int) -> None:
        self._bars, self._name, self._count, self._done = bars, name, count, 0
        self._preparing: Any = None
        self._seeds = bars.add_task(name, total=count, state=f"0/{count} seeds")

    def __call__(self, message: Progress) -> None:
        """Show a message."""
        if message.seed is None:
            self._prepare(message)
            return
        self._done += message.done
        at = "" if message.done else f" · seed {message.seed}: {message.text}"
        self._bars.update(
            self._seeds,
            completed=self._done,
            state=f"{self._done}/{self._count} seeds{at}",
        )

    def _prepare(self, message: Progress) -> None:
        """Show how far the shared preparation is."""
        if self._preparing is None and not message.done:
            self._preparing = self._bars.add_task(self._name, total=1.0, state="")
            self._bars.reset(self._seeds)  # their time begins when the preparation ends
        if self._preparing is not None:
            self._bars.update(
                self._preparing,
                description=f"{self._name}: {message.text}" if message.text else None,
                completed=message.fraction,
                state=f"{message.fraction:.0%}",
            )
        if message.done:
            self._bars.reset(self._seeds)
