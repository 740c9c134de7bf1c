"""Values that a learner writes back, over several rings, against a plain dict; what its directory keeps."""

import contextlib
import errno
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from ringmap import Column, ReplayBuffer, TransitionReplayBuffer
from ringmap.buffers.sharded.numbers import apart, joined
from ringmap.data import Sequences, ShardedReplayBuffer, Window
from ringmap.errors import (
    ClosedError,
    CorruptError,
    EnvironmentFault,
    InputError,
    LockedError,
    ReadOnlyError,
    RoleError,
    UnknownColumnError,
)
from ringmap.storage.disk.files import FileHandle
from ringmap.storage.read.handle import Handle
from ringmap.storage.sidecars.mutable import MutableValues
from tests.buffers.processes import Child
from tests.buffers.steps import MUTABLE
from tests.disks import FaultyDisk, FullDisk
from tests.tiers import few


def latent(values):
    return np.repeat(np.asarray(values, np.float32)[..., None], 3, -1)


@dataclass
class Row:
    """A step as a learner must read it. `given`: the columns that the learner updated."""

    episode: int
    step: int
    latent: float = 0.0
    label: int = 0
    given: set = field(default_factory=set)


class Fleet:
    """Rings with their writers, and the model: id -> `Row`."""

    def __init__(self, folder, **options):
        self.folder, self.options = folder, options
        self.writers, self.numbers, self.model, self.next = {}, {}, {}, 0

    def ring(self, name, max_steps=40, schema=MUTABLE):
        options = {"sync_every_s": 0, "spare_rows": 20, "reward_at": "same", **self.options}
        made = ReplayBuffer(max_steps, path=self.folder / name, schema=schema, **options)
        self.writers[name], self.numbers[name] = made, len(self.numbers)
        self.write(name, 8)

    def ids(self, name):
        """Return the ids of the steps that a ring holds, oldest first."""
        return sorted(one for one in self.model if apart(one)[0] == self.numbers[name])

    def write(self, name, length, values=False):
        writer, number, steps = self.writers[name], self.next, np.arange(length)
        head = int(writer.engine.source.head)
        zeros = {"latent": latent(0 * steps), "label": 0 * steps}
        episode = {"obs": np.stack([np.full(length, number), steps], 1), **zeros}
        if values:
            episode |= {"latent": latent(steps + 0.5), "label": steps}
        writer.write_episode(episode)
        for step in range(length):
            given = (step + 0.5, step) if values else ()
            self.model[int(joined(self.numbers[name], head + step))] = Row(number, step, *given)
        self.next += 1
        for one in self.ids(name)[: -writer.num_steps_stored]:
            del self.model[one]

    def clear(self, name):
        self.writers[name].clear()
        for one in self.ids(name):
            del self.model[one]

    def open(self, **options):
        given = {"history_len": 3, "seed": 0, "wait_s": 0, "state": self.folder.parent / "learner"}
        return ShardedReplayBuffer(self.folder, **{**given, **options})

    def check(self, buf):
        """Compare what all ways of reading return with the model."""
        buf.refresh()
        rows = {(row.episode, row.step): row for row in self.model.values()}

        def compare(batch):
            steps = np.asarray(batch["obs"]).reshape(-1, 2).tolist()
            expected = [rows[tuple(one)] for one in steps]
            found = np.asarray(batch["latent"]).reshape(-1, 3)
            assert found.tolist() == latent([row.latent for row in expected]).tolist()
            assert np.ravel(batch["label"]).tolist() == [row.label for row in expected]

        for number in range(buf.num_episodes):
            compare(buf.load_episode(number))
        for episode in buf.episodes():
            compare(episode)
        compare(buf.sample(40))
        compare(buf.sample(40, window={n: Window(range(-1, 2), pad="edge") for n in MUTABLE}))
        compare(buf[[*range(len(buf))]])
        compare(next(iter(buf.batches(16, steps=1))))
        view = buf.view()
        compare(view[[*range(len(view))]])
        compare(view.load_episode(0))
        batch = buf.sample(20, window=Sequences(4))
        compare(batch)
        named = [self.model[one] for one in batch["step_id"].ravel().tolist()]
        assert [[row.episode, row.step] for row in named] == batch["obs"].reshape(-1, 2).tolist()

    def update(self, buf, ids, number, *columns):
        """Update steps, here and in the model."""
        ids = [*ids]
        values = {"latent": latent(np.full(len(ids), number)), "label": np.full(len(ids), number)}
        here = [self.model[one] for one in ids if one in self.model]
        assert buf.update(ids, {column: values[column] for column in columns}) == len(here)
        for row in here:
            row.given |= set(columns)
            for column in columns:
                setattr(row, column, number)

    def close(self):
        for writer in self.writers.values():
            writer.close()


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path / "fleet")
    for number, name in enumerate("abc"):
        made.ring(name, 40 + 10 * number)
    with contextlib.closing(made):
        yield made


