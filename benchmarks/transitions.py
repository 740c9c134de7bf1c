"""Transitions: priorities at a million leaves, and adding and drawing beside other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.place import Place
from benchmarks.table import Table
from benchmarks.timing import in_turn
from ringmap import TransitionReplayBuffer
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.inspect.describe import nbytes_of

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, DIM = 256, 8
_EXTRA = "pip install -c constraints.txt -e '.[bench]'"


@dataclass
class Steps:
    """Steps that carry their number: observation i is full of i, and leads to one full of i + lanes."""

    lanes: int
    at: int = 0

    def __call__(self) -> dict[str, Array]:
        numbers = np.arange(self.at, self.at + self.lanes)
        self.at += self.lanes
        obs = np.repeat(numbers.astype(np.float32)[:, None], DIM, 1)
        flags = np.zeros(self.lanes, np.bool_)
        return {
            "obs": obs,
            "action": numbers % 4,
            "reward": obs[:, 0],
            "next": obs + np.float32(self.lanes),
            "done": flags,
        }


@dataclass
class Party:
    """One library's buffer: `sample` returns `(obs, next_obs)`."""

    add: Callable[[dict[str, Array]], object]
    sample: Callable[[], tuple[Any, Any]]
    update: Callable[[Array], object] | None = None


def run(place: Place) -> list[Table]:
    """Time steps stored alone, priorities, then adding and drawing with few and many lanes."""
    return [_alone(place), _priorities(place), *(_plain(place, lanes) for lanes in (1, 64))]


# -- the parties ---------------------------------------------------------------------------------


def ours(size: int, lanes: int, path: Path | None, prioritized: bool = False) -> Party:
    sampler = PrioritizedSampler(rng=0) if prioritized else None
    buf = TransitionReplayBuffer(size, (DIM,), device=None, path=path, sampler=sampler, seed=0)
    last: dict[str, Any] = {}

    def sample() -> tuple[Any, Any]:
        batch = buf.sample(BATCH)
        last.update(batch)
        return batch["observations"], batch["next_observations"]

    return Party(
        lambda s: buf.add(s["obs"], s["action"], s["reward"], s["next"], s["done"]), sample,
        lambda values: buf.update_priorities(last["ids"], values),
    )  # fmt: skip


def cpprb(size: int, lanes: int, prioritized: bool = False) -> Party:
    from cpprb import PrioritizedReplayBuffer, ReplayBuffer

    columns = {
        "obs": {"shape": DIM},
        "action": {"dtype": np.int64},
        "reward": {},
        "done": {"dtype": np.bool_},
        "next_obs": {"shape": DIM},
    }
    buf = (PrioritizedReplayBuffer if prioritized else ReplayBuffer)(size, columns)
    last: dict[str, Any] = {}

    def sample() -> tuple[Any, Any]:
        batch = buf.sample(BATCH, 0.4) if prioritized else buf.sample(BATCH)
        last.update(batch)
        return batch["obs"], batch["next_obs"]

    return Party(
        lambda s: buf.add(obs=s["obs"], action=s["action"], reward=s["reward"], next_obs=s["next"], done=s["done"]),
        sample, lambda values: buf.update_priorities(last["indexes"], values),
    )  # fmt: skip


def stable_baselines3(size: int, lanes: int) -> Party:
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import ReplayBuffer

    buf = ReplayBuffer(
        size,
        Box(-np.inf, np.inf, (DIM,)),
        Discrete(4),
        device="cpu",
        n_envs=lanes,
        handle_timeout_termination=False,
    )

    def sample() -> tuple[Any, Any]:
        batch = buf.sample(BATCH)
        return batch.observations.numpy(), batch.next_observations.numpy()

    return Party(
        lambda s: buf.add(s["obs"], s["next"], s["action"], s["reward"], s["done"], [{}] * lanes),
        sample,
    )


