"""The transition buffer against one that stores both observations; its contract; what survives."""

import os
import pickle
import signal
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringmap
from ringmap import TransitionReplayBuffer
from ringmap.buffers.transitions import buffer as transitions_module
from ringmap.buffers.transitions.columns import TransitionColumns
from ringmap.errors import CorruptError, EnvironmentFault, InputError
from ringmap.samplers import (
    EpochSampler,
    MixtureSampler,
    PrioritizedSampler,
    RecencySampler,
    UniformSampler,
)
from ringmap.storage.disk.files import Disk
from tests.busy import held
from tests.unit.buffers.transitions.reference import Life, Reference, StackedLife, in_order, same
from tests.unit.buffers.transitions.test_episodes import expected, loaded
from tests.unit.buffers.transitions.test_episodes import same as same_episodes


def make(capacity=50, shape=(3,), path=None, **options):
    options = {"device": None, "sampler": in_order, "sync_every_s": 0, **options}
    return TransitionReplayBuffer(capacity, shape, path=path, **options)


def add(buf, reference, step):
    obs, actions, rewards, after, dones, truncated = step
    buf.add(obs, actions, rewards, after, dones, truncated=truncated)
    reference.add(*step)


def compare(buf, reference):
    expected = reference.batch()
    buf.refresh()
    assert len(buf) == len(expected["rewards"])
    if len(buf):
        same(buf.sample(len(buf)), expected)


# -- stored once, equal to stored twice ----------------------------------------------------------


def made_for(life, capacity=50, path=None, **options):
    """Return a buffer of what a life observes."""
    shape = life.shape
    if isinstance(life, StackedLife):
        shape = (life.size, *shape)
        options |= {"frame_stack": life.size, "padding_type": life.padding}
    return make(capacity, shape, path, obs_dtype=life.dtype, **options)


def drawn_life(draw):
    """Return environments whose observations are arrays, or stacks of frames."""
    seed, dtype = draw(st.integers(0, 2**31)), draw(st.sampled_from([np.float32, np.uint8]))
    if draw(st.booleans()):
        small, large = ((2, 2), (23, 25)) if dtype is np.uint8 else ((3,), (130,))
        return Life(seed, draw(st.sampled_from([small, small, large])), dtype)
    padding, shape = draw(st.sampled_from(["reset", "zero"])), draw(st.sampled_from([(), (2,), (2, 2)]))
    return StackedLife(seed, draw(st.integers(1, 5)), padding, shape, dtype, draw(st.booleans()))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_equals_a_buffer_that_stores_both(data):
    """All transitions that count, and the episodes that they are of."""
    draw = data.draw
    n_step, capacity, life = draw(st.sampled_from([1, 1, 2, 3, 7])), draw(st.integers(8, 60)), drawn_life(draw)
    buf = made_for(life, capacity, n_step=n_step, gamma=0.9)
    reference = Reference(capacity, n_step, 0.9)
    lanes, has_frames, has_changed = draw(st.integers(1, 8)), isinstance(life, StackedLife), False
    for _ in range(draw(st.integers(1, 8))):
        what = draw(st.sampled_from(["add", "add", "add", "lanes", "clear", "copy"]))
        if what == "lanes":
            lanes, has_changed = draw(st.integers(1, 8)), True
        elif what == "clear":
            buf.clear()
            reference.clear()
            life.now = None if has_frames else life.now
        elif what == "copy":
            buf.sampler = None
            buf = pickle.loads(pickle.dumps(buf))
            buf.sampler = in_order
        for _ in range(draw(st.integers(1, 25))):
            add(buf, reference, life.step(lanes))
        compare(buf, reference)
        if not (has_frames and has_changed):
            same_episodes(loaded(buf.episode_dataset()), expected(reference))


