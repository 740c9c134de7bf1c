"""No clip is torn, not even by a writer that laps the ring without a pause.

Every clip is asked whether it is whole (benchmarks/harness/proof.py). The races depend on the scheduler, so the
default suite runs their guarded half only, beside cases in which the writer strikes exactly
between two copies; the campaign runs 1,000,000 clips of each race, and the control.
"""

import contextlib

import numpy as np
import pytest

from benchmarks.harness.proof import Episodes, num_torn
from benchmarks.harness.race import (
    Ring,
    between_processes,
    between_threads,
    between_threads_of_a_reader,
    one_look,
)
from ringmap import ReplayBuffer, Zarr
from ringmap.errors import LappedError
from ringmap.storage.columns import zarr
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.columns.zarr import ChunkCache, ZarrColumn
from ringmap.storage.read.handle import Handle
from tests.tiers import few

RINGS = {
    "retired first": Ring(spare=1),
    "compressed": Ring(row_nbytes=4096, batch=32, storage=Zarr("lz4", 6)),
    "one record": Ring(),
    "many small rows": Ring(spare=64, row_nbytes=4096, batch=32),
    "compressed, retired first": Ring(spare=1, row_nbytes=4096, batch=32, storage={"row": Zarr("none", 16)}),
}


@pytest.fixture(params=few([pytest.param(ring, id=name) for name, ring in RINGS.items()], 2))
def ring(request):
    return request.param


# -- proofs --------------------------------------------------------------------------------------


def a_batch():
    """Return three whole clips of two steps, of episodes 7 and 8."""
    made = [Episodes(16, 9)(number, 5 + number % 2) for number in (7, 8)]
    clips = [(0, 0), (0, 4), (1, 2)]
    return {name: np.stack([made[e][name][start : start + 2] for e, start in clips]) for name in made[0]}


def test_whole_clips_prove_themselves():
    assert num_torn(a_batch()) == 0


@pytest.mark.parametrize("clip", [0, 1, 2])
@pytest.mark.parametrize("step", [0, 1])
def test_every_word_of_every_row_counts(clip, step):
    for name, values in a_batch().items():
        for word in range(values[clip, step].size):
            batch = a_batch()
            batch[name].reshape(3, 2, -1)[clip, step, word] += 9
            assert num_torn(batch) == 1, (name, word)


def test_a_clip_of_two_episodes_is_not_whole():
    batch = a_batch()
    for values in batch.values():
        values[0, 1] = values[2, 1]
    assert num_torn(batch) == 1


# -- the writer strikes between two copies -------------------------------------------------------


class Striking:
    """Has the writer write `episodes` more, once the first column of a batch was copied, `times` times."""

    def __init__(self, monkeypatch, writer, episodes, times):
        self.written = 64
        self.left = times
        for kind in (MemmapColumn, ZarrColumn):
            monkeypatch.setattr(kind, "take", self.striking(kind.take, writer, episodes))

    def striking(self, take, writer, episodes):
        def take_and_strike(column, slots, out=None, head=0):
            taken = take(column, slots, out, head)
            if column.spec.name == "row" and self.left:
                self.left -= 1
                self.write(writer, episodes)
            return taken

        return take_and_strike

    def write(self, writer, episodes):
        made = Episodes(16, 4)
        for _ in range(episodes):
            writer.write_episode(made(self.written, 4 - self.written % 2))
            self.written += 1


STORAGES = {"memmap": "memmap", "zarr": Zarr("lz4", 5), "mixed": {"episode": Zarr("none", 3)}}


@pytest.fixture(params=STORAGES.values(), ids=STORAGES.keys())
def storage(request):
    return request.param


def two_handles(path, role, storage):
    """Return a full writer, and what samples: the same handle or a reader."""
    writer = ReplayBuffer(64, 2, path=path, spare_rows=4, seed=0, sync_every_s=0, storage=storage)
    made = Episodes(16, 4)
    for number in range(64):
        writer.write_episode(made(number, 4 - number % 2))
    return writer, writer if role == "writer" else ReplayBuffer.open(path, seed=0)


