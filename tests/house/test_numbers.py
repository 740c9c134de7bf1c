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
    r"^(Format|Writer|EpisodeWriter|Sampler|BaseSampler|Computed|Dataset|BasePolicy)\.|\.(merge_col|show)$"
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
CALLS = {}


def ring(**options):
    buf = ringmap.ReplayBuffer(999, fps=10, reward_at="next", **{"seed": 0, **options})
    for seed in range(9):
        buf.write_episode({**EPISODE, "_episode_data": {"seed": seed}})
    return buf


def drained(result):
    """Take one item of an iterator: it may check its arguments then."""
    if hasattr(result, "__next__"):
        next(result)
    return result


def calls(make, name, **methods):
    """Note calls of `make(tmp_path)`'s methods: method -> its numbers, and other arguments after an underscore."""
    for method, samples in methods.items():
        rest = {key[1:]: value for key, value in samples.items() if key.startswith("_")}
        numbers = {key: value for key, value in samples.items() if not key.startswith("_")}

        def run(path, given, method=method, rest=rest):
            made = make(path)
            function = made if method == "call" else getattr(made, method)
            return drained(function(**rest, **given))

        full = name if method == "call" else f"{name}.{method}"
        CALLS[full] = run, numbers


def makes(name, function, **samples):
    """Note a call of a class or function."""
    calls(
        lambda path: lambda **n: function(path=path, **n) if "_path" in samples else function(**n),
        name,
        call={k: v for k, v in samples.items() if k != "_path"},
    )


def new(name, cls, **samples):
    makes(f"{name}.__init__", cls, **samples)


calls(
    lambda path: ring(),
    "ReplayBuffer",
    batches={"batch_size": 4, "steps": 2, "prefetch": 1, "pin_memory": False, "drop_all_padded": False},
    begin_episode={"commit_every": 5, "lane": 1},
    check_commit_every={"_where": "here", "commit_every": 5},
    clip_window={"history_len": 1},
    clip_windows={"history_len": 1},
    cut_of={"history_len": 2, "drop_all_padded": False},
    episode_data={"episode_idx": 0},
    episode_number={"position": 0},
    each_episode={"with_data": True, "is_live": False},
    episodes={"nest": True},
    get_episode_data={"idx": 1},
    get_row_data={"row_idx": 3},
    load_chunk={"episodes_idx": [0, 1], "_start": [0, 1], "_end": [3, 4]},
    load_episode={"episode_idx": 1, "nest": True},
    load_steps={"episode_idx": 1, "start": 2, "end": 5},
    num_valid_ends={"history_len": 3},
    pass_sampler={"shuffle": True, "seed": 3, "rank": 0, "num_ranks": 2, "drop_last": True},
    sample={"batch_size": 3, "history_len": 2, "step": 7, "drop_all_padded": False, "nest": True},
    split={"train": 0.5, "seed": 3, "drop_all_padded": False},
    steps_as_stored={"episode": 1, "start": 2, "end": 5},
    stored_rows={"first": 0, "stop": 2, "_names": ["x"]},
    take={"episodes": [0, 1]},
    view={"drop_all_padded": False, "live": True},
    write_episode={"_ep_data": EPISODE, "sync": True},
    write_joined={"_rows": EPISODE, "lengths": [5, 15], "sync": True},
)
makes("ReplayBuffer.estimate", ringmap.ReplayBuffer.estimate, _schema={"x": ((), "f4")}, max_steps=50, spare_rows=5)


def stored_ring(path, **given):
    buf = ringmap.ReplayBuffer(**{"max_steps": 50, **given}, path=path / "ring")
    buf.write_episode({"x": np.arange(20)})
    buf.sample(2)
    buf.close()
    again = ringmap.ReplayBuffer.open(path / "ring")
    assert not any(isinstance(v, np.generic) for v in vars(again.options).values())


new(
    "ReplayBuffer",
    stored_ring,
    _path=1,
    max_steps=50,
    history_len=2,
    frameskip=2,
    seed=3,
    spare_rows=20,
    sync_every_s=5.0,
    threads=2,
    fps=12.5,
)
calls(lambda path: lambda **n: ring().dump(path / "set.h5", **n), "ReplayBuffer.dump", call={"progress": True})
new("Column", lambda **n: ringmap.ReplayBuffer(10, schema={"x": Column((), "f4", **n)}), mutable=True)
new(
    "Zarr",
    lambda path, **n: ringmap.ReplayBuffer(99, path=path / "z", storage=Zarr(**n), schema={"x": ((), "f4")}),
    _path=1,
    chunk_steps=8,
)
calls(
    lambda path: ringmap.Marks(ring(path=path / "ring")),
    "Marks",
    get={"episode": 0},
    remove={"episode": 0},
    set={"episode": 0, "_flags": "bad"},
)


