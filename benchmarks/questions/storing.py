"""What does a step cost to store? Episodes, values that are written back, recording, and collecting with a World."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from time import process_time, thread_time
from typing import Any

import gymnasium
import numpy as np
import xxhash

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import seconds
from ringmap import Column, ReplayBuffer, TransitionReplayBuffer, World
from ringmap.recording import ReplayBufferCollectionWrapper

Array = np.ndarray[Any, np.dtype[Any]]
Calls = dict[str, Callable[[], object]]

ROW = (64, 64, 3)


# -- episodes ------------------------------------------------------------------------------------


def write(place: Place) -> Iterator[Table]:
    """Write episodes of 12 KiB rows: into a new buffer, and round a full one."""
    yield _first_fill(place)
    yield _steady(place)


class Ours:
    """`write_episode`, one pixel column."""

    def __init__(self, path: Path, rows: int, sources: Iterator[Array]) -> None:
        self.buffer, self._sources = ReplayBuffer(max_steps=rows, path=path), sources

    def __call__(self) -> None:
        self.buffer.write_episode({"pixels": next(self._sources)})


class Store:
    """The same rows copied into an array round and round: what `write_episode` can't beat.

    Args:
        rows: the array; a fresh np.memmap is sparse, one in RAM is touched beforehand.
        checksum: also hash each episode, as ours does.
    """

    def __init__(self, rows: Array, sources: Iterator[Array], checksum: bool) -> None:
        self.rows, self._sources, self._checksum, self._slot = rows, sources, checksum, 0

    def __call__(self) -> None:
        episode = next(self._sources)
        if self._slot + len(episode) > len(self.rows):
            self._slot = 0
        np.copyto(self.rows[self._slot : self._slot + len(episode)], episode)
        if self._checksum:
            xxhash.xxh3_64_intdigest(episode.reshape(-1).data)
        self._slot += len(episode)


def _sources(steps: int, place: Place) -> tuple[Iterator[Array], Iterator[Array]]:
    """Return episodes for each of the two: the same ones, at other times.

    More than the last cache holds, and half of them apart: one would else warm up the source
    that the other reads next.
    """
    made = np.random.default_rng(0).integers(0, 256, (place.size(32, 2), steps, *ROW), np.uint8)
    return cycle(made), islice(cycle(made), len(made) // 2, None)


def _assert_equal(ours: Ours, theirs: Store, rows: int, apart: int) -> None:
    """Make sure that the same episodes are stored, `apart` rows from each other."""
    assert ours.buffer.num_steps_stored == rows
    for i in (0, rows // 2, rows - apart - 1):
        assert np.array_equal(ours.buffer.get_row_data(i + apart)["pixels"], theirs.rows[i])


def _first_fill(place: Place) -> Table:
    # Little enough for the page cache: beyond it both wait for the disk, and the ratio is 1.
    steps, episodes = place.size(200, 4), place.size(100, 8)
    rows, names = steps * episodes, ("write_episode", "store into a sparse np.memmap")
    table = Table(
        f"first fill, on disk: episodes of {steps} steps of 12 KiB into a new file of {episodes} of them, whole files "
        "in turn"
    )
    whole: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(place.size(15, 1)):
        with place.folder() as folder:
            one, other = _sources(steps, place)
            ours = Ours(folder / "buffer", rows, one)
            memmap = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.uint8, (rows, *ROW))
            theirs = Store(memmap, other, checksum=False)
            for name, call in zip(names, (ours, theirs), strict=True):
                os.sync()  # what waits for the disk would slow down whoever comes next
                whole[name].append([seconds(call) for _ in range(episodes)])
            _assert_equal(ours, theirs, rows, steps * place.size(16, 1))
            ours.buffer.close()
            del memmap, theirs
    table.add_all({name: np.concatenate(taken) for name, taken in whole.items()})
    table.add_all({f"whole file, {name}": np.sum(taken, axis=1) for name, taken in whole.items()})
    ours_s, theirs_s = (table.median(f"whole file, {name}") for name in names)
    for name, taken in zip(names, (ours_s, theirs_s), strict=True):
        table.fact(f"GB/s, {name}", f"{rows * int(np.prod(ROW)) / taken / 1e9:.2f}")
    table.bar("sparse store / write_episode, whole file, median", theirs_s / ours_s, at_least=1.2)
    return table


def _steady(place: Place) -> Table:
    steps, episodes = place.size(200, 4), place.size(200, 8)
    rows, (one, other) = steps * episodes, _sources(steps, place)
    table = Table(f"steady state, on disk: episodes of {steps} steps of 12 KiB round a full ring of {episodes}")
    ours = Ours(place.new_folder() / "buffer", rows, one)
    place.closing(ours.buffer)
    theirs = Store(np.zeros((rows, *ROW), np.uint8), other, checksum=True)
    for _ in range(2 * episodes):
        ours()
        theirs()
    _assert_equal(ours, theirs, rows, steps * place.size(16, 1))
    names = "write_episode", "memcpy into RAM and xxh3"
    table.time(dict(zip(names, (ours, theirs), strict=True)), place.size(2_000, 8))
    table.ratio(*names, at_most=1.4)
    table.notes.append("write_episode also checks, commits and leaves the rows for the disk to take")
    return table


# -- values that are written back ----------------------------------------------------------------

BATCH, DIM = 256, 512


def updates(place: Place) -> Iterator[Table]:
    """Time updates of stored rows in random places, and of rows side by side, beside bare positioned writes; then
    reads."""
    folder, rows = place.new_folder(), place.size(20_000, 2_000)
    schema = {
        "obs": ((8,), "<f4"),
        "plain": ((DIM,), "<f4"),
        "latent": Column((DIM,), "<f4", mutable=True),
    }
    buf = place.closing(ReplayBuffer(rows, schema=schema, path=folder / "ours", sync_every_s=0, seed=0))
    for _ in range(2):
        buf.write_episode({"obs": np.zeros((rows // 2, 8)), "plain": np.zeros((rows // 2, DIM))})
    values = np.random.default_rng(0).normal(size=(BATCH, DIM)).astype(np.float32)
    rng, ids = np.random.default_rng(1), np.arange(BATCH)
    fd = os.open(folder / "bare", os.O_RDWR | os.O_CREAT)
    place.stack.callback(os.close, fd)

    def bare() -> None:
        raw, size, pwrite = values.view(np.uint8).reshape(-1).data, DIM * 4, os.pwrite
        for at, offset in zip(range(0, len(raw), size), (ids * size).tolist(), strict=True):
            pwrite(fd, raw[at : at + size], offset)

    def ours() -> None:
        assert buf.update(ids, {"latent": values}) == BATCH

    def choose(draw: Callable[[], Array]) -> Callable[[], None]:
        return lambda: np.copyto(ids, draw())

    shuffled = rng.permutation(rows)
    for at in range(0, rows - BATCH + 1, BATCH):  # a first update also looks for the row's copies
        ids[:] = shuffled[at : at + BATCH]
        for _ in range(3):
            bare()
            ours()
    table = Table(f"update of {BATCH} rows of {DIM} float32, {rows:,} rows, each updated before")
    random = choose(lambda: rng.permutation(rows)[:BATCH])
    runs = choose(lambda: int(rng.integers(rows - BATCH)) + np.arange(BATCH))
    for name, before, bar in (("in random places", random, 1.5), ("side by side", runs, None)):
        table.time({f"bare, {name}": bare, f"ringmap, {name}": ours}, place.size(400, 5), before=before)
        table.ratio(f"ringmap, {name}", f"bare, {name}", at_most=bar)
    assert (buf.get_row_data(ids)["latent"] == values).all()
    table.notes.append("bare writes may tear a row at a kill, and know nothing of evictions")
    yield table

    table = Table(f"read {BATCH} rows")
    plain, changed = f"sample({BATCH}), a plain column of {DIM} float32", "the same, mutable and updated"
    columns = {plain: ["plain"], changed: ["latent"]}
    table.time({n: lambda c=c: buf.sample(BATCH, columns=c) for n, c in columns.items()}, place.size(400, 5))
    table.ratio(changed, plain)
    yield table


# -- recording -----------------------------------------------------------------------------------

Policy = Callable[[Array], Array]

NUM_ENVS, STEPS = 32, 50
RAM, DIRECTORY, AS_TRANSITIONS = "recorded, in RAM", "recorded, in a directory", "as transitions, in RAM"


def recording(place: Place) -> Iterator[Table]:
    """Time 32 environments in one process, then a single one beside other ways to record."""
    yield from (_vector(place, name, *case) for name, case in _POLICIES.items())
    yield _single(place)


def _balancing(obs: Array) -> Array:
    """Keep the pole up for 200 steps and more, without a thought."""
    return (obs[..., 2] + 0.5 * obs[..., 3] > 0).astype(np.int64)


def _chance() -> Policy:
    rng = np.random.default_rng(0)
    return lambda obs: rng.integers(0, 2, obs.shape[:-1])


_POLICIES: dict[str, tuple[Callable[[], Policy], float]] = {
    "a policy that balances": (lambda: _balancing, 0.5),
    "a random policy": (_chance, 0.35),
}
"""Policies, and the bar for a directory."""


class Loop:
    """A call that makes `STEPS` steps, and goes on where the last one stopped."""

    def __init__(self, env: Any, policy: Policy, reset: bool = False) -> None:
        self._env, self._policy, self._reset = env, policy, reset
        self._obs, _ = env.reset(seed=0)
        self.rewards, self.ended = 0.0, 0

    def __call__(self) -> None:
        for _ in range(STEPS):
            self._obs, reward, terminated, truncated, _ = self._env.step(self._policy(self._obs))
            self.rewards += float(np.sum(reward))
            over = np.logical_or(terminated, truncated)
            self.ended += int(np.sum(over))
            if self._reset and over:
                self._obs, _ = self._env.reset()


def _vector(place: Place, name: str, make: Callable[[], Policy], bar: float) -> Table:
    table = Table(f"{STEPS} steps of CartPole x {NUM_ENVS} (SyncVectorEnv), {name}, processor time")
    buffers: dict[str, Any] = {
        RAM: ReplayBuffer(1_000_000),
        DIRECTORY: ReplayBuffer(1_000_000, path=place.new_folder() / "episodes"),
        AS_TRANSITIONS: TransitionReplayBuffer(1_000_000, (4,), device=None),
    }
    bare, count = "the bare environments", place.size(60, 2)
    envs = [gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="sync") for _ in range(4)]
    recorded = [
        ReplayBufferCollectionWrapper(e, place.closing(b)) for e, b in zip(envs, buffers.values(), strict=False)
    ]
    loops = dict(zip((bare, *buffers), [Loop(one, make()) for one in (envs[3], *recorded)], strict=True))
    # Of the thread: it does all of it, and other programs change the clock's share of a loop by half.
    table.time(loops, count, clock=thread_time)
    [(_, ended)] = {(loop.rewards, loop.ended) for loop in loops.values()}  # all parties saw the same
    assert buffers[RAM].num_episodes == buffers[DIRECTORY].num_episodes == ended
    steps = (count + 1) * STEPS
    table.fact("steps of an episode, on average", round(steps * NUM_ENVS / max(ended, 1)))
    table.fact("commits for each step of all environments", round(ended / steps, 2))
    for party, most in ((RAM, 0.25), (DIRECTORY, bar), (AS_TRANSITIONS, None)):
        what = "cost, as a share of the environments' own time"
        table.bar(f"{party}: {what}", table.median(party) / table.median(bare) - 1, at_most=most)
    return table


class Listing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """What people write by hand: a dict per step, in a list. It is not an episode yet."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.rows: list[dict[str, Any]] = []
        self._obs: Any = None

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        self._obs = obs.copy()
        return obs, info

    def step(self, action: Any) -> Any:
        row = self.env.step(action)
        after = row[0].copy()
        ended = row[2] or row[3]
        self.rows.append({"obs": self._obs, "action": action, "reward": row[1], "next_obs": after, "done": ended})
        self._obs = after
        return row


