"""Roles and processes: the lock, forks, spawns, pickles, threads."""

import copy
import functools
import os
import pickle
import subprocess
import sys
import threading
import time

import filelock
import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap import ReplayBuffer
from ringmap.buffers import replay
from ringmap.errors import ClosedError, InputError, LockedError, ReadOnlyError
from tests import ROOT
from tests.tiers import few
from tests.unit.buffers.processes import Child, error_of, in_child
from tests.unit.buffers.steps import COLUMNS, columns, episode, prove, same, snapshot, stored

WRITES = {
    "write_episode": lambda b: b.write_episode(episode(9, 3)),
    "write_episodes": lambda b: b.write_episodes([episode(9, 3)]),
    "clear": lambda b: b.clear(),
    "begin_episode": lambda b: b.begin_episode(),
    "extend_from": lambda b: b.extend_from(_two()),
}


def _two():
    buf = ReplayBuffer(max_steps=9)
    buf.write_episode(episode(9, 3))
    return buf


def fill(buffer, numbers=3, **options):
    buf = buffer(**{"max_steps": 20, "history_len": 2, "seed": 0, **options})
    for number in range(numbers):
        buf.write_episode(episode(number, 5, {"number": number}))
    return buf


# -- the second writer -------------------------------------------------------------------------


@pytest.mark.parametrize("open_it", ["constructor", "open"])
def test_a_second_writer_is_refused_by_name(disk_buffer, home, open_it):
    buf = fill(disk_buffer)
    files = disk_buffer.files()

    def second():
        if open_it == "open":
            ReplayBuffer.open(home / "buf", mode="r+")
        ReplayBuffer(20, 2, path=home / "buf")

    for kind, words in (in_child(error_of, second), error_of(second)):
        assert kind == "LockedError"
        assert f"process {os.getpid()}" in words
        assert "since 2" in words
        assert "mode='r'" in words, "says how to read it"
    with pytest.raises(LockedError, match="this process"):
        second()
    assert issubclass(LockedError, RuntimeError)
    assert disk_buffer.files() == files
    buf.write_episode(episode(3, 5))
    assert stored(buf)[-1] == 3


def test_closing_frees_the_lock_at_once(disk_buffer):
    for _ in range(3):
        buf = fill(disk_buffer, numbers=1)
        buf.close()
    buf.close()
    again = disk_buffer(20, 2)
    buf.close()
    with pytest.raises(LockedError):
        disk_buffer(20, 2)
    assert again.num_episodes == 3


