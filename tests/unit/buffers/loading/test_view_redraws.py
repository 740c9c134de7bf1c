"""An item of a view is what it was, while its episode lives; any other comes from what is left of that view, and says
so."""

import itertools

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DataLoader

from ringmap import ReplayBuffer
from ringmap.buffers.rings import apart
from ringmap.buffers.view import BufferView
from ringmap.data import (
    EPISODE_DATA_KEY,
    Computed,
    Index,
    Sequences,
    ShardedReplayBuffer,
    TimeToEnd,
    Window,
)
from ringmap.errors import NoClipsError
from tests.tiers import few

LENGTH = 10
CAPACITY = 400
"""Steps of a ring: 40 episodes."""


def steps_of(number):
    return {"where": np.stack([np.full(LENGTH, number), np.arange(LENGTH)], axis=1)}


def is_wanted(data):
    return data["number"] % 3 != 0


class Rings:
    """One ring, or three that are read as one; the numbers of their episodes, in the order in which they were
    written."""

    def __init__(self, folder, count, in_parts):
        self.writers = [ReplayBuffer(CAPACITY, path=folder / f"ring-{n}", seed=n, sync_every_s=0) for n in range(count)]
        self.in_parts, self.numbers = in_parts, itertools.count()
        self.written = [[] for _ in self.writers]
        self.fill(40)
        self.buffer = self.writers[0]
        if count > 1:
            self.buffer = ShardedReplayBuffer(str(folder), seed=0)

    def fill(self, episodes):
        """Write so many episodes to each ring."""
        for writer, written in zip(self.writers, self.written, strict=True):
            for _ in range(episodes):
                number = next(self.numbers)
                written.append(number)
                if not self.in_parts:
                    writer.write_episode({**steps_of(number), EPISODE_DATA_KEY: {"number": number}})
                    continue
                with writer.begin_episode(commit_every=4, episode_data={"number": number}) as part:
                    for where in steps_of(number)["where"]:
                        part.append({"where": where})

    @property
    def live(self):
        """The numbers of the episodes whose steps are all stored."""
        return {number for written in self.written for number in written[-CAPACITY // LENGTH :]}

    def close(self):
        self.buffer.close()
        for writer in self.writers:
            writer.close()


@pytest.fixture
def made(request, tmp_path):
    count, in_parts = KINDS[request.param]
    rings = Rings(tmp_path, count, in_parts)
    yield rings
    rings.close()


VIEWS = {
    "split": lambda buffer: buffer.split(0.8)[0],
    "filtered": lambda buffer: buffer.view(where=is_wanted),
    "part of a part": lambda buffer: buffer.split(0.8)[0].view(where=is_wanted),
    "windows": lambda buffer: buffer.split(0.8, window={"where": Window(range(3))})[0],
    "padded": lambda buffer: buffer.split(0.8, window={"where": Window(range(3), pad="edge")})[0],
    "computed": lambda buffer: buffer.view({"where": Window(range(3)), "left": TimeToEnd()}, where=is_wanted),
}
KINDS = {"one": (1, False), "parts": (1, True), "three": (3, False), "three in parts": (3, True)}
"""Rings, and whether episodes are recorded in parts."""
ONE, PARTS, THREE, THREE_PARTS = KINDS
CASES = few(
    [
        (ONE, "split"),
        (ONE, "filtered"),
        (PARTS, "padded"),
        (THREE, "split"),
        (THREE, "computed"),
        (THREE_PARTS, "windows"),
        *itertools.product(KINDS, VIEWS),
    ],
    6,
)


def known_of(view):
    """Return the number of the episode, and the step, of each item of a view, while all of them live."""
    where = np.asarray(view[range(len(view))]["where"])
    return where.reshape(len(view), -1, 2)[:, 0]


def prove(batch, asked, known, rings, chosen):
    """Compare the items that came with those that were asked for; return which were redrawn."""
    where = np.asarray(batch["where"]).reshape(len(asked), -1, 2)[:, 0]
    lives = np.isin(known[asked, 0], list(rings.live))
    np.testing.assert_array_equal(where[lives], known[asked[lives]])
    np.testing.assert_array_equal(np.asarray(batch.redrawn), ~lives)
    assert set(where[~lives, 0].tolist()) <= chosen & rings.live, "from the view, and nothing else"
    return ~lives, where


@pytest.mark.parametrize(("made", "kind"), CASES, indirect=["made"])
def test_a_view_gives_what_it_had_or_another_of_its_own(made, kind):
    view = VIEWS[kind](made.buffer)
    known = known_of(view)
    chosen = set(known[:, 0].tolist())
    made.fill(12)  # evicts 30 %
    every = np.arange(len(view))
    batch = view[every]
    gone, where = prove(batch, every, known, made, chosen)
    assert 0.1 < gone.mean() < 0.5
    place = {tuple(row): id_ for id_, row in enumerate(known.tolist())}
    came = np.array([place[tuple(row)] for row in where.tolist()])
    np.testing.assert_array_equal(batch.ids, view.positions(came))
    assert view.num_redraws >= gone.sum()
    # Item by item, and as a DataLoader asks.
    for number in np.flatnonzero(gone)[:5].tolist():
        assert np.asarray(view[number]["where"]).reshape(-1, 2)[0, 0] in chosen & made.live
    for number in np.flatnonzero(~gone)[:5].tolist():
        assert np.asarray(view[number]["where"]).reshape(-1, 2)[0].tolist() == known[number].tolist()
    for batch, asked in zip(DataLoader(view, 100), np.array_split(every, range(100, len(every), 100)), strict=True):
        prove(batch, asked, known, made, chosen)
    for batch in (view.sample(200), next(view.batches(200))):
        numbers = np.asarray(batch["where"]).reshape(200, -1, 2)[:, 0, 0]
        assert set(numbers.tolist()) <= chosen & made.live


@pytest.mark.parametrize("made", few([ONE, THREE, PARTS]), indirect=True)
@pytest.mark.parametrize("is_whole", few([False, True]))
def test_in_workers_too(made, is_whole):
    """In the middle of a pass: what workers gather after an eviction is of the view."""
    view = made.buffer.split(0.8)[0]
    known = known_of(view)
    chosen = set(known[:, 0].tolist())
    order = list(range(len(view)))[::-1]  # the oldest, which are evicted, come last
    options = {"num_workers": 2, "prefetch_factor": 1}
    if is_whole:
        batches = BatchSampler(order, 16, drop_last=True)
        loader = DataLoader(view, batch_size=None, sampler=batches, **options)
    else:
        loader = DataLoader(view, 16, sampler=order, drop_last=True, **options)
    redrawn = 0
    for place, batch in enumerate(loader):
        if place == 0:
            made.fill(12)
        if place > 6:  # gathered since
            asked = np.array(order[16 * place : 16 * place + 16])
            gone, _ = prove(batch, asked, known, made, chosen)
            redrawn += gone.sum()
            assert (np.asarray(batch.redrawn) >= gone).all()
        else:
            assert set(np.asarray(batch["where"])[..., 0].ravel().tolist()) <= chosen
    assert redrawn > 0


@pytest.mark.parametrize("made", few([ONE, PARTS]), indirect=True)
def test_a_sequence_that_runs_on_is_redrawn_among_those_of_its_view(made):
    view = made.buffer.view(window=Sequences(15, across=True))
    known = known_of(view)
    made.fill(12)
    every = np.arange(len(view))
    gone, _ = prove(view[every], every, known, made, set(range(40)))
    assert gone.any()


@pytest.mark.parametrize("made", [ONE, THREE], indirect=True)
def test_what_is_left_is_equally_likely(made):
    view = made.buffer.view(where=is_wanted)
    known = known_of(view)
    made.fill(30)
    gone = np.flatnonzero(~np.isin(known[:, 0], list(made.live)))
    left = len(known) - len(gone)
    where = view[np.resize(gone, 40 * left)]["where"].reshape(-1, 2)
    kinds, counts = np.unique(where, axis=0, return_counts=True)
    assert len(kinds) == left
    expected = 40.0
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < left + 5 * np.sqrt(2 * left)


@pytest.mark.parametrize("made", [THREE], indirect=True)
def test_each_place_of_a_batch_is_redrawn_from_every_ring(made):
    rings = apart(made.buffer.view().redraw(3000))[0]
    for part in np.split(rings, 3):
        assert (np.bincount(part) > 200).all()


@pytest.mark.parametrize("made", few([ONE, PARTS, THREE]), indirect=True)
@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_left(made, workers):
    """An error, also in the middle of a pass and in a worker."""
    view = made.buffer.view(where=is_wanted)
    passing = iter(DataLoader(view, 4, num_workers=workers, timeout=60 if workers else 0))
    next(passing)
    made.fill(41)
    with pytest.raises(NoClipsError, match=r"View: .*; make a new view"):
        for _ in passing:
            pass
    del passing
    for read in (
        lambda: view[0],
        lambda: view[[0, 1]],
        lambda: view.__getitems__([0]),
        lambda: view.sample(2),
    ):
        with pytest.raises(NoClipsError, match=r"view.*make a new view|evicted since it was made"):
            read()


class Evicting(Computed):
    """Writes while a batch is gathered."""

    def __init__(self, rings):
        self.rings = rings

    def compute(self, items):
        self.rings.fill(1)
        return items.position.copy()


@pytest.mark.parametrize("made", few([ONE, THREE, PARTS]), indirect=True)
def test_what_is_evicted_during_the_copy_is_redrawn_from_the_view(made):
    view = made.buffer.view({"at": Index(), "evicts": Evicting(made)}, where=is_wanted)
    kept = np.array(view.get_episode_data()["number"])
    for batch in (view.sample(64), view[range(0, len(view), 3)]):
        numbers = batch["where"][:, 0]
        assert is_wanted({"number": numbers}).all()
        assert (batch["at_episode"] >= 0).all()
        np.testing.assert_array_equal(kept[batch["at_episode"]], numbers)
    assert view.num_redraws > 0
    for batch in itertools.islice(view.batches(64, prefetch=0), 3):
        assert is_wanted({"number": batch["where"][:, 0]}).all()


@pytest.mark.parametrize("made", [PARTS], indirect=True)
def test_what_was_dropped_is_not_drawn_again(made):
    """A collection that is resumed drops what it plays again, in the middle of the ring."""
    view = made.buffer.view(where=is_wanted)
    known = known_of(view)
    assert 20 in known[:, 0]
    made.buffer.engine.drop_chains([int(made.buffer.episode_spans()[0][20])], "here")
    every = np.arange(len(view))
    batch = view[every]
    np.testing.assert_array_equal(batch.redrawn, known[:, 0] == 20)
    for drawn in (batch, view.sample(500)):
        assert 20 not in drawn["where"][:, 0]


@pytest.mark.parametrize("made", [ONE, THREE], indirect=True)
def test_control_redraws_from_the_whole_buffer_are_seen(made, monkeypatch):
    def anywhere(view, count):
        return made.buffer.engine.draw(made.buffer, count, view.cut).positions

    monkeypatch.setattr(BufferView, "redraw_here", anywhere)
    with pytest.raises(AssertionError, match="from the view, and nothing else"):
        test_a_view_gives_what_it_had_or_another_of_its_own(made, "split")