BOTH = "latent", "label"


# -- reads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", few(["map", "pread"]))
def test_every_read_has_the_values_of_a_plain_dict(fleet, reads):
    rng, known, number = random.Random(1), set(), 100
    buf = fleet.open(reads=reads)
    for turn in range(150):
        name = rng.choice("abc")
        kind = rng.choices(["write", "update", "own", "flush", "clear", "again"], [8, 16, 3, 2, 0.5, 1])[0]
        number += 1
        if kind == "write":
            fleet.write(name, rng.randint(4, 12), rng.random() < 0.5)
        elif kind == "update":  # also steps that were evicted long ago
            known |= set(fleet.model)
            ids = rng.choices(sorted(known), k=rng.randint(1, 9))
            fleet.update(buf, ids, number, *rng.choice([BOTH[:1], BOTH[1:], BOTH]))
        elif kind == "own" and (ids := fleet.ids(name)):  # where the learner gave none, it is seen
            fleet.writers[name].update([apart(ids[0])[1]], {"label": [-number]})
            row = fleet.model[ids[0]]
            row.label = row.label if "label" in row.given else -number
        elif kind == "flush":
            buf.flush()
        elif kind == "clear":
            fleet.clear(name)
        elif kind == "again":
            buf.close()
            buf = fleet.open(reads=reads)
        if turn % 6 == 5 and len(fleet.model) > 9:
            fleet.check(buf)
    assert buf.check() == []
    with fleet.open(state=None) as other:  # the rings have none of it
        assert all(np.max(episode["label"]) < 100 for episode in other.episodes())
    assert any(row.label > 100 for row in fleet.model.values())
    buf.close()


def test_a_column_that_was_not_given_is_the_ring_s_own(fleet):
    with fleet.open() as buf:
        one = fleet.ids("b")[3]
        fleet.update(buf, [one], 7, "latent")
        fleet.writers["b"].update([apart(one)[1]], {"label": [5], "latent": latent([9.0])})
        fleet.model[one].label = 5
        fleet.check(buf)


def test_workers_of_a_loader_have_the_newest_values(fleet):
    torch = pytest.importorskip("torch")
    with fleet.open() as buf:
        loader = torch.utils.data.DataLoader(buf.view(), batch_size=8, num_workers=1, persistent_workers=True)
        for number in (0, 1, 2):  # the worker began before there was a file
            if number:
                fleet.update(buf, fleet.model, number, *BOTH)
            batches = [*loader]
            for column in BOTH:
                seen = torch.cat([batch[column].flatten() for batch in batches])
                assert seen.unique().tolist() == [number]


