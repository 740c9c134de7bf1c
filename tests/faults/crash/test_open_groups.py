"""A group that is open: its file damaged, its directory read, copied and mended, its writer interrupted or full."""

import errno
import logging
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

import ringmap
from ringmap import TransitionReplayBuffer
from ringmap.errors import EnvironmentFault, LockedError, RingmapError
from ringmap.storage.disk import checksums
from ringmap.storage.inspect.describe import facts_of
from tests import ROOT
from tests.disks import FaultyDisk

CALLS = 7


def make(path, **options):
    return TransitionReplayBuffer(60, (2,), device=None, path=path, sync_every_s=0, seed=0, sampler=in_order, **options)


def in_order(step, buffer, batch_size, history_len):
    return np.arange(batch_size)


def add(buf, number, lanes=2):
    """Store call `number`: each row carries its number, and leads to the next one, but for call 3, which ends an
    episode."""
    n = np.arange(number * lanes, (number + 1) * lanes)
    done = np.full(lanes, number == 3)
    obs = np.stack([n, n + 0.5 * (number == 4)], 1).astype(np.float32)
    after = np.stack([n + lanes, n + lanes], 1).astype(np.float32)
    buf.add(obs, n, n.astype(np.float32), after, done)


def numbers(buf):
    """Return the numbers of the rows, each proven by its values."""
    if not len(buf):
        return []
    batch = buf.sample(len(buf))
    n = batch["actions"]
    assert (batch["observations"][:, 0] == n).all()
    assert (batch["rewards"] == n).all()
    assert (batch["next_observations"] == (n + 2)[:, None]).all()
    return n.tolist()


@pytest.fixture
def killed(tmp_path):
    """A directory whose writer was killed: 2 calls are committed, 5 are in an open group."""
    buf = make(tmp_path / "buf")
    for number in range(CALLS):
        if number == 2:
            buf.flush()
        add(buf, number)
    buf.engine.owned.abandon()
    return tmp_path / "buf"


def file_of(path):
    (folder,) = (path / "open").iterdir()
    return folder / "steps.bin"


def frames_of(raw):
    """Return where each frame that holds something begins."""
    at, found = 0, []
    while at + 12 < len(raw) and (size := int.from_bytes(raw[at : at + 4], "little")):
        found.append(at)
        at += 12 + size
    return [*found, at]


# -- what others see -----------------------------------------------------------------------------


def test_pending_rows_are_counted_and_are_no_finding(killed):
    assert ringmap.check(killed) == []
    assert (facts_of(killed).pending, facts_of(killed).steps) == (10, 4)
    with TransitionReplayBuffer.open(killed, device=None, sampler=in_order) as reader:
        assert numbers(reader) == [0, 1, 2, 3]
    with make(killed) as buf:
        assert numbers(buf) == [*range(2 * CALLS)]
        assert (facts_of(killed).pending, facts_of(killed).steps) == (0, 14)
    buf.close()
    assert ringmap.check(killed) == []


def test_pending_rows_of_a_writer_at_work_are_counted(tmp_path):
    with make(tmp_path / "buf") as buf:
        add(buf, 0)
        assert (facts_of(tmp_path / "buf").pending, ringmap.check(tmp_path / "buf")) == (2, [])
        assert buf.check() == []
        with pytest.raises(LockedError):
            make(tmp_path / "buf")
        assert numbers(buf) == [0, 1]
    buf.close()


@pytest.mark.parametrize("place", [None, "buf"])
def test_rows_of_chunks_that_have_no_file_yet(tmp_path, place):
    """Compressed columns: all rows of a chunk may be pending, or some of it; also over the end of the ring."""
    buf = make(place and tmp_path / place, storage=ringmap.Zarr(chunk_steps=4))
    for number in range(60):
        add(buf, number)
        if number % 7 == 3:
            buf.flush()
        newest = 2 * number + 2
        assert numbers(buf) == [*range(newest - len(buf), newest)]
        ids = buf._ring.ids()
        assert (buf._ring.rows(ids)["actions"] == ids).all()  # column by column
        assert buf._ring.column("actions", ids[-1:]).tolist() == [newest - 1]
    buf.close()


def test_a_snapshot_has_the_rows_that_its_handle_shows(tmp_path, killed):
    with make(tmp_path / "other") as buf:
        for number in range(3):
            add(buf, number)
        buf.save(tmp_path / "copy")
        add(buf, 3)
        with TransitionReplayBuffer.open(tmp_path / "other", device=None) as reader:
            reader.save(tmp_path / "read")
    buf.close()
    with TransitionReplayBuffer.open(killed, device=None) as reader:
        reader.save(tmp_path / "of-a-killed")
    for name, count in (("copy", 6), ("read", 6), ("of-a-killed", 4)):
        assert ringmap.check(tmp_path / name) == []
        with make(tmp_path / name) as copy:
            assert numbers(copy) == [*range(count)]
        copy.close()


def test_repair_keeps_an_open_group(killed):
    (killed / "state.bin").write_bytes(bytes(8192))
    assert ringmap.check(killed) != []
    ringmap.repair(killed, dry_run=False)
    assert ringmap.check(killed) == []
    with make(killed) as buf:
        assert numbers(buf) == [*range(2 * CALLS)]
    buf.close()


# -- damage --------------------------------------------------------------------------------------


