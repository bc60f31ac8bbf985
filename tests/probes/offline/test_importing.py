"""A dump exported to files of scores and imported again is the same dump."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deltad.dumps import Dump, DumpError, DumpWriter, check_dump
from deltad.probes.offline import OfflineError, ScoringFiles, import_dump
from deltad.probes.offline.records import Record
from tests.dumps.factory import OPTIONAL, make_dump, part_files
from tests.probes.offline.exported import (
    behavior,
    responses,
    rows_of,
    same_dump,
    scores,
    tokens,
    write_json,
    write_parquet,
)

ROOT = Path(__file__).parents[3]
METADATA = {"vocab_size": 24, "temperature": 0.7, "update": {"mask": "none"}}
POLICY = ("pre_collision", "post_collision", "pre_entropy", "post_entropy")

Write = Callable[..., Path]


def _as_json(path: Path, records: Any, **types: Any) -> Path:
    return write_json(path.with_suffix(".jsonl"), records)


def _as_parquet(path: Path, records: Any, **types: Any) -> Path:
    return write_parquet(path.with_suffix(".parquet"), records, **types)


def _tokens_as_json(path: Path, records: Any, **types: Any) -> Path:
    return write_json(path.with_suffix(".jsonl"), tokens(records))


def _tokens_as_parquet(path: Path, records: Any, **types: Any) -> Path:
    return write_parquet(path.with_suffix(".parquet"), tokens(records))


def _float32_parquet(path: Path, records: Any, **types: Any) -> Path:
    """In the types that a careful trainer gives: fixed-size lists of float32, large lists."""
    given = list(records)
    kinds: dict[str, pa.DataType] = {}
    if "topk_logprobs" in given[0]:
        width = len(given[0]["topk_logprobs"][0])
        kinds["topk_logprobs"] = pa.large_list(pa.list_(pa.float32(), width))
        kinds["logprob"] = pa.large_list(pa.float32())
    return write_parquet(path.with_suffix(".parquet"), given, **kinds)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with every column that files give, rows out of order and several files a seed."""
    run = tmp_path_factory.mktemp("recorded") / "run"
    optional = [name for name in OPTIONAL if name != "weight"]
    return make_dump(run, arms=("ratio",), seeds=(1,), optional=optional, ranks=2, parts=2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with the columns that files of scores give."""
    return make_dump(
        tmp_path_factory.mktemp("plain") / "run",
        arms=("none",),
        seeds=(0,),
        optional=(*POLICY, "token"),
    )


@pytest.mark.parametrize("write", [_as_json, _as_parquet, _tokens_as_json, _tokens_as_parquet])
def test_one_file_with_everything_gives_the_dump_again(
    recorded: Path, tmp_path: Path, write: Write
) -> None:
    source = write(tmp_path / "all", responses(recorded, "ratio", 1))
    update = {"mask": "ratio", "threshold": 0.15, "divergence": "kl"}
    done = import_dump(
        ScoringFiles([source]), tmp_path / "run", metadata={**METADATA, "update": update},
        arm="ratio", seed=1,
    )  # fmt: skip
    same_dump(recorded, tmp_path / "run", "ratio", 1)
    assert done.tokens == len(rows_of(recorded, "ratio", 1))
    assert done.readings == ("pre", "post")
    assert not done.ignored


@pytest.mark.parametrize(
    ("write", "order"),
    [
        (_as_json, "same"),
        (_as_json, "reversed"),
        (_as_parquet, "mixed"),
        (_float32_parquet, "mixed"),
        (_tokens_as_json, "mixed"),
        (_tokens_as_parquet, "reversed"),
    ],
)
def test_files_of_their_own_are_joined_whatever_their_order(
    plain: Path, tmp_path: Path, write: Write, order: str
) -> None:
    whole = responses(plain, "none", 0)
    files = {"behavior": behavior(whole)}
    for time in ("pre", "post"):
        files[time] = scores(whole, time)
        if write in (_tokens_as_json, _tokens_as_parquet):
            for record, score in zip(whole, files[time], strict=True):
                score["position"] = record["position"]
    rng = np.random.default_rng(0)
    for name in ("pre", "post"):
        if order == "reversed":
            files[name].reverse()
        elif order == "mixed":
            files[name] = [files[name][at] for at in rng.permutation(len(files[name]))]
    paths = {name: write(tmp_path / name, records) for name, records in files.items()}
    import_dump(
        ScoringFiles([paths["behavior"]]),
        tmp_path / "run",
        pre=ScoringFiles([paths["pre"]], score=True),
        post=ScoringFiles([paths["post"]], score=True),
        metadata=METADATA,
        arm="none",
    )
    same_dump(plain, tmp_path / "run", "none", 0)
    assert not check_dump(tmp_path / "run")


@pytest.mark.parametrize("write", [_as_json, _as_parquet])
def test_a_recorded_dump_comes_back(tmp_path: Path, write: Write) -> None:
    run = ROOT / "data_dumps" / "tiny-whole"
    metadata = Dump.open(run).metadata("none")
    source = write(tmp_path / "all", responses(run, "none", 0))
    import_dump(
        ScoringFiles([source]),
        tmp_path / "run",
        metadata={
            "vocab_size": metadata.vocab_size,
            "temperature": metadata.temperature,
            "update": metadata.update,
        },
        arm="none",
    )
    same_dump(run, tmp_path / "run", "none", 0)
    assert not check_dump(tmp_path / "run")


def test_rows_without_lists_stay_so_even_where_they_come_late(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "bare", arms=("none",), seeds=(0,), null_vectors=0.1, optional=())
    whole = responses(run, "none", 0)
    whole.sort(key=lambda record: None in record["topk_ids"])  # full ones first
    assert None not in whole[0]["topk_ids"]
    source = write_json(tmp_path / "all.jsonl", whole)
    done = import_dump(ScoringFiles([source]), tmp_path / "run", metadata=METADATA, arm="none")
    same_dump(run, tmp_path / "run", "none", 0)
    assert done.without_lists == sum(row["topk_ids"] is None for row in rows_of(run, "none", 0))


def test_lists_may_be_shorter_than_k_and_log_probs_may_be_padded(
    plain: Path, tmp_path: Path
) -> None:
    whole = responses(plain, "none", 0)
    for record in whole:
        for at, ids in enumerate(record["topk_ids"]):
            used = [each for each in ids if each >= 0]
            record["topk_ids"][at] = used
            for name in ("topk_behavior_logprobs", "topk_post_logprobs"):
                record[name][at] = record[name][at][: len(used)]
    source = write_json(tmp_path / "all.jsonl", whole)
    import_dump(ScoringFiles([source]), tmp_path / "run", metadata=METADATA, arm="none", top_k=4)
    same_dump(plain, tmp_path / "run", "none", 0)


def test_a_response_mask_leaves_tokens_out_that_keep_their_places(
    plain: Path, tmp_path: Path
) -> None:
    whole = responses(plain, "none", 0)
    for record in whole:
        del record["position"]
        record["response_mask"] = [at != 1 for at in range(len(record["token_id"]))]
        record["advantage"] = 0.5
    source = write_json(tmp_path / "all.jsonl", whole)
    done = import_dump(ScoringFiles([source]), tmp_path / "run", metadata=METADATA)
    rows = rows_of(tmp_path / "run", "actual", 0)
    wanted = [row for row in rows_of(plain, "none", 0) if row["position"] != 1]
    assert [row["position"] for row in rows] == [row["position"] for row in wanted]
    assert [row["post_logprob"] for row in rows] == [row["post_logprob"] for row in wanted]
    assert {row["advantage"] for row in rows} == {0.5}
    assert done.left_out == len(whole)


def test_names_may_be_texts_and_a_response_without_a_group_is_its_own(
    plain: Path, tmp_path: Path
) -> None:
    whole = responses(plain, "none", 0)
    for record in whole:
        record["group"] = f"g{record['group']}"
        record["sequence"] = f"s{record['sequence']}"
    source = write_json(tmp_path / "all.jsonl", whole)
    import_dump(ScoringFiles([source]), tmp_path / "run", metadata=METADATA)
    rows = rows_of(tmp_path / "run", "actual", 0)
    assert {row["sequence"] for row in rows} == set(range(len(whole)))
    assert {row["group"] for row in rows} == set(range(len({each["group"] for each in whole})))
    for record in whole:
        del record["group"]
    source = write_json(tmp_path / "all.jsonl", whole)
    import_dump(ScoringFiles([source]), tmp_path / "run", metadata=METADATA, existing="replace")
    assert all(row["group"] == row["sequence"] for row in rows_of(tmp_path / "run", "actual", 0))


def test_advantages_may_come_from_a_file_of_their_own(plain: Path, tmp_path: Path) -> None:
    whole = responses(plain, "none", 0)
    more = [
        {name: record[name] for name in ("step", "sequence", "group", "advantage", "in_loss")}
        for record in whole
    ]
    for record in whole:
        for name in ("advantage", "in_loss", "group"):
            del record[name]
    import_dump(
        ScoringFiles([write_json(tmp_path / "all.jsonl", whole)]),
        tmp_path / "run",
        join=ScoringFiles([write_json(tmp_path / "more.jsonl", reversed(more))]),
        metadata=METADATA,
        arm="none",
    )
    same_dump(plain, tmp_path / "run", "none", 0)


def test_a_folder_stands_for_its_files_and_a_step_can_be_given(plain: Path, tmp_path: Path) -> None:
    whole = [record for record in responses(plain, "none", 0) if record["step"] == 1]
    for record in whole:
        del record["step"]
    for number, record in enumerate(whole):
        write_json(tmp_path / "files" / f"{number}.jsonl", [record])
    import_dump(ScoringFiles([tmp_path / "files"], step=1), tmp_path / "run", metadata=METADATA)
    rows = rows_of(tmp_path / "run", "actual", 0)
    wanted = [row for row in rows_of(plain, "none", 0) if row["step"] == 1]
    assert [row["post_logprob"] for row in rows] == [row["post_logprob"] for row in wanted]
    assert {row["step"] for row in rows} == {1}


def test_without_scores_the_dump_has_the_readings_that_there_are(
    plain: Path, tmp_path: Path
) -> None:
    whole = responses(plain, "none", 0)
    source = write_json(tmp_path / "behavior.jsonl", behavior(whole))
    pre = write_json(tmp_path / "pre.jsonl", scores(whole, "pre"))
    done = import_dump(ScoringFiles([source]), tmp_path / "none", metadata=METADATA)
    assert done.readings == ()
    assert Dump.open(tmp_path / "none").readings("actual") == frozenset()
    done = import_dump(
        ScoringFiles([source]),
        tmp_path / "pre",
        pre=ScoringFiles([pre], score=True),
        metadata=METADATA,
    )
    assert done.readings == ("pre",)
    dump = Dump.open(tmp_path / "pre")
    assert dump.readings("actual") == {"pre"}
    assert "post_logprob" not in dump.parts[0].columns
    with pytest.raises(OfflineError, match=r"nothing without those before it: give `--pre`"):
        import_dump(
            ScoringFiles([source]),
            tmp_path / "post",
            post=ScoringFiles([pre], score=True),
            metadata=METADATA,
        )
    assert not (tmp_path / "post").exists()


def test_what_is_there_is_refused_replaced_or_gone_on_with(plain: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    by_step: dict[int, list[dict[str, Any]]] = {}
    for record in responses(plain, "none", 0):
        by_step.setdefault(record["step"], []).append(record)
    files = [
        ScoringFiles([write_json(tmp_path / f"{step}.jsonl", records)])
        for step, records in by_step.items()
    ]
    import_dump(files[0], run, metadata=METADATA, arm="none")
    before = part_files(run)[0].read_bytes()
    with pytest.raises(DumpError, match=r"exists already: give `--existing replace`"):
        import_dump(files[1], run, metadata=METADATA, arm="none")
    assert part_files(run)[0].read_bytes() == before
    for more in files[1:]:
        import_dump(more, run, metadata=METADATA, arm="none", existing="append")
    same_dump(plain, run, "none", 0)
    assert [file.name for file in part_files(run)] == [
        f"part-0-{number}.parquet" for number in range(len(files))
    ]
    with pytest.raises(OfflineError, match="occurs already"):
        import_dump(files[0], run, metadata=METADATA, arm="none", existing="append")
    import_dump(files[0], run, metadata=METADATA, arm="none", existing="replace")
    assert len(part_files(run)) == 1
    assert {row["step"] for row in rows_of(run, "none", 0)} == {min(by_step)}
    for key, value in (("vocab_size", 25), ("temperature", 1.0)):
        with pytest.raises(DumpError, match=rf"`{key}` must be the same in all files"):
            import_dump(files[1], run, metadata={**METADATA, key: value}, arm="ratio")
    assert sorted(entry.name for entry in run.iterdir()) == ["arm=none"]


def test_k_is_that_of_the_dump_that_is_gone_on_with(plain: Path, tmp_path: Path) -> None:
    whole = responses(plain, "none", 0)
    first = write_json(tmp_path / "first.jsonl", whole[:4])
    for record in whole:
        for name in ("topk_ids", "topk_behavior_logprobs", "topk_pre_logprobs"):
            record[name] = [each[:2] for each in record[name]]
        record["topk_post_logprobs"] = [each[:2] for each in record["topk_post_logprobs"]]
    short = write_json(tmp_path / "short.jsonl", whole[4:])
    run = tmp_path / "run"
    assert import_dump(ScoringFiles([first]), run, metadata=METADATA).top_k == 4
    done = import_dump(ScoringFiles([short]), run, metadata=METADATA, existing="append")
    assert done.top_k == 4
    alone = import_dump(ScoringFiles([short]), run, metadata=METADATA, existing="replace")
    assert alone.top_k == 2
    with pytest.raises(OfflineError, match="must hold K = 2 ids at most, found"):
        import_dump(ScoringFiles([first]), run, metadata=METADATA, arm="ratio")


def test_memory_holds_few_responses_whatever_the_order(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltad.probes.offline import join

    whole = responses(plain, "none", 0)
    alive = 0
    most = 0

    class Counted(join.Waiting):
        def __init__(self, in_memory: int = 2) -> None:
            super().__init__(2)

        def add(self, record: Record) -> None:
            nonlocal alive, most
            super().add(record)
            alive = len(self._records)
            most = max(most, alive)

    monkeypatch.setattr(join, "Waiting", Counted)
    pre = write_json(tmp_path / "pre.jsonl", reversed(scores(whole, "pre")))
    post = write_json(tmp_path / "post.jsonl", scores(whole, "post"))
    import_dump(
        ScoringFiles([write_json(tmp_path / "behavior.jsonl", behavior(whole))]),
        tmp_path / "run",
        pre=ScoringFiles([pre], score=True),
        post=ScoringFiles([post], score=True),
        metadata=METADATA,
        arm="none",
    )
    same_dump(plain, tmp_path / "run", "none", 0)
    assert most == 2 < len(whole) - 1


def test_nothing_is_left_where_writing_fails(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ScoringFiles([write_json(tmp_path / "all.jsonl", responses(plain, "none", 0))])

    def fail(self: DumpWriter) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(DumpWriter, "close", fail)
    with pytest.raises(OSError, match="no space"):
        import_dump(source, tmp_path / "run", metadata=METADATA)
    assert not (tmp_path / "run").exists()
