"""A process that ends by itself without `close`: its last rows are committed. One that is killed, or is a fork's copy,
commits none."""

import os
import subprocess
import sys

import pytest

from ringmap import TransitionReplayBuffer
from tests import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

JOBS = """
import multiprocessing, os, signal, sys, threading
import numpy as np
from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.data import OfflineToOnlineReplayBuffer
from ringmap.storage.commit.store import Store

Store.commit_behind = lambda store: None  # what is left for a second, on a machine that is slow
Store._is_due = lambda store: False
kept = []

def transitions(path):
    buf = TransitionReplayBuffer(100, (1,), path=path, device=None)
    for t in range(5):
        buf.add(np.ones(1), np.ones(1), 1.0, np.ones(1), False)
    return buf

def rows(path):
    offline = ReplayBuffer(100, seed=0)
    offline.write_episode({"obs": np.ones((9, 1), np.float32)})
    buf = OfflineToOnlineReplayBuffer(offline, online_capacity=100, path=path, batch_size=4)
    for t in range(5):
        buf.extend({"obs": np.ones((1, 1), np.float32)})
    return buf

WRITERS = {"transitions": transitions, "rows": rows}

def ended_function(write, path):
    write(path)  # its buffer is gone before the end

def ended_module(write, path):
    kept.append(write(path))

def exception(write, path):
    buf = write(path)
    raise ValueError("expected")

def sys_exit(write, path):
    buf = write(path)
    sys.exit(3)

def daemon_thread(write, path):
    thread = threading.Thread(target=lambda: kept.append(write(path)), daemon=True)
    thread.start()
    thread.join()

def in_child(context):
    def run(write, path):
        child = multiprocessing.get_context(context).Process(target=in_module, args=(write.__name__, path))
        child.start()
        child.join()
    return run

def in_module(name, path):
    ended_module(globals()[name], path)

def hard_exit(write, path):
    buf = write(path)
    os._exit(0)

def terminated(write, path):
    buf = write(path)
    os.kill(os.getpid(), signal.SIGTERM)

def copy(write, path):
    buf = write(path)
    here, there = os.pipe()
    for leave in (sys.exit, lambda: None):
        if not (child := os.fork()):  # the fork committed what there was
            os.read(here, 1)
            return leave()
        buf.add(np.ones(1), np.ones(1), 1.0, np.ones(1), False)
        os.write(there, b"1")
        os.waitpid(child, 0)
    buf.add(np.ones(1), np.ones(1), 1.0, np.ones(1), False)
    os._exit(0)

HOWS = {
    "copy": copy,
    "ended_function": ended_function, "ended_module": ended_module, "exception": exception, "sys_exit": sys_exit,
    "daemon_thread": daemon_thread, "fork": in_child("fork"), "spawn": in_child("spawn"),
    "hard_exit": hard_exit, "terminated": terminated,
}

if __name__ == "__main__":
    folder = sys.argv[1]
    for how in sys.argv[2:]:
        for name, write in WRITERS.items():
            if how == "copy" and name != "transitions":
                continue
            if not (child := os.fork()):
                HOWS[how](write, f"{folder}/{how}-{name}")
                break
            os.waitpid(child, 0)
        else:
            continue
        break
"""

LAST = """
import sys
import numpy as np
from ringmap import TransitionReplayBuffer

class Last:
    def __init__(self, path):
        self.one = np.ones(1)
        self.buf = TransitionReplayBuffer(100, (1,), path=path, device=None)

    def add(self):
        self.buf.add(self.one, self.one, 1.0, self.one, False)

    def __del__(self):
        self.add()
        print("added")

last = Last(sys.argv[1] + "/buf")
for _ in range(5):
    last.add()
"""

ENDS = """
import multiprocessing, os, sys
from ringmap.storage.disk.process import before_exit

kept = []

class One:
    def __init__(self, name):
        self.name, self.pid = name, os.getpid()
        kept.append(self)
        before_exit(self)

    def end_process(self):
        where = "here" if self.pid == os.getpid() else "in a copy"
        os.write(1, f"{self.name} {where}, ".encode())
        raise ValueError(self.name)

for name in "abcd":
    One(name)
child = multiprocessing.get_context("fork").Process(target=One, args=("child",))
child.start()
child.join()
if not (copy := os.fork()):
    sys.exit()
os.waitpid(copy, 0)
"""

WRITERS = ("transitions", "rows")
COMMITS = ("ended_function", "ended_module", "exception", "sys_exit", "daemon_thread", "fork")
COMMITS_NOT = ("hard_exit", "terminated")


def run(tmp_path, jobs, *arguments, timeout_s=120):
    script = tmp_path / "job.py"
    script.write_text(jobs)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, script, tmp_path, *arguments],
        env=environment,
        timeout=timeout_s,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def committed(path):
    """Return how many rows other processes see."""
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.read.reader import Reader

    reader = Reader(Disk(), str(path))
    count = int(reader.head)
    reader.close()
    return count


@pytest.mark.slow
def test_a_spawned_child_commits(tmp_path):
    run(tmp_path, JOBS, "spawn")
    assert [committed(tmp_path / f"spawn-{name}") for name in WRITERS] == [5, 5]


def test_a_forks_copy_commits_nothing(tmp_path):
    """The writer is its parent, which goes on, and is killed here: its next writer finds all of its rows."""
    run(tmp_path, JOBS, "copy")
    path = tmp_path / "copy-transitions"
    assert committed(path) == 6  # with the second fork
    with TransitionReplayBuffer.open(path, mode="r+", device=None) as buf:
        assert len(buf) == 8
        assert buf.check() == []


def test_a_normal_exit_commits(tmp_path):
    said = run(tmp_path, JOBS, *COMMITS, *COMMITS_NOT)
    assert "ValueError: expected" in said
    assert "ringmap" not in said.replace("from ringmap", "")
    found = {how: [committed(tmp_path / f"{how}-{name}") for name in WRITERS] for how in COMMITS}
    assert found == {how: [5, 5] for how in COMMITS}
    left = {how: [committed(tmp_path / f"{how}-{name}") for name in WRITERS] for how in COMMITS_NOT}
    assert left == {how: [0, 1] for how in COMMITS_NOT}  # the first row settles the columns


@pytest.mark.slow
def test_a_finalizer_may_add_while_the_interpreter_ends(tmp_path):
    """No thread begins any more then, and who starts one waits for it for ever."""
    assert run(tmp_path, LAST, timeout_s=60) == ""
    assert committed(tmp_path / "buf") == 5
    with TransitionReplayBuffer.open(tmp_path / "buf", mode="r+", device=None) as buf:
        assert len(buf) == 6


def test_each_is_ended_once_in_its_own_process_whatever_another_raises():
    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=60,
        text=True,
        capture_output=True,
    )
    assert sorted(done.stdout.split(", ")) == ["", "a here", "b here", "c here", "child here", "d here"]
    assert done.stderr.count("what is left to do at the end of the process failed") == 5
