"""What a directory says of itself: against a buffer whose every commit is known."""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import NotFoundError, UnknownFormatError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from ringmap.storage.inspect.describe import commits_of, facts_of, nbytes_of, writer_of


def write(buffer, *lengths):
    for length in lengths:
        buffer.write_episode({"x": np.zeros(length)})


def test_facts(tmp_path, rng):
    buffer = ReplayBuffer(100, path=tmp_path / "b")
    lengths = rng.integers(1, 40, 30).tolist()
    write(buffer, *lengths)
    facts = facts_of(tmp_path / "b")
    assert facts.lengths.tolist() == buffer.lengths.tolist()
    assert (facts.steps, facts.steps_written) == (buffer.num_steps_stored, sum(lengths))
    assert (facts.commits, facts.max_steps) == (30, 100)
    assert facts.nbytes_full >= ReplayBuffer.estimate({"x": ((), "f8")}, 100)["total"]
    buffer.close()


@pytest.mark.parametrize("filled", [100, 400])
def test_what_a_buffer_will_take_when_full_is_what_it_takes_then(tmp_path, filled):
    # Given transitions in groups, whose table of records has room for one per row
    with contextlib.closing(TransitionReplayBuffer(1000, (256,), path=tmp_path / "b", device=None)) as buf:
        row, none = np.zeros((1, 256), np.float32), np.zeros(1)

        def add(count):
            for _ in range(count):
                buf.add(row, np.zeros(1, np.int64), none, row, none)
            buf.flush()

        add(filled)
        early = facts_of(tmp_path / "b")
        assert early.nbytes < early.nbytes_full
        # When it fills, then it takes what was said
        rows = early.max_steps
        add(rows - filled)
        full = facts_of(tmp_path / "b")
    assert full.steps == rows
    assert 0.9 < early.nbytes_full / full.nbytes_full < 1.1
    assert full.nbytes <= full.nbytes_full < 1.5 * full.nbytes


def test_commits_are_those_that_were_made(tmp_path, rng):
    buffer = ReplayBuffer(100, path=tmp_path / "b", spare_rows=20)
    written, live, evicted, tail, head = [], [], [], 0, 0
    for length in rng.integers(1, 20, 60).tolist():
        write(buffer, length)
        head += length
        before, tail = tail, head - buffer.num_steps_stored
        written.append(head)
        live.append(buffer.num_steps_stored)
        evicted.append(tail - before)
    buffer.clear()
    commits = commits_of(tmp_path / "b")
    assert commits.written.tolist() == [*written, head]
    assert commits.live.tolist() == [*live, 0]
    assert commits.evicted.tolist() == [*evicted, live[-1]]
    buffer.close()


def test_commits_of_a_table_that_went_round(tmp_path):
    buffer = ReplayBuffer(10, path=tmp_path / "b", spare_rows=4)
    write(buffer, *[1] * 500)
    slots = buffer.engine.source.manifest.table_slots
    assert slots < 200
    commits = commits_of(tmp_path / "b")
    assert commits.written.tolist() == list(range(501 - slots, 501))
    assert set(commits.live.tolist()) == {10}
    assert set(commits.evicted[1:].tolist()) == {1}
    buffer.close()


def test_commits_before_a_damaged_record_are_left_out(tmp_path):
    buffer = ReplayBuffer(10, path=tmp_path / "b", spare_rows=4)
    write(buffer, *[2] * 12)
    buffer.close()
    with open(tmp_path / "b/episodes.npy", "r+b") as file:
        file.seek(4096 + 3 * 128 + 10)
        file.write(b"?")
    commits = commits_of(tmp_path / "b")
    assert commits.written.tolist() == list(range(8, 25, 2))


def test_before_the_first_commit(tmp_path):
    ReplayBuffer(10, path=tmp_path / "b").close()
    facts = facts_of(tmp_path / "b")
    assert (facts.columns, facts.nbytes_full, facts.commits) == ((), None, 0)
    assert commits_of(tmp_path / "b").written.tolist() == []


def test_where_no_buffer_is(tmp_path):
    with pytest.raises(NotFoundError):
        facts_of(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UnknownFormatError):
        facts_of(tmp_path / "file")


# -- who writes ------------------------------------------------------------------------------------

HOLD = """
import sys
from ringmap import ReplayBuffer, TransitionReplayBuffer
buffer = ReplayBuffer(10, path=sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
"""


def test_a_writer_in_another_process_until_it_is_killed(tmp_path):
    words = [sys.executable, "-c", HOLD, str(tmp_path / "b")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"open\n"
        writer = writer_of(str(tmp_path / "b"))
        assert (writer.alive, writer.pid, writer.host) == (True, process.pid, socket.gethostname())
        process.kill()
        process.wait()
        writer = writer_of(str(tmp_path / "b"))
        assert (writer.alive, writer.pid) == (False, process.pid)


def test_looking_takes_no_lock(tmp_path, monkeypatch):
    buffer = ReplayBuffer(10, path=tmp_path / "b")
    buffer.close()

    def refuse(*_):
        raise AssertionError("a lock was touched")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        patched.setattr(fcntl, "lockf", refuse)
        assert writer_of(str(tmp_path / "b")).alive is False
        assert facts_of(tmp_path / "b").writer.alive is False


def signed(tmp_path, **changes):
    ReplayBuffer(10, path=tmp_path / "b").close()
    lock = tmp_path / "b/lock"
    said = json.loads(lock.read_bytes().rstrip(b"\0 ")) | changes
    lock.write_text(json.dumps(said))
    return str(tmp_path / "b")


@pytest.fixture
def silent(monkeypatch):
    """A disk of a system that does not show its locks."""
    disk = Disk()
    monkeypatch.setattr(disk, "system", System(portable=True))
    return disk


def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_nothing_tells(tmp_path, silent):
    assert writer_of(signed(tmp_path, host="elsewhere")).alive is None
    assert writer_of(signed(tmp_path), silent).alive is None  # this process: it may have it open
    assert writer_of(signed(tmp_path, pid=dead_pid()), silent).alive is False
    assert writer_of(signed(tmp_path, pid=10**30), silent).alive is False
    assert writer_of(signed(tmp_path, pid="x"), silent).alive is None
    (tmp_path / "b/lock").unlink()
    assert writer_of(str(tmp_path / "b"), silent).alive is False


def test_locks_are_told_apart(tmp_path):
    system, path = System(), tmp_path / "lock"
    path.write_text("")
    (tmp_path / "other").write_text("")
    assert system.is_locked(str(path)) is False
    assert system.is_locked(str(tmp_path / "nothing")) is None
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert system.is_locked(str(path)) is True
        assert system.is_locked(str(tmp_path / "other")) is False


# -- room on the disk ------------------------------------------------------------------------------


def test_bytes_on_the_disk(tmp_path):
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/one").write_bytes(b"1" * 10_000)
    (tmp_path / "d/e/two").write_bytes(b"2" * 5_000)
    with open(tmp_path / "d/hole", "wb") as file:
        file.truncate(10**9)
    (tmp_path / "outside").write_bytes(b"3" * 10**6)
    os.symlink(tmp_path / "outside", tmp_path / "d/link")
    names = "one", "e/two", "hole", "link"
    expected = sum(os.lstat(tmp_path / "d" / name).st_blocks * 512 for name in names)
    assert expected < 100_000
    assert nbytes_of(tmp_path / "d") == expected
    assert nbytes_of(tmp_path / "d/one") == os.stat(tmp_path / "d/one").st_blocks * 512
    assert nbytes_of(tmp_path / "nothing") == 0
