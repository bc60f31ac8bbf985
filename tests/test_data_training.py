"""The committed trainings: trained to their end, and as many seeds as their page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltad.analysis import TrainingTable, training_table
from deltad.curves import read_options

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "data_training"
TRAININGS = sorted(path.parent.parent for path in FOLDER.glob("**/_training/run.json"))
README = (FOLDER / "README.md").read_text()
LARGEST = 3_000_000


@pytest.fixture(scope="module", params=TRAININGS, ids=lambda path: path.name)
def table(request: pytest.FixtureRequest) -> TrainingTable:
    return training_table([request.param])


def test_every_training_has_its_line_and_they_are_small() -> None:
    for path in TRAININGS:
        name = path.relative_to(FOLDER).as_posix()
        recipe = read_options(path)["options"]["recipe"]
        assert f"| `{name}` | `deltad train {recipe} " in README
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < LARGEST


def test_every_run_was_trained_to_its_end(table: TrainingTable) -> None:
    assert not table.incomplete


def test_eight_seeds_a_mask_or_as_many_as_the_readme_says(table: TrainingTable) -> None:
    seeds = {len(row.runs) for row in table.rows}
    assert len(seeds) == 1
    folder = table.settings[0].folder.relative_to(FOLDER).as_posix()
    line = next(line for line in README.splitlines() if f"| `{folder}` |" in line)
    assert f"--seeds {seeds.pop()}" in line
