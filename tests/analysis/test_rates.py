"""`deltad table` against an independent count, and the laws of its numbers."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deltad.cli import app
from deltad.masks import CRITERIA
from tests.analysis.bruteforce import brute_table
from tests.dumps.factory import Columns, make_dump, write_part

NAMES = ("none", *CRITERIA)
ARMS = ("none", "ratio", "predictive-kl-aggregated", "zero-step")


def table(run: Path, *options: str) -> dict[str, Any]:
    """The object that the command prints."""
    result = CliRunner().invoke(app, ["table", str(run), "--format", "json", "--quiet", *options])
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def assert_agrees(found: Any, expected: Any, where: str = "") -> None:
    """Counts are equal and rates agree to 1e-12, wherever `expected` has a value."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_agrees(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for at, value in enumerate(expected):
            assert_agrees(found[at], value, f"{where}/{at}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=0, abs=1e-12), where
    else:
        assert found == expected, where


def compare(
    run: Path, criterion: str, baseline: str, family: str, threshold: float, protocol: str
) -> dict[str, Any]:
    """Table and brute force agree; returns the table."""
    found = table(
        run, "--criterion", criterion, "--baseline", baseline, "--divergence", family,
        "--threshold", repr(threshold), "--protocol", protocol,
    )  # fmt: skip
    shared = protocol.removeprefix("shared:")
    own = protocol == "own"
    expected = brute_table(
        run,
        criterion_arm=criterion if own else shared,
        baseline_arm=baseline if own else shared,
        threshold=threshold,
        family=family,
        criterion=criterion,
        baseline=baseline,
    )
    assert_agrees(found, expected)
    asked = {
        "threshold": threshold, "divergence": family, "criterion": criterion,
        "baseline": baseline, "protocol": protocol, "format": 1,
    }  # fmt: skip
    assert {key: found[key] for key in asked} == asked
    return found


@st.composite
def dumps(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `make_dump` in every corner that the format has."""
    seeds = draw(st.sampled_from([(0,), (3, 7), (0, 2, 12)]))
    return {
        "arms": ARMS,
        "seeds": seeds,
        "top_k": draw(st.sampled_from([1, 2, 3, 5, 8, 20, 50])),
        "vocab_size": draw(st.sampled_from([2, 3, 5, 9, 24, 60])),
        "rows": draw(st.sampled_from([1, 20, 45])),
        "rng_seed": draw(st.integers(0, 2**32 - 1)),
        "null_vectors": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "ranks": draw(st.integers(1, 2)),
        "parts": draw(st.integers(1, 2)),
        "empty_seeds": draw(st.sampled_from([(), seeds[:1]])),
        "drift": draw(st.sampled_from([0.3, 1.0, 3.0])),
        "threshold": draw(st.sampled_from([0.0, 0.01, 0.05, 0.15, 0.4])),
    }


@settings(max_examples=12)
@given(dump=dumps(), pair=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)))
@example(dump={"rows": 0, "arms": ARMS}, pair=("ratio", "none"))
def test_table_counts_as_the_brute_force_does_on_any_dump(
    dump: dict[str, Any], pair: tuple[str, str]
) -> None:
    families = {name.split("-")[1] for name in pair if name.startswith("predictive")}
    with tempfile.TemporaryDirectory() as folder:
        run = make_dump(Path(folder) / "run", **dump)
        threshold = dump.get("threshold", 0.15)
        if len(families) < 2:
            for family in families or ("kl", "tv"):
                compare(run, *pair, family, threshold, "shared:zero-step")
                compare(run, *pair, family, threshold, "shared:none")
        compare(run, "predictive-kl-aggregated", "ratio", "kl", threshold, "own")
        compare(run, "ratio", "none", "kl", threshold, "own")


@pytest.fixture(scope="module")
def rich_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump in which every pair of criteria disagrees about many tokens."""
    return make_dump(
        tmp_path_factory.mktemp("rich") / "run",
        seeds=(0, 1, 2),
        rows=150,
        ranks=1,
        top_k=3,
        vocab_size=30,
        drift=1.5,
        null_vectors=0.1,
        arms=("none", "ratio", "predictive-tv-uniform", "zero-step"),
        divergence="tv",
        threshold=0.1,
    )


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (name, family)
        for name in CRITERIA
        for family in ("kl", "tv")
        if CRITERIA[name].family in (None, family)
    ],
)
def test_every_criterion_is_counted_as_by_brute_force(
    rich_run: Path, name: str, family: str
) -> None:
    baseline = "none" if name == "ratio" else "ratio"
    base = compare(rich_run, name, baseline, family, 0.1, "shared:none")["summary"]["base"]
    assert base["outside"]["tokens"] > 100
    assert base["disagreement"]["tokens"] > 0


