"""Worker processes: a Gymnasium AsyncVectorEnv in which each environment is an `EnvGroup`.

    EnvPool ── actions, masks ──► AsyncVectorEnv ══ pipe ══► CrewEnv ── EnvGroup ── env, env, ...
       ▲                               ▲                        │
       └── rows ◄── shared memory ─────┴── large arrays ◄───────┘

The "observation" of a group is a block of shared memory that holds the arrays of all its infos.
A small `Reply` through the pipe says where each array is, and holds the values that do
not fit. AsyncVectorEnv manages the processes.

Invariants: the results equal, bit for bit, those of an `EnvGroup` in this process.
Not here: what environments do (env_group.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from ringmap.errors import RolloutError
from ringmap.world.env_group import Answer, EnvFn, EnvGroup, Outcome

__all__ = ["WorkerCrews"]

Array = np.ndarray[Any, np.dtype[Any]]

_LARGE_NBYTES = 1024
"""Smaller arrays are sent in the reply: a pipe takes them at once, and packing costs more."""


class Anything(gymnasium.Space[Any]):
    """A space of any object: AsyncVectorEnv passes such actions on unchanged."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything)

    def __hash__(self) -> int:
        return 0

    def contains(self, x: Any) -> bool:
        """Return True."""
        return True

    def sample(self, *_: Any, **__: Any) -> Any:
        """Return None."""
        return None


@dataclass(frozen=True)
class Packed:
    """The place, shape and dtype of an array in the block."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class CrewEnv(gymnasium.Env[Array, Any]):
    """A group as one environment, for AsyncVectorEnv to run.

    Args:
        env_fns: its environments; none in the process that only asks for the spaces.
        nbytes: size of the block.
    """

    action_space = Anything()

    def __init__(self, env_fns: Sequence[EnvFn], nbytes: int) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (nbytes,), np.uint8)
        self.crew = EnvGroup(env_fns)
        self.block = np.zeros(nbytes, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Do nothing: environments are reset by `step`, which has a command for each group."""
        return self.block, {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Call the method of the group that `action` names, with its arguments."""
        name, args = action
        return (
            self.block,
            0.0,
            False,
            False,
            {"letter": Reply(self._packed(getattr(self.crew, name)(*args)))},
        )

    def close(self) -> None:
        """Close the group."""
        self.crew.close()

    def _packed(self, answers: list[Any]) -> list[Any]:
        at = 0
        packed: list[Any] = []
        for answer in answers:
            if not isinstance(answer, Outcome):
                packed.append(answer)
                continue
            row = dict(answer.row)
            for name, value in row.items():
                if not isinstance(value, np.ndarray) or value.nbytes < _LARGE_NBYTES:
                    continue
                if at + value.nbytes <= len(self.block):
                    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                    self.block[at : at + value.nbytes] = flat
                    row[name] = Packed(at, value.shape, value.dtype)
                    at += value.nbytes
            packed.append(replace(answer, row=row))
        return packed


@dataclass(frozen=True)
class Reply:
    """The answers of a group, in a wrapper whose contents AsyncVectorEnv does not read."""

    answers: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class CrewMaker:
    """Makes a `CrewEnv`, but without environments in the process that asks for the spaces."""

    env_fns: tuple[EnvFn, ...]
    nbytes: int
    asking: int

    def __call__(self) -> CrewEnv:
        """Make it."""
        return CrewEnv(() if os.getpid() == self.asking else self.env_fns, self.nbytes)


class WorkerCrews:
    """Groups in separate processes, with the interface of one `EnvGroup`.

    Args:
        env_fns: one per environment; neighbours share a process.
        workers: how many processes.
        nbytes: shared memory per environment.
        context: how processes start ("fork", "spawn", "forkserver"); None: Python's default.
        name: what to call the environments in an error.
    """

    def __init__(
        self, env_fns: Sequence[EnvFn], workers: int, nbytes: int, context: str | None, name: str
    ) -> None:
        bounds = np.linspace(0, len(env_fns), workers + 1).round().astype(int).tolist()
        self.shares = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self.name = name
        self._broken = False
        makers = [
            CrewMaker(tuple(env_fns[s]), max(1, nbytes * (s.stop - s.start)), os.getpid())
            for s in self.shares
        ]
        # One size for all: AsyncVectorEnv wants equal spaces.
        most = max(maker.nbytes for maker in makers)
        try:
            self._envs = AsyncVectorEnv(
                [replace(maker, nbytes=most) for maker in makers], copy=False, context=context
            )
        except (EOFError, ConnectionError) as error:
            raise RolloutError(
                f"EnvPool: a worker process of {name} died while it made its environments; its traceback was "
                "printed"
            ) from error

    def reset(
        self, seeds: Sequence[int | None], options: Sequence[Any], mask: Sequence[bool]
    ) -> list[Answer]:
        """Reset those that `mask` names."""
        return self._ask("reset", lambda s: (seeds[s], options[s], mask[s]))

    def step(self, actions: Sequence[Any], mask: Sequence[bool]) -> list[Answer]:
        """Step those that `mask` names."""
        return self._ask("step", lambda s: (actions[s], mask[s]))

    def call(self, name: str, arguments: Sequence[dict[str, Any] | None]) -> list[Any]:
        """Call a method of the unwrapped environments."""
        return self._ask("call", lambda s: (name, arguments[s]))

    def render(self, mask: Sequence[bool]) -> list[Any]:
        """Return what the environments show now."""
        return self._ask("render", lambda s: (mask[s],))

    def _ask(self, what: str, part: Callable[[slice], tuple[Any, ...]]) -> list[Any]:
        if self._broken:
            raise RolloutError(f"EnvPool.{what}: its worker processes are gone; make a new pool")
        try:
            block, *_, infos = self._envs.step(tuple((what, part(s)) for s in self.shares))
        except (EOFError, ConnectionError) as error:
            self._broken = True
            dead = [i for i, p in enumerate(self._envs.processes) if not _lives(p)]
            names = "; ".join(
                f"worker {i} (exit code {self._envs.processes[i].exitcode}) with envs "
                f"{list(range(self.shares[i].start, self.shares[i].stop))}"
                for i in dead
            )
            raise RolloutError(
                f"EnvPool.{what}: a worker process of {self.name} died: {names}; what was collected "
                "before stays. Make the world anew, and see what killed it (memory?)"
            ) from error
        except BaseException:  # an interrupt: answers are still under way
            self._broken = True
            raise
        answers: list[Any] = []
        for share, reply in zip(block, infos["letter"], strict=True):
            answers += [_unpacked(answer, share) for answer in reply.answers]
        return answers

    def close(self) -> None:
        """End the processes."""
        with warnings.catch_warnings(), contextlib.suppress(EOFError, ConnectionError):
            warnings.simplefilter("ignore")  # that a call was under way is what `_broken` says
            if not self._broken:
                self._envs.close()
                return
            for process in self._envs.processes:
                process.terminate()
            self._envs._state = type(self._envs._state).DEFAULT
            self._envs.close(terminate=True)


def _lives(process: Any) -> bool:
    process.join(timeout=1)  # its pipe closed a moment before it ended
    return bool(process.is_alive())


def _unpacked(answer: Any, block: Array) -> Any:
    if not isinstance(answer, Outcome):
        return answer
    for name, value in answer.row.items():
        if isinstance(value, Packed):
            count = int(np.prod(value.shape, dtype=np.int64)) * value.dtype.itemsize
            raw = block[value.offset : value.offset + count].copy()
            answer.row[name] = raw.view(value.dtype).reshape(value.shape)
    return answer
