"""Live readers: what refresh shows, what is redrawn and counted, what is noticed."""

import contextlib
import os
import shutil

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.errors import (
    ClipIndexError,
    CorruptError,
    NoClipsError,
)
from ringmap.storage.columns.memmap import HEADER_NBYTES
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.table import RECORD
from tests.disks import Through
from tests.faults.crash.recording import Machine
from tests.unit.buffers.steps import COLUMNS, episode, prove, snapshot, stored


@pytest.fixture
def writer(disk_buffer):
    buf = disk_buffer(max_steps=20, history_len=2)
    for number in range(4):
        buf.write_episode(episode(number, 5, {"number": number}))
    return buf


@pytest.fixture
def reader(writer):
    reader = ReplayBuffer.open(writer.path, seed=0)
    yield reader
    reader.close()


LENGTHS = dict.fromkeys(range(1000), 5)


def seen(buf):
    """Return all that a buffer shows, but for whose handle it is."""
    shown = snapshot(buf)
    return {name: shown[name] for name in shown if name not in ("settings", "redraws", "sampling")}


# -- refresh -----------------------------------------------------------------------------------


def test_refresh_shows_the_newest_state_and_tells(writer, reader):
    for number in range(4, 30):
        writer.write_episode(episode(number, 1 + number % 7, {"late": number}))
        if number % 3 == 0:
            assert reader.refresh() is True
            assert seen(reader) == seen(writer)
            assert reader.refresh() is False
    writer.clear()
    assert reader.refresh()
    assert seen(reader) == seen(writer)
    assert reader.column_names == COLUMNS


def test_len_moves_with_refresh_only(writer, reader):
    assert len(reader) == 16
    for number in range(4, 12):
        writer.write_episode(episode(number, 3))
        assert (len(reader), reader.num_episodes, reader.lengths.tolist()) == (16, 4, [5] * 4)
    writer.clear()
    assert len(reader) == 16
    reader.refresh()
    assert len(reader) == 0


def test_len_does_not_move_with_a_redraw(writer, reader):
    for number in range(4, 7):
        writer.write_episode(episode(number, 3))
        reader[0]
        assert reader.num_redraws == number - 3
        assert len(reader) == 16


def test_a_reader_may_come_first(disk_buffer, home):
    """Before the schema is known: it reads the manifest again when there are records."""
    buf = disk_buffer(max_steps=20)
    reader = ReplayBuffer.open(home / "buf")
    assert (reader.column_names, len(reader), list(reader.episodes())) == ([], 0, [])
    with pytest.raises(NoClipsError, match="no clips"):
        reader.sample(3)
    buf.write_episode(episode(0, 5))
    assert reader.column_names == []
    prove(reader.sample(3), {0: 5}, 1)
    assert reader.column_names == COLUMNS
    reader.close()


# -- what was evicted --------------------------------------------------------------------------


def test_a_clip_that_was_evicted_is_redrawn_and_counted(writer, reader):
    for number in range(4, 7):
        writer.write_episode(episode(number, 5))
    # ids of the pinned state: 0-11 are gone, 12-15 (episode 3) live
    batch = reader.__getitems__(range(16))
    found = [(int(one["episode"][0]), int(one["step"][0])) for one in batch]
    assert found[12:] == [(3, 0), (3, 1), (3, 2), (3, 3)]
    assert {number for number, _ in found[:12]} <= {3, 4, 5, 6}
    assert reader.num_redraws == 12
    prove({n: np.stack([one[n] for one in batch]) for n in COLUMNS}, LENGTHS, 2)


def test_an_evicted_id_within_range_is_no_error(writer, reader):
    writer.write_episode(episode(9, 20))
    prove({n: v[None] for n, v in reader[0].items()}, {9: 20}, 2)
    assert reader.num_redraws == 1
    with pytest.raises(ClipIndexError, match="out of range"):
        reader[len(reader)]


