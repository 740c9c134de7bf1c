"""Weights and the pace under signal handlers, threads and forks of one process: refused or in turn, never stuck, never
mixed."""

import os
import signal
import threading

import numpy as np
import pytest

from ringmap import Pace, ReplayBuffer, Weights
from ringmap.errors import RoleError
from ringmap.fleet import weights as module
from ringmap.storage.disk.calls import Turn
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from tests.unit.fleet.models import filled, net, values

NUMBERS = {"samples_per_insert": 4, "min_steps": 10, "slack": 10.0}


class Struck(Disk):
    """Sends this process a signal in the middle of each call that is named."""

    def __init__(self, *names):
        super().__init__()
        self.struck = names

    def before(self, name, *paths):
        super().before(name, *paths)
        if name in self.struck:
            signal.raise_signal(signal.SIGUSR1)


class StruckSystem(System):
    """Sends this process a signal whenever it opens a file."""

    def open_file(self, path, flags, **options):
        signal.raise_signal(signal.SIGUSR1)
        return super().open_file(path, flags, **options)


@pytest.fixture
def handled():
    """Return what sets a handler, and the list of what the handler was told."""
    told = []

    def handle(call):
        def handler(*_):
            try:
                told.append(call())
            except RoleError as error:
                told.append(error)

        signal.signal(signal.SIGUSR1, handler)
        return told

    before = signal.getsignal(signal.SIGUSR1)
    yield handle
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_publishes_in_the_middle_of_a_publish_is_refused(tmp_path, handled):
    told = handled(lambda: Weights(tmp_path).publish(filled(9), 9))
    Weights(tmp_path, disk=Struck("lock", "write")).publish(filled(1), 1)
    assert told
    assert all(isinstance(error, RoleError) and "Weights.publish" in str(error) for error in told)
    model = net(8)
    weights = Weights(tmp_path)
    weights.load_into(model)
    assert (values(model), weights.step) == ({1}, 1)


def test_a_handler_that_loads_in_the_middle_of_a_load_is_refused(tmp_path, handled):
    Weights(tmp_path).publish(filled(1), 1)
    model = net(8)
    told = handled(lambda: Weights(tmp_path).load_into(model))
    assert Weights(tmp_path, disk=Disk(StruckSystem())).load_into(model)
    assert [str(error).split(":")[0] for error in told] == ["Weights.load_into"]
    assert values(model) == {1}


def load_and_publish(path):
    """Load into one model by two threads while another publishes; return whether a set was mixed."""
    Weights(path).publish(filled(0, 64), 0)
    model, mixed, ends = net(64), [], threading.Event()

    def publish():
        for step in range(1, 150):
            Weights(path).publish(filled(step, 64), step)
        ends.set()

    def look():
        if len(values(model)) != 1:
            mixed.append(values(model))

    def load():
        weights = Weights(path)
        while not ends.is_set():
            weights.load_into(model)
            module._turn.take("a look", look)

    threads = [threading.Thread(target=call) for call in (publish, load, load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return mixed


@pytest.mark.slow
def test_threads_that_load_into_one_model_take_turns(tmp_path):
    assert load_and_publish(tmp_path) == []


def test_a_child_publishes_while_a_thread_of_its_parent_does(tmp_path, handled):
    inside, goes_on = threading.Event(), threading.Event()

    class Waits(Disk):
        def before(self, name, *paths):
            super().before(name, *paths)
            if name == "write":
                inside.set()
                goes_on.wait()

    thread = threading.Thread(target=Weights(tmp_path / "one", disk=Waits()).publish, args=(filled(1), 1))
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)
        Weights(tmp_path / "other").publish(filled(2), 2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    goes_on.set()
    thread.join()


@pytest.fixture
def ring(tmp_path):
    with ReplayBuffer(1000, path=tmp_path / "ring") as made:
        made.write_episode({"obs": np.zeros((100, 2), np.float32)})
        yield made


def test_a_handler_in_the_middle_of_a_paced_call_is_refused(tmp_path, ring, handled):
    with Pace(tmp_path, **NUMBERS, disk=Struck("lock")) as pace, Pace(tmp_path, **NUMBERS) as other:
        told = handled(lambda: ring.sample(8, pace=other))
        with pace.insert(10):
            assert told
            assert {type(one) for one in told} == {RoleError}
            assert pace.drawn == 0
            told.clear()
            signal.raise_signal(signal.SIGUSR1)  # in the code of the caller
        signal.raise_signal(signal.SIGUSR1)  # between two calls
        assert len(told) == 2
        assert pace.drawn == 16


@pytest.mark.parametrize("call", [lambda pace: pace.draw(8), Pace.close])
def test_a_handler_in_the_middle_of_a_draw_that_waits_is_refused(tmp_path, ring, handled, call):
    pace = Pace(tmp_path, **NUMBERS)
    told = handled(lambda: call(pace))
    for _ in range(2):
        pace.draw(370)  # of 760 that may be drawn

    def more():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        ring.write_episode({"obs": np.zeros((400, 2), np.float32)})

    thread = threading.Timer(0.05, more)
    thread.start()
    pace.draw(300)  # waits for more
    thread.join()
    assert pace.has_learner
    pace.close()
    assert [type(one) for one in told] == [RoleError]


class Nothing(Turn):
    """The lock taken out."""

    def take(self, where, work):
        return work()


def test_control_without_it_a_set_of_the_handler_counts(tmp_path, handled, monkeypatch):
    monkeypatch.setattr(module, "_turn", Nothing())
    told = handled(lambda: Weights(tmp_path).load_into(net(8)))
    Weights(tmp_path).publish(filled(1), 1)
    Weights(tmp_path, disk=Disk(StruckSystem())).load_into(net(8))
    assert told == [True]
