"""What every kind of buffer does: it is opened, closed, copied, forked, saved, killed and read by others, one as the
other.

Each row is a number, so that what comes back proves itself. What a kind does beside this is in `tests/unit/buffers`.
"""

import contextlib
import os
import pickle
import re
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import ringmap
from ringmap import DistillationBuffer, OfflineToOnlineReplayBuffer, ReplayBuffer, TransitionReplayBuffer
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import ClosedError, ExistsError, InputError, LockedError, NoClipsError, ReadOnlyError
from tests.unit.buffers.processes import Child

CAPACITY = 60


class Episodes:
    """A ring of episodes of ten steps. The other kinds are what differs from it."""

    cls, of_numbers, error = ReplayBuffer, "episodes", NoClipsError

    def make(self, path=None, **options):
        return ReplayBuffer(CAPACITY, path=path, **{"seed": 0, "sync_every_s": 0, **options})

    def open(self, path, mode="r", **options):
        return self.cls.open(path, mode, **{"seed": 0, **options})

    def add(self, buf, first, count=20):
        for start in range(first, first + count, 10):
            buf.write_episode({"x": np.arange(start, start + 10)})

    def held(self, buf):
        return buf.get_col_data("x").tolist() if buf.column_names else []

    def draw(self, buf, size=16):
        return np.ravel(buf.sample(size)["x"]).tolist()

    def save(self, buf, path):
        buf.snapshot(path)

    def writes(self, buf):
        return [lambda: self.add(buf, 500, 10), buf.clear]


class Transitions(Episodes):
    cls, of_numbers, options, error = TransitionReplayBuffer, "transitions", {}, InputError  # of a batch of 16 of none

    def make(self, path=None, **options):
        options = {"seed": 0, "sync_every_s": 0, "device": None, **self.options, **options}
        return TransitionReplayBuffer(CAPACITY, self.seen(0).shape, path=path, **options)

    def open(self, path, mode="r", **options):
        return self.cls.open(path, mode, **{"seed": 0, "device": None, **options})

    def seen(self, number):
        return np.full(1, number, np.float32)

    def add(self, buf, first, count=20):
        for number in range(first, first + count):
            buf.add(self.seen(number), 0, 0.0, self.seen(number + 1), number % 10 == 9)

    def held(self, buf):
        return self.numbers(buf[list(range(len(buf)))]) if len(buf) else []

    def draw(self, buf, size=16):
        return self.numbers(buf.sample(size))

    def numbers(self, batch):
        now, then = (np.asarray(batch[name]) for name in ("observations", "next_observations"))
        assert (then.reshape(len(now), -1)[:, -1] == now.reshape(len(now), -1)[:, -1] + 1).all()
        return now.reshape(len(now), -1)[:, -1].astype(int).tolist()

    def save(self, buf, path):
        buf.save(path)


