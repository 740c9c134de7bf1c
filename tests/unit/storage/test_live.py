"""The live episodes in memory against a plain list."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringmap.storage.ring.arrays import GrowingArray
from ringmap.storage.ring.live import LiveEpisodes

moves = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("extend"), st.lists(st.integers(1, 9), max_size=200)),
        st.tuples(st.just("forget"), st.integers(0, 150)),
    ),
    max_size=30,
)


@given(first=st.integers(0, 10**12), moves=moves)
def test_deque_is_a_list_that_forgets_its_beginning(first, moves):
    deque, model, stop = GrowingArray(np.empty(0, np.int64), first), {}, first
    for move, value in moves:
        if move == "forget":
            first = min(stop, first + value)
            continue
        for one in value if move == "extend" else [value]:
            model[stop] = one
            stop += 1
        if move == "append":
            deque.append(value, first)
        else:
            deque.extend(np.array(value, np.int64), first)
        assert deque.span(first, stop).tolist() == [model[i] for i in range(first, stop)]
        for ordinal in {first, stop - 1} - {stop, first - 1}:
            assert deque.at(ordinal) == model[ordinal]


def test_deque_copies_each_value_few_times():
    copied, deque, window = 0, GrowingArray(np.empty(0, np.int64)), 1000
    for i in range(50_000):
        before = deque._data
        first = max(0, i - window)
        deque.append(i, first)
        if deque._data is not before:
            copied += i - first
    assert copied / 50_000 < 12, "amortised O(1): a slack of an eighth copies 8 or so values per append"
    assert len(deque._data) < 2 * window, "what is forgotten gives its memory back"


@given(moves=moves, limit=st.integers(0, 60), ahead=st.integers(0, 30))
def test_live_episodes_against_a_list(moves, limit, ahead):
    live, model, head = LiveEpisodes(np.empty(0), np.empty(0)), [], 0
    gone = 0
    for move, value in moves:
        if move == "append":
            live.append(head, value)
            model.append((head, value))
            head += value
        elif move == "extend":
            starts = head + np.cumsum([0, *value])[:-1]
            live.extend(starts.astype(np.int64), np.array(value, np.int64))
            model += list(zip(starts.tolist(), value, strict=True))
            head += sum(value)
        else:
            tail = max(0, head - value)
            gone += sum(start < tail for start, _ in model)
            model = [(start, length) for start, length in model if start >= tail]
            live.evict_before(tail)
        assert len(live) == len(model)
        assert (live.first, live.last) == (gone, gone + len(model))
        assert live.num_steps == sum(length for _, length in model)
        assert live.starts.tolist() == [start for start, _ in model]
        assert live.lengths.tolist() == [length for _, length in model]
        assert (live.starts.dtype, live.lengths.dtype) == (np.int64, np.int32)
        fits = [start for start, _ in model if head + ahead - start <= limit]
        assert live.tail_for(head + ahead, limit) == (fits[0] if fits else -1)
        for i, (start, length) in enumerate(model):
            assert (live.start(gone + i), live.length(gone + i)) == (start, length)
        if model:
            assert live.stop == sum(model[-1])
            assert live.is_dense == all(a + n == b for (a, n), (b, _) in pairwise(model))
            assert live.lengths_since(gone + 1).tolist() == [length for _, length in model[1:]]


def test_positions_beyond_32_bits():
    live = LiveEpisodes(np.empty(0), np.empty(0))
    live.append(2**62, 5)
    live.append(2**62 + 5, 5)
    assert live.starts.tolist() == [2**62, 2**62 + 5]
    assert live.tail_for(2**62 + 10, 5) == 2**62 + 5


def test_reset_hands_out_ordinals_anew():
    live = LiveEpisodes.from_lengths(np.array([3, 4]))
    live.evict_before(3)
    assert (live.era, live.first, live.last, live.num_steps) == (0, 1, 2, 4)
    live.clear()
    live.extend(np.array([10, 11]), np.array([1, 2]))
    assert (live.era, live.first, live.last, live.num_steps) == (1, 0, 2, 3)
    assert live.starts.tolist() == [10, 11]


def test_from_lengths_lays_episodes_end_to_end():
    live = LiveEpisodes.from_lengths(np.array([3, 1, 2]))
    assert live.starts.tolist() == [0, 3, 4]
    assert live.num_steps == 6


def test_what_is_given_is_copied():
    starts, lengths = np.array([0, 3]), np.array([3, 4])
    live = LiveEpisodes(starts, lengths)
    starts[:] = lengths[:] = 99
    assert live.starts.tolist() == [0, 3]
    assert live.lengths.tolist() == [3, 4]


def test_control_a_deque_that_forgets_too_much_is_caught():
    class Forgetful(GrowingArray):
        def append(self, value, first):
            super().append(value, min(first + 1, self._stop))

    deque = Forgetful(np.empty(0, np.int64))
    for i in range(200):
        deque.append(i, 0)
    assert deque.span(0, 200).tolist() != list(range(200))
