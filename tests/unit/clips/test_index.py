"""The clip index against a plain list, and its work, counted."""

import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringmap.clips.index import ClipIndex, ClipPairs, SpanIndex
from ringmap.storage.ring import live as live_module
from ringmap.storage.ring.live import LiveEpisodes

pytestmark = pytest.mark.usefixtures("guided")

moves = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("grow"), st.integers(1, 9)),
        st.tuples(st.just("extend"), st.lists(st.integers(1, 9), max_size=30)),
        st.tuples(st.just("evict"), st.integers(0, 60)),
        st.tuples(st.just("reset"), st.lists(st.integers(1, 9), max_size=9)),
        st.tuples(st.just("look"), st.integers(1, 12)),
    ),
    max_size=25,
)


def pairs_of(lengths, span):
    return [(i, start) for i, length in enumerate(lengths) for start in range(length - span + 1)]


class Model:
    """Live episodes beside the list of their lengths."""

    def __init__(self):
        self.live = LiveEpisodes(np.empty(0), np.empty(0))
        self.lengths, self.head = [], 0

    def move(self, move, value):
        if move == "append":
            self.live.append(self.head, value)
            self.lengths.append(value)
            self.head += value
        elif move == "grow":
            if self.lengths:
                self.lengths[-1] += value
                self.live.grow(self.lengths[-1])
                self.head += value
        elif move == "extend":
            starts = self.head + np.cumsum([0, *value])[:-1]
            self.live.extend(starts.astype(np.int64), np.array(value, np.int64))
            self.lengths += value
            self.head += sum(value)
        elif move == "evict":
            tail = max(0, self.head - value)
            starts = self.head - np.cumsum(self.lengths[::-1])[::-1] if self.lengths else []
            self.lengths = [n for n, start in zip(self.lengths, starts, strict=True) if start >= tail]
            self.live.evict_before(tail)
        elif move == "reset":
            self.lengths = list(value)
            starts = self.head + np.cumsum([0, *value])[:-1]
            self.live.clear()
            self.live.extend(starts, np.array(value, np.int64))
            self.head += sum(value)


@given(moves=moves)
@example(moves=[("append", 5), ("look", 2), ("append", 4), ("append", 3), ("evict", 3), ("look", 2)])
@example(moves=[("append", 5), ("look", 2), ("append", 4), ("evict", 0), ("append", 3), ("look", 2)])
@example(moves=[("append", 5), ("look", 2), ("grow", 2), ("append", 3), ("look", 2)])
def test_it_is_the_list_of_all_clips(moves):
    """Looks come now and then only, so that episodes come and go unseen in between."""
    model = Model()
    index = ClipIndex(model.live)
    for move, value in moves:
        if move != "look":
            model.move(move, value)
            continue
        for span in (value, 1, 2):
            expected = pairs_of(model.lengths, span)
            of = index.of(span)
            assert of.end - of.base == len(expected)
            ordinals, starts = of.locate(np.arange(of.base, of.end))
            assert list(zip(ordinals - model.live.first, starts, strict=True)) == expected
        assert index.check() == []


@given(lengths=st.lists(st.integers(1, 9), max_size=30), span=st.integers(1, 12))
def test_pairs_are_a_sequence(lengths, span):
    pairs = ClipPairs(ClipIndex(LiveEpisodes.from_lengths(np.array(lengths, np.int64))), span)
    expected = pairs_of(lengths, span)
    assert len(pairs) == len(expected)
    assert list(pairs) == expected
    assert [pairs[i] for i in range(-len(expected), len(expected))] == expected * 2
    for part in (
        slice(None),
        slice(2, 7),
        slice(None, None, -1),
        slice(-3, None),
        slice(5, 2),
        slice(1, None, 3),
    ):
        assert list(pairs[part]) == expected[part]
    for wrong in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError, match="out of range"):
            pairs[wrong]
    if expected:
        assert pairs[np.int64(0)] == expected[0]
        assert pairs.index(expected[-1]) == len(expected) - 1
        assert expected[0] in pairs


def test_a_clip_keeps_its_number_for_life():
    model = Model()
    index = ClipIndex(model.live)
    names = {}
    for step in range(300):
        model.move("append", 1 + step % 7)
        if step % 3 == 0:
            model.move("evict", 40)
        of = index.of(3)
        ordinals, starts = of.locate(np.arange(of.base, of.end))
        positions = model.live.starts[ordinals - model.live.first] + starts
        for number, position in zip(range(of.base, of.end), positions.tolist(), strict=True):
            assert names.setdefault(number, position) == position
    assert of.base > 0


