"""Clips that cross parts, against a plain model: lists of steps, and nothing remembered.

A script appends whole episodes and parts of chains, one by one or many at once, loses some, ends some, evicts, and
opens the ring again. Looks come now and then, at several spans. At each, the index must hold the model's clips in the
model's order, each with all its steps; a number must mean the clip that it meant before, and be as far from the newest
number as in a process that opened the ring now. The joined episodes must be the model's.
"""

import os
import random
from typing import NamedTuple

import numpy as np
import pytest

from ringmap.clips import index as index_module
from ringmap.clips.draws import Around, Crossing
from ringmap.clips.index import ClipIndex
from ringmap.storage.ring import links as links_module
from ringmap.storage.ring.links import NO_PART, NONE, Parts
from ringmap.storage.ring.live import LiveEpisodes

pytestmark = pytest.mark.usefixtures("guided")


class Model:
    """What is on a ring: a list of `(start, length, chain, step, previous)`, oldest first."""

    def __init__(self):
        self.parts = []
        self.ended = set()

    def episodes(self):
        """Return name -> the parts of an episode, in the order of names."""
        found, newest = {}, {}
        for part in self.parts:
            start, _, chain, step, _ = part
            run = newest.get(chain)
            if chain == NONE:
                run = found.setdefault(start, [])
            elif run is None:
                run = found.setdefault(chain, [])
            elif run[-1][3] + run[-1][1] != step:
                run = found.setdefault(start, [])
            newest[chain] = run
            run.append(part)
        return dict(sorted(found.items()))

    def clips(self, span, least):
        """Return the positions of each clip's steps, in the order of the steps that made them clips."""
        found = []
        for run in self.episodes().values():
            steps = [start + i for start, length, *_ in run for i in range(length)]
            before = run[0][3]
            if len(steps) < least:
                continue
            for first in range(len(steps) - span + 1):
                window = steps[first : first + span]
                made_by = max(first + span, least - before)
                if made_by <= len(steps):
                    part = max(start for start, *_ in run if start <= steps[max(0, made_by - 1)])
                    found.append((part, window[-1], tuple(window)))
        return [window for _, _, window in sorted(found)]