def _single(place: Place) -> Table:
    table, folder = Table(f"{STEPS} steps of one CartPole, a policy that balances"), place.new_folder()

    def make() -> Any:
        return gymnasium.make("CartPole-v1")

    record = ReplayBufferCollectionWrapper
    parties = {
        "the bare environment": make(),
        RAM: record(make(), ReplayBuffer(1_000_000)),
        DIRECTORY: record(make(), ReplayBuffer(1_000_000, path=folder / "one")),
        "a list of dicts, by hand": Listing(make()),
    }
    if not all(map(importlib.util.find_spec, ("minari", "jax"))):
        table.notes.append("Minari's collector is not installed: pip install -c constraints.txt 'minari[create]'")
    else:
        os.environ["MINARI_DATASETS_PATH"] = str(folder / "minari")
        from minari import DataCollector

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parties[f"Minari {version('minari')}'s DataCollector"] = DataCollector(make())
    loops = {name: Loop(env, _balancing, reset=True) for name, env in parties.items()}
    table.time(loops, place.size(100, 2))
    assert len({loop.rewards for loop in loops.values()}) == 1, "all parties saw the same"
    for env in parties.values():
        env.close()
    for other in list(parties)[3:]:
        table.faster(RAM, other)
    table.notes.append("the list grows for ever, and is lost with its process")
    return table


