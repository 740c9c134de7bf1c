"""Values of a learner after a kill or a power cut at any change of the disk, with the rings that it reads.

A script of episodes, updates, flushes, kills and restarts runs on a recording disk. After each change a kill and
several power cuts
are tried: what is left is opened by the real code, goes on, and is compared. A value tells its episode, step and update
in all bytes.
"""

import contextlib
import itertools
import os
import random

import numpy as np
import pytest

import ringmap.buffers.engine
from ringmap import Column, ReplayBuffer
from ringmap.buffers.sharded.numbers import joined
from ringmap.data import ShardedReplayBuffer
from ringmap.storage.sidecars.mutable import MutableValues
from tests.crash.recording import Always, Model, RecordingDisk, materialise
from tests.disks import Cut, ram_folder

pytestmark = pytest.mark.slow

SCHEMA = {
    "at": ((2,), "<i8"),
    "latent": Column((12,), "<i8", mutable=True),
    "label": Column((), "<i8", mutable=True),
}
RINGS = "a", "b"


class Machine:
    """Two rings with their writers and a learner, from one boot to the next.

    `last`: row -> number of its newest update that returned; `most`: that was begun; `safe`: that no cut takes. A row:
    `(episode, step)`.
    """

    def __init__(self, root, tree, boot, power, set, cheats=None, episodes=0, updates=0):
        materialise(tree, root)
        self.root, self.power, self.episodes, self.updates = root, power, episodes, updates
        self.disk = RecordingDisk(root, boot, tree, cheats)
        set(ringmap.buffers.engine, "DISK", self.disk)
        self.states = [(0, ({}, {}, {}))]
        self.rings, self.learner = {}, None

    def folder(self, *names):
        return os.path.join(self.root, *names)

    def start(self, *names):
        """Open the writers of some rings, and the learner."""
        for name in names:
            self.rings[name] = ReplayBuffer(
                8,
                path=self.folder("fleet", name),
                schema=SCHEMA,
                spare_rows=4,
                sync_every_s=0,
                seed=1,
                durability="process",
            )
        if self.learner is None and any(ring.num_episodes for ring in self.rings.values()):
            self.open_learner()

    def open_learner(self):
        level = "power" if self.power else "process"
        self.learner = ShardedReplayBuffer(
            self.folder("fleet"), state=self.folder("learner"), seed=1, wait_s=0, durability=level
        )

    def note(self, index, last, most, safe):
        self.states.append((index, (dict(last), dict(most), dict(safe))))

    def at(self, prefix):
        return next(state for at, state in reversed(self.states) if at <= prefix)

    def look(self):
        """Return row -> its id and the number of its update, 0 without one, every byte compared."""
        found, buf = {}, self.learner
        buf.refresh()
        for ring in buf.engine.each():
            live = ring.source.live
            for number, start in enumerate(live.starts.tolist()):
                episode = ring.buffer.load_episode(number)
                for step, (at, latent, label) in enumerate(zip(*episode.values(), strict=True)):
                    row = tuple(at.tolist())
                    value = int(latent[0])
                    assert (latent == value).all(), f"torn at {row}: {latent}"
                    assert value in (0, row[0] * 10**6 + row[1] * 1000 + value % 1000), f"{value} at {row}"
                    assert label == value % 1000, f"{label} and {value} at {row}"
                    found[row] = int(joined(ring.number, np.array(start + step))), value % 1000
        return found

    def write(self, name, length):
        self.episodes += 1
        rows = [(self.episodes, step) for step in range(length)]
        self.rings[name].write_episode({"at": np.array(rows)})

    def update(self, rng):
        here = self.look()
        rows = rng.sample(sorted(here), min(len(here), rng.randint(1, 5)))
        self.updates += 1
        last, most, safe = self.states[-1][1]
        most = {**most, **dict.fromkeys(rows, self.updates)}
        self.note(len(self.disk.log) + 1, last, most, safe)
        latent = [[e * 10**6 + s * 1000 + self.updates] * 12 for e, s in rows]
        values = {"latent": np.array(latent), "label": np.full(len(rows), self.updates)}
        assert self.learner.update([here[row][0] for row in rows], values) == len(rows)
        last = {**last, **dict.fromkeys(rows, self.updates)}
        if self.power:
            safe = {**safe, **dict.fromkeys(rows, self.updates)}
        self.note(len(self.disk.log), last, most, safe)

    def synced(self):
        last, most, _ = self.states[-1][1]
        self.note(len(self.disk.log), last, most, last)

    def step(self, rng):
        kinds, odds = ["write", "update", "flush", "kill", "restart", "sync"], [5, 8, 1, 1, 1, 1]
        kind, name = rng.choices(kinds, odds)[0], rng.choice(RINGS)
        if kind == "write":
            self.write(name, rng.randint(1, 3))
        elif kind == "update" and self.look():
            self.update(rng)
        elif kind == "flush":
            self.learner.flush()
            self.synced()
        elif kind in ("kill", "restart"):
            if kind == "kill":
                self.end_learner()
            else:
                self.learner.close()
                self.synced()
            self.open_learner()
        elif kind == "sync":
            self.rings[name].flush()

    def end_learner(self):
        self.disk.fail(1, Cut(), sticky=True)
        with contextlib.suppress(Cut):
            self.learner.close()
        self.learner.engine.state.close()
        self.disk.lift()

    def end(self):
        """Let all processes die."""
        self.disk.fail(1, Cut(), sticky=True)
        for ring in self.rings.values():
            ring.engine.owned.abandon()
        self.disk.lift()
        if self.learner is not None:
            self.end_learner()


