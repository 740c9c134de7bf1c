"""The two faces: the agent sees what the environment returned; what breaks in between leaves no wrong row."""

import gc

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from ringmap import OfflineToOnlineReplayBuffer, ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import RolloutError
from ringmap.recording import ReplayBufferCollectionWrapper
from ringmap.recording.adapters import EpisodeSink
from ringmap.storage.commit.open_episode import OpenEpisode
from tests.disks import FullDisk
from tests.unit.recording.reading import assert_holds, assert_whole, full_buffer, stepped
from tests.unit.recording.scripted import Model, Scripted
from tests.unit.recording.test_construction import vector


def asynchronous(num, mode="NextStep", **options):
    return AsyncVectorEnv([lambda i=i: Scripted(i) for i in range(num)], autoreset_mode=AutoresetMode(mode), **options)


@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
def test_the_agent_sees_what_the_environment_returned_and_nothing_of_it_changes(mode):
    class Spy(SyncVectorEnv):
        def reset(self, **options):
            self.row = super().reset(**options)
            self.before = repr(self.row)
            return self.row

        def step(self, actions):
            self.given = actions
            self.row = super().step(actions)
            self.before = repr(self.row)
            return self.row

    spy = Spy([lambda i=i: Scripted(i, "dict") for i in range(2)], autoreset_mode=AutoresetMode(mode))
    env = ReplayBufferCollectionWrapper(spy, full_buffer("dict"))
    options = {"reset_mask": np.array([True, True])}
    row = env.reset(options=options)
    assert all(a is b for a, b in zip(row, spy.row, strict=True))
    assert "reset_mask" not in options, "as Gymnasium does with the dict that it is given"
    for i in range(12):
        actions = np.full(2, i)
        row = env.step(actions)
        assert spy.given is actions
        assert all(a is b for a, b in zip(row, spy.row, strict=True))
        assert repr(row) == spy.before
        over = row[2] | row[3]
        if mode == "Disabled" and over.any():
            env.reset(mask=over)
    assert env.observation_space == spy.observation_space and env.num_envs == 2
    assert env.unwrapped is spy


def test_a_single_environment_s_rows_pass_through():
    env = ReplayBufferCollectionWrapper(Scripted(kind="tuple"), full_buffer("tuple"))
    seen = []
    env.env.look, look = lambda: seen.append(look()) or seen[-1], env.env.look
    obs, info = env.reset()
    assert obs is seen[-1] and set(info) == {"number"}
    obs, reward, terminated, truncated, info = env.step(3)
    assert obs is seen[-1] and type(terminated) is bool and reward == 3.5
    assert env.unwrapped is env.env


def test_asynchronous_calls():
    buf, model = full_buffer("box"), Model(2, "NextStep")
    env = ReplayBufferCollectionWrapper(asynchronous(2, copy=False), buf)
    env.reset_async(seed=1)
    env.reset_wait(timeout=30)
    model.reset(np.ones(2, bool))
    for i in range(14):
        actions = np.full(2, i)
        env.step_async(actions)
        with pytest.raises(AlreadyPendingCallError):
            env.step_async(actions + 100)  # refused: what is recorded are the actions under way
        actions[:] = 999  # and the agent may use its array again
        env.step_wait(timeout=30)
        model.step([i, i])
        with pytest.raises(NoAsyncCallError):
            env.step_wait()
    mask = np.array([False, True])
    env.reset_async(options={"x": 1}, mask=mask)
    env.reset_wait()
    model.reset(mask)
    env.step(np.full(2, 5))
    model.step([5, 5])
    with pytest.raises(NoAsyncCallError):
        env.reset_wait()
    env.close()
    model.close()
    assert_holds("box", buf, model.stored)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_an_early_reset_where_a_reset_was_due(shared_memory):
    """Without shared memory AsyncVectorEnv resets once more in the next step: that row is no step."""
    buf = full_buffer("box")
    env = ReplayBufferCollectionWrapper(asynchronous(1, shared_memory=shared_memory), buf)
    env.reset()
    while not buf.num_episodes:
        env.step(np.array([1]))
    env.reset()
    stepped(env, 9)
    env.close()
    assert_whole(buf)
    assert buf.num_episodes > 2