@pytest.mark.parametrize("role", ["writer", "reader"])
@pytest.mark.parametrize("times", few([9, 1]))
def test_what_was_evicted_between_two_columns_is_redrawn(fast, monkeypatch, role, times, storage):
    writer, who = two_handles(fast / "buf", role, storage)
    Striking(monkeypatch, writer, episodes=60, times=times)
    batch = who.sample(32)
    assert num_torn(batch) == 0
    assert who.num_redraws == 32 * times  # the ring went round once for each strike
    assert batch["episode"].min() >= writer.load_episode(0)["episode"][0]


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_only_what_was_evicted_is_redrawn(fast, monkeypatch, role, storage):
    writer, who = two_handles(fast / "buf", role, storage)
    oldest = writer.load_episode(0)["episode"][0]
    Striking(monkeypatch, writer, episodes=5, times=1)
    batch = who.sample(256)
    assert num_torn(batch) == 0
    assert 0 < who.num_redraws < 256
    assert batch["episode"].min() == writer.load_episode(0)["episode"][0] > oldest


@pytest.mark.parametrize("role", few(["reader", "writer"]))
def test_a_reader_lapped_time_after_time_says_so(fast, monkeypatch, role, storage):
    writer, who = two_handles(fast / "buf", role, storage)
    Striking(monkeypatch, writer, episodes=60, times=10)
    monkeypatch.setattr(Handle, "retry_s", 0)
    with pytest.raises(LappedError, match="raise max_steps"):
        who.sample(32)
    assert num_torn(who.sample(32)) == 0


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_control_without_the_second_look(fast, monkeypatch, role, storage):
    writer, who = two_handles(fast / "buf", role, storage)
    Striking(monkeypatch, writer, episodes=60, times=1)
    with one_look():
        assert num_torn(who.sample(32)) > 0


@pytest.mark.parametrize("kept", ["decoded", "as in its file"])
@pytest.mark.parametrize("role", ["writer", "reader"])
def test_control_a_chunk_that_never_expires(fast, monkeypatch, role, kept):
    """The ring goes round while one chunk after the other is kept: no look at the tail would tell."""
    monkeypatch.setattr(ZarrColumn, "_keeps", lambda self, count: kept == "decoded")
    monkeypatch.setattr(zarr, "_SHRUNK", 0)  # files that do not shrink, too
    writer, who = two_handles(fast / "buf", role, Zarr("lz4", 5))
    strikes = Striking(monkeypatch, writer, episodes=0, times=0)
    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(ChunkCache, "get", lambda self, c, p: self._chunks.get(c, (None,))[0])
        torn = 0
        for _ in range(6):
            strikes.write(writer, 11)
            torn += num_torn(who.sample(64))
        assert (torn > 0) == wrong


# -- races ---------------------------------------------------------------------------------------


def race(between, folder, ring, clips, **options):
    tally = between(folder, ring, clips, **options)
    print(f"\n{between.__name__}, {options}: {ring}\n    {tally}")
    assert tally.clips >= clips
    return tally


def test_processes(fast, ring):
    assert race(between_processes, str(fast / "buf"), ring, 3_000).torn == 0


@pytest.mark.parametrize("home", few(["disk", "ram"]))
def test_threads(fast, ring, home):
    folder = str(fast / "buf") if home == "disk" else None
    assert race(between_threads, folder, ring, 3_000).torn == 0


def test_threads_that_share_a_reader(fast, ring):
    assert race(between_threads_of_a_reader, str(fast / "buf"), ring, 3_000).torn == 0


@pytest.mark.campaign
@pytest.mark.parametrize("between", [between_processes, between_threads, between_threads_of_a_reader])
def test_a_million_clips(fast, ring, between):
    assert race(between, str(fast / "buf"), ring, 1_000_000).torn == 0


@pytest.mark.campaign
@pytest.mark.parametrize("between", [between_processes, between_threads])
def test_a_million_clips_control(fast, ring, between):
    assert race(between, str(fast / "buf"), ring, 100_000, look_twice=False).torn > 0


def test_control_is_taken_back():
    with contextlib.suppress(ZeroDivisionError), one_look():
        raise ZeroDivisionError
    buffer = ReplayBuffer(8)
    buffer.write_episode({"x": np.arange(8)})
    buffer.write_episode({"x": np.arange(8)})
    assert buffer.engine.source.newest_tail() == 8