def torchrl(size: int, lanes: int, prioritized: bool = False) -> Party:
    import torch
    from tensordict import TensorDict
    from torchrl.data import (
        LazyTensorStorage,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )

    if prioritized:
        buf: Any = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(size), batch_size=BATCH
        )
    else:
        buf = TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=BATCH)
    last: list[Any] = [None]

    def add(s: dict[str, Array]) -> None:
        tensors = {name: torch.from_numpy(values) for name, values in s.items()}
        buf.extend(TensorDict(tensors, batch_size=[len(s["reward"])]))

    def sample() -> tuple[Any, Any]:
        last[0] = batch = buf.sample()
        return batch["obs"].numpy(), batch["next"].numpy()

    def update(values: Array) -> None:
        batch = last[0]
        batch["td_error"] = torch.from_numpy(values.astype(np.float32))
        buf.update_tensordict_priority(batch)

    return Party(add, sample, update)


def _rivals(size: int, lanes: int, prioritized: bool, table: Table) -> dict[str, Party]:
    makers: dict[str, tuple[str, Callable[[], Party]]] = {
        "cpprb": ("cpprb", lambda: cpprb(size, lanes, prioritized)),
        "TorchRL": ("torchrl", lambda: torchrl(size, lanes, prioritized)),
    }
    if not prioritized:
        makers["Stable-Baselines3"] = ("stable_baselines3", lambda: stable_baselines3(size, lanes))
    found = {}
    for name, (package, make) in makers.items():
        if find_spec(package) is None:
            table.notes.append(f"{name} is not installed: {_EXTRA}")
            continue
        try:
            found[f"{name} {version(package)}"] = make()
        except RuntimeError as error:  # its compiled part is for another PyTorch
            table.notes.append(
                f"{name} {version(package)} is left out: {str(error).splitlines()[0]}"
            )
    return found


def _assert_right(parties: dict[str, Party], lanes: int) -> None:
    for name, party in parties.items():
        obs, after = party.sample()
        assert obs.shape == after.shape == (BATCH, DIM), name
        assert (np.asarray(after) == np.asarray(obs) + lanes).all(), name


# -- the tables ----------------------------------------------------------------------------------


def _priorities(place: Place) -> Table:
    size, lanes = place.size(1_000_000, 4_096), 4_096
    table = Table(
        f"prioritized: {BATCH} of {size:,} transitions of {DIM} floats, all with priorities of their own"
    )
    rng = np.random.default_rng(0)
    with place.folder() as folder:
        parties = {
            "ringmap, in RAM": ours(size, lanes, None, True),
            "ringmap, in a directory": ours(size, lanes, folder / "buf", True),
            **_rivals(size, lanes, True, table),
        }  # fmt: skip
        for party in parties.values():
            steps = Steps(lanes)
            while steps.at < size:
                party.add(steps())
            for _ in range(place.size(200, 2)):
                party.sample()
                assert party.update is not None
                party.update(rng.random(BATCH))
        _assert_right(parties, lanes)

        def turn(party: Party) -> Callable[[], None]:
            def call() -> None:
                party.sample()
                assert party.update is not None
                party.update(rng.random(BATCH))

            return call

        calls = {
            f"{name}: sample, rows and all, and update": turn(party)
            for name, party in parties.items()
        }
        bare = "ringmap, in a directory: draw and update alone"
        calls[bare] = _bare(folder / "bare", size, rng)
        table.add_all(in_turn(calls, place.size(60, 2), burst=place.size(20, 2)))
    table.bar(f"{bare}, median us", table.times[bare]["median"] * 1e6, at_most=300)
    names = [name for name in table.times if name != bare]
    for name in names[2:]:
        table.faster(names[0], name)
    table.notes.append(
        "cpprb and TorchRL keep their trees in C++, in RAM; ours in a directory stores each update"
    )
    return table


