"""Steps in numbers: they agree with loops, add up over ranks, and come back from JSON."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.dumps import Batch, Dump, Metadata, batch_tokens, part_batches
from deltad.logprobs import LogprobSums
from deltad.masks import CRITERIA, NONE, CriterionError, Rule
from deltad.metrics import metric_values
from deltad.steps import (
    BINS_PER_DECADE,
    FORMAT,
    RATES,
    LogHistogram,
    StepQuestion,
    StepScalars,
    columns_for,
    count_steps,
    steps_path,
)
from tests.dumps.factory import make_dump, part_files

few = settings(max_examples=40, deadline=None)


def counted(run: Path, question: StepQuestion, arm: str = "none") -> dict[int, StepScalars]:
    """All steps of seed 0, files together."""
    dump = Dump.open(run)
    found: dict[int, StepScalars] = {}
    for part in dump.files(arm, 0):
        names = [name for name in columns_for(question) if name in part.columns]
        for batch in part_batches(part, columns=names):
            for step in count_steps(
                batch, part.metadata, question, arm=arm, seed=0, rank=part.rank
            ):
                found[step.step] = found[step.step] + step if step.step in found else step
    return found


def rows_of(run: Path, arm: str = "none") -> tuple[Batch, Metadata]:
    """All rows of seed 0 in one batch."""
    dump = Dump.open(run)
    (batch,) = dump.batches(arm, 0)
    return batch, dump.metadata(arm)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of a few hundred tokens whose criteria disagree."""
    folder = tmp_path_factory.mktemp("steps") / "run"
    return make_dump(
        folder, rows=300, drift=1.5, ranks=1, parts=1, seeds=(0,), null_vectors=0.1,
        row_group_size=300,
    )  # fmt: skip


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_counts_are_those_of_a_loop_over_tokens(run: Path, divergence: str) -> None:
    question = StepQuestion(threshold=0.05, divergence=divergence, masked=("binary-tv",))
    batch, metadata = rows_of(run)
    for number, step in counted(run, question).items():
        here = (batch["step"] == number) & batch.vectors
        part = Batch(
            "", 0, {name: values[here] for name, values in batch.columns.items()}, here[here]
        )
        before = batch_tokens(part, metadata)
        pre = before.divergence(divergence)
        delta = batch_tokens(part, metadata, post=True).divergence(divergence) - pre
        keeps = {
            name: CRITERIA[name].keeps(before, threshold=0.05, divergence=divergence)
            for name in question.rules
        }
        expected = dict.fromkeys(step.counts, 0)
        expected["tokens"] = int((batch["step"] == number).sum())
        expected["with_topk"] = len(pre)
        expected["without_topk"] = expected["tokens"] - len(pre)
        expected["in_loss"] = int(batch["in_loss"][batch["step"] == number].sum())
        noise = batch["delta_d_noise"][here]
        for at in range(len(pre)):
            clear, out = not abs(delta[at]) < noise[at], pre[at] > 0.05
            up, down = clear and delta[at] > 0, clear and delta[at] < 0
            ours, theirs = keeps[str(question.criterion)][at], keeps["ratio"][at]
            expected["outside"] += out
            sets = ["", *["outside_"] * bool(out)]
            if out and ours != theirs:
                expected["disagreement"] += 1
                side = "criterion" if ours else "baseline"
                expected[f"{side}_kept"] += 1
                expected[f"{side}_unsafe"] += up
                expected[f"{side}_contracting"] += down
                expected[f"{side}_determined"] += clear
                expected[f"{side}_undetermined"] += not clear
                sets.append("disagreement_")
            for name in sets:
                expected[f"{name}increase"] += up
                expected[f"{name}determined"] += clear
                expected[f"{name}undetermined"] += not clear
        assert step.counts == expected
        assert step.masked == {name: int((~keep).sum()) for name, keep in keeps.items()}
        assert step.delta_d == pytest.approx((delta.sum(), delta[pre > 0.05].sum()))
        assert step.extremes["delta_d_abs_max"] == np.abs(delta).max()
    assert sum(step.counts["disagreement"] for step in counted(run, question).values()) > 5


def test_the_metrics_are_of_the_policy_before_the_step(run: Path) -> None:
    batch, _ = rows_of(run)
    for number, step in counted(run, StepQuestion()).items():
        here = batch["step"] == number
        sums = LogprobSums.of(
            *(batch[name][here] for name in ("behavior_logprob", "pre_logprob")),
            advantage=batch["advantage"][here],
            sequence=batch["sequence"][here],
        )
        scalars = step.scalars()
        for name, value in metric_values(sums).items():
            assert scalars[f"deltad/{name}"] == pytest.approx(value)
        assert scalars["deltad_sums/k3"] == sums.k3


