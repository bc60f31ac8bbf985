"""`check_dump` accepts what obeys the contract and finds each thing that does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltad.dumps import COLUMNS, KEY, Dump, DumpError, Problem, check_dump
from deltad.masks import CRITERIA

from .factory import (
    Columns,
    edit,
    edit_metadata,
    edit_value,
    make_dump,
    part_files,
    read_metadata,
    write_table,
)

KL = [name for name, criterion in CRITERIA.items() if criterion.family in (None, "kl")]
TV = [name for name, criterion in CRITERIA.items() if criterion.family in (None, "tv")]
GIVEN = {name: column for name, column in COLUMNS.items() if not column.derived}
SHARED = [name for name, column in GIVEN.items() if column.shared and name not in KEY]
AFTER = [name for name, column in GIVEN.items() if column.before]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 50, "vocab_size": 200},
        {"vocab_size": 1, "top_k": 2},
        {"padding": 7.5},
        {"null_vectors": 0.3, "arms": ["zero-step", "actual", *KL]},
        {"null_vectors": 1.0},
        {"arms": ["none", *TV], "divergence": "tv", "threshold": 0.1},
        {"stored": ("kl", 0.05)},
        {"stored": ("tv", 0.3), "threshold": 0.4, "divergence": "tv", "arms": ["none", "ratio"]},
        {"seeds": [0, 4], "empty_seeds": [4]},
        {"seeds": [0], "empty_seeds": [0]},
        {"drift": 0.0},
        {"drift": 10.0},
        {"optional": ()},
        {"derived": True, "null_vectors": 0.3, "arms": ["zero-step", "actual", *KL]},
        {"rows": 1, "ranks": 1, "parts": 1},
    ],
    ids=str,
)
def test_dumps_that_obey_have_no_problem(tmp_path: Path, options: dict[str, Any]) -> None:
    run = make_dump(tmp_path / "RUN", **{"seeds": [2], **options})
    assert check_dump(run, batch_rows=13) == []


def test_listing_finds_no_problem_where_there_is_none(tmp_path: Path) -> None:
    assert check_dump(make_dump(tmp_path / "RUN"), strict=False) == []


def problems(run: Path, **options: Any) -> list[Problem]:
    """All problems, which strict mode must agree with."""
    found = check_dump(run, strict=False, **options)
    if found:
        with pytest.raises(DumpError) as caught:
            check_dump(run, **options)
        assert caught.value.problem.path in {problem.path for problem in found}
        assert "\n" not in str(caught.value)
    else:
        check_dump(run, **options)
    return found


def one(run: Path, **options: Any) -> Problem:
    (problem,) = problems(run, **options)
    return problem


SINGLE: dict[str, Any] = {"arms": ["none"], "seeds": [0], "ranks": 1, "parts": 1}
FIRST = "arm=none/seed=0/part-0-0.parquet"


def repeated(table: pa.Table, row: int) -> pa.Table:
    return pa.concat_tables([table, table.slice(row, 1)])


def test_a_token_twice_in_a_file_is_found(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **SINGLE)
    edit(run / FIRST, lambda table: repeated(table, 7))
    edit_metadata(run / FIRST, rows_seen=61)
    assert str(one(run, batch_rows=8)).startswith(
        f"{run / FIRST}, row 60, column `position`: must be unique within arm and seed: step "
    )
    assert str(one(run)).endswith(f"occurs already in row 7 of {run / FIRST}")


def test_a_token_twice_in_two_ranks_is_found(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none", "ratio"], seeds=[3])
    source, target = (run / f"arm=ratio/seed=3/part-{i}-1.parquet" for i in (0, 1))
    row = pq.ParquetFile(source).read().slice(2, 1)
    edit(target, lambda table: pa.concat_tables([row, table]))
    edit_metadata(target, rows_seen=read_metadata(target)["rows_seen"] + 1)
    problem = one(run)
    assert (problem.path, problem.row, problem.kind) == (str(target), 0, "unique")
    assert problem.message.endswith(f"row 2 of {source}")


def test_the_same_token_in_two_seeds_is_no_problem(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **SINGLE)
    shutil.copytree(run / "arm=none/seed=0", run / "arm=none/seed=1")
    assert problems(run) == []


def test_a_response_of_two_prompts_is_found(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **SINGLE, shuffle=False)
    edit_value(run / FIRST, "group", 2, 777)
    found = problems(run)
    assert {(p.column, p.kind) for p in found} == {("group", "one prompt a response")}
    assert {p.row for p in found} <= {1, 2, 3}
    assert "step 0, sequence 1000" in found[0].message


DIFFERENT: dict[str, Callable[[Any], Any]] = {
    "group": lambda value: value + 10_000,
    "token_id": lambda value: (value + 1) % 24,
    "behavior_logprob": lambda value: value - 3e-5,
    "pre_logprob": lambda value: value - 3e-5,
    "token": lambda value: value + "!",
}


@pytest.mark.parametrize("name", SHARED)
def test_arms_that_differ_in_what_they_share_are_found(tmp_path: Path, name: str) -> None:
    """One value of one row of one arm is changed; that row and column are named."""
    run = make_dump(tmp_path / "RUN", arms=["actual", "none"], seeds=[0, 1])
    file = run / "arm=none/seed=1/part-1-0.parquet"
    values = pq.ParquetFile(file).read()[name].to_pylist()
    if COLUMNS[name].is_vector:
        ids = pq.ParquetFile(file).read()["topk_ids"].to_pylist()
        token = pq.ParquetFile(file).read()["token_id"].to_pylist()
        row, slot = next(
            (i, j)
            for i, each in enumerate(ids)
            for j, listed in enumerate(each)
            if listed >= 0 and listed != token[i] and np.isfinite(values[i][j])
        )
        unused = next(i for i in range(24) if i not in ids[row] and i != token[row])
        value = unused if name == "topk_ids" else values[row][slot] - 3e-5
        edit_value(file, name, row, value, slot=slot)
    else:
        row = 3
        change = DIFFERENT.get(name, lambda value: value * 0.9 - (0.01 if value == 0 else 0))
        edit_value(file, name, row, change(values[row]))
    found = [p for p in problems(run) if p.kind == "same in all arms"]
    assert [(p.path, p.row, p.column) for p in found] == [(str(file), row, name)]
    assert "here and" in found[0].message
    assert found[0].message.endswith("for this token in arm actual")


def test_arms_may_differ_in_what_follows_from_the_update(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none", "actual"], seeds=[0])
    batches = [
        np.concatenate([b["post_logprob"] for b in Dump.open(run).batches(arm, 0)])
        for arm in ("none", "actual")
    ]
    assert not set(batches[0].tolist()) & set(batches[1].tolist())
    assert problems(run) == []


def test_arms_need_not_have_the_same_order_files_vectors_or_optional_columns(
    tmp_path: Path,
) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], ranks=1, parts=1)
    make_dump(
        run, arms=["actual"], seeds=[0, 1], ranks=2, parts=1, null_vectors=0.4, optional=["token"]
    )
    assert problems(run) == []


def lose(file: Path, rows: slice) -> None:
    """Take rows out of a file, as if it had never had them."""
    edit(file, lambda table: table.take(np.delete(np.arange(len(table)), rows)))
    edit_metadata(file, rows_seen=pq.read_metadata(file).num_rows)


ACTUAL = "arm=actual/seed=0/part-0-0.parquet"


@pytest.mark.parametrize("at_once", [1 << 28, 1_000])
def test_an_arm_that_lost_rows_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("deltad.dumps.agreement.BYTES_AT_ONCE", at_once)
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": ["actual", "none"], "shuffle": False})
    table = pq.ParquetFile(run / ACTUAL).read(columns=[*KEY])
    Dump.open(run).check_arms(["actual", "none"])
    lose(run / ACTUAL, slice(20, 50))
    problem = one(run, batch_rows=7)
    first = min(tuple(row.values()) for row in table.slice(20, 30).to_pylist())
    assert (problem.path, problem.kind) == (str(run / "arm=actual/seed=0"), "same tokens")
    assert problem.message == (
        "must hold the same tokens as the other arms of its seed: 30 are missing in arm actual, "
        f"the first of them step {first[0]}, sequence {first[1]}, position {first[2]}, which arm "
        "none has"
    )
    with pytest.raises(DumpError, match=r"arms none and actual must hold .* of seed 0, found 60 "):
        Dump.open(run).check_arms(["none", "actual"])


def test_arms_of_which_each_lacks_a_token_are_both_found(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": ["actual", "none"]})
    lose(run / FIRST, slice(0, 1))
    lose(run / ACTUAL, slice(0, 1))
    assert [p.kind for p in problems(run)] == ["same tokens", "same tokens"]
    Dump.open(run).check_arms(["none", "actual"])  # footers count the same


def test_arms_that_were_stored_by_different_rules_hold_different_tokens(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0])
    make_dump(run, arms=["ratio"], seeds=[0], stored=("kl", 0.05))
    assert problems(run) == []
    Dump.open(run).check_arms(["none", "ratio"])


@pytest.mark.parametrize("at_once", [1 << 28, 1_000])
def test_three_arms_are_compared_with_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The first arm lacks the token in which the others differ."""
    monkeypatch.setattr("deltad.dumps.agreement.BYTES_AT_ONCE", at_once)
    run = make_dump(
        tmp_path / "RUN",
        arms=["actual", "none", "zero-step"],
        seeds=[0],
        shuffle=False,
        ranks=1,
        parts=1,
    )
    lose(run / ACTUAL, slice(30, None))
    edit_value(run / "arm=zero-step/seed=0/part-0-0.parquet", "advantage", 40, 3.5)
    problem, lacking = problems(run, batch_rows=9)
    assert lacking.path == str(run / "arm=actual/seed=0")
    assert (problem.row, problem.column) == (40, "advantage")
    assert problem.message.startswith("must be the same in all arms, found 3.5 here and ")
    assert problem.message.endswith("in arm none")


