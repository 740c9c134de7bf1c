"""One thread adds and relabels while another reads: each label proves whose it is, and how new.

A row is its number; a label is the number of its row and of its round, in one int64.
"""

import contextlib
import time

import numpy as np
import pytest

from ringmap.data import DistillationBuffer
from ringmap.errors import InputError, LappedError
from ringmap.storage.sidecars.values import MutableValues
from tests.busy import busy
from tests.disks import ram_folder
from tests.unit.buffers.processes import Child

MOST = 1 << 20
ACTORS = 4


class Proof:
    """Adds and relabels so that every label proves itself.

    Attributes:
        relabelled: row -> the newest relabelling that returned.
    """

    def __init__(self, path=None, capacity=64, episode=8):
        self.buf = DistillationBuffer(capacity, retention="fifo", seed=0, path=path, sync_every_s=0)
        self.steps, self.episode = 0, episode
        self.buf.start_round()
        self.relabelled = {}
        for _ in range(2 * capacity // ACTORS):
            self.add()
        self.relabel()

    @property
    def turn(self):
        """The round: each relabelling has its own."""
        return self.buf.round

    def add(self):
        numbers = np.arange(ACTORS) + ACTORS * self.steps
        self.steps += 1
        self.buf.add(
            numbers[:, None], numbers * MOST + self.turn, dones=np.full(ACTORS, self.steps % self.episode == 0)
        )

    def relabel(self, episodes=None):
        """Label the rows of episodes that have ended again, in a round of its own."""
        self.buf.start_round()
        episodes = self.buf.episodes() if episodes is None else episodes
        for ids in episodes:
            if (ids[-1] // ACTORS + 1) % self.episode:
                continue
            with contextlib.suppress(InputError):
                self.buf.relabel([ids], lambda b: b["student_observations"][:, 0] * MOST + self.turn)
                self.relabelled.update(dict.fromkeys(ids.tolist(), self.turn))


def of_others(batch):
    """Return how many labels are those of another row."""
    return int((batch["teacher_actions"] // MOST != batch["student_observations"][:, 0]).sum())


class Reader:
    """Reads batches and episodes, and counts what is wrong."""

    def __init__(self, buf, relabelled=None):
        self.buf, self.relabelled = buf, {} if relabelled is None else relabelled
        self.seen = {}
        self.wrong = {"of another row": 0, "older than before": 0, "of another round": 0}

    def check(self, batch):
        self.wrong["of another row"] += of_others(batch)
        self.wrong["of another round"] += int((batch["teacher_actions"] % MOST != batch["label_round"]).sum())
        turns = (batch["teacher_actions"] % MOST).tolist()
        drawn = list(zip(batch["ids"].tolist(), turns, strict=True))
        # A row may come twice in a batch, and newer where it took the place of one that was evicted.
        self.wrong["older than before"] += sum(turn < self.seen.get(row, 0) for row, turn in drawn)
        for row, turn in drawn:
            self.seen[row] = max(turn, self.seen.get(row, 0))

    def look(self):
        with contextlib.suppress(LappedError):
            known = dict(self.relabelled)
            batch = self.buf.batch(16)
            self.check(batch)
            turns = (batch["teacher_actions"] % MOST).tolist()
            for row, turn in zip(batch["ids"].tolist(), turns, strict=True):
                self.wrong["older than before"] += turn < known.get(row, 0)
        episodes = [ids for ids in self.buf.episodes() if len(ids) > 1]
        if not episodes:
            return
        for ids in (episodes[0], episodes[-1], episodes[len(episodes) // 2]):
            with contextlib.suppress(InputError, LappedError):
                self.check(self.buf.rows(ids))


def working(proof, adds=2):
    """Let another thread add and relabel without a pause."""

    def work():
        for _ in range(adds):
            proof.add()
        proof.relabel(proof.buf.episodes()[:: 2 + proof.turn % 2])

    return busy(work)


def race(proof, looks):
    reader = Reader(proof.buf, proof.relabelled)
    with working(proof):
        for _ in range(looks):
            reader.look()
    proof.buf.close()
    return reader.wrong


NONE = {"of another row": 0, "older than before": 0, "of another round": 0}


@pytest.fixture
def fast():
    with ram_folder() as folder:
        yield folder


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_labels_that_another_thread_writes(fast, where):
    assert race(Proof(None if where == "memory" else fast / "buf"), 40) == NONE


@pytest.mark.campaign
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_labels_that_another_thread_writes_for_long(fast, where):
    assert race(Proof(None if where == "memory" else fast / "buf"), 5_000) == NONE


def test_labels_in_another_process_whose_threads_refresh(fast):
    proof = Proof(fast / "buf")

    def read(_):
        buf = DistillationBuffer.open(fast / "buf")
        reader = Reader(buf)

        def refresh():
            with contextlib.suppress(LappedError):
                buf.refresh()

        with busy(refresh):
            for _ in range(40):
                reader.look()
        return reader.wrong

    child = Child(read)
    with working(proof):
        assert child.result() == NONE
    proof.buf.close()


def test_a_label_counts_only_while_its_row_is_there(monkeypatch):
    """Rows come and are relabelled between the copy of rows and that of their labels: none is handed out as sound."""
    proof = Proof()
    real = MutableValues.put_into

    def late(values, taken, positions):
        monkeypatch.setattr(MutableValues, "put_into", real)
        for _ in range(80):
            proof.add()
        proof.relabel()
        return real(values, taken, positions)

    monkeypatch.setattr(MutableValues, "put_into", late)
    ids = proof.buf._ring.ids()
    _, held = proof.buf._read(ids)
    assert not held.any()


def test_labels_of_one_look_and_rounds_of_another_are_caught(fast, monkeypatch):
    """A control: mutable columns that are looked up one after the other."""
    real = MutableValues.put_into

    def apart(values, taken, positions):
        for name, each in taken.items():
            real(values, {name: each}, positions)
            time.sleep(1e-3)

    monkeypatch.setattr(MutableValues, "put_into", apart)
    assert race(Proof(fast / "buf"), 40)["of another round"]
