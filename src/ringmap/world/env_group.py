"""A group of environments in one process, reset and stepped one after the other.

    reset(seeds, options, mask)  ─►  one Outcome or Failure per environment, None where masked
    step(actions, mask)          ─►  the same

An environment that raises ends nothing but its own turn: the others are stepped, and the
error is sent as a `Failure`, which can be pickled, to the code that can name the episode.
Not here: stacking (infos.py), processes (workers.py).
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.world.infos import Row, as_row, as_scalar

__all__ = ["Answer", "EnvFn", "EnvGroup", "Failure", "Outcome"]

EnvFn = Callable[[], Any]
"""Makes one environment."""


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


Answer = Outcome | Failure | None


class EnvGroup:
    """Environments of one process.

    Args:
        env_fns: one per environment.
    """

    def __init__(self, env_fns: Sequence[EnvFn]) -> None:
        self.envs = [make() for make in env_fns]

    def reset(self, seeds: Sequence[int | None], options: Sequence[Any], mask: Sequence[bool]) -> list[Answer]:
        """Reset those that `mask` names."""
        return [
            self._try(self._reset, env, seed, given) if wanted else None
            for env, seed, given, wanted in zip(self.envs, seeds, options, mask, strict=True)
        ]

    def step(self, actions: Sequence[Any], mask: Sequence[bool]) -> list[Answer]:
        """Step those that `mask` names."""
        return [
            self._try(self._step, env, action) if wanted else None
            for env, action, wanted in zip(self.envs, actions, mask, strict=True)
        ]

    def call(self, name: str, arguments: Sequence[dict[str, Any] | None]) -> list[Any]:
        """Call a method of the unwrapped environments, each with its own arguments (None: not at all)."""
        return [
            None if given is None else self._try(_call, env, name, given)
            for env, given in zip(self.envs, arguments, strict=True)
        ]

    def render(self, mask: Sequence[bool]) -> list[Any]:
        """Return what the environments show now, in infos as their wrappers make them."""
        return [self._try(_refreshed, env) if wanted else None for env, wanted in zip(self.envs, mask, strict=True)]

    def close(self) -> None:
        """Close all."""
        for env in self.envs:
            env.close()

    @staticmethod
    def _try(work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except Exception as error:
            return Failure.of(error)

    @staticmethod
    def _reset(env: Any, seed: int | None, options: Any) -> Outcome:
        _, info = env.reset(seed=seed, options=None if options is None else dict(options))
        return Outcome(as_row(info))

    @staticmethod
    def _step(env: Any, action: Any) -> Outcome:
        _, reward, terminated, truncated, info = env.step(action)
        terminated, truncated = (
            bool(as_scalar("terminated", terminated, np.bool_)),
            bool(as_scalar("truncated", truncated, np.bool_)),
        )
        ended = terminated or truncated
        return Outcome(
            as_row(info),
            float(as_scalar("reward", reward, np.float32)),
            terminated,
            truncated,
            episode_data(env) if ended else None,
        )


def episode_data(env: Any) -> dict[str, Any] | None:
    """Return the values that are constant within an environment's episode; None if it has none."""
    hook = getattr(env.unwrapped, "get_episode_data", None)
    return None if hook is None else dict(hook())


def _call(env: Any, name: str, arguments: dict[str, Any]) -> Any:
    return getattr(env.unwrapped, name)(**arguments)


def _refreshed(env: Any) -> Row:
    try:
        again = env.get_wrapper_attr("shown_again")
    except AttributeError:  # without our wrappers
        return {}
    return as_row(again())
