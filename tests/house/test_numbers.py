"""Every public parameter that is a number takes NumPy's scalar of its kind as it takes Python's number.

A parameter without a sample fails: `CALLS` is for each public function a call with a sample of each of its numbers.
"""

import importlib
import inspect
import re

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import ringmap
from ringmap import Column, Pace, Weights, Zarr, data, policy, samplers, world
from ringmap.errors import InputError

HOMES = ("ringmap", "ringmap.data", "ringmap.samplers", "ringmap.policy", "ringmap.world", "ringmap.recording")
NUMBER = re.compile(r"\b(int|float|bool|Seed)\b")
A_FUNCTION = re.compile(r"^Callable")
NOT_OURS = re.compile(
    r"^(Format|Writer|EpisodeWriter|EpisodeSource|Sampler|BaseSampler|Computed|Dataset|BasePolicy)\.|\.(merge_col|show)$"
)
"""What a user subclasses; what nothing of ours can do; what starts a server."""


def public():
    """Return the name of each public function or method -> its parameters that are numbers."""
    found, seen = {}, set()
    for home in HOMES:
        module = importlib.import_module(home)
        for name in module.__all__:
            given = getattr(module, name)
            if not callable(given) or given in seen:
                continue
            seen.add(given)
            functions = {name: given}
            if inspect.isclass(given):
                functions = {
                    f"{name}.{key}": value
                    for key, value in inspect.getmembers(given)
                    if (inspect.isfunction(value) or inspect.ismethod(value))
                    and (not key.startswith("_") or key in ("__init__", "__call__"))
                }
            for full, function in functions.items():
                inner = getattr(function, "__func__", function)
                home_of = inner.__module__ or ""
                if not home_of.startswith("ringmap") or NOT_OURS.search(full) or inner in seen - {given}:
                    continue
                seen.add(inner)
                numbers = [
                    p.name
                    for p in inspect.signature(function).parameters.values()
                    if NUMBER.search(str(p.annotation)) and not A_FUNCTION.match(str(p.annotation))
                ]
                if numbers:
                    found[full] = numbers
    return found


FOUND = public()


# -- a call of each ------------------------------------------------------------------------------

EPISODE = {
    "obs": np.arange(20, dtype="f4"),
    "action": np.zeros((20, 1), "f4"),
    "reward": np.ones(20, "f4"),
    "terminated": np.arange(20) == 19,
    "pixels": np.zeros((20, 8, 8, 3), "u1"),
    "proprio": np.zeros((20, 2), "f4"),
}
ZEROS = np.zeros(2, "f4")
ROWS = np.zeros((2, 3), "f4"), np.zeros((2, 1), "f4")


def ring(**options):
    buf = ringmap.ReplayBuffer(999, fps=10, reward_at="next", **{"seed": 0, **options})
    for seed in range(9):
        buf.write_episode({**EPISODE, "_episode_data": {"seed": seed}})
    return buf


def stored_ring(**given):
    with ringmap.ReplayBuffer(path="ring", **given) as buf:
        buf.write_episode({"x": np.arange(20)})
        buf.sample(2)
    again = ringmap.ReplayBuffer.open("ring")
    assert not any(isinstance(v, np.generic) for v in vars(again.options).values())


def in_ram(**options):
    return ringmap.ReplayBuffer(500, spare_rows=100, **options)


def transitions(**options):
    buf = ringmap.TransitionReplayBuffer(**{"capacity": 100, "obs_shape": (2,), "device": None, "seed": 0, **options})
    for i in range(0 if "frame_stack" in options else 10):
        obs = np.full(2, i, "f4")
        buf.add(obs, i, 1.0, obs + 1, i % 2 == 1)
    return buf


def opened_transitions(**given):
    transitions(path="t").close()
    ringmap.TransitionReplayBuffer.open("t", device=None, **given).sample(2)


def mixed(**given):
    buf = ringmap.OfflineToOnlineReplayBuffer(ring(), **{"online_capacity": 50, "batch_size": 4, "seed": 0, **given})
    buf.extend(dict(EPISODE))
    buf.sample()
    return buf


