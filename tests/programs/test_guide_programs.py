"""The programs of a public guide run unchanged, in RAM and with `path=`.

Source: stable-worldmodel, Replay Buffer guide. What that page promises is asserted here: quick
tour, filling, sampling, schedules, frameskip, persistence, online RL. Each program is told again
in our words, with a rollout by hand in place of `World.collect`, and HDF5 as the only format.
"""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ringmap as swm
from ringmap.data import ReplayBuffer

# A machine with one core.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ACTION_DIM = 2


class Drift:
    """An environment with Gymnasium's API whose pictures say which episode and step they show."""

    def __init__(self):
        self.num_resets = 0

    def reset(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.episode, self.t = self.num_resets, 0
        self.num_resets += 1
        self.end = int(self.rng.integers(12, 30))
        return self.look(), {}

    def step(self, action):
        self.t += 1
        return self.look(), float(action.sum()), self.t == self.end, False, {}

    def look(self):
        pixels = np.zeros((8, 8, 3), np.uint8)
        pixels[..., 0], pixels[..., 1] = self.episode, self.t
        return {"pixels": pixels, "proprio": np.array([self.episode, self.t], np.float32)}


class Wander:
    """A policy whose actions say at which step they were taken; it counts what it learns from."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.num_updates = 0

    def act(self, observation):
        return np.array([observation["proprio"][1], self.rng.normal()], np.float32)

    def update(self, batch):
        self.num_updates += 1
        self.last_reward = float(batch["reward"].mean())

    def state_dict(self):
        return {"num_updates": torch.tensor(self.num_updates)}


def collect(writer, env, policy, episodes, seed):
    """Roll out whole episodes into a writer: what `World.collect(writer=...)` will do."""
    for i in range(episodes):
        observation, _ = env.reset(seed=seed + i)
        steps = {"pixels": [], "proprio": [], "action": [], "reward": []}
        ended = False
        while not ended:
            action = policy.act(observation)
            seen = observation
            observation, reward, terminated, truncated, _ = env.step(action)
            for name in ("pixels", "proprio"):
                steps[name].append(seen[name])
            steps["action"].append(action)
            steps["reward"].append(np.float32(reward))
            ended = terminated or truncated
        writer.write_episode(steps)


def episode(length, number=0):
    t = np.arange(length, dtype=np.float32)
    pixels = np.zeros((length, 8, 8, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = number, t[:, None, None]
    proprio = np.stack([np.full_like(t, number), t], 1)
    return {"pixels": pixels, "proprio": proprio, "action": np.stack([t, t], 1), "reward": t}


def expect_clips(batch, size, history_len, frameskip=1):
    """Every clip is one episode's steps, `frameskip` apart, with all the actions between."""
    arrays = {name: np.asarray(values) for name, values in batch.items()}
    wide = frameskip * ACTION_DIM
    assert {name: values.shape for name, values in arrays.items()} == {
        "pixels": (size, history_len, 8, 8, 3),
        "proprio": (size, history_len, 2),
        "action": (size, history_len, wide),
        "reward": (size, history_len),
    }
    number, t = arrays["proprio"][..., 0], arrays["proprio"][..., 1]
    assert (number == number[:, :1]).all(), "a clip holds two episodes"
    assert (np.diff(t, axis=1) == frameskip).all(), "a clip's steps are not in a row"
    assert (arrays["pixels"][..., 0] == number[..., None, None]).all(), "columns disagree"
    assert (arrays["pixels"][..., 1] == t[..., None, None]).all(), "columns disagree"
    taken = arrays["action"].reshape(size, history_len * frameskip, ACTION_DIM)[..., 0]
    dense = t[:, :1] + np.arange(history_len * frameskip)
    assert (taken == dense).all(), "a clip's actions are not in a row"


# -- the programs -----------------------------------------------------------------------------

PROGRAMS = []
"""Each gets `make`, which makes a buffer in its home, and a folder for files. What it returns has to be the same in
both homes."""


@PROGRAMS.append
def quick_tour(make, folder):
    buf = make(max_steps=100_000, history_len=4, seed=0)
    assert isinstance(buf, swm.data.Dataset)
    assert isinstance(buf, swm.data.Writer)

    collect(buf, Drift(), Wander(), episodes=20, seed=0)
    assert buf.num_episodes == 20
    assert len(buf) == sum(length - 3 for length in buf.lengths)

    num_clips = 0
    for batch in DataLoader(buf, batch_size=64, shuffle=True):
        expect_clips(batch, len(batch["reward"]), 4)
        assert len(batch["reward"]) == min(64, len(buf) - num_clips)
        num_clips += len(batch["reward"])
    assert num_clips == len(buf)

    batch = buf.sample(batch_size=64)
    assert all(isinstance(values, np.ndarray) for values in batch.values())
    expect_clips(batch, 64, 4)

    buf.dump(folder / "runs/replay.h5", format="hdf5")
    reloaded = swm.data.load_dataset(folder / "runs/replay.h5", num_steps=4)
    assert len(reloaded) == len(buf)
    return batch, buf.lengths


@PROGRAMS.append
def manual_rollout(make, folder):
    buf = make(max_steps=200_000, history_len=4, seed=0)
    env, policy = Drift(), Wander()
    observation, _ = env.reset(seed=0)
    steps = {"pixels": [], "proprio": [], "action": [], "reward": []}
    while buf.num_steps_stored < 100:
        before = len(buf)
        action = policy.act(observation)
        after, reward, terminated, truncated, _ = env.step(action)
        for name in ("pixels", "proprio"):
            steps[name].append(observation[name])
        steps["action"].append(action)
        steps["reward"].append(np.float32(reward))
        observation = after
        if terminated or truncated:
            buf.write_episode(steps)
            assert len(buf) == before + len(steps["reward"]) - 3
            steps = {name: [] for name in steps}
            observation, _ = env.reset()
        else:
            assert len(buf) == before  # an unfinished episode is not seen
    expect_clips(buf.sample(32), 32, 4)

    as_arrays = make(max_steps=200_000, history_len=4, seed=0)
    with as_arrays as writer:
        for i in range(buf.num_episodes):
            writer.write_episode(buf.load_episode(i))
    assert equal(as_arrays.sample(32), make_same(make, buf).sample(32))
    return buf.lengths


def make_same(make, buf):
    """Give a new buffer the same episodes as lists of steps."""
    other = make(max_steps=200_000, history_len=4, seed=0)
    other.write_episodes(buf.episodes())
    return other


@PROGRAMS.append
def locked_schema(make, folder):
    buf = make(max_steps=1_000)
    first = episode(5)
    buf.write_episode(first)
    wrong = {
        "action": {name: values for name, values in first.items() if name != "action"},
        "goal": {**first, "goal": first["reward"]},
        "per-step shape": {**first, "action": np.zeros((5, ACTION_DIM + 1), np.float32)},
        "expected 5": {**first, "action": first["action"][:4]},
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            buf.write_episode(given)
    assert buf.column_names == ["pixels", "proprio", "action", "reward"]
    assert buf.lengths.tolist() == [5]
    return buf.load_episode(0)


@PROGRAMS.append
def capacity(make, folder):
    buf = make(max_steps=50, history_len=2)
    seen = []
    for number, length in enumerate((30, 15, 20)):
        buf.write_episode(episode(length, number))
        seen.append(buf.lengths.tolist())
    assert seen == [[30], [30, 15], [15, 20]]
    assert buf.num_steps_stored == 35
    with pytest.raises(ValueError, match="exceeds max_steps"):
        buf.write_episode(episode(51))
    assert buf.lengths.tolist() == [15, 20]

    batch = buf.sample(200)
    expect_clips(batch, 200, 2)
    assert set(batch["proprio"][..., 0].ravel()) == {1, 2}
    buf.clear()
    assert (buf.num_episodes, len(buf), buf.column_names) == (0, 0, list(episode(1)))
    buf.write_episode(episode(9))
    return seen, buf.lengths


@PROGRAMS.append
def data_loader(make, folder):
    buf = make(max_steps=10_000, history_len=4, transform=lambda clip: {**clip, "extra": 1})
    collect(buf, Drift(), Wander(), episodes=12, seed=0)
    clip = buf[len(buf) - 1]
    assert clip.pop("extra") == 1
    expect_clips({name: values[None] for name, values in clip.items()}, 1, 4)

    clips = []
    for batch in DataLoader(buf, batch_size=64, shuffle=True, num_workers=2):
        assert batch.pop("extra").tolist() == [1] * len(batch["reward"])
        expect_clips(batch, len(batch["reward"]), 4)
        clips += batch["proprio"][:, 0].tolist()
    every = [[ep, t] for ep, length in enumerate(buf.lengths) for t in range(length - 3)]
    assert sorted(clips) == every
    return every


@PROGRAMS.append
def own_sampler(make, folder):
    rng = np.random.default_rng(0)
    asked = []

    def newest_half(step, buffer, batch_size, history_len):
        n = buffer.num_valid_ends(history_len)
        asked.append((step, batch_size, history_len, buffer.num_episodes, n))
        assert buffer.num_steps_stored == buffer.lengths.sum()
        return rng.integers(n // 2, n, batch_size)

    buf = make(max_steps=100_000, history_len=4, sampler=newest_half)
    collect(buf, Drift(), Wander(), episodes=10, seed=0)
    batch = buf.sample(batch_size=64)
    expect_clips(batch, 64, 4)
    first_of_half = buf[len(buf) // 2]["proprio"][0].tolist()
    assert min(batch["proprio"][:, 0].tolist()) >= first_of_half

    expect_clips(buf.sample(batch_size=8, history_len=6), 8, 6)
    n6 = int(np.maximum(buf.lengths - 5, 0).sum())
    assert asked == [(0, 64, 4, 10, len(buf)), (1, 8, 6, 10, n6)]
    return batch


@PROGRAMS.append
def counted_steps(make, folder):
    asked = []

    def sampler(step, buffer, batch_size, history_len):
        asked.append(step)
        return np.zeros(batch_size, np.int64)

    buf = make(max_steps=1_000, sampler=sampler)
    buf.write_episode(episode(20))
    for step in (None, None, 700, 700, None):
        buf.sample(batch_size=4, step=step)
    assert asked == [0, 1, 700, 700, 2]
    return asked


@PROGRAMS.append
def schedule(make, folder):
    rng = np.random.default_rng(0)

    def warm_up_then_uniform(step, buffer, batch_size, history_len):
        n = buffer.num_valid_ends(history_len)
        low = max(0, n - 100) if step < 10_000 else 0
        return rng.integers(low, n, batch_size)

    buf = make(max_steps=200_000, history_len=4, sampler=warm_up_then_uniform)
    for number in range(50):
        buf.write_episode(episode(20, number))
    early = buf.sample(batch_size=500, step=9_999)["proprio"][:, 0, 0]
    late = buf.sample(batch_size=500, step=10_000)["proprio"][:, 0, 0]
    assert early.min() == 44  # 17 clips each: the newest 100 begin in episode 44
    assert late.min() == 0
    return early, late


@PROGRAMS.append
def priorities(make, folder):
    class PrioritizedSampler:
        def __init__(self, alpha):
            self.alpha = alpha
            self.rng = np.random.default_rng(0)
            self.priorities = np.zeros(0, np.float32)

        def __call__(self, step, buffer, batch_size, history_len):
            n = buffer.num_valid_ends(history_len)
            fresh = np.ones(max(0, n - len(self.priorities)), np.float32)
            self.priorities = np.concatenate([self.priorities, fresh])
            weights = self.priorities[:n] ** self.alpha
            return self.rng.choice(n, size=batch_size, p=weights / weights.sum())

    sampler = PrioritizedSampler(alpha=0.6)
    buf = make(max_steps=200_000, history_len=4, sampler=sampler)
    collect(buf, Drift(), Wander(), episodes=5, seed=0)
    expect_clips(buf.sample(64), 64, 4)
    assert len(sampler.priorities) == len(buf)
    sampler.priorities[:] = 0
    sampler.priorities[[3, 7]] = 1
    drawn = buf.sample(64)["proprio"][:, 0]
    assert {tuple(clip) for clip in drawn.tolist()} == {(0, 3), (0, 7)}
    return drawn


@PROGRAMS.append
def strides(make, folder):
    buf = make(max_steps=10_000, history_len=4, frameskip=2, seed=0)
    collect(buf, Drift(), Wander(), episodes=6, seed=0)
    clip = buf[0]
    assert clip["pixels"].shape == (4, 8, 8, 3)
    assert clip["action"].shape == (4, 2 * ACTION_DIM)
    assert clip["proprio"][:, 1].tolist() == [0, 2, 4, 6]
    assert clip["action"][:, ::ACTION_DIM].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(buf) == sum(length - 7 for length in buf.lengths)
    batch = buf.sample(32)
    expect_clips(batch, 32, 4, frameskip=2)

    plain = make(max_steps=10_000, history_len=4)
    plain.write_episode(episode(10))
    assert plain.frameskip == 1
    assert plain[2]["action"][:, 0].tolist() == [2, 3, 4, 5]
    return batch


@PROGRAMS.append
def persistence(make, folder):
    buf = make(max_steps=1_000, history_len=4)
    for number in range(3):
        buf.write_episode(episode(10 + number, number))
    path = folder / "checkpoints/replay.h5"
    buf.dump(path, format="hdf5")
    stored = swm.data.load_dataset(path)
    assert stored.lengths.tolist() == [10, 11, 12]
    for i, episodes in enumerate(buf.episodes()):
        assert equal(episode(10 + i, i), stack(episodes))
        loaded = make(max_steps=100)
        loaded.write_episode(stored.load_episode(i))
        assert equal(episode(10 + i, i), loaded.load_episode(0))
    stored.close()

    buf.clear()
    buf.write_episode(episode(7))
    buf.dump(path, format="hdf5", mode="append")
    assert swm.data.load_dataset(path).lengths.tolist() == [10, 11, 12, 7]
    with pytest.raises(FileExistsError):
        buf.dump(path, format="hdf5", mode="error")
    buf.dump(path, format="hdf5")  # the default replaces
    assert swm.data.load_dataset(path).lengths.tolist() == [7]

    reloaded = swm.data.load_dataset(path, num_steps=4)
    assert len(reloaded) == len(buf) == 4
    assert np.array_equal(reloaded.get_col_data("pixels"), episode(7)["pixels"])
    return buf.lengths


@PROGRAMS.append
def online_rl(make, folder):
    prior = make(max_steps=1_000)
    collect(prior, Drift(), Wander(seed=9), episodes=3, seed=100)
    prior.dump(folder / "runs/prior.h5", format="hdf5")

    env, policy = Drift(), Wander()
    buf = make(max_steps=300, history_len=4, seed=0)
    warm_start = swm.data.load_dataset(folder / "runs/prior.h5", num_steps=4)
    for i in range(len(warm_start.lengths)):
        buf.write_episode(warm_start.load_episode(i))
    assert buf.lengths.tolist() == prior.lengths.tolist()

    global_step, snapshots = 0, []
    while global_step < 60:
        collect(buf, env, policy, episodes=2, seed=global_step)
        for _ in range(10):
            batch = buf.sample(batch_size=256, step=global_step)
            expect_clips(batch, 256, 4)
            policy.update(batch)
            global_step += 1
        if global_step % 30 == 0:
            name = f"runs/step_{global_step:06d}"
            buf.dump(folder / f"{name}.h5", format="hdf5")
            torch.save(policy.state_dict(), folder / f"{name}.pt")
            snapshots.append((name, buf.lengths.tolist()))
    assert policy.num_updates == 60
    assert buf.num_steps_stored <= 300 < buf.num_steps_stored + 30  # full, and evicting
    for name, lengths in snapshots:
        assert swm.data.load_dataset(folder / f"{name}.h5").lengths.tolist() == lengths
    weights = torch.load(folder / "runs/step_000030.pt")
    assert weights["num_updates"] == 30
    return batch, buf.lengths


# -- the tests --------------------------------------------------------------------------------


def equal(a, b):
    return list(a) == list(b) and all(np.array_equal(a[name], b[name]) for name in a)


def stack(steps):
    return {name: np.stack(values) for name, values in steps.items()}


@pytest.fixture
def homes(tmp_path):
    """Two ways to make a buffer, in RAM and on disk."""
    made = []

    def in_ram(**options):
        return ReplayBuffer(**options)

    def on_disk(**options):
        made.append(ReplayBuffer(path=tmp_path / f"buffer-{len(made)}", **options))
        return made[-1]

    yield {"ram": in_ram, "disk": on_disk}
    for buf in made:
        expect_reopened(buf)


def expect_reopened(buf):
    """What the program left in a directory is there again, in a reader and after reopening."""
    left, path = list(map(stack, buf.episodes())), buf.path
    reader = ReplayBuffer.open(path)
    buf.close()
    writer = ReplayBuffer.open(path, mode="r+")
    for again in (reader, writer):
        found = list(map(stack, again.episodes()))
        assert len(found) == len(left)
        assert all(map(equal, found, left))
        again.close()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_path_changes_nothing(program, homes, tmp_path):
    in_ram, on_disk = (program(homes[home], tmp_path / home) for home in ("ram", "disk"))
    np.testing.assert_equal(on_disk, in_ram)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: b["proprio"][0, 2:].__setitem__((..., 0), 9), "two episodes"),
        (lambda b: b["proprio"][0].__setitem__((slice(None), 1), 3), "not in a row"),
        (lambda b: b["pixels"].__setitem__(0, 77), "columns disagree"),
        (lambda b: b["action"].__setitem__(0, b["action"][0, ::-1].copy()), "actions are not"),
        (lambda b: b.__setitem__("action", b["action"][:, :2]), "action"),
    ],
)
def test_control(spoil, message):
    buf = ReplayBuffer(max_steps=100, history_len=4, frameskip=2)
    buf.write_episode(episode(20))
    batch = buf.sample(8)
    expect_clips(batch, 8, 4, frameskip=2)
    spoil(batch)
    with pytest.raises(AssertionError, match=message):
        expect_clips(batch, 8, 4, frameskip=2)
