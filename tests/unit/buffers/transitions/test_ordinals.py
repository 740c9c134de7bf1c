"""The ordinals of transitions' episodes: an episode has one for ever, so that it keeps its side of a split; no other
episode gets it."""

import os
import pickle
import shutil

import numpy as np
import pytest

import ringmap
from ringmap import TransitionReplayBuffer
from ringmap.data import convert, load_dataset
from ringmap.errors import CorruptError
from ringmap.storage.commit.commit import numbered
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import Paths
from ringmap.storage.inspect.describe import facts_of
from ringmap.storage.records.table import MANY, PART, EpisodeTable
from tests.unit.buffers.transitions.test_named_lanes import Envs

CAPACITY = 60


class Known:
    """What was seen of the episodes: each observation has a number of its own, and is of one episode."""

    def __init__(self):
        self.ordinal_of, self.episode_of, self.sides = {}, {}, {}
        self.count = 0

    def look(self, source):
        dataset = source if hasattr(source, "lengths") else source.episode_dataset()
        ordinals = dataset.origins()[1].tolist()
        assert len({*ordinals}) == len(ordinals), "two episodes have one ordinal"
        self.count += len(ordinals)
        seen = [self.numbers(dataset, i) for i in range(len(ordinals))]
        for numbers, ordinal in zip(seen, ordinals, strict=True):
            assert {self.ordinal_of.setdefault(n, ordinal) for n in numbers} == {ordinal}
            known = self.episode_of.setdefault(ordinal, {*numbers})
            assert known & {*numbers}, "an ordinal was given twice"
            known |= {*numbers}
        if len(ordinals) > 8:
            for name, side in zip("ab", dataset.split(0.5, seed=0), strict=True):
                for i in range(len(side.lengths)):
                    for number in self.numbers(side, i):
                        assert self.sides.setdefault(number, name) == name, "an episode changed sides"
        return ordinals

    @staticmethod
    def numbers(dataset, i):
        obs = np.asarray(dataset.load_episode(i)["obs"])
        return obs.reshape(len(obs), -1)[:, -1].astype(int).tolist()


class Ring:
    """A ring of three environments that is opened again, and killed."""

    def __init__(self, path, size=None, named=False):
        shape = (2,) if size is None else (size, 2)
        self.envs, self.named, self.path = Envs(1, 3, size), named, path
        self.buf = TransitionReplayBuffer(
            CAPACITY, shape, device=None, path=path, frame_stack=size, seed=5, sync_every_s=0
        )

    def add(self, calls):
        for _ in range(calls):
            names = self.envs.rng.permutation(3)[:2].tolist() if self.named else [0, 1, 2]
            obs, actions, rewards, after, dones, truncated = self.envs.step(names)
            lane = {"lane": names} if self.named else {}
            self.buf.add(obs, actions, rewards, after, dones, truncated=truncated, **lane)

    def open(self):
        self.buf = TransitionReplayBuffer.open(self.path, "r+", device=None)


def lives(ring, known):
    """Fill it, look, close or kill it, again and again, until all that was there was evicted, and more."""
    for turn in range(8):
        ring.add(17 if turn % 3 else 5)
        known.look(ring.buf)
        ring.add(2)  # rows of an open group
        if turn % 3 == 1:
            ring.buf.close()
            ring.open()
        elif turn % 3 == 2:
            ring.buf.engine.owned.abandon()  # killed
            ring.open()
        elif turn:
            ring.buf.clear()
            ring.envs.now = {name: ring.envs.start() for name in range(3)}
    known.look(ring.buf)


KINDS = {"all lanes": {}, "named": {"named": True}, "stacks": {"size": 3}}


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_keeps_its_side(tmp_path, kind):
    ring, known = Ring(tmp_path / "ring", **KINDS[kind]), Known()
    lives(ring, known)
    here = known.look(ring.buf)
    with TransitionReplayBuffer.open(ring.path, device=None) as reader:
        assert known.look(reader) == here
    assert known.count > 60
    assert ring.buf.check() == []
    ring.buf.close()


def of_this_commit(names, arrays, start, following, before):
    return numbered(names, arrays, start, following, lambda at: np.full(len(at), -1))


def one_a_commit(names, arrays, start, following, before):
    return numbered(names, arrays, start, following, before)[0], 1


@pytest.mark.parametrize("guard", [of_this_commit, one_a_commit])
def test_control(tmp_path, monkeypatch, guard):
    """Rows that go on do not ask the rows before the commit; a record counts one episode."""
    monkeypatch.setattr("ringmap.storage.commit.commit.numbered", guard)
    with pytest.raises(AssertionError):
        lives(Ring(tmp_path / "ring"), Known())