@pytest.mark.parametrize(
    ("n_step", "life", "storage"),
    [
        (1, lambda: Life(3), "memmap"),
        (3, lambda: Life(3, (130,)), "memmap"),
        (3, lambda: StackedLife(3, 4, "reset", (3, 2)), "memmap"),
        (1, lambda: StackedLife(3, 4, "zero", (3, 2)), "zarr"),
    ],
    ids=["arrays", "large", "stacks", "zeros"],
)
def test_equal_over_many_laps_on_disk_reopened_and_read_live(tmp_path, n_step, life, storage):
    life, lanes = life(), 4
    options = {"n_step": n_step, "path": tmp_path / "buf", "storage": storage}
    buf, reference = made_for(life, **options), Reference(50, n_step)
    for turn in range(12):
        for _ in range(60):
            add(buf, reference, life.step(lanes))
        compare(buf, reference)
        buf.flush()
        with TransitionReplayBuffer.open(tmp_path / "buf", device=None, n_step=n_step, sampler=in_order) as reader:
            assert reader.capacity == 50
            compare(reader, reference)
            before = len(reader), reader.engine.source.head
            add(buf, reference, life.step(lanes))
            assert (len(reader), reader.engine.source.head) == before, "not committed yet"
            buf.flush()
            compare(reader, reference)
        if turn % 3 == 2:
            buf.close()
            buf = made_for(life, **options)
            lanes = 1 + turn % 5
            compare(buf, reference)
    buf.save(tmp_path / "copy")
    with TransitionReplayBuffer.open(tmp_path / "copy", "r+", device=None, n_step=n_step, sampler=in_order) as copy:
        compare(copy, reference)
        one = pickle.loads(pickle.dumps(reference))
        add(copy, one, life.step(lanes))
        compare(copy, one)
        copy.close()
    assert buf.check() == []
    buf.close()
    assert ringmap.check(tmp_path / "buf") == []


def test_the_bug_that_everybody_has():
    """After a truncation the next observation is the last one of that episode, not the first of the next."""
    buf = make(10, (1,))
    buf.add([[1.0]], [0], [0.0], [[2.0]], [False], truncated=[True])
    buf.add([[9.0]], [0], [0.0], [[10.0]], [False])
    assert buf.sample(2)["next_observations"].ravel().tolist() == [2.0, 10.0]


def test_n_step_by_hand():
    buf = make(10, (1,), n_step=3, gamma=0.5)
    for t, (done, cut) in enumerate([(0, 0), (0, 0), (0, 0), (0, 1), (0, 0), (1, 0)]):
        first = t != 4
        buf.add(
            [[t if first else 40.0]],
            [t],
            [2.0**t],
            [[t + 1.0]],
            [bool(done)],
            truncated=[bool(cut)],
        )
    batch = buf.sample(6)
    assert batch["rewards"].tolist() == [1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8, 16 + 16, 32]
    assert batch["next_observations"].ravel().tolist() == [3, 4, 4, 4, 6, 6]
    assert batch["discounts"].tolist() == [0.125, 0.125, 0.25, 0.5, 0.25, 0.5]
    assert batch["dones"].tolist() == [0, 0, 0, 0, 1, 1]


