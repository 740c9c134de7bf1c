"""Hints for rows that are on the disk only: which pages, when, and that nothing else changes."""

import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap import ReplayBuffer
from ringmap.clips.gather import ClipReader
from ringmap.storage.columns import base, memmap
from ringmap.storage.columns.copying import Readahead, runs
from ringmap.storage.disk.files import File
from ringmap.storage.disk.system import System


@given(
    slots=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    row=st.integers(1, 20_000),
    offset=st.sampled_from([0, 4096]),
)
def test_runs_are_just_the_pages_of_the_rows(slots, row, offset):
    found = runs(np.array(slots), row, offset)
    pages = [page for begin, size in found for page in range(begin // 4096, (begin + size) // 4096)]
    expected = {
        page
        for slot in slots
        for page in range((offset + slot * row) // 4096, (offset + slot * row + row - 1) // 4096 + 1)
    }
    assert pages == sorted(expected)
    assert all(begin % 4096 == size % 4096 == 0 < size for begin, size in found)
    assert all(a + n < b for (a, n), (b, _) in pairwise(found)), "runs that touch are one"


class Reads(System):
    """Says that so much was read."""

    number = 0

    def disk_reads(self):
        return self.number


def test_hints_stop_when_all_is_in_memory_and_begin_again_when_it_is_not():
    system = Reads()
    watch = Readahead(system)

    def batch(reads):
        asked = watch.is_cold
        watch.begin()
        system.number += reads
        watch.end()
        return asked

    assert [batch(0) for _ in range(20)] == [True] * 16 + [False] * 4
    assert batch(3) is False  # found out
    assert [batch(0) for _ in range(17)] == [True] * 16 + [False]
    assert all(batch(n % 15 == 0) for n in range(16, 100)) is False
    batch(1)
    assert all(batch(n % 15 == 0) for n in range(100)), "now and then is enough"


def test_a_system_that_can_not_be_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: asked.append(args), raising=False)
    System().will_need(3, 0, 0)
    assert asked == [], "0 bytes would mean all that follow"
    System().will_need(3, 4096, 8192)
    assert len(asked) == 1
    portable = System(portable=True)
    portable.will_need(3, 0, 10)
    assert portable.disk_reads() == 0
    assert len(asked) == 1


def test_this_thread_reads_from_the_disk(tmp_path):
    """The measure itself: a page that is not in memory is read, one that is there is not."""
    system = System()
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    before = system.disk_reads()
    os.pread(fd, 4096, 0)
    first = system.disk_reads()
    os.pread(fd, 4096, 0)
    assert system.disk_reads() == first
    os.close(fd)
    if first == before:
        pytest.skip("this file system does not tell, or keeps its files in memory")


@pytest.fixture
def large(monkeypatch):
    """Every column counts as large; returns what was asked for, as (file name, offset, bytes)."""
    monkeypatch.setattr(base, "LARGE_NBYTES", 0)
    asked = []
    real = File.will_need

    def will_need(self, offset, nbytes):
        asked.append((os.path.basename(self.path), offset, nbytes))
        real(self, offset, nbytes)

    monkeypatch.setattr(File, "will_need", will_need)
    return asked


def filled(path, **options):
    buf = ReplayBuffer(90, 3, 2, path=path, seed=0, spare_rows=10, **options)
    for number in range(20):
        step = np.arange(11)
        buf.write_episode({"x": np.full((11, 700), number) + step[:, None], "action": number * 100 + step})
    return buf


def test_a_batch_is_asked_for_before_any_of_it_is_touched(tmp_path, large, monkeypatch):
    touched = []
    take = memmap.MemmapColumn.take
    monkeypatch.setattr(
        memmap.MemmapColumn,
        "take",
        lambda self, *args: touched.append(len(large)) or take(self, *args),
    )
    buf = filled(tmp_path / "buf")
    buf.sample(16)
    assert len(large) > 2
    assert touched == [len(large)] * 2
    for name, offset, nbytes in large:
        assert name.endswith(".npy")
        assert offset >= 4096
        assert nbytes > 0
    buf.close()


def test_hints_change_nothing(tmp_path, large, monkeypatch):
    with filled(tmp_path / "one") as one:
        hinted = [one.sample(16) for _ in range(40)], list(one.episodes())
    assert large
    one.close()
    large.clear()
    monkeypatch.setattr(base, "LARGE_NBYTES", 1 << 60)
    with filled(tmp_path / "other") as other:
        plain = [other.sample(16) for _ in range(40)], list(other.episodes())
    assert not large
    other.close()
    for a, b in zip(hinted[0], plain[0], strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in b)
    assert repr(hinted[1]) == repr(plain[1])


@pytest.mark.parametrize("ahead", [1, 5600 * 3, 1 << 20])
def test_whole_episodes_are_read_in_pieces_asked_for_ahead(tmp_path, large, monkeypatch, ahead):
    monkeypatch.setattr(memmap, "_AHEAD", ahead)
    buf = filled(tmp_path / "buf")
    large.clear()
    for index in range(buf.num_episodes):
        number = 20 - buf.num_episodes + index
        episode = buf.load_episode(index)
        assert np.array_equal(episode["x"], np.full((11, 700), number) + np.arange(11)[:, None])
    assert large
    buf.close()


def test_batches_ask_for_the_next_one_before_they_read_this_one(tmp_path, large, monkeypatch):
    order = []
    want, at = ClipReader._want, ClipReader.at
    monkeypatch.setattr(ClipReader, "_want", lambda self, *args: order.append("want") or want(self, *args))
    monkeypatch.setattr(
        ClipReader,
        "at",
        lambda self, *args, **words: order.append("read") or at(self, *args, **words),
    )
    buf = filled(tmp_path / "buf")
    with buf.batches(8, steps=4) as batches:
        assert len(list(batches)) == 4
    assert order == ["want", *["want", "read"] * 3, "read"]
    buf.close()


def test_a_buffer_in_ram_is_never_asked(large):
    buf = filled(None)
    buf.sample(8)
    assert not large
