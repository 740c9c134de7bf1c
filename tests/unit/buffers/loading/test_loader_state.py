"""What the owner of a loader tells its workers: seen whole, whoever was interrupted."""

import threading

from ringmap.buffers.workers import LoaderState


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
    monkeypatch.setattr("ringmap.buffers.workers._WAIT_S", 0.05)
    state = LoaderState()
    state.tell(1, 2)
    state._blocks[0][0] += 1
    assert not any(state.told())