# transitions, and what mixes


def transitions(path=None, **options):
    buf = ringmap.TransitionReplayBuffer(
        path=path, **{"capacity": 100, "obs_shape": (2,), "device": None, "seed": 0, **options}
    )
    for i in range(10):
        obs = np.full((1, 2, 2), i, "f4") if options.get("frame_stack") else np.full(2, i, "f4")
        if not options.get("frame_stack"):
            buf.add(obs, i, 1.0, obs + 1, i % 2 == 1)
    return buf


def stored_transitions(path, **given):
    transitions(path=path / "t", **given).close()
    return ringmap.TransitionReplayBuffer.open(path / "t", device=None)


new(
    "TransitionReplayBuffer",
    lambda path, **n: transitions(
        path=path / "t", **({"obs_shape": (2, 2)} if "frame_stack" in n else {}), **n
    ).close(),
    _path=1,
    capacity=50,
    n_step=2,
    gamma=0.5,
    frame_stack=2,
    seed=3,
    pin_memory=False,
    sync_every_s=5.0,
)
calls(
    lambda path: transitions(),
    "TransitionReplayBuffer",
    episodes={"nest": True},
    batches={"batch_size": 3, "steps": 1, "prefetch": 1, "pin_memory": False},
    clip_window={"history_len": 1},
    num_valid_ends={"history_len": 1},
    sample={"batch_size": 3, "step": 2},
    split={"train": 0.5, "seed": 3},
    view={"live": True},
)
calls(
    lambda path: lambda **n: transitions().dump(path / "set.h5", **n),
    "TransitionReplayBuffer.dump",
    call={"progress": True},
)
calls(
    lambda path: (
        lambda **n: (
            stored_transitions(path).close(),
            ringmap.TransitionReplayBuffer.open(path / "t", device=None, **n).sample(2),
        )
    ),
    "TransitionReplayBuffer.open",
    call={"n_step": 2, "gamma": 0.5, "pin_memory": False},
)


def mixed(path=None, **given):
    options = {"online_capacity": 50, "batch_size": 4, "seed": 0, **given}
    buf = ringmap.OfflineToOnlineReplayBuffer(ring(), **options)
    rows = {name: values for name, values in EPISODE.items()}
    buf.extend(rows)
    buf.sample()
    return buf


new(
    "OfflineToOnlineReplayBuffer",
    mixed,
    online_capacity=50,
    offline_fraction=0.25,
    batch_size=4,
    pin_memory=False,
    seed=3,
)
calls(
    mixed,
    "OfflineToOnlineReplayBuffer",
    anneal={"step": 1, "total_steps": 10},
    rows={"batch_size": 4},
    sample={"batch_size": 4, "nest": True},
    split={"batch_size": 4},
)


def student(path=None, **given):
    buf = ringmap.DistillationBuffer(**{"capacity": 50, "seed": 0, **given})
    buf.start_round()
    for t in range(6):
        buf.add(np.zeros((2, 3), "f4"), np.zeros((2, 1), "f4"), dones=np.full(2, t == 5))
    return buf


new(
    "DistillationBuffer",
    lambda **n: student(**fitting("DistillationBuffer", n)),
    capacity=50,
    keep_rounds=2,
    beta=0.5,
    pin_memory=False,
    seed=3,
    sync_every_s=5.0,
)
calls(
    student,
    "DistillationBuffer",
    add={
        "_student_observations": np.zeros((2, 3), "f4"),
        "_teacher_actions": np.zeros((2, 1), "f4"),
        "policy_version": 4,
    },
    batch={"batch_size": 2},
    epochs={"batch_size": 2, "num_epochs": 1, "shuffle": True, "drop_last": True},
    sample={"batch_size": 2},
    sequences={"length": 2, "batch_size": 1, "num_epochs": 1, "shuffle": True, "drop_last": True},
    start_round={"policy_version": 4},
)
new("LinearBeta", data.LinearBeta, rounds=3, start=0.75, end=0.25)
new("ExponentialBeta", data.ExponentialBeta, decay=0.5)
calls(lambda path: data.LinearBeta(3), "LinearBeta", __call__={"round": 1})
calls(lambda path: data.ExponentialBeta(0.5), "ExponentialBeta", __call__={"round": 1})


