"""Predicted against realized change, against loops and scipy."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.analysis import CALIBRATION_COLUMNS, Calibration, Question, QuestionError, calibrate
from deltad.analysis.tables.ladder import Calibrated, rank_correlation
from deltad.analysis.values import LINEAR, VALUES
from deltad.dumps import Dump
from tests.analysis.bruteforce import Token, judge_rows, predicted
from tests.dumps.factory import OPTIONAL, Columns, edit_metadata, make_dump, part_files


def drawn(arm: str, seed: int, columns: Columns) -> None:
    """The same linear_delta in every arm."""
    rng = np.random.default_rng(seed)
    columns["linear_delta"] = rng.normal(size=len(columns["step"])).astype(np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with every column and rows without vectors."""
    return make_dump(
        tmp_path_factory.mktemp("calibration") / "run", seeds=(0, 1, 5), rows=120, ranks=1,
        parts=2, top_k=3, vocab_size=30, drift=1.5, null_vectors=0.1, arms=("none", "ratio"),
        change=drawn, optional=[name for name in OPTIONAL if name != "weight"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def calibration(run: Path) -> Calibration:
    """All directions."""
    return calibrate(Dump.open(run), Question(threshold=0.1), bins=4)


def outside(run: Path, family: str, threshold: float) -> list[list[Token]]:
    """The tokens outside by seed."""
    judged = judge_rows(run, "none", (), family, threshold)
    return [[token for token in seed if token.outside] for seed in judged.values()]


@pytest.mark.parametrize("family", ["kl", "tv"])
def test_predictions_and_summaries_are_those_of_the_loops(run: Path, family: str) -> None:
    found = calibrate(Dump.open(run), Question(threshold=0.1, divergence=family), bins=4)
    seeds = outside(run, family, 0.1)
    names = [each.predictor.name for each in found.predictors]
    tails = ("aggregated", "uniform", "exact", "full")
    linear = [LINEAR] if family == "kl" else []
    assert names == ["ratio", *(f"predictive-{family}-{tail}" for tail in tails), *linear]
    for each in found.predictors:
        name = each.predictor.name
        expected = [
            [float(t.row[LINEAR]) if name == LINEAR else predicted(t, name, family) for t in seed]
            for seed in seeds
        ]
        for mine, theirs in zip(each.predictions, expected, strict=True):
            assert mine.tolist() == pytest.approx(theirs, abs=1e-9)
        p = [value for seed in expected for value in seed]
        d = [token.delta_d for seed in seeds for token in seed]
        assert each.signs.part == sum((a > 0) == (b > 0) for a, b in zip(p, d, strict=True))
        assert each.signs.whole == len(d) > 100
        slope = math.fsum(a * b for a, b in zip(p, d, strict=True)) / math.fsum(a * a for a in p)
        assert each.slope.value == pytest.approx(slope)
        mean = math.fsum(d) / len(d)
        rest = math.fsum((b - slope * a) ** 2 for a, b in zip(p, d, strict=True))
        assert each.r_squared == pytest.approx(1 - rest / math.fsum((b - mean) ** 2 for b in d))
        assert each.spearman == pytest.approx(scipy.stats.spearmanr(p, d).statistic)


def test_bins_are_counted_as_by_brute_force(calibration: Calibration, run: Path) -> None:
    seeds = outside(run, "kl", 0.1)
    columns = calibration.to_dict()
    assert list(columns) == [each.name for each in CALIBRATION_COLUMNS]
    at = 0
    for each in calibration.predictors[:2]:
        name = each.predictor.name
        pairs = [(predicted(t, name, "kl"), t.delta_d) for seed in seeds for t in seed]
        for place, part in enumerate(each.bins):
            low = part.low - 1e-9 if not place else part.low + 1e-9
            mine = [(p, d) for p, d in pairs if low <= p <= part.high + 1e-9]
            assert part.increase.whole == columns["bin_tokens"][at] == len(mine)
            assert part.increase.part == sum(d > 0 for _, d in mine)
            assert part.delta_d.value == pytest.approx(math.fsum(d for _, d in mine) / len(mine))
            assert part.prediction == pytest.approx(math.fsum(p for p, _ in mine) / len(mine))
            at += 1
        assert len(each.bins) == 4
        assert sum(part.increase.whole for part in each.bins) == len(pairs)


def test_within_seeds_the_rank_correlation_is_that_of_the_seed(calibration: Calibration) -> None:
    each = calibration.predictors[1]
    expected = [
        scipy.stats.spearmanr(p, d).statistic
        for p, d in zip(each.predictions, each.delta_d, strict=True)
    ]
    assert each.spearman_by_seed == pytest.approx(expected)
    mean, (low, high) = each.spearman_seed_mean
    assert mean == pytest.approx(float(np.mean(expected)))
    assert low <= mean <= high


values = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0, math.inf]), st.integers(-3, 3)), max_size=12
)


@settings(max_examples=50)
@given(values)
def test_rank_correlation_is_scipys_and_undefined_without_a_warning(
    pairs: list[tuple[float, int]],
) -> None:
    one, other = (np.array([pair[at] for pair in pairs], dtype=float) for at in (0, 1))
    found = rank_correlation(one, other)
    if len(pairs) < 3 or len(set(one)) < 2 or len(set(other)) < 2:
        assert math.isnan(found)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = scipy.stats.spearmanr(one, other).statistic
    assert found == pytest.approx(expected)