def test_parts_of_a_step_add_up_to_the_step(run: Path) -> None:
    batch, metadata = rows_of(run)
    question = StepQuestion(threshold=0.05)
    parts: dict[int, StepScalars] = {}
    for rank in (1, 0):
        mine = batch["sequence"] % 2 == rank
        part = Batch(
            "",
            0,
            {name: values[mine] for name, values in batch.columns.items()},
            batch.vectors[mine],
        )
        for step in count_steps(part, metadata, question, arm="none", seed=0, rank=rank):
            parts[step.step] = parts[step.step] + step if step.step in parts else step
    whole = counted(run, question)
    assert whole.keys() == parts.keys()
    for number, step in whole.items():
        assert parts[number].ranks == (0, 1)
        assert parts[number].counts == step.counts
        assert parts[number].d_post == step.d_post
        assert parts[number].scalars() == pytest.approx(step.scalars())


def test_every_rate_is_the_quotient_of_two_scalars(run: Path) -> None:
    seen = set()
    for step in counted(run, StepQuestion(threshold=0.05)).values():
        scalars = step.scalars(prefix="mine")
        for name, (above, below) in RATES.items():
            if f"mine/{name}" in scalars:
                seen.add(name)
                quotient = scalars[f"mine/{above}"] / scalars[f"mine/{below}"]
                assert scalars[f"mine/{name}"] == quotient
            else:
                assert not scalars.get(f"mine/{below}")
        assert all(math.isfinite(value) for value in scalars.values())
        assert {name.partition("/")[0] for name in scalars} == {"mine", "mine_sums"}
    assert seen == set(RATES)


def test_a_zero_step_changes_nothing(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", arms=("zero-step",), seeds=(0,), ranks=1, parts=1)
    for step in counted(run, StepQuestion(), "zero-step").values():
        assert step.counts["increase"] == 0
        assert step.extremes["delta_d_abs_max"] == 0
        assert step.d_pre == step.d_post


def test_steps_come_back_from_json(run: Path) -> None:
    for step in counted(run, StepQuestion(threshold=0.05, masked=("binary-kl",))).values():
        text = json.dumps(step.to_json_object(), allow_nan=False)
        assert StepScalars.from_json_object(json.loads(text)) == step
    empty = StepScalars("none", 0, 3)
    assert StepScalars.from_json_object(json.loads(json.dumps(empty.to_json_object()))) == empty
    assert empty.scalars(sums=False) == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, f"format {FORMAT}"),
        ({"counts": None}, "malformed"),
        ({"question": {"threshold": 0.1, "color": "red"}}, "malformed"),
        ({"fit": [1.0]}, "malformed"),
        ({"question": {"threshold": -1.0}}, "threshold"),
        ({"arm": "\x1b[31m"}, r"must be printable, got '\\x1b"),
        ({"masked": {"\x07": 1}}, "must be printable"),
    ],
)
def test_foreign_json_is_refused(change: dict[str, Any], words: str) -> None:
    found = {**StepScalars("none", 0, 3).to_json_object(), **change}
    with pytest.raises(ValueError, match=words):
        StepScalars.from_json_object(found)


def test_sums_of_an_earlier_version_leave_products_of_ratios_unknown() -> None:
    sums = LogprobSums.of(np.zeros(2), np.zeros(2), sequence=np.arange(2))
    found = StepScalars("none", 0, 3, logprobs=sums).to_json_object()
    found["logprobs"] |= {"sequence_ratio": 2.0, "sequence_ratio_squared": 2.0}
    del found["logprobs"]["log_sequence_ratio"], found["logprobs"]["log_sequence_ratio_squared"]
    read = StepScalars.from_json_object(found)
    for logprobs in (read.logprobs, read.logprobs + sums):
        values = metric_values(logprobs)
        for name in ("ess_seq", "chi2_seq", "sequence_ratio_mean"):
            assert math.isnan(values[name])
        assert values["behavior_ppl"] == values["ess"] == 1.0


def test_thinned_rows_say_nothing_of_all_tokens(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "rows": 200,
        "drift": 1.5,
        "ranks": 1,
        "parts": 1,
        "seeds": (0,),
        "row_group_size": 300,
    }
    whole = counted(make_dump(tmp_path / "whole", **options), StepQuestion())
    thin = counted(make_dump(tmp_path / "thin", **options, stored=("kl", 0.1)), StepQuestion())
    for number, step in thin.items():
        scalars, full = step.scalars(), whole[number].scalars()
        assert all(full[name] == pytest.approx(value) for name, value in scalars.items())
        assert "deltad/outside" in scalars
        for name in ("tokens", "kl", "outside_rate", "temperature", "d_pre_p50", "increase"):
            assert f"deltad/{name}" not in scalars
        assert "deltad/masked/clip-higher" not in scalars
    for refused in (StepQuestion(threshold=0.05), StepQuestion(divergence="tv")):
        with pytest.raises(CriterionError, match="stores only"):
            counted(tmp_path / "thin", refused)


