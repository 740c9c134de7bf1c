"""Stacks of frames, stored once: against a list of transitions with whole stacks, wherever these are read from."""

import numpy as np
import pytest
import torch

from ringmap import TransitionReplayBuffer
from ringmap.errors import InputError
from tests.unit.buffers.transitions.reference import Reference, StackedLife, in_order, same


def make(life, capacity=50, path=None, **options):
    options = {"device": None, "sampler": in_order, "sync_every_s": 0, **options}
    return TransitionReplayBuffer(
        capacity,
        (life.size, *life.shape),
        obs_dtype=life.dtype,
        frame_stack=life.size,
        padding_type=life.padding,
        path=path,
        **options,
    )


# -- bad input changes nothing ----------------------------------------------------------------------


def first_calls(buf, count=3):
    """Add a lane of `count` steps; return the stack that it led to."""
    stack = np.full((3, 2), 1, np.uint8)
    for t in range(count):
        after = np.concatenate([stack[1:], np.full((1, 2), t + 2, np.uint8)])
        buf.add(stack, t, 0.0, after, False)
        stack = after
    return stack


def plain(padding="reset", **options):
    options = {"device": None, "sampler": in_order, **options}
    return TransitionReplayBuffer(20, (3, 2), obs_dtype=np.uint8, frame_stack=3, padding_type=padding, **options)


def moved(stack, value=99):
    return np.concatenate([stack[1:], np.full_like(stack[:1], value)])


BAD = {
    "an older frame of another time": lambda s: (np.stack([s[0] + 50, s[1], s[2]]), None),
    "a step left out": lambda s: (moved(s), None),
    "frames in the wrong order": lambda s: (s[::-1], None),
    "the other padding": lambda s: (np.stack([s[0] * 0, s[0] * 0, s[0]]), None),
    "padding that ends too early": lambda s: (np.stack([s[2], s[1], s[1]]), None),
    "the first observation of the next episode as next": lambda s: (s, np.stack([s[0]] * 3)),
    "a next stack of another step": lambda s: (s, moved(moved(s))),
}


@pytest.mark.parametrize("fresh", [None, True])
@pytest.mark.parametrize("name", BAD)
def test_frames_that_contradict_are_refused_and_nothing_changes(tmp_path, name, fresh):
    buf = plain(path=tmp_path / "buf")
    stack = first_calls(buf)
    before, head = buf.sample(3), buf.engine.source.head
    wrong, after = BAD[name](stack)
    with pytest.raises(InputError, match=r"TransitionReplayBuffer.add: .*observations of lane 0"):
        buf.add(wrong, 0, 0.0, moved(wrong) if after is None else after, False, fresh=fresh)
    assert buf.engine.source.head == head
    same(buf.sample(3), before)
    buf.add(stack, 3, 0.0, moved(stack), False)  # and the lane goes on
    assert buf.sample(4)["next_observations"][3].tolist() == moved(stack).tolist()
    buf.close()


def test_one_bad_lane_of_several_is_named():
    buf = plain()
    one = np.full((4, 3, 2), 7, np.uint8)
    one[2, 0] = 8
    with pytest.raises(InputError, match="observations of lane 2 does not go on"):
        buf.add(one, np.zeros(4), np.zeros(4), np.roll(one, -1, 1), np.zeros(4))
    assert len(buf) == 0


def test_after_clear_an_episode_begins_anew():
    buf = plain()
    stack = first_calls(buf)
    buf.clear()
    with pytest.raises(InputError, match="go on with the observation of a reset"):
        buf.add(stack, 0, 0.0, moved(stack), False)
    first_calls(buf)
    assert len(buf) == 3


