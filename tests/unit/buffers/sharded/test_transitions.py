"""Rings of transitions read as one, compared with a plain model of each ring, and with the single buffers."""

import contextlib
import copy
import os
import pickle
import shutil
import signal
from multiprocessing import get_context

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer, TransitionReplayBuffer, Zarr
from ringmap.buffers.rings import apart
from ringmap.buffers.steps import ROW
from ringmap.buffers.transitions import nstep
from ringmap.buffers.transitions.lanes import NextObservations
from ringmap.buffers.transitions.nstep import TransitionReader
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.gather import PINNED, ClipReader
from ringmap.clips.rings import AdjacentRings
from ringmap.data import ShardedReplayBuffer, Window
from ringmap.errors import BadRingsError, InputError, NoClipsError, ReplacedError
from ringmap.ray.reader import Reader
from ringmap.samplers import EpisodeSampler, PrioritizedSampler
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from tests.tiers import few
from tests.unit.buffers.sharded.striking import Striking, always_look
from tests.unit.buffers.transitions.reference import Life, Reference, StackedLife, same

GAMMA = 0.9
KINDS = {
    "arrays": {"obs_shape": (5,)},
    "large": {"obs_shape": (150,)},
    "dicts": {"obs_shape": {"a": (3,), "b": (2,)}},
    "critic": {"obs_shape": (5,), "critic_obs_shape": (2,), "extra": {"number": ((), "i8")}},
    "stacks": {"obs_shape": (4, 3), "obs_dtype": np.uint8, "frame_stack": 4},
    "zeros": {
        "obs_shape": (4, 3),
        "obs_dtype": np.uint8,
        "frame_stack": 4,
        "padding_type": "zero",
    },
}


class Steps:
    """Rings of transitions below one directory, with writers in this process, and what each holds: a list of
    transitions."""

    def __init__(self, folder, kind="arrays"):
        self.folder, self.kind = folder, kind
        self.writers, self.life, self.model = {}, {}, {}

    def ring(self, name, capacity=64, **options):
        seed = len(self.writers)
        self.writers[name] = TransitionReplayBuffer(
            capacity,
            **{"seed": seed, **KINDS[self.kind], **options},
            path=self.folder / name,
            device=None,
        )
        padding = KINDS[self.kind].get("padding_type", "reset")
        is_stack = "frame_stack" in KINDS[self.kind]
        shape = (150,) if self.kind == "large" else (5,)
        self.life[name] = StackedLife(seed, padding=padding) if is_stack else Life(seed, shape)
        self.model[name] = Reference(capacity)

    def add(self, name, calls=10, lanes=3):
        """Add calls to a ring, and commit them."""
        for _ in range(calls):
            obs, actions, rewards, after, dones, truncated = self.life[name].step(lanes)
            first = len(self.model[name].steps)
            self.model[name].add(obs, actions, rewards, after, dones, truncated)
            more = {}
            if self.kind == "critic":
                more["critic_observations"], more["next_critic_observations"] = (
                    obs[:, :2],
                    after[:, :2],
                )
                more["extra"] = {"number": np.arange(first, first + lanes)}
            given = (_leaves(o) if self.kind == "dicts" else o for o in (obs, after))
            now, then = given
            self.writers[name].add(now, actions, rewards, then, dones, truncated=truncated, **more)
        self.writers[name].flush()

    def open(self, **options):
        return ShardedReplayBuffer(self.folder, **{"seed": 0, "wait_s": 0, **options})

    def at(self, names, ids, n_step=1):
        """Return what the model has at ids, the numbers of the rings being the places of their names."""
        numbers, positions = apart(ids)
        columns = {}
        for number in set(numbers.tolist()):
            model = self.model[names[number]]
            model.n_step, model.gamma = n_step, GAMMA
            every = model.batch()
            mine = numbers == number
            which = positions[mine] - max(0, len(model.steps) - model.capacity)
            assert (which >= 0).all(), "older than what counts"
            for name, values in every.items():
                into = columns.setdefault(name, np.empty((len(ids), *values.shape[1:]), values.dtype))
                into[mine] = values[which]
        return columns

    def prove(self, batch, names="abc", n_step=1):
        """Compare a batch with the model."""
        expected = self.at(names, batch.ids, n_step)
        columns = dict(batch)
        for name in ("observations", "next_observations"):
            if self.kind == "dicts":
                columns[name] = np.concatenate([columns[name]["a"], columns[name]["b"]], 1)
            if self.kind == "critic":
                critic = columns.pop(name.replace("observations", "critic_observations"))
                assert critic.tobytes() == columns[name][:, :2].tobytes()
        if self.kind == "critic":
            assert (columns.pop("number") == apart(batch.ids)[1]).all()
        same({n: v for n, v in columns.items() if n in expected}, expected)
        wanted = set(expected) - (set() if n_step > 1 else {"discounts"})
        assert set(columns) - {"ids", "weights"} == wanted
        return set(batch.ids.tolist())

    def every(self, names="abc"):
        """Return the ids of all transitions that count."""
        found = set()
        for number, name in enumerate(names):
            stop = len(self.model[name].steps)
            start = max(0, stop - self.model[name].capacity)
            found |= {(number << 48) + at for at in range(start, stop)}
        return found