def test_a_step_before_a_reset():
    for env in (Scripted(), vector(2), vector(2, "Disabled")):
        wrapper = ReplayBufferCollectionWrapper(env, ReplayBuffer(9))
        with pytest.raises(RuntimeError, match="step before reset"):
            wrapper.step(0)
    with pytest.raises(RuntimeError, match=r"env \[0\] has ended its episode"):
        wrapper = ReplayBufferCollectionWrapper(Scripted(), ReplayBuffer(9))
        wrapper.reset()
        for _ in range(9):
            wrapper.step(0)


def test_masks_that_make_no_sense():
    env = ReplayBufferCollectionWrapper(vector(2), full_buffer("box"))
    env.reset()
    env.step(np.zeros(2, int))
    for mask in ([True], [False, False], [[True, True]]):
        with pytest.raises(ValueError, match="name at least one environment"):
            env.reset(mask=mask)
    with pytest.raises(ValueError, match="not both"):
        env.reset(mask=[True, False], options={"reset_mask": np.array([True, False])})
    before = env._recorder.open_slots
    with pytest.raises(TypeError, match="reset_mask"):
        env.reset(options={"reset_mask": [True, False]})  # Gymnasium's own error
    assert env._recorder.open_slots == before, "nothing was reset, and nothing ends"
    env.reset(mask=[0, 1])  # anything that says yes or no


def test_actions_that_do_not_fit_are_refused_before_the_environment_steps():
    for actions in (np.zeros(3, int), np.zeros((2, 2), int), np.array([0.5, 1]), ["a", "b"]):
        env = ReplayBufferCollectionWrapper(vector(2), full_buffer("box"))
        env.reset()
        with pytest.raises(ValueError, match=r"^ReplayBufferCollectionWrapper.step: 'action'"):
            env.step(actions)
        assert [e.t for e in env.envs] == [0, 0]
    env.step(np.array([1.0, 2.0]))
    with pytest.raises(TypeError):
        env.step(np.array([[1], [2]]))  # as many values: what becomes of them is the environment's affair
    import torch

    env.step(torch.tensor([1, 2]))


class Breaking(Scripted):
    """Raises at steps that the class was told."""

    at = ()

    def step(self, action):
        row = super().step(action)
        if (self.number, self.episode, self.t) in self.at:
            raise ZeroDivisionError("planted")
        return row


@pytest.mark.parametrize("stream", [False, True])
def test_an_environment_that_raises_leaves_no_gap_in_an_episode(stream, monkeypatch):
    monkeypatch.setattr(Breaking, "at", {(1, 1, 1), (0, 3, 1), (1, 6, 1)})
    buf = full_buffer("box")
    env = ReplayBufferCollectionWrapper(SyncVectorEnv([lambda i=i: Breaking(i) for i in range(2)]), buf, stream=stream)
    env.reset()
    assert len(stepped(env, 60, ZeroDivisionError)) == 3
    env.close()
    assert buf.num_episodes > 10
    assert_whole(buf)


def test_a_single_environment_that_raises(monkeypatch):
    monkeypatch.setattr(Breaking, "at", {(0, 0, 2)})
    buf = full_buffer("box")
    env = ReplayBufferCollectionWrapper(Breaking(script=5), buf)
    env.reset()
    env.step(1)
    with pytest.raises(ZeroDivisionError):
        env.step(2)
    for i in (3, 4):
        env.step(i)
    env.close()
    assert [buf.load_episode(i)["obs"][:, 2].tolist() for i in range(2)] == [[0, 1], [3, 4]]
    assert [buf.load_episode(i)["action"].tolist() for i in range(2)] == [[1, 0], [4, 0]]


def test_long_episodes_of_many_environments():
    """Longer than the room that there is for them at first, and of different lengths."""

    class Long(gymnasium.Env):
        observation_space, action_space = spaces.Box(0, 9999, (2,), np.int32), spaces.Discrete(9999)

        def __init__(self, number):
            self.number = number

        def reset(self, seed=None, options=None):
            self.t = 0
            return np.array([self.number, 0], np.int32), {}

        def step(self, action):
            self.t += 1
            over = self.number > 0 and self.t == (40, 97, 300)[self.number - 1]
            return np.array([self.number, self.t], np.int32), float(action), over, False, {}

    bufs = [ReplayBuffer(5000) for _ in range(4)]
    env = ReplayBufferCollectionWrapper(
        SyncVectorEnv([lambda i=i: Long(i) for i in range(4)], autoreset_mode="SameStep"), bufs
    )
    env.reset()
    for t in range(900):
        env.step(np.full(4, t))
    env.close()
    for number, length in enumerate((900, 40, 97, 300)):
        for k, got in enumerate(bufs[number].episodes()):
            steps = min(length, 900 - k * length)
            assert [o.tolist() for o in got["obs"]] == [[number, t] for t in range(steps + 1)]
            assert [int(a) for a in got["action"]] == [*range(k * length, k * length + steps), 0]
            assert [float(r) for r in got["reward"][1:]] == list(range(k * length, k * length + steps))