class Stacks(Transitions):
    options = {"frame_stack": 3}  # noqa: RUF012

    def seen(self, number):
        begin = (number - 1) // 10 * 10 if number and number % 10 == 0 else number // 10 * 10
        return np.maximum(np.arange(number - 2, number + 1), begin)[:, None].astype(np.float32)

    def add(self, buf, first, count=20):
        for number in range(first, first + count):
            now = np.maximum(np.arange(number - 2, number + 1), number // 10 * 10)[:, None]
            buf.add(now, 0, 0.0, np.concatenate([now[1:], [[number + 1]]]), number % 10 == 9)


class Students(Episodes):
    cls, of_numbers = DistillationBuffer, "distillation"

    def make(self, path=None, **options):
        return DistillationBuffer(
            CAPACITY, path=path, **{"seed": 0, "sync_every_s": 0, "retention": "fifo", "beta": 0.5, **options}
        )

    def add(self, buf, first, count=20):
        buf.start_round(policy_version=first)
        numbers = np.arange(first, first + count)
        buf.add(numbers[:, None], numbers, dones=numbers % 10 == 9, actor_id=np.zeros(count, int))

    def held(self, buf):
        if not buf.num_episodes:
            return []
        batch = buf.rows(np.concatenate(buf.episodes()))
        assert batch["round"][-1] == buf.round
        return batch["teacher_actions"].tolist()

    def draw(self, buf, size=16):
        mixed = buf.mix(np.ones(size), np.zeros(size)).tolist()
        orders = [number for batch in buf.epochs(7) for number in batch["teacher_actions"].tolist()]
        return [*buf.batch(size)["teacher_actions"].tolist(), *mixed, *orders]

    def save(self, buf, path):
        buf.save(path)

    def writes(self, buf):
        return [
            lambda: self.add(buf, 500, 10),
            buf.start_round,
            lambda: buf.relabel(None, lambda b: b["teacher_actions"]),
        ]


class Mix(Episodes):
    """Rows beside offline data, which are all -1."""

    cls, of_numbers = OfflineToOnlineReplayBuffer, "rows"

    def offline(self):
        made = ReplayBuffer(20, seed=0)
        made.write_episode({"x": np.full(9, -1)})
        return made

    def make(self, path=None, **options):
        options = {"online_capacity": CAPACITY, "offline_fraction": 0.3, "rounding": "carry", "seed": 0, **options}
        return OfflineToOnlineReplayBuffer(self.offline(), path=path, **options)

    def open(self, path, mode="r+", **options):
        return self.cls.open(path, self.offline(), rounding="carry", **options)

    def add(self, buf, first, count=20):
        buf.anneal(1, 3)
        buf.extend({"x": np.arange(first, first + count)})

    def held(self, buf):
        return [number for rows in buf.rows() for number in rows["x"].tolist()]

    def draw(self, buf, size=16):
        return [buf.offline_fraction, *(number for n in (3, 5, size) for number in buf.sample(n)["x"].tolist())]

    def save(self, buf, path):
        buf.save(path)

    def writes(self, buf):
        return [lambda: self.add(buf, 500, 10)]


KINDS = {kind.__name__: kind() for kind in (Episodes, Transitions, Stacks, Students, Mix)}
READ = [name for name in KINDS if name != "Mix"]
"""Kinds with a reader beside their writer: that of a mix is `ringmap.open`, see `test_opening`."""


class Fleet(Episodes):
    """Many rings as one: of two, of which the first is written here."""

    cls = ShardedReplayBuffer

    def __init__(self, ring):
        self.ring = ring

    def made(self, folder):
        writer = self.ring.make(folder / "a")
        self.ring.make(folder / "b", seed=1).close()
        return writer, ShardedReplayBuffer(folder, seed=0)


FLEETS = {f"Fleet of {name}": Fleet(KINDS[name]) for name in ("Episodes", "Transitions", "Stacks")}


@pytest.fixture(params=["ram", "disk"])
def place(request, tmp_path):
    return None if request.param == "ram" else tmp_path / "buf"


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(params=READ)
def read_kind(request):
    return KINDS[request.param]


@pytest.fixture(params=FLEETS)
def fleet(request, tmp_path):
    """The kind of the rings, the writer of one, and all of them."""
    made = FLEETS[request.param]
    writer, buf = made.made(tmp_path / "fleet")
    yield made.ring, writer, buf
    buf.close()
    writer.close()


def killed(buf):
    """Let go of the files as a kill does: no flush, no close."""
    ring = getattr(buf, "online_buffer", None)
    engine = ring.buffer.engine if ring is not None else getattr(buf, "engine", None) or buf._ring.engine
    engine.owned.abandon()
    engine.is_closed = True


# -- its life --------------------------------------------------------------------------------------


def test_a_block_flushes_and_a_close_closes(kind, place):
    with kind.make(place) as buf:
        assert type(buf) is kind.cls
        kind.add(buf, 0)
    kind.add(buf, 20)
    assert kind.held(buf) == list(range(40))
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), buf:
            raise error
    assert "closed" not in repr(buf)
    buf.close()
    buf.close()
    assert "closed" in repr(buf)
    for use in (lambda: kind.draw(buf), lambda: kind.held(buf), *kind.writes(buf)[:1]):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_the_block_of_a_fleet_closes_it(fleet):
    kind, writer, buf = fleet
    kind.add(writer, 0)
    writer.flush()
    with buf:
        assert set(kind.draw(buf)) <= set(range(20))
    for use in (lambda: kind.draw(buf), lambda: buf[0], lambda: len(buf), buf.refresh):
        with pytest.raises(ClosedError, match="is closed"):
            use()
    assert "closed" in repr(buf)


