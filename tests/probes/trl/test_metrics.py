from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from deltad.losses.metrics import Metric
from deltad.probes import Rows
from deltad.probes.trl.metrics import LOGGED, StepSums, over_ranks
from deltad.steps import StepQuestion
from tests.probes.trl import laws
from tests.probes.trl.test_recording import rows


def moved(mass: float, *, after: float = 0.5) -> Rows:
    """Rows whose policy gives the first id this much before the step."""
    found = rows(3)
    for name, first in (("pre", mass), ("post", after)):
        listed = np.log(np.array([[first, 0.25]] * 2, np.float32))
        found[f"topk_{name}_logprobs"] = listed
        found[f"{name}_logprob"] = listed[:, 0]
    return found


def sums(*batches: Rows, rank: int = 0) -> StepSums:
    made = StepSums()
    for each in batches:
        made.add_rows("actual", each, StepQuestion(threshold=0.05), 9, seed=0, rank=rank)
    return made


def test_means_are_over_all_tokens() -> None:
    import pandas as pd

    named = sums(moved(0.5), moved(0.1)).named("deltad")
    frame = pd.DataFrame({name: list(each) for name, each in moved(0.1).items()})
    far = laws.divergence(frame)[0]
    assert far > 0.05
    assert named["deltad/d_pre_mean"] == pytest.approx(far / 2, rel=1e-6)
    assert named["deltad/d_post_mean"] == 0
    assert named["deltad/outside_rate"] == 0.5
    assert named["deltad/delta_d_mean"] == pytest.approx(-far / 2, rel=1e-6)
    assert {name.removeprefix("deltad/") for name in named} <= {
        *LOGGED,
        "d_pre_mean",
        "d_post_mean",
    }


def test_ranks_add_up_to_one_process_that_saw_everything() -> None:
    whole = sums(moved(0.5), moved(0.1), moved(0.3)).named("deltad")
    first = sums(moved(0.5), moved(0.1))
    first.add(pickle.loads(pickle.dumps(sums(moved(0.3), rank=1))))
    first.add(StepSums())  # a rank whose completions were all masked
    assert first.named("deltad") == pytest.approx(whole)
    assert over_ranks(first, 1) is first


def test_metrics_of_a_loss_are_divided_last() -> None:
    made = StepSums()
    for above, below in ((1.0, 4.0), (3.0, 4.0)):
        made.add_loss({"masked": Metric(torch.tensor(above), torch.tensor(below))})
    made.add_loss({"missing": Metric(torch.tensor(0.0), torch.tensor(0.0))})
    assert made.named("deltad") == {"deltad/loss/masked": 0.5}


def test_a_step_without_tokens_has_no_numbers() -> None:
    assert StepSums().named("deltad") == {}