def test_a_reset_that_raises_ends_what_is_open():
    class Stuck(Scripted):
        stuck = False

        def reset(self, **options):
            if self.stuck:
                raise ZeroDivisionError("planted")
            return super().reset(**options)

    buf = full_buffer("box")
    env = ReplayBufferCollectionWrapper(Stuck(script=5), buf)
    env.reset()
    env.step(1)
    env.env.stuck = True
    with pytest.raises(ZeroDivisionError):
        env.reset()
    assert buf.num_episodes == 1
    env.env.stuck = False
    env.reset()
    env.step(2)
    env.close()
    assert [buf.load_episode(i)["action"].tolist() for i in range(2)] == [[1, 0], [2, 0]]


class Forgetful(SyncVectorEnv):
    """Says SAME_STEP, and forgets a final observation now and then."""

    def step(self, actions):
        *row, infos = super().step(actions)
        if "final_obs" in infos and actions[0] % 2:
            infos["final_obs"][0] = None
        elif "final_obs" in infos and actions[0] % 3 == 0:
            del infos["final_obs"], infos["_final_obs"]
        return *row, infos


def test_a_missing_final_observation_is_an_error_and_the_run_goes_on():
    buf = full_buffer("box")
    fns = [lambda i=i: Scripted(i) for i in range(2)]
    env = ReplayBufferCollectionWrapper(Forgetful(fns, autoreset_mode="SameStep"), buf)
    env.reset()
    errors = stepped(env, 40, RolloutError)
    env.close()
    assert len(errors) > 2 and all("no final_obs" in str(error) for error in errors)
    assert issubclass(RolloutError, RuntimeError)
    assert_whole(buf)


@pytest.mark.parametrize("kind", ["box", "tuple"])
def test_a_final_observation_that_the_reset_wrote_over_is_an_error(kind):
    class Reusing(Scripted):
        def look(self):
            fresh = super().look()
            if self.held is None:
                self.held = fresh
            for held, new in zip(
                (self.held,) if kind == "box" else self.held, (fresh,) if kind == "box" else fresh, strict=True
            ):
                held[:] = new
            return self.held

    env = ReplayBufferCollectionWrapper(
        SyncVectorEnv([lambda: Reusing(kind=kind)], autoreset_mode="SameStep"), ReplayBuffer(99)
    )
    env.reset()
    with pytest.raises(RolloutError, match="its reset wrote over it"):
        for _ in range(9):
            env.step([0])


class Wrong(gymnasium.Env):
    """Returns an observation of another shape or dtype than it promised."""

    observation_space, action_space = spaces.Box(0, 9, (2,), np.float32), spaces.Discrete(2)
    look = staticmethod(lambda t: np.zeros(3, np.float32) if t == 3 else np.full(2, t / 2))

    def reset(self, seed=None, options=None):
        self.t = 0
        return np.zeros(2), {}

    def step(self, action):
        self.t += 1
        return self.look(self.t), 1.0, False, False, {}


def test_observations_of_another_shape_or_dtype():
    buf = ReplayBuffer(99)
    env = ReplayBufferCollectionWrapper(Wrong(), buf)
    env.reset()
    for t in range(1, 6):
        if t == 3:
            with pytest.raises(ValueError, match=r"'obs' has shape \(1, 3\), expected \(1, 2\)"):
                env.step(0)
        else:
            env.step(0)
    env.close()
    got = [e["obs"] for e in buf.episodes()]
    assert [[float(o[0]) for o in obs] for obs in got] == [[0, 0.5, 1], [2, 2.5]]
    assert got[0][0].dtype == np.float32, "float64 rounds into the float32 that was promised"


