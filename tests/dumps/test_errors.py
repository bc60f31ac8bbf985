"""An error is one sentence on one line, wherever it travels."""

from __future__ import annotations

import pickle

from deltad.dumps import DumpError, Problem


def test_a_problem_says_where_and_what() -> None:
    assert str(Problem("RUN/f", "must be x, found y")) == "RUN/f: must be x, found y"
    assert str(Problem("RUN/f", "is missing", column="step")) == "RUN/f, column `step`: is missing"
    assert str(Problem("f", "must be x", row=3, column="step", count=8)) == (
        "f, row 3, column `step`: must be x (and 7 more such rows)"
    )


def test_an_error_survives_the_way_from_a_worker_process() -> None:
    error = DumpError("RUN/f", "must be x", row=0, column="step", kind="range")
    back = pickle.loads(pickle.dumps(error))
    assert isinstance(back, DumpError)
    assert back.problem == error.problem
    assert str(back) == str(error)


def test_odd_names_stay_on_one_line_and_print_anywhere() -> None:
    text = str(DumpError("RUN/a\nb\x1b[31m\udcff", "says\r\n  ΔD"))
    assert text == "RUN/a b\\x1b[31m\\udcff: says ΔD"
    text.encode()