class Script:
    """A ring of `rows` steps, its lanes, and the same in the model. `parts`: whether there are chains."""

    def __init__(self, seed, parts=True):
        self.rng = random.Random(seed)
        self.with_parts = parts
        self.rows = self.rng.choice([12, 30, 60])
        self.longest = self.rng.choice([2, 5, 12])
        self.shortest = self.rng.choice([1, self.longest])  # else no clip crosses two ends
        self.lanes = [None] * self.rng.randint(1, 5)
        self.head = 0
        self.model = Model()
        self.live = LiveEpisodes(np.empty(0), np.empty(0))
        self.index = ClipIndex(self.live)
        self.names = {}
        self.looks = self.handed = 0

    def draw_part(self):
        """Return the next episode or part, as the model stores it, and whether its chain ends with it."""
        rng = self.rng
        length = rng.randint(self.shortest, min(self.longest, self.rows))
        chain, step, previous, is_last = NONE, 0, NONE, False
        if self.with_parts and rng.random() < 0.8:
            lane = rng.randrange(len(self.lanes))
            chain, step, previous = self.lanes[lane] or (self.head, 0, NONE)
            is_last = rng.random() < 0.15
            self.lanes[lane] = None if is_last else (chain, step + length, self.head)
        part = (self.head, length, chain, step, previous)
        self.head += length
        return part, is_last

    def append(self, count, at_once):
        drawn = [self.draw_part() for _ in range(count)]
        kept = [one for one in drawn if self.rng.random() > 0.04]  # else damaged, and dropped
        parts = [part for part, _ in kept]
        self.model.parts += parts
        if not at_once:
            for part in parts:
                start, length, chain, step, previous = part
                self.live.append(start, length, part=(chain, step, 0, previous))
        elif parts:
            self.live.extend(*columns(parts))
        for seq, ((_, _, chain, *_), is_last) in enumerate(kept):
            if is_last:
                self.model.ended.add(chain)
                self.live.end(chain, seq)

    def evict(self):
        tail = max(0, self.head - self.rng.randint(0, self.rows))
        self.model.parts = [part for part in self.model.parts if part[0] >= tail]
        self.live.evict_before(tail)

    def open_again(self):
        starts, lengths, parts = columns(self.model.parts)
        self.live.clear()
        self.live.extend(starts, lengths, parts)
        for chain in self.model.ended:
            self.live.end(chain, 0)

    def run(self, moves):
        for _ in range(moves):
            kind = self.rng.choices(["append", "extend", "evict", "again", "look"], [6, 2, 3, 0.4, 3])[0]
            if kind == "append":
                self.append(1, at_once=False)
            elif kind == "extend":
                self.append(self.rng.randint(0, 8), at_once=True)
            elif kind == "evict":
                self.evict()
            elif kind == "again":
                self.open_again()
            else:
                self.look(self.rng.choice([1, 2, 3, 5, 9]), self.rng.choice([0, 0, 0, 7, 14]))

    def look(self, span, least):
        self.looks += 1
        self.look_at_links()
        self.look_at_episodes()
        least = least if least > span else 0
        expected = self.model.clips(span, least)
        of = self.index.of(span, least)
        numbers = np.arange(of.base, of.end)
        step = self.rng.randrange(span)
        first, anchors = of.positions(numbers), of.positions(numbers, step)
        is_lost = first < 0
        assert (anchors[is_lost] == NONE).all()
        assert self.steps(first[~is_lost], span) == expected
        assert anchors[~is_lost].tolist() == [clip[step] for clip in expected]
        assert of.numbers(anchors[~is_lost], step).tolist() == numbers[~is_lost].tolist()
        assert is_lost.sum() <= (span - 1) * len(self.model.episodes()) + 28 * bool(least) * len(self.model.episodes())
        names = self.names.setdefault((self.live.era, id(of.numbering), span, least), {})
        for number, clip in zip(numbers[~is_lost].tolist(), expected, strict=True):
            assert names.setdefault(number, clip) == clip, f"number {number} was {names[number]}"
        assert of.check() == []
        self.draw(of, expected, step)
        other = ClipIndex(LiveEpisodes(*self.columns_again())).of(span, least)
        there = other.positions(np.arange(other.base, other.end))
        assert there.tolist() == first.tolist()

    def draw(self, of, expected, step):
        """Draw each number, or another in place of a lost one; read the clips with what the draw says of them."""
        numbers = np.arange(of.base, of.end)
        around, rng = Around(range(-step, of.span - step)), np.random.default_rng(self.looks)
        drawn = of.drawn(numbers.copy(), step, rng, around)
        if not expected:
            assert drawn is None or not len(numbers)
            return
        offsets, clips = np.arange(of.span) - step, {clip[step]: clip for clip in expected}
        wanted = [clips[anchor] for anchor in drawn.positions.tolist()]
        if drawn.crossing is not None:
            slots = drawn.positions[:, None] + offsets
            if drawn.crossing:
                drawn.crossing.put(slots, around.spots(offsets), 1 << 40)
            assert list(map(tuple, slots.tolist())) == wanted
            self.handed += len(drawn.crossing)
            self.look_again(drawn, wanted, step)

    def look_again(self, drawn, wanted, step):
        """A step that is evicted during the read makes its clip bad, whichever part it is in."""
        tail = self.rng.choice(wanted)[self.rng.randrange(len(wanted[0]))]
        good = drawn.crossing.still_whole(Tail(tail), len(wanted))
        good = np.ones(len(wanted), bool) if good is None else good
        good &= drawn.positions >= tail  # which the reader looks at itself
        assert good[drawn.crossing.which].tolist() == [wanted[i][0] >= tail for i in drawn.crossing.which]

    def columns_again(self):
        starts, lengths, parts = columns(self.model.parts)
        return starts, lengths, 0, parts

    def look_at_episodes(self):
        episodes, whole = self.model.episodes(), self.live.whole
        assert whole.names.tolist() == list(episodes)
        assert whole.check() == []
        steps = [[s + i for s, n, *_ in run for i in range(n)] for run in episodes.values()]
        assert whole.lengths.tolist() == [len(run) for run in steps]
        assert whole.first_steps.tolist() == [run[0][3] for run in episodes.values()]
        assert whole.is_open.tolist() == [
            run[0][2] != NONE and run[0][2] not in self.model.ended for run in episodes.values()
        ]
        every = [position for run in steps for position in run]
        assert whole.positions(np.arange(len(every))).tolist() == every
        assert whole.find(whole.names).tolist() == list(range(len(episodes)))
        for number, run in enumerate(episodes.values()):
            indices = whole.parts_of(number)
            assert self.live.starts[indices].tolist() == [part[0] for part in run]
            assert (whole.of_part[indices] == number).all()

    def look_at_links(self):
        """A walk from part to part finds what the joined episodes have, as a search among these does."""
        live = self.live
        if not len(live):
            return
        indices = np.array([self.rng.randrange(len(live)) for _ in range(20)])
        steps = np.sort([[self.rng.randint(-20, 25) for _ in range(3)] for _ in indices], axis=1)
        positions, good = live._walk(indices, steps)
        expected, same = live.whole.along(indices, steps)
        assert good.tolist() == same.tolist()
        assert positions[good].tolist() == expected[good].tolist()

    def steps(self, first, span):
        """Return the positions of the steps of clips, given those of the first ones."""
        live, whole = self.live, self.live.whole
        if not len(first):
            return []
        index = live.starts.searchsorted(first, side="right") - 1
        places = whole.place_of_part[index] + first - live.starts[index]
        steps = whole.positions(places[:, None] + np.arange(span))
        assert (np.diff(steps, axis=1) > 0).all()  # so the first step is the one that is evicted first
        return list(map(tuple, steps.tolist()))


class Tail(NamedTuple):
    """A source whose rows before a position were overwritten."""

    tail: int

    def newest_tail(self):
        return self.tail


def columns(parts):
    starts, lengths, chains, steps, previous = np.array(parts, np.int64).reshape(-1, 5).T
    return starts, lengths, Parts(chains, steps, 0 * chains, previous) if (chains != NONE).any() else None