def test_infos_that_change_their_shape_cut_the_episode():
    class Growing(Wrong):
        look = staticmethod(lambda t: np.full(2, t / 2, np.float32))

        def step(self, action):
            *row, _ = super().step(action)
            return *row, {"x": np.zeros(2 if self.t == 2 else 1), "d": {"y": self.t}, "n": "text"}

    buf = ReplayBuffer(
        99, schema={"info/x": ((1,), float), "info/d/y": ((), int), "info/n": ((), "U9"), "info/never": ((), "U3")}
    )
    env = ReplayBufferCollectionWrapper(Growing(), buf)
    env.reset()
    env.step(0)
    with pytest.raises(ValueError, match=r"'info/x' has shape"):
        env.step(0)
    env.step(0)
    env.close()
    assert np.isnan(buf.load_episode(1)["info/x"][0]), "what did not fit is blank where an episode begins with it"
    first, second = buf.load_episode(0), buf.load_episode(1)
    assert first["info/d/y"].tolist() == [0, 1] and second["info/d/y"].tolist() == [2, 3]
    assert first["info/n"].tolist() == ["", "text"] and first["info/never"].tolist() == ["", ""]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_costs_the_episodes_that_end_then_and_no_others(tmp_path, monkeypatch, stream):
    disk = FullDisk("write")
    monkeypatch.setattr("ringmap.buffers.engine.DISK", disk)
    buf = ReplayBuffer(2000, path=tmp_path / "buf")
    env = ReplayBufferCollectionWrapper(vector(3), buf, stream=stream)
    env.reset()
    stepped(env, 20)
    disk.full = True
    errors = stepped(env, 10, OSError)
    disk.full = False
    stepped(env, 30)
    env.close()
    assert errors and all("No space left" in str(error) for error in errors)
    assert buf.num_episodes > 20
    assert_whole(buf)
    assert buf.check() == []


def test_closing_stores_what_is_open_and_twice_is_fine():
    for env in (Scripted(script=5), vector(2, script=5)):
        buf = ReplayBuffer(99)
        wrapper = ReplayBufferCollectionWrapper(env, buf)
        wrapper.reset()
        wrapper.step(0 if isinstance(env, Scripted) else [0, 0])
        wrapper.close()
        stored = buf.num_episodes
        wrapper.close()
        assert buf.num_episodes == stored > 0
    wrapper = ReplayBufferCollectionWrapper(Scripted(script=5), buf)
    wrapper.reset()
    wrapper.step(0)
    buf.close()
    wrapper.close()  # nowhere to put it, and no reason to leave the environment open


def test_letting_go_of_a_wrapper_writes_nothing(monkeypatch):
    def close(self):
        if not self.closed:
            self.close()

    # As in Gymnasium 1.0; later versions leave it to AsyncVectorEnv.
    monkeypatch.setattr(gymnasium.vector.VectorEnv, "__del__", close, raising=False)
    buf = ReplayBuffer(99)
    env = ReplayBufferCollectionWrapper(vector(2, script=5), buf)
    env.reset()
    env.step([0, 0])
    assert env._recorder.open_slots == [0, 1]
    del env
    gc.collect()
    assert buf.num_episodes == 0


@pytest.mark.parametrize(
    ("owner", "method", "every", "joins", "options"),
    [
        (ReplayBuffer, "write_joined", 4, True, {}),
        (ReplayBuffer, "write_episode", 4, False, {}),
        (OpenEpisode, "append", 7, None, {"stream": True}),
        (OpenEpisode, "finish", 7, None, {"stream": True}),
    ],
)
def test_an_interrupt_in_the_middle_of_a_step_glues_nothing(owner, method, every, joins, options, monkeypatch):
    buf = full_buffer("box")
    if joins is not None:
        monkeypatch.setattr(EpisodeSink, "joins", joins)
    env = ReplayBufferCollectionWrapper(vector(2), buf, **options)
    env.reset()
    real, calls = getattr(owner, method), []

    def interrupted(self, *args, **options):
        calls.append(1)
        if len(calls) % every == every - 2:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        assert stepped(env, 60, KeyboardInterrupt)
    env.close()
    assert len(calls) > 12 and buf.num_episodes > 12
    assert_whole(buf)