@pytest.mark.parametrize("name", READ)
def test_nothing_is_drawn_from_what_is_empty(name, place):
    buf = KINDS[name].make(place)
    with pytest.raises(KINDS[name].error):
        KINDS[name].draw(buf)
    assert KINDS[name].held(buf) == []
    buf.close()


def test_what_was_there_goes_first(kind, place):
    buf = kind.make(place)
    for first in range(0, 200, 20):
        kind.add(buf, first)
        assert kind.held(buf) == list(range(max(0, first + 20 - CAPACITY), first + 20))
    buf.close()


def test_all_is_there_again_and_draws_go_on(kind, tmp_path):
    """After a close, and after a kill that took what was drawn since the flush."""
    with contextlib.closing(kind.make(tmp_path / "buf")) as buf:
        kind.add(buf, 0)
    buf = kind.make(tmp_path / "buf")
    assert kind.held(buf) == list(range(20))
    kind.add(buf, 20)
    kind.draw(buf)
    offline = getattr(buf, "offline_buffer", None)
    state = offline and offline.state_dict()
    buf.flush()
    expected = kind.draw(buf)
    killed(buf)
    with contextlib.closing(kind.make(tmp_path / "buf")) as buf:
        assert kind.held(buf) == list(range(40))
        if state is not None:
            buf.offline_buffer.load_state_dict(state)
        assert kind.draw(buf) == expected
    assert ringmap.check(tmp_path / "buf") == []


# -- draws -----------------------------------------------------------------------------------------


def test_a_seed_and_a_state_say_what_is_drawn(kind, place, tmp_path):
    one, other = kind.make(place), kind.make(place and tmp_path / "other")
    third = kind.make(seed=1)
    for buf in (one, other, third):
        kind.add(buf, 0)
    assert kind.draw(one) == kind.draw(other) != kind.draw(third)
    state = one.state_dict()
    sent, expected = pickle.dumps(state), [kind.draw(one) for _ in range(3)]
    assert len(set(map(tuple, expected))) == 3
    assert pickle.dumps(state) == sent, "it stays what it was"
    for buf in (one, other):
        buf.load_state_dict(pickle.loads(sent))
        assert [kind.draw(buf) for _ in range(3)] == expected
    for buf in (one, other, third):
        buf.close()


def test_a_seed_and_a_state_say_what_is_drawn_from_a_fleet(fleet):
    kind, writer, buf = fleet
    kind.add(writer, 0)
    writer.flush()
    with ShardedReplayBuffer(os.path.dirname(writer.path), seed=0) as other:
        assert kind.draw(buf) == kind.draw(other)
        state, expected = buf.state_dict(), kind.draw(buf)
        kind.draw(other)
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert kind.draw(other) == expected


class Draws(IterableDataset):
    def __init__(self, kind, buf):
        self.kind, self.buf = kind, buf

    def __iter__(self):
        for _ in range(3):
            yield self.kind.draw(self.buf, 24)


def test_workers_draw_apart(kind, place):
    buf = kind.make(place)
    kind.add(buf, 0, 40)
    torch.manual_seed(0)
    found = [tuple(one) for one in DataLoader(Draws(kind, buf), None, num_workers=2)]
    assert len(set(found)) == len(found) == 6
    buf.close()


# -- copies and other handles ----------------------------------------------------------------------


def test_a_saved_one_is_a_buffer_of_its_own(kind, place, tmp_path):
    buf = kind.make(place)
    kind.add(buf, 0, 40)
    kind.add(buf, 40, 40)
    kind.draw(buf)
    kind.save(buf, tmp_path / "copy")
    held = kind.held(buf)
    with kind.open(tmp_path / "copy", "r+") as copy:
        assert kind.held(copy) == held == list(range(20, 80))
        assert copy.check() == [] if hasattr(copy, "check") else True
        kind.add(copy, 80)
        assert kind.held(copy)[-1] == 99
    copy.close()
    assert kind.held(buf) == held
    with pytest.raises(ExistsError):
        kind.save(buf, tmp_path / "copy")
    assert ringmap.check(tmp_path / "copy") == []
    buf.close()


