"""The fast way to the tokens outside is the plain one to the bit, whatever a dump is cut into."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shaped import shaped_rows
from deltad.analysis import blocks
from deltad.analysis.counting import ArmCounts, outside_of
from deltad.analysis.engine import LocalEngine, spans_of
from deltad.analysis.kernel import ArmCounter, count_arms
from deltad.analysis.question import Question
from deltad.dumps import Batch, Dump, DumpError, DumpWriter, Metadata
from tests.analysis.test_rates import dumps
from tests.dumps.factory import edit_value, make_dump, part_files

Counted = Mapping[tuple[str, int], ArmCounts]


def assert_equal(found: Counted, expected: Counted) -> None:
    """Every number is the same."""
    assert found.keys() == expected.keys()
    for key, ours in found.items():
        theirs = expected[key]
        assert (ours.tokens, ours.without_vectors) == (theirs.tokens, theirs.without_vectors)
        assert ours.outside == theirs.outside
        for name in ("delta_d", "keep", "undetermined", "bounded", "weight"):
            one, other = getattr(ours.disagreement, name), getattr(theirs.disagreement, name)
            assert one.tobytes() == other.tobytes(), (key, name)


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """Rows as a language model's: no padding, most tokens inside."""
    run = tmp_path_factory.mktemp("shaped") / "run"
    metadata = Metadata(top_k=20, vocab_size=151_936)
    for seed in range(2):
        with DumpWriter(run, arm="none", seed=seed, metadata=metadata, rows_per_group=5_000) as w:
            w.append(shaped_rows(13_001, seed))
    return Dump.open(run)


@settings(max_examples=6, deadline=None)
@given(dump=dumps(), divergence=st.sampled_from(["kl", "tv"]))
def test_fast_is_plain_on_any_dump(dump: dict[str, Any], divergence: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Dump.open(make_dump(Path(folder) / "run", **dump))
        question = Question(divergence=divergence, threshold=dump["threshold"])
        plain = count_arms(run, question, run.arms, plain=True)
        assert_equal(count_arms(run, question, run.arms), plain)


@pytest.mark.parametrize("divergence", ["kl", "tv"])
@pytest.mark.parametrize("threshold", [0.0, 0.003, 0.15])
def test_fast_is_plain_on_shaped_rows(shaped: Dump, divergence: str, threshold: float) -> None:
    question = Question(divergence=divergence, threshold=threshold)
    plain = count_arms(shaped, question, ["none"], plain=True, engine=LocalEngine(1))
    assert plain["none", 0].outside.tokens > 20
    for workers in (1, 3):
        found = count_arms(shaped, question, ["none"], recompute=True, engine=LocalEngine(workers))
        assert_equal(found, plain)


@pytest.mark.parametrize(("batch_rows", "block_rows"), [(700, 350), (5_000, 128), (100, 100)])
def test_the_size_of_blocks_changes_nothing(
    shaped: Dump, batch_rows: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = count_arms(shaped, Question(), ["none"], plain=True)
    monkeypatch.setattr(blocks, "BATCH_ROWS", batch_rows)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", block_rows)
    assert_equal(count_arms(shaped, Question(), ["none"], recompute=True), expected)


def test_spans_add_up_and_travel(shaped: Dump) -> None:
    whole = count_arms(shaped, Question(), ["none"])
    counter = pickle.loads(pickle.dumps(ArmCounter(Question())))
    for least in (1, 6_000, 10**9):
        spans = spans_of(shaped, ["none"], least_rows=least)
        parts: dict[tuple[str, int], list[ArmCounts]] = {}
        for span in pickle.loads(pickle.dumps(spans)):
            counted = pickle.loads(pickle.dumps(counter(span)))
            parts.setdefault((span.part.arm, span.part.seed), []).append(counted)
        assert_equal({key: ArmCounts.joined(each) for key, each in parts.items()}, whole)


@pytest.mark.parametrize(
    ("column", "slot", "value"),
    [
        ("topk_pre_logprobs", 1, 0.3),
        ("topk_post_logprobs", 0, float("nan")),
        ("topk_ids", 2, 10**6),
        ("post_logprob", None, 0.2),
        ("advantage", None, float("inf")),
        ("delta_d_noise", None, -1.0),
    ],
)
def test_an_impossible_value_is_named_as_the_plain_way_names_it(
    tmp_path: Path, column: str, slot: int | None, value: float
) -> None:
    run = make_dump(tmp_path / "run", arms=("none",), seeds=(0,), ranks=1, parts=1)
    edit_value(part_files(run)[0], column, 31, value, slot)
    dump = Dump.open(run)
    said = []
    for plain in (False, True):
        with pytest.raises(DumpError) as raised:
            count_arms(dump, Question(), ["none"], plain=plain, recompute=True)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "row 31" in said[0]
    assert column in said[0] or "post" in column


def test_most_rows_get_the_first_look_alone(shaped: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def judged(batch: Batch, *arguments: Any) -> Any:
        seen.append(len(batch))
        return outside_of(batch, *arguments)

    monkeypatch.setattr(blocks, "outside_of", judged)
    counted = count_arms(shaped, Question(), ["none"], recompute=True, engine=LocalEngine(1))
    outside = sum(each.outside.tokens for each in counted.values())
    assert outside <= sum(seen) < 2 * outside + 100