ARGUMENTS = {
    "no stack": ({"frame_stack": 0}, "frame_stack must be positive"),
    "half a stack": ({"frame_stack": 2.5}, "frame_stack must be positive"),
    "too large": ({"frame_stack": 256}, "at most 255"),
    "padding": ({"padding_type": "custom"}, r"padding_type must be one of \('reset', 'zero'\), got 'custom'"),
    "the shape of a frame": (
        {"obs_shape": (84, 84)},
        r"observations has shape \(84, 84\), but frame_stack=3: .*\(3, \*frame\)",
    ),
    "a leaf without a stack": ({"obs_shape": {"a": (3, 2), "b": ()}}, "observations/b has shape"),
    "a column of ours": ({"extra": {"rewards": ((), "f4")}}, "'rewards' is a column of every transition"),
    "one of a batch": ({"extra": {"weights": ((), "f4")}}, "'weights' is a column"),
    "that of stacks": ({"extra": {"stack_3_reset": ((), "f4")}}, "'stack_3_reset' is a column"),
    "a next one": ({"extra": {"next_observations": ((), "f4")}}, "'next_observations' is a column"),
    "a slash": ({"extra": {"observations/a": ((), "f4")}}, "a string without slashes"),
    "a leaf": ({"extra": {"a": {"b": ((), "f4")}}}, r"expected \(shape, dtype\), got a mapping"),
    "no mapping": ({"extra": ["log_prob"]}, "extra must be a mapping"),
    "no dtype": ({"extra": {"a": ((), "O")}}, "no dtype of numbers"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(tmp_path, name):
    options, said = ARGUMENTS[name]
    given = {"obs_shape": (3, 2), "frame_stack": 3, "path": tmp_path / "buf", **options}
    with pytest.raises(InputError, match=f"^TransitionReplayBuffer: .*{said}"):
        TransitionReplayBuffer(20, device=None, **given)
    assert not (tmp_path / "buf").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"frame_stack": 2}, r"frame_stack=2, padding_type='reset', but the buffer on disk has frame_stack=3"),
        ({"padding_type": "zero"}, "padding_type='zero', but .* padding_type='reset'"),
        ({"frame_stack": None}, "no frame_stack, but the buffer on disk has frame_stack=3"),
        ({"capacity": 21}, "capacity=21, but the buffer on disk has capacity=20"),
        ({"capacity": 1_000}, "capacity=1000, but the buffer on disk has capacity=20"),
        ({"extra": {"a": ((), "f4")}}, "schema"),
    ],
)
def test_a_stack_is_fixed_on_disk(tmp_path, options, said):
    first_calls(plain(path=tmp_path / "buf"))
    given = {"capacity": 20, "frame_stack": 3, "obs_dtype": np.uint8, "device": None, **options}
    given["obs_shape"] = (2, 2) if given["frame_stack"] == 2 else (3, 2)
    with pytest.raises(InputError, match=said):
        TransitionReplayBuffer(path=tmp_path / "buf", **given)


@pytest.mark.parametrize("capacity", [1, 7, 255, 256, 257, 5_000])
@pytest.mark.parametrize("size", [1, 4, 9])
def test_the_capacity_of_a_directory_is_the_one_it_was_made_with(tmp_path, capacity, size):
    TransitionReplayBuffer(capacity, (size, 1), device=None, frame_stack=size, path=tmp_path / "buf").close()
    with TransitionReplayBuffer.open(tmp_path / "buf", device=None) as reader:
        assert reader.capacity == capacity


def test_too_many_lanes_for_the_capacity():
    buf = TransitionReplayBuffer(400, (3, 1), device=None, frame_stack=3)
    one = np.zeros((257, 3, 1), np.float32)
    with pytest.raises(InputError, match="257 lanes with frame_stack=3, but capacity=400 takes up to 256"):
        buf.add(one, np.zeros(257), np.zeros(257), one, np.zeros(257))
    assert len(buf) == 0


# -- further columns ------------------------------------------------------------------------------