def student(**given):
    buf = data.DistillationBuffer(**{"capacity": 50, "seed": 0, **given})
    buf.start_round()
    for t in range(6):
        buf.add(*ROWS, dones=np.full(2, t == 5))
    return buf


def rollout(steps=4, **given):
    sizes = {"num_envs": 2, "num_steps": 4, "obs_shape": (3,), "action_shape": (1,), "seed": 0}
    buf = ringmap.RolloutBuffer(**{**sizes, **given})
    for _ in range(steps):
        buf.add(ROWS[0], None, ROWS[1], *[ZEROS] * 4)
    return buf


def returned():
    buf = rollout()
    buf.compute_returns_and_advantages(ZEROS)
    return buf


def drawn(sampler):
    ring(sampler=sampler).sample(4)


def mixture(share=1.0, **given):
    return samplers.MixtureSampler([(samplers.UniformSampler(), share)], **given)


def windowed(**window):
    ring().sample(4, window=window)


def hindsight(**given):
    columns = {"goal": "proprio", "achieved": "proprio"}
    windowed(h=data.Hindsight(**columns, reward_fn=lambda a, g: np.zeros(len(a), "f4"), **given))


def joined():
    return data.ConcatDataset([ring(), ring()])


def goals(**given):
    made = data.GoalDataset(ring(), **{"seed": 0, **given})
    assert "goal_pixels" in made[0]
    return made


def rings():
    for name in ("a", "b"):
        ring(path=f"fleet/{name}").close()
    return data.ShardedReplayBuffer("fleet")


def drawn_of_rings(make, **given):
    make(path="fleet/a").close()
    data.ShardedReplayBuffer("fleet", **given).sample(2)


def loaded(**given):
    ring().dump("set.h5", progress=False)
    return data.load_dataset("set.h5", **given)[0]


def repaired(**given):
    ring(path="ring").close()
    ringmap.repair("ring", **given)


def arrays(**given):
    names = {"observations": "obs", "actions": "action", "rewards": "reward", "terminals": "terminated"}
    return data.from_arrays({theirs: EPISODE[ours] for theirs, ours in names.items()}, **given)


