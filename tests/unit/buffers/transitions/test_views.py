"""Views and splits of transitions: their episodes are those of the environments, whatever was committed together."""

import contextlib

import numpy as np
import pytest

from ringmap import TransitionReplayBuffer
from ringmap.buffers.rings import Ring
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import InputError
from ringmap.samplers import EpisodeSampler, PrioritizedSampler

CAPACITY, STACK = 300, 3
KINDS = {
    "plain": {},
    "n_step": {"n_step": 3},
    "stacks": {"frame_stack": STACK},
    "stacks, n_step": {"frame_stack": STACK, "n_step": 3},
    "nested": {},
    "named": {},
}


class Envs:
    """Rings of three environments each; an observation says its ring, its episode and the step there."""

    def __init__(self, folder, kind, count=1, capacity=CAPACITY, **options):
        self.kind, self.options = kind, KINDS[kind] | options
        self.size = self.options.get("frame_stack")
        shape = (3,) if self.size is None else (self.size, 3)
        self.shape = {"a": {"b": shape}} if kind == "nested" else shape
        self.rng, self.next_episode = np.random.default_rng(0), 0
        self.paths = [folder / f"ring{ring}" for ring in range(count)]
        self.writers = [
            TransitionReplayBuffer(capacity, self.shape, obs_dtype="f8", device=None, path=path, seed=0, **self.options)
            for path in self.paths
        ]
        self.now = [[self.begin(ring) for _ in range(3)] for ring in range(count)]

    def begin(self, ring):
        self.next_episode += 1
        return [ring, self.next_episode, 0]

    def observed(self, frames):
        frames = np.array(frames, "f8")
        if self.size is not None:
            back = np.minimum(np.arange(self.size - 1, -1, -1)[:, None], frames[:, 2])
            frames = np.repeat(frames[None], self.size, 0)
            frames[..., 2] -= back
            frames = np.swapaxes(frames, 0, 1)
        return {"a": {"b": frames}} if self.kind == "nested" else frames

    def add(self, calls, flush_every=7):
        """Add calls of all environments, committed together a few at a time."""
        for call in range(calls):
            for ring, writer in enumerate(self.writers):
                names = self.rng.permutation(3)[:2].tolist() if self.kind == "named" else [0, 1, 2]
                now = [self.now[ring][name] for name in names]
                after = [[r, episode, step + 1] for r, episode, step in now]
                ends = self.rng.random((2, len(names))) < 0.08
                options = {"lane": names} if self.kind == "named" else {}
                writer.add(
                    self.observed(now),
                    [0] * len(names),
                    np.ones(len(names)),
                    self.observed(after),
                    ends[0],
                    truncated=ends[1],
                    **options,
                )
                for name, frame, end in zip(names, after, ends.any(0), strict=True):
                    self.now[ring][name] = self.begin(ring) if end else frame
                if call % flush_every == 0:
                    writer.flush()

    def close(self):
        for writer in self.writers:
            writer.close()


@contextlib.contextmanager
def opened(folder, kind, how, **options):
    """Yield environments, and the buffer to look at."""
    envs = Envs(folder, kind, 2 if how == "fleet" else 1, **options)
    with contextlib.closing(envs):
        envs.add(120)
        for writer in envs.writers:
            writer.flush()
        if how == "writer":
            yield envs, envs.writers[0]
            return
        reading = {name: value for name, value in envs.options.items() if name == "n_step"}
        made = (
            ShardedReplayBuffer(envs.paths, seed=0, **reading)
            if how == "fleet"
            else TransitionReplayBuffer.open(envs.paths[0], device=None, **reading)
        )
        with contextlib.closing(made):
            yield envs, made


def steps_of(batch):
    """Return the ring, the episode and the step of each transition, which is proved to be whole."""

    def leaf(values):
        return np.asarray(values["a"]["b"] if isinstance(values, dict) else values)

    now, after = leaf(batch["observations"]), leaf(batch["next_observations"])
    if now.ndim == 3:
        assert (now[..., :2] == now[:, -1:, :2]).all() and (after[..., :2] == now[:, -1:, :2]).all()
        now, after = now[:, -1], after[:, -1]
    np.testing.assert_array_equal(now[:, :2], after[:, :2])  # also the last of n steps is of its episode
    return [tuple(step) for step in now.astype(int).tolist()]


def items_of(view):
    return steps_of(view[np.arange(len(view))]) if len(view) else []


def episodes_of(steps):
    return {step[:2] for step in steps}


HOW = "writer", "reader", "fleet"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_parts_episodes_and_stays(tmp_path, kind, how):
    with opened(tmp_path, kind, how) as (envs, buf):
        whole = buf.view()
        steps = items_of(whole)
        assert len(steps) == len({*steps}) == len(buf) == len(whole)
        assert len(whole.lengths) == len(episodes_of(steps))
        bounds = np.cumsum(whole.lengths)[:-1]
        for part in np.split(np.array(steps), bounds):  # each is one episode, in order
            assert len({*map(tuple, part[:, :2].tolist())}) == 1
            assert (np.diff(part[:, 2]) == 1).all()
        sides = buf.split([0.6, 0.2, 0.2], seed=1)
        found = [items_of(side) for side in sides]
        assert sorted(step for side in found for step in side) == sorted(steps)
        kept = [episodes_of(side) for side in found]
        assert not (kept[0] & kept[1] or kept[0] & kept[2] or kept[1] & kept[2])
        one, other = sides[0].split(0.5, seed=2)
        assert not episodes_of(items_of(one)) & episodes_of(items_of(other))
        again = items_of(buf.view(at=sides[0].moment))
        assert again == found[0]

        side_of = {episode: number for number, side in enumerate(kept) for episode in side}
        envs.add(60)
        for writer in envs.writers:
            writer.flush()
        buf.refresh()
        for number, side in enumerate(buf.split([0.6, 0.2, 0.2], seed=1)):
            for episode in episodes_of(items_of(side)):
                assert side_of.setdefault(episode, number) == number, "an episode changed sides"


