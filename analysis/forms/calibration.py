"""A calibration in words, columns and plain objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from deltad.analysis.text import plain_grid as grid
from deltad.analysis.words import DASH, count, number, region, unit

from .pairs import (
    accuracy_columns,
    accuracy_values,
    base_text,
    bootstrap_text,
    json_object,
    share_text,
    stack,
)

if TYPE_CHECKING:
    from deltad.analysis.calibration import Bin, Calibrated, Calibration

_OF_ALL: Final[dict[str, str]] = {
    "direction": "the criterion whose direction predicts, or `linear_delta`",
    "tokens": "tokens outside, all seeds",
    "spearman": "rank correlation of prediction and ΔD, pooled over seeds",
    "spearman_seed_mean": "the same within every seed, mean over seeds",
    "spearman_seed_mean_low": "lower end of its 95 % interval",
    "spearman_seed_mean_high": "upper end of its 95 % interval",
    **accuracy_columns("sign", "tokens outside"),
    "slope": "Σ p ΔD / Σ p², least squares through the origin; p without its step size",
    "slope_low": "lower end of its 95 % interval",
    "slope_high": "upper end of its 95 % interval",
    "r_squared": "1 − Σ (ΔD − slope · p)² / Σ (ΔD − mean)²",
}

CALIBRATION_COLUMNS: Final[dict[str, str]] = {
    **_OF_ALL,
    "bin": "tokens by quantile of the prediction: the bin in words",
    "low": "lower end of the bin, not in it but in the first",
    "high": "upper end of the bin, in it",
    "bin_tokens": "tokens in the bin, all seeds",
    "prediction": "mean prediction in the bin",
    "delta_d": "mean ΔD in the bin: nats for KL, a probability for TV",
    "delta_d_low": "lower end of its 95 % interval",
    "delta_d_high": "upper end of its 95 % interval",
    "increase": "tokens in the bin with ΔD > 0",
    "undetermined": "tokens in the bin whose ΔD is below the bound on its error",
    "increase_rate": "increase / (bin_tokens − undetermined)",
    "increase_rate_low": "lower end of its 95 % interval",
    "increase_rate_high": "upper end of its 95 % interval",
}
"""Columns of a calibration, a row a direction and bin, and what they mean; those before `bin`
are of the direction and the same in all its bins."""


def calibration_columns(calibration: Calibration) -> dict[str, list[Any]]:
    """The columns of `CALIBRATION_COLUMNS`."""
    rows = [
        {**_of_all(each), **_of_bin(part)} for each in calibration.predictors for part in each.bins
    ]
    return stack(tuple(CALIBRATION_COLUMNS), rows)


def calibration_object(calibration: Calibration) -> dict[str, Any]:
    """The JSON object: every direction with its bins."""
    base = calibration.base
    found = json_object(
        calibration.question,
        calibration.bootstrap_seed,
        len(calibration.predictors[0].delta_d),
        base={
            "outside": {
                "tokens": base.tokens,
                "undetermined": base.undetermined,
                "increase_rate": base.increase_rate,
                "constant_guess": base.constant_guess,
            }
        },
        directions=[
            {
                **_of_all(each),
                "formula": each.predictor.formula,
                "bins": [_of_bin(part) for part in each.bins],
            }
            for each in calibration.predictors
        ],
        refused=calibration.refused,
    )
    del found["baseline"]  # no pair is compared
    return found


def calibration_text(calibration: Calibration) -> RenderableType:
    """A row a direction, then the bins of each.

    Parameters
    ----------
    calibration : Calibration
        Computed.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    question, seeds = calibration.question, len(calibration.predictors[0].delta_d)
    summary = grid(
        "direction",
        "Spearman with ΔD\npooled",
        "\nmean over seeds",
        "sign of ΔD foretold",
        "slope of ΔD",
        "R²",
    )
    for each in calibration.predictors:
        mean, interval = each.spearman_seed_mean
        summary.add_row(
            each.predictor.name,
            number(each.spearman, signed=True),
            _signed(mean, interval),
            share_text(each.signs),
            _signed(each.slope.rate, each.slope.ci95),
            number(each.r_squared, signed=True),
        )
    parts: list[RenderableType] = [
        Text(
            f"predicted first-order change against ΔD · outside: {region(question)} · "
            f"{question.protocol}",
            style="bold",
        ),
        Text(
            f"{count(seeds, 'seed')}, {count(calibration.base.tokens, 'token')} outside: "
            f"{base_text(calibration.base)}"
        ),
        summary,
    ]
    for each in calibration.predictors:
        if each.bins:
            parts += [
                Text(f"{each.predictor.name}: {each.predictor.formula}"),
                _bins(each, unit(question)),
            ]
        if each.unknown:
            parts.append(Text(f"{count(each.unknown, 'token')} without a prediction, in no bin"))
    parts.append(Text(bootstrap_text(calibration.bootstrap_seed)))
    parts.append(
        Text(
            "The prediction of a criterion is Â · r · its direction: right up to the step size, "
            "so its slope has no unit to compare; that of `linear_delta` should be 1."
        )
    )
    parts += [Text(f"{name} is left out: {why}") for name, why in calibration.refused.items()]
    return Group(*parts)


def _of_all(each: Calibrated) -> dict[str, Any]:
    """What a direction's row says of all its tokens."""
    mean, (low, high) = each.spearman_seed_mean
    values = {
        "direction": each.predictor.name,
        "tokens": sum(map(len, each.delta_d)),
        "spearman": each.spearman,
        "spearman_seed_mean": mean,
        "spearman_seed_mean_low": low,
        "spearman_seed_mean_high": high,
        **accuracy_values("sign", each.signs),
        "slope": each.slope.rate,
        "slope_low": each.slope.ci95[0],
        "slope_high": each.slope.ci95[1],
        "r_squared": each.r_squared,
    }
    return {name: values[name] for name in _OF_ALL}


def _of_bin(part: Bin) -> dict[str, Any]:
    """What it says of one bin."""
    return {
        "bin": part.label,
        "low": part.low,
        "high": part.high,
        "bin_tokens": int(part.delta_d.whole),
        "prediction": part.prediction,
        "delta_d": part.delta_d.rate,
        "delta_d_low": part.delta_d.ci95[0],
        "delta_d_high": part.delta_d.ci95[1],
        "increase": int(part.increase.part),
        "undetermined": int(part.delta_d.whole - part.increase.whole),
        "increase_rate": part.increase.rate,
        "increase_rate_low": part.increase.ci95[0],
        "increase_rate_high": part.increase.ci95[1],
    }


def _bins(each: Calibrated, nats: str) -> RenderableType:
    """A row a bin."""
    found = grid(
        "prediction", "tokens", "mean\nprediction", f"mean ΔD{',' if nats else ''}{nats}",
        "share with ΔD > 0",
    )  # fmt: skip
    for part in each.bins:
        found.add_row(
            part.label,
            f"{part.delta_d.whole:.0f}",
            f"{part.prediction:+.3g}".replace("-", "−"),
            _signed(part.delta_d.rate, part.delta_d.ci95),
            share_text(part.increase),
        )
    return found


def _signed(value: float, interval: tuple[float, float]) -> str:
    """A number that is no share, with its interval, to three significant digits."""
    numbers = [value, *interval]
    texts = [
        DASH if each != each else f"{each:+.3g}".replace("-", "−")  # NaN is not itself
        for each in numbers
    ]
    return texts[0] if texts[1] == DASH else f"{texts[0]} [{texts[1]}, {texts[2]}]"
