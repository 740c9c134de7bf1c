"""Rings side by side: the same clips as ring by ring; what one look at all of them sees; maps that come and go."""

import os
import resource
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.buffers.rings import apart
from ringmap.clips import rings as clip_rings
from ringmap.clips.rings import AdjacentRings, States
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import ClosedError, ReadOnlyError
from ringmap.storage.columns import base
from ringmap.storage.columns.memmap import AdjacentColumn, MemmapColumn
from ringmap.storage.columns.rows import AdjacentRows
from ringmap.storage.disk import system
from ringmap.storage.disk.files import File
from ringmap.storage.disk.system import Room, System
from ringmap.storage.read.handle import Pulse
from ringmap.storage.read.reader import HELD_S, Reader
from ringmap.storage.ring.live import LiveEpisodes
from tests.unit.buffers.sharded.striking import Striking, always_look
from tests.unit.buffers.steps import MUTABLE, prove, same


def open_all(fleet, **options):
    return ShardedReplayBuffer(fleet.folder, **{"history_len": 3, "seed": 0, "wait_s": 0, **options})


@pytest.fixture
def takes(monkeypatch):
    """The names of the columns that were copied from all rings at once."""
    real, found = AdjacentColumn.take, []

    def take(column, slots, out=None, head=0):
        found.append(column.spec.name)
        return real(column, slots, out, head)

    monkeypatch.setattr(AdjacentColumn, "take", take)
    return found


def beside(buf):
    """Return the rings of a buffer side by side, apart from its own."""
    readers = {ring.number: ring.reader for ring in buf.engine.members.open}
    return AdjacentRings.of(readers, buf.engine.many.pulse)


def one_by_one(monkeypatch):
    """Map no files side by side from now on."""
    monkeypatch.setattr(System, "room", lambda self, nbytes: None)


# -- the same clips --------------------------------------------------------------------------------

SHAPES = [(), (1,), (3,), (17,), (5, 7), (64, 64)]
DTYPES = ["u1", "<f4", "<i8", "?", "<c16", "S3", "<M8[s]"]


def a_fleet(folder, rng):
    """Write several rings with random columns and capacities. Each ring wraps."""
    specs = {
        f"c{i}": (SHAPES[rng.integers(len(SHAPES))], DTYPES[rng.integers(len(DTYPES))])
        for i in range(rng.integers(1, 5))
    }
    specs["action"] = ((2,), "<f4")
    sizes = rng.integers(60, 90, 2).repeat(2) if rng.random() < 0.5 else [70] * 3
    for number, size in enumerate(sizes):
        ring = ReplayBuffer(int(size), path=folder / f"{number}", spare_rows=int(rng.integers(1, 40)))
        for _ in range(12):
            length = int(rng.integers(6, 25))
            ring.write_episode(
                {
                    name: rng.integers(0, 2**31, (length, *shape)).astype("<i8").astype(dtype)
                    for name, (shape, dtype) in specs.items()
                }
            )
        ring.close()


@pytest.mark.parametrize("seed", range(6))
def test_clips_equal_those_of_the_rings_alone(tmp_path, monkeypatch, takes, seed):
    rng = np.random.default_rng(seed)
    a_fleet(tmp_path / "fleet", rng)
    options = {"history_len": int(rng.integers(1, 4)), "frameskip": int(rng.integers(1, 3))}
    together = ShardedReplayBuffer(tmp_path / "fleet", **options, seed=0, threads=2)
    ids = rng.integers(0, len(together), 200)
    found = together[ids]
    assert set(takes) == set(found)
    out = {name: np.zeros_like(values) for name, values in found.items()}
    drawn = together.sample(200, out=out)
    assert all(drawn[name] is out[name] for name in out)
    one_by_one(monkeypatch)
    alone = ShardedReplayBuffer(tmp_path / "fleet", **options, seed=0)
    takes.clear()
    same(found, alone[ids])
    same(drawn, alone.sample(200))
    assert takes == []


def test_columns_that_change_are_read_ring_by_ring(tmp_path, takes):
    """With what the writer of each ring updated, also after the fleet was opened."""
    rings = {name: ReplayBuffer(100, path=tmp_path / "fleet" / name, schema=MUTABLE) for name in "ab"}
    for number, ring in enumerate(rings.values()):
        ring.write_episode({"obs": np.stack([np.full(20, number), np.arange(20)], 1)})
    rings["a"].update(np.arange(20), {"label": np.arange(20)})
    buf = ShardedReplayBuffer(tmp_path / "fleet", history_len=2, seed=0)
    rings["b"].update(np.arange(5, 10), {"label": np.arange(5, 10) + 100})
    rings["b"].update(np.arange(7), {"label": np.arange(7) + 200})
    of_b = {step: step + (200 if step < 7 else 100) for step in range(10)}
    batch = buf.sample(200)
    expected = [step if ring == 0 else of_b.get(step, 0) for ring, step in batch["obs"].reshape(-1, 2).tolist()]
    assert batch["label"].ravel().tolist() == expected
    assert takes == []
    with pytest.raises(ReadOnlyError, match="in the process that writes the ring, or store the value at collection"):
        buf.update(batch.ids, {"label": np.zeros(200)})
    buf.close()
    for ring in rings.values():
        ring.close()


