"""Tokens whose ΔD is below its error, tokens that stand for several, tokens stored alone."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from deltad.analysis import (
    QuestionError,
    TokenTable,
    as_text,
    calibrate,
    compare,
    condition_table,
    protocol_table,
    rate_table,
    rate_text,
    sweep,
)
from deltad.analysis.export import RATE_COLUMNS
from deltad.analysis.question import Question
from deltad.dumps import Dump
from tests.dumps.factory import OPTIONAL, Columns, edit, edit_metadata, make_dump

PAIR = {"criterion": "predictive-kl-aggregated", "baseline": "ratio"}


def _only(table: pa.Table, mask: pa.Array) -> pa.Table:
    """Some rows."""
    return table.filter(mask)


def dump_of(folder: Path, noise: float | None, weights: tuple[float, ...] = (1.0,)) -> Dump:
    """A dump whose rows have one noise bound, and weights in turn by seed."""

    def change(arm: str, seed: int, columns: Columns) -> None:
        count = len(columns["step"])
        if noise is not None:
            columns["delta_d_noise"] = np.full(count, noise)
        columns["weight"] = np.full(count, weights[seed % len(weights)], np.float32)

    names = [name for name in OPTIONAL if noise is not None or name != "delta_d_noise"]
    return Dump.open(
        make_dump(folder / "run", rows=150, drift=1.5, seeds=(0, 1, 2), optional=names,
                  arms=("none",), ranks=1, parts=1,
                  change=change)
    )  # fmt: skip


def test_a_bound_of_zero_leaves_every_number_as_it_was(tmp_path: Path) -> None:
    without = rate_table(dump_of(tmp_path / "a", None))
    zero = rate_table(dump_of(tmp_path / "b", 0.0))
    assert zero.to_json_object() == without.to_json_object()
    assert (without.bounded, zero.bounded) == (0, zero.disagreement.tokens)
    assert "Undetermined: not known" in as_text(without.text())
    assert "Undetermined: 0 of" in as_text(zero.text())


def test_tokens_below_the_bound_are_in_no_rate(tmp_path: Path) -> None:
    noise = 0.05
    plain = rate_table(dump_of(tmp_path / "a", 0.0))
    dump = dump_of(tmp_path / "b", noise)
    table = rate_table(dump)
    total = 0
    for before, after in zip(plain.seeds, table.seeds, strict=True):
        for side in ("criterion", "baseline"):
            was, kept = getattr(before, side), getattr(after, side)
            clear = np.abs(was.delta_d) >= noise
            assert kept.kept == was.kept
            assert kept.undetermined == np.count_nonzero(~clear)
            assert kept.unsafe == np.count_nonzero(was.delta_d[clear] > 0)
            assert kept.contracting == np.count_nonzero(was.delta_d[clear] < 0)
            if clear.any():
                assert kept.unsafe_keep_rate == kept.unsafe / np.count_nonzero(clear)
            total += kept.undetermined
    assert total > 5
    assert table.disagreement.undetermined == total
    summary = table.to_json_object()["summary"]["base"]
    assert summary["disagreement"]["undetermined"] == total
    assert summary["outside"]["undetermined"] > total
    assert table.sign_accuracy("criterion") + table.sign_accuracy("baseline") == pytest.approx(1)
    text = as_text(rate_text(table, per_seed=True))
    assert f"Undetermined: {total} of {table.disagreement.tokens} disagreement tokens" in text
    assert f"{table.criterion.undetermined} of {table.criterion.kept}" in text
    assert set(table.columns()) == set(RATE_COLUMNS)
    assert sum(table.columns()["criterion_undetermined"]) == table.criterion.undetermined


def test_every_result_leaves_them_out(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, 0.05)
    table = rate_table(dump)
    unclear = table.outside.undetermined
    assert unclear
    compared = compare(dump, criteria=["predictive-kl-aggregated"])
    ours = compared["predictive-kl-aggregated"]
    assert ours.table.to_json_object() == table.to_json_object()
    assert ours.outside.whole == table.outside.tokens - unclear
    (point,) = sweep(dump, values=[0.15]).points
    assert point.table.to_json_object() == table.to_json_object()
    assert point.accuracy["criterion"].rate == ours.outside.rate
    calibration = calibrate(dump)
    assert calibration.base.undetermined == unclear
    assert {each.signs.whole for each in calibration.predictors[:2]} == {
        table.outside.tokens - unclear
    }
    parts = condition_table(dump, by=["advantage"]).of("advantage", "predictive-kl-aggregated")
    assert sum(part.table.outside.undetermined for part in parts) == unclear
    assert sum(part.accuracy.whole for part in parts) == table.outside.tokens - unclear
    first = protocol_table(dump).columns()
    assert first["outside_undetermined"][0] == unclear
    frame = TokenTable(dump, outside=True).to_frame()
    assert (frame["undetermined"].astype(bool)).sum() == unclear
    assert set(frame["delta_d_noise"]) == {0.05}


def test_alike_weights_change_nothing_and_unlike_ones_weigh(tmp_path: Path) -> None:
    one = rate_table(dump_of(tmp_path / "a", None))
    three = rate_table(dump_of(tmp_path / "b", None, (3.0,)))
    assert three.to_json_object() == one.to_json_object()
    unlike = rate_table(dump_of(tmp_path / "c", None, (1.0, 5.0)))
    assert unlike.weighted
    weights = np.array([1.0, 5.0, 1.0])
    kept = np.array([seed.criterion.kept for seed in one.seeds])
    down = np.array([seed.criterion.contracting for seed in one.seeds])
    assert unlike.criterion.contracting_fraction == pytest.approx(
        (weights @ down) / (weights @ kept), abs=1e-12
    )
    assert unlike.criterion.kept == one.criterion.kept
    assert unlike.criterion.unsafe_keep_rate == pytest.approx(
        one.criterion.unsafe_keep_rate, abs=1e-12
    )
    assert "Rates weigh each token" in as_text(unlike.text())


def test_a_random_share_of_sequences_is_said(tmp_path: Path) -> None:
    sampling = {"sequences": 0.25, "every": 1, "seed": 0}
    dump = Dump.open(make_dump(tmp_path / "run", metadata={"sampling": sampling}))
    table = rate_table(dump)
    assert table.share == 0.25
    assert "a random 0.25 of the sequences" in as_text(table.text())
    assert table.to_json_object()["summary"]["share_of_sequences"] == 0.25


def test_disagreement_tokens_alone_answer_for_their_pair(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", rows=150, drift=1.5, ranks=1, parts=1)
    whole = Dump.open(run)
    expected = rate_table(whole)
    for part in whole.parts:
        question = Question(protocol=f"shared:{part.arm}")
        rows = TokenTable(whole, question, seeds=[part.seed]).to_frame()
        edit(part.path, partial(_only, mask=pa.array(rows["disagreement"].tolist())))
        stored = {"rule": "disagreement", "divergence": "kl", "threshold": 0.15, **PAIR,
                  "outside": int(rows["outside"].sum())}  # fmt: skip
        edit_metadata(part.path, stored=stored)
    dump = Dump.open(run)
    table = rate_table(dump)
    for found, first in zip(table.seeds, expected.seeds, strict=True):
        for name in ("tokens", "outside", "disagreement", "disagreement_increase"):
            assert getattr(found, name) == getattr(first, name)
        assert found.outside_increase is None
    assert table.criterion == expected.criterion
    assert table.paired == expected.paired
    assert math.isnan(table.outside.increase_rate)
    base = table.to_json_object()["summary"]["base"]["outside"]
    tokens = expected.outside.tokens
    assert base == {"tokens": tokens, "undetermined": None, "increase_rate": None}
    assert "Only the disagreement tokens were stored" in as_text(table.text())
    with pytest.raises(QuestionError, match=r"at kl 0\.2"):
        rate_table(dump, Question(threshold=0.2))
    for refused in (calibrate, condition_table):
        with pytest.raises(QuestionError, match="needs every token outside"):
            refused(dump)
