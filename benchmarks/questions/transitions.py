"""Transitions: priorities at a million leaves, and adding and drawing beside other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count, cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness.place import Place
from benchmarks.harness.plots import rates
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from benchmarks.peers.rivals import install_of
from ringmap import TransitionReplayBuffer
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.inspect.describe import nbytes_of

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, DIM = 256, 8


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
            "reward": obs[:, 0].copy(),
            "next": obs + np.float32(self.lanes),
            "done": flags,
        }


@dataclass
class Party:
    """One library's buffer: `sample(size)` returns `(obs, next_obs)`.

    `single`: adds a step of one environment that has no axis of lanes, where the library has another
    call or shape for that; `setting`: how it is set up, for people.
    """

    add: Callable[[dict[str, Array]], object]
    sample: Callable[[int], tuple[Any, Any]]
    update: Callable[[Array], object] | None = None
    single: Callable[[dict[str, Any]], object] | None = None
    setting: str = ""


def run(place: Place) -> list[Table]:
    """Time one step per `add`, priorities, adding and drawing with few and many lanes, and stacks of frames."""
    alone = [] if place.quick else [_alone(place)]
    frames = [] if place.quick else [_frames(place)]
    plain = _plain(place)
    panels = {
        table.title.partition(",")[0]: {name: 1 / row["median"] for name, row in table.times.items()}
        for table in plain
        if table.title.startswith("add")
    }
    rates(place.out / "storing.png", plain[-1], panels, "calls of add per second, medians")
    return [*alone, _priorities(place), *plain, *frames]


# -- the parties ---------------------------------------------------------------------------------


def ours(size: int, lanes: int, path: Path | None, prioritized: bool = False) -> Party:
    sampler = PrioritizedSampler(rng=0) if prioritized else None
    buf = TransitionReplayBuffer(size, (DIM,), device=None, path=path, sampler=sampler, seed=0)
    last: dict[str, Any] = {}

    def sample(size: int) -> tuple[Any, Any]:
        batch = buf.sample(size)
        last.update(batch)
        return batch["observations"], batch["next_observations"]

    def add(s: dict[str, Array]) -> None:
        buf.add(s["obs"], s["action"], s["reward"], s["next"], s["done"])

    return Party(
        add,
        sample,
        lambda values: buf.update_priorities(last["ids"], values),
        add,
        "device=None: NumPy arrays",
    )


def cpprb(size: int, lanes: int, prioritized: bool = False) -> Party:
    """cpprb."""
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

    def sample(size: int) -> tuple[Any, Any]:
        batch = buf.sample(size, 0.4) if prioritized else buf.sample(size)
        last.update(batch)
        return batch["obs"], batch["next_obs"]

    def add(s: dict[str, Any]) -> None:
        buf.add(
            obs=s["obs"],
            action=s["action"],
            reward=s["reward"],
            next_obs=s["next"],
            done=s["done"],
        )

    return Party(
        add,
        sample,
        lambda values: buf.update_priorities(last["indexes"], values),
        add,
        "next_obs a column of its own",
    )


def stable_baselines3(size: int, lanes: int) -> Party:
    """Stable-Baselines3."""
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
    infos: list[dict[str, Any]] = [{}] * lanes

    def sample(size: int) -> tuple[Any, Any]:
        batch = buf.sample(size)
        return batch.observations.numpy(), batch.next_observations.numpy()

    return Party(
        lambda s: buf.add(s["obs"], s["next"], s["action"], s["reward"], s["done"], infos),
        sample,
        setting="handle_timeout_termination=False, observations stored twice, CPU tensors",
    )


def torchrl(size: int, lanes: int, prioritized: bool = False) -> Party:
    """TorchRL."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import (
        LazyTensorStorage,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )

    storage = LazyTensorStorage(size)
    if prioritized:
        buf: Any = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage)
    else:
        buf = TensorDictReplayBuffer(storage=storage)
    last: list[Any] = [None]

    def add(s: dict[str, Array]) -> None:
        tensors = {name: torch.from_numpy(values) for name, values in s.items()}
        buf.extend(TensorDict(tensors, batch_size=[len(s["reward"])]))

    def single(s: dict[str, Any]) -> None:
        tensors = {name: torch.as_tensor(value) for name, value in s.items()}
        buf.add(TensorDict(tensors, batch_size=[]))

    def sample(size: int) -> tuple[Any, Any]:
        last[0] = batch = buf.sample(size)
        return batch["obs"].numpy(), batch["next"].numpy()

    def update(values: Array) -> None:
        batch = last[0]
        batch["td_error"] = torch.from_numpy(values.astype(np.float32))
        buf.update_tensordict_priority(batch)

    return Party(add, sample, update, single, "LazyTensorStorage, TensorDicts")