def test_large_columns_of_any_ring(fleet, monkeypatch):
    """Their pages are asked for before the first is touched, and a touched page brings no neighbours."""
    monkeypatch.setattr(base, "LARGE_NBYTES", 30_000)
    mapped, asked = [], set()
    put, will_need = Room.put, File.will_need

    def note_put(room, fd, at, offset, nbytes, random):
        if offset:  # rows alone: a whole file is mapped by itself
            mapped.append((nbytes >= 30_000, random))
        return put(room, fd, at, offset, nbytes, random)

    def note_asked(file, offset, nbytes):
        asked.add(os.path.relpath(file.path, fleet.folder).split("-")[0])
        will_need(file, offset, nbytes)

    monkeypatch.setattr(Room, "put", note_put)
    monkeypatch.setattr(File, "will_need", note_asked)
    fleet.ring("a", 50)
    fleet.ring("b", 5000)
    for name in "ab":
        fleet.write(name, 40)
    prove(open_all(fleet).sample(100), fleet.lengths, 3)
    assert asked == {"b/columns/000", "b/columns/003"}
    assert mapped.count((True, True)) == 2
    assert set(mapped) == {(True, True), (False, False)}


def test_a_ring_that_is_closed_while_its_files_are_mapped(three, monkeypatch, takes):
    """Another thread may do that."""

    def map_into(*_):
        raise ClosedError("closed")

    monkeypatch.setattr(MemmapColumn, "map_into", map_into)
    prove(open_all(three).sample(100), three.lengths, 3)
    assert takes == []


def test_a_limit_of_address_space(three, monkeypatch, takes):
    """Maps of single files need it more."""
    limits = {resource.RLIMIT_AS: (1 << 40, 1 << 40)}
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which) or real(which))
    prove(open_all(three).sample(100), three.lengths, 3)
    assert takes == []


def test_a_map_that_the_system_refuses(three, monkeypatch, takes):
    real, left = system._map_at, [7]

    def map_at(*args):
        left[0] -= 1
        return left[0] > 0 and real(*args)

    monkeypatch.setattr(system, "_map_at", map_at)
    prove(open_all(three).sample(100), three.lengths, 3)
    assert takes == []


@pytest.mark.parametrize("weights", ["clips", "equal", {"a": 1.0, "b": 3.0}])
def test_draws_of_rings_in_parts_beside_others(three, weights):
    """Clips of one ring are equally likely, also in a ring that draws by itself because its episodes are in parts."""
    three.write_in_parts("b", 30)
    buf = open_all(three, weights=weights)
    clips = np.array([sum(n - 2 for n in ring.values()) for ring in three.model.values()])
    shares = {"clips": clips, "equal": np.ones(3)}.get(str(weights), np.array([1.0, 3.0, 0.0]))
    batch = buf.sample(9000)
    counts = np.bincount(apart(batch.ids)[0], minlength=3)
    np.testing.assert_allclose(counts / 9000, shares / shares.sum(), atol=0.03)
    halves = np.bincount(apart(batch.ids[:4500])[0], minlength=3)
    np.testing.assert_allclose(halves / 4500, shares / shares.sum(), atol=0.04)
    each = np.unique(batch.ids[apart(batch.ids)[0] == 1], return_counts=True)[1]
    assert len(each) == clips[1]
    assert each.max() < 2 * each.mean()


# -- one look at all -------------------------------------------------------------------------------


def lap(fleet):
    """Overwrite all that is stored."""
    for name in fleet.writers:
        for _ in range(12):
            fleet.write(name, 40)


def test_a_state_that_no_look_sees(three, monkeypatch):
    """The control of the sweep: if the states always look the same, clips that were overwritten come out."""
    monkeypatch.setattr("ringmap.clips.rings.HELD_S", 1e9)
    monkeypatch.setattr(States, "generations", lambda self: b"")
    buf = open_all(three)
    buf.sample(3)
    Striking(monkeypatch, AdjacentColumn, lambda: lap(three), 2)
    with pytest.raises(AssertionError):
        prove(buf.sample(300), three.lengths, 3)


