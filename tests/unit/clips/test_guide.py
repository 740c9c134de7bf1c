"""The guide of a clip index: a lookup through it is a binary search, and walks a few steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap.clips import index as index_module
from ringmap.clips.index import SpanIndex, _Guide
from ringmap.storage.ring.live import LiveEpisodes

pytestmark = pytest.mark.usefixtures("guided")

lengths = st.one_of(
    st.lists(st.integers(1, 6), max_size=40),
    st.lists(st.sampled_from([1, 1, 1, 500]), max_size=40),
    st.integers(200, 400).map(lambda count: [1] * count),
)
moves = st.lists(st.tuples(lengths, st.booleans(), st.floats(0, 1)), max_size=8)


class Field:
    """Live episodes that come, one by one or many at once, and go."""

    def __init__(self):
        self.live = LiveEpisodes(np.empty(0), np.empty(0))
        self.head = 0

    def write(self, lengths, at_once):
        starts = self.head + np.cumsum([0, *lengths])[:-1]
        if at_once:
            self.live.extend(starts, np.array(lengths, np.int64))
        else:
            for start, length in zip(starts.tolist(), lengths, strict=True):
                self.live.append(start, length)
        self.head += sum(lengths)

    def evict(self, part):
        starts = self.live.starts
        if len(starts):
            self.live.evict_before(int(starts[int(part * (len(starts) - 1))]))


def expected(index):
    """Return what a binary search finds for every clip."""
    live, numbers = index.live, np.arange(index.base, index.end)
    ends = index._ends.span(live.first, live.last)
    found = ends.searchsorted(numbers, side="right")
    before = np.append(ends, 0)[found - 1]
    return found + live.first, numbers - np.where(found > 0, before, index.base)


def agree(index):
    numbers = np.arange(index.base, index.end)
    return all(map(np.array_equal, index.locate(numbers), expected(index)))


@given(moves=moves, span=st.integers(1, 4), steps=st.sampled_from([0, 1, 2, 6, 10**9]))
def test_equal_to_a_binary_search_whatever_comes_and_goes(moves, span, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_MAX_STEPS", steps)
        field = Field()
        index = SpanIndex(field.live, span)
        guide, num_episodes = None, 0
        for lengths, at_once, part in moves:
            field.write(lengths, at_once)
            if not at_once:
                index.follow()
            field.evict(part)
            index.follow()
            assert agree(index)
            if index._guide is not guide:
                guide, num_episodes = index._guide, len(field.live)
            assert guide is None or len(guide.ordinals) <= 2 * num_episodes + 1
            assert index.check() == []


def walked(lengths, span=1):
    """Return the most steps that a lookup walks from its entry."""
    index = SpanIndex(LiveEpisodes.from_lengths(np.array(lengths)), span)
    index.follow()
    numbers = np.arange(index.end)
    return int((index.locate(numbers)[0] - index._guide.before(numbers)).max())


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 1000])
def test_episodes_of_one_length_are_a_step_or_two_away(length):
    assert walked([length] * 3000) <= 2


@pytest.mark.parametrize("length_of", [lambda i: 9, lambda i: 9 if i % 100 == 0 else 1])
def test_a_guide_is_made_again_only_after_an_eighth_of_new_clips(monkeypatch, length_of):
    made, over = [], _Guide.over.__func__
    monkeypatch.setattr(_Guide, "over", classmethod(lambda cls, *args: (made.append(1), over(cls, *args))[1]))
    field = Field()
    index = SpanIndex(field.live, 5)
    for i in range(3000):
        field.write([length_of(i)], False)
        index.follow()
        index.locate(np.array([index.base]))
    assert agree(index)
    assert len(made) < 80


def test_control_entries_one_episode_late_are_caught(monkeypatch):
    before = _Guide.before
    monkeypatch.setattr(_Guide, "before", lambda *args: before(*args) + 1)
    index = SpanIndex(LiveEpisodes.from_lengths(np.array([3, 4, 5, 6])), 1)
    index.follow()
    monkeypatch.setattr(index_module, "_MAX_STEPS", 0)
    index.locate(np.arange(3))
    assert index.check() == ["clip index of span 1: an entry of the guide is beyond its clip"]
