"""The pool: several environments, reset and stepped together or by mask.

    actions (num_envs, ...), mask ──► one group in this process, or several in workers ──► Infos

Invariants: environment i starts from `seed + i` in the worker processes as it does here, and
gives the same; one that the mask leaves out is not touched, and its infos stay.
Not here: when an episode begins or ends (rollout.py), what stands in an info (wrappers.py).
"""

from __future__ import annotations

import copy as copying
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space

from ringmap.arguments import whole
from ringmap.errors import ClosedError, InputError, RolloutError
from ringmap.world.actions import split_actions
from ringmap.world.infos import Infos, Row, Rows
from ringmap.world.workers import EnvFn, EnvGroup, Failure, Outcome, WorkerCrews, of_wrapper

__all__ = ["EnvPool", "options_of"]

Array = np.ndarray[Any, np.dtype[Any]]


class EnvPool:
    """A batch of environments with selective stepping.

    Args:
        env_fns: makes the environments: called once each, with nothing.
        workers: processes that step them; 0 steps them in this one.
        copy: return copies. Otherwise what `reset` and `step` return is changed in place by the next call.
        context: how processes start ("fork", "spawn", "forkserver"); None: Python's default.
        name: what errors call the environments.

    Attributes:
        num_envs: N, how many environments.
        infos: the newest stacked infos.
        rewards, terminateds, truncateds: of the last step, `(N,)`.
        episodes: how many episodes each environment has begun.
        seeds: the seed that each environment was reset with last, None where with none.

    Raises:
        InputError: no factories, or fewer environments than workers.

    Processes and threads: one thread at a time. With workers, the factories are called in the
    workers, and the first one here too, for the spaces.

    Source: stable-worldmodel, World guide ("EnvPool").

    Example:
        >>> import gymnasium
        >>> pool = EnvPool([lambda: gymnasium.make("CartPole-v1")] * 3)
        >>> _ = pool.reset(seed=0)
        >>> _, rewards, *_ = pool.step(np.array([0, 1, 0]), mask=np.array([True, False, True]))
        >>> rewards
        array([1., 0., 1.], dtype=float32)
        >>> pool.seeds
        [0, 1, 2]
        >>> pool.close()
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        workers: int = 0,
        *,
        copy: bool = False,
        context: str | None = None,
        name: str = "the pool",
    ) -> None:
        env_fns = list(env_fns)
        if not env_fns:
            raise InputError("EnvPool: expected at least one environment factory, got none")
        workers = whole("EnvPool", "workers", workers)
        if not 0 <= workers <= len(env_fns):
            raise InputError(
                f"EnvPool: workers must be 0 (none) to {len(env_fns)} (one per environment), got {workers}"
            )
        self.num_envs = len(env_fns)
        self.name = name
        self._copy = copy
        self._closed = False
        self._crew: EnvGroup | WorkerCrews
        if workers:
            probe = env_fns[0]()
            try:
                self._take_spaces(probe)
                nbytes = of_wrapper(probe, "info_nbytes", lambda: 0)()
            finally:
                probe.close()
            self._crew = WorkerCrews(env_fns, workers, nbytes, context, name)
        else:
            group = self._crew = EnvGroup(env_fns)
            self._take_spaces(group.envs[0])
        self.seeds: list[int | None] = [None] * self.num_envs
        self.episode_data: list[dict[str, Any] | None] = [None] * self.num_envs
        self.episodes = [0] * self.num_envs
        self._steps = [0] * self.num_envs
        self._infos = Infos(self.num_envs)
        self._no_step()

    def _take_spaces(self, env: Any) -> None:
        self.single_action_space: Space[Any] = env.action_space
        self.single_observation_space: Space[Any] = env.observation_space
        self.variation_space: Any = getattr(env.unwrapped, "variation_space", None)
        self.has_reset_options = hasattr(env.unwrapped, "reset_options_from_dataset")
        self.observation_names: frozenset[str] = of_wrapper(env, "observation_names", frozenset())
        self.metadata: Mapping[str, Any] = dict(getattr(env, "metadata", {}) or {})

    def _no_step(self) -> None:
        self.rewards = np.zeros(self.num_envs, np.float32)
        self.terminateds = np.zeros(self.num_envs, bool)
        self.truncateds = np.zeros(self.num_envs, bool)

    @property
    def action_space(self) -> Space[Any]:
        """`single_action_space`, batched."""
        return batch_space(self.single_action_space, self.num_envs)

    @property
    def observation_space(self) -> Space[Any]:
        """`single_observation_space`, batched."""
        return batch_space(self.single_observation_space, self.num_envs)

    @property
    def single_variation_space(self) -> Any:
        """Another name for `variation_space`: that of the unwrapped environment, or None."""
        return self.variation_space

    @property
    def infos(self) -> dict[str, Any]:
        """The newest infos, stacked: arrays `(N, 1, ...)`, lists of N for what is no array."""
        return self._infos.stacked

    @property
    def rows(self) -> list[Row]:
        """The newest info of each environment, its arrays without the two leading axes."""
        return self._infos.rows

    # -- running -----------------------------------------------------------------------------

    def reset(
        self,
        seed: int | Sequence[int | None] | Array | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        mask: Any = None,
    ) -> tuple[None, dict[str, Any]]:
        """Reset environments.

        Args:
            seed: an int: environment i gets `seed + i`; or one per environment; or None.
            options: for all, or a list with one per environment.
            mask: which to reset, `(N,)`; None for all. The others stay as they are, infos included.

        Returns:
            (None, infos).

        Raises:
            InputError: a seed, the options or the mask do not fit.
            RolloutError: an environment raised; the message names it and the episode.
        """
        where = "EnvPool.reset"
        self._ready(where)
        chosen = self._mask(mask, where)
        seeds = self._seeds_of(seed)
        given = options_of(options, self.num_envs, where)
        each = given if isinstance(given, list) else [given] * self.num_envs
        for env in np.flatnonzero(chosen).tolist():
            self.seeds[env] = seeds[env]
            self.episodes[env] += 1
            self._steps[env] = 0
            self.episode_data[env] = None
        if mask is None:
            self._infos = Infos(self.num_envs)  # nothing of earlier episodes decides a dtype
        self._run("reset", list(zip(seeds, each, strict=True)), chosen)
        return None, self._out(self.infos)

    def step(self, actions: Any, mask: Any = None) -> tuple[None, Array, Array, Array, dict[str, Any]]:
        """Step environments.

        Args:
            actions: a batch, `(N, ...)`; a dict of such for a Dict space.
            mask: which to step, `(N,)`; None for all. The others give reward 0 and no flags.

        Returns:
            (None, rewards, terminateds, truncateds, infos): float32 `(N,)`, two bool `(N,)`, and the
            stacked infos. Without `copy=True` they are changed in place by the next call.

        Raises:
            InputError: the actions do not fit the action space, or are NaN.
            RolloutError: an environment raised, or a worker died; the message names them.
        """
        where = "EnvPool.step"
        self._ready(where)
        chosen = self._mask(mask, where)
        self.advance(split_actions(actions, self.single_action_space, self.num_envs, chosen, where), chosen)
        results = self.rewards, self.terminateds, self.truncateds, self.infos
        return None, *map(self._out, results)

    def advance(self, actions: Sequence[Any], mask: Array) -> None:
        """Step with one checked action per environment (see `split_actions`); the attributes show the result."""
        for env in np.flatnonzero(mask).tolist():
            self._steps[env] += 1
        self._run("step", [(action,) for action in actions], mask)

    def call(self, name: str, arguments: Sequence[Mapping[str, Any] | None] | None = None) -> list[Any]:
        """Call a method of the unwrapped environments.

        Args:
            name: of the method.
            arguments: keyword arguments for each environment, None for one that is left out; None
                calls all without any.

        Returns:
            What each returned, None for one that was left out.

        Raises:
            RolloutError: it is not there, or raised.
        """
        where = f"EnvPool.call({name!r})"
        self._ready(where)
        given = [{}] * self.num_envs if arguments is None else arguments
        if len(given) != self.num_envs:
            raise InputError(f"{where}: {len(given)} arguments, expected {self.num_envs}")
        answers = self._crew.ask("call", [None if a is None else (name, dict(a)) for a in given])
        self._check(answers, where)
        return answers

    def render_again(self, mask: Array, instead: Sequence[Row]) -> None:
        """Read again the infos of these environments, after a change other than a step; `instead` holds now."""
        answers = self._crew.ask("show", [() if wanted else None for wanted in mask.tolist()])
        self._check(answers, "EnvPool.render_again")
        self.overlay({env: {**answers[env], **instead[env]} for env in np.flatnonzero(mask).tolist()})

    def overlay(self, values: Rows) -> None:
        """Overlay values on the newest infos of environments."""
        self._infos.put({env: {**self.rows[env], **row} for env, row in values.items()})

    def close(self) -> None:
        """Close all environments, and end the workers. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._crew.close()

    # -- helpers -----------------------------------------------------------------------------

    def _ready(self, where: str) -> None:
        if self._closed:
            raise ClosedError(f"{where}: the pool is closed; make a new one")

    def _run(self, what: str, arguments: Sequence[tuple[Any, ...]], mask: Array) -> None:
        """Reset or step those of the mask, and take what they gave."""
        answers = self._crew.ask(
            what, [given if wanted else None for given, wanted in zip(arguments, mask.tolist(), strict=True)]
        )
        self._no_step()
        rows: dict[int, Row] = {}
        for env, answer in enumerate(answers):
            if isinstance(answer, Outcome):
                rows[env] = answer.row
                self.rewards[env] = answer.reward
                self.terminateds[env] = answer.terminated
                self.truncateds[env] = answer.truncated
                self.episode_data[env] = answer.data
        self._infos.put(rows)
        self._check(answers, f"EnvPool.{what}")

    def _check(self, answers: Sequence[Any], where: str) -> None:
        """Raise what the first environment that failed raised."""
        for env, failure in enumerate(answers):
            if not isinstance(failure, Failure):
                continue
            seed = "" if self.seeds[env] is None else f" (seed {self.seeds[env]})"
            error = RolloutError(
                f"{where}: env {env} of {self.name}, its episode {self.episodes[env]}{seed}, step "
                f"{self._steps[env]}: {type(failure.error).__name__}: {failure.error}"
            )
            if failure.error.__traceback__ is None:  # it came from a worker
                error.add_note(failure.trace)
            raise error from failure.error

    def _mask(self, mask: Any, where: str) -> Array:
        if mask is None:
            return np.ones(self.num_envs, bool)
        chosen = np.asarray(mask)
        if chosen.shape != (self.num_envs,):
            raise InputError(f"{where}: mask of shape {chosen.shape}, expected ({self.num_envs},)")
        return chosen.astype(bool)

    def _seeds_of(self, seed: Any) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if np.ndim(seed) == 0:
            return [_seed(seed) + i for i in range(self.num_envs)]
        return one_each([None if s is None else _seed(s) for s in seed], self.num_envs, "seeds", "EnvPool.reset")

    def _out(self, value: Any) -> Any:
        return copying.deepcopy(value) if self._copy else value


def one_each(values: list[Any], num_envs: int, what: str, where: str) -> list[Any]:
    """Return a list with a value for each environment; InputError if it has another length."""
    if len(values) != num_envs:
        raise InputError(f"{where}: {len(values)} {what}, expected one for each of {num_envs} environments")
    return values


def options_of(options: Any, num_envs: int, where: str) -> Any:
    """Return reset options: a mapping for all, None, or a list with one for each environment."""
    if options is None or isinstance(options, Mapping):
        return options
    return one_each(list(options), num_envs, "options", where)


def _seed(value: Any) -> int:
    seed = whole("EnvPool.reset", "a seed", value)
    if seed < 0:
        raise InputError(f"EnvPool.reset: a seed must not be negative, got {seed}")
    return seed
