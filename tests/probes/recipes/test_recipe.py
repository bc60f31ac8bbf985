"""Recipes are data: every field explained, checked and written down."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from deltad.probes.recipes import RECIPES, Recipe, RecipeError, TinyRecipe

EVERY = [pytest.param(recipe, id=name) for name, recipe in RECIPES.items()]


@pytest.mark.parametrize("recipe", EVERY)
def test_every_field_says_what_it_is(recipe: type[Recipe]) -> None:
    for field in dataclasses.fields(recipe):
        text = field.metadata["help"]
        assert text.endswith(".")
        assert text[0].isupper()


@pytest.mark.parametrize("recipe", EVERY)
def test_json_holds_every_field_and_gives_the_recipe_back(recipe: type[Recipe]) -> None:
    made = recipe(lr=0.25, top_k=7)
    values = json.loads(json.dumps(made.to_json()))
    assert values.pop("name") == recipe.name
    assert set(values) == {field.name for field in dataclasses.fields(recipe)}
    again: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in values.items()
    }
    assert recipe(**again) == made


@pytest.mark.parametrize("recipe", EVERY)
def test_every_variant_is_explained_and_can_be_overridden(recipe: type[Recipe]) -> None:
    assert set(recipe.variants) == set(recipe.variants_help)
    assert {"sgd", "fresh-adamw", "warm-adamw", "few-outside"} <= set(recipe.variants)
    for name, overrides in recipe.variants.items():
        made = recipe.variant(name)
        assert all(getattr(made, key) == value for key, value in overrides.items())
        assert recipe.variant(name, lr=0.5).lr == 0.5


def test_unknown_variant_names_those_that_exist() -> None:
    with pytest.raises(RecipeError, match=r"no variant 'adam' of tiny.*fresh-adamw"):
        TinyRecipe.variant("adam")


@pytest.mark.parametrize("recipe", EVERY)
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompts", 0, "`prompts` must be at least 1, got 0"),
        ("responses", 1, "`responses` must be at least 2"),
        ("prompts", 2.5, "`prompts` must be int, got 2.5"),
        ("prompts", True, "`prompts` must be int, got True"),
        ("lr", "high", "`lr` must be float, got 'high'"),
        ("lr", float("nan"), "`lr` must be finite, got nan"),
        ("threshold", float("inf"), "`threshold` must be finite, got inf"),
        ("ratio_cap", float("inf"), "`ratio_cap` must be finite"),
        ("beta1", 1.5, "`beta1` must be below 1.0, got 1.5"),
        ("temperature", 0.0, "`temperature` must be above 0.0"),
        ("ratio_cap", -1.0, "`ratio_cap` must be above 0.0"),
        ("optimizer", "lion", "`optimizer` must be one of adamw, sgd, got 'lion'"),
        ("divergence", "js", "`divergence` must be one of kl, tv"),
        ("unmeasured", 99, "`unmeasured` must be below `minibatches`"),
        ("arms", (), "`arms` must be distinct and at least one"),
        ("arms", ("none", "none"), "`arms` must be distinct"),
        ("arms", ("none", "ratoi"), "`arms`: there is no criterion 'ratoi'"),
        ("arms", ("none", "zero-step"), "`arms` leaves zero-step to `zero_step_seeds`"),
        ("arms", ("none", "predictive-tv-exact"), "`arms`: .*TV divergence"),
        ("arms", ("ratio",), "`go_on` must be one of `arms`, ratio, got 'none'"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(
    recipe: type[Recipe], field: str, value: Any, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("operands", 65, "`operands` must be at most 64"),
        ("hidden_size", 20, "`hidden_size` a multiple of twice"),
        ("heads", 3, "`heads` must be even"),
    ],
)
def test_tiny_refuses_shapes_that_no_model_has(field: str, value: int, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        TinyRecipe(**{field: value})  # type: ignore[arg-type]


def test_numbers_may_be_whole_where_fractions_are_meant() -> None:
    assert TinyRecipe(lr=1, ratio_cap=5).lr == 1


def test_zero_step_is_an_arm_of_the_first_seeds_only() -> None:
    recipe = TinyRecipe(zero_step_seeds=2)
    assert recipe.arms_of(1) == (*recipe.arms, "zero-step")
    assert recipe.arms_of(2) == recipe.arms


def test_the_whole_vocabulary_is_needed_by_the_full_criterion() -> None:
    arms = ("none", "predictive-kl-full")
    assert TinyRecipe(arms=arms).full
    with pytest.raises(RecipeError, match=r"whole vocabulary: set `full`"):
        TinyRecipe(arms=arms, full=False)


def test_what_the_weights_depend_on_leaves_the_update_out() -> None:
    def key(**fields: Any) -> dict[str, Any]:
        return TinyRecipe(pretrain_seed=0, **fields).pretraining_key()

    assert key(lr=1.0, arms=("none",)) == key()
    assert key(pretrain_lr=1.0) != key()


def test_tiny_starts_from_base_0_unless_told_otherwise() -> None:
    assert TinyRecipe().base == TinyRecipe(base=0).base == 0
    assert TinyRecipe(base=9).base == 9
    assert TinyRecipe(pretrain_seed=3).base is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": 10}, "`base` must be below 10, got 10"),
        ({"base": -1}, "`base` must be at least 0, got -1"),
        ({"base": 1, "pretrain_seed": 2}, "give one of the two"),
        ({"layers": 3}, "`layers` is 3 .* pre-trained with 2: give `pretrain_seed`"),
        ({"base": 2, "operands": 16}, "`operands` is 16 .* pre-trained with 32"),
    ],
)
def test_a_base_that_the_options_do_not_fit_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        TinyRecipe(**fields)
