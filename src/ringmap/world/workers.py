"""Groups of environments, stepped one after the other: one in this process, or one in each worker process.

    EnvPool ── arguments ──► AsyncVectorEnv ══ pipe ══► serve ── EnvGroup ── env, env, ...
       ▲                          ▲                        │
       └─ answers ◄─ shared memory ┴── large arrays ◄───────┘

AsyncVectorEnv manages the processes, with a `worker=` of our own. The shared memory that it makes for observations is a
block of bytes for each worker, which holds the large arrays of all infos. A small reply through the pipe says where
each array is, and holds the values that do not fit.

Invariants: an environment that raises ends nothing but its own turn: its error is an answer, which can be pickled;
the answers of workers equal, bit for bit, those of an `EnvGroup` in this process.
Not here: stacking (infos.py), which episode it is (pool.py).
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from ringmap.errors import RolloutError
from ringmap.world.infos import Row, as_row, as_scalar

__all__ = ["EnvFn", "EnvGroup", "Failure", "Outcome", "WorkerCrews", "of_wrapper"]

Array = np.ndarray[Any, np.dtype[Any]]
EnvFn = Callable[[], Any]
"""Makes one environment."""
Arguments = Sequence[tuple[Any, ...] | None]
"""For each environment what it is asked with, None for one that is left out."""

_LARGE_NBYTES = 1024
"""Smaller arrays are sent in the reply: a pipe takes them at once, and packing costs more."""


@dataclass(slots=True)
class Outcome:
    """What one environment gave: `data` are its `get_episode_data()` as its episode ends."""

    row: Row
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    data: dict[str, Any] | None = None


@dataclass(slots=True)
class Failure:
    """An environment raised `error`; `trace` is its traceback as text."""

    error: Exception
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Note an error, in a form that can be pickled."""
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception class of any kind
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error, trace)


class EnvGroup:
    """Environments of one process."""

    def __init__(self, env_fns: Sequence[EnvFn]) -> None:
        self.envs = [make() for make in env_fns]

    def ask(self, what: str, arguments: Arguments) -> list[Any]:
        """Return what each environment answers, a Failure for one that raised, None for one that is left out.

        Args:
            what: `reset` (seed, options) and `step` (action) answer an Outcome; `call` (name, keyword arguments) a
                method of the unwrapped environment; `show` what it shows now, as an info.
            arguments: for each.
        """
        work, answers = _WORK[what], list[Any]()
        for env, given in zip(self.envs, arguments, strict=True):
            try:
                answers.append(None if given is None else work(env, *given))
            except Exception as error:
                answers.append(Failure.of(error))
        return answers

    def close(self) -> None:
        """Close all."""
        for env in self.envs:
            env.close()


def _reset(env: Any, seed: int | None, options: Any) -> Outcome:
    _, info = env.reset(seed=seed, options=None if options is None else dict(options))
    return Outcome(as_row(info))


def _step(env: Any, action: Any) -> Outcome:
    _, reward, terminated, truncated, info = env.step(action)
    terminated = bool(as_scalar("terminated", terminated, np.bool_))
    truncated = bool(as_scalar("truncated", truncated, np.bool_))
    data = getattr(env.unwrapped, "get_episode_data", None) if terminated or truncated else None
    number = float(as_scalar("reward", reward, np.float32))
    return Outcome(as_row(info), number, terminated, truncated, None if data is None else dict(data()))


def _call(env: Any, name: str, arguments: dict[str, Any]) -> Any:
    return getattr(env.unwrapped, name)(**arguments)


def of_wrapper(env: Any, name: str, default: Any) -> Any:
    """Return an attribute of the environment's wrappers of ours; the default without such a wrapper."""
    try:
        return env.get_wrapper_attr(name)
    except AttributeError:
        return default


def _show(env: Any) -> Row:
    return as_row(of_wrapper(env, "shown_again", dict)())


_WORK: dict[str, Callable[..., Any]] = {"reset": _reset, "step": _step, "call": _call, "show": _show}


class Share(gymnasium.Env[Array, Any]):
    """What AsyncVectorEnv asks an environment for: the space of a worker's block of shared memory, and one of any
    actions. The environments are made by `serve`."""

    def __init__(self, env_fns: Sequence[EnvFn], nbytes: int) -> None:
        self.env_fns = tuple(env_fns)
        self.observation_space = gymnasium.spaces.Box(0, 255, (nbytes,), np.uint8)
        self.action_space = gymnasium.Space()  # no kind that AsyncVectorEnv would check or copy


@dataclass(frozen=True)
class Packed:
    """The place, shape and dtype of an array in the block."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def serve(
    index: int, share_fn: Any, pipe: Any, parent_pipe: Any, shared_memory: Any, error_queue: Any, *_: Any
) -> None:
    """Ask a group as the commands that come through the pipe say: Gymnasium's `worker=`, with its arguments."""
    share = share_fn()
    group = EnvGroup(share.env_fns)
    parent_pipe.close()
    nbytes = share.observation_space.shape[0]
    block = np.frombuffer(shared_memory.get_obj(), np.uint8)[index * nbytes : (index + 1) * nbytes]
    try:
        while True:
            command, data = pipe.recv()
            if command == "step":
                reply = _packed(group.ask(*data), block)
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
    """Groups in separate processes, with the interface of one `EnvGroup`; neighbours share one, and `nbytes` of shared
    memory for each environment."""

    def __init__(self, env_fns: Sequence[EnvFn], workers: int, nbytes: int, context: str | None, name: str) -> None:
        bounds = np.linspace(0, len(env_fns), workers + 1).round().astype(int).tolist()
        self.shares = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self.name = name
        self._broken = False
        # One size for all: AsyncVectorEnv wants equal spaces.
        most = max(1, *(nbytes * (s.stop - s.start) for s in self.shares))
        try:
            self._envs = AsyncVectorEnv(
                [partial(Share, env_fns[s], most) for s in self.shares],
                copy=False,
                context=context,
                worker=serve,
            )
        except (EOFError, ConnectionError) as error:
            raise RolloutError(
                f"EnvPool: a worker process of {name} died while it made its environments; its traceback was printed"
            ) from error

    def ask(self, what: str, arguments: Arguments) -> list[Any]:
        """Return what each environment answers, as `EnvGroup.ask` does."""
        if self._broken:
            raise RolloutError(f"EnvPool.{what}: its worker processes are gone; make a new pool")
        try:
            block, *_, infos = self._envs.step(tuple((what, arguments[s]) for s in self.shares))
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
            answers += [_unpacked(answer, share) for answer in reply]
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
