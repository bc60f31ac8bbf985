"""Recording: whatever the number of workers, whatever is there already."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest

from deltad.dumps import DumpError, check_dump
from deltad.probes.recipes import RecipeError, TinyRecipe, WorkerError, record
from deltad.probes.recipes import chain as chain_module
from deltad.probes.recipes.workers import Report

from .micro import micro


def contents(run: Path) -> dict[str, Any]:
    """Every file's rows, by its path."""
    return {str(path.relative_to(run)): pq.read_table(path) for path in run.rglob("*.parquet")}


def same(one: Path, other: Path) -> bool:
    """Whether two dumps hold the same files with the same bytes in every column."""
    left, right = contents(one), contents(other)
    return left.keys() == right.keys() and all(
        table.schema.equals(right[name].schema)
        # Row by row as bytes, so that NaN equals NaN and -0.0 differs from 0.0.
        and [column.to_pylist().__repr__() for column in table.columns]
        == [column.to_pylist().__repr__() for column in right[name].columns]
        for name, table in left.items()
    )


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_files_are_the_same_whatever_the_number_of_workers(
    cache: Path, whole_dump: Path, tmp_path: Path, workers: int
) -> None:
    record(micro(), tmp_path / "run", seeds=2, workers=workers, store="all", quiet=True)
    assert same(tmp_path / "run", whole_dump)


