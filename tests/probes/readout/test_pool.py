"""Threads that compute on one thread each, and leave everybody else's number alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from deltad.probes.readout.pool import single_threaded


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("three_threads")
def test_workers_have_one_thread_and_the_others_what_they_had() -> None:
    with single_threaded(2) as each:
        here = each(lambda _: (threading.get_ident(), torch.get_num_threads()), range(8))
        assert torch.get_num_threads() == 3
        assert of_a_new_thread() == 3
    assert {threads for _, threads in here} == {1}
    assert threading.get_ident() not in {ident for ident, _ in here}
    assert torch.get_num_threads() == of_a_new_thread() == 3


@pytest.mark.usefixtures("three_threads")
def test_one_worker_is_the_caller() -> None:
    with single_threaded(1) as each:
        assert each(lambda _: torch.get_num_threads(), range(2)) == [3, 3]


def test_several_workers_compute_at_once() -> None:
    meeting = threading.Barrier(2, timeout=20)
    with single_threaded(2) as each:
        each(lambda _: meeting.wait(), range(2))


def test_results_come_in_order_and_gradients_are_off() -> None:
    with single_threaded(3) as each:
        assert each(lambda item: item * 2, range(20)) == list(range(0, 40, 2))
        assert each(lambda _: torch.is_grad_enabled(), range(3)) == [False] * 3


def test_what_a_worker_raises_comes_up() -> None:
    def fail(item: int) -> int:
        if item == 3:
            raise ValueError("the fourth")
        return item

    with pytest.raises(ValueError, match="the fourth"), single_threaded(2) as each:
        each(fail, range(6))
    assert torch.is_grad_enabled()