def test_copies_see_later_updates_and_write_none(fleet):
    with fleet.open() as buf:
        copy = pickle.loads(pickle.dumps(buf))
        fleet.check(copy)
        for number in (1, 2):
            fleet.update(buf, fleet.ids("a"), number, *BOTH)
            fleet.check(copy)
        with pytest.raises(ReadOnlyError, match="this is a copy in another process"):
            copy.update(fleet.ids("a"), {"label": np.zeros(8)})
        copy.close()
        pid = os.fork()
        if not pid:
            ok = 1
            with contextlib.suppress(BaseException):
                fleet.check(buf)
                with pytest.raises(ReadOnlyError, match="copy"):
                    buf.update([0], {"label": [1]})
                buf.close()
                ok = 0
            os._exit(ok)
        assert os.waitpid(pid, 0)[1] == 0
        fleet.update(buf, fleet.ids("a"), 3, *BOTH)
        fleet.check(buf)


def test_rings_join_leave_and_are_removed(fleet):
    buf = fleet.open()
    fleet.update(buf, fleet.model, 3, *BOTH)
    folder = fleet.folder.parent / "learner"
    assert len([*folder.glob("*/mutable.bin")]) == 3
    fleet.ring("d")
    buf.refresh()
    assert len([*folder.glob("*/mutable.bin")]) == 3
    fleet.update(buf, fleet.model, 4, "latent")
    assert len([*folder.glob("*/mutable.bin")]) == 4
    fleet.writers["a"].close()
    of_a, aside = fleet.ids("a"), fleet.folder.parent / "aside"
    os.rename(fleet.folder / "a", aside)
    buf.refresh()
    assert buf.update(of_a, {"label": np.zeros(len(of_a))}) == 0
    os.rename(aside, fleet.folder / "a")
    buf.engine.rings.problems.clear()
    fleet.check(buf)  # it is back, with its values
    fleet.update(buf, of_a, 5, "label")
    fleet.check(buf)
    buf.retire("a")
    assert len([*folder.glob("*/mutable.bin")]) == 3
    assert buf.update(of_a, {"label": np.zeros(len(of_a))}) == 0
    for one in of_a:
        del fleet.model[one]
    fleet.check(buf)
    assert buf.check() == []
    buf.close()


# -- the learner's directory ----------------------------------------------------------------


def test_values_survive_a_kill_of_the_learner(fleet):
    def learner(child):
        buf = fleet.open()
        fleet.update(buf, fleet.model, 6, *BOTH)
        child.say("done")
        signal.pause()

    child = Child(learner)
    try:
        assert child.hear() == "done"
    finally:
        child.kill()
    for row in fleet.model.values():
        row.latent = row.label = 6
    fleet.write("b", 9)  # while no learner is there
    with fleet.open() as buf:
        fleet.check(buf)
        assert buf.check() == []
    with pytest.raises(AssertionError), fleet.open(state=None) as buf:  # the control
        fleet.check(buf)


def test_values_of_other_rings_are_kept_apart(fleet, tmp_path):
    other = Fleet(tmp_path / "other")
    other.ring("a")
    with fleet.open() as buf:
        fleet.update(buf, fleet.model, 5, *BOTH)
    with other.open() as buf:  # of the same directory
        other.check(buf)
        other.update(buf, other.model, 6, *BOTH)
        other.check(buf)
    with fleet.open() as buf:
        fleet.check(buf)
    other.close()


def test_a_file_of_another_ring_or_a_damaged_one_is_named(fleet):
    with fleet.open() as buf:
        fleet.update(buf, fleet.model, 5, *BOTH)
        first, second, _ = (ring.uuid.hex() for ring in buf.engine.each())
    folder = fleet.folder.parent / "learner"
    data = (folder / first / "mutable.bin").read_bytes()
    size = (folder / second / "mutable.bin").stat().st_size
    (folder / second / "mutable.bin").write_bytes(data.ljust(size, b"\0"))
    with fleet.open(on_bad="skip") as buf:
        with pytest.warns(RuntimeWarning, match="goes on without .*mutable.bin: neither header"):
            buf.sample(100)
        problems = {shard.name: shard.problem for shard in buf.shards}
        assert problems["a"] is None
        assert "mutable.bin: neither header is valid" in problems["b"]
        assert "remove this file, which is a learner's own" in problems["b"]
        os.remove(folder / second / "mutable.bin")
        for one in fleet.ids("b"):
            fleet.model[one].latent = fleet.model[one].label = 0
        buf.engine.rings.problems.clear()
        with pytest.warns(RuntimeWarning, match="reads .*/b again"):
            fleet.check(buf)


