"""Worker processes: Gymnasium's AsyncVectorEnv, with a `worker=` of our own that serves an `EnvGroup`.

    EnvPool ── actions, masks ──► AsyncVectorEnv ══ pipe ══► serve ── EnvGroup ── env, env, ...
       ▲                               ▲                        │
       └── rows ◄── shared memory ─────┴── large arrays ◄───────┘

The shared memory that AsyncVectorEnv makes for observations is a block of bytes for each worker, which holds the
large arrays of all infos. A small `Reply` through the pipe says where each array is, and holds the values that do
not fit. AsyncVectorEnv manages the processes.

Invariants: the results equal, bit for bit, those of an `EnvGroup` in this process.
Not here: what environments do (env_group.py).
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
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


class Share(gymnasium.Env[Array, Any]):
    """What AsyncVectorEnv asks an environment for: the space of the shared memory, and one of any actions.

    Args:
        env_fns: the environments of one worker, which `serve` makes.
        nbytes: size of its block of shared memory.
    """

    def __init__(self, env_fns: Sequence[EnvFn], nbytes: int) -> None:
        self.env_fns = tuple(env_fns)
        self.observation_space = gymnasium.spaces.Box(0, 255, (nbytes,), np.uint8)
        self.action_space = gymnasium.Space()  # no kind that AsyncVectorEnv would check or copy


@dataclass(frozen=True)
class ShareMaker:
    """Makes a `Share`, in the process of the pool and in a worker alike; it makes no environment."""

    env_fns: tuple[EnvFn, ...]
    nbytes: int

    def __call__(self) -> Share:
        """Make it."""
        return Share(self.env_fns, self.nbytes)


@dataclass(frozen=True)
class Packed:
    """The place, shape and dtype of an array in the block."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Reply:
    """The answers of a group, in a wrapper whose contents AsyncVectorEnv does not read."""

    answers: list[Any] = field(default_factory=list)


def serve(
    index: int, share_fn: Any, pipe: Any, parent_pipe: Any, shared_memory: Any, error_queue: Any, *_: Any
) -> None:
    """Call the methods of a group as the commands that come through the pipe say: Gymnasium's `worker=`.

    Args:
        index: the number of this worker.
        share_fn: makes its `Share`.
        pipe: takes `(command, data)`, and is given `(answer, whether it worked)`.
        parent_pipe: the other end, which is not for this process.
        shared_memory: the blocks of all workers.
        error_queue: takes an error that ends this worker.
        _: settings for environments that reset themselves; newer releases have more of them.
    """
    share = share_fn()
    group = EnvGroup(share.env_fns)
    parent_pipe.close()
    nbytes = share.observation_space.shape[0]
    block = np.frombuffer(shared_memory.get_obj(), np.uint8)[index * nbytes : (index + 1) * nbytes]
    try:
        while True:
            command, data = pipe.recv()
            if command == "step":
                method, args = data
                reply = Reply(_packed(getattr(group, method)(*args), block))
                pipe.send(((None, 0.0, False, False, {"reply": reply}), True))
            elif command == "_check_spaces":
                pipe.send(((True, True), True))
            else:  # "close"
                pipe.send((None, True))
                return
    except (KeyboardInterrupt, Exception) as error:
        error_queue.put((index, type(error), str(error), traceback.format_exc()))
        pipe.send((None, False))
    finally:
        group.close()


def _packed(answers: list[Any], block: Array) -> list[Any]:
    """Return answers whose large arrays lie in the block, as far as there is room."""
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
            if at + value.nbytes <= len(block):
                flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                block[at : at + value.nbytes] = flat
                row[name] = Packed(at, value.shape, value.dtype)
                at += value.nbytes
        packed.append(replace(answer, row=row))
    return packed


class WorkerCrews:
    """Groups in separate processes, with the interface of one `EnvGroup`.

    Args:
        env_fns: one per environment; neighbours share a process.
        workers: how many processes.
        nbytes: shared memory per environment.
        context: how processes start ("fork", "spawn", "forkserver"); None: Python's default.
        name: what to call the environments in an error.
    """

    def __init__(self, env_fns: Sequence[EnvFn], workers: int, nbytes: int, context: str | None, name: str) -> None:
        bounds = np.linspace(0, len(env_fns), workers + 1).round().astype(int).tolist()
        self.shares = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self.name = name
        self._broken = False
        # One size for all: AsyncVectorEnv wants equal spaces.
        most = max(1, *(nbytes * (s.stop - s.start) for s in self.shares))
        try:
            self._envs = AsyncVectorEnv(
                [ShareMaker(tuple(env_fns[s]), most) for s in self.shares],
                copy=False,
                context=context,
                worker=serve,
            )
        except (EOFError, ConnectionError) as error:
            raise RolloutError(
                f"EnvPool: a worker process of {name} died while it made its environments; its traceback was printed"
            ) from error

    def reset(self, seeds: Sequence[int | None], options: Sequence[Any], mask: Sequence[bool]) -> list[Answer]:
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
        for share, reply in zip(block, infos["reply"], strict=True):
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
