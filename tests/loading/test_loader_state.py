"""What the owner of a loader tells its workers: seen whole, whoever was interrupted."""

import os
import threading

import pytest

from ringmap.buffers.loader_state import LoaderState, _children
from tests.buffers.processes import Child, in_child


def test_it_is_told_again_after_an_interrupt():
    """Ctrl-C in mid-tell, or two threads at once, must not leave what is told unreadable for ever."""
    state = LoaderState()
    state.tell(1, 2)
    state._blocks[0][0] += 1  # being written, and nobody goes on
    state.tell(3, 4)
    turn, *numbers = state.told()
    assert turn % 2 == 0
    assert numbers[:2] == [3, 4]


def test_two_threads_tell():
    state, stop = LoaderState(), threading.Event()

    def tell(number):
        while not stop.is_set():
            state.tell(*[number] * 6)

    threads = [threading.Thread(target=tell, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            turn, *numbers = state.told()
            assert not turn or len(set(numbers)) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_an_owner_that_was_killed_in_the_middle_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("ringmap.buffers.loader_state._WAIT_S", 0.05)
    state = LoaderState()
    state.tell(1, 2)
    state._blocks[0][0] += 1
    assert not any(state.told())


def test_each_worker_counts_in_a_place_of_its_own(monkeypatch):
    """Two workers whose pids are 504 apart once shared a place: what one counted was lost."""
    state, pid = LoaderState(), os.getpid()

    def work(child, number):
        monkeypatch.setattr(os, "getpid", lambda: pid + 504 * number)
        state.count(1)
        child.say("counted")
        child.hear()
        state.count(5)

    children = [Child(lambda child, number=number: work(child, number)) for number in (1, 2)]
    for child in children:
        assert child.hear() == "counted"
    assert state.counted() == 2
    children[0].say("go on")
    children[0].result()
    assert state.counted() == 6
    children[1].say("go on")
    children[1].result()
    assert state.counted() == 10


@pytest.mark.slow
def test_threads_that_fork_at_once_give_each_child_a_place(monkeypatch):
    state, made = LoaderState(), []

    def fork():
        while True:
            try:
                made.append(in_child(lambda: (state.count(1), _children.own)[1]))
            except RuntimeError as error:
                if "filelock" in str(error):  # it refuses a fork in the middle of another one
                    continue
                raise
            return

    threads = [threading.Thread(target=fork) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 12
    assert state.counted() == 12