def calibrated(*seeds: tuple[list[float], list[float]], **options: int) -> Calibrated:
    """From predictions and ΔD by seed."""
    p, d = (tuple(np.array(seed[at]) for seed in seeds) for at in (0, 1))
    unclear = tuple(np.zeros(len(each), np.bool_) for each in p)
    return Calibrated(VALUES[LINEAR], p, d, unclear, tuple(map(np.ones_like, p)), **options)


def test_a_perfect_prediction_has_slope_one_and_explains_all() -> None:
    first, second = [0.1, -0.2, 0.3], [-0.4, 0.5]
    found = calibrated((first, first), (second, second), bins_asked=2)
    assert found.slope.value == pytest.approx(1)
    assert found.r_squared == pytest.approx(1)
    assert found.spearman == pytest.approx(1)
    assert found.signs.value == 1
    assert [part.increase.value for part in found.bins] == [1 / 3, 1]


def test_tokens_without_a_prediction_are_counted_apart() -> None:
    found = calibrated(([math.nan, 1.0, -1.0, math.inf], [0.5, 0.25, -0.5, 0.125]))
    assert found.unknown == 1
    assert (found.signs.part, found.signs.whole) == (3, 3)
    assert found.slope.value == pytest.approx(0.375)
    assert sum(part.increase.whole for part in found.bins) == 3


def test_a_weight_counts_as_so_many_tokens() -> None:
    p, d, times = [0.5, -1.0, 2.0, 0.25], [0.4, -0.1, 0.3, -0.2], [1, 3, 2, 1]
    again = [[value for value, n in zip(each, times, strict=True) for _ in range(n)]
             for each in (p, d)]  # fmt: skip
    many = calibrated((again[0], again[1]), bins_asked=1)
    few = replace(calibrated((p, d), bins_asked=1), weights=(np.array(times, float),))
    for name in ("signs", "slope"):
        ours, theirs = getattr(few, name), getattr(many, name)
        assert (ours.part, ours.whole) == pytest.approx((theirs.part, theirs.whole))
    assert few.r_squared == pytest.approx(many.r_squared)
    assert few.spearman == pytest.approx(many.spearman)
    ours, theirs = few.bins[0], many.bins[0]
    assert ours.prediction == pytest.approx(theirs.prediction)
    assert ours.delta_d.value == pytest.approx(theirs.delta_d.value)
    assert (ours.tokens, ours.increase.whole) == (4, 7)


def test_a_shared_protocol_is_needed(run: Path) -> None:
    with pytest.raises(QuestionError, match="one update that judges all tokens, got `own`"):
        calibrate(Dump.open(run), Question(protocol="own", baseline="none", criterion="none"))
    with pytest.raises(QuestionError, match="`bins` must be at least 1"):
        calibrate(Dump.open(run), bins=0)
    assert calibrate(Dump.open(run), Question(protocol="shared:ratio")).base.tokens


def test_what_the_dump_lacks_is_named(tmp_path: Path) -> None:
    dump = Dump.open(make_dump(tmp_path / "run", arms=("none",), optional=("linear_delta",)))
    found = calibrate(dump)
    assert found.refused.keys() == {"predictive-kl-exact", "predictive-kl-full"}
    assert "`pre_collision`" in found.refused["predictive-kl-exact"]
    assert "predictive-kl-full is left out" in str(found)


def test_linear_delta_of_another_divergence_is_left_out(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", arms=("none",))
    assert calibrate(Dump.open(run)).predictors[-1].predictor.name == LINEAR
    for file in part_files(run):
        edit_metadata(file, ladder={"divergence": "tv"})
    found = calibrate(Dump.open(run))
    assert found.refused == {LINEAR: "column `linear_delta` follows the divergence tv, not kl"}
    names = [
        each.predictor.name
        for each in calibrate(Dump.open(run), Question(divergence="tv")).predictors
    ]
    assert names[-1] == LINEAR


def test_no_token_outside_has_no_numbers(tmp_path: Path) -> None:
    dump = Dump.open(make_dump(tmp_path / "run", arms=("none",), empty_seeds=(0,), rows=4))
    found = calibrate(dump, Question(threshold=1e6))
    for each in found.predictors:
        assert each.bins == ()
        numbers = (each.spearman, each.slope.value, each.r_squared, each.spearman_seed_mean[0])
        assert all(math.isnan(value) for value in numbers)
    str(found), found.to_json_object(), found.to_frame()


def test_golden_numbers_of_the_real_model() -> None:
    found = calibrate(Dump.open(Path(__file__).parents[2] / "data_dumps" / "smollm2"))
    ranks = {each.predictor.name: each.spearman for each in found.predictors}
    assert ranks == pytest.approx(
        {
            "ratio": 0.155,
            "predictive-kl-aggregated": 0.207,
            "predictive-kl-uniform": 0.209,
            "predictive-kl-exact": 0.209,
        },
        abs=1e-3,
    )
    assert found.base.tokens == 1699
