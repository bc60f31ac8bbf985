"""Trainings in words, columns and plain objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from deltad.analysis.export import FORMAT, without_nan
from deltad.analysis.statistics import METHOD
from deltad.analysis.text import plain_grid
from deltad.analysis.trained_run import MEASURES
from deltad.analysis.words import count, number, p_value, with_interval

if TYPE_CHECKING:
    from deltad.analysis.trained_run import Setting
    from deltad.analysis.training import MaskRow, TrainingTable

_TOTALS: Final = (
    "ppo_kl", "masked_fraction", "clip_fraction", "outside_fraction", "disagreement_fraction",
    "increase_fraction", "delta_d", "length", "entropy",
)  # fmt: skip

TRAINING_COLUMNS: Final[dict[str, str]] = {
    "recipe": "what was trained on what",
    "precision": "of rollouts and training",
    "threshold": "δ of the masks",
    "divergence": "of the masks' region",
    "mask": "criterion in the loss",
    "seeds": "runs that were trained to their end",
    **{
        f"{name}_accuracy{end}": f"{meaning}{what}"
        for name, meaning in MEASURES.items()
        for end, what in (
            ("", ", mean over seeds"),
            ("_low", ": lower end of its 95 % interval"),
            ("_high", ": upper end of its 95 % interval"),
        )
    },
    "baseline": "the mask that it is compared with, of the same setting",
    "paired_seeds": "seeds that both have",
    **{
        f"{name}_{part}": meaning.format(name)
        for name in MEASURES
        for part, meaning in (
            ("lower", "paired seeds in which {} accuracy is below the baseline's"),
            ("tied", "paired seeds in which {} accuracy is the same"),
            ("higher", "paired seeds in which {} accuracy is above"),
            ("difference", "{} accuracy, mask − baseline, mean over the paired seeds"),
            ("difference_low", "lower end of its 95 % interval"),
            ("difference_high", "upper end of its 95 % interval"),
            ("sign_test_p", "two-sided; ties left out"),
            ("sign_test_p_holm", "corrected for the masks of the setting"),
        )
    },
    **{name: "over all batches, mean over seeds: see `deltad.curves`" for name in _TOTALS},
}
"""Columns of a training table, a row a setting and mask, and what they mean."""


def training_columns(table: TrainingTable) -> dict[str, list[Any]]:
    """The columns of `TRAINING_COLUMNS`."""
    rows = [_row(table, row) for row in table.rows]
    return {name: [row[name] for row in rows] for name in TRAINING_COLUMNS}


def training_object(table: TrainingTable) -> dict[str, Any]:
    """The JSON object: settings, rows as in the columns, and the runs."""
    found: dict[str, Any] = without_nan(
        {
            "format": FORMAT,
            "baseline": table.baseline,
            "bootstrap": {"method": METHOD, "seed": table.bootstrap_seed},
            "settings": [
                {
                    "name": table.name_of(setting),
                    "run": str(setting.folder),
                    "model": setting.model,
                    "options": dict(setting.options),
                }
                for setting in table.settings
            ],
            "rows": [{"setting": table.name_of(r.setting), **_row(table, r)} for r in table.rows],
            "runs": [
                {
                    "setting": table.name_of(run.setting),
                    "mask": run.mask,
                    "seed": run.seed,
                    "complete": run.complete,
                    **{f"{name}_accuracy": run.measure(name) for name in MEASURES},
                }
                for run in table.runs
            ],
        }
    )
    return found


def training_text(table: TrainingTable) -> RenderableType:
    """A grid a setting, a row a mask, and how it was computed.

    Parameters
    ----------
    table : TrainingTable
        Read.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    parts: list[RenderableType] = []
    for setting in table.settings:
        parts += [Text(_head(table, setting), style="bold"), _grid(table, setting)]
    parts.append(Text(_method(table)))
    if table.incomplete:
        names = ", ".join(f"{run.mask} seed {run.seed}" for run in table.incomplete[:6])
        more = len(table.incomplete) - 6
        names += f" and {more} more" if more > 0 else ""
        parts.append(Text(f"Not trained to their end, and left out: {names}."))
    return Group(*parts)