def test_check_finds_a_damaged_value(fleet):
    with fleet.open() as buf:
        fleet.update(buf, fleet.model, 5, *BOTH)
        path = next((fleet.folder.parent / "learner").glob("*/mutable.bin"))
    at = path.read_bytes().rindex(latent([5]).tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"?")
    with fleet.open() as buf:
        (finding,) = buf.check()
        assert finding.file == str(path)
        assert "the value of slot" in finding.what
        with pytest.raises(CorruptError, match="remove this file"):
            for number in range(buf.num_episodes):
                buf.load_episode(number)


# -- what bad input gets --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "values", "error", "message"),
    [
        ([0], {"obs": [[1, 2]]}, InputError, "column 'obs' is not mutable"),
        ([0], {"state": [1]}, UnknownColumnError, "no column 'state'"),
        ([0], {"latent": np.zeros((1, 4))}, InputError, r"shape \(1, 4\), expected \(1, 3\)"),
        ([0], {"label": [1.5]}, InputError, "column 'label'.*does not fit"),
        ([0], {}, InputError, "expected column -> values"),
        ([-1], {"label": [1]}, InputError, "id -1 is of another buffer: no ring has the number -1"),
        ([0, 9 << 48], {"label": [1, 2]}, InputError, "no ring has the number 9"),
        ([0, (1 << 48) + 50], {"label": [1, 2]}, InputError, "the ring b has positions up to"),
        ([0.5], {"label": [1]}, InputError, "array of integers"),
    ],
)
def test_bad_input_changes_nothing(fleet, ids, values, error, message):
    with fleet.open() as buf:
        fleet.update(buf, fleet.model, 5, *BOTH)
        with pytest.raises(error, match=message):
            buf.update(ids, values)
        fleet.check(buf)


def test_what_is_refused(fleet, tmp_path):
    with (
        fleet.open(state=None) as buf,
        pytest.raises(InputError, match="the learner's own directory.*open the buffer with state=DIR"),
    ):
        buf.update([0], {"label": [1]})
    with pytest.raises(InputError, match="durability must be 'process' or 'power', got 'full'"):
        fleet.open(durability="full")
    with fleet.open() as buf:
        with pytest.raises(LockedError, match="give each learner its own"):
            fleet.open()
        plain = {**MUTABLE, "label": ((), "<i4")}
        fleet.ring("plain", schema=plain)
        buf.refresh()
        ids = [fleet.ids("a")[0], fleet.ids("plain")[0]]
        with pytest.raises(InputError, match="column 'label' is not mutable in the ring plain"):
            buf.update(ids, {"label": [1, 1]})
        fleet.check(buf)
        fleet.update(buf, ids, 4, "latent")
        fleet.check(buf)
    with pytest.raises(ClosedError):
        buf.update([0], {"label": [1]})
    ring = TransitionReplayBuffer(100, obs_shape=(3,), path=tmp_path / "steps" / "0", device=None)
    for t in range(5):
        ring.add(np.full(3, t), 0, 1.0, np.full(3, t + 1), t == 4)
    ring.close()
    with (
        ShardedReplayBuffer(tmp_path / "steps", state=tmp_path / "other") as buf,
        pytest.raises(InputError, match="hold transitions, whose columns are not mutable"),
    ):
        buf.update([0], {"rewards": [1]})


def test_an_update_in_the_middle_of_another_is_refused(fleet, monkeypatch):
    with fleet.open() as buf:
        whole = MutableValues.update

        def strike(*args):
            monkeypatch.setattr(MutableValues, "update", whole)
            with pytest.raises(RoleError, match="in the middle of another call"):
                fleet.update(buf, fleet.model, 9, *BOTH)
            return whole(*args)

        monkeypatch.setattr(MutableValues, "update", strike)
        fleet.update(buf, fleet.model, 5, *BOTH)
        fleet.check(buf)


