"""The options of a training: what is refused, and what they mean."""

from __future__ import annotations

from typing import Any

import pytest

from deltad.probes.recipes import RecipeError
from deltad.probes.training import DEFAULTS, MASKS, PRECISIONS, Training
from deltad.probes.training.files import recorded_parts
from deltad.probes.training.options import own_fields, world_fields

from .micro import micro


@pytest.mark.parametrize("recipe", DEFAULTS)
def test_defaults_of_every_recipe_can_be_trained_with_every_mask(recipe: str) -> None:
    training = Training.of(recipe)
    assert training.recipe.name == recipe
    for mask in MASKS:
        training.mask(mask)
    ours = {entry.name for entry in own_fields()}
    assert set(DEFAULTS[recipe]) <= ours
    assert not ours & {entry.name for entry in world_fields(recipe)}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"threshold": -1.0}, "`threshold` must be at least 0"),
        ({"precision": "int4"}, "`precision` must be one of fp32, bf16, fp8-rollout, fp8"),
        ({"operands": 99}, "`operands` must be at most 64"),
        ({"task": "x"}, "`world` of tiny has the fields"),
        ({"batches": 0}, "`batches` must be at least 1"),
    ],
)
def test_senseless_options_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        micro(**values)
    with pytest.raises(RecipeError, match="`recipe_name` must be one of tiny, smollm2"):
        Training.of("huge")


@pytest.mark.parametrize(
    ("mask", "options", "words"),
    [
        ("best", {}, "there is no criterion 'best'"),
        ("predictive-tv-exact", {}, "tv"),
        ("predictive-kl-full", {}, "set `full`"),
    ],
)
def test_masks_that_cannot_be_trained_with_are_refused(
    mask: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        micro(**options).mask(mask)
    micro(full=True).mask("predictive-kl-full")


def test_precisions_are_those_of_the_option() -> None:
    for name in PRECISIONS:
        assert micro(precision=name).settings is PRECISIONS[name]


def test_learning_rate_grows_to_its_value() -> None:
    training = micro(lr=1.0, warmup_steps=4)
    assert [training.lr_at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert micro(lr=1.0, warmup_steps=0).lr_at(0) == 1.0


def test_options_come_back_from_their_json() -> None:
    training = micro(threshold=0.05)
    found = training.to_json()
    world = found.pop("world")
    assert found.pop("recipe") == "tiny"
    assert Training.of("tiny", **found, **world).to_json() == training.to_json()


@pytest.mark.parametrize(("every", "parts"), [(0, [0, 0, 0]), (1, [0, 1, 2]), (3, [0, 1, 2])])
def test_a_part_of_the_dump_a_batch_that_records(every: int, parts: list[int]) -> None:
    training = micro(probe_every=every)  # two steps a batch
    assert [recorded_parts(training, batch) for batch in range(3)] == parts


def test_evaluations_and_checkpoints_come_at_the_end_too() -> None:
    training = micro(batches=5, eval_every=2, checkpoint_every=2)
    assert [b for b in range(6) if training.evaluates(b)] == [0, 2, 4, 5]
    assert [b for b in range(1, 6) if training.saves(b)] == [2, 4, 5]