def opened(path, caplog):
    """Open a copy for writing; return the numbers of its rows, and whether something was reported."""
    caplog.clear()
    found = ringmap.check(path)
    with caplog.at_level(logging.WARNING, "ringmap"), make(path) as buf:
        got = numbers(buf)
    buf.close()
    assert ringmap.check(path) == []
    warned = [record for record in caplog.records if "rows before it count" in record.message]
    assert bool(found) == bool(warned), (found, warned)
    return got, bool(found)


def damages(raw):
    """Yield bytes with one flipped, or cut short, and how many calls must be there at least, and whether it must be
    reported."""
    frames = frames_of(raw)
    for at in range(frames[-1]):
        frame = next(i for i, begin in enumerate(frames[1:]) if at < begin)
        yield bytes([*raw[:at], raw[at] ^ 1 << at % 8, *raw[at + 1 :]]), frame - 1, True
    for size in range(1, frames[-1], 7):
        frame = next(i for i, begin in enumerate(frames[1:]) if size < begin)
        yield raw[:size], frame - 1, False  # a kill leaves it


def run_damages(path, caplog, every):
    raw = file_of(path).read_bytes()
    name = file_of(path).relative_to(path)
    for number, (damaged, calls, is_reported) in enumerate(damages(raw)):
        if number % every:
            continue
        copy = path.with_name(f"copy-{number}")
        shutil.copytree(path, copy)
        (copy / name).write_bytes(damaged)
        got, reported = opened(copy, caplog)
        assert got == [*range(4 + 2 * max(calls, 0))], f"damage {number}"
        assert reported or not is_reported, f"damage {number} was not reported"
        shutil.rmtree(copy)


@pytest.mark.slow
def test_a_flipped_byte_or_a_cut_file_is_named_and_never_served(killed, caplog):
    run_damages(killed, caplog, 23)


@pytest.mark.campaign
def test_every_flipped_byte(killed, caplog):
    run_damages(killed, caplog, 1)


def test_control_frames_without_a_checksum_are_served(killed, caplog, monkeypatch):
    monkeypatch.setattr(checksums.xxhash, "xxh3_64_intdigest", lambda *_, **__: 0)
    with pytest.raises((AssertionError, RingmapError)):
        run_damages(killed, caplog, 23)


def test_repair_cuts_a_damaged_group(killed):
    path = file_of(killed)
    raw = path.read_bytes()
    at = frames_of(raw)[3] + 20
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    (finding,) = ringmap.check(killed)
    assert finding.what == "frame 3 is damaged; the 4 steps before it are whole"
    ringmap.repair(killed, dry_run=False)
    assert (ringmap.check(killed), facts_of(killed).pending) == ([], 4)
    with make(killed) as buf:
        assert numbers(buf) == [*range(8)]
    buf.close()


# -- a writer that is interrupted: see test_kill.py, by the subjects `rows` and `calls` -----------------


HANDLER = """
import signal, sys
from tests.faults.crash.test_open_groups import add, make, numbers
from ringmap.errors import RoleError
buf, refused = make(sys.argv[1]), 0
def handler(*_):
    global refused
    try:
        if sys.argv[2] == "add":
            add(buf, 1000)
        else:
            len(buf), numbers(buf)
    except RoleError:
        refused += 1
signal.signal(signal.SIGALRM, handler)
for number in range(300):
    signal.setitimer(signal.ITIMER_REAL, 2e-6 + number % 50 * 3e-6)  # once: somewhere in the call
    add(buf, number)
    if number % 60 == 59:
        buf.engine.commit_pending("a test")
signal.setitimer(signal.ITIMER_REAL, 0)
if sys.argv[2] == "read":
    assert numbers(buf) == list(range(600 - len(buf), 600)), numbers(buf)
print(buf._ring.added, refused)
buf.close()
"""


def test_a_signal_handler_that_reads_in_the_middle_of_an_add(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HANDLER, tmp_path / "buf", "read"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "600"
    assert ringmap.check(tmp_path / "buf") == []


def test_a_signal_handler_that_adds_in_the_middle_of_an_add_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HANDLER, tmp_path / "buf", "add"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    added, refused = map(int, done.stdout.split())
    assert added >= 600
    assert refused > 0
    assert ringmap.check(tmp_path / "buf") == []


def test_threads_draw_while_another_adds(tmp_path):
    buf, wrong, is_done = make(tmp_path / "buf"), [], threading.Event()
    add(buf, 0)

    def draw():
        while not is_done.is_set():
            try:
                numbers(buf)
            except Exception as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, 400):
        add(buf, number)
        if number % 50 == 0:
            buf.engine.owned.pending.begun_at -= 1
            buf.engine.owned.commit_behind()
    is_done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert numbers(buf)[-1] == 799
    buf.close()


def test_a_full_disk_before_and_after_the_columns_have_blocks(tmp_path):
    disk = FaultyDisk()
    buf = make(tmp_path / "buf", disk=disk)
    disk.fail(1, OSError(errno.ENOSPC, "planted"), only="reserve", sticky=True)
    with pytest.raises(EnvironmentFault, match="planted"):
        add(buf, 0)
    assert (len(buf), numbers(buf)) == (0, [])
    disk.lift()
    add(buf, 0)
    disk.fail(1, OSError(errno.ENOSPC, "planted"), only="reserve", sticky=True)
    add(buf, 1)  # the room is there
    buf.engine.commit_pending("a test")
    disk.lift()
    buf.close()
    with make(tmp_path / "buf") as again:
        assert numbers(again) == [0, 1, 2, 3]
    again.close()