@pytest.mark.parametrize("name", ["Transitions", "Students"])
def test_a_copy_that_fails_is_not_there(name, tmp_path, monkeypatch):
    buf = KINDS[name].make()
    KINDS[name].add(buf, 0)
    monkeypatch.setattr(buf.engine, "snapshot", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        buf.save(tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_of_one_in_ram_holds_its_rows(kind):
    buf = kind.make()
    kind.add(buf, 0, 40)
    copy = pickle.loads(pickle.dumps(buf))
    held = kind.held(buf)
    assert kind.held(copy) == held
    kind.add(copy, 40)
    assert kind.held(copy)[-1] == 59
    assert kind.held(buf) == held


def test_readers_see_what_was_committed_and_write_nothing(read_kind, tmp_path):
    """One that was opened, a pickle of the writer, and of the reader: small, and alike."""
    kind, writer = read_kind, read_kind.make(tmp_path / "buf")
    kind.add(writer, 0)
    writer.flush()
    reader = kind.open(tmp_path / "buf")
    sent = [pickle.dumps(writer), pickle.dumps(reader)]
    assert max(map(len, sent)) < 5000
    readers = [reader, *map(pickle.loads, sent)]
    for first in (20, 40, 60):
        for other in readers:
            assert kind.held(other) == kind.held(writer)
            assert set(kind.draw(other)) <= {0.0, 1.0, *range(first)}
            for write in kind.writes(other):
                with pytest.raises(ReadOnlyError):
                    write()
        kind.add(writer, first)
        writer.flush()
        for other in readers:
            other.refresh()
    for other in (*readers, writer):
        other.close()


def test_a_forked_child_reads_what_was_added_before_and_writes_nothing(kind, place):
    buf = kind.make(place)
    kind.add(buf, 0)

    def look(_):
        words = []
        for write in kind.writes(buf):
            with pytest.raises(ReadOnlyError) as refused:
                write()
            words.append(str(refused.value))
        return kind.held(buf), kind.draw(buf) != [], words

    held, has_drawn, words = Child(look).result()
    assert (held, has_drawn) == (list(range(20)), True)
    said = rf"process {os.getpid()} |write in the (parent|process that opened it)"
    assert all(re.search(said, one) for one in words), words
    kind.add(buf, 20)
    assert kind.held(buf) == list(range(40))
    buf.close()


def test_copies_of_a_fleet_read(fleet):
    kind, writer, buf = fleet
    kind.add(writer, 0)
    writer.flush()
    data = pickle.dumps(buf)
    assert len(data) < 3000
    with pickle.loads(data) as copy:
        assert set(kind.draw(copy)) <= set(range(20))
    assert set(Child(lambda _: kind.draw(buf)).result()) <= set(range(20))


def test_a_second_writer_is_kept_out_until_the_first_is_gone(kind, tmp_path):
    def hold(child):
        buf = kind.make(tmp_path / "buf")
        kind.add(buf, 0)
        child.say("here")
        signal.pause()

    child = Child(hold)
    assert child.hear() == "here"
    with pytest.raises(LockedError, match=f"process {child.pid}"):
        kind.make(tmp_path / "buf")
    child.kill()
    buf = kind.make(tmp_path / "buf")
    assert kind.held(buf) == list(range(20)), "all that returned is there"
    buf.close()


def test_a_directory_of_another_kind_names_its_class(kind, tmp_path):
    buf = kind.make(tmp_path / "buf")
    kind.add(buf, 0)
    buf.close()
    before = {path: path.read_bytes() for path in (tmp_path / "buf").rglob("*") if path.is_file()}
    for other in KINDS.values():
        if other.of_numbers == kind.of_numbers:
            continue
        for opening in (other.make, other.open):
            with pytest.raises(InputError, match=f"holds {kind.of_numbers}.*open it with {kind.cls.__name__}"):
                opening(tmp_path / "buf")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(("option", "value"), [("capacity", CAPACITY + 1), ("mode", "w")])
def test_what_is_fixed_in_a_directory_is_not_asked_for_again(kind, tmp_path, option, value):
    kind.make(tmp_path / "buf").close()
    if option == "mode":
        with pytest.raises(ValueError, match="mode must be"):
            kind.cls.open(tmp_path / "buf", *([kind.offline()] if kind.of_numbers == "rows" else []), mode=value)
        return
    size = {"episodes": "max_steps", "rows": "online_capacity"}.get(kind.of_numbers, "capacity")
    make = type("Larger", (type(kind),), {})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.CAPACITY", value)
        with pytest.raises(InputError, match=f"{size.removeprefix('online_')}={value}"):
            make.make(tmp_path / "buf")
