"""Clips with a goal: one more frame per clip, drawn from the data itself.

    start    current                later            end of the episode
      |-- clip --|  k * frameskip     |                 |
                 |- geometric(1 - gamma) or uniform ----|       ... or any step of any episode

Hindsight goals: a state that the agent reached later is used as its goal.
Invariants: a future goal lies later in the clip's own episode; clips that have no later frame are
left out when a future kind has weight. Each worker of a DataLoader draws its own goals.
Not here: rewards for goals; the clips themselves (the wrapped dataset).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ringmap.clips.cut import Cut
from ringmap.clips.index import ClipIndex
from ringmap.clips.window import WindowSpec
from ringmap.datasets.base import (
    Dataset,
    Where,
    WrappedDataset,
    as_dataset,
    clip_ids,
)
from ringmap.datasets.batch import worker
from ringmap.datasets.episode import PictureAxes
from ringmap.datasets.joined import read_stored
from ringmap.datasets.loader_batches import as_clip
from ringmap.datasets.split import Arcs
from ringmap.errors import ClipIndexError, InputError, NoClipsError, UnknownColumnError
from ringmap.extras import missing
from ringmap.storage.disk.process import Forkable
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.live import LiveEpisodes

__all__ = ["GoalDataset"]

Array = np.ndarray[Any, np.dtype[Any]]

RANDOM, GEOMETRIC, UNIFORM, CURRENT = range(4)

_MAX_WORKERS = 4096

DEFAULT_GOALS = {"pixels": "goal_pixels", "proprio": "goal_proprio"}


class GoalDataset(Forkable, WrappedDataset):
    """Adds a goal to each clip of a dataset.

    Args:
        dataset: any dataset, a buffer included.
        goal_probabilities: of a random step of the whole dataset, a later step of the same episode
            (geometric), one (uniform), and the current step.
        gamma: later steps k = 1, 2, ... (in units of `frameskip`) have probability
            `(1 - gamma) * gamma ** (k - 1)`; beyond the end of the episode, its last.
        current_goal_offset: which observation of the clip is the current one, counted from 1; by
            default the last.
        goal_keys: column -> name of its goal; by default `pixels` -> `goal_pixels` and `proprio` ->
            `goal_proprio`, whichever is there.
        seed: the same seed, the same draws, however many workers there are per pass; None: new
            ones each time.

    Shapes: a goal is (1, ...).

    Raises:
        InputError: (ValueError) not four probabilities that sum to 1; gamma outside [0, 1); an
            offset that is not positive.

    Processes and threads: with workers, each draws from a generator of its own, seeded by `seed`, its
    number, and how often a worker of that number was started before.

    Source: Andrychowicz et al. 2017, Hindsight Experience Replay, section 4.5; stable-worldmodel,
    Data guide.

    Example:
        >>> from ringmap.data import ReplayBuffer
        >>> buf = ReplayBuffer(100)
        >>> buf.write_episode({"pixels": np.arange(5, dtype=np.uint8)})
        >>> goals = GoalDataset(buf, goal_probabilities=(0, 0, 1, 0), seed=0)
        >>> len(goals), all(int(c["goal_pixels"][0]) > int(c["pixels"][-1]) for c in goals)
        (4, True)
    """

    _longer: tuple[Cut, Cut] | None = None
    """The cut of the wrapped dataset, and the same with a step after it."""

    def __init__(
        self,
        dataset: Any,
        goal_probabilities: Sequence[float] = (0.3, 0.5, 0.0, 0.2),
        gamma: float = 0.99,
        current_goal_offset: int | None = None,
        goal_keys: Mapping[str, str] | None = None,
        seed: int | None = None,
    ) -> None:
        weights = np.asarray(goal_probabilities, np.float64)
        if weights.shape != (4,):
            raise InputError(
                "GoalDataset: goal_probabilities must be four numbers (random, geometric future, "
                f"uniform future, current), got {goal_probabilities!r}"
            )
        if not np.isclose(weights.sum(), 1.0) or (weights < 0).any():
            raise InputError(f"GoalDataset: goal_probabilities must be >= 0 and sum to 1, got {goal_probabilities!r}")
        if not 0 <= gamma < 1:
            raise InputError(f"GoalDataset: gamma must be in [0, 1), got {gamma}")
        self.dataset = as_dataset(dataset, "GoalDataset: the dataset")
        inner = self.dataset.cut
        if inner.across:
            raise InputError(
                "GoalDataset: a goal lies in the episode of its item, and with across=True items run on into the next; "
                "use across=False"
            )
        last = dataset.num_steps if inner.history else 1
        offset = last if current_goal_offset is None else current_goal_offset
        if offset <= 0:
            raise InputError(f"GoalDataset: current_goal_offset must be positive, got {offset}")
        super().__init__([], [], frameskip=dataset.frameskip, num_steps=dataset.num_steps)
        self.fps, self.reward_at = self.dataset.fps, self.dataset.reward_at
        self.goal_probabilities = tuple(weights.tolist())
        self.gamma = float(gamma)
        self.current_goal_offset = int(offset)
        self._given_offset = current_goal_offset
        self.seed = seed
        self._goal_keys = None if goal_keys is None else dict(goal_keys)
        self._rng: np.random.Generator | None = None
        self._home: Any = None
        self._started = _shared_counters()
        self._first_ids: Array = np.empty(0, np.int64)

    # -- what the wrapped dataset has --------------------------------------------------------

    @property
    def goal_keys(self) -> dict[str, str]:
        """Column -> name of its goal."""
        if self._goal_keys is not None:
            return dict(self._goal_keys)
        names = self.dataset.column_names
        return {name: goal for name, goal in DEFAULT_GOALS.items() if name in names}

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int32."""
        return self.dataset.lengths

    @property
    def offsets(self) -> Array:
        """Row of each episode's first step, int64."""
        return self.dataset.offsets

    def picture_axes(self) -> PictureAxes:
        """Return those of the wrapped dataset, and of the goals, which are as their columns."""
        found = self.dataset.picture_axes()
        goals = self.goal_keys.items() if found else ()
        return {**found, **{goal: found[name] for name, goal in goals if name in found}}

    def load_episode(self, episode_idx: int, *, nest: bool = False) -> dict[str, Any]:
        """Return one whole episode, without goals; as `Dataset.load_episode`."""
        return self.dataset.load_episode(episode_idx, nest=nest)

    # -- clips with goals --------------------------------------------------------------------

    @property
    def cut(self) -> Cut:
        """What a clip holds; its anchors have a later step, where goals need one."""
        cut = self.dataset.cut
        future = self.goal_probabilities[GEOMETRIC] > 0 or self.goal_probabilities[UNIFORM] > 0
        ahead = (self.current_goal_offset - (0 if future else 1)) * self.frameskip
        if cut.after >= ahead:
            return cut
        if self._longer is None or self._longer[0] is not cut or self._longer[1].after != ahead:
            self._longer = cut, replace(cut, after=ahead)
        return self._longer[1]

    @property
    def is_view(self) -> bool:
        """Whether the wrapped dataset is one."""
        return self.dataset.is_view

    @property
    def span(self) -> int:
        """Steps that an episode must have for a clip: its own, and a later one where goals need it."""
        return self.cut.span

    def view(
        self,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
        *,
        where: Where | None = None,
    ) -> GoalDataset:
        """Return the goals of a view of the wrapped dataset, as `Dataset.view` makes it; goals come after the anchor.

        `current_goal_offset` then counts from the anchor, which is 1: it is what was given, or 1. With `where`, all
        goals are of the episodes that it selects.
        """
        return self._over(self.dataset.view(window, columns, anchors, drop_all_padded, where=where))

    @property
    def source_episodes(self) -> Array:
        """Those of the wrapped dataset."""
        return self.dataset.source_episodes

    def take(self, episodes: Sequence[int] | Array) -> GoalDataset:
        """Return the clips of some of the episodes, as `Dataset.take`; all goals are of these."""
        return self._over(self.dataset.take(self._episode_numbers(episodes)))

    def pinned(self) -> Dataset:
        """Return these clips over what the wrapped dataset has now."""
        inner = self.dataset.pinned()
        return self if inner is self.dataset else self._over(inner)

    def marked_ring(self) -> tuple[Handle, Array] | None:
        """Return the ring that the episodes of the wrapped dataset are in."""
        return self.dataset.marked_ring()

    def _over(self, dataset: Any) -> GoalDataset:
        """Return the same goals over another dataset."""
        made = GoalDataset(
            dataset,
            self.goal_probabilities,
            self.gamma,
            self._given_offset,
            self._goal_keys,
            self.seed,
        )
        made._arcs = self._arcs
        return made

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips with their goals; goals are drawn again at each call."""
        ids = clip_ids(indices, "GoalDataset")
        return read_stored(self, self._locate, ids, self._clips_at, "GoalDataset") if len(ids) else []

    def arcs(self) -> Arcs | None:
        """Return those of the wrapped dataset, of a side of these clips its own."""
        return self._arcs or self.dataset.arcs()

    @property
    def items_are_rows(self) -> bool:
        """Whether an item is a row: never, it has goals."""
        return False

    def _clips_at(self, numbers: Array) -> list[dict[str, Any]]:
        episodes, starts = self._locate(numbers)
        ids = (self._first_ids[episodes] + starts - self.dataset.cut.before).tolist()
        clips, keys = self.dataset.__getitems__(ids), self.goal_keys
        if not keys:
            return list(clips)
        at, steps = self._draw(episodes, starts)
        try:
            goals = self._shown(self.dataset.read_rows(list(keys), at, steps[:, None]))
        except KeyError as error:
            raise UnknownColumnError(
                f"GoalDataset: no column {error.args[0]!r} to draw a goal from; there are {self.column_names}"
            ) from None
        return [self._with_goal(clip, {n: goals[n][i] for n in keys}, keys) for i, clip in enumerate(clips)]

    def _with_goal(self, clip: Any, goal: dict[str, Any], keys: dict[str, str]) -> Any:
        made = dict(clip)
        for name, target in keys.items():
            if target in made:
                raise InputError(
                    f"GoalDataset: the goal of {name!r} would be {target!r}, which is a column of the clip; choose "
                    f"another name: goal_keys={{{name!r}: ...}}"
                )
            made[target] = goal[name]
        return as_clip(made)

    def _draw(self, episodes: Array, starts: Array) -> tuple[Array, Array]:
        """Return the episode and step of a goal for each clip.

        Each clip takes the same number of draws, whatever its kind, so that a kind's probability
        changes no other clip's goal.
        """
        rng, count, skip = self._generator(), len(episodes), self.frameskip
        lengths = np.asarray(self.lengths, np.int64)
        kinds = np.searchsorted(np.cumsum(self.goal_probabilities), rng.random(count), side="right")
        kinds = np.minimum(kinds, CURRENT)
        anywhere, later = rng.random(count), rng.random(count)
        current = starts + (self.current_goal_offset - 1) * skip
        most = (lengths[episodes] - 1 - current) // skip  # later observations that there are
        log_gamma = np.log(self.gamma) if self.gamma > 0 else -np.inf
        geometric = np.minimum(1 + np.floor(np.log1p(-later) / log_gamma), most).astype(np.int64)
        uniform = 1 + np.minimum((later * most).astype(np.int64), most - 1)
        ahead = np.select([kinds == GEOMETRIC, kinds == UNIFORM], [geometric, uniform], 0)
        goal_episodes, goal_steps = episodes.copy(), current + ahead * skip
        at_random = kinds == RANDOM
        if at_random.any():
            ends = np.cumsum(lengths)
            steps = np.minimum((anywhere * ends[-1]).astype(np.int64), ends[-1] - 1)[at_random]
            homes = np.searchsorted(ends, steps, side="right")
            goal_episodes[at_random] = homes
            goal_steps[at_random] = steps - (ends - lengths)[homes]
            self._replace_evicted(goal_episodes, goal_steps, rng)
        return goal_episodes, goal_steps

    def _replace_evicted(self, episodes: Array, steps: Array, rng: np.random.Generator) -> None:
        """Put steps that are stored, drawn uniformly, in place of those that are not."""
        stored = self.are_stored(episodes, steps)
        if stored is None or stored.all():
            return
        everywhere = np.repeat(np.arange(len(self.lengths)), self.lengths)
        places = np.arange(len(everywhere)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        known = self.are_stored(everywhere, places)
        assert known is not None
        left = np.flatnonzero(known)
        if not len(left):
            raise NoClipsError("GoalDataset: all steps of the view were evicted since it was made; make a new view")
        chosen = left[rng.integers(len(left), size=int((~stored).sum()))]
        episodes[~stored], steps[~stored] = everywhere[chosen], places[chosen]

    def _generator(self) -> np.random.Generator:
        told = worker()
        home = (-1,) if told is None else (told.id, told.seed)
        if self._rng is None or home != self._home:
            if self.seed is None:
                self._rng = np.random.default_rng()
            else:
                key: tuple[int, ...] = (0,)
                if told is not None:
                    turn = int(self._started[told.id % _MAX_WORKERS])
                    self._started[told.id % _MAX_WORKERS] += 1
                    key = (1 + told.id, turn)
                self._rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))
            self._home = home
        return self._rng

    def _clip_index(self) -> ClipIndex:
        lengths = np.asarray(self.lengths)
        if self._clips is None or not np.array_equal(lengths, self._lengths):
            self._lengths = lengths
            self._clips = ClipIndex(LiveEpisodes.from_lengths(lengths))
            clips = self.dataset.cut.counts(lengths)
            self._first_ids = np.cumsum(clips) - clips
        return self._clips

    def _locate(self, ids: Array) -> tuple[Array, Array]:
        try:
            return super()._locate(ids)
        except ClipIndexError as error:
            if len(self.dataset.lengths) and "empty" in str(error):
                raise ClipIndexError(
                    f"{error}; a clip needs {self.span} steps, so that a goal can lie after it"
                ) from None
            raise


def _shared_counters() -> Any:
    """Return counters that workers, forked or spawned by a DataLoader, share with this process."""
    if missing("torch"):  # then there is no DataLoader, and no worker
        return np.zeros(_MAX_WORKERS, np.int32)
    import torch

    return torch.zeros(_MAX_WORKERS, dtype=torch.int32).share_memory_()  # type: ignore[no-untyped-call]
