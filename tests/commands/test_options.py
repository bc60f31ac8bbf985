"""Options as rows: what their values are read as, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltad.cli import COMMANDS
from deltad.commands.options import Call, Option, command, names, numbers, switch
from deltad.commands.record import Recipes
from deltad.commands.terminal import OptionError
from deltad.probes.recipes import RECIPES


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (str, "", ""), (int, "-2", -2), (float, "1e-3", 1e-3), (float, "inf", float("inf")),
        (Path, "a/b", Path("a/b")), (("kl", "tv"), "tv", "tv"), (names, " a, b", ("a", "b")),
        (names, "", ()), (names, None, ()), (numbers, "1,.5", (1.0, 0.5)), (numbers, None, ()),
        (int, None, None), (bool, False, False), ([int], ["1", "2"], [1, 2]), ([int], None, []),
    ],
)  # fmt: skip
def test_a_text_is_read_as_its_kind(kind: Any, given: Any, value: Any) -> None:
    assert repr(Option("--some-thing", kind, "").read(given)) == repr(value)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (int, "1.5", "an integer, got '1.5'"), (int, "0", "at least 1, got '0'"),
        (float, "nan", "at least 1, got 'nan'"), (float, "", "a number, got ''"),
        (("kl", "tv"), "js", "one of kl, tv, got 'js'"), ([int], ["1", "x"], "an integer, got 'x'"),
        (names, "a,,b", "names with single commas between them, got 'a,,b'"),
        (numbers, "1,x", "numbers with single commas between them, got '1,x'"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_in_one_form(kind: Any, given: Any, words: str) -> None:
    option = Option("-s --some-thing", kind, "", min=1 if kind in (int, float) else None)
    with pytest.raises(OptionError, match=f"^`--some-thing` must be {words}$"):
        option.read(given)


def test_an_option_may_need_another_or_its_value() -> None:
    found: list[Call] = []
    made = command(
        Option("--on", ("local", "ray"), ""), Option("--address", str, "", needs="--on ray"),
        switch("--power", ""), Option("--goal", float, "", needs="--power"),
    )(found.append)  # fmt: skip
    given = {"on": "local", "address": None, "power": False, "goal": None}
    made.run(given)
    made.run({**given, "on": "ray", "address": "auto", "power": True, "goal": "0"})
    assert (found[1].address, found[1].goal) == ("auto", 0.0)
    for option, value, other in (("address", "auto", "--on ray"), ("goal", "0", "--power")):
        with pytest.raises(OptionError, match=f"`--{option}` goes with `{other}`"):
            made.run({**given, option: value})


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_hides_what_a_call_is_asked(name: str) -> None:
    found = COMMANDS[name]
    made = [found.make(recipe) for recipe in RECIPES] if isinstance(found, Recipes) else [found]
    for each in made:
        named = [option.name for option in each.options]
        assert len({*named}) == len(named)
        assert not {*named} & {*dir(Call), "form", "stack"}