def test_vectors_left_out_thin_the_counts_as_rows_left_out_do(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "rows": 300, "drift": 1.5, "ranks": 1, "parts": 1, "seeds": (0,), "row_group_size": 300,
    }  # fmt: skip
    near = {"rule": "near", "divergence": "kl", "threshold": 0.1, "sample": 0.0}
    run = make_dump(tmp_path / "near", **options, metadata={"vectors": near})
    for step in counted(run, StepQuestion()).values():
        assert not step.whole
        assert "deltad/outside_rate" not in step.scalars()
    for refused in (StepQuestion(threshold=0.05), StepQuestion(divergence="tv")):
        with pytest.raises(CriterionError, match=r"keeps top-K log-probs only .* kl above 0\.1"):
            counted(run, refused)
    pair = {
        "rule": "disagreement", "divergence": "kl", "threshold": 0.15, "criterion": "ratio",
        "baseline": "binary-kl", "outside": 300,
    }  # fmt: skip
    run = make_dump(tmp_path / "pair", **options, metadata={"stored": pair})
    with pytest.raises(CriterionError, match="on which two criteria disagree"):
        counted(run, StepQuestion())


@pytest.mark.parametrize("tau", [0.5, 1.0, 1.7])
def test_the_fitted_temperature_is_the_policys_relative_to_the_behaviors(
    tmp_path: Path, tau: float
) -> None:
    def heat(arm: str, seed: int, columns: dict[str, Any]) -> None:
        mu = columns["topk_behavior_logprobs"]
        offset = np.random.default_rng(seed).normal(size=(len(mu), 1))
        hot = np.where(np.isfinite(mu), mu / tau + offset, -20)
        columns["topk_pre_logprobs"] = hot.astype(np.float32)

    run = make_dump(tmp_path / "run", ranks=1, parts=1, seeds=(0,), change=heat)
    fits = [step.fit for step in counted(run, StepQuestion()).values()]
    squares, products = (sum(each) for each in zip(*fits, strict=True))
    assert squares / products == pytest.approx(tau, rel=1e-4)


def test_only_one_step_can_be_added_up() -> None:
    step = StepScalars("none", 0, 3)
    for other in (
        StepScalars("ratio", 0, 3),
        StepScalars("none", 1, 3),
        StepScalars("none", 0, 4),
        StepScalars("none", 0, 3, StepQuestion(threshold=0.1)),
    ):
        with pytest.raises(ValueError, match="one step"):
            step + other


def test_a_question_watches_each_criterion_once_and_refuses_nonsense() -> None:
    assert StepQuestion(divergence="tv").criterion == "predictive-tv-aggregated"
    assert tuple(StepQuestion(baseline="none", masked=("ratio", "none")).rules) == (
        "predictive-kl-aggregated",
        NONE.name,
        "ratio",
    )
    for wrong in (
        {"threshold": -0.1},
        {"threshold": math.nan},
        {"divergence": "js"},
        {"criterion": "predictive-tv-exact"},
        {"masked": ("no-such",)},
    ):
        with pytest.raises(CriterionError):
            StepQuestion(**wrong)
    assert "pre_collision" in columns_for(StepQuestion(criterion="predictive-kl-exact"))


def test_rules_of_a_users_own_are_watched_and_named_in_lines(run: Path, tmp_path: Path) -> None:
    mine = Rule("mine", push="kl-uniform")
    file = tmp_path / "rules.py"
    file.write_text(
        "from deltad.masks import Rule\n"
        "def apart(tokens):\n    return abs(tokens['pre_entropy']) * 0 - 1\n"
        "OFF = Rule('off', region=apart, needs=('pre_entropy',))\n"
    )
    question = StepQuestion(0.05, criterion=mine, masked=(f"{file}:OFF", "predictive-kl-uniform"))
    assert (question.criterion, question.masked) == ("mine", ("off", "predictive-kl-uniform"))
    assert "pre_entropy" in columns_for(question)
    steps = counted(run, question)
    assert any(step.counts["disagreement"] for step in steps.values())
    for step in steps.values():
        assert step.masked["mine"] == step.masked["predictive-kl-uniform"]
        assert step.masked["off"] == 0
        assert pickle.loads(pickle.dumps(step)) == step
        read = StepScalars.from_json_object(json.loads(json.dumps(step.to_json_object())))
        assert read == step
        assert read + step == step + read
    with pytest.raises(CriterionError, match="two different rules are named ratio"):
        StepQuestion(criterion=Rule("ratio", push="kl-uniform"))