def rollout(path=None, full=True, **given):
    buf = ringmap.RolloutBuffer(
        **{"num_envs": 2, "num_steps": 4, "obs_shape": (3,), "action_shape": (1,), "seed": 0, **given}
    )
    for _ in range(4 if full else 0):
        buf.add(np.zeros((2, 3), "f4"), None, np.zeros((2, 1), "f4"), *[np.zeros(2, "f4")] * 4)
    return buf


def returned(path=None):
    buf = rollout()
    buf.compute_returns_and_advantages(np.zeros(2, "f4"))
    return buf


new("RolloutBuffer", lambda **n: rollout(full=False, **n), num_envs=2, num_steps=4, num_privileged_obs=1, seed=3)
calls(
    rollout,
    "RolloutBuffer",
    compute_returns_and_advantages={"_last_values": np.zeros(2, "f4"), "gamma": 0.5, "gae_lambda": 0.5},
)
calls(
    returned,
    "RolloutBuffer",
    get_minibatch={"size": 2},
    minibatches={"num": 2, "epochs": 1, "shuffle": True, "normalize_advantages": True},
    sequence_minibatches={"length": 2, "num": 1, "epochs": 1, "shuffle": True, "normalize_advantages": True},
)


# samplers and computed columns


def fitting(name, given):
    """Return what a sampler needs beside a number."""
    if name == "RecencySampler" and not {"half_life", "window"} & given.keys():
        return {"half_life": 8.0, **given}
    if name == "MixtureSampler":
        share = given.get("samplers", 1.0)
        return {**given, "samplers": [(samplers.UniformSampler(), share)]}
    if name == "DistillationBuffer" and "keep_rounds" in given:
        return {"retention": "last", **given}
    return given


def drawn(sampler):
    ring(sampler=sampler).sample(4)


for name, samples in {
    "PrioritizedSampler": {"alpha": 0.5, "beta": 0.5, "eps": 0.25, "resort_every": 8, "rng": 3},
    "RecencySampler": {"half_life": 8.0, "window": 8, "rng": 3},
    "UniformSampler": {"rng": 3},
    "EpisodeSampler": {"rng": 3},
    "EpochSampler": {"seed": 3},
    "MixtureSampler": {"samplers": 0.5, "rng": 3},
}.items():
    new(name, lambda name=name, **n: drawn(getattr(samplers, name)(**fitting(name, n))), **samples)
    calls(
        lambda path, name=name: getattr(samplers, name)(
            *(
                [[(samplers.UniformSampler(), 1)]]
                if name == "MixtureSampler"
                else [8.0]
                if name == "RecencySampler"
                else []
            )
        ),
        name,
        __call__={"step": 2, "_buffer": ring(), "batch_size": 3, "history_len": 1},
    )
calls(
    lambda path: samplers.MixtureSampler([(samplers.UniformSampler(), 1)]),
    "MixtureSampler",
    follow={"_buffer": ring(), "history_len": 1},
)
calls(
    lambda path: samplers.PrioritizedSampler(),
    "PrioritizedSampler",
    follow={"_buffer": ring(), "history_len": 1},
    mass_of={"_window": ring().clip_window(1), "highest": 0.5},
    weigher={"_ids": np.arange(2), "_odds": np.ones(2), "step": 3},
)
new(
    "Linear",
    lambda **n: samplers.Linear(**{"start": 0.0, "stop": 1.0, "steps": 8, **n})(3),
    start=0.5,
    stop=0.5,
    steps=8,
)
calls(lambda path: samplers.Linear(0.0, 1.0, 8), "Linear", __call__={"step": 3})


def windowed(**window):
    ring().sample(4, window=window)