def test_a_constructor_that_fails_keeps_no_lock(disk_buffer, monkeypatch):
    fill(disk_buffer).close()

    def refuse(*_, **__):
        raise OSError(5, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(replay, "finish_open", refuse)
        with pytest.raises(OSError, match="refused") as kept:  # its traceback keeps every frame alive
            disk_buffer(20, 2)
    assert kept
    assert stored(disk_buffer(20, 2)) == [0, 1, 2]


# -- readers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("work", WRITES)
def test_a_reader_asked_to_write_names_the_writer(disk_buffer, home, work):
    buf = fill(disk_buffer)
    reader = ReplayBuffer.open(home / "buf")
    assert (reader.mode, buf.mode) == ("r", "r+")
    files = disk_buffer.files()
    with pytest.raises(ReadOnlyError, match=rf"only reads.* process {os.getpid()} .*mode='r\+'") as raised:
        WRITES[work](reader)
    assert isinstance(raised.value, RuntimeError)
    assert disk_buffer.files() == files
    with reader:
        pass
    reader.close()


# -- forked children ---------------------------------------------------------------------------


def test_a_forked_child_follows_its_parent(disk_buffer):
    buf = fill(disk_buffer)

    def follow(child):
        child.say((len(buf), stored(buf)))
        child.hear()
        before = len(buf)
        changed = buf.refresh()
        return before, changed, stored(buf)

    child = Child(follow)
    assert child.hear() == (12, [0, 1, 2])
    buf.write_episode(episode(3, 5))
    buf.write_episode(episode(4, 4))
    child.say("go")
    assert child.result() == (12, True, [1, 2, 3, 4])


def test_a_reader_forks_too(disk_buffer, home):
    buf = fill(disk_buffer)
    reader = ReplayBuffer.open(home / "buf")

    def look(child):
        assert stored(reader) == [0, 1, 2]
        child.say("ready")
        child.hear()
        prove(reader.sample(50), {3: 20}, 2)
        return stored(reader)

    child = Child(look)
    child.hear()
    buf.write_episode(episode(3, 20))
    child.say("go")
    assert child.result() == [3]
    assert reader.refresh()
    assert stored(reader) == [3]
    reader.close()


def test_closed_before_the_fork_is_closed_in_the_child(buffer):
    buf = fill(buffer)
    buf.close()
    assert in_child(error_of, len, buf)[0] == "ClosedError"


def test_closed_in_the_child_is_closed_there_only(disk_buffer):
    buf = fill(disk_buffer)

    def close():
        buf.close()
        return error_of(len, buf)

    assert in_child(close)[0] == "ClosedError"
    assert stored(buf) == [0, 1, 2]
    buf.write_episode(episode(3, 5))


def test_a_child_closes_and_ends_without_freeing_the_lock(disk_buffer, home):
    buf = fill(disk_buffer)
    in_child(buf.close)
    in_child(lambda: None)
    done = subprocess.run([sys.executable, "-c", OPEN, str(home / "buf")], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "LockedError"
    buf.close()
    done = subprocess.run([sys.executable, "-c", OPEN, str(home / "buf")], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "opened", done.stderr


OPEN = """
import sys
from ringmap import ReplayBuffer
try:
    ReplayBuffer.open(sys.argv[1], mode="r+")
    print("opened")
except Exception as error:
    print(type(error).__name__)
"""


def test_a_child_that_outlives_its_killed_parent_keeps_nobody_out(disk_buffer):
    """And it goes on reading what the next writer stores."""

    def parent(talk):
        buf = fill(disk_buffer)

        def grandchild(child):
            assert stored(buf) == [0, 1, 2]
            talk.say(os.getpid())
            talk.hear()
            buf.refresh()
            return talk.say(stored(buf))

        Child(grandchild)
        os.read(os.pipe()[0], 1)

    child = Child(parent)
    grandchild = child.hear()
    os.kill(child.pid, 9)
    os.waitpid(child.pid, 0)
    os.kill(grandchild, 0)
    buf = disk_buffer(20, 2)
    buf.write_episode(episode(3, 20))
    child.say("go")
    assert child.hear() == [3]
    child.reap()


def test_control_a_descriptor_that_the_child_keeps_does_keep_the_next_one_out(tmp_path):
    """A plain flock, inherited: the parent lets go by dying only, and the child still holds."""
    import fcntl

    path = str(tmp_path / "lock")

    def parent(talk):
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def grandchild(_):
            talk.say(os.getpid())
            talk.hear()

        Child(grandchild)
        os.read(os.pipe()[0], 1)

    child = Child(parent)
    child.hear()
    os.kill(child.pid, 9)
    os.waitpid(child.pid, 0)
    with pytest.raises(filelock.Timeout):
        filelock.FileLock(path, timeout=0).acquire()
    child.say("go")
    child.reap()


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("spare", few([2, None]))
def test_a_fork_at_any_line_of_a_write(buffer, spare, every):
    """As another thread could have it: the child sees the state before the call, after it, or, if
    the episode is longer than the spare rows, without the oldest ones."""
    buf = buffer(max_steps=20, history_len=2, spare_rows=spare)
    for number in range(6):
        buf.write_episode(episode(number, AnyLength()[number]))
    before, seen, lines, old = stored(buf), [], 0, sys.gettrace()

    def trace(frame, event, _):
        if "ringmap/storage" not in frame.f_code.co_filename.replace(os.sep, "/"):
            return None
        if event == "line":
            nonlocal lines
            lines += 1
            if lines % every == 0:
                sys.settrace(None)
                seen.append(in_child(read_all, buf))
                sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        buf.write_episode(episode(6, AnyLength()[6]))
    finally:
        sys.settrace(old)
    after = stored(buf)
    allowed = [before, after]
    if spare == 2:
        allowed += [before[i:] for i in range(1, len(before) - len(after) + 2)]
    wrong = [numbers for numbers in seen if numbers not in allowed]
    assert wrong == []
    assert lines > 100
    assert before in seen


def read_all(buf):
    """Check whatever is stored, while more may come; return the numbers of the episodes seen."""
    prove(buf.sample(4), AnyLength(), 2)
    numbers = []
    for one in buf.episodes():
        numbers.append(int(one["episode"][0]))
        length = AnyLength()[numbers[-1]]
        same(
            {name: np.array(values) for name, values in one.items()},
            columns(numbers[-1], 0, length),
        )
    return numbers


class AnyLength(dict):
    """Episode number -> length, for episodes of `3 + number % 5` steps (the first one: 5)."""

    def __contains__(self, number):
        return True

    def __getitem__(self, number):
        return 3 + number % 5 if number else 5


# -- pickles -----------------------------------------------------------------------------------


def test_a_pickle_keeps_sampler_transform_and_filter(buffer):
    buf = fill(buffer)
    buf.sampler, buf.transform, buf.key_filter = first_clips, only_steps, only_steps
    copied = pickle.loads(pickle.dumps(buf))
    assert (copied.sampler, copied.transform, copied.key_filter) == (
        first_clips,
        only_steps,
        only_steps,
    )
    assert list(copied[0]) == ["step"]
    assert copied.sample(2)["step"][:, 0].tolist() == [0, 1]
    copied.close()


def first_clips(step, buffer, batch_size, history_len):
    return np.arange(batch_size)


def only_steps(given):
    return {"step": given["step"]}


def _local():
    return lambda *given: given[0]


class _Kept:
    def __call__(self, step, buffer, batch_size, history_len):
        return np.zeros(batch_size, int)


def _local_object():
    class Local(_Kept):
        pass

    return Local()


@pytest.mark.parametrize("name", ["sampler", "transform", "key_filter"])
@pytest.mark.parametrize("path", [None, "buf"], ids=["ram", "disk"])
def test_what_has_no_name_in_another_process_is_refused_by_name(home, name, path):
    buf = fill(ReplayBuffer, path=path and home / path)
    for value in (_local(), functools.partial(_local(), 1), _local_object()):
        setattr(buf, name, value)
        with pytest.raises(InputError, match=f"ReplayBuffer: {name} is .*top of a module"):
            pickle.dumps(buf)
    assert len(buf.lengths) == 3, "it goes on"
    for value in (_Kept(), first_clips, functools.partial(first_clips), np.asarray):
        setattr(buf, name, value)
        copied = pickle.loads(pickle.dumps(buf))
        assert type(getattr(copied, name)) is type(value)
        copied.close()
    buf.close()


def test_a_spawned_worker_is_not_sent_a_lambda(home):
    buf = fill(ReplayBuffer, path=home / "buf")
    buf.transform = lambda clip: clip
    with pytest.raises(InputError, match="transform is <function .*<lambda>"):
        next(iter(DataLoader(buf, 2, num_workers=1, multiprocessing_context="spawn")))
    assert len(next(iter(DataLoader(buf, 2, num_workers=1, multiprocessing_context="fork")))) > 1
    buf.close()


def test_a_pickle_of_a_ram_buffer_holds_what_is_stored_and_no_more():
    buf = ReplayBuffer(max_steps=100_000, history_len=2)
    assert len(pickle.dumps(buf)) < 2000
    for number in range(3):
        buf.write_episode({"x": np.full((100, 32), number, np.float64)})
    size = len(pickle.dumps(buf))
    assert 3 * 100 * 32 * 8 < size < 3 * 100 * 32 * 8 + 4000, "trimmed: the capacity is 25.6 MB"


def test_a_copy_of_a_ram_buffer_is_one_s_own():
    buf = fill(ReplayBuffer, frameskip=2)
    buf.begin_episode()
    for copied in (pickle.loads(pickle.dumps(buf)), copy.deepcopy(buf), copy.copy(buf)):
        assert (copied.mode, copied.max_steps, copied.frameskip) == ("r+", 20, 2)
        before = snapshot(buf)
        assert snapshot(copied) == before
        assert buf.state_dict() == copied.state_dict()
        copied.write_episode(episode(7, 20))
        assert stored(copied) == [7]
        copied.clear()
        assert snapshot(buf) == before
    buf.clear()
    assert pickle.loads(pickle.dumps(buf)).column_names == COLUMNS, "schema without episodes"


def test_a_ram_buffer_keeps_its_endings():
    buf = ReplayBuffer(max_steps=20)
    buf.write_episode({"terminated": [False, True]})
    buf.write_episode({"terminated": [False, False]})
    copied = pickle.loads(pickle.dumps(buf))
    for b in (buf, copied):
        live = b.engine.owned.live
        assert [b.engine.owned.record_of(o).flags for o in range(live.first, live.last)] == [1, 0]


def test_pickles_of_a_closed_buffer(disk_buffer):
    buf = fill(disk_buffer)
    buf.close()
    copied = pickle.loads(pickle.dumps(buf))
    assert stored(copied) == [0, 1, 2], "its files are still there"
    copied.close()
    ram = ReplayBuffer(max_steps=20)
    ram.close()
    with pytest.raises(ClosedError):
        pickle.dumps(ram)


# -- threads -----------------------------------------------------------------------------------


def test_whole_episodes_are_read_while_another_thread_writes(buffer):
    buf = buffer(max_steps=60, history_len=3)
    for number in range(10):
        buf.write_episode(episode(number, 3 + number % 5, {"n": number}))
    stop, wrong, rounds = threading.Event(), [], [0]

    def read():
        try:
            while not stop.is_set():
                for one in buf.episodes():
                    number = int(one["episode"][0])
                    assert one.pop("_episode_data") == {"n": number}
                    same({n: np.array(v) for n, v in one.items()}, columns(number, 0, 3 + number % 5))
                steps = buf.get_col_data("step")
                assert steps[0] == 0
                rounds[0] += 1
        except BaseException as error:
            wrong.append(error)
            stop.set()

    thread = threading.Thread(target=read)
    thread.start()
    number, end = 10, time.monotonic() + 10
    while not stop.is_set() and (rounds[0] < 30 or number < 300) and time.monotonic() < end:
        buf.write_episode(episode(number, 3 + number % 5, {"n": number}))
        number += 1
    stop.set()
    thread.join()
    assert wrong == []


def test_two_threads_may_write_in_turn(buffer):
    buf = buffer(max_steps=60)
    barrier = threading.Barrier(2)

    def write(which):
        barrier.wait()
        for i in range(50):
            buf.write_episode(episode(1000 * which + i, 2))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = stored(buf)
    assert len(numbers) == 30
    for which in range(2):
        own = [n for n in numbers if n // 1000 == which]
        assert own == sorted(own)
