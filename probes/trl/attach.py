"""Attach the update probe, and a mask as the loss, to a `GRPOTrainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from deltad.dumps.writer import Existing
from deltad.masks import DEFAULT_THRESHOLD, Rule, rule
from deltad.probes.errors import ProbeError
from deltad.probes.rows import Rows
from deltad.steps import StepQuestion

from . import checks
from .attached import Attached
from .checks import Behavior
from .loss import MaskedLoss

TOP_K: Final = 20
"""K of the paper's masks and dumps."""


def attach(
    trainer: Any,
    run: str | Path | Callable[[str, Rows], None] | None = None,
    *,
    top_k: int = TOP_K,
    behavior: Behavior = "auto",
    criterion: str | Rule | None = None,
    threshold: float = DEFAULT_THRESHOLD,
    divergence: str | None = None,
    ratio_cap: float | None = None,
    parameters: Mapping[str, float] | None = None,
    metrics: bool = True,
    prefix: str = "deltad",
    seed: int | None = None,
    existing: Existing = "refuse",
    **probe_options: Any,
) -> Attached:
    """Record what each optimizer step of a TRL trainer does to the policy, or train with a mask.

    The trainer is used as it is: no subclass, no method of a class is touched. What it logs and
    the weights it ends with are bit for bit those without the probe, unless a `criterion` is
    given.

    Parameters
    ----------
    trainer : trl.GRPOTrainer
        Before `train()`.
    run : str, Path or callable, optional
        The dump's folder; or what takes the arm and its columns after each step (a `Monitor`,
        a function). None records nothing.
    top_k : int
        K.
    behavior : {"auto", "engine", "policy"}
        Whose log-probs μ are: "engine" asks vLLM for its top-K; "policy" reads the trained model
        when it generated, in the shapes in which it will be trained on. "auto" is "engine" with
        vLLM, else "policy".
    criterion : str or Rule, optional
        Train with this mask or soft weight (a name of `deltad.masks.RULES`, `FILE.py:NAME`, or a
        `Rule`) in the place of TRL's clip ("none" for neither); None leaves the loss alone.
    threshold, divergence
        δ and the region's divergence: of the mask, and of what the metrics count.
    ratio_cap : float, optional
        Upper bound of the importance weight of a criterion's loss, with stop-gradient.
    parameters : mapping of str to float, optional
        Of a soft weight.
    metrics : bool
        Add numbers of each step to what the trainer logs.
    prefix : str
        Begins their names.
    seed : int, optional
        Of the dump; by default `trainer.args.seed`.
    existing : {"refuse", "replace", "append"}
        What to do where the dump holds this seed already and training begins anew; what resumes
        from a checkpoint goes on in the dump.
    **probe_options
        For `UpdateProbe`: `pre`, `ladder`, `share_prompts`, `entropy`, `workers`, `tail`,
        `token_chunk`, `vocab_chunk`, `head`, `scale`, `softcap`, `scaler`.

    Returns
    -------
    Attached
        Until `detach()`, or the end of a `with` block. Without either, files are complete when
        `train()` returns.

    Raises
    ------
    ProbeError
        A trainer or a setting that is not supported; one sentence says why.
    CriterionError, ValueError
        A criterion that does not exist or options that do not fit it.

    Notes
    -----
    A step that only trains with a mask (`run=None, metrics=False`) makes no forward of the
    probe's but the one that reads μ; else *post* takes one more a micro-batch.
    """
    checks.check_trainer(trainer)
    for name in ("keep", "sequences", "every"):
        if name in probe_options:
            raise ProbeError(
                f"`{name}` leaves out tokens that the trainer's numbers are counted from: it is "
                "for an `UpdateProbe` around a loop of one's own"
            )
    return Attached(
        trainer,
        run,
        top_k=top_k,
        behavior=behavior,
        loss=None
        if criterion is None
        else MaskedLoss(criterion, threshold, divergence, ratio_cap, dict(parameters or {})),
        question=_question(criterion, threshold, divergence),
        metrics=metrics,
        prefix=prefix,
        seed=trainer.args.seed if seed is None else seed,
        existing=existing,
        probe_options=probe_options,
    )


def _question(
    criterion: str | Rule | None, threshold: float, divergence: str | None
) -> StepQuestion:
    """What the metrics count: the region, and the criterion against the ratio's."""
    found = rule("none" if criterion is None else criterion)
    family = divergence or found.family or "kl"
    whole = f"full_{family}_pre" in found.columns  # which the trainer's rows do not have
    watched = not whole and found.name not in ("none", "ratio")
    return StepQuestion(threshold, family, found if watched else "", "ratio")