def _bare(folder: Path, size: int, rng: np.random.Generator) -> Callable[[], None]:
    sampler = PrioritizedSampler(rng=0)
    buf = TransitionReplayBuffer(size, (1,), device=None, path=folder, sampler=sampler)
    lanes = min(size, 4_096)
    for _ in range(-(-size // lanes)):
        zeros = np.zeros((lanes, 1))
        buf.add(zeros, np.zeros(lanes), np.zeros(lanes), zeros, np.zeros(lanes))
    buf.sample(1)
    step = 0

    def call() -> None:
        nonlocal step
        step += 1
        window = buf.clip_window()
        positions = window.positions(sampler(step, buf, BATCH, 1))
        weigh = sampler.weigh()
        assert weigh is not None
        weigh(positions)
        sampler.update_priorities(positions, rng.random(BATCH))

    return call


def _alone(place: Place) -> Table:
    """Time `add` of steps that are there already, and what a million of them leave on the disk."""
    table = Table(
        f"steps stored alone: {DIM} floats, an action, a reward, two flags; made beforehand"
    )
    known, rounds = 256, place.size(100, 2)
    made = {lanes: [Steps(lanes, i * lanes)() for i in range(known)] for lanes in (1, 32)}
    for step in made[1]:  # as one environment gives them
        step.update({name: values[0] for name, values in step.items()})
        step.update({name: step[name].item() for name in ("action", "reward", "done")})
    bars = {(1, "in RAM"): 12, (1, "in a directory"): 20, (32, "in a directory"): 40}
    with place.folder() as folder:
        adds: dict[str, Callable[[], object]] = {}
        for lanes, steps in made.items():
            for where, path in (("in RAM", None), ("in a directory", folder / str(lanes))):
                party, turn = ours(place.size(1_000_000, 1_024), lanes, path), cycle(steps)
                name = f"{where}, {lanes} lane{'s' * (lanes > 1)}: add"
                adds[name] = lambda p=party, t=turn: p.add(next(t))  # type: ignore[misc]
        table.add_all(in_turn(adds, rounds, burst=place.size(100, 2)))
        for (lanes, where), bar in bars.items():
            name = f"{where}, {lanes} lane{'s' * (lanes > 1)}: add"
            table.bar(f"{name}, median us", table.times[name]["median"] * 1e6, at_most=bar)
        _fill(table, folder / "filled", place.size(1_000_000, 1_024), made[1])
    return table


def _fill(table: Table, path: Path, count: int, steps: list[dict[str, Array]]) -> None:
    """Fill a directory with single steps, and tell what it takes, and how long opening it takes."""
    buf = TransitionReplayBuffer(count, (DIM,), device=None, path=path, seed=0)
    begun = perf_counter()
    for step, _ in zip(cycle(steps), range(count), strict=False):
        buf.add(step["obs"], step["action"], step["reward"], step["next"], step["done"])
    buf.close()
    took = perf_counter() - begun
    row = 4 * DIM + 8 + 4 + 1 + 1 + 4
    over = (nbytes_of(str(path)) - count * row) / count
    table.fact(f"{count:,} single adds and close, s", took)
    table.bar(f"bytes beside the {row} of a row, of {count:,}", over, at_most=40)
    begun = perf_counter()
    TransitionReplayBuffer.open(path, "r+", device=None).close()
    table.bar("opening it for writing, and closing, s", perf_counter() - begun, at_most=0.3)


def _plain(place: Place, lanes: int) -> Table:
    size = place.size(100_000, 1_024)
    table = Table(
        f"add a step of {lanes} lanes to a full ring, and sample({BATCH}), {size:,} transitions of {DIM} floats"
    )
    with place.folder() as folder:
        parties = {
            "ringmap, in RAM": ours(size, lanes, None),
            "ringmap, in a directory": ours(size, lanes, folder / "buf"),
            **_rivals(size, lanes, False, table),
        }  # fmt: skip
        steps = {name: Steps(lanes) for name in parties}
        for name, party in parties.items():
            while steps[name].at < size:
                party.add(steps[name]())
        _assert_right({n: p for n, p in parties.items() if n.startswith("ringmap")}, lanes)
        adds = {f"{n}: add": (lambda p=p, s=steps[n]: p.add(s())) for n, p in parties.items()}
        draws = {f"{n}: sample": p.sample for n, p in parties.items()}
        rounds = place.size(100, 2)
        table.add_all(in_turn(adds, rounds, burst=place.size(20, 2)))
        table.add_all(in_turn(draws, rounds, burst=place.size(20, 2)))
    for what in ("add", "sample"):
        for name in list(parties)[2:]:
            table.faster(f"ringmap, in RAM: {what}", f"{name}: {what}")
    table.notes.append("no kill can undo an add of ours; Stable-Baselines3 returns tensors")
    return table
