"""Swapping buffers under a running wrapper: the order of the checks, and that an error changes nothing."""

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import InputError, RoleError
from ringmap.recording import ReplayBufferCollectionWrapper
from tests.disks import FullDisk
from tests.unit.recording.reading import assert_holds, full_buffer
from tests.unit.recording.scripted import Model, Scripted, code, length_of
from tests.unit.recording.test_construction import vector

WHERE = "^ReplayBufferCollectionWrapper.set_replay_buffers: "


def running(num, buffers, steps=1, **options):
    """Return a wrapper, in the middle of episodes."""
    long = next(s for s in range(999) if all(length_of(i, 0, s)[0] > 3 for i in range(num)))
    env = ReplayBufferCollectionWrapper(vector(num, script=long), buffers, **options)
    env.reset()
    for _ in range(steps):
        env.step(np.zeros(num, int))
    return env


def test_the_order_of_the_checks():
    old = full_buffer("box")
    env = running(3, old)
    assert env._recorder.open_slots
    other = ReplayBuffer(10, schema={"obs": ((3,), np.int32)})
    cases = [
        ({"replay_buffers": [other, other]}, InputError, "takes one buffer, got 2"),  # layout, spaces, open
        ({"replay_buffers": other, "replay_mode": "per_env"}, InputError, "got 1 for 3"),
        ({"replay_buffers": other, "replay_mode": "each"}, InputError, "must be one of"),
        ({"replay_buffers": other}, InputError, "the new buffer has columns"),  # spaces, open
        (
            {"replay_buffers": ReplayBuffer(9, schema={"x": ((), "f4")}), "require_same_space": False},
            InputError,
            "asks for 'x'",
        ),
        ({"replay_buffers": full_buffer("box")}, RoleError, r"envs \[.*\] are open"),  # open
        ({"replay_buffers": other, "require_same_space": False}, RoleError, "are open"),
        ({"replay_buffers": full_buffer("box"), "dump_old": True}, RoleError, "needs a dump_path"),
        ({"replay_buffers": other, "dump_old": True}, InputError, "the new buffer has columns"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            env.set_replay_buffers(**arguments)
        assert env.replay_buffers == [old] and env.replay_mode == "shared"
        assert old.num_episodes == 0
    assert issubclass(RoleError, RuntimeError) and issubclass(InputError, ValueError)


@pytest.mark.parametrize("permission", ["allow_mid_episode", "finalize_old_segments"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_open_episode_is_split(permission, stream):
    old, new = full_buffer("box"), full_buffer("box")
    env = ReplayBufferCollectionWrapper(vector(2), old, stream=stream)
    model = Model(2, "NextStep")

    def step(count):
        for i in range(count):
            env.step(np.array([i, i]))
            model.step([i, i])

    env.reset()
    model.reset(np.ones(2, bool))
    step(3)
    assert env.set_replay_buffers(new, **{permission: True}) == [old]
    assert env.replay_buffers == [new]
    first, model.stored = model.stored, []
    for slot in range(2):
        if model.open[slot]:
            model._end(slot)
            first += model.stored
            model.stored = []
            model.episode[slot], now = model.episode[slot], code(slot, model.episode[slot], model.t[slot])
            model._begin(slot)
            assert model.open[slot].obs == [now]
    step(20)
    env.close()
    model.close()
    assert_holds("box", old, first)
    assert_holds("box", new, model.stored)


def test_between_episodes_no_permission_is_needed():
    old, new = ReplayBuffer(100), ReplayBuffer(100)
    env = ReplayBufferCollectionWrapper(Scripted(), old)
    assert env.set_replay_buffers(new) == [old]  # before the first reset
    env.reset()
    assert env.buffer_swap(old) == [new]  # a reset, and no step
    over = False
    while not over:
        _, _, terminated, truncated, _ = env.step(0)
        over = terminated or truncated
    assert env.set_replay_buffers(new) == [old]
    assert (old.num_episodes, new.num_episodes) == (1, 0)


def test_another_mode_and_other_columns():
    old = full_buffer("box")
    env = running(2, old, steps=0)
    plain = [ReplayBuffer(100), ReplayBuffer(100)]
    env.set_replay_buffers(plain, replay_mode="auto", require_same_space=False)
    assert env.replay_mode == "per_env"
    for i in range(15):
        env.step(np.array([i, i]))
    assert plain[0].num_episodes and plain[1].num_episodes
    with pytest.raises(InputError, match=r"per_env.*got 1 for 2"):
        env.set_replay_buffers(ReplayBuffer(9))  # the mode is kept
    steps = TransitionReplayBuffer(100, (3,), obs_dtype=np.int32, device=None)
    with pytest.raises(InputError, match="transitions of"):
        env.set_replay_buffers(steps, replay_mode="shared", finalize_old_segments=True)
    env.set_replay_buffers(steps, replay_mode="shared", finalize_old_segments=True, require_same_space=False)
    before = len(steps)
    env.step(np.zeros(2, int))
    assert len(steps) > before == 0


def test_columns_in_another_order_are_the_same_columns():
    env = running(1, ReplayBuffer(50, schema={"obs": ((3,), np.int32), "t": ((), np.int64)}), 0)
    env.set_replay_buffers(ReplayBuffer(50, schema={"t": ((), np.int64), "obs": ((3,), np.int32)}))


def test_dump_old_dumps_what_was_split_and_is_a_permission(tmp_path):
    old = full_buffer("box")
    env = running(2, old, dump_path=tmp_path / "kept")
    split = len(env._recorder.open_slots)
    env.set_replay_buffers(full_buffer("box"), dump_old=True)
    kept = ReplayBuffer.open(tmp_path / "kept")
    assert kept.num_episodes == old.num_episodes >= split > 0


def test_a_full_disk_leaves_the_old_buffers_and_glues_nothing(tmp_path, monkeypatch):
    disk = FullDisk("write")
    monkeypatch.setattr("ringmap.buffers.engine.DISK", disk)
    old, new = ReplayBuffer(100, path=tmp_path / "old"), ReplayBuffer(100)
    env = running(1, old)
    assert env._recorder.open_slots == [0]
    disk.full = True
    try:
        with pytest.raises(OSError, match="No space left"):
            env.set_replay_buffers(new, finalize_old_segments=True)
    finally:
        disk.full = False
    assert env.replay_buffers == [old]
    assert old.num_episodes == new.num_episodes == 0
    for i in range(15):
        env.step([i])
    for got in old.episodes():
        steps = [obs[2] for obs in got["obs"]]
        assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_not_in_the_middle_of_an_asynchronous_step():
    envs = AsyncVectorEnv([lambda i=i: Scripted(i) for i in range(2)])
    env = ReplayBufferCollectionWrapper(envs, full_buffer("box"))
    env.reset()
    env.step_async(np.zeros(2, int))
    with pytest.raises(RoleError, match="call step_wait first"):
        env.set_replay_buffers(full_buffer("box"), allow_mid_episode=True)
    env.step_wait()
    env.set_replay_buffers(full_buffer("box"), allow_mid_episode=True)
    env.close()