def nbytes_of(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_half_the_bytes_for_pixels(tmp_path):
    """8,192 frames of 84x84, episodes of 100, every row of the ring used: every file counted."""
    rng = np.random.default_rng(0)
    buf = TransitionReplayBuffer(8192, (84, 84), device=None, obs_dtype=np.uint8, path=tmp_path / "buf", sync_every_s=0)
    frame = rng.integers(0, 256, (1, 84, 84), dtype=np.uint8)
    for t in range(8192 + 600):
        after = np.frombuffer(rng.bytes(84 * 84), np.uint8).reshape(1, 84, 84)
        buf.add(frame, [0], [0.0], after, [t % 100 == 99])
        frame = after if t % 100 != 99 else rng.integers(0, 256, (1, 84, 84), dtype=np.uint8)
    buf.close()
    share = nbytes_of(tmp_path / "buf") / (8192 * 2 * 84 * 84)
    assert share < 0.575, share


# -- the contract --------------------------------------------------------------------------------


def test_the_names_of_apexrl_are_the_same_classes():
    from ringmap.buffer.replay_buffer import ReplayBuffer

    assert ReplayBuffer is TransitionReplayBuffer


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_program_of_the_guide(device):
    from ringmap.buffer.replay_buffer import ReplayBuffer

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    buffer = ReplayBuffer(capacity=1_000_000, obs_shape=(4,), action_shape=(), device=device)
    rng = np.random.default_rng(0)
    for _ in range(300):
        obs, next_obs = torch.from_numpy(rng.normal(size=(2, 4)).astype("f4"))
        action, reward, done = int(rng.integers(2)), 1.0, bool(rng.random() < 0.1)
        buffer.add(obs, action, reward, next_obs, done)
    batch = buffer.sample(batch_size=256)
    assert batch["observations"].shape == (256, 4)
    assert batch["actions"].device.type == device


def test_one_step_and_tensors():
    buf = TransitionReplayBuffer(capacity=20, obs_shape=(4,), action_shape=(), device="cpu", seed=0)
    for t in range(5):
        buf.add(torch.full((4,), float(t)), t, 1.0, torch.full((4,), t + 1.0), t == 4)
    batch = buf.sample(batch_size=3)
    assert list(batch) == ["observations", "actions", "rewards", "next_observations", "dones"]
    assert all(isinstance(v, torch.Tensor) for v in batch.values())
    assert {n: tuple(v.shape) for n, v in batch.items()} == {
        "observations": (3, 4),
        "actions": (3,),
        "rewards": (3,),
        "next_observations": (3, 4),
        "dones": (3,),
    }
    assert batch["actions"].dtype == torch.int64
    assert (1 - batch["dones"]).dtype == torch.float32  # as losses write it
    assert torch.equal(batch["next_observations"], batch["observations"] + 1)
    assert isinstance(buf.sample(2, to="numpy")["dones"], np.ndarray)


@pytest.mark.parametrize("wrong", [0, -1, 6, 2.5])
def test_batch_sizes(wrong):
    buf = make(10, (1,))
    for t in range(5):
        buf.add([t], t, 0.0, [t + 1], False)
    with pytest.raises(ValueError, match="batch_size"):
        buf.sample(wrong)
    assert buf.state_dict()["step"] == 0


def test_draws_with_replacement_and_uniformly():
    """20 transitions, 40,000 draws: chi-squared of 19 degrees has mean 19, deviation 6.2."""
    buf = make(20, (1,), sampler=None, seed=0)
    for t in range(30):
        buf.add([t], t, 0.0, [t + 1], False)
    drawn = np.concatenate([buf.sample(20)["actions"] for _ in range(2000)])
    counts = np.bincount(drawn, minlength=30)
    assert not counts[:10].any()
    assert ((counts[10:] - 2000) ** 2 / 2000).sum() < 19 + 4 * 6.2


BAD = {
    "too many": (
        {
            "observations": np.zeros((11, 2)),
            "next_observations": np.zeros((11, 2)),
            "rewards": np.zeros(11),
            "actions": np.zeros(11),
            "dones": np.zeros(11),
        },
        "11 transitions exceed capacity=10",
    ),
    "action": ({"actions": 2.5}, "actions"),
    "done": ({"dones": 0.5}, "dones"),
    "reward": ({"rewards": 1e300}, "rewards"),
    "overflow": ({"observations": [0.0, 1e300]}, "observations"),
    "shape": ({"observations": np.zeros(3)}, "observations has shape"),
    "lanes": ({"next_observations": np.zeros((2, 2))}, "as many rows"),
    "rewards": ({"rewards": [1.0, 2.0]}, "rewards has shape"),
    "missing": ({"next_observations": None}, "both needed"),
    "critic": ({"critic_observations": [1.0]}, "critic_obs_shape was not given"),
    "ragged": ({"observations": [[1.0], [1.0, 2.0]]}, "observations"),
    "nested": ({"observations": {"a": [0.0, 0.0]}}, "expected leaves"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_steps_change_nothing(name):
    buf = make(10, (2,))
    buf.add([0.0, 1.0], 0, 0.0, [1.0, 2.0], False)
    before = buf.sample(1)
    changed, message = BAD[name]
    step = {
        "observations": [1.0, 2.0],
        "actions": 0,
        "rewards": 0.0,
        "next_observations": [2.0, 3.0],
        "dones": False,
    }
    with pytest.raises(ValueError, match=message):
        buf.add(**{**step, **changed})
    assert len(buf) == 1
    same(buf.sample(1), before)
    buf.add(**step)
    assert buf._ring.buffer.engine.source.live.num_steps == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity must be positive"),
        ({"shape": -1}, "expected a shape"),
        ({"shape": {"a/b": (1,)}}, "holds a slash"),
        ({"shape": {}}, "no leaves"),
        ({"n_step": 0}, "n_step"),
        ({"gamma": 1.5}, "gamma"),
        ({"obs_dtype": "nonsense"}, "no dtype"),
        ({"device": "nowhere"}, "device"),
        ({"action_shape": {"a": (1,)}}, "action_shape"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(InputError, match=message):
        make(**options)


def test_no_cuda_is_said_at_once():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match=r"device 'cuda' can't be used here .* choose 'cpu'"):
        make(device="cuda")


def test_dict_observations_critic_and_spaces():
    space = gym.spaces.Dict(
        {
            "camera": gym.spaces.Box(0, 255, (4, 4), np.uint8),
            "body": gym.spaces.Dict({"q": gym.spaces.Box(-1, 1, (3,))}),
        }
    )
    buf = make(
        20,
        space,
        action_shape=gym.spaces.Box(-1, 1, (2,)),
        action_dtype=np.float32,
        critic_obs_shape=(5,),
    )
    rng = np.random.default_rng(0)

    def observe():
        return {
            "camera": rng.integers(0, 256, (2, 4, 4)),
            "body": {"q": rng.normal(size=(2, 3)).astype("f4")},
        }

    now, critic, kept = observe(), rng.normal(size=(2, 5)).astype("f4"), []
    for t in range(6):
        after, critic_after = observe(), rng.normal(size=(2, 5)).astype("f4")
        buf.add(
            now,
            np.full((2, 2), t),
            np.zeros(2),
            after,
            np.zeros(2),
            critic,
            critic_after,
            truncated=np.array([t == 3, 0], bool),
        )
        kept.append((now, after, critic, critic_after))
        now, critic = (after, critic_after) if t != 3 else (observe(), rng.normal(size=(2, 5)).astype("f4"))
    batch = buf.sample(12)
    assert list(batch)[-2:] == ["critic_observations", "next_critic_observations"]
    for at, name in ((0, "observations"), (1, "next_observations")):
        np.testing.assert_array_equal(batch[name]["camera"], np.concatenate([k[at]["camera"] for k in kept]))
        np.testing.assert_array_equal(batch[name]["body"]["q"], np.concatenate([k[at]["body"]["q"] for k in kept]))
    np.testing.assert_array_equal(batch["critic_observations"], np.concatenate([k[2] for k in kept]))
    np.testing.assert_array_equal(batch["next_critic_observations"], np.concatenate([k[3] for k in kept]))


@pytest.mark.parametrize(
    "sampler",
    [
        UniformSampler(0),
        RecencySampler(window=5, rng=0),
        PrioritizedSampler(rng=0),
        MixtureSampler([(UniformSampler(0), 1), (RecencySampler(half_life=3, rng=0), 1)], rng=0),
    ],
)
def test_our_samplers_serve_it(sampler):
    buf, life, reference = make(30, sampler=sampler), Life(0), Reference(30)
    for _ in range(60):
        add(buf, reference, life.step(3))
        batch = buf.sample(3)
        assert set(batch["rewards"].tolist()) <= {s["reward"] for s in reference.steps[-30:]}


def test_what_a_slow_sampler_drew_may_be_gone():
    """A sampler during which others write: what was overwritten meanwhile is drawn anew, and nothing is torn."""
    buf, life, reference = make(30), Life(0), Reference(30)

    def slow(step, buffer, size, history_len):
        for _ in range(7):
            add(buf, reference, life.step(3))
        return np.arange(size)

    for _ in range(15):
        add(buf, reference, life.step(3))
    buf.sampler = slow
    for _ in range(60):
        drawn = buf.sample(30)
        expected = reference.batch()
        rows = {r.tobytes(): i for i, r in enumerate(expected["rewards"])}
        picked = [rows[r.tobytes()] for r in drawn["rewards"]]
        same(drawn, {name: values[picked] for name, values in expected.items()})


def test_what_a_slow_sampler_drew_is_what_it_meant():
    """Its ids count from the oldest transition that there was when it began, however many went meanwhile."""
    buf, life, reference = make(30), Life(0), Reference(30)
    for _ in range(15):
        add(buf, reference, life.step(3))
    meant = reference.batch()

    def slow(step, buffer, size, history_len):
        add(buf, reference, life.step(3))
        return np.arange(3, 3 + size)

    buf.sampler = slow
    same(buf.sample(27), {name: values[3:] for name, values in meant.items()})


def test_each_transition_once_in_an_epoch():
    buf = make(30, (1,), sampler=EpochSampler(0))
    for t in range(40):
        buf.add([t], t, 0.0, [t + 1], False)
    assert sorted(np.concatenate([buf.sample(10)["actions"] for _ in range(3)]).tolist()) == list(range(10, 40))


def test_priorities_follow_the_ring():
    buf = make(40, (1,), sampler=PrioritizedSampler(alpha=1.0, rng=0))

    def play(t):
        now, then = [2 * t, 2 * t + 1], [2 * t + 2, 2 * t + 3]
        buf.add([[n] for n in now], now, [0.0, 0.0], [[n] for n in then], [0, 0])

    for t in range(30):
        play(t)
    batch = buf.sample(32)
    assert {"ids", "weights"} <= set(batch)
    assert batch["actions"].min() >= 20
    assert buf.update_priorities(batch["ids"], np.where(batch["actions"] == batch["actions"][0], 1e6, 0)) == 32
    assert np.mean(buf.sample(32)["actions"] == batch["actions"][0]) > 0.9
    for t in range(30, 60):
        play(t)
    assert buf.update_priorities(batch["ids"], np.ones(32)) == 0


# -- what survives -------------------------------------------------------------------------------


def test_a_copy_is_made_whatever_disk_other_buffers_have_by_now(tmp_path, monkeypatch):
    monkeypatch.setattr("ringmap.buffers.engine.DISK", Disk())
    buf, life, reference = make(path=tmp_path / "buf"), Life(0), Reference(50)
    add(buf, reference, life.step(2))
    compare(pickle.loads(pickle.dumps(buf)), reference)
    buf.close()


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_lost_successors_are_named_and_never_served(tmp_path, how):
    buf, life, reference = make(path=tmp_path / "buf"), Life(1), Reference(50)
    for _ in range(10):
        add(buf, reference, life.step(2))
        buf.engine.commit_pending("a test")
    buf.close()
    path = tmp_path / "buf/successors.bin"
    data = bytearray(path.read_bytes())
    for at in (8192, 12288):
        data[at + 20] ^= 1
    path.write_bytes(data[:8192] if how == "cut" else data)
    findings = ringmap.check(tmp_path / "buf")
    assert [f.file for f in findings] == ["successors.bin"]
    ringmap.repair(tmp_path / "buf", dry_run=False)
    assert ringmap.check(tmp_path / "buf") == []
    buf = make(path=tmp_path / "buf", sampler=None, seed=0)
    known = {s["reward"].item() for s in reference.steps[:-2]}
    lost = {s["reward"].item() for s in reference.steps[-2:]}
    for _ in range(20):
        assert set(buf.sample(10)["rewards"].tolist()) <= known
    buf.add(*life.step(2)[:5])
    for _ in range(20):
        assert not set(buf.sample(10)["rewards"].tolist()) & lost
    buf.close()


def test_keys_of_nested_observations_that_no_column_could_tell_apart():
    buf = TransitionReplayBuffer(10, {"eye": {"left": (2,)}}, device=None)
    step = {"eye": {"left": np.zeros(2)}}
    buf.add(step, 0, 0.0, step, False)
    assert buf.sample(1)["observations"]["eye"]["left"].shape == (1, 2)
    with pytest.raises(InputError, match="holds a slash"):
        buf.add({"eye/left": np.zeros(2)}, 0, 0.0, step, False)
    with pytest.raises(InputError, match="expected leaves"):
        buf.add({"eye": {"right": np.zeros(2)}}, 0, 0.0, step, False)


def fill(buf, calls, lanes=2):
    for t in range(calls):
        obs = np.full((lanes, 3), t, np.float32)
        buf.add(obs, np.zeros(lanes, int), np.full(lanes, t), obs + 1, np.zeros(lanes))


@pytest.mark.parametrize("share", [1e-9, 1.0])
def test_a_mixture_hands_out_ids_and_takes_priorities(share):
    mixed = MixtureSampler([(PrioritizedSampler(rng=0), share), (UniformSampler(0), 1)], rng=0)
    buf = make(sampler=mixed)
    fill(buf, 10)
    batch = buf.sample(8)
    assert batch["weights"].shape == (8,)  # not the shares of the samplers
    assert buf.update_priorities(batch["ids"], np.ones(8)) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_reads_though_a_thread_of_the_parents_was_storing(tmp_path):
    buf = make(path=tmp_path / "buf", sampler=None)
    fill(buf, 10)
    buf.flush()  # a child does not have pending rows
    with held(buf._next_observations.turn._lock):  # as the `add` of a thread holds it
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            try:  # a thread: of the one that forked the lock would be
                thread = threading.Thread(target=lambda: os._exit(len(buf.sample(20)["rewards"])))
                thread.start()
                thread.join()
            finally:
                os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 20
    buf.close()


def test_what_is_kept_in_memory_is_counted_once():
    buf = make()
    for t in range(20):  # no observation is what the last step led to
        buf.add(np.full(3, t), 0, 0.0, np.full(3, t + 100), False)
        buf.engine.commit_pending("a test")
    beside, source = buf._next_observations, buf._ring.buffer.engine.source
    read = source.data_at

    def twice(start):
        source.data_at = read
        beside._data_at(source, source.live.era, start)  # another thread was as fast
        return read(start)

    for start in source.live.starts.tolist()[1:]:
        source.data_at = twice
        beside._data_at(source, source.live.era, start)
    kept = sum(sum(v.nbytes for v in one.values()) for one in beside._cache.values())
    assert beside._cache_nbytes == kept > 0


def test_what_can_not_be_read_as_it_was_evicted_meanwhile_is_no_fault(monkeypatch):
    buf = make(capacity=20)
    for t in range(400):  # no observation is what the last step led to
        buf.add(np.full(3, t), 0, 0.0, np.full(3, t + 100), False)
        buf.engine.commit_pending("a test")
    beside, source = buf._next_observations, buf._ring.buffer.engine.source

    def overwritten(start):
        raise CorruptError("other bytes stand there")

    monkeypatch.setattr(source, "data_at", overwritten)
    assert beside._data_at(source, source.live.era, source.tail - 1) is None
    with pytest.raises(CorruptError, match="other bytes"):
        beside._data_at(source, source.live.era, source.tail)


def test_what_is_beyond_the_newest_call_leads_to_nothing():
    """The call of a step that was drawn may be dropped before it is read."""
    buf = make()
    buf.add(np.zeros(3), 0, 0.0, np.ones(3), False)
    source = buf._ring.buffer.engine.source
    which, values = buf._next_observations.find(source, np.array([source.head]), source.head)
    assert len(which) == 0
    assert values == {}


def test_a_copy_that_fails_at_its_end_is_not_there(tmp_path, monkeypatch):
    class Full(Disk):
        def create(self, path, *args, **options):
            if "successors" in path:
                raise OSError(28, "No space left on device", path)
            return super().create(path, *args, **options)

    buf = TransitionReplayBuffer(50, (3,), device=None)
    fill(buf, 10)
    monkeypatch.setattr(buf.engine, "disk", Full())
    with pytest.raises(EnvironmentFault):
        buf.save(tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    buf.save(tmp_path / "copy")
    with TransitionReplayBuffer.open(tmp_path / "copy", device=None) as copy:
        batch = copy.sample(20)
        assert (batch["next_observations"] == batch["observations"] + 1).all()
        assert copy.num_redraws == 0


def test_a_reader_copies_what_the_newest_step_led_to_though_the_writer_goes_on(tmp_path, monkeypatch):
    buf = make(path=tmp_path / "buf")
    fill(buf, 5)
    buf.flush()
    reader = TransitionReplayBuffer.open(tmp_path / "buf", device=None, sampler=in_order)
    find = type(buf._next_observations.files).find

    def late(self, head, rows_sum):
        if self not in (buf._next_observations.files, buf.engine.owned._successors) and buf._ring.added == 10:
            for t in range(5, 9):
                step = np.full((2, 3), t, np.float32)
                step[1] += 0.5 * (t == 5)  # lane 1 begins anew
                buf.add(step, np.zeros(2, int), np.full(2, t), step + 1, np.zeros(2))
                buf.engine.commit_pending("a test")
        return find(self, head, rows_sum)

    monkeypatch.setattr(type(buf._next_observations.files), "find", late)
    reader.save(tmp_path / "copy")
    with TransitionReplayBuffer.open(tmp_path / "copy", device=None, sampler=in_order) as copy:
        batch = copy.sample(10)
        assert batch["rewards"].tolist() == np.arange(5).repeat(2).tolist()
        assert copy.num_redraws == 0
    assert (batch["next_observations"] == batch["observations"] + 1).all()
    assert copy.check() == []
    for one in (copy, reader, buf):
        one.close()


# -- the short way of values that have their columns' types -------------------------------------------


def calls_of_any_kind(seed, count=120):
    """Yield arguments of `add`: of one lane or several, of types that fit as they are, fit when cast, or don't fit."""
    rng = np.random.default_rng(seed)
    lanes, after = 0, None
    for _ in range(count):
        if rng.random() < 0.2 or not lanes:
            lanes, after = int(rng.choice([1, 1, 2, 5])), None
        obs = rng.integers(0, 4, (lanes, 3)).astype(np.float32)
        if after is not None:
            goes_on = rng.random(lanes) < 0.7
            obs[goes_on] = after[goes_on]
        after = rng.integers(0, 4, (lanes, 3)).astype(np.float32)
        actions = rng.integers(0, 9, lanes).astype(rng.choice(["i8", "i4", "f8"]))
        rewards = rng.normal(size=lanes).astype(rng.choice(["f4", "f8", "i8"]))
        if rng.random() < 0.1:
            rewards = rng.choice([np.nan, np.inf, 1e30, 1e300, -3e38], lanes)
        dones = rng.random(lanes) < 0.2
        truncated = rng.choice([None, True])
        truncated = None if truncated is None else rng.random(lanes) < 0.1
        call = [obs, actions, rewards, after, dones]
        if rng.random() < 0.1:  # as floats, another order of bytes, a batch of one too many, with an axis
            at = int(rng.integers(5))
            call[at] = [
                call[at].astype(np.float64),
                np.asfortranarray(call[at]),
                np.concatenate([call[at]] * 2),
                call[at][:, None],
            ][int(rng.integers(4))]
        if lanes == 1 and rng.random() < 0.7:
            call = [value[0] for value in call]
            truncated = None if truncated is None else bool(truncated[0])
            if rng.random() < 0.5:
                call[1:3] = [call[1].item(), call[2].item()]
        yield call, truncated


@pytest.mark.parametrize("seed", range(4))
def test_the_short_way_stores_what_the_general_one_stores(seed, monkeypatch):
    class General(TransitionColumns):
        def as_given(self, *_):
            return None

    short, general, taken = make(200), make(200), []
    general._columns = General(general._columns.schema)
    real = TransitionColumns.as_given

    def as_given(self, *call):
        taken.append(real(self, *call) is not None)
        return real(self, *call)

    monkeypatch.setattr(TransitionColumns, "as_given", as_given)
    for call, truncated in calls_of_any_kind(seed):
        said = []
        for buf in (short, general):
            try:
                buf.add(*call, truncated=truncated)
                said.append("stored")
            except InputError as error:
                said.append(str(error))
        assert said[0] == said[1]
    assert 0.2 < np.mean(taken) < 0.98
    ids = short._ring.ids()
    assert ids.tolist() == general._ring.ids().tolist()
    for (name, one), other in zip(short._ring.rows(ids).items(), general._ring.rows(ids).values(), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
    for buf in (short, general):
        buf.sampler = in_order
    one, other = short.sample(len(short)), general.sample(len(general))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_call_after_one_of_very_many_lanes_is_a_commit_of_its_own(tmp_path, monkeypatch, lanes):
    """What the many led to is kept with it, and is more than a group's file may begin with."""
    monkeypatch.setattr(transitions_module, "_EARLIER_MOST", 100)
    buf, reference, life = make(path=tmp_path / "buf"), Reference(50), Life(20)
    add(buf, reference, life.step(20))
    other = Life(lanes)
    for t in range(3):
        add(buf, reference, other.step(lanes))
        pending = buf.engine.source.pending
        assert (pending is None) == (t == 0)
    compare(buf, reference)
    buf.close()


def test_one_pending_transition_as_a_tensor():
    """One row of a group of rows has the strides of the group, which no tensor may have."""
    buf = make(10, (3,), device="cpu", action_dtype=np.int64)
    buf.add([1, 2, 3], 4, 5.0, [6, 7, 8], False)
    assert buf.sample(1)["actions"].tolist() == [4]


def test_in_ram_an_open_group_stands_in_the_columns():
    """Where the ring wraps within a call, it does not. Each look is over all transitions, committed or not."""
    buf, reference, life = make(capacity=43), Reference(43), Life(4)
    in_place = []
    for _ in range(120):
        add(buf, reference, life.step(4))
        group = buf.engine.source.pending
        if group is None:
            continue
        in_place.append(group.is_in_place)
        lowest = group.start - buf.engine.source.tail + group.limit
        assert lowest <= buf.engine.source.rows.ring.rows, "a live row could be overwritten"
        compare(buf, reference)
    assert {True, False} <= set(in_place)
    assert in_place[-1], "after a group of its own, the next one stands in the columns again"


def test_the_rows_of_a_call_that_is_interrupted_in_ram_do_not_count(monkeypatch):
    buf, reference, life = make(capacity=40), Reference(40), Life(3)
    for _ in range(3):
        add(buf, reference, life.step(3))
    group = buf.engine.source.pending
    assert group.is_in_place
    values = list(group._values)

    class Interrupting:
        def __setitem__(self, where, given):
            raise KeyboardInterrupt

    group._values[-1] = Interrupting()  # the columns before it are written
    step = life.step(3)
    with pytest.raises(KeyboardInterrupt):
        add(buf, Reference(40), step)
    group._values[:] = values
    compare(buf, reference)
    add(buf, reference, step)
    compare(buf, reference)
    assert buf.check() == []


@pytest.mark.parametrize("sampler", [None, PrioritizedSampler])
@pytest.mark.parametrize("shape", [(3,), {"a": (2,), "b": {"c": (1,)}}])
def test_a_view_for_a_pass_shows_what_the_buffer_shows(shape, sampler):
    buf = make(shape=shape, sampler=None if sampler is None else sampler(alpha=1.0, beta=1.0))
    step = np.arange(12, dtype=np.float32)

    def observed(at):
        if shape == (3,):
            return np.stack([at] * 3, 1)
        return {"a": np.stack([at] * 2, 1), "b": {"c": at[:, None]}}

    buf.add(observed(step), step, step, observed(step + 100), np.zeros(12))
    view = buf.pinned()
    for mine, its in [
        (view.sample(5), buf.sample(5)),
        (next(iter(view.batches(5, steps=1))), next(iter(buf.batches(5, steps=1)))),
        (view[[0, 7]], buf[[0, 7]]),
        (view[7], buf[7]),
    ]:
        assert list(mine) == list(its)
        first, led = mine["observations"], mine["next_observations"]
        if shape != (3,):
            first, led = first["b"]["c"], led["b"]["c"]
        assert np.array_equal(led, first + 100)
    with pytest.raises(InputError, match="transitions, not episodes"):
        view.load_episode(0)
    with pytest.raises(InputError, match=r"view\(where=\): it holds transitions, not episodes"):
        view.view(where=lambda data: True)
    with pytest.raises(InputError, match="transitions, not episodes"):
        view.get_episode_data()
