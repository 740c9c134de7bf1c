"""Evaluating: how often a policy succeeds, in fresh episodes or from the states of a dataset.

    episodes=N           turns with seed + k                     ─┐
    dataset, idx, ...    chunk ─► start: reset options, callables ├─► roll ─► scores, videos
                              └─► goal: overlaid on the infos    ─┘

Invariants: every episode that is started counts, and counts once.
Not here: the loop (rollout.py), tasks from a dataset (tasks.py), videos (episode_videos.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringmap.arguments import whole
from ringmap.errors import InputError
from ringmap.world.episode_videos import Beside, EpisodeVideos, alone
from ringmap.world.infos import Row
from ringmap.world.rollout import Stage, Turn, Watcher, bar_of, count_of, options_of, roll
from ringmap.world.tasks import calls_of, goal_of, says, task_of

__all__ = ["evaluate_dataset", "evaluate_episodes"]

Array = np.ndarray[Any, np.dtype[Any]]

WHERE = "World.evaluate"
_MODES = ("auto", "wait")


def checked_mode(given: str | None, default: str) -> str:
    """Return the reset mode.

    Raises:
        InputError: there is none of that name.
    """
    mode = default if given is None else given
    if mode not in _MODES:
        raise InputError(f"{WHERE}: reset_mode must be one of {_MODES}, got {given!r}")
    return mode


def evaluate_episodes(
    world: Stage,
    episodes: int,
    seed: int | None,
    options: Any,
    video: Any,
    reset_mode: str | None,
    progress: bool,
) -> dict[str, Any]:
    """Run fresh episodes, and score them."""
    count = count_of(episodes, WHERE)
    if checked_mode(reset_mode, "auto") == "wait" and count > world.num_envs:
        raise InputError(
            f"{WHERE}: reset_mode='wait' plays one episode in each of {world.num_envs} environments, so "
            f"episodes={count} would never be reached; ask for at most {world.num_envs}, or for 'auto'"
        )
    world.check_ready(WHERE)
    first = None if seed is None else whole(WHERE, "seed", seed)
    shared = options_of(options, world.num_envs, WHERE)
    turns = [Turn(k, None if first is None else first + k, shared) for k in range(count)]
    with contextlib.ExitStack() as stack:
        scores = _Scores(count, stack.enter_context(bar_of(f"evaluate {world.env_name}", count, progress)))
        watchers: list[Watcher] = [scores]
        if video is not None:
            watchers.append(stack.enter_context(EpisodeVideos(Path(video), "episode", alone)))
        roll(world.envs, world.act, turns, watchers)
    return scores.result(None if first is None else [first + k for k in range(count)])


def evaluate_dataset(
    world: Stage,
    dataset: Any,
    episodes_idx: Any,
    start_steps: Any,
    goal_offset: Any,
    eval_budget: Any,
    seed: int | None,
    options: Any,
    video: Any,
    reset_mode: str | None,
    callables: Sequence[Mapping[str, Any]] | None,
    progress: bool,
) -> dict[str, Any]:
    """Run one episode per environment from the states of a dataset, and score them."""
    if checked_mode(reset_mode, "wait") != "wait":
        raise InputError(f"{WHERE}: a run from a dataset has one task for each environment: reset_mode must be 'wait'")
    given = {"episodes_idx": episodes_idx, "start_steps": start_steps, "goal_offset": goal_offset}
    for name, value in given.items():
        if value is None:
            raise InputError(f"{WHERE}: a run from a dataset needs {name}")
    numbers = [whole(WHERE, "each of episodes_idx", i) for i in episodes_idx]
    starts = [whole(WHERE, "each of start_steps", i) for i in start_steps]
    offset = whole(WHERE, "goal_offset", goal_offset)
    first = None if seed is None else whole(WHERE, "seed", seed)
    budget = None if eval_budget is None else whole(WHERE, "eval_budget", eval_budget)
    count = len(numbers)
    if count != world.num_envs:
        raise InputError(
            f"{WHERE}: {count} episodes_idx for {world.num_envs} environments; make a world with num_envs={count}"
        )
    if len(starts) != count:
        raise InputError(f"{WHERE}: {len(starts)} start_steps, expected {count}: one per episode")
    if offset < 1 or (budget is not None and budget < 1):
        raise InputError(f"{WHERE}: goal_offset and eval_budget must be positive, got {goal_offset} and {eval_budget}")
    world.check_ready(WHERE)
    tasks = [task_of(dataset, number, start, offset) for number, start in zip(numbers, starts, strict=True)]
    goals = [goal_of(world, task) for task in tasks]
    calls = [calls_of(callables or (), task) for task in tasks]
    shared = options_of(options, count, WHERE)
    given_options = [dict((shared[i] if isinstance(shared, list) else shared) or {}) for i in range(count)]
    if world.envs.has_reset_options:
        asked = [{"init": task.start, "goal": task.goal} for task in tasks]
        hooks = world.envs.call("reset_options_from_dataset", asked)
        given_options = [{**own, **hook} for own, hook in zip(given_options, hooks, strict=True)]
    elif not callables:
        raise InputError(
            f"{WHERE}: {world.env_name} has no reset_options_from_dataset(init, goal), so it can't be put "
            "where an episode was; give it one, or pass callables="
        )

    def prepared(mask: Array) -> None:
        if not callables:
            return
        for k, spec in enumerate(callables):
            world.envs.call(spec["method"], [calls[env][k] for env in range(count)])
        known = [
            {name: task.start[name] for name in world.envs.rows[env] if says(task, name, world.envs.rows[env])}
            for env, task in enumerate(tasks)
        ]
        world.envs.render_again(mask, known)

    turns = [Turn(k, None if first is None else first + k, given_options[k]) for k in range(count)]
    with contextlib.ExitStack() as stack:
        scores = _Scores(count, stack.enter_context(bar_of(f"evaluate {world.env_name}", count, progress)))
        watchers: list[Watcher] = [scores]
        if video is not None:
            missing = [task.episode for task in tasks if "pixels" not in task.columns]
            if missing:
                raise InputError(f"{WHERE}: a video shows the dataset's pixels; it has no column 'pixels'")
            beside = Beside(tasks)
            watchers.append(stack.enter_context(EpisodeVideos(Path(video), "env", beside)))
        roll(world.envs, world.act, turns, watchers, budget=budget, prepared=prepared, overlay=dict(enumerate(goals)))
    return scores.result([turn.seed for turn in turns] if seed is not None else None)


# -- scores ---------------------------------------------------------------------------------------


class _Scores:
    """A watcher that notes success, return and length of each turn."""

    def __init__(self, count: int, bar: Any) -> None:
        self.successes = np.zeros(count, bool)
        self.returns = np.zeros(count, np.float64)
        self.lengths = np.zeros(count, np.int64)
        self._bar = bar
        self._newest: dict[int, Row] = {}

    def began(self, turn: Turn, row: Row) -> None:
        pass

    def stepped(self, turn: Turn, row: Row) -> None:
        self._newest[turn.number] = row

    def ended(self, turn: Turn, data: dict[str, Any] | None) -> None:
        row = self._newest.pop(turn.number)
        success = row.get("is_success")
        won = turn.terminated if success is None else bool(np.all(success))
        self.successes[turn.number] = won
        self.returns[turn.number] = turn.total
        self.lengths[turn.number] = turn.length
        self._bar.update()

    def result(self, seeds: list[Any] | None) -> dict[str, Any]:
        return {
            "success_rate": float(100 * self.successes.mean()) if len(self.successes) else 0.0,
            "episode_successes": self.successes,
            "episode_returns": self.returns,
            "episode_lengths": self.lengths,
            "seeds": seeds,
        }