def test_tails_are_those_of_the_states_that_were_seen(three, monkeypatch):
    """A commit between two batches, and none during the second: its tail is known all the same."""
    buf = open_all(three)
    for _ in range(20):
        prove(buf.sample(50), three.lengths, 3)
        for name in "abc":
            three.write(name, 40)
    Striking(monkeypatch, AdjacentColumn, lambda: lap(three), 1)
    prove(buf.sample(300), three.lengths, 3)
    assert buf.num_redraws > 100


def never_due(monkeypatch):
    """Let a tail that was read once count until its ring shows another state."""
    monkeypatch.setattr(clip_rings, "HELD_S", 1e9)


EVERY = np.arange(3)
OLDEST, NEWEST = np.zeros(3, np.int64), np.full(3, 1 << 40)


def test_a_commit_while_tails_are_read(three, monkeypatch):
    """It is seen at the next look, also by a ring whose tail was read before it."""
    never_due(monkeypatch)
    rings, real, left = beside(open_all(three)), Reader.shown_tail, [lap]

    def shown_tail(reader):
        found = real(reader)
        while left:
            left.pop()(three)
        return found

    monkeypatch.setattr(Reader, "shown_tail", shown_tail)
    assert rings.lost(EVERY, OLDEST).tolist() == [False, True, True]
    assert rings.lost(EVERY, OLDEST).all()


def test_a_ring_that_failed_is_looked_at_again(three, monkeypatch):
    never_due(monkeypatch)
    rings, real = beside(open_all(three)), Reader.shown_tail
    fails = [rings.sources[1]]

    def shown_tail(reader):
        if reader in fails:
            raise OSError(5, "Input/output error")
        return real(reader)

    monkeypatch.setattr(Reader, "shown_tail", shown_tail)
    for _ in range(2):
        assert rings.lost(EVERY, NEWEST).tolist() == [False, True, False]
    fails.clear()
    assert rings.lost(EVERY, NEWEST) is None


