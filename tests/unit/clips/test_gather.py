"""Batches of clips, read while a writer laps the ring between any two steps of the reading."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap.clips import gather
from ringmap.clips.cut import Cut, Steps
from ringmap.clips.gather import ClipReader
from ringmap.errors import LappedError
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.files import Disk
from ringmap.storage.ring.live import LiveEpisodes
from ringmap.storage.ring.ring import Ring

pytestmark = pytest.mark.usefixtures("guided")


class Column:
    """Rows in one array. `before` and `after` run around the copy of each take."""

    def __init__(self, spec, rows):
        self.spec = spec
        self.array = np.full((rows, *spec.shape), -1, spec.dtype)
        self.before = self.after = lambda: None

    def take(self, slots, out=None, head=0):
        self.before()
        taken = self.array[slots]
        self.after()
        return taken


class Stage:
    """A ring that a writer fills; what the reader knows of it moves with `refresh` only.

    `step` holds each row's own position, `action` twice that.
    """

    retry_s = 0

    def __init__(self, max_steps=20, spare=5, action=()):
        self.ring = Ring(max_steps, spare)
        specs = [
            ColumnSpec("step", (), np.dtype("i8")),
            ColumnSpec("action", action, np.dtype("f8")),
        ]
        self.columns = {spec.name: Column(spec, self.ring.rows) for spec in specs}
        self.rows = SimpleNamespace(ring=self.ring, by_name=self.columns, large=[], is_covered=False, texts=())
        self.disk = Disk()
        self.live = LiveEpisodes(np.empty(0), np.empty(0))
        self.lock = threading.Lock()
        self.folder = "/somewhere"
        self.written, self.ever, self.head, self.tail, self.refreshes = [], [], 0, 0, 0

    def write(self, length):
        """Do as the store does: publish the new tail, then overwrite what lies below it."""
        head = self.head + length
        self.written.append((self.head, length))
        self.ever.append(self.written[-1])
        while head - self.written[0][0] > self.ring.max_steps:
            self.written.pop(0)
        self.tail = self.written[0][0]
        positions = np.arange(self.head, head)
        self.columns["step"].array[positions % self.ring.rows] = positions
        action = self.columns["action"]
        shape = (-1, *[1] * len(action.spec.shape))
        action.array[positions % self.ring.rows] = 2 * positions.reshape(shape)
        self.head = head

    def clear(self):
        self.written, self.tail = [], self.head

    def newest_tail(self):
        return self.tail

    def refresh(self):
        self.refreshes += 1
        self.live.evict_before(self.tail)
        for start, length in self.written:
            if start >= self.seen:
                self.live.append(start, length)
        return True

    @property
    def seen(self):
        return self.live.start(self.live.last - 1) + 1 if self.live.last else 0

    def clips(self, span, ever=False):
        episodes = self.ever if ever else self.written
        return {start + i for start, length in episodes for i in range(length - span + 1)}


def prove(stage, batch, history, skip=1):
    """Check that each clip is what was written at its own position; return these positions."""
    firsts = batch["step"][:, 0]
    np.testing.assert_array_equal(batch["step"], firsts[:, None] + skip * np.arange(history))
    dense = firsts[:, None] + np.arange(history * skip)
    shape = stage.columns["action"].spec.shape
    wide = np.broadcast_to(2.0 * dense.reshape(*dense.shape, *[1] * len(shape)), (*dense.shape, *shape))
    np.testing.assert_array_equal(batch["action"], wide.reshape(len(firsts), history, math.prod(shape) * skip))
    return set(firsts.tolist())


def reader_of(stage, seed=0):
    stage.refresh()
    stage.refreshes = 0
    return ClipReader(stage, np.random.default_rng(seed))


def batch_of(reader, numbers, pinned, history, skip):
    cut = Cut.clip(history, skip)
    return reader.at(reader.place(numbers, pinned, cut), cut)


def read_all(stage, reader, history, skip=1):
    pinned = reader.pin(Cut.clip(history, skip))
    return batch_of(reader, np.arange(pinned.base, pinned.end), pinned, history, skip)


@given(
    positions=st.lists(st.integers(0, 2**62), max_size=5),
    rows=st.integers(1, 40),
    stride=st.integers(1, 5),
    data=st.data(),
)
def test_slots_are_positions_modulo_rows(positions, rows, stride, data):
    count = data.draw(st.integers(1, max(1, 1 + (rows - 1) // stride)))
    first = data.draw(st.integers(-3, 3))
    steps = Steps(tuple(range(first, first + count * stride, stride)))
    anchors = np.array(positions, np.int64) + 3
    slots = steps.slots(anchors, rows)
    expected = [[(p + 3 + first + i * stride) % rows for i in range(count)] for p in positions]
    assert slots.tolist() == expected


# -- the writer comes in between ---------------------------------------------------------------


def filled():
    stage = Stage(max_steps=20, spare=5)
    for _ in range(4):
        stage.write(5)
    return stage


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["step", "action"])
@pytest.mark.parametrize("times", [1, 2, 4, 9])
def test_evicted_while_it_is_copied(when, name, times):
    """Whenever the writer laps, no torn clip comes out, and each one that was lost is counted."""
    stage = filled()
    reader = reader_of(stage)
    pinned = reader.pin(Cut.clip(3))
    left = times

    def lap():
        nonlocal left
        if left:
            left -= 1
            for _ in range(3):
                stage.write(5)

    setattr(stage.columns[name], when, lap)
    batch = batch_of(reader, np.arange(pinned.base, pinned.end), pinned, 3, 1)
    assert prove(stage, batch, 3) <= stage.clips(3, ever=True)
    assert len(batch["step"]) == 12
    assert 9 <= reader.num_redraws <= 12 * times
    assert 1 <= stage.refreshes <= times


@pytest.mark.parametrize("offset", [-3, 40])
def test_a_number_that_never_was_is_drawn_anew(offset):
    stage = filled()
    reader = reader_of(stage)
    pinned = reader.pin(Cut.clip(5))
    batch = batch_of(reader, np.array([pinned.base + offset, pinned.base]), pinned, 5, 1)
    assert prove(stage, batch, 5) <= stage.clips(5)
    assert batch["step"][1, 0] == 0
    assert reader.num_redraws == 1


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_after_a_recovery_numbers_mean_the_same_places(lost):
    """It numbers anew; a clip that is still there is where it was, and only one that is not is drawn anew."""
    stage = filled()
    reader = reader_of(stage)
    pinned = reader.pin(Cut.clip(5))
    assert pinned.count == 4
    before = batch_of(reader, np.arange(pinned.base, pinned.end), pinned, 5, 1)
    starts = np.array([start for start, _ in stage.written])[lost:]
    stage.live.clear()
    stage.live.extend(starts, np.full(4 - lost, 5))
    batch = batch_of(reader, np.arange(pinned.base, pinned.end), pinned, 5, 1)
    assert prove(stage, batch, 5) <= stage.clips(5)
    assert np.array_equal(batch["step"][lost:], before["step"][lost:])
    assert reader.num_redraws == lost


@pytest.mark.parametrize("how", ["dropped", "interrupted"])
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_an_index_that_is_built_again_finds_the_same_clips(how, lost):
    """It counts from 0 again, in the same era."""
    stage = filled()
    reader = reader_of(stage)
    read_all(stage, reader, 5)
    stage.write(5)
    stage.write(5)
    stage.refresh()
    pinned = reader.pin(Cut.clip(5))
    assert (pinned.base, pinned.count) == (2, 4)
    before = batch_of(reader, np.arange(pinned.base, pinned.end), pinned, 5, 1)
    for _ in range(lost):
        stage.write(5)
    stage.refresh()
    if how == "dropped":
        for span in range(6, 23):
            reader.pin(Cut.clip(span))
    else:
        reader.index.of(5)._era = -1  # as an interrupt in the middle of an update leaves it
    batch = batch_of(reader, np.arange(pinned.base, pinned.end), pinned, 5, 1)
    assert prove(stage, batch, 5) <= stage.clips(5)
    assert np.array_equal(batch["step"][lost:], before["step"][lost:])
    assert reader.num_redraws == lost


def test_redraws_are_uniform_over_the_newest_state():
    stage = filled()
    reader = reader_of(stage)
    pinned = reader.pin(Cut.clip(5))
    stage.write(5)
    stage.refresh()
    counts = dict.fromkeys(stage.clips(5), 0)
    batch = batch_of(reader, np.full(4000, pinned.base), pinned, 5, 1)
    for first in batch["step"][:, 0].tolist():
        counts[first] += 1
    assert min(counts.values()) > 850, counts
    assert max(counts.values()) < 1150, counts


def overtaken(monkeypatch, most):
    """Return how often a batch was read beside a writer that replaces nine tenths of the ring during each copy."""
    monkeypatch.setattr(gather, "MOST_CHOICES", most)
    stage = Stage(max_steps=400, spare=400)
    for _ in range(80):
        stage.write(5)
    stage.refresh()
    reader = reader_of(stage)
    pinned = reader.pin(Cut.clip(5))
    stage.columns["step"].after = lambda: [stage.write(5) for _ in range(72)]
    numbers = np.random.default_rng(0).integers(pinned.base, pinned.end, 64)
    prove(stage, batch_of(reader, numbers, pinned, 5, 1), 5)
    return stage.refreshes


def test_each_next_redraw_is_nearer_to_the_newest_clip(monkeypatch):
    assert overtaken(monkeypatch, 1024) < 10
    with pytest.raises(LappedError):  # a control: uniform redraws
        overtaken(monkeypatch, 1)


# -- controls ----------------------------------------------------------------------------------


def test_control_looking_before_the_copy_is_not_enough():
    stage = filled()
    reader = reader_of(stage)
    pinned = reader.pin(Cut.clip(3))
    early = stage.tail
    stage.columns["action"].before = lambda: stage.head == 20 and [stage.write(5) for _ in range(3)]
    stage.newest_tail = lambda: early
    batch = batch_of(reader, np.arange(pinned.base, pinned.end), pinned, 3, 1)
    with pytest.raises(AssertionError):
        prove(stage, batch, 3)