def test_an_interrupt_in_a_reset_glues_nothing(monkeypatch):
    buf = full_buffer("box")
    env = ReplayBufferCollectionWrapper(vector(2, "Disabled"), buf, stream=True)
    env.reset()
    env.step(np.full(2, 0))

    def interrupted(self, *args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OpenEpisode, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            env.reset()
    env.reset()
    env.step(np.full(2, 1))
    env.reset()
    env.close()
    assert buf.num_episodes >= 2
    assert_whole(buf)


@pytest.mark.parametrize("built", [False, True])
def test_all_episodes_that_end_in_one_step_are_durable(tmp_path, built):
    buf = ReplayBuffer(999, path=tmp_path / "ring", durability="power")
    options = (
        {"transition_builder": (lambda **raw: {"obs": raw["cached_obs"], "reward": raw["reward"]})} if built else {}
    )
    env = ReplayBufferCollectionWrapper(vector(2, "NextStep"), buf, **options)
    env.reset()
    stored, most = 0, 0
    for _ in range(60):
        env.step([0, 0])
        most, stored = max(most, buf.num_episodes - stored), buf.num_episodes
        assert not buf.engine.owned.is_unsynced
    assert most == 2
    env.close()


def test_into_the_online_half_of_a_buffer_that_mixes():
    from ringmap.data import ReplayBuffer as Episodes

    clips = Episodes(1000)
    model = Model(2, "NextStep")
    env = ReplayBufferCollectionWrapper(vector(2), clips)
    env.reset()
    for i in range(20):
        env.step(np.full(2, i))
    online = Episodes(1000)
    mixed = OfflineToOnlineReplayBuffer(clips, online_storage=online, seed=0)
    env.set_replay_buffers(mixed, finalize_old_segments=True, require_same_space=False)
    env.reset()
    model.episode = [env.envs[i].episode - 1 for i in range(2)]
    model.reset(np.ones(2, bool))
    for i in range(20):
        env.step(np.full(2, i))
        model.step([i, i])
    assert_holds("box", online, model.stored)
    assert mixed.sample(8)["obs"].shape == (8, 3)


def test_into_the_ring_of_a_buffer_that_mixes_transitions():
    names = {
        "obs": ((3,), np.int32),
        "action": ((), np.int64),
        "reward": ((), np.float64),
        "next_obs": ((3,), np.int32),
        "terminated": ((), bool),
        "t": ((), np.int64),
        "env_index": ((), np.int64),
    }
    offline = ReplayBuffer(100)
    offline.write_episode({n: np.zeros((5, *shape), dtype) for n, (shape, dtype) in names.items()})
    mixed = OfflineToOnlineReplayBuffer(offline, online_capacity=500, seed=0)
    env = ReplayBufferCollectionWrapper(vector(2, "SameStep"), mixed)
    model = Model(2, "SameStep")
    env.reset()
    model.reset(np.ones(2, bool))
    for i in range(20):
        env.step(np.full(2, i))
        model.step([i, i])
    rows = [row for step in model.transitions for row in step]
    ring = mixed.online_buffer
    got = ring.rows(ring.ids())
    code = lambda o: ((o[:, 0].astype(int) << 20) + (o[:, 1] << 8) + o[:, 2]).tolist()  # noqa: E731
    assert code(got["obs"]) == [row[0] for row in rows]
    assert code(got["next_obs"]) == [row[3] for row in rows]
    assert got["action"].tolist() == [row[1] for row in rows]
    assert got["t"].tolist() == [row[8] for row in rows]
    assert got["env_index"].tolist() == [row[6] for row in rows]
    assert mixed.sample(8)["obs"].shape[0] == 8


def test_into_the_transitions_of_a_buffer_that_mixes():
    """They are stored by `add`, under the names of the buffer's own columns."""
    offline, online = (TransitionReplayBuffer(100, (3,), obs_dtype=np.int32, device=None, seed=0) for _ in range(2))
    zeros = np.zeros((8, 3), np.int32)
    offline.add(zeros, np.zeros(8, int), np.zeros(8), zeros, np.zeros(8))
    mixed = OfflineToOnlineReplayBuffer(offline, online_storage=online, seed=0)
    env = ReplayBufferCollectionWrapper(vector(2, "SameStep"), mixed)
    env.reset()
    for i in range(20):
        env.step(np.full(2, i))
    assert len(online) == 40
    assert mixed.sample(8)["observations"].shape == (8, 3)
