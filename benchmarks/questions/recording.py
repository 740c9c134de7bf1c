"""What recording costs beside the environments' own step, and beside other ways to record."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import thread_time
from typing import Any

import gymnasium
import numpy as np

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.recording import ReplayBufferCollectionWrapper

Array = np.ndarray[Any, np.dtype[Any]]
Policy = Callable[[Array], Array]

NUM_ENVS = 32
STEPS = 50


def run(place: Place) -> list[Table]:
    """Time 32 environments in one process, then a single one beside rivals."""
    return [*(_vector(place, name) for name in _POLICIES), _single(place)]


def balancing(obs: Array) -> Array:
    """Keep the pole up for 200 steps and more, without a thought."""
    return (obs[..., 2] + 0.5 * obs[..., 3] > 0).astype(np.int64)


def chance() -> Policy:
    rng = np.random.default_rng(0)
    return lambda obs: rng.integers(0, 2, obs.shape[:-1])


_POLICIES: dict[str, Callable[[], Policy]] = {
    "a policy that balances": lambda: balancing,
    "a random policy": chance,
}


class Loop:
    """A call that makes `STEPS` steps, and goes on where the last one stopped."""

    def __init__(self, env: Any, policy: Policy, reset: bool = False) -> None:
        self._env, self._policy, self._reset = env, policy, reset
        self._obs, _ = env.reset(seed=0)
        self.rewards = 0.0
        self.ended = 0

    def __call__(self) -> None:
        for _ in range(STEPS):
            self._obs, reward, terminated, truncated, _ = self._env.step(self._policy(self._obs))
            self.rewards += float(np.sum(reward))
            over = np.logical_or(terminated, truncated)
            self.ended += int(np.sum(over))
            if self._reset and over:
                self._obs, _ = self._env.reset()


def _envs() -> Any:
    return gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="sync")


def _vector(place: Place, name: str) -> Table:
    table = Table(f"{STEPS} steps of CartPole x {NUM_ENVS} (SyncVectorEnv), {name}, processor time")
    make = _POLICIES[name]
    size = 1_000_000
    with place.folder() as folder:
        buffers: dict[str, Any] = {
            "recorded, in RAM": ReplayBuffer(size),
            "recorded, in a directory": ReplayBuffer(size, path=folder / "episodes"),
            "as transitions, in RAM": TransitionReplayBuffer(size, (4,), device=None),
        }
        bare = "the bare environments"
        loops = {bare: Loop(_envs(), make())}
        loops |= {n: Loop(ReplayBufferCollectionWrapper(_envs(), b), make()) for n, b in buffers.items()}
        # Of the thread: it does all of it, and other programs change the clock's share of a loop by half.
        table.add_all(in_turn(loops, place.size(60, 2), clock=thread_time))
        totals = {(loop.rewards, loop.ended) for loop in loops.values()}
        assert len(totals) == 1, "all parties saw the same"
        _, ended = totals.pop()
        assert buffers["recorded, in RAM"].num_episodes == ended
        assert buffers["recorded, in a directory"].num_episodes == ended
        steps = (place.size(60, 2) + 1) * STEPS
        table.fact("steps of an episode, on average", round(steps * NUM_ENVS / max(ended, 1)))
        table.fact("commits for each step of all environments", round(ended / steps, 2))
        for buffer in buffers.values():
            buffer.close()
    bars = (0.25, 0.5) if name == "a policy that balances" else (0.25, 0.35)
    for party, bar in zip(("recorded, in RAM", "recorded, in a directory"), bars, strict=True):
        more = table.times[party]["median"] / table.times[bare]["median"] - 1
        table.bar(f"{party}: cost, as a share of the environments' own time", more, at_most=bar)
    more = table.times["as transitions, in RAM"]["median"] / table.times[bare]["median"] - 1
    table.bar("as transitions, in RAM: cost, likewise", more)
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
        self.rows.append(
            {"obs": self._obs, "action": action, "reward": row[1], "next_obs": after, "done": row[2] or row[3]}
        )
        self._obs = after
        return row


def _single(place: Place) -> Table:
    table = Table(f"{STEPS} steps of one CartPole, a policy that balances")
    with place.folder() as folder:
        parties = _parties(folder, table)
        loops = {name: Loop(env, balancing, reset=True) for name, env in parties.items()}
        table.add_all(in_turn(loops, place.size(100, 2)))
        assert len({loop.rewards for loop in loops.values()}) == 1, "all parties saw the same"
        for env in parties.values():
            env.close()
    names = list(parties)
    for other in names[3:]:
        table.faster(names[1], other)
    table.notes.append("the list grows for ever, and is lost with its process")
    return table


def _parties(folder: Path, table: Table) -> dict[str, Any]:
    def make() -> Any:
        return gymnasium.make("CartPole-v1")

    record = ReplayBufferCollectionWrapper
    parties = {
        "the bare environment": make(),
        "recorded, in RAM": record(make(), ReplayBuffer(1_000_000)),
        "recorded, in a directory": record(make(), ReplayBuffer(1_000_000, path=folder / "one")),
        "a list of dicts, by hand": Listing(make()),
    }
    if not all(map(importlib.util.find_spec, ("minari", "jax"))):
        table.notes.append("Minari's collector is not installed: pip install -c constraints.txt 'minari[create]'")
        return parties
    import os

    os.environ["MINARI_DATASETS_PATH"] = str(folder / "minari")
    from minari import DataCollector

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parties[f"Minari {version('minari')}'s DataCollector"] = DataCollector(make())
    return parties
