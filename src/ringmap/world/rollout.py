"""The rollout: which environment plays which episode, until all that were asked for are finished.

    turns  0 1 2 3 4 5 ...            the k-th started episode, seed + k
           │ │ │
    envs   0 1 2   ─ step together ─► one that ends takes the next turn; without one, it waits

All started episodes are finished, and no more are started than requested: a rollout that
stops at the first N that end collects too many short ones, and which ones depends on timing.

Invariants: a turn is played once; environments that wait are neither stepped nor reset.
Not here: what is done with the rows (collecting.py, evaluating.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringmap.arguments import integer
from ringmap.errors import InputError, RoleError
from ringmap.world.actions import split_actions
from ringmap.world.infos import Row, Rows
from ringmap.world.pool import EnvPool

__all__ = ["Stage", "Turn", "Watcher", "bar_of", "count_of", "roll"]

Array = np.ndarray[Any, np.dtype[Any]]

_BAR_AFTER_S = 2.0


@dataclass(slots=True)
class Turn:
    """One episode to play: the `number`-th of its run. The rest is filled in as it is played."""

    number: int
    seed: int | None = None
    options: Any = None
    env: int = -1
    length: int = 0
    total: float = 0.0
    terminated: bool = False
    truncated: bool = False

    @property
    def label(self) -> str:
        """The name for errors."""
        seed = "" if self.seed is None else f" (seed {self.seed})"
        return f"env {self.env}, episode {self.number}{seed}"


def count_of(episodes: Any, where: str) -> int:
    """Return a number of episodes."""
    count = integer(episodes)
    if count is None or count < 0:
        raise InputError(f"{where}: say how many episodes: a number, 0 or more, got {episodes!r}")
    return count


def bar_of(what: str, count: int, progress: bool, done: int = 0) -> Any:
    """Return a progress bar over `count` episodes, for a `with` block; it shows up once that takes a while."""
    from tqdm import tqdm

    return tqdm(total=count, initial=done, desc=what, unit="ep", delay=_BAR_AFTER_S, disable=not progress)


class Stage:
    """A policy and its environments: a `World`, as far as collecting and evaluating use it."""

    env_name: str
    num_envs: int
    image_shape: tuple[int, int] | None
    image_resample: str | int | None
    goal_transform: Callable[[Any], Any] | None
    policy: Any
    envs: EnvPool

    def check_ready(self, where: str) -> None:
        """Raise RoleError unless there is a policy."""
        if self.policy is None:
            raise RoleError(f"{where}: No policy set. Call world.set_policy(policy) first")

    def act(self, mask: Array) -> list[Any]:
        """Return the policy's action for each environment, checked for those of `mask`."""
        actions = self.policy.get_action(self.envs.infos)
        where = f"{type(self.policy).__name__}.get_action"
        return split_actions(actions, self.envs.single_action_space, self.num_envs, mask, where)


class Watcher(Protocol):
    """Follows the turns: told of the reset, of each step, and of the end."""

    def began(self, turn: Turn, row: Row) -> None:
        """See the row of the reset."""
        ...

    def stepped(self, turn: Turn, row: Row) -> None:
        """See the row of a step."""
        ...

    def ended(self, turn: Turn, data: dict[str, Any] | None) -> None:
        """See the end, with what the environment's `get_episode_data()` said."""
        ...


def roll(
    stage: Stage,
    turns: Iterable[Turn],
    watchers: Sequence[Watcher],
    *,
    budget: int | None = None,
    prepared: Callable[[Array], None] | None = None,
    overlay: Rows | None = None,
) -> None:
    """Play turns until none is left.

    Args:
        stage: the environments, and what chooses their actions.
        turns: in the order in which they start.
        watchers: told of everything, in their order.
        budget: end a turn after so many steps.
        prepared: called after a reset with the mask of those that were reset.
        overlay: values laid over the infos of each environment after every reset and step.
    """
    envs, waiting = stage.envs, iter(turns)
    playing: dict[int, Turn] = {}

    def start(candidates: Iterable[int], everyone: bool) -> None:
        started = dict(zip(candidates, waiting, strict=False))
        if not started:
            return
        mask = np.zeros(envs.num_envs, bool)
        mask[list(started)] = True
        # An environment without a turn is reset like the first one: a policy sees all of them.
        seeds: list[int | None] = [next(iter(started.values())).seed] * envs.num_envs
        options: list[Any] = [None] * envs.num_envs
        for env, turn in started.items():
            turn.env, seeds[env], options[env] = env, turn.seed, turn.options
            if isinstance(turn.options, list):  # one for each environment
                options[env] = turn.options[env]
        envs.reset(seeds, options, None if everyone else mask)
        if prepared is not None:
            prepared(mask)
        if overlay is not None:
            envs.overlay(overlay)
        for env, turn in started.items():
            playing[env] = turn
            for watcher in watchers:
                watcher.began(turn, envs.rows[env])

    start(range(envs.num_envs), everyone=True)
    while playing:
        mask = np.zeros(envs.num_envs, bool)
        mask[list(playing)] = True
        envs.advance(stage.act(mask), mask)
        if overlay is not None:
            envs.overlay(overlay)
        ended = []
        for env, turn in sorted(playing.items()):
            turn.length += 1
            turn.total += float(envs.rewards[env])
            turn.terminated = bool(envs.terminateds[env])
            turn.truncated = bool(envs.truncateds[env])
            for watcher in watchers:
                watcher.stepped(turn, envs.rows[env])
            if turn.terminated or turn.truncated or turn.length == budget:
                ended.append(env)
        for env in ended:
            turn = playing.pop(env)
            for watcher in watchers:
                watcher.ended(turn, envs.episode_data[env])
        start(ended, everyone=False)