def test_only_what_lies_above_the_rule_is_stored(
    cache: Path, whole_dump: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    record(micro(), run, seeds=[1], workers=0, quiet=True)
    name = "arm=none/seed=1/part-0-0.parquet"
    above, everything = pq.read_table(run / name), pq.read_table(whole_dump / name)
    assert 0 < above.num_rows < everything.num_rows
    assert set(everything.column_names) - set(above.column_names) == {"token"}
    assert not (run / "_prompts").exists()


def test_resuming_does_what_is_missing_only(cache: Path, whole_dump: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_dump, run)
    (run / "arm=ratio" / "seed=0" / "part-0-0.parquet").unlink()
    kept = run / "arm=none" / "seed=1" / "part-0-0.parquet"
    before = kept.stat().st_mtime_ns
    options: dict[str, Any] = {"workers": 0, "store": "all", "quiet": True, "resume": True}
    assert record(micro(), run, seeds=2, **options) == [0]
    assert kept.stat().st_mtime_ns == before
    assert same(run, whole_dump)
    assert record(micro(), run, seeds=2, **options) == []


def test_resuming_fills_a_gap_between_parts_and_clears_leftovers(
    cache: Path, whole_dump: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_dump, run)
    part = run / "arm=ratio" / "seed=1" / "part-0-0.parquet"
    part.rename(part.with_name("part-0-1.parquet"))
    (run / "_writing.arm=none.seed=1.part-0-0.ab.folder.tmp" / "arm=none").mkdir(parents=True)
    options: dict[str, Any] = {"workers": 0, "store": "all", "quiet": True, "resume": True}
    assert record(micro(), run, seeds=2, **options) == [1]
    assert same(run, whole_dump)


@pytest.mark.parametrize(
    "store",
    ["disagreement", *(pytest.param(s, marks=pytest.mark.slow) for s in ("near", "outside"))],
)
def test_a_forward_that_is_cut_records_the_same_numbers(
    cache: Path, tmp_path: Path, store: str
) -> None:
    options: dict[str, Any] = {"workers": 0, "store": store, "quiet": True}
    recipe = micro(threshold=0.02)
    record(recipe, tmp_path / "run", seeds=1, **options)
    record(recipe, tmp_path / "whole", seeds=1, **(options | {"store": "all"}))
    assert record(recipe, tmp_path / "run", seeds=1, resume=True, **options) == []
    assert not check_dump(tmp_path / "run")
    least = {"near": 0.01}.get(store, 0.02)
    for arm in recipe.arms_of(0):
        name = f"arm={arm}/seed=0/part-0-0.parquet"
        cut, whole = (pq.ParquetFile(tmp_path / run / name) for run in ("run", "whole"))
        said = json.loads(cut.metadata.metadata[b"deltad"])
        assert said["readout"]["cut"]["forward"] == "cut"
        assert said["rows_seen"] == whole.metadata.num_rows
        few, every = cut.read().to_pydict(), whole.read().to_pydict()
        keys = [list(zip(*(t[n] for n in KEY), strict=True)) for t in (few, every)]
        at = [keys[1].index(key) for key in keys[0]]
        d_pre = every["d_pre"]
        if store != "disagreement":
            assert at == [row for row, value in enumerate(d_pre) if value > least]
        assert all(d_pre[row] > least for row in at)
        assert at
        for column in ("pre_logprob", "post_logprob", "d_pre", "d_post"):
            np.testing.assert_allclose(few[column], [every[column][row] for row in at], atol=2e-6)


KEY = ("step", "sequence", "position")


def test_folder_with_something_in_it_is_refused(whole_dump: Path) -> None:
    with pytest.raises(RecipeError, match="is not empty: resume it, or choose another folder"):
        record(micro(), whole_dump, seeds=2, workers=0)


@pytest.mark.parametrize(
    ("change", "store", "field"),
    [
        ({"lr": 0.5}, "all", "lr is 0.01 there and 0.5 now"),
        ({"arms": ("none",)}, "all", "arms is .* there and .'none'. now"),
        ({}, "above", "stored is .*'all'.* there and .*'above'.* now"),
    ],
)
def test_another_recipe_is_refused_by_the_field_that_differs(
    whole_dump: Path, change: dict[str, Any], store: str, field: str
) -> None:
    with pytest.raises(RecipeError, match=f"another recipe: {field}"):
        record(micro(**change), whole_dump, seeds=2, workers=0, resume=True, store=store)


def test_file_that_cannot_be_read_is_named(whole_dump: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_dump, run)
    broken = run / "arm=none" / "seed=0" / "part-0-0.parquet"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(DumpError, match=r"part-0-0.parquet.*delete it"):
        record(micro(), run, seeds=2, workers=0, resume=True, store="all")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "`seeds` must be at least one"),
        ({"seeds": [1, 1]}, "`seeds` must be at least one distinct number"),
        ({"seeds": [-1]}, "`seeds`"),
        ({"workers": -1}, "`workers` must be at least 0"),
        ({"store": "some"}, "`store` must be one of above, all, near, outside, disagreement"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        record(micro(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_interrupted_recording_goes_on_where_it_was(
    cache: Path, whole_dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    whole = chain_module.Chain.record

    def interrupted(
        self: Any, folder: Path, seed: int, stored: Any, report: Report, **options: Any
    ) -> None:
        def stop_in_the_middle(text: str, fraction: float) -> None:
            if seed == 1 and text == "updates" and fraction > 0.5:
                raise KeyboardInterrupt
            report(text, fraction)

        whole(self, folder, seed, stored, stop_in_the_middle, **options)

    options: dict[str, Any] = {"seeds": 2, "workers": 0, "store": "all", "quiet": True}
    with monkeypatch.context() as patch:
        patch.setattr(chain_module.Chain, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            record(micro(), run, **options)
    assert {path.parent.name for path in run.rglob("*.parquet")} == {"seed=0"}
    assert not list(run.rglob("*.tmp"))
    assert record(micro(), run, resume=True, **options) == [1]
    assert same(run, whole_dump)


def test_pretraining_is_done_once_and_kept_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAD_CACHE", str(tmp_path / "cache"))
    recipe = micro(pretrain_steps=3)
    seen: list[float] = []
    recipe.prepare(lambda text, fraction: seen.append(fraction))
    assert seen == pytest.approx([1 / 3, 2 / 3, 1])
    recipe.prepare(lambda text, fraction: seen.append(fraction))
    assert len(seen) == 3
    dataclasses.replace(recipe, lr=0.5).prepare(lambda text, fraction: seen.append(fraction))
    assert len(seen) == 3

    def fail(text: str, fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(recipe, pretrain_seed=1).prepare(fail)
    folders = list((tmp_path / "cache" / "tiny").iterdir())
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [
        ["key.json", "weights.pt"]
    ]


class Broken(TinyRecipe):
    """Fails while it is prepared."""

    name: ClassVar[str] = "broken"

    def prepare(self, report: Report) -> None:
        raise RecipeError("nothing to start from")


def test_threads_are_put_back(cache: Path, tmp_path: Path) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(RecipeError, match="nothing to start from"):
            record(Broken(), tmp_path / "run", seeds=1, workers=0, quiet=True)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_log_has_a_line_a_seed_on_standard_error(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(micro(arms=("none",), zero_step_seeds=0), tmp_path / "run", seeds=2, workers=0)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[-2:] == ["tiny: seed 0 recorded, 1 of 2", "tiny: seed 1 recorded, 2 of 2"]


def test_terminal_shows_how_far_the_seeds_are(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "150")
    recipe = micro(arms=("none",), zero_step_seeds=0, pretrain_steps=2, pretrain_seed=7)
    with pytest.raises(WorkerError):
        record(
            dataclasses.replace(recipe, max_new_tokens=1, max_attempts=1),
            tmp_path / "run",
            seeds=2,
            workers=0,
        )
    shown = capsys.readouterr().err
    assert "tiny: pre-training" in shown
    assert "100%" in shown
    assert "0/2 seeds" in shown
