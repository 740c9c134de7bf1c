"""Every way to read, of what every mechanism stored, through every handle: against plain.py.

The data are hard ones: the ring has wrapped, episodes cross the wrap, chunks and parts, and one has lost its first
parts.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.buffers import episodes
from ringmap.buffers.episodes import StoredEpisodes
from ringmap.buffers.steps import StepRing
from ringmap.clips import sequences
from ringmap.clips.bounds import Bounds
from ringmap.clips.cut import Ends
from ringmap.clips.rewards import _Sums
from ringmap.data import ShardedReplayBuffer
from ringmap.storage.columns.rows import Rows
from ringmap.storage.ring.links import WholeEpisodes
from tests.contract.plain import PlainRing
from tests.contract.reads import LOADS, READS, failures, loader
from tests.tiers import few

SCHEMA = {
    "where": ((2,), "i8"),
    "reward": ((), "f8"),
    "action": ((2,), "f4"),
    "goal": ((2,), "i8"),
    "latent": ((3,), "f4"),
    "terminated": ((), "?"),
    "task": ((), str),
}
CHANGING = {name: ringmap.Column(*SCHEMA[name], mutable=True) for name in ("reward", "latent")}
STORAGE = {
    "ram": {"path": None},
    "memmap": {},
    "zarr": {"storage": ringmap.Zarr(chunk_steps=4)},
    "pread": {"reads": "pread"},
}
KINDS = {
    "plain": (),
    "updated": ("update",),
    "parts": ("parts",),
    "pending": ("append",),
    "all": ("update", "parts", "append"),
}
EVERY = {**READS, **LOADS}
WORKERS = {"workers": partial(loader, workers=2)}
NOT_OF_FLEETS = {"stored"}, {"stored", "sequences"}
"""Reads of one ring and of two: one has no handle of files, and no sequences from one episode on into the next."""


class Script:
    """A buffer, and the plain ring that stands beside it."""

    def __init__(self, path, kinds, **options):
        self.kinds, self.number, self.rng = kinds, 0, np.random.default_rng(7)
        self.ring = PlainRing(60, "next")
        schema = {**SCHEMA, **(CHANGING if "update" in kinds else {})}
        self.buf = ReplayBuffer(60, 3, schema=schema, spare_rows=31, reward_at="next", seed=0, path=path, **options)

    def rows(self, number, first, stop, ends=True, terminated=False):
        steps = np.arange(first, stop)
        action = self.rng.random((len(steps), 2)).astype("f4")
        reward = self.rng.random(len(steps))
        if first == 0:
            reward[0] = np.nan
        if ends:
            action[-1] = np.nan
        return {
            "where": np.stack([np.full(len(steps), number), steps], 1),
            "reward": reward,
            "action": action,
            "goal": np.stack([steps, -steps], 1),
            "latent": self.rng.random((len(steps), 3)).astype("f4"),
            "terminated": (steps == stop - 1) & terminated,
            "task": np.array([f"{number} {'and on ' * (number % 5)}{step // 2}" for step in steps]),
        }

    def write(self, *lengths):
        for length in lengths:
            self.number += 1
            rows = self.rows(self.number, 0, length, terminated=self.number % 2 == 0)
            self.buf.write_episode(rows)
            self.ring.write(rows)

    def record(self, steps, every=3, lanes=2, finish=True):
        """Record episodes side by side; the last one stays open."""
        numbers, chains = [self.number + 1 + lane for lane in range(lanes)], [None] * lanes
        self.number += lanes
        episodes = [self.buf.begin_episode(commit_every=every, lane=lane) for lane in range(lanes)]
        for first in range(0, steps, every):
            for lane, episode in enumerate(episodes):
                ends = lane < lanes - 1 and first + every >= steps
                rows = self.rows(numbers[lane], first, first + every, ends, ends)
                for step in range(every):
                    episode.append({name: values[step] for name, values in rows.items()})
                chain = chains[lane]
                if chain is None:
                    chain = chains[lane] = self.ring.head
                self.ring.write(rows, chain, first, lane)
        for episode, chain in list(zip(episodes, chains, strict=True))[:-1]:
            episode.finish(terminated=True)
            self.ring.ended.add(chain)

    def append(self, first, stop):
        """Store rows one by one."""
        self.number += not first
        store = self.buf.engine.owned
        store.settings = replace(store.settings, group_s=0)  # not behind our back
        ring = StepRing.over(self.buf, "test")
        ring.group = 9  # one commit has them all
        for step in range(first, stop):
            row = self.rows(self.number, step, step + 1, False)
            ring.append(row)
            self.ring.append(row)

    def update(self):
        """Change a third of all steps."""
        self.ring.commit()
        at = np.concatenate([episode.positions for episode in self.ring.episodes()])[::3]
        values = {"latent": self.rng.random((len(at), 3)).astype("f4"), "reward": self.rng.random(len(at))}
        self.buf.update(at, values)
        for name, changed in values.items():
            self.ring.update(at, name, changed)

    def move(self, rng):
        """Do something at random."""
        kind = rng.choice(["write", "write", "record", "record", *self.kinds])
        if kind == "write":
            self.write(*rng.integers(1, 9, rng.integers(1, 4)).tolist())
        elif kind in ("record", "parts"):
            every = int(rng.integers(1, 6))
            self.record(every * int(rng.integers(1, 5)), every, int(rng.integers(1, 4)))
        elif kind == "append":
            self.append(0, int(rng.integers(1, 6)))
        elif self.ring.episodes():
            self.update()

    def early(self):
        """Fill most of the ring."""
        self.write(7, 9, 2, 14, 12)
        if "update" in self.kinds:
            self.update()
        if "parts" in self.kinds:
            self.record(15)

    def late(self):
        """Go over the wrap, at row 91."""
        if "parts" not in self.kinds:
            self.write(10, 13)
        if "append" in self.kinds:
            self.append(0, 4)
        if "parts" in self.kinds:
            self.record(15)
        self.write(3, 8, 7, 12)
        if "update" in self.kinds:
            self.update()
        if "append" in self.kinds:
            self.append(0, 5)

    def reopen(self, path, **options):
        """Open the buffer anew: what was open has ended."""
        self.buf.close()
        self.ring.ended.update(episode.name for episode in self.episodes)
        self.buf = ReplayBuffer.open(path, "r+", **options)

    @property
    def episodes(self):
        return self.ring.episodes()

    @property
    def committed(self):
        return self.ring.episodes(pending=False)


# Through `pread` alone what meets nothing else is slow: the columns' own suite has it.
ALONE = {"updated", "parts", "pending"}
"""Kinds that "all" has, too."""
CELLS = [(storage, kind) for storage in STORAGE for kind in KINDS]
CELLS.sort(key=lambda cell: (cell[1] in ALONE and cell[0] in {"zarr", "pread"}) or cell == ("pread", "plain"))


@pytest.mark.parametrize(("storage", "kind"), few(CELLS, 13))
def test_every_read_returns_what_was_stored(tmp_path, storage, kind):
    options = {"path": tmp_path / "ring", **STORAGE[storage]}
    path, reads = options["path"], {"reads": options.get("reads", "map")}
    script, found = Script(kinds=KINDS[kind], **options), {}

    def look(who, buf, episodes, ways):
        found[who] = failures(ways, buf, episodes)

    script.early()
    if path is not None:
        before = ReplayBuffer.open(path, **reads)
        look("a reader in the middle", before, script.committed, READS)
    script.late()
    if path is not None:
        before.refresh()
        look("an open reader", before, script.committed, EVERY)
    look("the writer", script.buf, script.episodes, READS)
    if "append" in script.kinds:
        script.append(5, 7)
        look("the writer, with more rows", script.buf, script.episodes, READS)
    script.ring.commit()
    look("the writer, loads", script.buf, script.episodes, LOADS)
    script.buf.flush()
    look("the writer after flush", script.buf, script.episodes, {**EVERY, **WORKERS})
    if "update" in script.kinds:
        script.update()
        look("the writer after an update", script.buf, script.episodes, READS)
    if path is not None:
        before.refresh()
        look("the open reader at last", before, script.episodes, EVERY)
        script.reopen(path, **reads)
        reader = ReplayBuffer.open(path, **reads)
        look("the writer reopened", script.buf, script.episodes, EVERY)
        look("a reader", reader, script.episodes, {**EVERY, **WORKERS})
        ReplayBuffer(60, path=tmp_path / "empty").close()  # which has the number 0
        for name, rings in {"a fleet of it": [path], "a fleet with it": [tmp_path / "empty", path]}.items():
            ReplayBuffer(60, path=rings[0]).close() if len(rings) > 1 else None
            ways = {way: EVERY[way] for way in EVERY.keys() - NOT_OF_FLEETS[len(rings) - 1]}
            with ShardedReplayBuffer(rings, 3, seed=0, **reads) as fleet:
                look(name, fleet, script.episodes, {**ways, **WORKERS})
        before.close()
        reader.close()
    assert script.buf.check() == []
    script.buf.close()
    report = [f"{where}: {read}: {what}" for where, reads in found.items() for read, what in reads.items()]
    assert not report, "\n".join(report)


@pytest.mark.parametrize(
    ("storage", "seed"), few([("ram", 0), ("memmap", 1), ("memmap", 2), ("zarr", 3), ("pread", 4)], 3)
)
def test_every_read_returns_what_was_stored_in_any_order(tmp_path, storage, seed):
    """Episodes of several lanes side by side, whole ones, rows and updates, as they come."""
    options, rng = {"path": tmp_path / "ring", **STORAGE[storage]}, np.random.default_rng(seed)
    script = Script(kinds=KINDS["all"], **options)
    for turn in range(36):
        script.move(rng)
        if turn % 4 == 3:
            assert failures(READS, script.buf, script.episodes) == {}, turn
    script.ring.commit()
    script.buf.flush()
    assert failures(LOADS, script.buf, script.episodes) == {}
    assert script.buf.check() == []
    script.buf.close()


@pytest.mark.parametrize("storage", ["memmap", "zarr"])
def test_rows_of_a_group_that_begins_during_a_read_are_found(tmp_path, storage, monkeypatch):
    """Another thread of the writer reads a column: it has looked at the files, and not yet at what is stored."""
    script = Script(tmp_path / "ring", (), storage=storage)
    script.write(7, 9)
    store, real = script.buf.engine.owned, episodes.read_whole

    def read_whole(*args):
        script.append(0, 5)
        return real(*args)

    monkeypatch.setattr(episodes, "read_whole", read_whole)
    rows = StoredEpisodes(store).rows(None, ["where"], "test")["where"]
    assert rows.tolist() == np.concatenate([ep.rows["where"] for ep in script.episodes]).tolist()
    script.buf.close()


@pytest.mark.parametrize(
    ("owner", "name", "flaw", "kind", "found"),
    [
        (
            Rows,
            "_lay_changes",
            lambda *_: None,
            "updated",
            {"clips", "computed", "split", "stored", "windows", "sequences"},
        ),
        (Rows, "show", lambda *_, **__: None, "pending", {"clips", "windows", "return_to_go", "stored"}),
        (Ends, "blanks", lambda self, *ends: ends, "parts", {"windows"}),
        (Bounds, "key_of", lambda self, column: self._whole, "all", {"return_to_go"}),
        (
            _Sums,
            "lack",
            lambda self, starts, _: self.stops.take(starts % len(self.stops)) <= starts,
            "pending",
            {"return_to_go"},
        ),
    ],
)
def test_control_a_mechanism_that_is_left_out_is_found(tmp_path, monkeypatch, owner, name, flaw, kind, found):
    monkeypatch.setattr(owner, name, flaw)
    script = Script(tmp_path / "ring", KINDS[kind])
    script.early()
    script.late()
    wrong = failures(READS, script.buf, script.episodes)
    if "append" in script.kinds:
        script.append(5, 7)
        wrong |= failures(READS, script.buf, script.episodes)
    if "update" in script.kinds:
        for _ in range(2):
            script.update()
            wrong |= failures(READS, script.buf, script.episodes)
    assert found <= set(wrong)
    script.buf.close()


def without(name):
    """Return `WholeEpisodes.by_lane` as if this were zero of each episode."""
    real = WholeEpisodes.by_lane

    def by_lane(self):
        kept = getattr(self, name)
        setattr(self, name, np.zeros_like(kept))
        try:
            return real(self)
        finally:
            setattr(self, name, kept)

    return by_lane


@pytest.mark.parametrize(
    ("owner", "name", "flaw"),
    [
        (WholeEpisodes, "by_lane", without("is_open")),
        (WholeEpisodes, "by_lane", without("lanes")),
        (WholeEpisodes, "are_begins", lambda self, places: np.isin(places, self.places)),
        (Bounds, "positions", lambda self, places: places),
        (sequences.Sequences, "across", property(lambda self: False, lambda self, value: None)),
    ],
)
def test_control_sequences_that_run_on_wrongly_are_found(monkeypatch, owner, name, flaw):
    """After an open episode, into another lane, with flags of the run alone, or not at all."""
    monkeypatch.setattr(owner, name, flaw, raising=False)
    ways, found = {"sequences": READS["sequences"]}, {}
    for seed in range(3):
        script, rng = Script(None, KINDS["parts"]), np.random.default_rng(seed)
        for _ in range(24):
            script.move(rng)
            found = found or failures(ways, script.buf, script.episodes)
    assert found
