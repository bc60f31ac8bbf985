"""Faults that can be put into a clean dump on purpose, each with the cause that the doctor owes.

`INJECTIONS` is data: a fault's name, the cause, strengths that occur in practice. `CONTROLS`
are changes that leave a dump sound, at which the doctor must keep quiet.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from . import broken_policies as policies
from . import broken_precision as precision
from . import broken_sampling as sampling
from . import broken_values as fills
from . import sound_changes as controls
from .injection import Injection
from .slots import NothingToBreakError

__all__ = ["CONTROLS", "INJECTIONS", "Injection", "NothingToBreakError"]

_SHARES: Final = (0.005, 0.05, 0.5, 1.0)
_NAN, _INFINITE = float("nan"), float("-inf")

_FAULTS: Final = (
    Injection(
        "temperature-behavior",
        "temperature",
        (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0),
        "τ of the policy relative to μ",
        sampling.behavior_temperature,
        estimate=True,
    ),
    Injection(
        "temperature-policy",
        "temperature",
        (0.36, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0),
        "τ of the policy relative to μ",
        sampling.policy_temperature,
        estimate=True,
    ),
    Injection(
        "divided-logprobs",
        "temperature",
        (0.5, 0.7, 1.5),
        "τ of the policy relative to μ",
        sampling.divided_logprobs,
        estimate=True,
    ),
    Injection("top-p", "truncation", (0.7, 0.8, 0.9, 0.95, 0.99), "p", sampling.top_p),
    Injection("top-p-absent", "truncation", (0.8, 0.9, 0.95), "p", sampling.top_p_absent),
    Injection("top-p-raw", "truncation", (0.7, 0.8, 0.9), "p", sampling.top_p_raw),
    Injection("top-k", "truncation", (2.0, 3.0, 5.0, 10.0, 20.0), "k", sampling.top_k),
    Injection("min-p", "truncation", (0.02, 0.05, 0.1, 0.2), "share", sampling.min_p),
    Injection("policy-on-support", "truncation", (1.0,), "", sampling.policy_on_support),
    Injection("shift", "shift", (1.0, -1.0, 2.0, -2.0), "d tokens", policies.shift, estimate=True),
    Injection("rolled", "shift", (1.0, -1.0, 2.0), "d tokens", policies.rolled, estimate=True),
    Injection("shift-start", "shift", (-1.0, 1.0, -2.0), "d tokens", policies.shift_start),
    Injection(
        "zero-scalar", "sentinel", _SHARES, "share of rows", fills.fill_scalar(0.0, "behavior")
    ),
    Injection("zero-row", "sentinel", _SHARES, "share of rows", fills.fill_row(0.0, "behavior")),
    Injection(
        "one-scalar", "sentinel", _SHARES, "share of rows", fills.fill_scalar(1.0, "behavior")
    ),
    Injection(
        "zero-policy", "sentinel", _SHARES, "share of rows", fills.fill_scalar(0.0, "pre", "post")
    ),
    Injection(
        "minus-100-scalar",
        "sentinel",
        _SHARES,
        "share of rows",
        fills.fill_scalar(-100.0, "behavior"),
    ),
    Injection(
        "minus-9999-row", "sentinel", _SHARES, "share of rows", fills.fill_row(-9999.0, "behavior")
    ),
    Injection("minus-9999-rest", "sentinel", _SHARES, "share of rows", fills.fill_rest(-9999.0)),
    Injection(
        "minus-9999-unlikely",
        "sentinel",
        (0.05, 0.3, 0.6),
        "share of entries",
        fills.fill_unlikely(-9999.0),
    ),
    Injection("zero-rest", "sentinel", _SHARES, "share of rows", fills.fill_rest(0.0)),
    Injection(
        "minus-1e30-scalar",
        "sentinel",
        _SHARES,
        "share of rows",
        fills.fill_scalar(-1e30, "behavior"),
    ),
    Injection("nan-row", "sentinel", _SHARES, "share of rows", fills.fill_row(_NAN, "behavior")),
    Injection(
        "minus-inf-row", "sentinel", _SHARES, "share of rows", fills.fill_row(_INFINITE, "behavior")
    ),
    Injection(
        "zero-policy-row", "sentinel", _SHARES, "share of rows", fills.fill_row(0.0, "pre", "post")
    ),
    Injection(
        "minus-inf-policy",
        "sentinel",
        _SHARES,
        "share of rows",
        fills.fill_row(_INFINITE, "pre", "post"),
    ),
    Injection("recomputed", "recomputed", (1.0,), "", policies.recomputed, thin=False),
    Injection("recomputed-scalar", "recomputed", (1.0,), "", policies.recomputed_scalar),
    Injection("stale", "stale", (2.0, 4.0, 8.0), "c at the last step", policies.stale),
    Injection("other-model", "other-model", (1.5, 2.5), "σ in nats", policies.other_model),
    Injection("other-context", "other-model", (1.0,), "", policies.other_context),
    Injection("shuffled", "other-model", (1.0,), "", policies.shuffled),
    Injection("weaker-model", "other-model", (0.5, 0.8), "weight", policies.weaker_model),
    Injection(
        "padded-vocabulary",
        "vocabulary",
        (0.01, 0.1, 0.5),
        "share of rows",
        fills.padded_vocabulary,
    ),
    Injection("permuted-ids", "vocabulary", (0.3, 0.6, 1.0), "share of ids", policies.permuted_ids),
    Injection("offset-ids", "vocabulary", (1.0, 2.0), "ids", policies.offset_ids),
    Injection("duplicated", "topk-convention", (0.05, 1.0), "share of rows", fills.duplicated),
    Injection("sampled-first", "topk-convention", (1.0,), "share of rows", fills.sampled_first),
    Injection("replaced-last", "topk-convention", (1.0,), "", fills.replaced_last, least=10),
    Injection("appended", "topk-convention", (1.0,), "", fills.appended),
    Injection("left-out", "topk-convention", (1.0,), "", fills.left_out),
    Injection("out-of-order", "topk-convention", (0.05, 1.0), "share of rows", fills.out_of_order),
    Injection("ascending", "topk-convention", (1.0,), "", fills.ascending),
    Injection(
        "engine-noise",
        "precision",
        (0.04, 0.1, 0.25),
        "σ in nats",
        precision.engine_noise,
        thin=False,
    ),
    Injection("behavior-noise", "precision", (0.2, 0.5), "σ in nats", precision.behavior_noise),
    Injection(
        "outliers", "precision", (0.02, 0.05), "share of rows", precision.outliers, thin=False
    ),
    Injection(
        "drift-by-position",
        "precision",
        (0.3, 0.6),
        "σ in nats at the end",
        precision.drift_by_position,
        thin=False,
    ),
    Injection(
        "rounded-logits", "precision", (15.0, 30.0), "size of logits", precision.rounded_logits
    ),
    Injection(
        "rounded-logprobs",
        "precision",
        (1.0, 2.0),
        "1: bfloat16, 2: float16",
        precision.rounded_logprobs,
    ),
    Injection("zero-advantage", "advantage", (0.0,), "", fills.constant_advantage),
    Injection("constant-advantage", "advantage", (1.0, -0.5), "Â", fills.constant_advantage),
    Injection("raw-rewards", "advantage", (1.0, 10.0), "reward", fills.raw_rewards),
    Injection("unsigned-advantage", "advantage", (1.0,), "", fills.unsigned_advantage),
    Injection(
        "nan-advantage", "advantage", (0.05, 0.3, 1.0), "share of groups", fills.nan_advantage
    ),
    Injection(
        "everything-masked",
        "concentration",
        (1.0,),
        "",
        fills.everything_masked,
        also=("advantage",),
        decides=False,
    ),
    Injection(
        "concentrated",
        "concentration",
        (0.8, 1.0),
        "share of the tokens' rows",
        policies.concentrated,
        thin=False,
    ),
)

_SOUND: Final = (
    Injection("untouched", None, (0.0,), "", controls.untouched),
    Injection("some-groups", None, (0.5, 0.8), "share of groups", controls.some_groups),
    Injection("some-steps", None, (0.5,), "share of steps", controls.some_steps),
    Injection("thinned", None, (0.02, 0.05, 0.15), "D above which rows stay", controls.thinned),
    Injection("without-vectors", None, (0.3, 0.8), "share of rows", controls.without_vectors),
    Injection("without-optional", None, (0.0,), "", controls.without_optional),
    Injection("without-metadata", None, (0.0,), "", controls.without_metadata),
    Injection("declared-replacing", None, (0.0,), "", controls.declared_replacing),
    Injection("fewer-listed", None, (0.3,), "share of rows", controls.fewer_listed),
    Injection("fp32-engine", None, (5e-6, 1e-4), "σ in nats", precision.engine_noise, thin=False),
    Injection("bf16-engine", None, (0.02, 0.03), "σ in nats", controls.bf16_engine, thin=False),
    Injection("declared-rounding", None, (20.0,), "size of logits", controls.declared_rounding),
    Injection("some-zero-advantages", None, (0.2,), "share of groups", controls.some_zero),
    Injection("other-advantages", None, (0.1, 5.0), "factor", controls.scaled_advantages),
)


def _named(every: tuple[Injection, ...]) -> Mapping[str, Injection]:
    """By name, in order."""
    return MappingProxyType({each.name: each for each in every})


INJECTIONS: Final[Mapping[str, Injection]] = _named(_FAULTS)
"""Every fault by name."""

CONTROLS: Final[Mapping[str, Injection]] = _named(_SOUND)
"""Changes by name that leave a dump sound."""