@pytest.mark.branch
def test_everything_was_cleared(writer, reader):
    writer.clear()
    with pytest.raises(NoClipsError, match="no clips of 2 steps are left"):
        reader[0]
    with pytest.raises(NoClipsError, match="no clips"):
        reader.sample(2)


def test_a_redraw_is_from_the_newest_state_not_from_the_last_look(writer, reader):
    """The first look found nothing left; by the second one there is something again."""
    writer.clear()
    with pytest.raises(NoClipsError):
        reader[0]
    writer.write_episode(episode(9, 5))
    assert len(reader) == 16
    prove({n: v[None] for n, v in reader[0].items()}, {9: 5}, 2)


def test_episodes_that_were_evicted_are_left_out_or_named(writer, reader):
    for number in range(4, 7):
        writer.write_episode(episode(number, 5))
    assert [int(one["episode"][0]) for one in reader.episodes()] == [3]
    for work in (reader.load_episode, lambda i: reader._load_slice(i, 0, 2)):
        with pytest.raises(ClipIndexError, match=r"episode 0 was evicted .*refresh"):
            work(0)
        assert int(work(3)["episode"][0]) == 3


def test_episode_data_of_an_evicted_episode_is_its_own_or_none(writer, reader):
    for number in range(4, 7):
        writer.write_episode(episode(number, 5, {"number": number}))
    data = reader.get_episode_data()["number"]
    assert data[3] == 3
    assert all(value in (None, i) for i, value in enumerate(data))
    reader.refresh()
    assert reader.get_episode_data() == {"number": [3, 4, 5, 6]}


# -- what is noticed ---------------------------------------------------------------------------


def test_a_directory_that_was_moved_is_the_same_to_its_new_reader(writer, home):
    writer.close()
    os.rename(home / "buf", home / "moved")
    reader = ReplayBuffer.open(home / "moved")
    assert stored(reader) == [0, 1, 2, 3]
    reader.close()


def test_a_copied_directory_is_a_buffer_of_its_own(writer, home, disk_buffer):
    writer.flush()
    shutil.copytree(home / "buf", home / "copy")
    copied = disk_buffer(20, 2, name="copy")
    writer.write_episode(episode(8, 5))
    copied.write_episode(episode(9, 5))
    assert stored(copied) == [1, 2, 3, 9]
    assert stored(writer) == [1, 2, 3, 8]


def test_a_state_that_stays_torn_is_named(writer, reader, home, monkeypatch):
    """Its writer was killed in mid-write: the next opening for writing mends it."""
    monkeypatch.setattr("ringmap.storage.disk.checksums._PEEKS", 3)
    newest = writer.engine.owned.seq
    assert newest
    writer.engine.owned.abandon()
    with open(home / "buf/state.bin", "r+b") as file:
        file.seek(20)
        file.write(b"\xff" * 8)
    with pytest.raises(CorruptError, match=r"state.bin: stays torn.*open the buffer for writing once"):
        reader.refresh()
    fresh = ReplayBuffer.open(home / "buf")
    assert fresh.lengths.tolist() == [5] * 4
    fresh.close()
    ReplayBuffer.open(home / "buf", "r+").close()
    assert reader.refresh()
    assert stored(reader) == [0, 1, 2, 3]


def test_on_a_network_file_system_a_reader_on_another_host_is_refused(writer, home, monkeypatch):
    import socket

    from ringmap.errors import EnvironmentFault
    from ringmap.storage.disk.system import System

    monkeypatch.setattr(System, "is_network", lambda self, path: True)
    ReplayBuffer.open(home / "buf").close()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(EnvironmentFault, match="network file system .*read on that host, or dump the buffer"):
        ReplayBuffer.open(home / "buf")
    writer.write_episode(episode(4, 5))


