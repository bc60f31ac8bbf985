from __future__ import annotations

import numpy as np
import pytest

from deltad.analysis.doctor import Sample, examine
from deltad.analysis.doctor.evidence import find_fills, rounded_to
from tests.analysis.doctor.made import made_sample


def changed(sample: Sample, column: str, rows: slice, value: float) -> Sample:
    values = sample[column].copy()
    values[rows] = value
    return sample.replace(**{column: values})


def test_a_sample_without_fills_has_none() -> None:
    assert not any(cells.any() for cells in find_fills(made_sample()).values())


@pytest.mark.parametrize("value", [0.0, 1.0, -100.0, -9999.0, -1e30, np.nan, -np.inf, -23.02585])
@pytest.mark.parametrize("column", ["behavior_logprob", "topk_behavior_logprobs"])
def test_fills_are_found_where_they_are_and_nowhere_else(column: str, value: float) -> None:
    rows = slice(5, None, 23)
    broken = changed(made_sample(), column, rows, value)
    found = find_fills(broken)
    assert [name for name, cells in found.items() if cells.any()] == [column]
    filled = found[column].reshape(len(broken), -1).any(axis=1)
    expected = np.zeros(len(broken), np.bool_)
    expected[rows] = True
    if value == 0 and column == "behavior_logprob":  # a sure token's log-prob is 0
        assert (filled <= expected).all()
        assert filled.sum() > 0.8 * expected.sum()
    else:
        np.testing.assert_array_equal(filled, expected)


def test_the_finding_says_value_column_and_count() -> None:
    broken = changed(made_sample(), "pre_logprob", slice(0, None, 50), -9999.0)
    found = examine(broken).findings[0]
    assert found.cause == "sentinel"
    assert found.tokens == -(-len(broken) // 50)
    assert found.evidence["value"] == "-9999"
    assert found.evidence["column"] == "pre_logprob"


@pytest.mark.parametrize(("kind", "bits"), [("bfloat16", 16), ("float16", 13)])
def test_shorter_floats_are_told_by_their_bits(kind: str, bits: int) -> None:
    values = -np.random.default_rng(0).random(100, np.float32) * 9
    assert rounded_to(values) is None
    short = (values.view(np.uint32) >> bits << bits).view(np.float32)
    assert rounded_to(short) == kind


def lists(sample: Sample) -> dict[str, np.ndarray]:
    return {name: sample[name].copy() for name in sample.columns if name.startswith("topk_")}


def test_a_duplicate_is_a_convention() -> None:
    sample = made_sample()
    columns = lists(sample)
    for values in columns.values():
        values[::10, 5] = values[::10, 4]
    found = examine(sample.replace(**columns)).findings[0]
    assert found.cause == "topk-convention"
    assert found.evidence["patterns"]["duplicate ids"] == len(sample) / 10


def test_ranks_out_of_order_are_a_convention() -> None:
    sample = made_sample()
    columns = {name: values[:, ::-1] for name, values in lists(sample).items()}
    found = examine(sample.replace(**columns)).findings[0]
    assert found.cause == "topk-convention"
    assert "ranks out of order" in found.evidence["patterns"]


def test_a_missing_sampled_token_is_a_convention() -> None:
    sample = made_sample()
    hit = sample["topk_ids"] == sample["token_id"][:, None]
    order = np.argsort(hit, axis=1, kind="stable")
    columns = lists(sample)
    for name, values in columns.items():
        values[hit] = -1 if name == "topk_ids" else np.nan
        columns[name] = np.take_along_axis(values, order, axis=1)
    found = examine(sample.replace(**columns)).findings[0]
    assert found.cause == "topk-convention"
    assert "sampled token missing" in found.evidence["patterns"]


def replaced_last(sample: Sample) -> Sample:
    alone = ~(sample["topk_ids"] == sample["token_id"][:, None]).any(axis=1)
    columns = lists(sample)
    for name, scalar in (
        ("topk_ids", "token_id"),
        ("topk_behavior_logprobs", "behavior_logprob"),
        ("topk_pre_logprobs", "pre_logprob"),
        ("topk_post_logprobs", "post_logprob"),
    ):
        columns[name][alone, -1] = sample[scalar][alone]
    return sample.replace(**columns)


def test_replacing_the_last_is_seen_unless_the_metadata_says_so() -> None:
    broken = replaced_last(made_sample())
    found = examine(broken).findings[0]
    assert found.cause == "topk-convention"
    assert next(iter(found.evidence["patterns"])) == "sampled token replaces the last"
    said = broken.with_metadata(behavior={"precision": "float32", "support": "replaced-last"})
    assert examine(said).healthy


def test_ids_beyond_the_vocabulary_are_named() -> None:
    sample = made_sample()
    ids = sample["topk_ids"].copy()
    ids[::40, -1] = 63
    found = examine(sample.replace(topk_ids=ids)).findings[0]
    assert (found.cause, found.evidence["largest_id"]) == ("vocabulary", 63)


def test_mass_above_one_is_impossible() -> None:
    sample = made_sample(update=1e-4)
    raised = {
        name: (sample[name] + np.float32(0.7)).astype(np.float32)
        for name in ("topk_behavior_logprobs", "topk_pre_logprobs", "behavior_logprob",
                     "pre_logprob")
    }  # fmt: skip
    assert [each.cause for each in examine(sample.replace(**raised)).findings] == [
        "impossible-values"
    ]


@pytest.mark.parametrize("column", ["post_logprob", "topk_post_logprobs"])
def test_log_probs_above_zero_after_the_step_are_found_too(column: str) -> None:
    sample = made_sample()
    values = sample[column].copy()
    values[5] = 0.7
    causes = [found.cause for found in examine(sample.replace(**{column: values})).findings]
    assert "impossible-values" in causes or "sentinel" in causes