def test_an_episode_ends_where_the_next_one_begins_with_its_last_observation():
    buf = TransitionReplayBuffer(20, (), device=None)
    for t in range(9):
        buf.add(t, 0, 0.0, t + 1, t % 3 == 2)
        if t == 4:
            buf.flush()
    assert buf.episode_dataset().origins()[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("in_ram", [True, False])
def test_copies_know_their_origin(tmp_path, in_ram):
    """Pickled, saved, dumped, converted, joined: each with the lineage and the ordinals of the ring; later episodes get
    others."""
    ring, known = Ring(None if in_ram else tmp_path / "ring"), Known()
    ring.add(50)
    ordinals = known.look(ring.buf)
    lineage = bytes(ring.buf.engine.owned.manifest.lineage)
    ring.buf.save(tmp_path / "saved")
    ring.buf.dump(tmp_path / "dumped.h5", progress=False)
    convert(tmp_path / "saved", tmp_path / "converted.h5", progress=False)
    saved = TransitionReplayBuffer.open(tmp_path / "saved", "r+", device=None)
    sent = pickle.loads(pickle.dumps(ring.buf))
    files = [load_dataset(tmp_path / f"{n}.h5", output="numpy") for n in ("dumped", "converted")]
    for copy in (saved, sent, *files):
        assert known.look(copy) == ordinals
        dataset = copy if copy in files else copy.episode_dataset()
        assert {bytes(one) for one in dataset.origins()[0]} == {lineage}
        assert "_origin" not in dataset.episode_column_names
        assert not any("_origin" in dataset.episode_data(number) for number in range(len(dataset.lengths)))
    assert not any("_origin" in one.get("_episode_data", {}) for one in sent.episodes())
    if in_ram:  # the sent one writes on
        step = ring.envs.step([0, 1, 2])
        for buf in (ring.buf, sent, saved):
            buf.add(*step[:4], np.ones(3, bool))
        assert known.look(ring.buf) == known.look(sent) == known.look(saved) != ordinals
    for buf in (ring.buf, saved, sent):
        buf.close()


def test_the_column_is_hidden(tmp_path):
    buf = TransitionReplayBuffer(20, (), device=None, extra={"mu": ()}, path=tmp_path / "ring")
    buf.add(0.0, 0, 0.0, 1.0, False, extra={"mu": 1})
    named = {
        *buf.schema.names,
        *buf.given_schema.names,
        *buf.sample(1),
        *buf.episode_dataset().load_episode(0),
    }
    buf.close()
    named |= {column.name for column in facts_of(tmp_path / "ring").columns}
    assert not [name for name in named if name.startswith("_")]
    with pytest.raises(ringmap.errors.InputError, match="choose another name"):
        TransitionReplayBuffer(20, (), device=None, extra={"_episode": ()})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_numbers_rows_that_it_can_not_commit():
    ring = Ring(None)
    ring.add(10)
    ring.buf.flush()
    ring.add(10)
    out, into = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(into, pickle.dumps(ring.buf.episode_dataset().origins()[1].tolist()))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(into)
    assert pickle.loads(os.read(out, 1 << 16)) == ring.buf.episode_dataset().origins()[1].tolist()
    os.close(out)
    ring.buf.close()


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """A closed ring of four commits, and what is known of it."""
    ring, known = Ring(tmp_path / "ring"), Known()
    for _ in range(4):
        ring.add(4)
        ring.buf.flush()
    known.look(ring.buf)
    owned = ring.buf.engine.owned
    known.manifest, known.records = (
        owned.manifest,
        {n: owned.table.read(n) for n in range(1, owned.seq + 1)},
    )
    ring.buf.close()
    return ring, known


def table_of(ring, known):
    manifest = known.manifest
    return EpisodeTable.open(Disk(), Paths(str(ring.path)).table, manifest.table_slots, manifest.uuid, True)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("behind", lambda r: r.length + 1, "given before"),
        ("part", lambda r: 0, "counts the ordinals"),
        ("part", lambda r: MANY | PART, "in an unknown way"),
        ("ordinal", lambda r: 0, "given before"),
    ],
)
def test_what_contradicts_the_records_is_found_and_refused(stored, field, value, words):
    ring, known = stored
    table = table_of(ring, known)
    record = max((known.records[n] for n in (2, 3)), key=lambda one: one.behind)
    assert record.behind > 1
    record = record._replace(**{field: value(record)})
    table.write(record)
    table.close()
    found = ringmap.check(ring.path)
    assert any(words in str(finding) for finding in found)
    with pytest.raises(CorruptError, match=f"{words}.* no accident does this"):
        ringmap.repair(ring.path, dry_run=False)
    assert ringmap.check(ring.path) == found


@pytest.mark.parametrize("which", [[4], [3, 4], [1, 2, 3, 4], [2], [1], [3]])
def test_what_lost_records_gave_is_not_given_again(stored, which):
    ring, known = stored
    table = table_of(ring, known)
    for number in which:
        table.zero(number)
    table.close()
    ringmap.repair(ring.path, dry_run=False)
    ring.open()
    ring.add(30)
    known.look(ring.buf)
    assert ringmap.check(ring.path) == []
    ring.buf.close()
    shutil.rmtree(ring.path)