def _row(table: TrainingTable, row: MaskRow) -> dict[str, Any]:
    """One setting and mask."""
    options = row.setting.options
    found: dict[str, Any] = {
        **{name: options[name] for name in ("recipe", "precision", "threshold", "divergence")},
        "mask": row.mask,
        "seeds": len(row.runs),
        "baseline": row.baseline,
        "paired_seeds": row.paired().seeds,
        **{name: row.total(name) for name in _TOTALS},
    }
    for name in MEASURES:
        found[f"{name}_accuracy"] = row.measure(name)
        found[f"{name}_accuracy_low"], found[f"{name}_accuracy_high"] = row.ci95(name)
        paired = row.paired(name)
        for part in ("lower", "tied", "higher", "difference", "sign_test_p"):
            found[f"{name}_{part}"] = getattr(paired, part)
        low, high = paired.difference_ci95
        found[f"{name}_difference_low"], found[f"{name}_difference_high"] = low, high
        corrected = table.corrected(row.setting, name)
        found[f"{name}_sign_test_p_holm"] = corrected.get(row.mask, float("nan"))
    return found


def _head(table: TrainingTable, setting: Setting) -> str:
    """A setting in one line."""
    options = setting.options
    steps = f"{options['batches']} × {options['minibatches']} optimizer steps"
    sequences = options["prompts"] * options["responses"]
    optimizer = f"{options['optimizer']}, lr {options['lr']:g}"
    tried = f"accuracy: avg@{options['eval_samples']} of {options['eval_prompts']} prompts"
    return f"{table.name_of(setting)} · {steps} of {sequences} responses · {optimizer} · {tried}"


def _grid(table: TrainingTable, setting: Setting) -> RenderableType:
    """A row a mask."""
    grid = plain_grid(
        "mask",
        "seeds",
        "final accuracy",
        "best",
        "mean",
        f"final − {table.baseline}",
        "lower / tied\n/ higher",
        "p, sign\ntest",
        "\nHolm",
        "tokens\nmasked",
        "\noutside",
        "PPO-KL\n(nats)",
    )
    corrected = table.corrected(setting)
    for row in table.rows:
        if row.setting.folder != setting.folder:
            continue
        paired = row.paired()
        others = ("", "", "", "")
        if row.mask != table.baseline:
            others = (
                with_interval(paired.difference, paired.difference_ci95, signed=True),
                f"{paired.lower} / {paired.tied} / {paired.higher}",
                p_value(paired.sign_test_p),
                p_value(corrected[row.mask]),
            )
        grid.add_row(
            row.mask,
            str(len(row.runs)),
            with_interval(row.measure("final"), row.ci95("final")),
            number(row.measure("best")),
            number(row.measure("mean")),
            *others,
            *(number(row.total(n)) for n in ("masked_fraction", "outside_fraction", "ppo_kl")),
        )
    return grid


def _method(table: TrainingTable) -> str:
    """How the numbers were computed."""
    seeds = {len(row.runs) for row in table.rows}
    some = " to ".join(str(each) for each in sorted({min(seeds), max(seeds)})) if seeds else "0"
    last = int(some.rpartition(" ")[2])
    return (
        f"{some} {count(last, 'seed').partition(' ')[2]} a mask; intervals: 95 %, bootstrap over "
        f"seeds ({METHOD}, random seed {table.bootstrap_seed}). Runs of one seed begin with the "
        f"same weights and the same prompts, so masks are paired with {table.baseline} by seed.\n"
        "best: the highest of several noisy evaluations, so it lies above what the policy can do; "
        "mean: of all evaluations after the first. masked, outside, PPO-KL: over all batches."
    )
