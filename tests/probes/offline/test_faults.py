"""Whatever is wrong with a file of scores is named by file, line, response and token."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltad.probes.offline import OfflineError, ScoringFiles, import_dump
from deltad.probes.offline.faults import LISTED, Fault
from tests.probes.offline.exported import write_json, write_parquet

Records = list[dict[str, Any]]
METADATA = {"vocab_size": 9}
NAN, INF = float("nan"), float("inf")


def sound() -> dict[str, Records]:
    """Two responses of two tokens, K = 2."""
    behavior = [
        {
            "step": 3,
            "group": 0,
            "sequence": name,
            "token_id": [1, 2],
            "advantage": [0.5, -0.5],
            "behavior_logprob": [-1.0, -0.5],
            "topk_ids": [[1, 4], [2, 0]],
            "topk_behavior_logprobs": [[-1.0, -2.0], [-0.5, -1.5]],
        }
        for name in (7, 8)
    ]
    scores = [
        {
            "step": 3,
            "sequence": name,
            "logprob": [-1.1, -0.6],
            "topk_logprobs": [[-1.1, -2.0], [-0.6, -1.4]],
            "entropy": [1.0, 1.0],
        }
        for name in (7, 8)
    ]
    return {
        "behavior": behavior,
        "pre": scores,
        "post": [{**each, "entropy": [0.9, 0.9]} for each in scores],
    }


def faults_of(
    tmp_path: Path,
    change: Callable[[dict[str, Records]], object],
    write: Callable[..., Path] = write_json,
    **options: Any,
) -> list[str]:
    """What is said of changed files; nothing may be left."""
    files = sound()
    change(files)
    ending = "jsonl" if write is write_json else "parquet"
    paths = {name: write(tmp_path / f"{name}.{ending}", records) for name, records in files.items()}
    return import_faults(tmp_path, paths, **options)


def import_faults(tmp_path: Path, paths: dict[str, Path], **options: Any) -> list[str]:
    """What is said of files."""
    with pytest.raises(OfflineError) as caught:
        import_dump(
            ScoringFiles([paths["behavior"]]),
            tmp_path / "run",
            pre=ScoringFiles([paths["pre"]], score=True),
            post=ScoringFiles([paths["post"]], score=True),
            metadata=METADATA,
            **options,
        )
    assert not (tmp_path / "run").exists()
    return [str(fault).replace(f"{tmp_path}/", "") for fault in caught.value.faults]


def test_sound_files_are_taken(tmp_path: Path) -> None:
    paths = {name: write_json(tmp_path / name, records) for name, records in sound().items()}
    done = import_dump(
        ScoringFiles([paths["behavior"]]),
        tmp_path / "run",
        pre=ScoringFiles([paths["pre"]], score=True),
        post=ScoringFiles([paths["post"]], score=True),
        metadata=METADATA,
    )
    assert (done.responses, done.tokens, done.top_k) == (2, 4, 2)


def put(file: str, field: str, *place: Any) -> Callable[[dict[str, Records]], None]:
    """Change a value of the second response: `place` are indices and the value."""

    def change(files: dict[str, Records]) -> None:
        target: Any = files[file][1]
        *indices, value = (field, *place)
        for index in indices[:-1]:
            target[index] = list(target[index])
            target = target[index]
        target[indices[-1]] = value

    return change


def drop(file: str, field: str) -> Callable[[dict[str, Records]], None]:
    """Take a field from the second record."""
    return lambda files: files[file][1].pop(field)


EIGHT = "behavior.jsonl, line 2, sequence 8"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            put("behavior", "behavior_logprob", 1, None),
            f"{EIGHT}, position 1, field `behavior_logprob`: must be a finite log-prob",
        ),
        (
            put("behavior", "behavior_logprob", 1, 0.2),
            "field `behavior_logprob`: must be a finite log-prob of at most 0 "
            "(rounding up to 0.0001 counts as 0), found 0.2",
        ),
        (put("behavior", "behavior_logprob", 1, "-inf"), "must be a finite log-prob"),
        (
            put("behavior", "behavior_logprob", 1, True),
            f"{EIGHT}, position 1, field `behavior_logprob`: must be a number, found True",
        ),
        (
            put("behavior", "behavior_logprob", 1, "0.1"),
            "field `behavior_logprob`: must be a number, found '0.1'",
        ),
        (
            put("behavior", "token_id", 0, 9),
            f"{EIGHT}, position 0, field `token_id`: must be an id in [0, 8], found 9",
        ),
        (
            put("behavior", "token_id", 0, 1.5),
            "position 0, field `token_id`: must be whole numbers, found 1.5",
        ),
        (put("behavior", "token_id", 0, 2**40), "field `token_id`: must fit int32"),
        (put("behavior", "token_id", 0, 2**70), "field `token_id`: holds a number beyond 64 bits"),
        (put("behavior", "token_id", 5), "field `token_id`: must be a list of whole numbers"),
        (
            put("behavior", "topk_ids", 1, [2, 2]),
            f"{EIGHT}, position 1, field `topk_ids`: must hold an id once, found 2 twice",
        ),
        (
            put("behavior", "topk_ids", 1, [2, 5, 6]),
            f"{EIGHT}, position 1, field `topk_behavior_logprobs`: must have a log-prob for each "
            "of `topk_ids`, found 2 log-probs for 3 ids",
        ),
        (
            put("behavior", "topk_behavior_logprobs", 1, [-0.5]),
            "position 1, field `topk_behavior_logprobs`: must have a log-prob for each of "
            "`topk_ids`, found 1 log-probs for 2 ids",
        ),
        (
            put("pre", "topk_logprobs", 0, None),
            "pre.jsonl, line 2, sequence 8, position 0, field `topk_logprobs`: must have a "
            "log-prob for each of `topk_ids`, found no list for 2 ids",
        ),
        (
            put("pre", "topk_logprobs", 0, [-1.1, None]),
            "pre.jsonl, line 2, sequence 8, position 0, field `topk_logprobs`: must be a finite "
            "log-prob of at most 0 (rounding up to 0.0001 counts as 0), found nan at id 4",
        ),
        (
            put("post", "topk_logprobs", 0, [-1.1, -0.01]),
            "post.jsonl, line 2, sequence 8, position 0, field `topk_logprobs`: the support's "
            "probabilities must sum to 1",
        ),
        (
            put("post", "logprob", 0, -1.3),
            "post.jsonl, line 2, sequence 8, position 0, field `topk_logprobs`: must agree with "
            "`post_logprob`",
        ),
        (put("post", "logprob", 0, INF), "post.jsonl, line 2, sequence 8, position 0"),
        (
            put("post", "logprob", [-1.1]),
            "post.jsonl, line 2, sequence 8, field `logprob`: must have an entry for each of the "
            "2 tokens, found 1",
        ),
        (
            put("pre", "entropy", 1, 99.0),
            "pre.jsonl, line 2, sequence 8, position 1, field `entropy`: must be an entropy",
        ),
        (
            drop("pre", "entropy"),
            f"{EIGHT}, field `pre_entropy`: lacks it, unlike the responses before",
        ),
        (drop("behavior", "token_id"), f"{EIGHT}, field `token_id`: is missing"),
        (
            drop("behavior", "advantage"),
            f"{EIGHT}, field `advantage`: is missing; add it by a file of `--join`",
        ),
        (drop("behavior", "sequence"), "behavior.jsonl, line 2, field `sequence`: is missing"),
        (
            drop("behavior", "topk_behavior_logprobs"),
            "field `topk_behavior_logprobs`: is missing in all of its records",
        ),
        (
            drop("behavior", "topk_ids"),
            "field `topk_behavior_logprobs`: needs `topk_ids`, which is missing",
        ),
        (drop("post", "logprob"), f"{EIGHT}, field `post_logprob`: is missing in all"),
        (
            lambda files: files["pre"].pop(),
            f"{EIGHT}: must be in the file of scores before the step",
        ),
        (
            lambda files: files["behavior"].pop(),
            "pre.jsonl, line 2, sequence 8: is in the file of scores before the step and at step "
            "3 not among the responses",
        ),
        (put("post", "step", 4), f"{EIGHT}: must be in the file of scores after the step"),
        (put("post", "sequence", 7), "post.jsonl, line 2, sequence 7: occurs already"),
        (put("behavior", "sequence", 7), "behavior.jsonl, line 2, sequence 7: occurs already"),
        (put("behavior", "step", "one"), "field `step`: must be a whole number, found 'one'"),
        (put("behavior", "step", 2**31), "must be an int32"),
        (put("behavior", "group", "a"), "field `group`: must be a whole number in all records"),
        (put("behavior", "group", 1.5), "field `group`: must be a whole number or a text"),
        (put("behavior", "in_loss", [True, 2]), "position 1, field `in_loss`: must be true or"),
        (put("behavior", "advantage", [0.5, NAN]), "position 1, field `advantage`: must be finite"),
        (
            put("post", "topk_ids", [[1, 4], [2, 3]]),
            "post.jsonl, line 2, sequence 8, field `topk_ids`: must be as in",
        ),
        (put("pre", "token_id", [1, 3]), "field `token_id`: must be as in"),
        (put("behavior", "token", ["a", 1]), "field `token`: must be a list of texts"),
        (put("behavior", "topk_ids", 1, 4), "position 1, field `topk_ids`: must be a list of"),
        (put("behavior", "topk_ids", 1, [2, "x"]), "position 1, field `topk_ids`: must be whole"),
    ],
)  # fmt: skip
def test_a_fault_is_named(
    tmp_path: Path, change: Callable[[dict[str, Records]], object], says: str
) -> None:
    found = faults_of(tmp_path, change)
    assert any(says in fault for fault in found), found
    assert len(found) <= 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            put("behavior", "behavior_logprob", 1, NAN),
            "behavior.parquet, row 1, sequence 8, position 1, field `behavior_logprob`: must be a "
            "finite log-prob",
        ),
        (
            put("pre", "topk_logprobs", 0, [-1.1, NAN]),
            "pre.parquet, row 1, sequence 8, position 0, field `topk_logprobs`",
        ),
        (
            put("behavior", "topk_ids", 1, [2, 2]),
            "behavior.parquet, row 1, sequence 8, position 1, field `topk_ids`",
        ),
    ],
)
def test_a_fault_in_parquet_is_named_by_its_row(
    tmp_path: Path, change: Callable[[dict[str, Records]], object], says: str
) -> None:
    found = faults_of(tmp_path, change, write_parquet)
    assert any(says in fault for fault in found), found


def test_wrong_types_in_parquet_are_faults(tmp_path: Path) -> None:
    def change(files: dict[str, Records]) -> None:
        for record in files["behavior"]:
            record["token_id"] = [1.5, 2.0]

    found = faults_of(tmp_path, change, write_parquet)
    assert "field `token_id`: must be whole numbers, found float64" in found[0]


def test_a_list_longer_than_the_k_that_was_asked_for_is_a_fault(tmp_path: Path) -> None:
    found = faults_of(tmp_path, lambda files: None, top_k=1)
    assert found[0] == (
        "behavior.jsonl, line 1, sequence 7, position 0, field `topk_ids`: must hold K = 1 ids at "
        "most, found 2: give a larger K, or cut the lists"
    )


def test_half_a_line_and_lines_that_are_no_objects(tmp_path: Path) -> None:
    files = {name: write_json(tmp_path / f"{name}.jsonl", r) for name, r in sound().items()}
    whole = files["behavior"].read_text(encoding="utf-8")
    files["behavior"].write_text(f"[1]\n\n{whole[:-30]}", encoding="utf-8")
    found = import_faults(tmp_path, files)
    assert found[0] == "behavior.jsonl, line 1: must be a JSON object, found list"
    assert found[1].startswith("behavior.jsonl, line 4: must be JSON (")
    assert found[1].endswith("; the file ends within it, half written")
    # The scores of sequence 8 may be those of the half line, so nothing is said of them.
    assert len(found) == 2


def test_text_from_files_prints_on_one_line_of_any_terminal(tmp_path: Path) -> None:
    fault = Fault(tmp_path / "a\n\x1b[31m", "found \x07", sequence="\x9b", field="b\r\nc")
    assert str(fault) == f"{tmp_path}/a \\x1b[31m, sequence \\x9b, field `b c`: found \\x07"


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    files = {name: write_json(tmp_path / f"{name}.jsonl", r) for name, r in sound().items()}
    for content in (b"PAR1 nothing", b""):
        files["pre"] = tmp_path / "pre.parquet"
        files["pre"].write_bytes(content)
        found = import_faults(tmp_path, files)
        assert found[0].startswith("pre.parquet: cannot be read as Parquet (")


def test_a_file_without_responses_is_refused(tmp_path: Path) -> None:
    empty = write_json(tmp_path / "empty.jsonl", [])
    with pytest.raises(OfflineError, match="the files hold no response"):
        import_dump(ScoringFiles([empty]), tmp_path / "run", metadata=METADATA)
    table = pa.table({"sequence": pa.array([], pa.int64())})
    pq.write_table(table, tmp_path / "empty.parquet")
    with pytest.raises(OfflineError, match="the files hold no response"):
        import_dump(ScoringFiles([tmp_path / "empty.parquet"]), tmp_path / "run", metadata=METADATA)
    with pytest.raises(OfflineError, match="does not exist"):
        ScoringFiles([tmp_path / "nowhere"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(OfflineError, match=r"holds no file that ends in \.jsonl"):
        ScoringFiles([tmp_path / "folder"])


def test_tokens_of_a_response_must_stand_together(tmp_path: Path) -> None:
    record = sound()["behavior"][0]
    lists = [name for name in record if isinstance(record[name], list)]
    lines = [
        {name: value[at] if name in lists else value for name, value in record.items()}
        | {"position": at, "sequence": sequence}
        for at in (0, 1)
        for sequence in (7, 8)
    ]
    source = write_json(tmp_path / "tokens.jsonl", lines)
    with pytest.raises(OfflineError, match=r"line 3, sequence 7: occurs already.*stand together"):
        import_dump(ScoringFiles([source]), tmp_path / "run", metadata=METADATA)


def test_many_faults_are_counted_and_the_first_are_listed(tmp_path: Path) -> None:
    record = sound()["behavior"][0] | {"token_id": [9] * 50, "advantage": 1.0}
    record |= {"behavior_logprob": [-1.0] * 50, "topk_ids": [[1, 4]] * 50}
    record |= {"topk_behavior_logprobs": [[-1.0, -2.0]] * 50}
    source = write_json(tmp_path / "many.jsonl", [record])
    with pytest.raises(OfflineError, match=r"\(and 49 more faults\)") as caught:
        import_dump(ScoringFiles([source]), tmp_path / "run", metadata=METADATA)
    assert len(caught.value.faults) == LISTED
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.faults) == (str(caught.value), caught.value.faults)


def test_unknown_fields_are_reported(tmp_path: Path) -> None:
    records = [{**record, "reward": 1, "logprobs": []} for record in sound()["behavior"]]
    source = tmp_path / "all.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    done = import_dump(ScoringFiles([source]), tmp_path / "run", metadata=METADATA)
    assert done.ignored == ("logprobs", "reward")


@pytest.mark.parametrize("number", [10**400, -(10**400)])
@pytest.mark.parametrize("other", [None, 0])
def test_a_number_beyond_all_floats_is_a_fault(
    tmp_path: Path, number: int, other: int | None
) -> None:
    def change(files: dict[str, Records]) -> None:
        files["behavior"][1]["behavior_logprob"] = [other, number]

    found = faults_of(tmp_path, change)
    assert found == [
        "behavior.jsonl, line 2, sequence 8, position 1, field `behavior_logprob`: must be a "
        "number that a float can hold"
    ]


def test_lists_out_of_rank_order_are_a_fault(tmp_path: Path) -> None:
    def change(files: dict[str, Records]) -> None:
        record = files["behavior"][0]
        record["topk_ids"][0].reverse()
        record["topk_behavior_logprobs"][0].reverse()
        for time in ("pre", "post"):
            files[time][0]["topk_logprobs"] = [[-2.0, -1.1], [-0.6, -1.4]]

    found = faults_of(tmp_path, change)
    assert "field `topk_behavior_logprobs`: must be in rank order" in found[0]


def test_two_tokens_at_one_place_are_a_fault(tmp_path: Path) -> None:
    def change(files: dict[str, Records]) -> None:
        files["behavior"][0]["position"] = [3, 3]

    found = faults_of(tmp_path, change)
    assert "field `position`: must be another one for each token, found 3 twice" in found[0]


def test_groups_are_named_in_all_responses_or_in_none(tmp_path: Path) -> None:
    def change(files: dict[str, Records]) -> None:
        del files["behavior"][1]["group"]  # it would be group 8, another prompt's perhaps

    found = faults_of(tmp_path, change)
    assert found == [
        "behavior.jsonl, line 2, sequence 8, field `group`: lacks it, unlike the responses before: "
        "all must have one, or none"
    ]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"\x1f\x8b", "is packed by gzip: unpack it first"),
        (b"\x28\xb5\x2f\xfd", "is packed by zstd: unpack it first"),
        (b"\xff\xfe", "must be UTF-8, found UTF-16"),
    ],
)
def test_packed_files_are_named(tmp_path: Path, start: bytes, said: str) -> None:
    files = {name: write_json(tmp_path / f"{name}.jsonl", r) for name, r in sound().items()}
    files["behavior"].write_bytes(start + b"\n{\n")
    assert import_faults(tmp_path, files) == [f"behavior.jsonl: {said}"]


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("step", pa.array([3, 3], pa.timestamp("s")), "`step` cannot be of type timestamp"),
        ("topk_ids", pa.array([[[[1]]]] * 2), "`topk_ids` cannot be of type list<"),
    ],
)
def test_a_field_of_a_type_without_meaning_is_a_fault(
    tmp_path: Path, name: str, values: pa.Array, said: str
) -> None:
    table = pa.Table.from_pylist(sound()["behavior"])
    path = tmp_path / "behavior.parquet"
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)
    with pytest.raises(OfflineError) as caught:
        import_dump(ScoringFiles([path]), tmp_path / "run", metadata=METADATA)
    assert said in str(caught.value)


def test_a_column_that_is_there_twice_is_a_fault(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(sound()["behavior"])
    path = tmp_path / "behavior.parquet"
    pq.write_table(table.append_column("step", table["step"]), path)
    with pytest.raises(OfflineError, match="must have each column once, found `step` twice"):
        import_dump(ScoringFiles([path]), tmp_path / "run", metadata=METADATA)


def test_texts_cannot_be_appended_to_a_step(tmp_path: Path) -> None:
    records = [{**each, "sequence": f"s{each['sequence']}"} for each in sound()["behavior"]]
    run = tmp_path / "run"
    for change, existing in (({}, "refuse"), ({"step": 4}, "append")):
        path = write_json(tmp_path / "b.jsonl", [{**each, **change} for each in records])
        import_dump(ScoringFiles([path]), run, metadata=METADATA, existing=existing)  # type: ignore[arg-type]
    with pytest.raises(OfflineError, match="RUN has responses of step 4 already"):
        import_dump(ScoringFiles([path]), run, metadata=METADATA, existing="append")