def test_own_takes_each_criterion_from_its_own_arm(rich_run: Path) -> None:
    found = compare(rich_run, "predictive-tv-uniform", "ratio", "tv", 0.1, "own")
    shared = table(
        rich_run, "--criterion", "predictive-tv-uniform", "--divergence", "tv",
        "--threshold", "0.1", "--protocol", "shared:predictive-tv-uniform",
    )  # fmt: skip
    for own, other in zip(found["seeds"], shared["seeds"], strict=True):
        assert own["criterion"] == other["criterion"]
        assert own["baseline"]["kept"] == other["baseline"]["kept"]
        assert [own[key] for key in ("tokens", "outside", "disagreement")] == [
            other[key] for key in ("tokens", "outside", "disagreement")
        ]
    assert [seed["baseline"] for seed in found["seeds"]] != [
        seed["baseline"] for seed in shared["seeds"]
    ]
    assert found["summary"]["base"] == shared["summary"]["base"]


def test_a_zero_step_is_neither_unsafe_nor_contracting(rich_run: Path) -> None:
    found = compare(rich_run, "predictive-tv-uniform", "ratio", "tv", 0.1, "shared:zero-step")[
        "summary"
    ]
    for side in ("criterion", "baseline"):
        assert found[side]["unsafe_keep_rate"] == 0
        assert found[side]["contracting_fraction"] == 0
    assert found["paired"]["tied"] == found["paired"]["seeds"] > 0
    assert found["paired"]["sign_test_p"] is None
    assert found["paired"]["wilcoxon_p"] is None


@pytest.mark.parametrize("family", ["kl", "tv"])
def test_a_dump_stored_above_a_threshold_gives_the_counts_of_the_whole(
    tmp_path: Path, family: str
) -> None:
    options: dict[str, Any] = {
        "rows": 120,
        "drift": 1.5,
        "seeds": (0, 1, 2),
        "arms": ("none", "ratio"),
    }
    whole = make_dump(tmp_path / "whole", divergence=family, **options)
    above = make_dump(tmp_path / "above", divergence=family, stored=(family, 0.05), **options)
    for threshold in ("0.05", "0.15"):
        asked = ("--divergence", family, "--threshold", threshold)
        ours, theirs = table(above, *asked), table(whole, *asked)
        assert ours == theirs
        assert ours["summary"]["tokens_per_seed"] == 120
        assert ours["summary"]["outside_per_seed"] > 10


def test_files_with_rounded_logits_are_judged_by_their_own_tolerance(tmp_path: Path) -> None:
    # One file of the seed has mass up to 1.04 on the support, and says that it was rounded.
    run = make_dump(tmp_path / "run", arms=("none",), seeds=(0,), rows=80, ranks=1, parts=1)
    columns = one_token(log_mu=[math.log(0.7), math.log(0.34)], log_pi=[math.log(0.5)] * 2)
    metadata: dict[str, Any] = {"top_k": 4, "vocab_size": 24, "readout": {"logits_rounded": True}}
    put(run / "arm=none" / "seed=0" / "part-1-0.parquet", columns, **metadata)
    assert compare(run, "ratio", "none", "kl", 0.1, "shared:none")["seeds"][0]["tokens"] == 81


def test_threshold_is_strict(tmp_path: Path) -> None:
    # TV of (0.5, 0.5) and (0.25, 0.75) is exactly 1/4 in binary; the stored logs of 1/2 and
    # 1/4 round, so the threshold is taken from what the file holds.
    columns = one_token(log_mu=[math.log(0.5)], log_pi=[math.log(0.25)], top_k=1)
    run = tmp_path / "run"
    put(run / "arm=none" / "seed=0" / "part-0-0.parquet", columns, top_k=1, vocab_size=9)
    mu, pi = (math.exp(float(np.float32(math.log(share)))) for share in (0.5, 0.25))
    exact = 0.5 * (abs(mu - pi) + abs((1 - mu) - (1 - pi)))
    asked = ("--divergence", "tv", "--threshold")
    assert table(run, *asked, repr(exact))["seeds"][0]["outside"] == 0
    assert table(run, *asked, repr(math.nextafter(exact, 0)))["seeds"][0]["outside"] == 1


