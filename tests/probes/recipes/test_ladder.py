"""A recipe recorded with the ladder is the recipe recorded without it, and more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltad.dumps import Dump, check_dump
from deltad.probes import LADDER_COLUMNS
from deltad.probes.recipes import RecipeError, record

from .micro import micro


@pytest.mark.usefixtures("cache")
def test_every_column_but_the_ladders_is_bit_identical(tmp_path: Path) -> None:
    recipe = micro(warmup_updates=1)
    dumps = []
    for name, tokens in (("without", None), ("with", 1000)):
        record(recipe, tmp_path / name, seeds=1, workers=0, ladder_tokens=tokens, quiet=True)
        assert check_dump(tmp_path / name, strict=False) == []
        dumps.append(Dump.open(tmp_path / name))
    without, ladder = dumps
    assert without.arms == ladder.arms
    for arm in without.arms:
        assert without.rows_seen(arm, 0) == ladder.rows_seen(arm, 0)
        (ours,), (theirs,) = without.batches(arm, 0), ladder.batches(arm, 0)
        for name, values in ours.columns.items():
            assert values.tobytes() == theirs[name].tobytes(), (arm, name)
        more = set(theirs.columns) - set(ours.columns)
        if arm == "zero-step":
            assert not more
            assert "ladder" not in ladder.metadata(arm).extra
            continue
        assert more == set(LADDER_COLUMNS)
        assert all(np.isfinite(theirs[name]).all() for name in LADDER_COLUMNS)
        about = ladder.metadata(arm).extra["ladder"]
        assert about["methods"]["update"] == "jvp"
        assert about["divergence"] == "kl"
        assert about["least"] == 0.05
    # The token's own gradient does not depend on what was applied.
    none, ratio = (next(ladder.batches(arm, 0))["linear_delta_own"] for arm in ("none", "ratio"))
    np.testing.assert_array_equal(none, ratio)


def test_a_negative_number_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="`ladder_tokens` must be at least 0, got -1"):
        record(micro(), tmp_path / "run", ladder_tokens=-1)
