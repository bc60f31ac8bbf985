"""One whole page for all tests: making every section takes seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltad.analysis.report import report
from deltad.dumps import Dump, write_prompts
from tests.analysis.report.texts import HOSTILE, HOSTILE_ARM
from tests.dumps.factory import Columns, make_dump


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump whose every text tries to break out of its element."""

    def change(arm: str, seed: int, columns: Columns) -> None:
        columns["token"] = np.array([HOSTILE] * len(columns["token"]), dtype=object)

    path = tmp_path_factory.mktemp("hostile") / "run<b>"
    texts = {"model": HOSTILE, "tokenizer": HOSTILE, "behavior": {"engine": HOSTILE}}
    make_dump(
        path, arms=("none", HOSTILE_ARM), seeds=(0,), change=change, metadata=texts,
        ranks=1, parts=1,
    )  # fmt: skip
    rows = [{"group": 100, "prompt": HOSTILE, "prompt_ids": [], "answer": HOSTILE}]
    write_prompts(path, seed=0, rows=rows)
    return Dump.open(path)


@pytest.fixture(scope="session")
def html(hostile: Dump) -> str:
    """Its page, with every section."""
    made = report(hostile)
    assert made.failures == ()
    return made.html


@pytest.fixture(scope="session")
def html_file(html: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a file."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html, encoding="utf-8")
    return path