class Still(gymnasium.Env):
    """Three steps of nothing."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, render_mode="rgb_array"):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {"goal": self.render()}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 3, False, {"goal": self.render()}

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)

    def reset_options_from_dataset(self, init, goal):
        return {}

    def expert_action(self):
        return np.zeros(1, np.float32)


def rooms(given_policy=None, **given):
    if "RingmapTest/Still-v0" not in gymnasium.registry:
        gymnasium.register("RingmapTest/Still-v0", Still)
    made = ringmap.World("RingmapTest/Still-v0", **{"num_envs": 2, "image_shape": (8, 8), **given})
    made.set_policy(given_policy or policy.RandomPolicy(0))
    return made


def collected(buf=None, **given):
    with rooms(**given) as made:
        made.collect(writer=in_ram() if buf is None else buf, episodes=2, progress=False)


def evaluated(**given):
    buf = in_ram()
    collected(buf)
    rooms().evaluate(dataset=buf, progress=False, **given)


def recorded(**given):
    return ringmap.ReplayBufferCollectionWrapper(Still(), in_ram(), dump_path="unused", **given)


def paced(path="fleet", **given):
    return Pace(path, **{"samples_per_insert": 4.0, "min_steps": 1, "slack": 9.0, **given})


def paced_rings():
    rings().close()
    return paced()


def published(**given):
    torch = pytest.importorskip("torch")
    Weights("weights").publish(torch.nn.Linear(1, 1), **given)


def taken(name, cls, adds):
    """Return calls that any dataset has: of a class, without those that it has by another name."""
    kinds = {
        "get_episode_data": {"idx": 1},
        "get_row_data": {"row_idx": 3},
        "load_episode": {"episode_idx": 1, "nest": True},
        "take": {"episodes": [0, 1]},
        "view": {"drop_all_padded": False},
    }
    return {f"{name}.{method}": lambda n, m=method, s=kinds[method]: getattr(cls(), m)(**n(**s)) for method in adds}


ALL = ("get_episode_data", "get_row_data", "load_episode", "take", "view")
CALLS = {
    **taken("ReplayBuffer", ring, ALL[:-1]),
    **taken("ConcatDataset", joined, ALL),
    **taken("GoalDataset", goals, ALL),
    **taken("MergeDataset", lambda: data.MergeDataset([ring(), ring()]), ALL[:-1]),
    **taken("ShardedReplayBuffer", rings, ALL[:-1]),
    "ReplayBuffer.__init__": lambda n: stored_ring(
        **n(max_steps=50, history_len=2, frameskip=2, seed=3, spare_rows=20, sync_every_s=5.0, threads=2, fps=12.5)
    ),
    "ReplayBuffer.batches": lambda n: ring().batches(
        **n(batch_size=4, steps=2, prefetch=1, pin_memory=False, drop_all_padded=False)
    ),
    "ReplayBuffer.begin_episode": lambda n: ring().begin_episode(**n(commit_every=5, lane=1)),
    "ReplayBuffer.check_commit_every": lambda n: ring().check_commit_every(where="here", **n(commit_every=5)),
    "ReplayBuffer.clip_window": lambda n: ring().clip_window(**n(history_len=1)),
    "ReplayBuffer.clip_windows": lambda n: ring().clip_windows(**n(history_len=1)),
    "ReplayBuffer.cut_of": lambda n: ring().cut_of(**n(history_len=2, drop_all_padded=False)),
    "ReplayBuffer.dump": lambda n: ring().dump("set.h5", **n(progress=True)),
    "ReplayBuffer.episode_data": lambda n: ring().episode_data(**n(episode_idx=0)),
    **{
        f"{name}.each_episode": lambda n, make=make: make().each_episode(**n(with_data=True, is_live=False))
        for name, make in {"ReplayBuffer": ring, "ConcatDataset": joined, "GoalDataset": goals}.items()
    },
    "ReplayBuffer.episode_number": lambda n: ring().episode_number(**n(position=0)),
    "ReplayBuffer.episodes": lambda n: ring().episodes(**n(nest=True)),
    "ReplayBuffer.estimate": lambda n: ringmap.ReplayBuffer.estimate(
        schema={"x": ((), "f4")}, **n(max_steps=50, spare_rows=5)
    ),
    "ReplayBuffer.load_chunk": lambda n: ring().load_chunk(start=[0, 1], end=[3, 4], **n(episodes_idx=[0, 1])),
    "ReplayBuffer.load_steps": lambda n: ring().load_steps(**n(episode_idx=1, start=2, end=5)),
    "ReplayBuffer.num_valid_ends": lambda n: ring().num_valid_ends(**n(history_len=3)),
    "ReplayBuffer.pass_sampler": lambda n: ring().pass_sampler(
        **n(shuffle=True, seed=3, rank=0, num_ranks=2, drop_last=True)
    ),
    "ReplayBuffer.sample": lambda n: ring().sample(
        **n(batch_size=3, history_len=2, step=7, drop_all_padded=False, nest=True)
    ),
    "ReplayBuffer.split": lambda n: ring().split(**n(train=0.5, seed=3, drop_all_padded=False)),
    "ReplayBuffer.steps_as_stored": lambda n: ring().steps_as_stored(**n(episode=1, start=2, end=5)),
    "ReplayBuffer.stored_rows": lambda n: ring().stored_rows(names=["obs"], **n(first=0, stop=2)),
    "ReplayBuffer.view": lambda n: ring().view(**n(drop_all_padded=False, live=True)),
    "ReplayBuffer.write_episode": lambda n: ring().write_episode(EPISODE, **n(sync=True)),
    "ReplayBuffer.write_joined": lambda n: ring().write_joined(rows=EPISODE, **n(lengths=[5, 15], sync=True)),
    "Column.__init__": lambda n: in_ram(schema={"x": Column((), "f4", **n(mutable=True))}),
    "Zarr.__init__": lambda n: in_ram(path="z", storage=Zarr(**n(chunk_steps=8)), schema={"x": ((), "f4")}),
    "Marks.get": lambda n: ringmap.Marks(ring(path="ring")).get(**n(episode=0)),
    "Marks.remove": lambda n: ringmap.Marks(ring(path="ring")).remove(**n(episode=0)),
    "Marks.set": lambda n: ringmap.Marks(ring(path="ring")).set(flags="bad", **n(episode=0)),
    "TransitionReplayBuffer.__init__": lambda n: transitions(
        path="t", **n(capacity=50, n_step=2, gamma=0.5, seed=3, pin_memory=False, sync_every_s=5.0)
    ).close(),
    "TransitionReplayBuffer.__init__ of stacks": lambda n: transitions(obs_shape=(2, 2), **n(frame_stack=2)),
    "TransitionReplayBuffer.batches": lambda n: transitions().batches(
        **n(batch_size=3, steps=1, prefetch=1, pin_memory=False)
    ),
    "TransitionReplayBuffer.clip_window": lambda n: transitions().clip_window(**n(history_len=1)),
    "TransitionReplayBuffer.dump": lambda n: transitions().dump("set.h5", **n(progress=True)),
    "TransitionReplayBuffer.episodes": lambda n: transitions().episodes(**n(nest=True)),
    "TransitionReplayBuffer.num_valid_ends": lambda n: transitions().num_valid_ends(**n(history_len=1)),
    "TransitionReplayBuffer.open": lambda n: opened_transitions(**n(n_step=2, gamma=0.5, pin_memory=False)),
    "TransitionReplayBuffer.sample": lambda n: transitions().sample(**n(batch_size=3, step=2)),
    "TransitionReplayBuffer.split": lambda n: transitions().split(**n(train=0.5, seed=3)),
    "TransitionReplayBuffer.view": lambda n: transitions().view(**n(live=True)),
    "OfflineToOnlineReplayBuffer.__init__": lambda n: mixed(
        **n(online_capacity=50, offline_fraction=0.25, batch_size=4, pin_memory=False, seed=3)
    ),
    "OfflineToOnlineReplayBuffer.anneal": lambda n: mixed().anneal(**n(step=1, total_steps=10)),
    "OfflineToOnlineReplayBuffer.rows": lambda n: mixed().rows(**n(batch_size=4)),
    "OfflineToOnlineReplayBuffer.sample": lambda n: mixed().sample(**n(batch_size=4, nest=True)),
    "OfflineToOnlineReplayBuffer.split": lambda n: mixed().split(**n(batch_size=4)),
    "DistillationBuffer.__init__": lambda n: student(
        retention="last", **n(capacity=50, keep_rounds=2, beta=0.5, pin_memory=False, seed=3, sync_every_s=5.0)
    ),
    "DistillationBuffer.add": lambda n: student().add(*ROWS, **n(policy_version=4)),
    "DistillationBuffer.batch": lambda n: student().batch(**n(batch_size=2)),
    "DistillationBuffer.epochs": lambda n: student().epochs(
        **n(batch_size=2, num_epochs=1, shuffle=True, drop_last=True)
    ),
    "DistillationBuffer.sample": lambda n: student().sample(**n(batch_size=2)),
    "DistillationBuffer.sequences": lambda n: student().sequences(
        **n(length=2, batch_size=1, num_epochs=1, shuffle=True, drop_last=True)
    ),
    "DistillationBuffer.start_round": lambda n: student().start_round(**n(policy_version=4)),
    "LinearBeta.__init__": lambda n: data.LinearBeta(**n(rounds=3, start=0.75, end=0.25)),
    "LinearBeta.__call__": lambda n: data.LinearBeta(3)(**n(round=1)),
    "ExponentialBeta.__init__": lambda n: data.ExponentialBeta(**n(decay=0.5)),
    "ExponentialBeta.__call__": lambda n: data.ExponentialBeta(0.5)(**n(round=1)),
    "RolloutBuffer.__init__": lambda n: rollout(0, **n(num_envs=2, num_steps=4, num_privileged_obs=1, seed=3)),
    "RolloutBuffer.compute_returns_and_advantages": lambda n: rollout().compute_returns_and_advantages(
        ZEROS, **n(gamma=0.5, gae_lambda=0.5)
    ),
    "RolloutBuffer.get_minibatch": lambda n: returned().get_minibatch(**n(size=2)),
    "RolloutBuffer.minibatches": lambda n: returned().minibatches(
        **n(num=2, epochs=1, shuffle=True, normalize_advantages=True)
    ),
    "RolloutBuffer.sequence_minibatches": lambda n: returned().sequence_minibatches(
        **n(length=2, num=1, epochs=1, shuffle=True, normalize_advantages=True)
    ),
    "PrioritizedSampler.__init__": lambda n: drawn(
        samplers.PrioritizedSampler(**n(alpha=0.5, beta=0.5, eps=0.25, resort_every=8, rng=3))
    ),
    "RecencySampler.__init__": lambda n: drawn(samplers.RecencySampler(**n(half_life=8.0, rng=3))),
    "RecencySampler.__init__ of a window": lambda n: drawn(samplers.RecencySampler(**n(window=8))),
    "UniformSampler.__init__": lambda n: drawn(samplers.UniformSampler(**n(rng=3))),
    "EpisodeSampler.__init__": lambda n: drawn(samplers.EpisodeSampler(**n(rng=3))),
    "EpochSampler.__init__": lambda n: drawn(samplers.EpochSampler(**n(seed=3))),
    "MixtureSampler.__init__": lambda n: drawn(mixture(**n(rng=3))),
    "MixtureSampler.__init__ of a share": lambda n: drawn(mixture(*n(samplers=0.5).values())),
    "MixtureSampler.follow": lambda n: mixture().follow(ring(), **n(history_len=1)),
    **{
        f"{name}.__call__": lambda n, make=make: make()(buffer=ring(), **n(step=2, batch_size=3, history_len=1))
        for name, make in {
            **{f"{kind}Sampler": getattr(samplers, f"{kind}Sampler") for kind in ("Uniform", "Episode", "Epoch")},
            "PrioritizedSampler": samplers.PrioritizedSampler,
            "RecencySampler": lambda: samplers.RecencySampler(8.0),
            "MixtureSampler": mixture,
        }.items()
    },
    "EpisodeSampler.follow": lambda n: samplers.EpisodeSampler().follow(ring(), **n(history_len=1)),
    "PrioritizedSampler.follow": lambda n: samplers.PrioritizedSampler().follow(ring(), **n(history_len=1)),
    "PrioritizedSampler.mass_of": lambda n: samplers.PrioritizedSampler().mass_of(
        ring().clip_window(1), **n(highest=0.5)
    ),
    "PrioritizedSampler.weigher": lambda n: samplers.PrioritizedSampler().weigher(
        ids=np.arange(2), odds=np.ones(2), **n(step=3)
    ),
    "Linear.__init__": lambda n: samplers.Linear(**n(start=0.5, stop=0.5, steps=8))(3),
    "Linear.__call__": lambda n: samplers.Linear(0.0, 1.0, 8)(**n(step=3)),
    "NStep.__init__": lambda n: windowed(n=data.NStep(**n(n=2, gamma=0.5))),
    "ReturnToGo.__init__": lambda n: windowed(g=data.ReturnToGo(**n(gamma=0.5))),
    "Hindsight.__init__": lambda n: hindsight(**n(k=2.0)),
    "Window.__init__": lambda n: windowed(obs=data.Window([0, 1], **n(blanks=True))),
    "Window.steps": lambda n: data.Window(seconds=[0.0, 0.5]).steps(
        where="here", name="obs", **n(frameskip=1, fps=10.0)
    ),
    "Sequences.__init__": lambda n: ring().sample(4, window=data.Sequences(**n(length=4, burn_in=1, across=False))),
    "Sequences.window": lambda n: data.Sequences(4).window(schema=ring().schema, where="here", **n(frameskip=1)),
    "ConcatDataset.batches": lambda n: joined().batches(**n(batch_size=2, steps=1)),
    "ConcatDataset.episode_data": lambda n: joined().episode_data(**n(episode_idx=1)),
    "ConcatDataset.load_chunk": lambda n: joined().load_chunk(start=[0, 1], end=[3, 4], **n(episodes_idx=[0, 1])),
    "ConcatDataset.load_steps": lambda n: joined().load_steps(**n(episode_idx=1, start=2, end=5)),
    "ConcatDataset.sample": lambda n: joined().sample(**n(batch_size=2, nest=True)),
    "ConcatDataset.split": lambda n: joined().split(**n(train=0.5, seed=3)),
    "GoalDataset.__init__": lambda n: goals(
        **n(goal_probabilities=[0.25] * 4, gamma=0.5, current_goal_offset=1, seed=3)
    ),
    "GoalDataset.steps_as_stored": lambda n: goals().steps_as_stored(**n(episode=1, start=2, end=5)),
    "ShardedReplayBuffer.__init__": lambda n: drawn_of_rings(
        ring, **n(history_len=2, frameskip=2, wait_s=0.5, seed=3, threads=2)
    ),
    "ShardedReplayBuffer.__init__ of transitions": lambda n: drawn_of_rings(transitions, **n(n_step=2, gamma=0.5)),
    "ShardedReplayBuffer.episodes": lambda n: rings().episodes(**n(nest=True)),
    "ShardedReplayBuffer.split": lambda n: rings().split(**n(train=0.5, seed=3, drop_all_padded=False)),
    "ShardedReplayBuffer.view": lambda n: rings().view(**n(drop_all_padded=False, live=True)),
    "load_dataset": lambda n: loaded(**n(drop_all_padded=False, fps=12.5)),
    "convert": lambda n: data.convert(ring(), "c.h5", **n(progress=False)),
    "merge": lambda n: data.merge([ring()], "m.h5", **n(progress=False)),
    "repair": lambda n: repaired(**n(dry_run=True)),
    "from_arrays": lambda n: arrays(**n(max_episode_steps=5)),
    "World.__init__": lambda n: collected(
        **n(
            num_envs=2,
            image_shape=(8, 8),
            max_episode_steps=5,
            goal_conditioned=True,
            image_resample=2,
            add_pixels=True,
            workers=1,
        )
    ),
    "World.reset": lambda n: rooms().reset(**n(seed=3)),
    "World.collect": lambda n: rooms().collect(
        writer=in_ram(), **n(episodes=2, seed=3, progress=False, resume=False, commit_every=2)
    ),
    "World.evaluate": lambda n: rooms().evaluate(**n(episodes=2, seed=3, progress=False)),
    "World.evaluate of a dataset": lambda n: evaluated(
        **n(episodes_idx=[0, 1], start_steps=[1, 1], goal_offset=1, eval_budget=2)
    ),
    "RandomPolicy.__init__": lambda n: collected(given_policy=policy.RandomPolicy(**n(seed=3))),
    "RandomPolicy.set_seed": lambda n: policy.RandomPolicy().set_seed(**n(seed=3)),
    "ExpertPolicy.__init__": lambda n: collected(given_policy=policy.ExpertPolicy(**n(noise=0.25, seed=3))),
    "ExpertPolicy.set_seed": lambda n: policy.ExpertPolicy().set_seed(**n(seed=3)),
    "FeedForwardPolicy.__init__": lambda n: policy.FeedForwardPolicy(lambda x: x, keys="obs", **n(history=False)),
    "MegaWrapper.__init__": lambda n: world.MegaWrapper(
        Still(), **n(image_shape=(8, 8), image_resample=2, separate_goal=True, add_pixels=True)
    ).reset(),
    "EnvPool.__init__": lambda n: world.EnvPool([Still] * 2, **n(workers=1, copy=True)).close(),
    "EnvPool.reset": lambda n: world.EnvPool([Still] * 2).reset(**n(seed=3)),
    "ReplayBufferCollectionWrapper.__init__": lambda n: recorded(
        **n(dump_on_episode_end=False, dump_on_reset_boundary=False, stream=False, commit_every=2)
    ),
    "ReplayBufferCollectionWrapper.__init__ that validates": lambda n: recorded(**n(validate_transition=True)),
    "ReplayBufferCollectionWrapper.buffer_swap": lambda n: recorded().buffer_swap(
        in_ram(), **n(require_same_space=True, allow_mid_episode=True, finalize_old_segments=False, dump_old=False)
    ),
    "Pace.__init__": lambda n: paced(
        "pace", **n(samples_per_insert=4.0, min_steps=1, slack=9.0, max_ahead=50, timeout_s=5.0, rank=0)
    ),
    "Pace.draw": lambda n: paced_rings().draw(**n(num_steps=2)),
    "Pace.over": lambda n: paced_rings().over(batches=[1], **n(num_steps=2)),
    "Pace.insert": lambda n: paced("pace").insert(**n(num_steps=2)).__enter__(),
    "Weights.publish": lambda n: published(**n(step=3)),
}
"""Name -> a call of it; after the name, of what. Its argument gives the samples of the numbers back, one as NumPy's."""

