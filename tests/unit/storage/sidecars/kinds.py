"""The kinds of values beside the columns, behind one set of methods: priorities, next observations, labels, newest
values.

What is given carries a tag, so that a value tells when it was given, and to what.
"""

import numpy as np

import ringmap
from ringmap import DistillationBuffer, ReplayBuffer, TransitionReplayBuffer
from ringmap.samplers import PrioritizedSampler


class Priorities:
    files = ("priorities.bin",)
    is_needed = False
    """Whether a buffer without it, or with another buffer's, is refused until it is repaired."""

    @staticmethod
    def empty():
        return dict.fromkeys(range(40), 1.0)

    @staticmethod
    def make(path):
        buf = ReplayBuffer(100, path=path, sampler=PrioritizedSampler(rng=0), sync_every_s=0)
        buf.write_episode({"x": np.arange(40)})
        return buf

    @staticmethod
    def open(path, mode="r+"):
        return ReplayBuffer.open(path, mode, sampler=PrioritizedSampler(rng=0))

    @staticmethod
    def give(buf, tag):
        buf.sample(1)
        buf.update_priorities(np.arange(40), tag + np.arange(40) / 64)

    @staticmethod
    def expected(tag):
        return {row: tag + row / 64 for row in range(40)}

    @staticmethod
    def values(buf):
        buf.sample(1)
        return dict(enumerate(buf.sampler.state_dict()["values"].tolist()))

    @staticmethod
    def copy(buf, path):
        buf.snapshot(path)

    @staticmethod
    def rings(path):
        return [path]


class NextObservations(Priorities):
    files = ("successors.bin",)

    @staticmethod
    def empty():
        return {}

    @classmethod
    def make(cls, path):
        buf = TransitionReplayBuffer(50, (2,), path=path, device=None, obs_dtype=np.int32, sync_every_s=0, seed=0)
        for tag in (-2, -1):
            cls.give(buf, tag)
        return buf

    @staticmethod
    def open(path, mode="r+"):
        return TransitionReplayBuffer.open(path, mode, device=None, seed=0)

    @staticmethod
    def give(buf, tag):
        """Store a call that goes on from no other, so that what it leads to is no row."""
        obs = np.full((3, 2), 1000 + tag, np.int32)
        lanes = np.arange(3)
        after = np.stack([np.full(3, tag), lanes], 1).astype(np.int32)
        buf.add(obs, lanes, np.full(3, tag, np.float32), after, np.zeros(3, bool))
        buf.engine.commit_pending("a test")

    @staticmethod
    def expected(tag):
        return {lane: [tag, lane] for lane in range(3)}

    @staticmethod
    def values(buf):
        """Return what the newest call led to, by lane; nothing of it where that was lost."""
        newest = int(buf._ring.buffer.get_col_data("rewards")[-1])
        found = {}
        for _ in range(20):
            batch = buf.sample(len(buf) // 2)
            of = batch["rewards"] == newest
            after = batch["next_observations"][of].tolist()
            found |= dict(zip(batch["actions"][of].tolist(), after, strict=True))
        return found

    @staticmethod
    def copy(buf, path):
        buf.save(path)


class Newest(Priorities):
    files = ("mutable.bin",)
    is_needed = True

    @staticmethod
    def empty():
        return {row: row / 2 for row in range(40)}

    @staticmethod
    def make(path):
        schema = {"x": ((), "<i8"), "value": ringmap.Column((20,), "<f8", mutable=True)}
        buf = ReplayBuffer(100, path=path, schema=schema, sync_every_s=0)
        value = np.repeat(np.arange(40)[:, None] / 2, 20, 1)
        buf.write_episode({"x": np.arange(40), "value": value})
        return buf

    @staticmethod
    def open(path, mode="r+"):
        return ReplayBuffer.open(path, mode)

    @staticmethod
    def give(buf, tag):
        value = np.repeat(tag + np.arange(40)[:, None] / 64, 20, 1)
        assert buf.update(np.arange(40), {"value": value}) == 40

    @staticmethod
    def values(buf):
        value = buf.load_episode(0)["value"]
        assert (value == value[:, :1]).all()
        return dict(enumerate(value[:, 0].tolist()))


class Labels(Newest):
    @staticmethod
    def empty():
        return {row: row * 10 for row in range(12)}

    @staticmethod
    def make(path):
        buf = DistillationBuffer(100, path=path, seed=0, sync_every_s=0)
        for row in range(12):
            buf.add(np.full((1, 1), row, np.float32), np.array([row * 10]), dones=[row % 4 == 3])
        return buf

    @staticmethod
    def open(path, mode="r+"):
        return DistillationBuffer.open(path, mode)

    @staticmethod
    def give(buf, tag):
        buf.relabel(None, lambda batch: batch["ids"] + 100 * tag)

    @staticmethod
    def expected(tag):
        return {row: row + 100 * tag for row in range(12)}

    @staticmethod
    def values(buf):
        batch = buf.rows(np.concatenate(buf.episodes()))
        rows = np.asarray(batch["student_observations"])[:, 0].astype(int).tolist()
        return dict(zip(rows, batch["teacher_actions"].tolist(), strict=True))

    @staticmethod
    def copy(buf, path):
        buf.save(path)


class OfPeople(Newest):
    """Marks, one for each of four episodes: the tag is in the note, the episode's number among the flags."""

    files = ("marks.json",)
    is_needed = False

    @staticmethod
    def empty():
        return {}

    @staticmethod
    def make(path):
        buf = ReplayBuffer(100, path=path, sync_every_s=0)
        for number in range(4):
            buf.write_episode({"x": np.full(10, number)})
        return buf

    @staticmethod
    def give(buf, tag):
        for number in range(4):
            ringmap.Marks(buf).set(10 * number, flags=f"n{number}", note=str(tag))

    @staticmethod
    def expected(tag):
        return {10 * number: (f"n{number}", str(tag)) for number in range(4)}

    @staticmethod
    def values(buf):
        return {at: (*mark.flags, mark.note) for at, mark in ringmap.Marks(buf).all().items()}


KINDS = {
    "priorities": Priorities,
    "next observations": NextObservations,
    "labels": Labels,
    "newest values": Newest,
    "marks": OfPeople,
}


def check(kind, path):
    return [finding for ring in kind.rings(path) for finding in ringmap.check(ring)]


def files_of(kind, path):
    """Return the files that hold the values."""
    return [path / name for name in kind.files]
