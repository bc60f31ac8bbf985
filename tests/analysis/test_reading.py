"""The loop over rows gives the same tokens outside to the bit, however it comes to them."""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shaped import shaped_rows
from deltad import Rule
from deltad.analysis import (
    LocalBackend,
    Question,
    QuestionError,
    TokenTable,
    compare,
    condition_table,
    rate_table,
    reading,
    sweep,
)
from deltad.analysis.backends import spans_of
from deltad.analysis.reading import Ask, Outside, read
from deltad.dumps import Dump, DumpError, DumpWriter, Metadata, Near
from deltad.masks import rule
from tests.analysis.random_dumps import ARMS, FAR, dumps, write
from tests.dumps.factory import DERIVED, OPTIONAL, edit_metadata, edit_value, part_files

Got = Mapping[tuple[str, int], list[Outside]]
NAMES = ("predictive-kl-aggregated", "ratio", "binary-tv", "tis", "sequence_mask")


def assert_equal(found: Got, expected: Got) -> None:
    """Every number is the same; only the order of a sum of weights may differ."""
    assert found.keys() == expected.keys()
    for key, (ours,) in found.items():
        (theirs,) = expected[key]
        assert ours.columns.keys() == theirs.columns.keys()
        for name, values in ours.columns.items():
            assert values.tobytes() == theirs.columns[name].tobytes(), (key, name)
        assert np.array_equal(ours.keep, theirs.keep)
        assert np.array_equal(ours.totals, theirs.totals)
        assert (ours.seen, ours.rows, ours.unknown) == (theirs.seen, theirs.rows, theirs.unknown)
        assert ours.weights == theirs.weights
        assert np.allclose(ours.soft, theirs.soft, rtol=1e-13, atol=0)


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """Rows as a language model's: no padding, most tokens inside, D and Ḋ recorded."""
    run = tmp_path_factory.mktemp("shaped") / "run"
    metadata = Metadata(top_k=20, vocab_size=151_936)
    for seed in range(2):
        with DumpWriter(run, arm="none", seed=seed, metadata=metadata, rows_per_group=5_000) as w:
            w.append(shaped_rows(13_001, seed))
    return Dump.open(run)


@given(dump=dumps(post=False), family=st.sampled_from(["kl", "tv"]))
def test_every_way_to_read_gives_the_same(dump: dict[str, Any], family: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = write(Path(folder) / "run", **dump)
        rules = [each for name in NAMES if (each := rule(name)).family in (None, family)]
        question = Question(dump["threshold"], family)
        ask = Ask(
            question, tuple(rules), values=("divergence", "ratio", "position", "noise", "state"),
            post="post" in made.readings("none"),
        )  # fmt: skip
        plain = read(made, ARMS, replace(ask, recompute=True, everywhere=True))
        assert_equal(read(made, ARMS, replace(ask, recompute=True)), plain)
        assert_equal(read(made, ARMS, replace(ask, everywhere=True)), plain)
        assert_equal(read(made, ARMS, ask), plain)


@pytest.mark.parametrize("divergence", ["kl", "tv"])
@pytest.mark.parametrize("threshold", [0.0, 0.003, 0.15])
def test_threads_and_the_first_look_change_nothing(
    shaped: Dump, divergence: str, threshold: float
) -> None:
    question = Question(threshold, divergence)
    ask = Ask(question, question.rules, recompute=True)
    plain = read(shaped, ["none"], replace(ask, everywhere=True), backend=LocalBackend(1))
    assert plain["none", 0][0].totals[0] > 20
    for workers in (1, 3):
        assert_equal(read(shaped, ["none"], ask, backend=LocalBackend(workers)), plain)
    assert_equal(read(shaped, ["none"], replace(ask, recompute=False)), plain)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["kl", "tv"])
