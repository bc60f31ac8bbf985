"""One recorded seed: what its rows must be whatever the model learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest

from deltad.dumps import Dump
from deltad.dumps.validate import check_dump
from deltad.probes.recipes import TinyRecipe, WorkerError, record
from deltad.probes.recipes.chain import Chain

from .micro import MICRO, micro

ALL = {"rule": "all"}
POLICY = ("pre_logprob", "topk_pre_logprobs", "pre_collision", "pre_entropy")


def silent(text: str, fraction: float) -> None:
    pass


def columns(run: Path, arm: str, seed: int = 0) -> dict[str, Any]:
    return {
        name: np.concatenate(
            [batch[name] for batch in Dump.open(run).batches(arm, seed, columns=[name])]
        )
        for name in pq.read_schema(run / f"arm={arm}" / f"seed={seed}" / "part-0-0.parquet").names
    }


def one_seed(tmp_path: Path, recipe: TinyRecipe, seed: int = 0) -> Path:
    record(recipe, tmp_path / "run", seeds=[seed], workers=0, store="all", quiet=True)
    return tmp_path / "run"


def test_dump_obeys_the_contract_and_masks_recompute(whole_dump: Path) -> None:
    assert check_dump(whole_dump, strict=False) == []


def test_dump_holds_what_was_asked_for(whole_dump: Path) -> None:
    dump = Dump.open(whole_dump)
    assert set(dump.arms) == {"none", "ratio", "predictive-kl-aggregated", "zero-step"}
    assert list(dump.seeds("none")) == [0, 1]
    assert list(dump.seeds("zero-step")) == [0]
    assert len(list(whole_dump.glob("_prompts/seed=*/part-0-0.parquet"))) == 2


def test_step_of_length_zero_changes_nothing_at_all(whole_dump: Path) -> None:
    rows = columns(whole_dump, "zero-step")
    assert len(rows["step"]) > 0
    for name in POLICY:
        after = name.replace("pre", "post")
        assert np.array_equal(rows[name], rows[after], equal_nan=True), name


def test_updates_move_the_policy_and_masks_mask(whole_dump: Path) -> None:
    none, ratio = columns(whole_dump, "none"), columns(whole_dump, "ratio")
    assert none["in_loss"].all()
    assert not ratio["in_loss"].all()
    assert (none["pre_logprob"] != none["post_logprob"]).any()
    masked_steps = {int(step) for step in ratio["step"][~ratio["in_loss"]]}
    for step in np.unique(none["step"]):
        rows = none["step"] == step
        same = np.array_equal(none["post_logprob"][rows], ratio["post_logprob"][rows])
        assert same == (int(step) not in masked_steps)


def test_steps_after_the_unmeasured_are_recorded(whole_dump: Path) -> None:
    rows = columns(whole_dump, "none")
    assert np.unique(rows["step"]).tolist() == [1, 2, 3]
    assert np.unique(rows["group"]).tolist() == [2, 3, 4, 5, 6, 7]


def test_whole_dumps_tell_the_text(whole_dump: Path) -> None:
    rows = columns(whole_dump, "none")
    prompts = pq.read_table(whole_dump / "_prompts" / "seed=0" / "part-0-0.parquet").to_pylist()
    assert [row["group"] for row in prompts] == list(range(8))
    first = prompts[2]
    expression = first["prompt"].removesuffix(" =")
    assert int(first["answer"]) == eval(expression)
    finished = 0
    for sequence in np.unique(rows["sequence"]):
        chosen = rows["sequence"] == sequence
        texts = rows["token"][chosen].tolist()
        answer = prompts[rows["group"][chosen][0]]["answer"]
        right = texts[-1] == "<eos>" and texts[-2:-1] == [answer]
        assert (rows["advantage"][chosen][0] > 0) == right
        finished += right
    assert finished > 0


def test_files_say_how_they_were_made(whole_dump: Path) -> None:
    dump = Dump.open(whole_dump)
    metadata = dump.metadata("ratio")
    assert metadata.extra["recipe"] == micro().to_json()
    assert metadata.update == {
        "mask": "ratio", "threshold": 0.15, "divergence": "kl", "optimizer": "adamw",
        "lr": MICRO["lr"], "batch": 8,
    }  # fmt: skip
    assert dump.metadata("zero-step").update["lr"] == 0
    assert metadata.readout["hidden_dtype"] == "torch.float32".removeprefix("torch.")
    assert metadata.readout["logits_rounded"] is False
    assert {"torch", "transformers"} <= set(metadata.versions)
    assert (metadata.top_k, metadata.vocab_size) == (5, 72)


def test_policy_that_has_not_moved_equals_the_behavior_bit_for_bit(
    cache: Path, tmp_path: Path
) -> None:
    run = one_seed(tmp_path, micro(unmeasured=0, arms=("none",), zero_step_seeds=0))
    rows = columns(run, "none")
    first = rows["step"] == 0
    assert first.any()
    assert np.array_equal(rows["behavior_logprob"][first], rows["pre_logprob"][first])
    assert np.array_equal(rows["topk_behavior_logprobs"][first], rows["topk_pre_logprobs"][first])
    assert not np.array_equal(rows["behavior_logprob"][~first], rows["pre_logprob"][~first])


def test_unmeasured_steps_are_the_same_steps(cache: Path, tmp_path: Path, whole_dump: Path) -> None:
    """Reading, and branching into arms, leave the chain as it is."""
    run = one_seed(tmp_path, micro(unmeasured=3, arms=("none",), zero_step_seeds=0))
    late, all_rows = columns(run, "none"), columns(whole_dump, "none")
    chosen = all_rows["step"] == 3
    for name in (*POLICY, "post_logprob", "token_id"):
        assert np.array_equal(late[name], all_rows[name][chosen], equal_nan=True), name


@pytest.mark.parametrize(
    ("overrides", "other_chain"),
    [
        ({"optimizer": "sgd", "lr": 0.5}, True),
        ({"warmup_updates": 2}, True),
        ({"temperature": 0.8, "ratio_cap": 2.0}, True),
        ({"go_on": "ratio"}, True),
        ({"divergence": "tv", "arms": ("none", "predictive-tv-exact", "binary-tv")}, False),
        ({"top_k": 80}, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_settings_record_valid_dumps_too(
    cache: Path, tmp_path: Path, whole_dump: Path, overrides: dict[str, Any], other_chain: bool
) -> None:
    """What only masks and lists depend on leaves the unmasked chain as it is."""
    run = one_seed(tmp_path, micro(**overrides))
    assert check_dump(run, strict=False) == []
    found, before = (columns(each, "none")["pre_logprob"] for each in (run, whole_dump))
    # Lists of another length are read in matrices of another shape, which round differently.
    rounding = 64 * np.finfo(np.float32).eps
    same = found.shape == before.shape and np.allclose(found, before, rtol=rounding, atol=rounding)
    assert same != other_chain


def test_rounded_behavior_differs_from_the_start_and_the_policy_is_not_rounded(
    cache: Path, tmp_path: Path
) -> None:
    class Rounded(TinyRecipe):
        name: ClassVar[str] = "rounded"
        behavior_rounding = "fp8"

    recipe = Rounded(**(MICRO | {"unmeasured": 0, "lr": 0.0, "arms": ("none",)}))
    recipe.prepare(silent)
    chain = Chain.load(recipe, silent)
    chain.record(tmp_path / "run", 0, ALL, silent)
    rows = columns(tmp_path / "run", "none")
    apart = np.abs(rows["behavior_logprob"] - rows["pre_logprob"])
    assert 1e-4 < np.median(apart) < 0.5
    assert chain.start.moved() is None


def test_seeds_do_not_depend_on_the_seed_before(
    cache: Path, tmp_path: Path, whole_dump: Path
) -> None:
    run = one_seed(tmp_path, micro(), seed=1)
    alone, after_another = columns(run, "none", 1), columns(whole_dump, "none", 1)
    for name in alone:
        assert np.array_equal(
            alone[name], after_another[name], equal_nan=alone[name].dtype.kind == "f"
        )


def test_failing_seed_leaves_no_file(cache: Path, tmp_path: Path) -> None:
    impossible = micro(max_attempts=1, max_new_tokens=1)
    with pytest.raises(WorkerError, match="seed 0: 0 of 8 groups with mixed rewards"):
        record(impossible, tmp_path / "run", seeds=1, workers=0, quiet=True)
    assert not (tmp_path / "run").exists()