def rlox(size: int, lanes: int, prioritized: bool = False) -> Party:
    """rlox: all columns are float32."""
    from rlox import PrioritizedReplayBuffer, ReplayBuffer

    buf = (PrioritizedReplayBuffer if prioritized else ReplayBuffer)(size, DIM, 1)
    last: dict[str, Any] = {}
    seeds = count()

    def single(s: dict[str, Any]) -> None:
        action = np.asarray([s["action"]], np.float32)
        buf.push(s["obs"], action, s["reward"], s["done"], False, s["next"])

    def add(s: dict[str, Array]) -> None:
        if prioritized:  # it has no push_batch
            for obs, action, reward, done, after in zip(
                s["obs"], s["action"], s["reward"], s["done"], s["next"], strict=True
            ):
                single(
                    {
                        "obs": obs,
                        "action": action,
                        "reward": float(reward),
                        "done": bool(done),
                        "next": after,
                    }
                )
            return
        ended = s["done"].view(np.uint8)
        actions = s["action"].astype(np.float32)
        buf.push_batch(
            s["obs"].reshape(-1),
            s["next"].reshape(-1),
            actions,
            s["reward"],
            ended,
            np.zeros_like(ended),
        )

    def sample(size: int) -> tuple[Any, Any]:
        last.update(batch := buf.sample(size, next(seeds)))
        return batch["obs"], batch["next_obs"]

    return Party(
        add,
        sample,
        lambda values: buf.update_priorities(last["indices"], values),
        single,
        "float32 rows, in RAM",
    )


def _rivals(size: int, lanes: int, prioritized: bool, table: Table) -> dict[str, Party]:
    makers: dict[str, tuple[str, Callable[[], Party]]] = {
        "cpprb": ("cpprb", lambda: cpprb(size, lanes, prioritized)),
        "TorchRL": ("torchrl", lambda: torchrl(size, lanes, prioritized)),
        "rlox": ("rlox", lambda: rlox(size, lanes, prioritized)),
    }
    if not prioritized:
        makers["Stable-Baselines3"] = ("stable_baselines3", lambda: stable_baselines3(size, lanes))
    found = {}
    for name, (package, make) in makers.items():
        if find_spec(package) is None:
            table.notes.append(f"{name} is not installed: {install_of(package)}")
            continue
        try:
            found[f"{name} {version(package)}"] = make()
        except RuntimeError as error:  # its compiled part is for another PyTorch
            table.notes.append(f"{name} {version(package)} is left out: {str(error).splitlines()[0]}")
    return found


def _assert_right(parties: dict[str, Party], lanes: int) -> None:
    for name, party in parties.items():
        obs, after = (np.asarray(values) for values in party.sample(BATCH))
        assert obs.shape == after.shape == (BATCH, DIM), name
        assert (obs == obs[:, :1]).all(), name
        assert len(np.unique(obs)) > BATCH // 8, name
        assert (after == obs + lanes).all(), name


# -- the tables ----------------------------------------------------------------------------------