def test_workers_are_told_the_clips_and_the_head_of_one_moment(writer, reader, monkeypatch):
    """Another thread refreshes the reader between the two: workers would count from the wrong end."""
    pin = reader.engine.reader.pin

    def then_the_writer_goes_on(span):
        pinned = pin(span)
        writer.write_episode(episode(9, 5))
        reader.engine.source.refresh()
        return pinned

    head = reader.engine.source.head
    with monkeypatch.context() as patch:
        patch.setattr(reader.engine.reader, "pin", then_the_writer_goes_on)
        count = len(reader)
    assert reader.engine.pins.loader_state.told()[6:8] == (head, count)


def ask_for_17_other_spans(buf):
    return [buf.num_valid_ends(history) for history in range(3, 20)]


def test_ids_keep_their_clips_when_many_other_spans_are_asked_for(writer, reader):
    """The index of the buffer's own span is dropped for them, and built again."""
    assert len(reader) == 16
    for number in (4, 5):
        writer.write_episode(episode(number, 5))
    reader.refresh()
    known = [reader[i] for i in range(len(reader))]
    ask_for_17_other_spans(reader)
    for i, clip in enumerate(known):
        np.testing.assert_equal(reader[i], clip)
    assert reader.num_redraws == 0


def test_a_sampler_may_ask_for_many_other_spans(writer):
    """Its ids are those of the moment when it was called."""
    assert len(writer) == 16
    for number in (4, 5):
        writer.write_episode(episode(number, 5))
    oldest = writer[0]
    writer.sampler = lambda step, buffer, size, history: ask_for_17_other_spans(buffer) and np.zeros(size, int)
    for name, values in writer.sample(1).items():
        np.testing.assert_array_equal(values[0], oldest[name])
    assert writer.num_redraws == 0


def test_a_clip_of_a_state_that_the_next_writer_did_not_find_is_drawn_anew(home, disk_buffer):
    """A disk lost the newest record; the next writer puts two episodes where the reader knows one."""

    Rebooted = Through(ReplayBuffer, Disk(Machine(2)))

    lost = disk_buffer(40, 2)
    for number, length in enumerate([5, 5, 5, 5, 6]):
        lost.write_episode(episode(number, length))
    reader = ReplayBuffer.open(home / "buf")
    crossing = len(reader) - 3  # steps 2 and 3 of episode 4
    assert reader[crossing]["step"].tolist() == [2, 3]
    table, slot = lost.engine.owned.table, lost.engine.owned.seq
    lost.engine.owned.abandon()
    with open(home / "buf/episodes.npy", "r+b") as file:
        file.seek(HEADER_NBYTES + slot % table.slots * RECORD.itemsize)
        file.write(bytes(RECORD.itemsize))
    with contextlib.closing(Rebooted.open(home / "buf", "r+")) as writer:
        for number in (7, 8):
            writer.write_episode(episode(number, 3))
        clip = reader[crossing]
        assert len(set(clip["episode"].tolist())) == 1
        assert np.diff(clip["step"]).tolist() == [1]
        assert reader.num_redraws == 1
    reader.close()


def test_a_reader_opens_what_the_writer_would_where_a_disk_lost_the_state(home, disk_buffer):
    buf = disk_buffer(20, 2)
    for number in range(6):
        buf.write_episode(episode(number, 5))
    kept = stored(buf)
    buf.engine.owned.abandon()
    (home / "buf/state.bin").write_bytes(bytes(8192))
    reader = ReplayBuffer.open(home / "buf")
    for _ in range(2):
        assert stored(reader) == kept
        prove(reader.sample(50), dict.fromkeys(range(2, 6), 5), 2)
        assert not reader.refresh()
    with contextlib.closing(ReplayBuffer.open(home / "buf", "r+")) as writer:
        assert stored(writer) == kept
        writer.write_episode(episode(6, 5))
        assert reader.refresh()
        assert stored(reader) == [*kept[1:], 6]
        prove(reader.sample(50), dict.fromkeys(range(3, 7), 5), 2)
    reader.close()