def test_rules_of_whole_responses_are_watched(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", arms=("none",), rows=60, drift=1.5, ranks=1, parts=1)
    low = Rule("low", "zero", weight=lambda tokens: tokens.sequence_log_ratio + 3, scope="sequence")
    steps = counted(run, StepQuestion(masked=(low,)))
    rows = pq.read_table(part_files(run)[0]).to_pandas()
    log_ratio = rows.pre_logprob.astype(float) - rows.behavior_logprob.astype(float)
    total = log_ratio.groupby([rows.step, rows.sequence]).transform("sum")
    beyond = (total <= -3) & rows.topk_ids.notna()
    expected = beyond.groupby(rows.step).sum().to_dict()
    assert {number: step.masked["low"] for number, step in steps.items()} == expected
    assert 0 < sum(expected.values()) < len(rows)


def test_a_response_that_begins_elsewhere_is_not_judged(tmp_path: Path) -> None:
    options: dict[str, Any] = {"arms": ("none",), "rows": 30, "ranks": 1, "parts": 1}
    run = make_dump(tmp_path / "run", **options)
    file = part_files(run)[0]
    rows = pq.read_table(file)
    at = rows.schema.get_field_index("position")
    late = pc.add(rows["position"], pa.scalar(1, pa.int32()))
    pq.write_table(rows.set_column(at, rows.schema.field(at), late), file)
    with pytest.raises(CriterionError, match=r"response \d+ of step \d+ begins elsewhere"):
        counted(run, StepQuestion(masked=("sequence_mask",)))
    thin = make_dump(tmp_path / "thin", **options, stored=("kl", 0.1))
    with pytest.raises(CriterionError, match="stores only some of their tokens"):
        counted(thin, StepQuestion(masked=("sequence_mask",)))


def test_lines_of_older_versions_took_every_change_for_determined() -> None:
    counts = {
        "tokens": 9, "in_loss": 9, "without_vectors": 1, "outside": 4, "disagreement": 2,
        "increase": 5, "outside_increase": 3, "disagreement_increase": 1,
        "criterion_kept": 1, "criterion_unsafe": 1, "criterion_contracting": 0,
        "baseline_kept": 1, "baseline_unsafe": 0, "baseline_contracting": 1,
    }  # fmt: skip
    line = {**StepScalars("none", 0, 3).to_json_object(), "counts": counts}
    scalars = StepScalars.from_json_object(line).scalars()
    assert scalars["deltad/outside_rate"] == 4 / 8
    assert scalars["deltad/outside_increase_rate"] == 3 / 4
    assert scalars["deltad/criterion_unsafe_keep_rate"] == 1
    assert scalars["deltad/without_topk"] == 1


def test_of_rows_without_topk_nothing_is_known_but_their_number(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", seeds=(0,), rows=40, null_vectors=1.0)
    for step in counted(run, StepQuestion()).values():
        assert step.counts.keys() == {"tokens", "in_loss", "with_topk", "without_topk"}
        assert step.counts["without_topk"] == step.counts["tokens"]
        scalars = step.scalars()
        assert "deltad/kl" in scalars
        assert not {name for name in scalars if "outside" in name or "masked" in name}


def test_files_of_steps_lie_where_dataset_readers_skip_them() -> None:
    path = steps_path(Path("run"), "actual", 3, 1)
    assert path == Path("run/_steps/arm=actual/seed=3/rank-1.jsonl")


@few
@given(
    values=st.lists(st.floats(1e-9, 500.0), min_size=1, max_size=50),
    share=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
)
def test_a_quantile_is_right_within_its_bin(values: list[float], share: float) -> None:
    histogram = LogHistogram.of(np.array(values))
    exact = np.quantile(values, share, method="inverted_cdf")
    factor = 10 ** (0.5001 / BINS_PER_DECADE)
    assert exact / factor <= histogram.quantile(share) <= exact * factor


@few
@given(values=st.lists(st.floats(-1e-7, 1e5), max_size=50), cut=st.integers(0, 50))
def test_histograms_add_up_like_their_numbers(values: list[float], cut: int) -> None:
    parts = [LogHistogram.of(np.array(each)) for each in (values[:cut], values[cut:])]
    assert parts[0] + parts[1] == LogHistogram.of(np.array(values))
    assert (parts[0] + parts[1]).total == len(values)


def test_what_no_bin_holds() -> None:
    histogram = LogHistogram.of(np.array([0.0, -1e-9, 1e-12, 1e9, math.inf, math.nan]))
    assert histogram.total == 5
    assert [histogram.quantile(share) for share in (0.2, 0.6, 0.7, 1)] == [0, 0, math.inf, math.inf]
    assert math.isnan(LogHistogram().quantile(0.5))
    for wrong in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="share"):
            histogram.quantile(wrong)