new("NStep", lambda **n: windowed(n=data.NStep(**{"n": 2, **n})), n=2, gamma=0.5)
new("ReturnToGo", lambda **n: windowed(g=data.ReturnToGo(**n)), gamma=0.5)
new(
    "Hindsight",
    lambda **n: windowed(
        h=data.Hindsight(goal="proprio", achieved="proprio", reward_fn=lambda a, g: np.zeros(len(a), "f4"), **n)
    ),
    k=2.0,
)
new("Window", lambda **n: windowed(obs=data.Window([0, 1], **n)), blanks=True)
new(
    "Sequences",
    lambda **n: ring().sample(4, window=data.Sequences(**{"length": 4, **n})),
    length=4,
    burn_in=1,
    across=False,
)
calls(lambda path: data.Sequences(4), "Sequences", window={"_schema": ring().schema, "_where": "here", "frameskip": 1})
calls(
    lambda path: data.Window(seconds=[0.0, 0.5]),
    "Window",
    steps={"_where": "here", "_name": "obs", "frameskip": 1, "fps": 10.0},
)


# datasets


def dataset(path=None):
    return data.ConcatDataset([ring(), ring()])


calls(
    dataset,
    "ConcatDataset",
    batches={"batch_size": 2, "steps": 1},
    each_episode={"with_data": True, "is_live": False},
    episode_data={"episode_idx": 1},
    get_episode_data={"idx": 1},
    get_row_data={"row_idx": 3},
    load_episode={"episode_idx": 1, "nest": True},
    load_chunk={"episodes_idx": [0, 1], "_start": [0, 1], "_end": [3, 4]},
    load_steps={"episode_idx": 1, "start": 2, "end": 5},
    sample={"batch_size": 2, "nest": True},
    split={"train": 0.5, "seed": 3},
    take={"episodes": [0, 1]},
    view={"drop_all_padded": False},
)


def goals(path=None, **given):
    made = data.GoalDataset(ring(), **{"seed": 0, **given})
    assert "goal_pixels" in made[0]
    return made


new("GoalDataset", goals, goal_probabilities=[0.25] * 4, gamma=0.5, current_goal_offset=1, seed=3)
calls(
    goals,
    "GoalDataset",
    get_episode_data={"idx": 1},
    get_row_data={"row_idx": 3},
    load_episode={"episode_idx": 1, "nest": True},
    steps_as_stored={"episode": 1, "start": 2, "end": 5},
    take={"episodes": [0]},
    view={"drop_all_padded": False},
)
calls(
    lambda path: data.MergeDataset([ring(), ring()]),
    "MergeDataset",
    get_episode_data={"idx": 1},
    get_row_data={"row_idx": 3},
    take={"episodes": [0]},
    load_episode={"episode_idx": 1, "nest": True},
)


def fleet(path):
    ring(path=path / "fleet" / "a").close()
    ring(path=path / "fleet" / "b").close()
    return path / "fleet"


calls(
    lambda path: data.ShardedReplayBuffer(fleet(path)),
    "ShardedReplayBuffer",
    episodes={"nest": True},
    get_episode_data={"idx": 1},
    load_episode={"episode_idx": 1, "nest": True},
    split={"train": 0.5, "seed": 3, "drop_all_padded": False},
    take={"episodes": [0]},
    view={"drop_all_padded": False, "live": True},
)
new(
    "ShardedReplayBuffer",
    lambda path, **n: data.ShardedReplayBuffer(fleet_of(path, "n_step" in n or "gamma" in n), **n).sample(2),
    _path=1,
    history_len=2,
    frameskip=2,
    wait_s=0.5,
    seed=3,
    threads=2,
    n_step=2,
    gamma=0.5,
)


def fleet_of(path, is_of_transitions):
    if not is_of_transitions:
        return fleet(path)
    transitions(path=path / "fleet" / "t").close()
    return path / "fleet"


def saved(path):
    ring().dump(path / "set.h5", progress=False)
    return path / "set.h5"


calls(
    lambda path: lambda **n: data.load_dataset(saved(path), **n)[0],
    "load_dataset",
    call={"drop_all_padded": False, "fps": 12.5},
)
calls(lambda path: lambda **n: data.convert(ring(), path / "c.h5", **n), "convert", call={"progress": False})
calls(lambda path: lambda **n: data.merge([ring()], path / "m.h5", **n), "merge", call={"progress": False})
calls(lambda path: lambda **n: ringmap.repair(fleet(path) / "a", **n), "repair", call={"dry_run": True})