@pytest.mark.parametrize("sampler", [None, EpisodeSampler], ids=["uniform", "by episode"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_what_does_not_count_any_more_is_not_drawn(tmp_path, lanes, sampler, monkeypatch):
    """Rows are stored for longer than they count; a commit of many is left behind row by row."""
    monkeypatch.setattr("ringmap.buffers.view._ROWS", 5)
    made = TransitionReplayBuffer(60, (2,), path=tmp_path / "ring", device=None, seed=0)
    with made as writer, TransitionReplayBuffer.open(tmp_path / "ring", device=None, seed=0) as reader:
        reader.sampler = sampler and sampler(0)

        def add(begin, end):
            for step in range(begin, end):
                now = [[lane, step] for lane in range(lanes)]
                writer.add(
                    now, [0] * lanes, [0] * lanes, [[lane, step + 1] for lane, step in now], [step % 9 == 8] * lanes
                )
            writer.flush()
            reader.refresh()

        def told(batch):
            return [tuple(row) for row in batch["observations"].astype(int).tolist()]

        add(0, 60 // lanes)
        views = [reader.view(), reader.view().take([2, 1, 2])]
        before = [told(view[np.arange(len(view))]) for view in views]
        for step in range(60 // lanes, 110 // lanes, 3):
            add(step, step + 3)
            low = step + 3 - 60 // lanes
            for view, held in zip(views, before, strict=True):
                left = [row for row in held if row[1] >= low]
                assert view.num_valid_ends() == len(left)
                if left:
                    assert {*told(view.sample(2000))} == {*left}
                    assert {*told(view[np.arange(len(view))])} <= {*left}


def test_a_live_side_follows_the_buffer(tmp_path):
    with opened(tmp_path, "plain", "writer") as (envs, buf):
        train, rest = buf.view(live=True).split(0.7)
        before = episodes_of(items_of(train))
        envs.add(40)
        assert train.refresh() and rest.refresh()
        now, other = items_of(train), items_of(rest)
        assert episodes_of(now) - before and not episodes_of(now) & episodes_of(other)
        assert sorted(now + other) == sorted(items_of(buf.view()))


def test_samplers_draw_from_a_side(tmp_path):
    with opened(tmp_path, "plain", "writer", sampler=EpisodeSampler(0)) as (_, buf):
        train, _ = buf.split(0.7)
        counts = dict.fromkeys(episodes_of(items_of(train)), 0)
        for episode in [step[:2] for _ in range(60) for step in steps_of(train.sample(64))]:
            counts[episode] += 1  # of an episode as often as of any other, however long
        assert min(counts.values()) > 0.4 * 60 * 64 / len(counts)
        buf.sampler = PrioritizedSampler(alpha=1.0)
        batch = train.sample(64)
        hot = steps_of(batch)[0]
        buf.update_priorities(batch.ids, np.where(batch.ids == batch.ids[0], 1e6, 1e-3))
        assert steps_of(train.sample(64)).count(hot) > 32


def test_which_have_ended(tmp_path):
    buf = TransitionReplayBuffer(20, (1,), device=None)
    for step in range(3):
        buf.add([[step], [10 + step]], [0, 0], [0, 0], [[step + 1], [11 + step]], [step == 2, False])
    view = buf.view()
    assert view.lengths.tolist() == [3, 3] and view.ended.tolist() == [True, False]
    assert view.take([1])[0]["observations"].tolist() == [10]
    assert view.take(np.flatnonzero(view.ended)).lengths.tolist() == [3]
    assert buf.view().pinned().lengths.tolist() == [3, 3]


def test_what_a_view_of_transitions_can_not(tmp_path):
    with opened(tmp_path, "plain", "writer") as (_, buf):
        for options in ({"where": "return > 1"}, {"window": {"rewards": 3}}, {"columns": ["rewards"]}):
            with pytest.raises(TypeError, match="unexpected keyword"):
                buf.view(**options)
        view = buf.view()
        for call in (
            lambda: view.locate([0]),
            lambda: view.load_episode(0),
            lambda: view.get_episode_data(),
            lambda: view.episode_column_names,
            lambda: view.view(where="return > 1"),
            lambda: view.view(columns=["rewards"]),
        ):
            with pytest.raises(InputError, match="it holds transitions, not episodes"):
                call()
        with pytest.raises(InputError, match="of another buffer"):
            TransitionReplayBuffer(9, (3,), device=None, path=tmp_path / "other").view(at=view.moment)


def test_control(tmp_path, monkeypatch):
    """A view of what was committed together parts episodes."""
    monkeypatch.setattr(Ring, "pinned_episodes", lambda self: Ring.pinned(self))
    with opened(tmp_path, "plain", "writer") as (_, buf):
        one, other = buf.split(0.5)
        assert episodes_of(items_of(one)) & episodes_of(items_of(other))
