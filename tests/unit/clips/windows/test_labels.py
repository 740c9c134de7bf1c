"""Which episode an item is of, on a ring that is written: the number in a batch names it, and its id is the same
everywhere."""

import threading

import numpy as np
import pytest
import torch

from ringmap import Column, ReplayBuffer
from ringmap.buffers.engine import Engine
from ringmap.clips.gather import PINNED
from ringmap.clips.items import EpisodeMoment
from ringmap.data import Computed, Index, ShardedReplayBuffer, Window
from ringmap.errors import ClipIndexError, SubscriptError
from ringmap.samplers import PrioritizedSampler
from tests.tiers import few

LENGTH = 6
WINDOW = {"at": Index()}


def write(buf, number, in_parts=False):
    """Write an episode whose rows and data say its number."""
    data = {"number": number}
    if not in_parts:
        buf.write_episode({"number": np.full(LENGTH, number), "_episode_data": data})
        return
    with buf.begin_episode(commit_every=4, episode_data=data) as part:
        for _ in range(LENGTH):
            part.append({"number": np.int64(number)})


def filled(path, in_parts=False, count=20, **options):
    buf = ReplayBuffer(20 * LENGTH, path=path, seed=0, sync_every_s=0, **options)
    for number in range(count):
        write(buf, number, in_parts)
    return buf


class Striking(Computed):
    """Writes an episode each time that rows of a batch were copied."""

    def __init__(self, buf, in_parts):
        self.buf, self.in_parts, self.next = buf, in_parts, 1_000

    def compute(self, items):
        write(self.buf, self.next, self.in_parts)
        self.next += 1
        return items.position.copy()


def labels(buf, batch):
    """Return what `get_episode_data` says of the numbers in a batch; None where that is an error."""
    try:
        return buf.get_episode_data(batch["at_episode"])["number"]
    except ClipIndexError:
        return None


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("kind", ["writer", "reader", "fleet"])
def test_the_number_of_an_item_names_its_episode(home, kind, in_parts):
    """Evicted, redrawn and written meanwhile: a label is right, or an error."""
    writer = filled(home / "fleet" / "ring", in_parts)
    others = [filled(home / "fleet" / f"other-{n}") for n in range(2 if kind == "fleet" else 0)]
    buf = writer
    if kind != "writer":
        buf = ReplayBuffer.open(writer.path) if kind == "reader" else ShardedReplayBuffer(str(home / "fleet"))
    right = 0
    for step in range(12):
        window = {**WINDOW, "strikes": Striking(writer, in_parts)} if step % 2 else WINDOW
        batch = buf.sample(48, window=window)
        assert (batch["at_episode"] >= 0).all()
        if step % 3 == 1:
            write(writer, 2_000 + step, in_parts)
        found = labels(buf, batch)
        if found is None:
            kept = np.array([_label(buf, n) for n in batch["at_episode"].tolist()], float)
            known = ~np.isnan(kept)
            np.testing.assert_array_equal(kept[known], batch["number"][known])
            right += known.sum()
        else:
            assert found == batch["number"].tolist()
            right += len(found)
        numbers, at = np.unique(batch["at_episode"], return_inverse=True)
        for number in range(len(numbers)):
            assert len(set(batch["number"][at == number].tolist())) == 1
    assert right > 100
    for one in (buf, writer, *others):
        one.close()


def _label(buf, number):
    try:
        return buf.get_episode_data(number)["number"][0]
    except ClipIndexError:
        return np.nan


def test_batches_that_were_drawn_ahead_keep_their_numbers(home):
    buf = filled(home / "ring")
    with buf.batches(16, steps=6, prefetch=3, window=WINDOW) as batches:
        for number, batch in enumerate(batches):
            found = labels(buf, batch)
            assert found is None or found == batch["number"].tolist()
            write(buf, 500 + number)
    buf.close()