COLLECT = {
    "episodes": 1,
    "collectors": 1,
    "seed": 0,
    "resume": True,
    "max_steps": 500,
    "commit_every": 2,
    "threads": 1,
    "progress": False,
    "wait_s": 5.0,
}
"""It starts a process: `test_collect` calls it once, with all of them."""


# -- the tests -----------------------------------------------------------------------------------


class Given(Exception):
    """The samples of a call."""


def given(**samples):
    raise Given(samples)


def samples_of(full):
    with pytest.raises(Given) as caught:
        CALLS[full](given)
    return caught.value.args[0]


def scalar(value):
    """Return a sample as NumPy's scalar of its kind, or as an array."""
    kinds = {bool: np.bool_, int: np.uint16, float: np.float32}  # sums of uint16 are cut at 2**16
    return kinds.get(type(value), np.array)(value)


def test_every_number_has_a_sample(tmp_path, monkeypatch):
    known = {"collect": {*COLLECT}}
    for number, full in enumerate(CALLS):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        known.setdefault(full.partition(" ")[0], set()).update(samples_of(full))
    every = [(full, number) for full, numbers in FOUND.items() for number in numbers]
    assert not [f"{full}({number}=)" for full, number in every if number not in known.get(full, ())]


@pytest.mark.parametrize("full", CALLS)
def test_numpy_scalars_are_taken(tmp_path, monkeypatch, full):
    """Each number in turn, the others as Python has them."""
    monkeypatch.chdir(tmp_path)
    for varied in samples_of(full):
        place = tmp_path / varied
        place.mkdir()
        monkeypatch.chdir(place)
        try:
            result = CALLS[full](lambda **samples: {**samples, varied: scalar(samples[varied])})  # noqa: B023
            if hasattr(result, "__next__"):
                next(result)  # it may check its arguments then
        except Exception as error:
            error.add_note(f"{full}({varied}=)")
            raise