def _leaves(obs):
    return {"a": obs[:, :3], "b": obs[:, 3:]}


@pytest.fixture
def steps(tmp_path):
    made = []

    def make(kind="arrays", rings="abc"):
        made.append(Steps(tmp_path / "fleet", kind))
        for number, name in enumerate(rings):
            made[0].ring(name, 40 + 30 * number)
            made[0].add(name, 10 + 20 * number, lanes=1 + number)
        return made[0]

    yield make
    for writer in (writer for one in made for writer in one.writers.values()):
        with contextlib.suppress(ReplacedError):  # a test removed it
            writer.close()


def problems(buf):
    return {shard.name: shard.problem for shard in buf.shards if shard.problem is not None}


def arrays_of(batch, prefix=""):
    """Return name -> array of a batch, or of an item, nested or not."""
    found = {}
    for name, value in batch.items():
        if isinstance(value, dict):
            found |= arrays_of(value, f"{prefix}{name}/")
        else:
            found[prefix + name] = np.asarray(value)
    return found


def equal(one, other):
    one, other = arrays_of(one), arrays_of(other)
    assert list(one) == list(other)
    for name, values in one.items():
        assert (values.dtype, values.shape) == (other[name].dtype, other[name].shape), name
        assert values.tobytes() == other[name].tobytes(), name


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("n_step", few([3, 1]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_that_of_the_single_buffers(steps, kind, n_step):
    fleet = steps(kind)
    options = {"n_step": n_step, "gamma": GAMMA}
    buf = fleet.open(**options)
    batch = buf.sample(300)
    fleet.prove(batch, n_step=n_step)
    numbers, positions = apart(batch.ids)
    assert set(numbers.tolist()) == {0, 1, 2}
    for number, name in enumerate("abc"):
        single = TransitionReplayBuffer.open(fleet.folder / name, device=None, **options)
        mine = np.flatnonzero(numbers == number)
        alone = single[(PINNED + positions[mine]).tolist()]
        equal(buf[(PINNED + batch.ids[mine]).tolist()], alone)
        names = arrays_of(single.sample(1))
        ours = arrays_of(batch)
        assert list(ours) == list(names)
        for column, values in arrays_of(alone).items():
            assert ours[column][mine].tobytes() == values.tobytes(), column
        equal(buf[int(PINNED + batch.ids[mine[0]])], single[int(PINNED + positions[mine[0]])])
        single.close()
    buf.close()


def test_all_that_counts_is_drawn_equally(steps):
    fleet = steps()
    buf = fleet.open()
    every = fleet.every()
    assert len(buf) == buf.num_steps_stored == len(every)
    batch = buf.sample(20_000)
    assert fleet.prove(batch) == every
    _, counts = np.unique(batch.ids, return_counts=True)
    expected = 20_000 / len(every)
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi < len(counts) + 6 * np.sqrt(2 * len(counts))


def test_the_control_of_what_counts(steps, monkeypatch):
    """A ring stores more rows than count: without the cut, older ones are drawn."""
    fleet = steps()
    monkeypatch.setattr(TransitionReader, "_now", lambda reader: ClipRange(reader.source, reader.index.of(1)))
    with pytest.raises(AssertionError, match="older than what counts"):
        fleet.prove(fleet.open().sample(2000))


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("kind", ["dicts", "stacks"])
def test_out_is_filled(steps, kind):
    fleet = steps(kind)
    for options in ({}, {"weights": {"b": 1}}, {"sampler": PrioritizedSampler(rng=0)}):
        buf = fleet.open(**options)
        out = buf.sample(16)
        batch = buf.sample(16, out=out)
        fleet.prove(batch)
        filled, given = arrays_of(batch), arrays_of(out)
        assert list(filled) == list(given)
        assert all(filled[n] is given[n] for n in filled if n not in ("ids", "weights"))
        with pytest.raises(InputError, match="C-contiguous"):
            buf.sample(8, out=out)
        buf.close()


@pytest.mark.parametrize("is_single", [True, False])
def test_both_large_observations_are_in_one_block_or_the_callers_arrays(steps, monkeypatch, is_single):
    fleet = steps("large")
    if is_single:
        engine, ids = fleet.writers["a"].engine, np.arange(10)
    else:
        engine = fleet.open().engine
        engine.look()
        ids = engine.many.draw(30, ROW, engine.rng).positions
    batch = engine.read(ids, ROW)
    assert batch["observations"].base is batch["next_observations"].base is not None
    monkeypatch.setattr(nstep, "pair", None)
    out = {name: np.zeros_like(values) for name, values in batch.items()}
    found = engine.read(ids, ROW, out)
    assert all(found[name] is out[name] for name in out)
    equal(found, batch)


def test_large_observations_end_with_a_chunk(steps):
    """Nothing is read from the next one, which is not there yet."""
    fleet = steps("large", "")
    fleet.ring("a", storage=Zarr("lz4", 4))
    fleet.add("a", calls=6, lanes=4)
    fleet.prove(fleet.open().sample(100), "a")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches(steps, prefetch):
    fleet = steps("dicts")
    buf = fleet.open(n_step=2, gamma=GAMMA, sampler=PrioritizedSampler(rng=0))
    with buf.batches(20, steps=3, prefetch=prefetch) as batches:
        for batch in batches:
            fleet.prove(batch, n_step=2)
            assert (batch["ids"] == batch.ids).all()
            assert batch["weights"] is batch.weights
    torch = pytest.importorskip("torch")
    with buf.batches(20, steps=1, to="torch", prefetch=prefetch) as batches:
        batch = next(batches)
        assert isinstance(batch["next_observations"]["a"], torch.Tensor)
    buf.close()


# -- by id -----------------------------------------------------------------------------------------


def test_ids_name_all_that_counts(steps):
    fleet = steps()
    buf = fleet.open()
    every = buf[list(range(len(buf)))]
    assert fleet.prove(every) == fleet.every()
    assert (np.diff(every.ids) > 0).all()
    order = np.random.default_rng(0).permutation(len(buf)).tolist()
    equal(buf[order], {n: v[order] for n, v in every.items()})
    equal(buf[-1], {n: v[-1] for n, v in every.items()})
    for item, at in zip(buf.__getitems__(order[:5]), order, strict=False):
        equal(item, {n: v[at] for n, v in every.items()})
    with pytest.raises(IndexError, match="out of range"):
        buf[len(buf)]


def _double(item):
    return {**item, "observations": {n: 2 * v for n, v in item["observations"].items()}}


def test_a_transform_gets_what_a_user_sees(steps):
    fleet = steps("dicts")
    plain, doubled = fleet.open(), fleet.open(transform=_double)
    for one, other in ((plain[3], doubled[3]), (plain[[3, 7]], doubled[[3, 7]])):
        equal({"a": other["observations"]["a"]}, {"a": 2 * one["observations"]["a"]})
        equal(other["next_observations"], one["next_observations"])


# -- priorities ------------------------------------------------------------------------------------


def test_priorities_span_all_rings_and_are_kept(steps, tmp_path):
    fleet = steps()
    options = {"sampler": PrioritizedSampler(alpha=1.0, rng=0), "state": tmp_path / "learner"}
    buf = fleet.open(**options)
    batch = buf.sample(4000)
    assert fleet.prove(batch) == fleet.every()
    assert (batch["weights"] == 1).all()
    ids = np.array(sorted(fleet.every()))
    values = np.random.default_rng(0).exponential(1, len(ids))
    assert buf.update_priorities(ids, values) == len(ids)
    buf.close()
    buf = fleet.open(**{**options, "sampler": PrioritizedSampler(alpha=1.0, rng=1)})
    drawn = buf.sample(30_000)
    share = (drawn.ids[:, None] == ids).sum(0) / 30_000
    wanted = values / values.sum()
    assert (np.abs(share - wanted) <= 5 * np.sqrt(wanted / 30_000) + 1e-9).all()
    gone = ids[ids < 20]  # of ring a; the oldest will still be stored, and not count
    fleet.add("a", 15, lanes=3)
    assert set(gone.tolist()) - fleet.every()
    fleet.prove(buf.sample(2000))
    assert buf.update_priorities(gone, np.full(len(gone), 1e6)) < len(gone)
    fleet.prove(buf.sample(2000))
    assert buf.engine.sampler.check() == []
    buf.close()


# -- rings -----------------------------------------------------------------------------------------


def test_shards(steps):
    fleet = steps()
    buf = fleet.open()
    for shard, model in zip(buf.shards, fleet.model.values(), strict=True):
        count = min(len(model.steps), model.capacity)
        assert (shard.episodes, shard.steps, shard.clips) == (0, count, count)
        assert (shard.written, shard.problem, shard.policy_step) == (len(model.steps), None, None)
        assert shard.writer.alive
    assert buf.check() == []
    assert f"transitions={len(buf)}" in repr(buf)
    fleet.writers["b"].close()
    buf.remove_ring("b")
    assert [shard.name for shard in buf.shards] == ["a", "c"]
    assert set(apart(buf.sample(200).ids)[0].tolist()) == {0, 2}


def test_rings_are_followed_and_join(steps):
    fleet = steps()
    buf = fleet.open()
    for _ in range(5):
        for name, lanes in (("a", 2), ("b", 5), ("c", 1)):
            fleet.add(name, 7, lanes)
        assert fleet.prove(buf.sample(3000)) == fleet.every()
    fleet.ring("0-new", 32)
    buf.refresh()
    assert not problems(buf)
    fleet.add("0-new", 4)
    names = ["a", "b", "c", "0-new"]
    assert fleet.prove(buf.sample(3000), names) == fleet.every(names)
    shutil.rmtree(fleet.folder / "b")
    buf.refresh()
    assert not problems(buf)
    assert fleet.prove(buf.sample(3000), names) == {at for at in fleet.every(names) if at >> 48 != 1}


def test_ids_that_count_no_more_are_redrawn(steps):
    fleet = steps()
    buf = fleet.open()
    ids = (PINNED + np.array(sorted(fleet.every()))).tolist()
    fleet.add("b", 100, 2)
    fleet.add("c", 30, 2)
    buf.refresh()
    assert fleet.prove(buf[ids]) <= fleet.every()
    assert buf.num_redraws == 60 + 60
    assert fleet.prove(buf.sample(5000)) == fleet.every()


def test_a_cleared_ring_and_an_empty_one(steps):
    fleet = steps(rings="a")
    buf = fleet.open(n_step=2, gamma=GAMMA)
    fleet.writers["a"].clear()
    fleet.model["a"].clear()
    with pytest.raises(NoClipsError, match="0 transitions are stored below"):
        buf.sample(2)
    assert buf.refresh() is False
    assert len(buf) == 0
    fleet.ring("b")
    fleet.add("b")
    buf.refresh()
    assert fleet.prove(buf.sample(500), "ab", 2) == fleet.every("ab")


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("kind", ["arrays", "stacks"])
def test_rows_that_a_repair_left_out(steps, kind):
    """No step leads to them, and no stack has their frames."""
    fleet = steps(kind)
    for _ in range(6):
        fleet.add("b", calls=1, lanes=3)
    fleet.writers["b"].close()
    column = np.load(next((fleet.folder / "b" / "columns").glob("000-*.npy")), mmap_mode="r+")
    bad = np.arange(9, 12)[::-1]  # of the third call from the end
    slots = (len(fleet.model["b"].steps) - bad) % len(column)
    column[slots] = column[slots][::-1] + 1
    column.flush()
    assert ringmap.repair(fleet.folder / "b", dry_run=False)
    fleet.model["b"].capacity = 10_000  # as many as before count, some of them older
    found = fleet.prove(fleet.open().sample(3000))
    last = [at - (1 << 48) for at in found if at >> 48 == 1]
    assert max(last) == len(fleet.model["b"].steps) - 1


def test_a_next_observation_that_cant_be_read_once(steps, monkeypatch):
    fleet = steps()
    buf = fleet.open()
    buf.sample(3)
    real, left = NextObservations.find, [1]

    def find(*args):
        while left:
            left.pop()
            raise OSError(5, "Input/output error")
        return real(*args)

    monkeypatch.setattr(NextObservations, "find", find)
    fleet.prove(buf.sample(300))
    assert not left
    assert not problems(buf)


class NoColumns(Disk):
    """A disk on which the birth of a ring ends before it has columns."""

    def make_folder(self, path):
        if "columns" in path:
            raise OSError(28, "No space left on device")
        super().make_folder(path)


def test_a_ring_that_is_being_made_is_looked_at_again(tmp_path):
    path = tmp_path / "fleet" / "a"
    with pytest.raises(OSError, match="No space left"):
        TransitionReplayBuffer(64, (5,), path=path, device=None, disk=NoColumns())
    buf = ShardedReplayBuffer(tmp_path / "fleet", n_step=3, seed=0, wait_s=0)
    assert [(shard.name, shard.steps, shard.problem) for shard in buf.shards] == [("a", 0, None)]
    with pytest.raises(NoClipsError):
        buf.sample(1)
    fleet = Steps(tmp_path / "fleet")
    fleet.ring("a")
    fleet.add("a")
    assert buf.sample(8)["discounts"].shape == (8,)
    assert problems(buf) == {}
    assert len(buf) == 30
    fleet.writers["a"].close()


def test_rings_of_two_schemas(steps, tmp_path):
    fleet = steps(rings="ab")
    with ReplayBuffer(64, path=fleet.folder / "c") as episodes:
        episodes.write_episode({"obs": np.zeros(20)})
    other = Steps(fleet.folder, "stacks")
    other.ring("d")
    other.add("d")
    said = "c holds episodes, the rings before it transitions.*other columns"
    with pytest.warns(RuntimeWarning, match=said):
        buf = fleet.open(on_bad="skip")
    found = problems(buf)
    assert "c holds episodes, the rings before it transitions" in found["c"]
    assert "other columns" in found["d"]
    assert fleet.prove(buf.sample(500), "ab") == fleet.every("ab")
    with pytest.raises(BadRingsError, match=f"2 of 4 rings.*{said}"):
        fleet.open()
    other.writers["d"].close()


# -- other processes -------------------------------------------------------------------------------


def _killed_in_the_middle(folder, pipe):
    fleet = Steps(folder)
    fleet.ring("k")
    fleet.add("k", 5)
    fleet.writers["k"].add(np.zeros((3, 5)), np.zeros(3), np.zeros(3), np.ones((3, 5)), np.zeros(3))
    pipe.send(len(fleet.model["k"].steps))
    signal.pause()


def test_a_killed_writer_and_its_next_one(steps):
    fleet = steps()
    context = get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_killed_in_the_middle, args=(fleet.folder, there))
    child.start()
    stored = here.recv()
    buf = fleet.open()
    assert len(buf) - len(fleet.every()) in (stored, stored + 3)  # a second later the last call is committed behind it
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert [s.writer.alive for s in buf.shards] == [True, True, True, False]
    assert (buf.sample(2000).ids >> 48 == 3).sum() > 100
    writer = TransitionReplayBuffer.open(fleet.folder / "k", "r+", device=None)
    assert len(writer) == stored + 3  # the call that had returned, too
    writer.close()
    buf.refresh()
    assert len(buf) == len(fleet.every()) + stored + 3
    batch = buf[list(range(len(buf) - 3, len(buf)))]
    assert (batch["next_observations"] == 1).all()


@pytest.mark.parametrize("at", [4, 20])
def test_a_ring_that_fails_in_the_middle_of_a_gather(steps, monkeypatch, at):
    """A map has no errors: rows of each ring are read by system calls."""
    monkeypatch.setattr(System, "room", lambda self, nbytes: None)
    fleet = steps("stacks")
    buf = fleet.open(n_step=2, gamma=GAMMA, on_bad="skip")
    buf.sample(3)

    def strike():
        raise OSError(5, "Input/output error")

    Striking(monkeypatch, MemmapColumn, strike, at)
    with pytest.warns(RuntimeWarning, match="goes on without .*Input/output error"):
        batch = buf.sample(300)
    fleet.prove(batch, n_step=2)
    (name,) = problems(buf)
    assert len(set(apart(batch.ids)[0].tolist()) | {"abc".index(name)}) == 3
    assert len(set(apart(batch.ids)[0].tolist())) == 2


@pytest.mark.parametrize("at", [2, 8])
def test_a_ring_removed_in_the_middle_of_a_gather(steps, monkeypatch, copies, at):
    always_look(monkeypatch)
    fleet = steps("stacks")
    buf = fleet.open(n_step=2, gamma=GAMMA)
    buf.sample(3)

    def strike():
        shutil.rmtree(fleet.folder / "b")

    Striking(monkeypatch, copies, strike, at)
    batch = buf.sample(300)
    fleet.prove(batch, n_step=2)
    assert set(apart(batch.ids)[0].tolist()) == {0, 2}
    assert not problems(buf)


def _lapped(fleet, monkeypatch, copies, at, n_step):
    """Return how many transitions were redrawn, and how many are wrong, of a batch in whose middle every ring is
    lapped."""
    buf = fleet.open(n_step=n_step, gamma=GAMMA)
    buf.sample(3)
    before = copy.deepcopy(fleet.model)

    def strike():
        for name in "abc":
            fleet.add(name, 100, 5)

    Striking(monkeypatch, copies, strike, at)
    batch = buf.sample(300)
    monkeypatch.undo()
    good = np.zeros(300, bool)  # as it was when it was drawn, or as it is now
    for models in (before, fleet.model):
        for number, name in enumerate("abc"):
            model = models[name]
            model.capacity, model.n_step, model.gamma = 10_000, n_step, GAMMA
            every = model.batch()
            numbers, positions = apart(batch.ids)
            mine = np.flatnonzero((numbers == number) & (positions < len(model.steps)))
            whole = np.ones(len(mine), bool)
            for column, values in batch.items():
                wanted = every[column][positions[mine]]
                near = values[mine] == wanted if values.dtype.kind == "u" else np.isclose(values[mine], wanted)
                whole &= near.all(tuple(range(1, near.ndim)))
            good[mine[whole]] = True
    return buf.num_redraws, int((~good).sum())


@pytest.mark.parametrize(("n_step", "at"), [(1, 2), (1, 7), (3, 2), (3, 12)])
def test_transitions_lapped_in_the_middle_of_a_gather(steps, monkeypatch, copies, at, n_step):
    redraws, wrong = _lapped(steps("stacks"), monkeypatch, copies, at, n_step)
    assert redraws > 60
    assert wrong == 0


def test_the_control_of_the_look(steps, monkeypatch, copies):
    """Without the look after the copy, transitions that were overwritten come out."""
    fleet = steps("stacks")
    monkeypatch.setattr(AdjacentRings, "lost", lambda *_: None)
    monkeypatch.setattr("ringmap.buffers.transitions.nstep.lost", lambda *_: None)
    monkeypatch.setattr("ringmap.clips.rings.lost", lambda *_: None)
    assert _lapped(fleet, monkeypatch, copies, 2, 1)[1] > 60


# -- pace, and what is refused ---------------------------------------------------------------------


CALLS = {
    "sample(history_len=)": lambda buf: buf.sample(2, history_len=3),
    "num_valid_ends": lambda buf: buf.num_valid_ends(3),
    "sample(window=)": lambda buf: buf.sample(2, window={"rewards": Window((0,))}),
    "sample(columns=)": lambda buf: buf.sample(2, columns=["rewards"]),
    "batches": lambda buf: buf.batches(2, window={"rewards": Window((0,))}),
    "view(window=)": lambda buf: buf.view({"rewards": Window((0,))}),
    "view().view(window=)": lambda buf: buf.view().view({"rewards": Window((0,))}),
    "view(anchors=)": lambda buf: buf.view(anchors=slice(1, None)),
    "view(where=)": lambda buf: buf.view(where=lambda data: True),
    "split(window=)": lambda buf: buf.split(columns=["rewards"]),
    "num_episodes": lambda buf: buf.num_episodes,
    "lengths": lambda buf: buf.lengths,
    "clip_indices": lambda buf: buf.clip_indices,
    "episodes": lambda buf: next(buf.episodes()),
    "load_episode": lambda buf: buf.load_episode(0),
    "load_chunk": lambda buf: buf.load_chunk([0], [0], [1]),
    "get_episode_data": lambda buf: buf.get_episode_data(),
    "view().load_episode": lambda buf: buf.view().load_episode(0),
    "view().get_episode_data": lambda buf: buf.view().get_episode_data(0),
    "dump": lambda buf: buf.dump("x.h5"),
    "EpisodeSampler": lambda buf: (setattr(buf, "sampler", EpisodeSampler()), buf.sample(4)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_about_episodes_is_refused(steps, call):
    buf = steps(rings="a").open()
    with pytest.raises(InputError, match="transitions"):
        call(buf)


def test_a_reader_of_ray_refuses_them(steps):
    fleet = steps(rings="a")
    reader = Reader({})
    reader.look((str(fleet.folder / "*"),), (str(fleet.folder / "a"),), [])
    with pytest.raises(InputError, match="only episodes are read over Ray"):
        reader.read(4, pickle.dumps({}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history_len": 4}, r"history_len=4, but .*/a holds transitions"),
        ({"frameskip": 2}, r"frameskip=2, but .*/a holds transitions"),
        ({"n_step": 0}, "n_step must be"),
        ({"gamma": 1.5}, "gamma must lie"),
        ({"n_step": 2, "history_len": 3}, "history_len=3 is for rings of episodes, n_step for"),
    ],
)
def test_arguments(steps, options, message):
    fleet = steps(rings="a")
    with pytest.raises(InputError, match=message):
        fleet.open(**options, wait_s=60)
    fleet.open(history_len=1, frameskip=1).close()


def test_n_step_is_refused_for_rings_of_episodes(tmp_path):
    with ReplayBuffer(64, path=tmp_path / "fleet" / "a") as episodes:
        buf = ShardedReplayBuffer(tmp_path / "fleet", n_step=2, wait_s=0)  # it has no columns yet
        episodes.write_episode({"obs": np.zeros(20)})
        with pytest.raises(BadRingsError, match="/a: .*n_step=2 is for transitions, but"):
            buf.refresh()
        with pytest.raises(InputError, match=r"gamma=0.5 is for transitions, but .*/a holds epi"):
            ShardedReplayBuffer(tmp_path / "fleet", gamma=0.5, wait_s=60)


@pytest.mark.usefixtures("copies")
def test_the_control_of_the_reader(steps, monkeypatch):
    """A ring of transitions is no ring of single rows: without its reader, next observations are missing."""
    fleet = steps()
    monkeypatch.setattr(TransitionReader, "read_adjacent", ClipReader.read_adjacent)
    monkeypatch.setattr(TransitionReader, "once", ClipReader.once)
    with pytest.raises((AssertionError, KeyError)):
        fleet.prove(fleet.open().sample(20))