def test_numbers_that_are_in_no_batch_mean_what_is_stored_now(home):
    buf = filled(home / "ring")
    assert buf.get_episode_data([-1])["number"] == [19]
    batch = buf.sample(4, window=WINDOW)
    asked = int(batch["at_episode"][0])
    assert buf.episode_data(asked) == {"number": int(batch["number"][0])}
    for number in range(20, 40):
        write(buf, number)
    with pytest.raises(ClipIndexError, match=f"episode {asked} was evicted"):
        buf.get_episode_data(asked)
    other = next(n for n in range(20) if n not in batch["at_episode"])
    assert buf.get_episode_data([asked, other])["number"] == [20 + asked, 20 + other]
    assert buf.get_episode_data([-1, 0])["number"] == [39, 20]
    assert buf.get_episode_data(-1) == {"number": [39]}
    with pytest.raises(ClipIndexError, match="episode 20 is out of range for 20 episodes"):
        buf.get_episode_data(20)
    buf.close()


def test_a_thread_writes_between_numbers_and_data(home):
    """A number is looked up once, not for each episode."""
    buf, stop = filled(home / "ring"), threading.Event()
    numbers = iter(range(20, 10**9))
    thread = threading.Thread(target=lambda: [write(buf, next(numbers)) for _ in iter(stop.is_set, True)])
    thread.start()
    try:
        for _ in range(200):
            try:
                found = buf.get_episode_data(range(10, 20))["number"]
            except ClipIndexError:
                continue
            assert np.diff(found).tolist() == [1] * 9
    finally:
        stop.set()
        thread.join()
    buf.close()


def test_the_data_of_one_episode_are_one_read(home, monkeypatch):
    buf = filled(home / "ring")
    store, read = buf.engine.source, []
    blob_of = store.blob_of
    monkeypatch.setattr(store, "blob_of", lambda record: read.append(record.seq) or blob_of(record))
    assert buf.get_episode_data(3) == {"number": [3]}
    assert len(read) == 1
    buf.close()


def test_control_numbers_of_another_moment_are_seen(home, monkeypatch):
    """Where a batch is not remembered, and where its numbers are not of one moment."""
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "names_in_batch", lambda self, numbers: None)
        with pytest.raises(AssertionError):
            test_the_number_of_an_item_names_its_episode(home / "a", "writer", False)
    numbers = EpisodeMoment._numbers

    def newest(self, source, starts):
        self.begin()
        return numbers(self, source, starts)

    monkeypatch.setattr(EpisodeMoment, "_numbers", newest)
    with pytest.raises(AssertionError):
        test_the_number_of_an_item_names_its_episode(home / "b", "writer", False)


# -- one kind of id ----------------------------------------------------------------------------


