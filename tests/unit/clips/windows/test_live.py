"""Windows and computed columns while a writer laps the ring: threads, workers forked and from a fork server, views,
priorities."""

import contextlib
import itertools
import pickle
import threading
import time

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap import ReplayBuffer
from ringmap.clips.bounds import Bounds
from ringmap.data import Hindsight, Index, NStep, ReturnToGo, Window
from ringmap.errors import InputError, NoClipsError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.commit.store import Store

WINDOW_OFFSETS = [-2, 0, 3]


def episode(number):
    """Every row says its episode, its step and the length; rewards are the episode's number."""
    length = 1 + number % 13
    where = np.stack([np.full(length, number), np.arange(length), np.full(length, length)], 1)
    return {
        "where": where,
        "reward": np.full(length, float(number)),
        "achieved_goal": where.astype("f8"),
        "desired_goal": np.full((length, 3), -1.0),
        "terminated": np.zeros(length, bool),
    }


def reached(achieved, goal):
    assert (achieved[:, 0] == goal[:, 0]).all(), "a goal of another episode"
    return achieved[:, 1] * 1000 + goal[:, 1]


def window():
    return {
        "where": Window(WINDOW_OFFSETS, pad="edge"),
        "r": ReturnToGo(),
        "back": ReturnToGo(offsets=[-1, 0]),
        "n": NStep(3, 1.0, next=["where"]),
        "her": Hindsight(reached, "future"),
        "at": Index(),
    }


def prove(batch):
    """Check each item against what its own rows say."""
    batch = {name: np.asarray(values) for name, values in batch.items()}
    number, t, length = batch["where"][:, 1].T
    assert (batch["where"][:, :, 0] == number[:, None]).all(), "a row of another episode"
    wanted = t[:, None] + np.array(WINDOW_OFFSETS)
    np.testing.assert_array_equal(batch["where"][:, :, 1], np.clip(wanted, 0, length[:, None] - 1))
    np.testing.assert_array_equal(batch["where_is_pad"], (wanted < 0) | (wanted >= length[:, None]))
    np.testing.assert_array_equal(batch["at_step"], t)
    np.testing.assert_array_equal(batch["r"], number * (length - t))
    np.testing.assert_array_equal(batch["back"][:, 1], number * (length - t))
    np.testing.assert_array_equal(batch["back_is_pad"][:, 0], t == 0)
    count = np.minimum(3, length - 1 - t)
    np.testing.assert_array_equal(batch["n"], number * count)
    np.testing.assert_array_equal(batch["next_where"][:, 1], t + count)
    np.testing.assert_array_equal(batch["next_where"][:, 0], number)
    her = batch["her"].astype(bool)
    goals = batch["desired_goal"]
    assert (goals[~her] == -1).all()
    np.testing.assert_array_equal(goals[her, 0], number[her])
    assert (goals[her, 1] > t[her]).all()
    np.testing.assert_array_equal(batch["her_reward"][her], (t[her] + 1) * 1000 + goals[her, 1])