def test_a_full_disk(fleet, monkeypatch):
    disk = FullDisk("write", "create", where="learner")
    monkeypatch.setattr("ringmap.buffers.engine.DISK", disk)
    with fleet.open() as buf:
        disk.full = True
        with pytest.raises(EnvironmentFault, match=r"ShardedReplayBuffer.update: No space left"):
            buf.update(fleet.ids("a"), {"label": np.zeros(8)})
        fleet.check(buf)
        disk.full = False
        fleet.update(buf, fleet.model, 5, *BOTH)
        disk.full = True
        with pytest.raises(EnvironmentFault, match="none of this one"):
            buf.update(fleet.ids("a"), {"label": np.zeros(8)})
        disk.full = False
        fleet.check(buf)
        assert buf.check() == []


def test_after_a_failed_sync_the_next_one_writes_all_again(fleet, monkeypatch):
    disk, written = FaultyDisk(), []
    monkeypatch.setattr("ringmap.buffers.engine.DISK", disk)
    with fleet.open(durability="power") as buf:
        fleet.update(buf, fleet.model, 5, *BOTH)
        disk.fail(1, OSError(errno.EIO, "planted"), only="sync")
        with pytest.raises(EnvironmentFault, match="planted"):
            fleet.update(buf, fleet.ids("a"), 6, *BOTH)
        for one in fleet.ids("a"):  # as the disk has it, or not
            fleet.model[one].latent = fleet.model[one].label = 6
        fleet.check(buf)
        disk.before = lambda change, path, *_: written.append((change, path))
        buf.flush()
        fleet.check(buf)
        changes = [change for change, path in written if fleet_file(buf, "a") == path]
        assert changes.count("write") > 2 * len(fleet.ids("a"))
        assert changes[-1] == "sync"
        assert buf.check() == []


def fleet_file(buf, name):
    ring = next(ring for ring in buf.engine.each() if ring.name == name)
    return os.path.join(buf.engine.state.path, ring.uuid.hex(), "mutable.bin")


@pytest.mark.parametrize("commit_every", [None, 20])
def test_values_of_sequences_go_to_their_own_steps(commit_every, tmp_path):
    schema = {"obs": ((3,), "<i8"), "latent": Column((3,), "<f4", mutable=True)}
    rings = [
        ReplayBuffer(1200, path=tmp_path / "fleet" / name, schema=schema, spare_rows=100, sync_every_s=0)
        for name in "ab"
    ]
    for number, ring in enumerate(rings):
        lanes = [ring.begin_episode(commit_every=commit_every) for _ in range(3)]
        for t in range(200):
            for lane, episode in enumerate(lanes):
                episode.append({"obs": [number, lane, t]})
        for episode in lanes:
            episode.finish()
    with ShardedReplayBuffer(tmp_path / "fleet", state=tmp_path / "learner", seed=0) as buf:
        for _ in range(5):
            batch = buf.sample(64, window=Sequences(12, burn_in=4))
            assert (batch["step_id"][:, 0] == batch.ids).all()
            assert buf.update(batch["step_id"], {"latent": batch["obs"] + 1}) == 64 * 12
        stored = [buf.load_episode(i) for i in range(buf.num_episodes)]
    obs, latent = (np.concatenate([one[name] for one in stored]) for name in ("obs", "latent"))
    known = latent.any(1)
    assert known.sum() > 500
    assert (latent[known] == obs[known] + 1).all()
    for ring in rings:
        ring.close()


# -- beside writers -------------------------------------------------------------------------