def one_room(number):
    return rooms(num_envs=1)


@pytest.mark.slow
def test_collect(tmp_path):
    numbers = {name: scalar(sample) for name, sample in COLLECT.items()}
    ringmap.collect(one_room, tmp_path / "rings", **numbers)
    assert ringmap.ReplayBuffer.open(tmp_path / "rings" / "collector-0").num_episodes == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: rooms().collect(writer=ringmap.ReplayBuffer(99), episodes=1, seed=1.5), "seed must be an integer"),
        (lambda: rooms().evaluate(episodes=1, seed="1"), "seed must be an integer"),
        (lambda: world.EnvPool([Still], workers=0.5), "workers must be an integer"),
        (lambda: ringmap.ReplayBuffer(max_steps=np.bool_(True)), "max_steps must be positive"),
        (lambda: ringmap.ReplayBuffer(10, seed=np.float32(1)), "seed must be"),
        (lambda: ring().sample(np.float64(2)), "batch_size must be positive"),
        (lambda: samplers.PrioritizedSampler(alpha="0.6"), "alpha must be a number"),
        (lambda: samplers.PrioritizedSampler(alpha=True), "alpha must be a number"),
        (lambda: samplers.Linear(np.float32("nan"), 1, 2), "start must be a finite number"),
        (lambda: ringmap.ReplayBuffer(10, sync_every_s="1"), "sync_every_s must be seconds"),
        (lambda: ring().sample(2, history_len=np.ones(2)), "history_len must be positive"),
    ],
)
def test_what_is_no_such_number_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        given()