def filled(**options):
    options = {"max_steps": 150, "spare_rows": 20, "seed": 0, "reward_at": "same", **options}
    buf, numbers = ReplayBuffer(**options), itertools.count(1)
    for _ in range(options["max_steps"] // 4):
        buf.write_episode(episode(next(numbers)))
    return buf, numbers


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["ram", "memmap", "zarr"])
def test_computed_columns_under_a_writer(home, storage):
    """Two threads share the columns, over a buffer, a view of it, and a reader, while a third writes."""
    options = {} if storage == "ram" else {"path": home / "ring", "storage": storage}
    # Large enough that the writer does not lap a reader ten times in a row while that waits for the interpreter.
    buf, numbers = filled(max_steps=3_000, **options)
    sources = [buf, buf] if storage == "ram" else [buf, ReplayBuffer.open(home / "ring", seed=1)]
    shared, stop, wrong = window(), threading.Event(), []
    views = [source.view(window=shared) for source in sources]

    def read(source, view):
        try:
            for _ in range(25):
                prove(source.sample(32, window=shared))
                prove(view[[0, len(view) // 2, len(view) - 1]])
                try:
                    prove(view.sample(16))
                except NoClipsError:
                    view = source.view(window=shared)
        except BaseException as error:
            wrong.append(error)

    def write():
        while not stop.is_set():
            buf.write_episode(episode(next(numbers)))
            # NumPy gives the interpreter up and takes it back before another thread has woken: seconds pass.
            time.sleep(1e-5)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(sources, views, strict=True)]
    writer = threading.Thread(target=write)
    for thread in [writer, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    writer.join()
    for source in reversed(sources):
        source.close()
    if wrong:
        raise wrong[0]


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_under_a_writer(home, context):
    """Workers read a view while its episodes are evicted, until none is left."""
    buf, numbers = filled(path=home / "ring")
    view = buf.view(window=window())
    newest = int(view[-1]["where"][1, 0])
    loader = DataLoader(view, 4, num_workers=2, prefetch_factor=1, multiprocessing_context=context, timeout=60)
    redrawn = 0
    with pytest.raises(NoClipsError, match="were evicted since it was made"):
        for batch in loader:
            redrawn += int(batch.redrawn.sum())
            prove(batch)
            assert (np.asarray(batch["where"])[:, 1, 0] <= newest).all()
            buf.write_episode(episode(next(numbers)))
    assert redrawn > 0
    copied = pickle.loads(pickle.dumps(view))
    with pytest.raises(NoClipsError):
        copied[[0, 3]]
    prove(pickle.loads(pickle.dumps(buf.view(window=window())))[[0, 3]])
    buf.close()


@pytest.mark.parametrize("where", ["read", "tail"])
def test_sums_of_rows_that_went_replace_no_newer_ones(monkeypatch, where):
    """After the rewards were read, or the oldest row was looked up, another thread laps the ring and keeps newer
    sums."""
    buf, returns = ReplayBuffer(24, spare_rows=8, seed=0, reward_at="same"), ReturnToGo()

    def write(count, length):
        for _ in range(count):
            buf.write_episode({"reward": np.arange(length) + 1.0})

    def lap():
        write(6, 5)
        look()

    def look():
        view = buf.view(window={"reward": Window([0]), "sum": returns})
        return view[list(range(len(view)))]

    waiting = [threading.Thread(target=lap)]

    def interrupted(call):
        def after(*args):
            found = call(*args)
            if waiting:
                thread = waiting.pop()
                thread.start()
                thread.join(0.5)  # it waits for the lock, where one is held
                threads.append(thread)
            return found

        return after

    place, name = (Bounds, "read") if where == "read" else (Store, "newest_tail")
    threads = []
    write(3, 8)
    monkeypatch.setattr(place, name, interrupted(getattr(place, name)))
    with contextlib.suppress(NoClipsError):  # all of its view is gone
        look()
    threads[0].join()
    batch = look()
    steps = batch["reward"][:, 0].astype(int)
    np.testing.assert_array_equal(batch["sum"], 15 - steps * (steps - 1) / 2)
    assert len(steps) == 20


# -- priorities ---------------------------------------------------------------------------------


def test_priorities_of_an_earlier_window_count():
    """A batch of one window may be given its priorities after a draw through another with fewer anchors."""
    buf, _ = filled(sampler=PrioritizedSampler(alpha=1, rng=0))
    early = {"where": Window([0])}
    batch = buf.sample(64, window=early)
    buf.sample(4, window={"where": Window([-4, 0, 4])})
    assert buf.update_priorities(batch.ids, np.full(64, 1e-6)) == 64
    buf.update_priorities(batch.ids[:1], [1e9])
    assert (buf.sample(32, window=early).ids == batch.ids[0]).all()


def test_priorities_after_a_draw_of_a_view_that_is_gone():
    buf, _ = filled(sampler=PrioritizedSampler(alpha=1, rng=0))
    batch = buf.view(window={"where": Window([-1, 0])}).sample(16)
    assert buf.update_priorities(batch.ids, np.ones(16)) == 16


def test_priorities_of_evicted_anchors_are_skipped():
    """Also where the steps around an anchor are gone or were never stored."""
    buf, numbers = filled(sampler=PrioritizedSampler(alpha=1, rng=0))
    batch = buf.sample(16, window={"where": Window([-1, 0])})
    for _ in range(60):
        buf.write_episode(episode(next(numbers)))
    assert buf.update_priorities(batch.ids, np.ones(16)) == 0
    head = buf.engine.source.head
    assert buf.update_priorities(np.array([-5, head, head + 7]), np.ones(3)) == 0


# -- offsets ------------------------------------------------------------------------------------


def test_offsets_far_beyond_the_ring():
    buf, _ = filled()
    far = [-(1 << 31) + 1, 0, (1 << 31) - 1]
    batch = buf.sample(32, window={"where": Window(far, pad="edge")})
    assert (batch["where"][:, 0, 1] == 0).all()
    assert (batch["where"][:, 2, 1] == batch["where"][:, 2, 2] - 1).all()
    assert batch["where_is_pad"].tolist() == [[True, False, True]] * 32
    for offset in (1 << 31, 1 << 63, -(1 << 62)):
        with pytest.raises(InputError, match="offsets must lie within 2"):
            Window([offset])
    with pytest.raises(NoClipsError, match="the longest stored episode"):
        buf.sample(2, window={"where": Window(range(400))})