def _priorities(place: Place) -> Table:
    size, lanes = place.size(1_000_000, 4_096, 200_000), 4_096
    table = Table(f"prioritized: {BATCH} of {size:,} transitions of {DIM} floats, all with priorities of their own")
    rng = np.random.default_rng(0)
    with place.folder() as folder:
        parties = {
            "ringmap, in RAM": ours(size, lanes, None, True),
            "ringmap, in a directory": ours(size, lanes, folder / "buf", True),
            **_rivals(size, lanes, True, table),
        }
        for party in parties.values():
            steps = Steps(lanes)
            while steps.at < size:
                party.add(steps())
            for _ in range(place.size(200, 2)):
                party.sample(BATCH)
                assert party.update is not None
                party.update(rng.random(BATCH))
        _assert_right(parties, lanes)

        def turn(party: Party) -> Callable[[], None]:
            def call() -> None:
                party.sample(BATCH)
                assert party.update is not None
                party.update(rng.random(BATCH))

            return call

        calls = {f"{name}: sample, rows and all, and update": turn(party) for name, party in parties.items()}
        bare = "ringmap, in a directory: draw and update alone"
        calls[bare] = _bare(folder / "bare", size, rng)
        table.add_all(in_turn(calls, place.size(60, 2, 20), burst=place.size(20, 2)))
    table.bar(f"{bare}, median us", table.times[bare]["median"] * 1e6, at_most=200)
    table.rank(next(iter(calls)))
    table.notes.append(
        "cpprb, TorchRL and rlox keep their trees in compiled code, in RAM; ours in a directory stores each update"
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
    """Time one call of `add` for each step, and tell what a million of them take on the disk."""
    table = Table(f"add one step per call: {DIM} floats, an action, a reward, two flags; making the step is not timed")
    known, rounds = 256, place.size(100, 2)
    made = {lanes: [Steps(lanes, i * lanes)() for i in range(known)] for lanes in (1, 32)}
    made[1] = [_as_one(step) for step in made[1]]
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


def _plain(place: Place) -> list[Table]:
    """Add steps to full rings, and sample from them; making the steps is not timed."""
    size, rounds, burst = (
        place.size(100_000, 1_024, 20_000),
        place.size(100, 2, 40),
        place.size(20, 2),
    )
    tables = []
    for lanes in (1, 64):
        what = f"a full ring of {size:,} transitions of {DIM} floats"
        table = Table(f"add a step of {lanes} lane{'s' * (lanes > 1)} to {what}; making the step is not timed")
        with place.folder() as folder:
            parties = {
                "ringmap, in RAM": ours(size, lanes, None),
                "ringmap, in a directory": ours(size, lanes, folder / "buf"),
                **_rivals(size, lanes, False, table),
            }
            made = [Steps(lanes, i * lanes)() for i in range(max(2, size // lanes))]
            for party in parties.values():
                for step in made:
                    party.add(step)
            _assert_right(parties, lanes)
            adds = {name: _adding(party, made, lanes) for name, party in parties.items()}
            table.add_all(in_turn(adds, rounds, burst))
            _assert_right(parties, lanes)
            table.rank("ringmap, in RAM")
            table.notes += [
                "in a directory of ours an add outlives a kill of the process once it returns; the others keep their "
                "rows in RAM",
                "; ".join(f"{name}: {party.setting}" for name, party in parties.items()),
            ]
            tables.append(table)
            if lanes == 1:
                for number in (32, BATCH):
                    drawn = Table(f"sample({number}) from {what}")
                    draws = {n: (lambda p=p, k=number: p.sample(k)) for n, p in parties.items()}
                    drawn.add_all(in_turn(draws, rounds, burst))
                    drawn.rank("ringmap, in RAM", {"cpprb": 1.0} if number == BATCH else None)
                    if number == 32:
                        us = drawn.times["ringmap, in RAM"]["median"] * 1e6
                        drawn.bar("ringmap, in RAM: sample(32), median us", us, at_most=15)
                    drawn.notes.append("Stable-Baselines3 and TorchRL return tensors, the others NumPy arrays")
                    tables.append(drawn)
    return tables


def _adding(party: Party, made: list[dict[str, Array]], lanes: int) -> Callable[[], object]:
    """Return a call that adds the next of these steps, in the shape that the library likes best."""
    if lanes > 1 or party.single is None:
        turn = cycle(made)
        return lambda: party.add(next(turn))
    single, alone = party.single, cycle([_as_one(step) for step in made])
    return lambda: single(next(alone))


def _as_one(step: dict[str, Array]) -> dict[str, Any]:
    """Return a step of one lane as one environment gives it."""
    one: dict[str, Any] = {name: values[0] for name, values in step.items()}
    return one | {name: one[name].item() for name in ("action", "reward", "done")}


# -- stacks of frames ----------------------------------------------------------------------------

SIDE, STACK, EPISODE = 84, 4, 500
Stacks = Callable[[int], tuple[Any, Any]]


def _frame(number: int) -> Array:
    """Return a frame that carries its number."""
    frame = np.full((SIDE, SIDE), number % 251, np.uint8)
    frame[0, :4] = np.array([number], np.uint32).view(np.uint8)
    return frame


def _numbers(stacks: Any) -> Array:
    """Return the numbers of frames, `(B, STACK)`."""
    head = np.ascontiguousarray(np.asarray(stacks)[:, :, 0, :4])
    return head.view(np.uint32)[:, :, 0].astype(np.int64)


def _frame_parties(size: int, folder: Path, table: Table) -> dict[str, tuple[Callable[..., object], Stacks]]:
    """Return a library's `add(obs, next_obs, done)` and `sample(size)`, each at the settings that take it the fewest
    bytes."""
    shape = (STACK, SIDE, SIDE)
    found: dict[str, tuple[Callable[..., object], Stacks]] = {}

    def of_ours(path: Path | None) -> tuple[Callable[..., object], Stacks]:
        buf = TransitionReplayBuffer(size, shape, obs_dtype=np.uint8, frame_stack=STACK, device=None, path=path, seed=0)

        def sample(count: int) -> tuple[Any, Any]:
            batch = buf.sample(count)
            return batch["observations"], batch["next_observations"]

        return lambda obs, after, done: buf.add(obs, 0, 1.0, after, done), sample

    def of_cpprb() -> tuple[Callable[..., object], Stacks]:
        from cpprb import ReplayBuffer

        columns = {
            "obs": {"shape": (SIDE, SIDE, STACK), "dtype": np.uint8},
            "act": {"dtype": np.int64},
            "rew": {},
            "done": {"dtype": np.bool_},
        }
        buf = ReplayBuffer(size, columns, next_of="obs", stack_compress="obs")

        def add(obs: Array, after: Array, done: bool) -> None:
            now, then = np.moveaxis(obs, 0, -1), np.moveaxis(after, 0, -1)
            buf.add(obs=now, act=0, rew=1.0, done=done, next_obs=then)
            if done:
                buf.on_episode_end()

        def sample(count: int) -> tuple[Any, Any]:
            batch = buf.sample(count)
            return np.moveaxis(batch["obs"], -1, 1), np.moveaxis(batch["next_obs"], -1, 1)

        return add, sample

    def of_sb3() -> tuple[Callable[..., object], Stacks]:
        from gymnasium.spaces import Box, Discrete
        from stable_baselines3.common.buffers import ReplayBuffer

        buf = ReplayBuffer(
            size,
            Box(0, 255, shape, np.uint8),
            Discrete(4),
            device="cpu",
            optimize_memory_usage=True,
            handle_timeout_termination=False,
        )
        one = np.ones(1, np.float32), np.zeros((1, 1), np.int64)

        def sample(count: int) -> tuple[Any, Any]:
            batch = buf.sample(count)
            return batch.observations.numpy(), batch.next_observations.numpy()

        return (
            lambda obs, after, done: buf.add(obs[None], after[None], one[1], one[0], np.array([done]), [{}]),
            sample,
        )

    found["ringmap, in RAM"] = of_ours(None)
    found["ringmap, in a directory"] = of_ours(folder / "stacks")
    makers = {"cpprb": ("cpprb", of_cpprb), "Stable-Baselines3": ("stable_baselines3", of_sb3)}
    for name, (package, make) in makers.items():
        if find_spec(package) is None:
            table.notes.append(f"{name} is not installed: {install_of(package)}")
        else:
            found[f"{name} {version(package)}"] = make()
    return found


def _frames(place: Place) -> Table:
    """Time stacks of frames, and tell the bytes that they take."""
    size = place.size(20_000, 600)
    table = Table(f"stacks of {STACK} frames of {SIDE}x{SIDE} bytes, {size:,} transitions")
    with place.folder() as folder:
        parties = _frame_parties(size, folder, table)
        now, took = np.stack([_frame(0)] * STACK), {name: list[float]() for name in parties}
        for number in range(1, size + 2):
            after = np.concatenate([now[1:], _frame(number)[None]])
            done = number % EPISODE == 0
            for name, (add, _) in parties.items():
                begun = perf_counter()
                add(now, after, done)
                took[name].append(perf_counter() - begun)
            now = np.stack([_frame(number)] * STACK) if done else after
        for name, times in took.items():
            table.add(f"{name}: add", times[len(times) // 2 :])
        for name, (_, sample) in parties.items():
            obs, after = (_numbers(stacks) for stacks in sample(64))
            first = obs[:, -1:] // EPISODE * EPISODE
            back = np.arange(STACK - 1, -1, -1)
            assert (obs == np.maximum(obs[:, -1:] - back, first)).all(), name
            if name.startswith("ringmap"):  # Stable-Baselines3's is the next row, also where an episode ended
                assert (after == np.maximum(obs[:, -1:] + 1 - back, first)).all(), name
        for count in (32, 256):
            draws = {f"{n}: sample({count})": (lambda s=s, c=count: s(c)) for n, (_, s) in parties.items()}
            table.add_all(in_turn(draws, place.size(100, 2), burst=place.size(10, 2)))
            for name in list(parties)[2:]:
                for where in ("in RAM", "in a directory"):
                    table.faster(f"ringmap, {where}: sample({count})", f"{name}: sample({count})")
        nbytes = nbytes_of(str(folder / "stacks"))
        table.fact("ringmap, in a directory: bytes per transition, all files", nbytes / size)
        table.fact("one frame", SIDE * SIDE)
        table.fact("both stacks of a transition", 2 * STACK * SIDE * SIDE)
    table.notes.append(
        "all at the settings that take the fewest bytes: frame_stack; cpprb's stack_compress (its stacks are the last "
        "axis) and next_of; Stable-Baselines3's optimize_memory_usage, which stores each stack once, 28,224 bytes"
    )
    return table