@pytest.mark.slow
def test_it_holds_the_clips_of_the_model():
    handed = 0
    for seed in range(200):
        script = Script(seed)
        script.run(40)
        handed += script.handed
    assert handed > 1000


def test_without_parts_there_are_no_chains():
    for seed in range(20):
        script = Script(seed, parts=False)
        script.run(40)
        assert script.live.links is None


def test_without_live_parts_nothing_is_known_of_chains():
    live = LiveEpisodes(np.empty(0), np.empty(0))
    index = ClipIndex(live)
    for number in range(6):
        part = (0, 10 * number, 0, 10 * number - 10 if number else NONE)
        live.append(10 * number, 10, part=part if number < 3 else NO_PART)
    before = index.of(4).positions(np.arange(index.of(4).end - 21, index.of(4).end))
    live.evict_before(30)
    assert live.links is None
    of = index.of(4)
    assert of.positions(np.arange(of.base, of.end)).tolist() == before.tolist()
    assert of.check() == []


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_draw_after_a_part_joins_no_episodes(lanes, monkeypatch):
    """Clips that cross parts are found from part to part: episodes are joined for whoever asks for episodes."""
    joined = []
    right = links_module.WholeEpisodes.__init__
    made = lambda self, *args: joined.append(1) or right(self, *args)  # noqa: E731
    monkeypatch.setattr(links_module.WholeEpisodes, "__init__", made)
    live, rng = LiveEpisodes(np.empty(0), np.empty(0)), np.random.default_rng(0)
    index = ClipIndex(live)
    for number in range(7000):
        lane, turn = number % lanes, number // lanes
        previous = 3 * (number - lanes) if turn else NONE
        live.append(3 * number, 3, part=(3 * lane, 3 * turn, lane, previous))
        live.evict_before(3 * number - 18_000)
        of = index.of(7)
        if number < 6950:
            continue
        numbers = rng.integers(of.base, of.end, 16)
        drawn = of.drawn(numbers.copy(), 2, rng, Around(range(-2, 5)))
        assert of.are(drawn.positions, 2).all()
        assert (of.numbers(drawn.positions, 2) < of.end).all()
        assert not joined
    for _ in range(20):  # many draws in one state pay for it
        of.drawn(numbers.copy(), 2, rng, Around(range(-2, 5)))
    assert len(joined) == 1


def test_chains_that_are_gone_are_forgotten():
    live = LiveEpisodes(np.empty(0), np.empty(0))
    for number in range(10_000):
        live.append(number, 1, part=(number, 0, 0, NONE))
        live.end(number, number)
        live.evict_before(number - 10)
    assert len(live.links.ended) < 200


@pytest.mark.campaign
def test_of_many_scripts():
    """100,000 scripts; `SEED` and `SCRIPTS` choose others."""
    first, count = int(os.environ.get("SEED", 0)), int(os.environ.get("SCRIPTS", 100_000))
    looks = 0
    for seed in range(first, first + count):
        script = Script(seed)
        script.run(40)
        looks += script.looks
    print(f"\n{count} scripts, {looks} looks")


# -- controls: each guard taken out, and the model sees it -------------------------------------------


def serve_lost_clips(self, anchors):
    """Take clips whose first step is gone for whole."""
    anchors[self.which] = self.positions[:, self._around.zero]


def look_at_the_anchor_only(self, source, count):
    """Forget that a step before the anchor was read."""


def put_nothing(self, slots, spots, rows):
    """Read a clip as if all of it lay in the part of its anchor."""


def follow_any_step(steps, lengths):
    """Let a part follow the one before it even if one between them was dropped."""
    return np.ones(len(steps[1:]), bool)


extend = links_module.Links.extend


def link_to_what_is_there(self, parts, starts, lengths, first):
    """Link a part to the one that stands where the part before it was, even if that was dropped."""
    extend(self, parts._replace(previous=None), starts, lengths, first)
    which = np.flatnonzero(parts.chains != NONE)
    at, rows = which + len(starts) - len(parts.chains), self._table.span(first, first + len(starts))
    if len(which):
        before = np.minimum(starts.searchsorted(parts.previous[which]), len(starts) - 1)
        rows[at, 3], rows[before, 4] = before + first, at + first


def count_live_steps(self, first, last):
    """Count the clips of a part as if nothing had been before it."""
    return index_module.counts(self.live.lengths_since(first)[: last - first], self.span, self.least)


@pytest.mark.parametrize(
    ("where", "name", "planted"),
    [
        (Crossing, "put_anchors", serve_lost_clips),
        (Crossing, "still_whole", look_at_the_anchor_only),
        (Crossing, "put", put_nothing),
        (links_module, "_meet", follow_any_step),
        (links_module.Links, "extend", link_to_what_is_there),
        (index_module.SpanIndex, "_clips_of", count_live_steps),
    ],
)
def test_the_model_sees_a_missing_guard(monkeypatch, where, name, planted):
    monkeypatch.setattr(where, name, planted)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        for seed in range(50):
            Script(seed).run(40)