@pytest.mark.parametrize("arm", KL)
def test_every_masked_arm_has_its_mask_recomputed(tmp_path: Path, arm: str) -> None:
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": [arm]})
    file = run / f"arm={arm}/seed=0/part-0-0.parquet"
    keep = pq.ParquetFile(file).read()["in_loss"].to_pylist()
    masked, kept = keep.index(False), keep.index(True)
    edit_value(file, "in_loss", masked, True)
    edit_value(file, "in_loss", kept, False)
    found = problems(run, batch_rows=7)
    assert sorted((p.row, p.column, p.kind) for p in found) == sorted(
        (row, "in_loss", "in_loss") for row in (masked, kept)
    )
    assert any(f"must be False, as criterion {arm} decides" in p.message for p in found)


def test_a_mask_at_another_threshold_is_found(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": ["ratio"]})
    file = run / "arm=ratio/seed=0/part-0-0.parquet"
    update = read_metadata(file)["update"]
    edit_metadata(file, update={**update, "threshold": 0.05})
    assert {p.column for p in problems(run)} == {"in_loss"}


def test_arms_without_a_known_mask_are_not_recomputed(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": ["actual"]})
    file = run / "arm=actual/seed=0/part-0-0.parquet"
    edit_value(file, "in_loss", 4, False)
    for mask in ("none", "grpo", None, 3, ["ratio"]):
        edit_metadata(file, update={"mask": mask})
        assert problems(run) == []
    edit_metadata(file, update={"mask": "ratio", "threshold": 0.15, "divergence": "kl"})
    assert problems(run) != []


@pytest.mark.parametrize(
    ("arm", "flips"),
    [("ratio", False), ("binary-kl", False), ("clip-higher", True), ("predictive-kl-full", True)],
)
def test_masks_of_rows_without_vectors_are_recomputed_where_scalars_decide(
    tmp_path: Path, arm: str, flips: bool
) -> None:
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": [arm]}, null_vectors=1.0)
    file = run / f"arm={arm}/seed=0/part-0-0.parquet"
    keep = pq.ParquetFile(file).read()["in_loss"].to_pylist()
    edit_value(file, "in_loss", 5, not keep[5])
    assert [p.row for p in problems(run)] == ([5] if flips else [])


@pytest.mark.parametrize(
    ("arm", "update", "expected"),
    [
        ("ratio", {}, "`update.mask` must be 'ratio', as the arm's name says, found None"),
        ("ratio", {"mask": "none"}, "`update.mask` must be 'ratio', .*, found 'none'"),
        ("none", {"mask": "ratio"}, "`update.mask` must be 'none', .*, found 'ratio'"),
        ("ratio", {"mask": "ratio"}, "`update.threshold` must be a number .*, found None"),
        (
            "ratio",
            {"mask": "ratio", "threshold": -1, "divergence": "kl"},
            "`update.threshold` must be a number .*, found -1",
        ),
        ("ratio", {"mask": "ratio", "threshold": 0.1}, "`divergence` must be one of kl, tv"),
        (
            "predictive-kl-aggregated",
            {"mask": "predictive-kl-aggregated", "threshold": 0.15, "divergence": "tv"},
            "cannot judge a TV region",
        ),
    ],
)
def test_an_update_that_does_not_say_its_mask_is_found(
    tmp_path: Path, arm: str, update: dict[str, Any], expected: str
) -> None:
    import re

    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": [arm]})
    file = run / f"arm={arm}/seed=0/part-0-0.parquet"
    edit_metadata(file, update=update)
    problem = one(run)
    assert problem.path == str(file)
    assert re.search(expected, problem.message), problem.message


def test_bounds_that_are_fixed_need_no_threshold(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": ["clip-higher"]})
    edit_metadata(part_files(run)[0], update={"mask": "clip-higher"})
    assert problems(run) == []


def test_a_mask_whose_column_is_missing_is_found(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": ["predictive-kl-exact"]}, optional=())
    assert "column `pre_collision` is missing" in one(run).message


@pytest.mark.parametrize("name", AFTER)
def test_a_zero_step_leaves_everything_as_it_was(tmp_path: Path, name: str) -> None:
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": ["zero-step"]})
    file = run / "arm=zero-step/seed=0/part-0-0.parquet"
    value = pq.ParquetFile(file).read()[name].to_pylist()[6]
    if COLUMNS[name].is_vector:
        edit_value(file, name, 6, float(np.nextafter(np.float32(value[0]), np.float32(-9))), slot=0)
    else:
        edit_value(file, name, 6, float(np.nextafter(np.float32(value), np.float32(-9))))
    problem = one(run)
    assert (problem.row, problem.column, problem.kind) == (6, name, "zero step")
    assert f"must equal `{COLUMNS[name].before}` exactly" in problem.message


def test_rows_below_the_rule_of_storage_are_found(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **SINGLE)
    edit_metadata(run / FIRST, stored={"rule": "above", "divergence": "tv", "threshold": 0.2})
    found = problems(run, limit=3)
    assert {(p.column, p.kind) for p in found} == {("topk_pre_logprobs", "stored above")}
    assert len(found) == 3
    assert found[-1].count > 3
    assert "only tokens with TV > 0.2 are here, found 0." in found[0].message


def test_lists_that_must_hold_the_sampled_token_are_checked(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **SINGLE)
    table = pq.ParquetFile(run / FIRST).read()
    outside = [
        row
        for row, (ids, k) in enumerate(
            zip(table["topk_ids"].to_pylist(), table["token_id"].to_pylist(), strict=True)
        )
        if k not in ids
    ]
    edit_metadata(run / FIRST, behavior={"support": "replaced-last"})
    assert [p.row for p in problems(run, limit=99)] == outside
    edit_metadata(run / FIRST, behavior={"support": "somewhere"})
    assert "`behavior.support` must be one of union, replaced-last" in one(run).message


def test_lists_out_of_rank_order_are_found(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **SINGLE)
    table = pq.ParquetFile(run / FIRST).read()
    row = next(i for i, ids in enumerate(table["topk_ids"].to_pylist()) if min(ids) >= 0)
    for name in ("topk_ids", "topk_behavior_logprobs", "topk_pre_logprobs", "topk_post_logprobs"):
        edit_value(run / FIRST, name, row, table[name].to_pylist()[row][::-1])
    problem = one(run)
    assert (problem.row, problem.column) == (row, "topk_behavior_logprobs")
    assert "must be in rank order" in problem.message


def test_rows_of_impossible_values_are_named_once(tmp_path: Path) -> None:
    """A NaN is not also a mask that differs, a divergence that is too small and so on."""
    run = make_dump(tmp_path / "RUN", **{**SINGLE, "arms": ["ratio"]}, stored=("kl", 0.05))
    file = part_files(run)[0]
    edit_value(file, "topk_pre_logprobs", 3, float("nan"), slot=0)
    edit_value(file, "token_id", 5, -7)
    edit_value(file, "behavior_logprob", 8, None)
    found = [(p.row, p.column) for p in problems(run)]
    expected = [(3, "topk_pre_logprobs"), (5, "token_id"), (8, "behavior_logprob")]
    ids = pq.ParquetFile(file).read()["topk_ids"].to_pylist()
    if min(ids[3]) >= -1 and ids[3][0] == -1:
        expected = expected[1:]
    assert found == expected


def nan(arm: str, seed: int, columns: Columns) -> None:
    columns["advantage"][5:40] = np.nan


def test_all_problems_are_listed_up_to_a_limit_and_all_are_counted(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none", "actual"], seeds=[0, 1], change=nan)
    text = {file: file.read_bytes() for file in part_files(run)}
    bad = run / "arm=actual/seed=1/part-0-1.parquet"
    bad.write_bytes(text[bad][:-30])
    edit_metadata(run / "arm=none/seed=1/part-1-0.parquet", format=2)
    found = problems(run, limit=3)
    assert found[0].path == str(bad)
    assert "format" in found[1].message
    rest = found[2:]
    assert {p.column for p in rest} == {"advantage"}
    readable = sum("part" in p.name for p in part_files(run)) - 2
    assert len({p.path for p in rest}) == readable
    assert max(sum(q.path == p.path for q in rest) for p in rest) == 3
    expected = 0
    for file in {p.path for p in rest}:
        values = pq.ParquetFile(file).read()["advantage"].to_pylist()
        expected += sum(np.isnan(values))
    assert sum(p.count for p in rest) == expected
    assert str(rest[2]).endswith(f"(and {rest[2].count - 1} more such rows)")


def test_files_that_disagree_are_still_checked_alone(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0])
    make_dump(run, arms=["actual"], seeds=[0], top_k=6)
    file = run / "arm=actual/seed=0/part-0-0.parquet"
    edit_value(file, "advantage", 1, float("inf"))
    found = problems(run)
    kinds = {(p.kind, p.column) for p in found}
    assert ("metadata", None) in kinds
    assert ("range", "advantage") in kinds
    assert not any(p.column and p.column.startswith("topk") for p in found)


def test_strict_mode_raises_the_first_problem(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **SINGLE)
    edit_value(run / FIRST, "linear_delta", 9, float("nan"))
    edit_value(run / FIRST, "advantage", 20, float("nan"))
    with pytest.raises(DumpError, match="row 9, column `linear_delta`"):
        check_dump(run)


def test_no_run_is_told_apart_in_both_modes(tmp_path: Path) -> None:
    for strict in (True, False):
        with pytest.raises(FileNotFoundError, match="RUN does not exist"):
            check_dump(tmp_path / "RUN", strict=strict)


def test_progress_counts_files(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none", "actual"], seeds=[0, 1])
    seen: list[tuple[int, int]] = []
    check_dump(run, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 16) for done in range(1, 17)]


def test_a_body_that_is_damaged_is_one_problem(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none", "actual"], seeds=[0])
    file = part_files(run)[0]
    content = bytearray(file.read_bytes())
    content[600:900] = b"\xee" * 300
    file.write_bytes(bytes(content))
    problem = one(run)
    assert problem.path == str(file)
    assert problem.message.startswith("cannot be read as Parquet (")


def test_metadata_that_is_no_json_is_one_problem(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", **SINGLE)
    write_table(run / FIRST, pq.ParquetFile(run / FIRST).read(), "{")
    assert "is not JSON" in one(run).message