# -- a World -------------------------------------------------------------------------------------

SHAPE, WORLD_ENVS = (64, 64), 4


def world(place: Place) -> Iterator[Table]:
    """Time what a world costs beside the bare loop, what workers bring, and what a disk costs beside RAM.

    PushT where gym-pusht is installed (the extra pusht), else CartPole; both draw with pygame, at
    what they are drawn at, and are resized to 64x64.
    """
    from ringmap.world.envs import register

    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of pymunk
    register()
    names = [name for name in ("swm/PushT-v1", "CartPole-v1", "ringmap/TwoRoom-v1") if _there(name)]
    yield from (_overhead(place, name) for name in names)
    yield _workers(place, names[0])
    yield _disk(place, names[0])


def _there(name: str) -> bool:
    try:
        gymnasium.make(name, render_mode="rgb_array").close()
    except ImportError:
        return False
    return True


class Fixed:
    """A policy of actions that were drawn beforehand: it costs nothing beside what is timed."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def set_env(self, envs: Any) -> None:
        self.actions, self.at = _actions(envs.single_action_space, self.steps), 0

    def get_action(self, infos: Any) -> Any:
        self.at = (self.at + 1) % self.steps
        return self.actions[self.at]


def _actions(space: Any, steps: int) -> Any:
    space.seed(0)
    return np.array([[space.sample() for _ in range(WORLD_ENVS)] for _ in range(steps)])


class Nowhere:
    """A writer that keeps nothing."""

    def __enter__(self) -> Nowhere:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write_episode(self, ep_data: Any) -> None:
        pass

    write_episodes = write_episode


def _world(place: Place, name: str, **options: Any) -> World:
    steps = place.size(25, 3)
    made = place.closing(World(name, WORLD_ENVS, SHAPE, max_episode_steps=steps, **options))
    made.set_policy(Fixed(steps))
    return made


def _collect(world: World, writer: Any) -> Any:
    world.collect(writer=writer, episodes=WORLD_ENVS, seed=0, progress=False)
    return writer


def _overhead(place: Place, name: str) -> Table:
    """Compare `collect` with a loop over the same environments: step, render, resize."""
    from PIL import Image

    steps, world = place.size(25, 3), _world(place, name)
    options = {"max_episode_steps": steps, "render_mode": "rgb_array", "disable_env_checker": True}
    envs = [gymnasium.make(name, **options) for _ in range(WORLD_ENVS)]
    actions, frames = _actions(envs[0].action_space, steps), 0

    def picture(env: Any) -> Any:
        nonlocal frames
        frames += 1
        return np.asarray(Image.fromarray(env.render()).resize(SHAPE, Image.Resampling.BILINEAR))

    def bare() -> None:
        for number, env in enumerate(envs):
            env.reset(seed=number)
            picture(env)
        ended, at = [False] * WORLD_ENVS, 0
        while not all(ended):
            at = (at + 1) % steps
            for number, env in enumerate(envs):
                if not ended[number]:
                    _, _, terminated, truncated, _ = env.step(actions[at, number])
                    picture(env)
                    ended[number] = terminated or truncated

    def ours() -> None:
        world.policy.at = 0
        _collect(world, Nowhere())

    bare()
    count, world.policy.at = frames, 0
    assert count == _collect(world, ReplayBuffer(10_000)).num_steps_stored, "the two do not play the same"
    table = Table(
        f"{name}: {WORLD_ENVS} environments in this process, {count} frames resized to 64x64, whole runs in turn"
    )
    names = "World.collect", "bare loop"
    taken: dict[str, list[float]] = {f"{key}, processor time": [] for key in names}

    def noted(key: str, call: Callable[[], None]) -> None:
        start = process_time()
        call()
        taken[f"{key}, processor time"].append(process_time() - start)

    table.time({k: lambda k=k, c=c: noted(k, c) for k, c in zip(names, (ours, bare), strict=True)}, place.size(60, 2))
    table.add_all({key: times[1:] for key, times in taken.items()})  # the first one warms up
    table.ratio(*taken, at_most=None if "TwoRoom" in name else 1.15)
    ours_s, bare_s = map(table.median, taken)
    table.fact("us more per frame", f"{1e6 * (ours_s - bare_s) / count:.0f}")
    table.notes.append("processor time is judged: it does not count what else the machine does")
    if "TwoRoom" in name:
        table.notes.append("TwoRoom takes next to no time itself: no bar is set for it")
    return table


def _workers(place: Place, name: str) -> Table:
    """Compare stepping in two processes with stepping in this one."""
    table = Table(f"{name}: {WORLD_ENVS} environments with pixels, in this process and in two workers")
    worlds = {"workers=0": _world(place, name), "workers=2": _world(place, name, workers=2)}
    found = [_collect(world, ReplayBuffer(10_000)).get_col_data("pixels") for world in worlds.values()]
    assert np.array_equal(*found), "workers give other pixels"
    table.time({k: lambda w=w: _collect(w, Nowhere()) for k, w in worlds.items()}, place.size(60, 2))
    table.faster("workers=2", "workers=0", at_least=1.5)
    return table


def _disk(place: Place, name: str) -> Table:
    """Compare collecting into a directory with collecting into RAM."""
    table = Table(f"{name}: {WORLD_ENVS} episodes into a buffer on disk, and into one in RAM")
    world = _world(place, name)
    buffers = {"disk": ReplayBuffer(2_000, path=place.new_folder() / "buffer"), "RAM": ReplayBuffer(2_000)}
    calls: Calls = {key: lambda b=b: _collect(world, b) for key, b in buffers.items()}
    table.time(calls, place.size(60, 2))
    table.ratio("disk", "RAM", at_most=1.05)
    buffers["disk"].close()
    return table