def test_a_token_on_the_threshold_is_inside(
    tmp_path: Path, family: str, *, recompute: bool
) -> None:
    recorded(tmp_path / "run", drift=1.5)
    dump = Dump.open(tmp_path / "run")
    frame = TokenTable(dump, Question(divergence=family)).to_frame()
    masked = int((frame.ratio > 2).sum())
    for threshold in sorted(frame.d_pre[(frame.d_pre > 0) & (frame.ratio > 2)])[::3]:
        question, above = Question(threshold, family), int((frame.d_pre > threshold).sum())
        how: dict[str, Any] = {"recompute": recompute}
        assert rate_table(dump, question, **how).outside.tokens == above
        low, at = sweep(dump, question, values=[threshold / 2, threshold], **how).rows
        assert (low.pair.outside.tokens > above, at.pair.outside.tokens) == (True, above)
        (_, mis) = compare(dump, question, ["mis"], **how).rows
        assert sum(mis.masked.values()) == masked
        assert len(TokenTable(dump, question, outside=True, **how).to_frame()) == above


@pytest.mark.parametrize("rows", [100, 350, 3_000])
def test_the_size_of_blocks_changes_nothing(
    shaped: Dump, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Ask(Question(), Question().rules, recompute=True)
    expected = read(shaped, ["none"], ask)
    monkeypatch.setattr(reading, "block_rows", lambda top_k: rows)
    assert_equal(read(shaped, ["none"], ask), expected)


def test_spans_add_up_and_travel(shaped: Dump) -> None:
    ask = pickle.loads(pickle.dumps(Ask(Question(), (*Question().rules, rule("drpo")))))
    whole = read(shaped, ["none"], ask)
    for least in (1, 6_000, 10**9):
        parts: dict[tuple[str, int], list[Outside]] = {}
        for span in pickle.loads(pickle.dumps(spans_of(shaped, ["none"], least_rows=least))):
            (found,) = pickle.loads(pickle.dumps(ask(span)))
            parts.setdefault((span.part.arm, span.part.seed), []).append(found)
        assert_equal({key: [Outside.joined(each)] for key, each in parts.items()}, whole)


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
def test_an_impossible_value_is_named_alike_by_every_way(
    tmp_path: Path, column: str, slot: int | None, value: float
) -> None:
    run = Path(str(write(tmp_path / "run", arms=("none",), seeds=(0,), ranks=1, parts=1).path))
    edit_value(part_files(run)[0], column, 31, value, slot)
    said = []
    for everywhere in (False, True):
        ask = Ask(Question(), Question().rules, recompute=True, everywhere=everywhere)
        with pytest.raises(DumpError) as raised:
            read(Dump.open(run), ["none"], ask)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "part-0-0.parquet, row 31" in said[0]
    assert column in said[0] or "post" in column


def recorded(path: Path, **options: Any) -> Path:
    """One file with D and Ḋ recorded, as another tool has rewritten it."""
    write(
        path, derived=True, arms=("none",), seeds=(0,), ranks=1, parts=1, row_group_size=60,
        optional=[*OPTIONAL, *DERIVED], **options,
    )  # fmt: skip
    return part_files(path)[0]


@pytest.mark.parametrize("column", ["d_pre", "d_post", "d_dot_aggregated"])
def test_a_stale_recorded_value_is_refused_by_every_reader(tmp_path: Path, column: str) -> None:
    file = recorded(tmp_path / "run")
    before = rate_table(Dump.open(tmp_path / "run")).to_json_object()
    edit_value(file, column, 7, 0.9)
    words = rf"part-0-0\.parquet, row 7, column `{column}`: must be what the row's log-probs give"
    run = Dump.open(tmp_path / "run")
    for table in (rate_table, compare, sweep, condition_table):
        with pytest.raises(DumpError, match=words):
            table(run, by=["divergence"]) if table is condition_table else table(run)
    with pytest.raises(DumpError, match=words):
        TokenTable(run).to_frame()
    assert rate_table(run, recompute=True).to_json_object() == before
    # Of another version of the definitions it is not read at all.
    edit_metadata(file, derived={"version": 2, "divergence": "kl"})
    assert rate_table(Dump.open(tmp_path / "run")).to_json_object() == before


def test_a_recorded_value_that_is_missing_outside_is_refused(tmp_path: Path) -> None:
    file = recorded(tmp_path / "run")
    d_pre = next(Dump.open(tmp_path / "run").batches("none", 0, columns=["d_pre"]))["d_pre"]
    row = int(np.flatnonzero(d_pre > 0.2)[-1])
    edit_value(file, "d_dot_aggregated", row, None)
    with pytest.raises(DumpError, match=rf"row {row}, column `d_dot_aggregated`: must be"):
        rate_table(Dump.open(tmp_path / "run"))


def test_topk_log_probs_near_the_region_alone_are_enough(tmp_path: Path) -> None:
    metadata = Metadata(top_k=20, vocab_size=151_936)
    kinds: dict[str, Near | Literal["all"]] = {"all": "all", "near": Near(0.01, sample=0.02)}
    found = []
    for name, vectors in kinds.items():
        run = tmp_path / name
        with DumpWriter(run, arm="none", seed=0, metadata=metadata, vectors=vectors) as writer:
            writer.append(shaped_rows(6_000, 0))
        for recompute in (False, True):
            dump = Dump.open(run)
            table = rate_table(dump, recompute=recompute)
            assert table.without_topk == 0
            criteria = ["clip-higher", "predictive-kl-uniform", "sequence_mask"]
            many = compare(dump, criteria=criteria, recompute=recompute)
            found.append((table.to_json_object(), many.to_json_object()))
    assert found[0][0]["summary"]["base"]["outside"]["tokens"] > 20
    assert all(each == found[0] for each in found)
    with pytest.raises(QuestionError, match="keeps top-K log-probs only where"):
        rate_table(Dump.open(tmp_path / "near"), Question(0.005))


def raises(tokens: Any) -> Any:
    """A rule of a user's that fails."""
    raise ZeroDivisionError("by the user")


def gives_nan(tokens: Any) -> Any:
    """Another, that fails at one token."""
    return np.where(tokens.log_ratio == tokens.log_ratio.max(), math.nan, 0.5)


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "raises": (raises, r"raised ZeroDivisionError: by the user, at rows \d+ to \d+"),
    "gives NaN": (gives_nan, r"gave NaN as `{what}`, at row \d+"),
    "gives another shape": (
        lambda tokens: tokens.log_ratio[:1], r"must give `{what}` of shape .* at rows \d+ to \d+"
    ),
    "gives no array": (lambda tokens: 1.0, r"must give `{what}` of shape .* at rows \d+ to \d+"),
    "asks for a column that it does not name": (
        lambda tokens: tokens["pre_entropy"],
        r"raised LookupError: column `pre_entropy` is not here.*, at rows \d+ to \d+",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("what", ["region", "push", "weight"])
@pytest.mark.parametrize(
    "way",
    [
        lambda dump, mine: rate_table(dump, Question(criterion=mine)),
        lambda dump, mine: compare(dump, criteria=[mine]),
        lambda dump, mine: TokenTable(dump, Question(criterion=mine)).to_frame(),
    ],
    ids=["table", "compare", "tokens"],
)
def test_a_users_rule_that_fails_is_one_sentence(
    tmp_path: Path, fault: str, what: str, way: Callable[[Dump, Rule], Any]
) -> None:
    function, words = FAULTS[fault]
    dump = write(tmp_path / "run", arms=("none",), seeds=(0,), ranks=1, parts=1, drift=1.5)
    mine = Rule("mine", **{what: function})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words.format(what=what)) as raised:
        way(dump, mine)
    said = str(raised.value)
    assert "\n" not in said
    assert "rule mine " in said
    assert "part-0-0.parquet" in said


def test_a_sequence_rule_that_fails_names_the_seed(tmp_path: Path) -> None:
    dump = write(tmp_path / "run", arms=("none",), seeds=(3,), ranks=1, parts=1)
    for scope_fault, words in ((raises, "raised ZeroDivisionError"), (gives_nan, "gave NaN")):
        mine = Rule("mine", weight=scope_fault, scope="sequence")
        with pytest.raises(QuestionError, match=rf"rule mine {words}.* at arm none, seed 3 of"):
            rate_table(dump, Question(criterion=mine))


def test_the_users_rule_decides_by_the_columns_that_it_names(tmp_path: Path) -> None:
    dump = write(tmp_path / "run", arms=("none",), optional=("pre_entropy",))
    assert compare(dump, criteria=[FAR])[FAR.name].masked["inside"] >= 0
    bare = write(tmp_path / "bare", arms=("none",), optional=())
    with pytest.raises(QuestionError, match="criterion far needs the column `pre_entropy`"):
        compare(bare, criteria=[FAR])