EXTREMES = {
    "a ratio of e^30": ([-30.0], [-1e-4], [-2.0]),
    "a ratio of e^-30": ([0.0], [-30.0], [-29.0]),
    "log-probs a little above 0": ([9e-5], [8e-5], [-0.5]),
    "no mass left in either tail": ([math.log(0.5)] * 2, [math.log(0.5)] * 2, [-0.5, -1.2]),
    "no policy mass in the tail": ([-1.0, -1.0], [math.log(0.6), math.log(0.4)], [-0.7, -0.8]),
    "no behavior mass in the tail": ([math.log(0.5)] * 2, [-2.0, -3.0], [-2.5, -1.0]),
    "an impossible id in the list": ([-0.3, -math.inf], [-0.9, -1.1], [-0.8, -1.3]),
    "a policy that gives an id nothing": ([-0.3, -3.0], [-0.2, -3e38], [-0.2, -90.0]),
    "a mass a little above 1": ([math.log(0.50003)] * 2, [math.log(0.50002)] * 2, [-1.0, -1.0]),
}


@pytest.mark.parametrize("vocab_size", [2, 200_000])
def test_extreme_values_are_counted_as_by_brute_force(tmp_path: Path, vocab_size: int) -> None:
    run = tmp_path / "run"
    for seed, (log_mu, log_pi, log_post) in enumerate(EXTREMES.values()):
        parts = [
            one_token(log_mu=log_mu, log_pi=log_pi, log_post=log_post, advantage=sign, top_k=2)
            for sign in (1.0, -1.0, 0.0)
        ]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        columns["position"] = np.arange(3, dtype=np.int32)
        file = run / "arm=none" / f"seed={seed}" / "part-0-0.parquet"
        put(file, columns, top_k=2, vocab_size=vocab_size)
    for name, each in CRITERIA.items():
        if "full" not in name:
            family = each.family or "kl"
            compare(run, name, "ratio" if "-" in name else "none", family, 0.1, "shared:none")


def one_token(
    *,
    log_mu: list[float],
    log_pi: list[float],
    log_post: list[float] | None = None,
    advantage: float = 1.0,
    top_k: int = 4,
) -> Columns:
    """The columns of one token, the first of its list, the list padded to `top_k`."""

    def padded(values: list[float]) -> Any:
        return np.array([values + [math.nan] * (top_k - len(values))], dtype=np.float32)

    log_post = log_pi if log_post is None else log_post
    ids = [*range(len(log_mu)), *[-1] * (top_k - len(log_mu))]
    collision = sum(math.exp(min(0.0, value)) ** 2 for value in log_pi)
    ints = {"step": 0, "group": 0, "sequence": 0, "position": 0, "token_id": 0}
    floats = {
        "advantage": advantage,
        "behavior_logprob": log_mu[0],
        "pre_logprob": log_pi[0],
        "post_logprob": log_post[0],
        "pre_collision": min(1.0, collision),
    }
    return {
        **{name: np.array([value], dtype=np.int32) for name, value in ints.items()},
        "in_loss": np.array([True]),
        **{name: np.array([value], dtype=np.float32) for name, value in floats.items()},
        "topk_ids": np.array([ids], dtype=np.int32),
        "topk_behavior_logprobs": padded(log_mu),
        "topk_pre_logprobs": padded(log_pi),
        "topk_post_logprobs": padded(log_post),
    }


def put(file: Path, columns: Columns, *, top_k: int, vocab_size: int, **metadata: Any) -> None:
    """Write a file of an unmasked arm."""
    known = {
        "format": 1, "top_k": top_k, "vocab_size": vocab_size, "temperature": 0.7,
        "stored": {"rule": "all"}, "rows_seen": len(columns["step"]),
        "update": {"mask": "none"}, **metadata,
    }  # fmt: skip
    write_part(file, columns, metadata=known, top_k=top_k)