def test_a_recovery_starts_numbers_anew():
    model = Model()
    index = ClipIndex(model.live)
    model.move("append", 5)
    assert index.of(1).end == 5
    model.move("reset", [3])
    assert (index.of(1).base, index.of(1).end) == (0, 3)


def test_only_so_many_spans_are_kept():
    model = Model()
    index = ClipIndex(model.live)
    for length in (5, 60, 3):
        model.move("append", length)
    for span in (*range(1, 60), 3, 59):
        assert index.of(span).end == len(pairs_of(model.lengths, span))
    assert len(index._spans) <= 16
    assert index.check() == []


def test_check_finds_a_vandalised_index():
    model = Model()
    index = ClipIndex(model.live)
    for length in (5, 6, 7):
        model.move("append", length)
    index.of(2)
    assert index.check() == []
    ends = index._spans[2, 0, False]._ends.span(0, 3)
    ends[1] += 1
    assert index.check() == ["clip index of span 2: clip counts do not follow the episode lengths"]
    ends[1] -= 1
    assert index.check() == []
    index._spans[2, 0, False]._shifts.span(0, 3)[1] += 1
    assert index.check() == ["clip index of span 2: a clip's position does not follow from its number"]


# -- cost: counted, not timed ------------------------------------------------------------------


class Work:
    """Counts the lines that run in the index and its episodes, and the values that move in bulk."""

    def __init__(self, monkeypatch):
        self.lines = self.values = 0
        self.files = {sys.modules[SpanIndex.__module__].__file__, live_module.__file__}
        deque = live_module.GrowingArray
        for name in ("append", "extend"):
            monkeypatch.setattr(deque, name, self.counting(getattr(deque, name)))

    def counting(self, grow):
        def counted(deque, new, first):
            before, old = deque._data, deque._stop - max(first, deque._offset)
            grow(deque, new, first)
            self.values += np.size(new) + (old if deque._data is not before else 0)

        return counted

    def trace(self, frame, event, _):
        if frame.f_code.co_filename not in self.files:
            return None
        self.lines += event == "line"
        return self.trace

    def of(self, work, times):
        """Return lines and values per call of `work(i)`."""
        self.lines = self.values = 0
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            for i in range(times):
                work(i)
        finally:
            sys.settrace(before)
        return self.lines / times, self.values / times


def cost_of_a_write(monkeypatch, episodes, spans, index_class=SpanIndex):
    """Return the work per episode once `episodes` are stored: append, evict, all spans followed."""
    with monkeypatch.context() as patch:
        patch.setattr("ringmap.clips.index.SpanIndex", index_class)
        model = Model()
        model.live.extend(np.arange(episodes, dtype=np.int64) * 5, np.full(episodes, 5))
        index = ClipIndex(model.live)
        for span in spans:
            index.of(span)

        def write(i):
            position = (episodes + i) * 5
            model.live.append(position, 5)
            model.live.evict_before(position + 5 - episodes * 5)
            index.of(spans[0])

        return Work(patch).of(write, 2000)


def test_a_write_costs_the_same_however_much_is_stored(monkeypatch):
    few_lines, few_values = cost_of_a_write(monkeypatch, 1_000, [1, 4])
    many_lines, many_values = cost_of_a_write(monkeypatch, 100_000, [1, 4])
    assert many_lines <= few_lines * 1.1
    assert many_values <= few_values * 4 < 300, "amortised: each growth copies, and pays for an eighth more"


def test_a_lookup_and_an_idle_look_do_not_walk_the_episodes(monkeypatch):
    costs = []
    for episodes in (1_000, 100_000):
        model = Model()
        model.live.extend(np.arange(episodes, dtype=np.int64) * 5, np.full(episodes, 5))
        index = ClipIndex(model.live)
        index.of(2)
        ids = np.arange(0, index.of(2).end, episodes // 10 + 1)  # at all distances from an entry of the guide

        def look(_, index=index, ids=ids):
            of = index.of(2)
            of.locate(ids + of.base)

        with monkeypatch.context() as patch:
            costs.append(Work(patch).of(look, 100))
    assert costs[0] == costs[1]


class Rebuilding(SpanIndex):
    """The control: counts all clips anew after each write."""

    __slots__ = ()

    def follow(self):
        if self.live.last != self.last or self.live.first != self.first:
            self._restart()
        super().follow()


def test_control_rebuilding_after_each_write_is_caught(monkeypatch):
    _, few = cost_of_a_write(monkeypatch, 1_000, [1], Rebuilding)
    _, many = cost_of_a_write(monkeypatch, 10_000, [1], Rebuilding)
    assert many > few * 4
    assert few > 200