def test_all_tails_are_read_again_in_time(three, monkeypatch):
    """Looks at a ring that is written all the time are none at the others."""
    now = [1000.0]
    monkeypatch.setattr(clip_rings, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("ringmap.storage.read.reader.HELD_S", 0.0)
    rings = beside(open_all(three))
    assert rings.lost(EVERY, NEWEST) is None
    shutil.rmtree(three.folder / "b")
    for expected in (None, [False, True, False]):
        now[0] += 0.6 * clip_rings.HELD_S
        three.write("a", 10)
        found = rings.lost(EVERY, NEWEST)
        assert (found if found is None else found.tolist()) == expected


def test_ends(three, monkeypatch):
    """They follow a new record, and other episodes below the same record."""
    buf = open_all(three)
    rings = beside(buf)
    known = rings.ends()
    assert rings.ends() is known
    assert known.is_dense
    three.write("a", 10)
    buf.refresh()
    found = rings.ends()
    assert (found.stops - known.stops).tolist() == [10, 0, 0]
    assert found.is_dense
    source = rings.sources[1]
    live, held, real = source.live, [], LiveEpisodes.is_dense

    def is_dense(live):
        held.append(source.lock.locked())
        return real.fget(live)

    monkeypatch.setattr(LiveEpisodes, "is_dense", property(is_dense))
    kept = live.starts[[0, 2]].copy(), live.lengths[[0, 2]] - [0, 1]
    live.clear()
    live.extend(*kept)
    buf.engine.many.pulse.beat()
    found = rings.ends()
    assert (found.stops - known.stops).tolist() == [10, -1, 0]
    assert not found.is_dense
    assert held == [True]  # memory does not change meanwhile


def test_rows_that_are_opened_while_memory_is_looked_at(three):
    """The next look sees them: a look is as of a moment before it."""
    buf = open_all(three)

    class Source:
        """One that has other rows right after the first look at them."""

        def __init__(self, source):
            self.source = source

        def __getattr__(self, name):
            return getattr(self.source, name)

        @property
        def rows(self):
            seen, self.rows_now = self.rows_now, None
            buf.engine.many.pulse.beat()
            return seen

    source = Source(buf.engine.members.open[0].source)
    source.rows_now = source.source.rows
    readers = {0: SimpleNamespace(source=source)}
    rows = AdjacentRows({}, 0, ())
    rings = AdjacentRings(readers, buf.engine.many.pulse, [source.rows_now], rows)
    assert rings.is_current
    assert not rings.is_current


def test_memory_that_is_looked_at_while_it_changes(three, monkeypatch):
    """The look after the change sees it."""
    buf = open_all(three)
    rings, real = beside(buf), LiveEpisodes.evict_before
    before, during = rings.ends().stops[1], []

    def evict_before(live, tail):
        if live is rings.sources[1].live:
            during.append(rings.ends().stops[1])
        real(live, tail)

    monkeypatch.setattr(LiveEpisodes, "evict_before", evict_before)
    three.write("b", 10)
    buf.refresh()
    assert during == [before]
    assert rings.ends().stops[1] == before + 10


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_directory_that_was_removed_is_seen_in_time(three, monkeypatch, is_looked_at):
    """A state file without a name stays as it is: only a system call tells. The control never makes it."""
    always_look(monkeypatch)
    if not is_looked_at:
        monkeypatch.setattr("ringmap.clips.rings.HELD_S", 1e9)
    buf = open_all(three)
    buf.sample(3)
    Striking(monkeypatch, AdjacentColumn, lambda: shutil.rmtree(three.folder / "b"), 1)
    batch = buf.sample(300)
    assert (1 in apart(batch.ids)[0]) is not is_looked_at


@pytest.mark.parametrize("beats", [True, False])
def test_an_episode_in_parts_ends_it(three, monkeypatch, takes, beats):
    """Rings are asked one by one while an episode lies in parts; the control never hears of one."""
    if not beats:
        monkeypatch.setattr(Pulse, "beat", lambda self: None)
    buf = open_all(three)
    buf.sample(3)
    three.write_in_parts("b", 30)
    takes.clear()
    buf.sample(100)
    assert bool(takes) is not beats


def test_processors_that_do_not_order_loads(three, monkeypatch):
    """Then every look is a system call."""
    monkeypatch.setattr(System, "loads_are_ordered", property(lambda self: False))
    buf = open_all(three)
    assert States([ring.source for ring in buf.engine.members.open]).generations() is None
    prove(buf.sample(100), three.lengths, 3)
    Striking(monkeypatch, AdjacentColumn, lambda: lap(three), 2)
    looks, real = [], Reader.shown_tail
    monkeypatch.setattr(Reader, "shown_tail", lambda self: (looks.append(1), real(self))[1])
    prove(buf.sample(300), three.lengths, 3)
    assert buf.num_redraws > 100
    assert len(looks) >= 3


# -- rings that come and go ------------------------------------------------------------------------


def maps(folder):
    """Return what this process has mapped of the files below a folder."""
    with open("/proc/self/maps") as lines:
        return [line for line in lines if f"{folder}/" in line]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no /proc here")
@pytest.mark.parametrize("after_s", [0.0, 2 * HELD_S], ids=["found by the listing", "found by its reader"])
def test_rings_that_leave_give_their_maps_back(three, after_s):
    buf = open_all(three)
    prove(buf.sample(100), three.lengths, 3)
    three.writers.pop("b").close()
    assert maps(three.folder / "b" / "columns")
    shutil.rmtree(three.folder / "b")
    del three.model["b"]
    time.sleep(after_s)
    buf.refresh()
    assert maps(three.folder / "b") == []
    prove(buf.sample(100), three.lengths, 3)
    assert maps(three.folder / "a" / "columns")
    assert maps(three.folder / "b") == []


def test_a_ring_that_joins_while_the_others_are_mapped(three, monkeypatch, takes):
    """Another thread may do that; the next batch is read from all of them."""
    buf, real, left = open_all(three), AdjacentRings.of, ["d"]

    def of(readers, pulse):
        made = real(readers, pulse)
        while left:
            three.ring(left[-1])
            three.write(left.pop(), 60)
            buf.refresh()
        return made

    monkeypatch.setattr(AdjacentRings, "of", of)
    buf.sample(10)
    takes.clear()
    assert {e for e, _ in prove(buf.sample(1000), three.lengths, 3)} == set(three.lengths)
    assert takes


def test_a_ring_gets_its_first_episode(three, takes):
    three.ring("d")
    buf = open_all(three)
    prove(buf.sample(100), three.lengths, 3)
    assert takes
    three.write("d", 60)
    takes.clear()
    assert {e for e, _ in prove(buf.sample(1000), three.lengths, 3)} == set(three.lengths)
    assert takes


def test_transitions_of_the_newest_call_follow_it(tmp_path, takes):
    """Where a ring ends is looked at again after each commit."""
    rings = [TransitionReplayBuffer(64, (3,), path=tmp_path / "fleet" / name, device=None) for name in "ab"]
    buf = None
    for step in range(40):
        for ring in rings:
            obs = np.full((2, 3), step, np.float32)
            ring.add(obs, [step, step], [0.0, 0.0], obs + 1, [False, False])
            ring.flush()
        buf = buf or ShardedReplayBuffer(tmp_path / "fleet", seed=0)
        batch = buf.sample(100)
        np.testing.assert_array_equal(batch["observations"][:, 0], batch["actions"])
        np.testing.assert_array_equal(batch["next_observations"], batch["observations"] + 1)
    assert set(takes) >= {"lanes", "observations", "actions", "rewards", "dones"}
    for ring in rings:
        ring.close()