READER = """
import pickle, sys
import numpy as np

path, reads, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open(path, "rb") as file:
    buf = pickle.load(file)
done = torn = old = shown = 0
newest = {}
while done < reads:
    batch = buf.sample(64)
    big, obs = batch["big"][:, 0], batch["obs"][:, 0]
    torn += int((big != big[:, :1]).any(axis=1).sum())
    torn += int(((big[:, 0] != 0) & (big[:, 0] // 10**6 != obs)).sum())
    for row, value in zip(obs.tolist(), big[:, 0].tolist()):
        old += value < newest.get(row, 0)
        newest[row] = max(value, newest.get(row, 0))
        shown += value > 0
    done += len(obs)
print(done, torn, old, shown)
"""


def read_beside(path, reads, until_s=600.0):
    """Let two processes read while this one updates, and rings evict, flat out; return their `(reads, torn, older than
    before, shown)`."""
    schema = {"obs": ((), "<i8"), "big": Column((512,), "<i8", mutable=True)}
    rings = [
        ReplayBuffer(300, path=path / "fleet" / name, schema=schema, sync_every_s=0, spare_rows=100) for name in "ab"
    ]
    number = 0

    def write(ring):
        nonlocal number
        ring.write_episode({"obs": np.arange(number, number + 100)})
        number += 100

    for ring in rings * 3:
        write(ring)
    buf = ShardedReplayBuffer(path / "fleet", state=path / "learner", seed=0)
    (path / "buf").write_bytes(pickle.dumps(buf))
    command = [sys.executable, "-c", READER, str(path / "buf"), str(reads)]
    readers = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in (1, 2)]
    count, end, made = 0, time.monotonic() + until_s, 0
    while any(reader.poll() is None for reader in readers) and time.monotonic() < end:
        count += 1
        if count % 100 == 0:
            write(rings[count // 100 % 2])
        batch = buf.sample(16)
        ids, first = np.unique(batch.ids, return_index=True)
        value = batch["obs"][first, 0] * 10**6 + count
        made += buf.update(ids, {"big": np.repeat(value[:, None], 512, 1)})
    assert made > count
    found = [tuple(map(int, reader.communicate()[0].split())) for reader in readers]
    buf.close()
    for ring in rings:
        ring.close()
    return found


def test_no_torn_value_beside_a_flat_out_learner(tmp_path):
    for done, torn, old, shown in read_beside(tmp_path, 3000):
        assert done >= 3000
        assert (torn, old) == (0, 0)
        assert shown > 1000


@pytest.mark.campaign
def test_a_million_reads_beside_a_flat_out_learner(tmp_path):
    for done, torn, old, _ in read_beside(tmp_path, 500_000):
        assert done >= 500_000
        assert (torn, old) == (0, 0)


@pytest.mark.parametrize("checked", [True, False], ids=["whole", "control"])
def test_a_value_that_is_being_written_is_the_one_before(fleet, monkeypatch, checked):
    """Without the checksum it is torn."""
    if not checked:
        monkeypatch.setattr(MutableValues, "_are_whole", lambda _, records: np.ones(len(records), bool))
    with fleet.open() as buf, pickle.loads(pickle.dumps(buf)) as copy:
        one, seen, write = fleet.ids("b")[2], [], FileHandle.write_each
        for number in (1, 2):
            fleet.update(buf, [one], number, *BOTH)
        number = [*range(len(copy))][9]

        def half(self, pieces, offsets):
            write(self, [piece[:50] for piece in pieces], offsets)
            seen.append(copy[7]["latent"].tolist())  # steps 1 to 3 of ring "b"
            write(self, pieces, offsets)

        monkeypatch.setattr(FileHandle, "write_each", half)
        fleet.update(buf, [one], 3, *BOTH)
        assert (seen == [latent([0, 2, 0]).tolist()]) == checked, seen


def test_control_of_the_layer(fleet, monkeypatch):
    """Where rings do not look for the learner's values, the model is not met."""
    monkeypatch.setattr(Handle, "lay_over", lambda self, over: over(self) and None)
    with fleet.open() as buf:
        fleet.update(buf, fleet.model, 5, *BOTH)
        with pytest.raises(AssertionError):
            fleet.check(buf)