def test_extra_columns_come_back_under_their_names(tmp_path):
    rng = np.random.default_rng(0)
    life = StackedLife(1, 3, "zero", (2,))
    extra = {"log_prob": ((), "f4"), "hidden": ((5,), "f8"), "goal": (2, 2)}
    sent = {"log_prob": [], "hidden": [], "goal": []}
    for options in ({}, {"n_step": 3}):
        buf = make(life, 40, tmp_path / f"{len(options)}", extra=extra, **options)
        reference = Reference(40, options.get("n_step", 1))
        for _ in range(30):
            step = life.step(3)
            values = {
                "log_prob": rng.normal(size=3).astype("f4"),
                "hidden": rng.normal(size=(3, 5)),
                "goal": rng.normal(size=(3, 2, 2)).astype("f4"),
            }
            obs, actions, rewards, after, dones, truncated = step
            buf.add(obs, actions, rewards, after, dones, truncated=truncated, extra=values)
            reference.add(*step)
            for name, value in values.items():
                sent[name].append(value)
        buf.close()
        with TransitionReplayBuffer.open(
            tmp_path / f"{len(options)}", device=None, sampler=in_order, **options
        ) as again:
            batch = again.sample(40)
            names = ["observations", "actions", "rewards", "next_observations", "dones", *extra]
            assert list(batch) == names + ["discounts"] * len(options)
            same(batch, {**reference.batch(), **{n: np.concatenate(v)[-40:] for n, v in sent.items()}})
        life.now = None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, r"extra must have the columns \['a'\] .*, got None"),
        ({}, r"got \{\}"),
        ({"b": 1.0}, r"got \['b'\]"),
        ({"a": 1.0, "b": 1.0}, r"got \['a', 'b'\]"),
        ({"a": [1.0, 2.0]}, "a has shape"),
        ({"a": 1e300}, "a"),
        ([1.0], "extra must have the columns"),
    ],
)
def test_bad_extra_values(given, said):
    buf = TransitionReplayBuffer(10, (2,), device=None, extra={"a": ((), "f4")})
    with pytest.raises(InputError, match=said):
        buf.add([0, 0], 0, 0.0, [1, 1], False, extra=given)
    assert len(buf) == 0
    buf.add([0, 0], 0, 0.0, [1, 1], False, extra={"a": 2.0})
    assert buf.sample(1)["a"].tolist() == [2.0]
    other = TransitionReplayBuffer(10, (2,), device=None)
    with pytest.raises(InputError, match=r"extra must have the columns \[\]"):
        other.add([0, 0], 0, 0.0, [1, 1], False, extra={"a": 2.0})


def test_nested_observations_with_one_for_the_critic(tmp_path):
    buf = TransitionReplayBuffer(
        50,
        {"camera": ((3, 2, 2), "u1"), "state": (3, 1)},
        critic_obs_shape=(2,),
        frame_stack=3,
        device=None,
        sampler=in_order,
        path=tmp_path / "buf",
    )
    steps = np.arange(200)
    for t in range(120):
        begin = t // 9 * 9
        at = np.maximum(np.arange(t - 2, t + 1), begin)
        seen = {
            "camera": np.broadcast_to(steps[at].astype("u1")[:, None, None], (3, 2, 2)),
            "state": steps[at][:, None],
        }
        at = np.append(at, t + 1)[1:]
        after = {
            "camera": np.broadcast_to(steps[at].astype("u1")[:, None, None], (3, 2, 2)),
            "state": steps[at][:, None],
        }
        buf.add(seen, t, 0.0, after, t % 9 == 8, [t, -t], [t + 1, -t - 1])
    batch = buf.sample(50)
    assert batch["observations"]["camera"].shape == (50, 3, 2, 2)
    for i, t in enumerate(range(70, 120)):
        begin = t // 9 * 9
        expected = np.maximum(np.arange(t - 2, t + 1), begin)
        assert batch["observations"]["state"][i, :, 0].tolist() == expected.tolist()
        expected = np.append(expected, t + 1)[1:]
        assert batch["next_observations"]["camera"][i, :, 0, 1].tolist() == expected.tolist()
        assert batch["next_critic_observations"][i].tolist() == [t + 1, -t - 1]
    one = buf[-1]
    assert one["observations"]["camera"].shape == (3, 2, 2)
    assert one["actions"] == 119
    assert buf[[0, 1]]["observations"]["state"].shape == (2, 3, 1)
    loader = torch.utils.data.DataLoader(buf, batch_size=10, num_workers=1)
    first = next(iter(loader))
    assert first["observations"]["camera"].shape == (10, 3, 2, 2)
    assert first["actions"].tolist() == list(range(70, 80))
    buf.close()