def test_the_ring_and_the_id_of_an_item_of_a_fleet(home):
    writers = [filled(home / "fleet" / f"ring-{n}") for n in range(3)]
    with ShardedReplayBuffer(str(home / "fleet"), seed=0) as buf:
        names = {shard.number: shard.name for shard in buf.shards}
        view = buf.view(WINDOW)
        for batch in (buf.sample(64, window=WINDOW), view[range(0, len(view), 5)], view.sample(64)):
            assert [names[n] for n in sorted(set(batch["at_ring"].tolist()))] == ["ring-0", "ring-1", "ring-2"]
            np.testing.assert_array_equal(batch["at_id"], batch.ids)
            np.testing.assert_array_equal(batch["at_position"] // LENGTH, batch["number"])
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("workers", few([0, 2]))
def test_an_id_stays_with_a_batch_that_is_collated_or_moved(home, workers):
    """In a column, or as the attribute: both serve for priorities, and for new values."""
    buf = ReplayBuffer(
        100,
        path=home / "ring",
        seed=0,
        sampler=PrioritizedSampler(rng=0),
        schema={"number": Column((), np.int64), "value": Column((), np.float32, mutable=True)},
    )
    buf.write_episode({"number": np.arange(20), "value": np.zeros(20, np.float32)})
    view = buf.view(window={"at": Index(), "number": Window([0])})
    view.sample(4)
    loader = torch.utils.data.DataLoader(view, 5, num_workers=workers)
    for batch in loader:
        assert batch.ids.tolist() == batch["at_id"].tolist()
        moved = {name: values.to("cpu") for name, values in batch.items()}
        assert buf.update_priorities(moved["at_id"], torch.ones(5)) == 5
        assert buf.update(moved["at_id"], {"value": moved["number"][:, 0].float()}) == 5
    np.testing.assert_array_equal(buf.get_col_data("value"), buf.get_col_data("number"))
    buf.close()


@pytest.mark.parametrize("kind", ["view", "fleet's view"])
def test_a_view_counts_the_steps_of_an_episode_that_lost_its_first_ones(home, kind):
    """`locate`, `clip_indices` and `load_steps` mean one step by a number."""
    writer = ReplayBuffer(60, path=home / "fleet" / "ring")
    for number in range(2):
        one = writer.begin_episode(commit_every=4)
        for at in range(24):
            one.append({"step": number * 100 + at})
        if not number:
            one.finish()
    buf = ShardedReplayBuffer(str(home / "fleet")) if "fleet" in kind else writer
    view = buf.view()
    writer.write_episode({"step": np.arange(20)})  # the first 8 steps of episode 0 go
    for at in range(24, 28):
        one.append({"step": 100 + at})
    buf.refresh()
    batch = view.sample(64)
    episodes, steps = view.locate(batch.ids)
    assert (episodes * 100 + steps).tolist() == np.ravel(batch["step"]).tolist()
    assert steps[episodes == 0].min() >= 8
    for episode, step, value in zip(episodes.tolist(), steps.tolist(), np.ravel(batch["step"]), strict=True):
        assert view.load_steps(episode, step, step + 1)["step"].tolist() == [value]
        assert buf[view.positions_of(np.array([episode]), np.array([step])) + PINNED]["step"].ravel().tolist() == [
            value
        ]
    grown = buf.view().sample(200)
    with pytest.raises(ClipIndexError, match="has grown since|is not in this view"):
        view.locate(grown.ids[np.ravel(grown["step"]) >= 124][:1])
    for made in {buf, writer}:
        made.close()


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("kind", ["ring", "view", "fleet", "fleet's view"])
def test_the_ids_of_a_batch_say_where_its_items_are(home, kind, in_parts):
    """Also of one that came without such columns, and after evictions."""
    writers = [filled(home / "fleet" / f"ring-{n}", in_parts) for n in range(3 if "fleet" in kind else 1)]
    buf = ShardedReplayBuffer(str(home / "fleet"), seed=0) if "fleet" in kind else writers[0]
    source = buf.view(where="number > 3") if "view" in kind else buf
    batch = source.sample(64)
    episodes, steps = source.locate(batch.ids)
    assert source.get_episode_data(episodes)["number"] == batch["number"].ravel().tolist()
    pairs = list(source.clip_indices)
    assert set(zip(episodes.tolist(), steps.tolist(), strict=True)) <= set(pairs)
    few = source[range(0, len(pairs), 7)]
    assert list(zip(*map(np.ndarray.tolist, source.locate(few.ids)), strict=True)) == pairs[::7]
    assert source.locate([])[0].tolist() == []
    with pytest.raises(ClipIndexError, match=r"locate: no step with the id \d+ is there"):
        source.locate(batch.ids + 10**6)
    for number in range(20, 40):
        write(writers[0], number, in_parts)
    buf.refresh()
    with pytest.raises(ClipIndexError, match="it was evicted"):
        source.locate(batch.ids)
    if source is not buf:
        with pytest.raises(ClipIndexError, match="or is not in this view"):
            source.locate(buf.view(where="number > 35").sample(4).ids)
    if kind == "ring":
        with pytest.raises(SubscriptError, match=r"locate\(batch.ids\) says the same"):
            buf.clip_indices[batch.ids]
    for one in (buf, *writers):
        one.close()


def test_every_computed_column_knows_the_number(home):
    """A column of a caller's, which asks for the number twice, and for a part of the items."""

    class Mine(Computed):
        def compute(self, items):
            half = items.part(np.arange(len(items)) % 2 == 0)
            assert half.episode.tolist() == items.episode[::2].tolist()
            return items.episode

    buf = filled(home / "ring", reward_at=None)
    batch = buf.sample(16, window={"mine": Mine()})
    assert batch["mine"].tolist() == batch["number"].tolist()
    assert buf.get_episode_data(batch["mine"])["number"] == batch["number"].tolist()
    buf.close()
