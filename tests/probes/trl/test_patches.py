from __future__ import annotations

from typing import Any

from deltad.probes.trl.patches import Patches, undecorated


class Plain:
    def value(self, add: int = 0) -> int:
        """A number."""
        return 1 + add


def twice(original: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * int(original(*args, **kwargs))


def test_the_class_and_other_objects_stay_as_they_are() -> None:
    one, other = Plain(), Plain()
    Patches().around(one, "value", twice)
    assert (one.value(add=2), other.value(2), Plain().value()) == (6, 3, 1)
    assert one.value.__doc__ == "A number."


def test_restoring_leaves_nothing() -> None:
    one = Plain()
    patches = Patches()
    original = patches.around(one, "value", twice)
    patches.around(one, "value", twice)
    assert one.value() == 4
    patches.restore()
    assert vars(one) == {}
    assert one.value() == original() == 1


def test_what_somebody_else_put_there_comes_back() -> None:
    one: Any = Plain()
    one.value = theirs = lambda: 7
    patches = Patches()
    patches.around(one, "value", twice)
    assert one.value() == 14
    patches.restore()
    assert one.value is theirs


def test_what_was_wrapped_once_more_is_left_alone() -> None:
    one: Any = Plain()
    patches = Patches()
    patches.around(one, "value", twice)
    ours = one.value

    def theirs() -> int:
        return int(ours()) + 1

    one.value = theirs
    patches.restore()
    assert one.value is theirs
    assert one.value() == 3


def test_decorations_of_a_method_are_taken_off() -> None:
    import functools

    seen = []

    def profiled(function: Any) -> Any:
        @functools.wraps(function)
        def around(self: Any, *args: Any) -> Any:
            seen.append(function.__name__)
            return function(self, *args)

        return around

    class Decorated:
        @profiled
        def value(self, add: int) -> int:
            return 1 + add

    one = Decorated()
    assert undecorated(one.value)(4) == 5
    assert seen == []
    assert one.value(4) == 5
    assert seen == ["value"]
    assert undecorated(len)([1, 2]) == 2