calls(lambda path: data.ShardedReplayBuffer(fleet(path)), "ShardedReplayBuffer", get_row_data={"row_idx": 3})
calls(
    lambda path: lambda **n: samplers.EpisodeSampler().follow(ring(), **n),
    "EpisodeSampler.follow",
    call={"history_len": 1},
)
calls(lambda path: policy.ExpertPolicy(), "ExpertPolicy", set_seed={"seed": 3})
calls(
    lambda path: (
        lambda **n: data.from_arrays(
            {
                "observations": EPISODE["obs"],
                "actions": EPISODE["action"],
                "rewards": EPISODE["reward"],
                "terminals": EPISODE["terminated"],
            },
            **n,
        )
    ),
    "from_arrays",
    call={"max_episode_steps": 5},
)


# worlds


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
        return np.zeros(2, np.float32), {"goal": np.zeros((8, 8, 3), np.uint8)}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 3, False, {"goal": np.zeros((8, 8, 3), np.uint8)}

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)

    def reset_options_from_dataset(self, init, goal):
        return {}

    def expert_action(self):
        return np.zeros(1, np.float32)


def rooms(path=None, given_policy=None, **given):
    if "RingmapTest/Still-v0" not in gymnasium.registry:
        gymnasium.register("RingmapTest/Still-v0", Still)
    made = ringmap.World("RingmapTest/Still-v0", **{"num_envs": 2, "image_shape": (8, 8), **given})
    made.set_policy(given_policy or policy.RandomPolicy(0))
    return made


def some_rooms(**given):
    made = rooms(**given)
    made.collect(writer=ringmap.ReplayBuffer(100), episodes=2, progress=False)
    made.close()


new(
    "World",
    some_rooms,
    num_envs=2,
    image_shape=(8, 8),
    max_episode_steps=5,
    goal_conditioned=True,
    image_resample=2,
    add_pixels=True,
    workers=1,
)
calls(
    rooms,
    "World",
    reset={"seed": 3},
    collect={
        "_writer": ringmap.ReplayBuffer(500, spare_rows=100),
        "episodes": 2,
        "seed": 3,
        "progress": False,
        "resume": False,
        "commit_every": 2,
    },
    evaluate={"episodes": 2, "seed": 3, "progress": False},
)
CALLS["World.evaluate from a dataset"] = (
    lambda path, given: evaluated(**given),
    {"episodes_idx": [0, 1], "start_steps": [1, 1], "goal_offset": 1, "eval_budget": 2},
)


def evaluated(**given):
    stored = ringmap.ReplayBuffer(100)
    made = rooms()
    made.collect(writer=stored, episodes=2, progress=False)
    options = {"episodes_idx": [0, 1], "start_steps": [1, 1], "goal_offset": 1, "eval_budget": 2}
    made.evaluate(dataset=stored, progress=False, **{**options, **given})


for name, cls, samples in (
    ("RandomPolicy", policy.RandomPolicy, {"seed": 3}),
    ("ExpertPolicy", policy.ExpertPolicy, {"noise": 0.25, "seed": 3}),
    (
        "FeedForwardPolicy",
        lambda **n: policy.FeedForwardPolicy(lambda x: x, keys="observation", **n),
        {"history": False},
    ),
):
    new(
        name,
        lambda cls=cls, name=name, **n: (
            rooms(given_policy=cls(**n)).collect(writer=ringmap.ReplayBuffer(99), episodes=1, progress=False)
            if name != "FeedForwardPolicy"
            else cls(**n)
        ),
        **samples,
    )
calls(lambda path: policy.RandomPolicy(), "RandomPolicy", set_seed={"seed": 3})
new(
    "MegaWrapper",
    lambda **n: world.MegaWrapper(Still(), **{"image_shape": (8, 8), **n}).reset(),
    image_shape=(8, 8),
    image_resample=2,
    separate_goal=True,
    add_pixels=True,
)
new("EnvPool", lambda **n: world.EnvPool([Still] * 2, **n).close(), workers=1, copy=True)
calls(lambda path: world.EnvPool([Still] * 2), "EnvPool", reset={"seed": 3})


def recorded(**given):
    env = ringmap.ReplayBufferCollectionWrapper(
        Still(), ringmap.ReplayBuffer(100, spare_rows=50), dump_path="unused", **given
    )
    return env