def unlocked(tree):
    """Return the tree without lock files: their holders are dead."""
    if not isinstance(tree, dict):
        return tree
    return {name: unlocked(node) for name, node in tree.items() if name != "lock"}


def crash_everywhere(folder, monkeypatch, power, seed, every, cheats=None, calls=14):
    """Run a script, crash it after every so many changes, and compare; return how many disks were tried."""
    rng, roots, tried = random.Random(seed), itertools.count(), 0
    made = Machine(str(folder / "0"), {}, 1, power, monkeypatch.setattr, cheats)
    next(roots)
    os.makedirs(made.folder("fleet"), exist_ok=True)
    made.disk.note("mkdir", made.folder("fleet"))
    for name in RINGS:
        made.start(name)
        made.write(name, 3)
    made.start()
    for _ in range(calls):
        made.step(rng)
    made.end()
    model = Model({})
    for prefix, change in enumerate(made.disk.log, 1):
        model.apply(change)
        if prefix % every:
            continue
        last, most, safe = made.at(prefix)
        trees = [(model.live(), False), *((model.crash(way), True) for way in (Always(0), Always(1), rng, rng))]
        for tree, is_cut in trees:
            if not any("manifest.json" in ring for ring in tree.get("fleet", {}).values()):
                continue
            tried += 1
            root = str(folder / str(next(roots)))
            after = Machine(root, unlocked(tree), 1 + is_cut, power, monkeypatch.setattr, None, 500, 500)
            judge(after, safe if is_cut else last, most, rng)
    return tried


def judge(machine, low, most, rng):
    """Compare what is there after a crash, and go on."""
    names = [n for n in RINGS if os.path.exists(machine.folder("fleet", n, "manifest.json"))]
    machine.start(*names)
    if machine.learner is not None:
        seen = machine.look()
        for row, (_, update) in seen.items():
            least, greatest = low.get(row, 0), most.get(row, 0)
            assert least <= update <= greatest, f"{row} has {update}, expected {least} to {greatest}"
        for name in names:  # over positions that a cut gave back
            machine.write(name, 3)
        now = machine.look()
        assert all(update == seen.get(row, (0, 0))[1] for row, (_, update) in now.items())
        if now:
            machine.update(rng)
            rows = machine.states[-1][1][0]
            assert all(update == rows.get(row, now[row][1]) for row, (_, update) in machine.look().items())
        assert not [f for f in machine.learner.check() if "learner" in f.file]
    machine.end()


@pytest.fixture
def fast():
    with ram_folder() as folder:
        yield folder


LEVELS = pytest.mark.parametrize("power", [False, True], ids=["process", "power"])


@LEVELS
def test_a_value_is_whole_and_never_older_than_promised(fast, monkeypatch, power):
    assert crash_everywhere(fast, monkeypatch, power, 3, 23) > 20


@pytest.mark.campaign
@LEVELS
@pytest.mark.parametrize("seed", range(100, 120))
def test_values_at_length(fast, monkeypatch, power, seed):
    assert crash_everywhere(fast, monkeypatch, power, seed, 3) > 100


# -- controls --------------------------------------------------------------------------------


def lost_writes(change, path, details):
    """Copies of values never reach the file."""
    return change == "write" and "learner" in path and details[0] >= 12288


@pytest.mark.parametrize(
    ("guard", "instead", "cheats", "power", "message"),
    [
        ("are_lost", lambda _, at, sessions: np.zeros(len(at), bool), None, False, r"at \(50\d"),
        ("sync", lambda _, mark=True: None, None, True, "has .*, expected"),
        (None, None, lost_writes, False, "has 0, expected"),
    ],
    ids=["rows-that-a-cut-took", "a-sync-at-power", "writes"],
)
def test_a_missing_guard_is_seen(fast, monkeypatch, guard, instead, cheats, power, message):
    if guard is not None:
        monkeypatch.setattr(MutableValues, guard, instead)
    with pytest.raises(AssertionError, match=message):
        for seed in range(3, 12):
            folder = fast / str(seed)
            folder.mkdir()
            crash_everywhere(folder, monkeypatch, power, seed, 23, cheats)
