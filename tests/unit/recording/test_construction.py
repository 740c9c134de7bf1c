"""What is refused when a wrapper is made, before anything changes; and what is taken."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

import ringmap
from ringmap import DistillationBuffer, OfflineToOnlineReplayBuffer, ReplayBuffer, RolloutBuffer, TransitionReplayBuffer
from ringmap.errors import InputError, ReadOnlyError
from ringmap.recording import ReplayBufferCollectionWrapper
from tests.unit.recording.scripted import Scripted


def vector(num, mode="NextStep", kind="box", script=0):
    return SyncVectorEnv(
        [lambda i=i: Scripted(i, kind, script) for i in range(num)], autoreset_mode=AutoresetMode(mode)
    )


def envs(num):
    return Scripted() if num is None else vector(num)


@pytest.mark.parametrize(
    ("num", "count", "mode", "found"),
    [
        (None, 1, "auto", "shared"),
        (1, 1, "auto", "shared"),
        (3, 1, "auto", "shared"),
        (3, 3, "auto", "per_env"),
        (None, 1, "shared", "shared"),
        (3, 1, "shared", "shared"),
        (1, 1, "per_env", "per_env"),
        (3, 3, "per_env", "per_env"),
        (None, 2, "auto", "2 buffers for a single environment"),
        (None, 0, "auto", "0 buffers"),
        (1, 2, "auto", "2 buffers for 1"),
        (3, 2, "auto", "2 buffers for 3 environments; expected 1, or 3"),
        (3, 3, "shared", "takes one buffer, got 3"),
        (None, 0, "shared", "takes one buffer"),
        (None, 1, "per_env", "takes a vector environment"),
        (3, 1, "per_env", "got 1 for 3"),
        (3, 1, "each", "must be one of"),
    ],
)
def test_which_buffer_is_whose(num, count, mode, found):
    buffers = [ReplayBuffer(10) for _ in range(count)]
    if found not in ("shared", "per_env"):
        with pytest.raises(ValueError, match=found):
            ReplayBufferCollectionWrapper(envs(num), buffers, mode)
        return
    wrapper = ReplayBufferCollectionWrapper(envs(num), buffers, mode)
    assert wrapper.replay_mode == found
    assert all(a is b for a, b in zip(wrapper.replay_buffers, buffers, strict=True))
    assert wrapper.dump_path is None


def test_the_kinds_of_wrapper_and_its_names():
    buf = ReplayBuffer(10)
    one = ringmap.ReplayBufferCollectionWrapper.shared(Scripted(), buf)
    assert isinstance(one, ReplayBufferCollectionWrapper) and isinstance(one, gymnasium.Wrapper)
    many = ReplayBufferCollectionWrapper.per_env(vector(2), [buf, ReplayBuffer(10)], stream=True)
    assert isinstance(many, ReplayBufferCollectionWrapper) and isinstance(many, VectorWrapper)
    assert ringmap.recording.ReplayBufferCollectionWrapper is ReplayBufferCollectionWrapper
    assert ReplayBufferCollectionWrapper.buffer_swap is ReplayBufferCollectionWrapper.set_replay_buffers
    assert many.call("number") == (0, 1), "what the environment has besides is there"
    with pytest.raises(ValueError, match=r"expected a gymnasium.Env .* got dict"):
        ReplayBufferCollectionWrapper({}, buf)


def test_autoreset_modes_are_read_or_given_and_nothing_else():
    buf = ReplayBuffer(10)
    for mode in AutoresetMode:
        made = ReplayBufferCollectionWrapper(vector(2, mode.value), buf)
        assert made._recorder.slots.mode == mode.value
        other = ReplayBufferCollectionWrapper(vector(2), buf, autoreset_mode=mode)
        assert other._recorder.slots.mode == mode.value
    for wrong in (None, "NextStep", 1):
        env = vector(2)
        env.metadata = {"autoreset_mode": wrong}
        with pytest.raises(InputError, match=f"must be one of .*AutoresetMode, got {wrong!r}"):
            ReplayBufferCollectionWrapper(env, buf)
    with pytest.raises(ValueError, match="got 'NextStep'"):
        ReplayBufferCollectionWrapper(vector(2), buf, autoreset_mode="NextStep")
    single = gymnasium.wrappers.TimeLimit(gymnasium.wrappers.Autoreset(Scripted()), 9)
    assert ReplayBufferCollectionWrapper(single, buf)._recorder.slots.mode == "NextStep"


BOX = ((3,), np.int32)


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"obs": BOX, "pixels": ((4,), "u1")}, "asks for 'pixels', which this environment does not have; known are"),
        ({"obs/place": BOX}, "asks for 'obs/place'"),
        ({"obs": ((4,), np.int32)}, r"'obs' of shape \(4,\), but it comes in shape \(3,\)"),
        ({"action": ((1,), np.int64)}, "'action' of shape"),
        ({"obs": ((3,), np.uint8)}, "'obs' of uint8, which can't hold what comes"),
        ({"obs": ((3,), bool)}, "'obs' of bool"),
        ({"obs": ((3,), "U4")}, "'obs' of <U4"),
        ({"action": ((), np.uint8)}, "'action' of uint8, which can't hold what comes: Discrete"),
        ({"reward": ((), np.int64)}, "'reward' of int64"),
        ({"reward": ((1,), np.float32)}, "'reward' of shape"),
        ({"t": ((), bool)}, "'t' of bool"),
        ({"context": ((2,), np.float32)}, "'context', but Gymnasium has no contexts; pass context_fn"),
    ],
)
def test_what_a_schema_may_not_ask_for(schema, fault):
    with pytest.raises(ValueError, match=f"^ReplayBufferCollectionWrapper: ReplayBuffer .*{fault}"):
        ReplayBufferCollectionWrapper(Scripted(), ReplayBuffer(10, schema=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"obs": ((3,), np.uint16)},
        {"obs": ((3,), np.float32)},
        {"action": ((), np.int16)},
        {"action": ((), np.float64)},
        {"reward": ((), np.float16)},
        {"terminated": ((), np.uint8)},
        {"is_last": ((), np.float32)},
        {"t": ((), np.uint16)},
        {"env_index": ((), np.uint8), "info/whatever": ((7,), "U9")},
    ],
)
def test_what_a_schema_may_ask_for(schema):
    ReplayBufferCollectionWrapper(Scripted(), ReplayBuffer(10, schema=schema))


def test_casting_unsafe_takes_any_number():
    buf = ReplayBuffer(10, schema={"obs": ((3,), np.uint8)}, casting="unsafe")
    ReplayBufferCollectionWrapper(Scripted(), buf)


def test_a_reopened_buffer_picks_by_its_schema(tmp_path):
    with ReplayBuffer(10, path=tmp_path / "buf") as buf:
        buf.write_episode({"observation": [1.0]})
    with pytest.raises(ValueError, match="asks for 'observation'"):
        ReplayBufferCollectionWrapper(Scripted(), buf)
    with pytest.raises(ReadOnlyError, match="only reads"):
        ReplayBufferCollectionWrapper(Scripted(), ReplayBuffer.open(tmp_path / "buf"))


class Many(gymnasium.Env):
    observation_space, action_space = spaces.Sequence(spaces.Discrete(3)), spaces.Discrete(2)


def test_spaces_without_a_fixed_shape():
    with pytest.raises(ValueError, match=r"'obs' is of Sequence.*no fixed shape"):
        ReplayBufferCollectionWrapper(Many(), ReplayBuffer(10))
    env = Many()
    env.observation_space = spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})})
    with pytest.raises(ValueError, match="would have one column"):
        ReplayBufferCollectionWrapper(env, ReplayBuffer(10))


def offline(columns):
    buf = ReplayBuffer(100)
    buf.write_episode({name: np.zeros((4, *shape), dtype) for name, (shape, dtype) in columns.items()})
    return buf


EPISODES = {
    "obs": BOX,
    "action": ((), np.int64),
    "reward": ((), np.float32),
    "terminated": ((), bool),
    "truncated": ((), bool),
}


@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (lambda: DistillationBuffer(10), "what a teacher would have done"),
        (lambda: RolloutBuffer(1, 4, (3,), ()), "values and log-probabilities"),
        (
            lambda: OfflineToOnlineReplayBuffer(offline(EPISODES), online_capacity=10),
            "no next_obs: in episodes a reward",
        ),
        (lambda: TransitionReplayBuffer(10, (4,)), r"'obs' of shape \(4,\)"),
        (lambda: TransitionReplayBuffer(10, (3,), (2,)), r"'action' of shape \(2,\)"),
        (lambda: TransitionReplayBuffer(10, (3,), obs_dtype=np.int32, critic_obs_shape=(2,)), "asks for 'critic_obs'"),
        (lambda: TransitionReplayBuffer(10, (3,), obs_dtype=np.uint8), "'obs' of uint8"),
        (list, "0 buffers"),
        (dict, "can't record into a dict"),
    ],
)
def test_buffers_that_can_not_be_filled(buffer, why):
    with pytest.raises(ValueError, match=why):
        ReplayBufferCollectionWrapper(Scripted(), buffer())


def test_flags_without_a_path_and_hooks_that_are_none():
    for flag in ("dump_on_episode_end", "dump_on_reset_boundary"):
        with pytest.raises(ValueError, match="needs a dump_path"):
            ReplayBufferCollectionWrapper(Scripted(), ReplayBuffer(10), **{flag: True})
    with pytest.raises(ValueError, match="transition_builder must be callable"):
        ReplayBufferCollectionWrapper(Scripted(), ReplayBuffer(10), transition_builder=3)
    with pytest.raises(ValueError, match="context_fn must be callable"):
        ReplayBufferCollectionWrapper(Scripted(), ReplayBuffer(10), context_fn=3)
    with pytest.raises(ValueError, match="needs a buffer with a schema"):
        ReplayBufferCollectionWrapper(Scripted(), ReplayBuffer(10), transition_builder=dict, validate_transition=True)
