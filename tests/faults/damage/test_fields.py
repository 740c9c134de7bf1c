"""Each field of a record in the middle of the table, flipped: what an opening, each read, and `check` then give.

An opening compares the checksums of few records. So every field of the others is either compared with its neighbours
there, or read by nobody without its checksum: a flipped bit gives an error or right data, never wrong data.
"""

import os
import shutil

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.buffers.sharded.clip_table import CommitTimes
from ringmap.errors import DamageError, RingmapError
from ringmap.samplers import RecencySampler
from ringmap.storage.columns.memmap import HEADER_NBYTES
from ringmap.storage.read import recovery
from ringmap.storage.read.episodes import origins
from ringmap.storage.records import table
from ringmap.storage.records.table import RECORD
from tests.tiers import few

EPISODES, STEPS = 60, 3
MIDDLE = 30
"""The record in whose fields bits are flipped: its neighbours are not hashed by an opening either."""

FIELDS = [
    (name, bit)
    for name in RECORD.names
    for bit in sorted({0, 2, 8 * RECORD[name].itemsize // 2, 8 * RECORD[name].itemsize - 1})
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Make the directory; return its path, and what each read gives of it, by mode."""
    path = tmp_path_factory.mktemp("sound") / "ring"
    with ReplayBuffer(max_steps=1000, path=path, seed=0) as buffer:
        for number in range(EPISODES):
            steps = {"episode": np.full(STEPS, number), "step": np.arange(STEPS)}
            buffer.write_episode({**steps, "_episode_data": {"number": number}})
    return path, {mode: reads(flipped(path, path.parent, None, 0), mode) for mode in ("r", "r+")}


@pytest.fixture(autouse=True)
def small_walks(monkeypatch):
    monkeypatch.setattr(table, "_WALKED", 8)
    monkeypatch.setattr(recovery, "NEWEST", 8)


def flipped(sound, folder, name, bit, record=MIDDLE):
    """Return a copy of the directory in which one bit of a field of a record is flipped; None: of no field."""
    path = folder / "flipped"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(sound, path)
    if name is not None:
        with open(path / "episodes.npy", "r+b") as file:
            file.seek(HEADER_NBYTES + record * RECORD.itemsize + RECORD.fields[name][1] + bit // 8)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1 << bit % 8]))
    return path


def reads(path, mode):
    """Return what each read gives, by its name: an error from one that refuses."""
    found = {}

    def note(name, read):
        try:
            found[name] = read()
        except RingmapError as error:
            found[name] = error

    try:
        buffer = ReplayBuffer.open(path, mode, seed=0)
    except DamageError as error:
        return {"open": error}
    with buffer:
        view = buffer.view()
        note("lengths", lambda: buffer.lengths)
        note("steps", lambda: buffer.num_steps_stored)
        note("sample", lambda: buffer.sample(500))
        view.sampler = RecencySampler(half_life=50, rng=0)
        note("recent", lambda: view.sample(100))
        note("split", lambda: [part.lengths for part in view.split(0.5, seed=1)])
        note("origins", lambda: origins(buffer.engine.source))
        note("times", lambda: CommitTimes(buffer.engine.source)(buffer.engine.source.live.starts))
        for index in range(EPISODES):
            note(f"load {index}", lambda i=index: buffer.load_episode(i))
            note(f"data {index}", lambda i=index: buffer.get_episode_data(i))
    return found


def wrong(truth, found):
    """Return the names of the reads that gave something else than the truth, and no error."""
    return [name for name, one in found.items() if not isinstance(one, DamageError) and not same(truth[name], one)]


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return np.array_equal(one, other)


@pytest.mark.parametrize(("name", "bit"), few([*FIELDS[::3], *FIELDS[1::3], *FIELDS[2::3]], len(FIELDS) // 3))
def test_a_flipped_bit_gives_an_error_or_right_data(sound, tmp_path, name, bit):
    path, truth = sound
    for mode in ("r", "r+"):
        copy = flipped(path, tmp_path, name, bit)
        assert any(finding.file == "episodes.npy" for finding in ringmap.check(copy))
        found = reads(copy, mode)
        assert wrong(truth[mode], found) == []
        errors = {read for read, one in found.items() if isinstance(one, DamageError)}
        # Only what reads this very record refuses, or else the opening.
        assert errors in ({"open"}, {f"load {MIDDLE - 1}", f"data {MIDDLE - 1}", "times"}), errors


def test_control_an_opening_that_does_not_compare_neighbours(sound, tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "_are_next_episodes", lambda *_: True)
    path, truth = sound
    served = {name for name, bit in FIELDS if wrong(truth["r"], reads(flipped(path, tmp_path, name, bit), "r"))}
    assert served >= {"start", "length", "ordinal"}


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("hashes", [True, False], ids=["hashed", "control"])
def test_an_opening_hashes_the_newest_records(sound, tmp_path, monkeypatch, mode, hashes):
    """The time of a commit is no neighbour's business: its checksum alone tells that it was flipped."""
    path = flipped(sound[0], tmp_path, "time", 2, record=EPISODES - 3)
    if hashes:
        with pytest.raises(RingmapError, match=rf"record {EPISODES - 3}\b"):
            ReplayBuffer.open(path, mode=mode)
    else:
        monkeypatch.setattr(recovery, "NEWEST", 0)
        ReplayBuffer.open(path, mode=mode).close()