new(
    "ReplayBufferCollectionWrapper",
    recorded,
    validate_transition=True,
    dump_on_episode_end=False,
    dump_on_reset_boundary=False,
    stream=False,
    commit_every=2,
)
calls(
    lambda path: recorded(),
    "ReplayBufferCollectionWrapper",
    buffer_swap={
        "_replay_buffers": ringmap.ReplayBuffer(100),
        "require_same_space": True,
        "allow_mid_episode": True,
        "finalize_old_segments": False,
        "dump_old": False,
    },
)


# fleets


def paced(path=None, **given):
    return Pace(path, **{"samples_per_insert": 4.0, "min_steps": 1, "slack": 9.0, **given})


new(
    "Pace",
    lambda path, **n: paced(path, **n),
    _path=1,
    samples_per_insert=4.0,
    min_steps=1,
    slack=9.0,
    max_ahead=50,
    timeout_s=5.0,
    rank=0,
)
calls(
    lambda path: paced(fleet(path)),
    "Pace",
    draw={"num_steps": 2},
    over={"_batches": [1], "num_steps": 2},
)
calls(
    lambda path: lambda **n: paced(path).insert(**n).__enter__(),
    "Pace.insert",
    call={"num_steps": 2},
)


def published(path, **given):
    torch = pytest.importorskip("torch")
    Weights(path / "weights").publish(torch.nn.Linear(1, 1), **given)


calls(lambda path: lambda **n: published(path, **n), "Weights.publish", call={"step": 3})
SLOW = {
    "collect": {
        "episodes": 1,
        "collectors": 1,
        "seed": 0,
        "resume": True,
        "max_steps": 500,
        "commit_every": 2,
        "threads": 1,
        "progress": False,
        "wait_s": 5.0,
    },
}
"""It starts a process: `test_collect` calls it once, with all of them."""


# -- the tests -----------------------------------------------------------------------------------


def scalars(value):
    """Return a sample as NumPy's scalars of its kind."""
    if isinstance(value, bool):
        return [np.bool_(value)]
    if isinstance(value, int):
        return [np.uint16(value)]  # whose sums are cut at 2**16
    if isinstance(value, float):
        return [np.float32(value)]
    if isinstance(value, tuple):
        return [np.array(value)]
    if isinstance(value, list):
        return [np.array(value)]
    return [{name: np.float32(one) for name, one in value.items()}]


EVERY = [(full, number) for full, numbers in FOUND.items() for number in numbers]


def test_every_number_has_a_sample():
    known = {full.partition(" ")[0]: set() for full in CALLS} | {n: set() for n in SLOW}
    for full, (_, samples) in CALLS.items():
        known[full.partition(" ")[0]] |= samples.keys()
    for full, samples in SLOW.items():
        known[full] |= samples.keys()
    missing = [f"{full}({number}=)" for full, number in EVERY if number not in known.get(full, ())]
    assert not missing


@pytest.mark.parametrize("full", CALLS)
def test_numpy_scalars_are_taken(tmp_path, full):
    """Each number alone: another one may leave it no effect."""
    run, samples = CALLS[full]
    for number in samples:
        for given in scalars(samples[number]):
            place = tmp_path / f"{number}-{type(given).__name__}"
            place.mkdir()
            try:
                run(place, {**companions(full, number), number: given})
            except Exception as error:
                error.add_note(f"{full}({number}={given!r})")
                raise


def companions(full, number):
    """Return samples of the parameters that a call must have beside one."""
    function, (name, *path) = None, full.partition(" ")[0].split(".")
    for home in HOMES:
        function = function or getattr(importlib.import_module(home), name, None)
    for part in path:
        function = getattr(function, part)
    known = inspect.signature(function).parameters
    return {
        name: sample
        for name, sample in CALLS[full][1].items()
        if name != number and (name in ("episodes", "train") or known[name].default is inspect.Parameter.empty)
    }


def one_room(number):
    return rooms(num_envs=1)


@pytest.mark.slow
def test_collect(tmp_path):
    numbers = {name: scalars(sample)[0] for name, sample in SLOW["collect"].items()}
    ringmap.collect(one_room, tmp_path / "rings", **numbers)
    assert ringmap.ReplayBuffer.open(tmp_path / "rings" / "collector-0").num_episodes == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda: rooms().collect(writer=ringmap.ReplayBuffer(99), episodes=1, seed=1.5),
            "seed must be an integer",
        ),
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
