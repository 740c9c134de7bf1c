"""A buffer for learning from a teacher: the student's observations, and the actions the teacher would have taken.

    add, in rounds  ->  rows with their newest labels  ->  batch, sample, epochs, sequences
                                   ^
                                relabel

    student_observations[/leaf]...  teacher_actions  [teacher_log_std  teacher_logits  executed_actions  ...]
    actor_id  dones  round  policy_version  label_round  in every row

Labels and their round are mutable columns: `label_round` is the round of the row's newest label.

    row         0 1 2 3 4 5 6 7                    of many actors, in the order in which they were added
    actor       a b a b a b a b
    done            .   x x                        an episode ends at a done row, and at the last row

    epochs      [5 1 3 | 0 4 2 | 7 6]              rows, shuffled, in batches
    episodes    [0 2 4] [1 3] [5 7] [6]
    sequences   [0 2] [4 .] [1 3] [5 7] [6 .]      pieces of episodes, time-major, padded

    round 0: the teacher   round 1: beta(1) teacher, the rest student   ...   round n: the student
    retention   all    every round; a full ring refuses more rows  [ r0 r0 r1 r1 r2 r2 ]
                last   those of the last `keep_rounds` rounds              [ r1 r2 r2 ]
                fifo   the newest `capacity` rows, of any round

Invariants: a row keeps its round, policy version and actor for life; drawn rows lie in the window that `retention`
keeps; the labels of a row are of one relabelling, that of the round `label_round`, or its first ones. Each row is in
one episode, whose rows belong to one actor; a pass covers what is stored when it begins; a row that is evicted before
its turn is left out, and in sequences its whole piece is: no other row replaces it. `actor_id` and `dones` have one
number per row, whatever axes the input had; a row has all labels. The mixed actions have the shape, the type and the
dtype of the student's actions; the rounds of rows never decrease.
Not here: where rows are stored (steps.py), nested names (nested.py).

Source of the schedules: Ross, Gordon and Bagnell, "A Reduction of Imitation Learning and Structured Prediction to
No-Regret Online Learning", AISTATS 2011: beta falls to zero on average, as p ** i or as an indicator of the first
round.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringmap.arguments import count, fraction, positive
from ringmap.buffers.batch import Batch, Emit
from ringmap.buffers.engine import Engine
from ringmap.buffers.options import check_whole
from ringmap.buffers.sources import BufferSource
from ringmap.buffers.steps import OverRing, StepRing
from ringmap.buffers.workers import WorkerGenerator
from ringmap.errors import InputError, NoClipsError, ReadOnlyError
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.columns.values import as_array, cast, flat, is_tensordict, nested, root
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.read_live import redraw_lost
from ringmap.storage.records.manifest import DISTILLATION

__all__ = [
    "LABEL_ROUND",
    "MUTABLE",
    "DistillationBuffer",
    "ExponentialBeta",
    "LinearBeta",
    "Retention",
    "Rounds",
    "episodes_of",
    "epoch",
    "fitted_labels",
    "mixed",
    "pieces_of",
    "row_columns",
    "sequences",
    "version_of",
]


Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Any]
TeacherFn = Callable[[Columns], Any]

_WHERE = "DistillationBuffer"

_AT_ONCE, _AT_ONCE_S = 1 << 14, 1.0
"""Labels that are stored together: how many, and within how many seconds."""


class DistillationBuffer(OverRing):
    """Rows of a student's experience with a teacher's labels, in rounds, for DAgger and teacher-student training.

    Args:
        capacity: rows.
        retention: which rows are drawn. "all": every round, aggregated; a full buffer refuses more.
            "last": those of the last `keep_rounds` rounds, which must fit. "fifo": the newest `capacity` rows.
        keep_rounds: for "last".
        obs_shape: of one student observation, or name -> shape: distinguishes a single step from a batch in `add`.
            Without it the first `add` must be a batch.
        beta: probability that the teacher acts: a number, or a function of the round (`LinearBeta`, `ExponentialBeta`).
        path: directory; None for RAM. A path that already holds such a buffer is opened, with its rounds.
        to: "numpy" or "torch": the type of the batches.
        device: where tensors go.
        pin_memory: whether they go there through page-locked memory.
        seed: of the generator that draws, shuffles and mixes. Used when the buffer is made.
        durability: "process" or "power", as for `ReplayBuffer`.
        sync_every_s: seconds between background syncs, as for `ReplayBuffer`.
        disk: as for `ReplayBuffer`.

    Raises:
        InputError: an argument is wrong, or contradicts a value on disk.
        LockedError: another handle is writing to it.

    Cost: an `add` is one commit. Memory: grows as the rows fill, in RAM. Labels take three times their size once they
        are given again: what they were stored with, and two copies of the newest.

    Processes and threads: one writer; `DistillationBuffer.open(path)` is a live reader, in any process. A pickled
    buffer with a path becomes a reader.

    Source: Ross, Gordon and Bagnell, "A Reduction of Imitation Learning and Structured Prediction to No-Regret
    Online Learning", AISTATS 2011.

    Example:
        >>> from ringmap.data import DistillationBuffer
        >>> buf = DistillationBuffer(1000, seed=0)
        >>> _ = buf.add(np.zeros((8, 4), np.float32), np.arange(8))
        >>> observations, expert_actions = buf.sample(32)
        >>> observations.shape, expert_actions.shape
        ((32, 4), (32,))
    """

    _ring: StepRing
    kind = DISTILLATION
    not_recorded = "it stores what a teacher would have done, which no environment says; call its add"

    def __init__(
        self,
        capacity: int,
        *,
        retention: str = "all",
        keep_rounds: int | None = None,
        obs_shape: Any = None,
        beta: float | Callable[[int], float] | None = None,
        path: str | os.PathLike[str] | None = None,
        to: str | None = None,
        device: Any = None,
        pin_memory: bool = False,
        seed: int | None = None,
        durability: str = "process",
        sync_every_s: float = 30.0,
        disk: Disk | None = None,
    ) -> None:
        self._choose(retention, keep_rounds, obs_shape, beta, to, device, pin_memory, seed)
        capacity = positive(_WHERE, "capacity", capacity)
        options: dict[str, Any] = {"durability": durability, "sync_every_s": sync_every_s}
        options |= {"kind": DISTILLATION, "mutable": MUTABLE}
        self._ring = StepRing(capacity, path=path, where=_WHERE, disk=disk, **options)
        try:
            saved = self._ring.buffer.notes.get("distillation")
            if saved is not None:
                self._rounds.state = saved
        except BaseException:
            self._ring.close()
            raise

    def _choose(
        self,
        retention: str = "all",
        keep_rounds: int | None = None,
        obs_shape: Any = None,
        beta: Any = None,
        to: str | None = None,
        device: Any = None,
        pin_memory: bool = False,
        seed: int | None = None,
    ) -> None:
        self._retention = Retention(retention, keep_rounds, _WHERE)
        self._out = Emit(to, device, bool(pin_memory))
        self._out.check(_WHERE, ("numpy", "torch"))
        self._rounds = Rounds(beta, seed, _WHERE)
        self._obs_shape = obs_shape

    @classmethod
    def open(cls, path: str | os.PathLike[str], mode: str = "r", **options: Any) -> DistillationBuffer:
        """Open the buffer at `path`.

        Args:
            path: its directory.
            mode: "r" for a live reader; "r+" for the writer.
            options: as for the constructor, without `capacity` and `path`. `seed` is for a reader. Without `retention`
                and `keep_rounds` the values of the last write apply.

        Raises:
            NotFoundError, UnknownFormatError, CorruptError, LockedError: as `ReplayBuffer.open`.
        """
        where = f"{_WHERE}.open"
        if mode not in ("r", "r+"):
            raise InputError(f"{where}: mode must be 'r' (read) or 'r+' (write), got {mode!r}")
        if mode == "r+":
            capacity = StepRing.manifest_at(path, where, options.get("disk"), DISTILLATION).capacity
            buffer = cls(capacity, path=path, **options)
        else:
            buffer, disk = cls.__new__(cls), options.pop("disk", None)
            buffer._choose(**options)
            buffer._ring = StepRing.open(path, disk=disk, kind=DISTILLATION, where=where)
        saved = buffer._ring.notes().get("distillation", {})
        if "retention" in saved and not {"retention", "keep_rounds"} & set(options):
            buffer._retention = Retention(saved["retention"], saved["keep_rounds"], _WHERE)
        return buffer

    def _notes(self) -> dict[str, Any]:
        kept = {"retention": self.retention, "keep_rounds": self.keep_rounds}
        return {"distillation": {**self._rounds.state, **kept}}

    @property
    def retention(self) -> str:
        """Which rows are drawn."""
        return self._retention.kind

    @property
    def keep_rounds(self) -> int | None:
        """Number of rounds drawn with retention="last"."""
        return self._retention.keep_rounds

    # -- rounds ------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The current round; rounds count from 0. For a reader, the round of the newest row."""
        return max(0, self._rounds.number if self._writes else self._round_of_newest())

    def _round_of_newest(self) -> int:
        """Return the round of the newest row, -1 if there is none."""

        def read() -> tuple[Array, int]:
            newest = np.array([self._ring.added - 1])
            if not len(self._ring):
                return newest[:0], -1
            return newest, int(self._ring.take("round", newest)[0])

        return self._ring.read_whole(read)

    @property
    def policy_version(self) -> int:
        """The version for rows that are added without one."""
        return self._rounds.version

    @property
    def beta(self) -> float:
        """Probability that the teacher acts in this round; 0 without a schedule."""
        return self._rounds.beta(self.round)

    def start_round(self, policy_version: int | None = None) -> int:
        """Begin the next round, the first time round 0, and return its number. The round is then durable on disk.

        Args:
            policy_version: of the student that acts now; None: the number of the round.
        """
        ring = self._writer("start_round")
        rounds = self._rounds
        asked = None if policy_version is None else version_of(policy_version, f"{_WHERE}.start_round")
        before = rounds.number, rounds.version
        rounds.number += 1
        rounds.version = rounds.number if asked is None else asked
        try:
            ring.buffer.flush(notes=self._notes())
        except BaseException:
            rounds.number, rounds.version = before
            raise
        return rounds.number

    def mix(self, teacher_actions: Any, student_actions: Any) -> Any:
        """Return the actions to execute: for each row the teacher's with probability `beta`, else the student's.

        Args:
            teacher_actions: `(N, ...)`, array or tensor; for a single actor also one number.
            student_actions: of the same shape; the result has their type and dtype.

        Raises:
            InputError: shapes differ, or the student's dtype can't hold an action of the teacher.
        """
        return mixed(teacher_actions, student_actions, self.beta, self._rounds.draws.rng, f"{_WHERE}.mix")

    # -- writing -----------------------------------------------------------------------------

    def add(
        self,
        student_observations: Any,
        teacher_actions: Any,
        teacher_observations: Any = None,
        executed_actions: Any = None,
        teacher_log_std: Any = None,
        teacher_logits: Any = None,
        actor_id: Any = None,
        dones: Any = None,
        hidden: Any = None,
        policy_version: int | None = None,
    ) -> Array:
        """Store a step of one or of N actors in one commit, and return the ids of the rows, int64 `(N,)`.

        Args:
            student_observations: `(N, ...)`, array or tensor, or a nested mapping of such.
            teacher_actions: `(N, ...)`, the actions the teacher would have taken.
            teacher_observations: the teacher's observations, if they differ.
            executed_actions: the actions taken.
            teacher_log_std: of a Gaussian teacher with the mean `teacher_actions`.
            teacher_logits: of a categorical teacher.
            actor_id: `(N,)`, the actor of each row; by default row i belongs to actor i. An actor's rows,
                in order, up to one that is done, are an episode.
            dones: `(N,)`, whether an episode ended with this row.
            hidden: the student's recurrent state before this step, for sequences.
            policy_version: of the student that acted; None: that of the round.

        Raises:
            InputError: a column that the first call did not have or that is missing now, unequal lengths, values that
                do not fit; more rows than `retention` leaves room for. Nothing was changed.
            ReadOnlyError: this handle only reads.
        """
        where = f"{_WHERE}.add"
        ring = self._writer("add")
        given = {
            "student_observations": student_observations,
            "teacher_actions": teacher_actions,
            "teacher_log_std": teacher_log_std,
            "teacher_logits": teacher_logits,
            "teacher_observations": teacher_observations,
            "executed_actions": executed_actions,
            "hidden": hidden,
            "actor_id": actor_id,
            "dones": dones,
        }
        version = self._rounds.version if policy_version is None else version_of(policy_version, where)
        arrays = row_columns(given, ring.schema, self._obs_shape, self.round, version, where)
        self._retention.check_room(ring, self._first(), len(arrays["round"]), where)
        state = {**self._notes()["distillation"], "round": self.round}
        ids = ring.append(arrays, {"distillation": state}, where)
        self._rounds.number = self.round  # rows before any start_round() belong to round 0
        return ids

    def relabel(self, which: Any, teacher_fn: TeacherFn) -> int:
        """Let a teacher label stored rows again, and return the number of relabelled rows.

        All later reads return the new labels, and `label_round` is the present round. A row has all of its new labels
        or none, after a kill, too; which rows of an episode have them, `label_round` says. Labels are stored about a
        second after the teacher gave them, or when 16,384 are there. An episode whose labels do not fit raises and
        keeps its old labels; the episodes before it are relabelled.

        Args:
            which: ids of rows; or some of `episodes()`; or None for all. Ids of evicted rows are left out.
            teacher_fn: takes a batch, in the form of `batch`, with the rows of one episode; returns their
                `teacher_actions`, `(n, ...)`. If rows have `teacher_log_std` or `teacher_logits` as well: a mapping of
                all of them.

        Raises:
            InputError: labels of the wrong columns, shape or dtype.

        Cost: reads the rows of each episode, and stores labels as `ReplayBuffer.update` does.
        """
        where = f"{_WHERE}.relabel"
        ring = self._writer("relabel")
        groups = self._grouped(which, where)
        schema = ring.schema
        if schema is None:
            return 0
        labelled = _Labelled(ring, where)
        try:
            for ids in groups:
                columns, held = self._read(ids)
                if not held.all():
                    ids, columns = ids[held], {n: v[held] for n, v in columns.items()}
                if len(ids):
                    labels = fitted_labels(teacher_fn(self._as_asked(columns)), schema, len(ids), where)
                    labelled.add({"ids": ids, LABEL_ROUND: np.full(len(ids), self.round), **labels})
        finally:
            labelled.store()
        return labelled.count

    def _grouped(self, which: Any, where: str) -> list[Array]:
        """Return ids in the window, by episode."""
        if which is None:
            return self.episodes()
        if isinstance(which, list | tuple) and which and np.ndim(which[0]) == 1:
            groups = [np.asarray(part) for part in which]
        else:
            groups = [np.asarray(which).reshape(-1)]
        if any(len(part) and part.dtype.kind not in "iu" for part in groups):
            raise InputError(f"{where}: ids are integers, got {groups[0].dtype}")
        ids = np.unique(np.concatenate([part.astype(np.int64) for part in groups]))
        found, bounds = self._episodes()
        number = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        kept = np.isin(found, ids)
        return np.split(found[kept], np.flatnonzero(np.diff(number[kept])) + 1) if kept.any() else []

    # -- reading -----------------------------------------------------------------------------

    _instead = "draw batches with batch(batch_size) or sample(batch_size), go through all with epochs(...)"

    def __len__(self) -> int:
        """Return the number of rows that can be drawn."""
        if self.retention != "last":
            return len(self._ring)
        first = (
            self._first()
        )  # before the newest round: a reader may refresh between the two, and then finds newer rows
        return self._ring.added - first

    @property
    def num_episodes(self) -> int:
        """Return the number of episodes of the rows, including cut and unfinished ones. O(rows log rows)."""
        return len(self._episodes()[1]) - 1

    def episodes(self) -> list[Array]:
        """Return the ids of the rows of each episode, in order of first row. O(rows log rows)."""
        ids, bounds = self._episodes()
        return np.split(ids, bounds[1:-1]) if len(ids) else []

    def batch(self, batch_size: int) -> Columns:
        """Draw rows uniformly, with replacement.

        Returns:
            The stored columns, with the newest labels; `actor_id, dones, round, policy_version`; `ids`; and
            `label_round`, the round of the row's label. Each `(batch_size, ...)`.

        Raises:
            InputError: the size is not positive.
            NoClipsError: nothing is stored.
        """
        batch_size = positive(f"{_WHERE}.batch", "batch_size", batch_size)
        self._look()
        rng = self._rounds.draws.rng

        def draw(count: int) -> Array:
            return self._ring.draw(count, rng, since=self._first())

        ids = draw(operator.index(batch_size))
        columns, held = self._read(ids)  # all columns in one look: a row has all of its labels
        if not held.all():  # evicted meanwhile: redrawn

            def gather(which: Array) -> Array:
                again, good = self._read(ids[which])
                for name, values in again.items():
                    columns[name][which] = values
                return good

            source, where = self._ring.engine.source, f"{_WHERE}.batch"
            redraw_lost(source, ids, ~held, gather, lambda which: draw(len(which)), where, "raise the capacity")
        return self._as_asked(columns)

    def mix_source(self, items: Mapping[str, Any]) -> BufferSource:
        """Return what draws rows, with all columns of `batch`, for a mix."""
        return BufferSource(self, lambda size: Batch(self.batch(size)), (1, 1))

    def sample(self, batch_size: int) -> tuple[Any, Any]:
        """Draw rows as `batch` does, and return only `(student observations, teacher actions)`."""
        batch = self.batch(batch_size)
        return batch["student_observations"], batch["teacher_actions"]

    def rows(self, ids: Any) -> Columns:
        """Return the rows with these ids, in this order and in the form of `batch`.

        Raises:
            InputError: one of them was evicted, or never existed.
        """
        self.refresh()
        asked = np.asarray(ids, np.int64).reshape(-1)
        known = (asked >= self._first()) & self._ring.holds(asked)
        columns, held = self._read(asked) if known.all() else ({}, known)
        if not held.all():
            raise InputError(f"{_WHERE}.rows: row {asked[~held][0]} is not stored, or not any more")
        return self._as_asked(columns)

    def epochs(
        self,
        batch_size: int,
        num_epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Iterator[Columns]:
        """Yield every row that exists when its epoch begins exactly once, in batches in the form of `batch`.

        Rows that are evicted before their turn are left out.

        Args:
            batch_size: rows in a batch; the last one of an epoch may be smaller.
            num_epochs: number of epochs.
            shuffle: a new order for each epoch; False: oldest first.
            drop_last: leave out a last batch that is smaller.

        Raises:
            InputError: a number is not positive.
            NoClipsError: nothing is stored.
        """
        for name, value in (("batch_size", batch_size), ("num_epochs", num_epochs)):
            positive(f"{_WHERE}.epochs", name, value)

        def each() -> Iterator[Columns]:
            for _ in range(num_epochs):
                self._look()
                ids = self._ids()
                order = self._rounds.draws.rng.permutation(ids) if shuffle else ids
                yield from map(self._as_asked, epoch(self._read, order, batch_size, drop_last))

        return each()

    def sequences(
        self,
        length: int,
        batch_size: int | None = None,
        num_epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Iterator[Columns]:
        """Yield every episode in pieces of `length` rows, time-major: `(length, B, ...)`.

        Adds to the columns of `batch`: `mask` `(length, B)`, False where a piece is shorter and rows are zeros;
        `is_first` `(length, B)`, True at the first stored row of an episode. `hidden` is `(B, ...)`: the state at the
        start of each piece. A piece with a row that was evicted before its turn is left out.

        Args:
            length: T, rows of a piece.
            batch_size: B, pieces; None: all at once.
            num_epochs: number of epochs.
            shuffle: a new order of the pieces for each epoch; False: in the order of episodes.
            drop_last: leave out a last batch with fewer pieces.

        Raises:
            InputError: a number is not positive.
            NoClipsError: nothing is stored.
        """
        for name, value in (("length", length), ("batch_size", batch_size), ("num_epochs", num_epochs)):
            if value is not None:
                positive(f"{_WHERE}.sequences", name, value)

        def each() -> Iterator[Columns]:
            for _ in range(num_epochs):
                self._look()
                ids, bounds = self._episodes()
                rng = self._rounds.draws.rng if shuffle else None
                batches = sequences(self._read, ids, bounds, length, batch_size, drop_last, rng)
                yield from map(self._as_asked, batches)

        return each()

    # -- rows --------------------------------------------------------------------------------

    def _read(self, ids: Array) -> tuple[dict[str, Array], Array]:
        """Return rows by id, flat, and `ids`; and which of them are still stored: the others are meaningless."""
        columns, held = self._ring.read(ids)
        columns["ids"] = ids.copy()
        return columns, held

    def _first(self) -> int:
        """Return the oldest id that retention keeps, one past the newest if there is none."""
        return self._retention.first(self._ring, self.round if self._writes else None)

    def _ids(self) -> Array:
        ids = self._ring.ids()
        return ids if self.retention != "last" else ids[ids >= self._first()]

    def _look(self) -> None:
        """Move to the newest state; raise NoClipsError if no row can be drawn."""
        self.refresh()
        if not len(self):
            raise NoClipsError(f"{_WHERE}: nothing is stored to draw from; add rows first")

    def _episodes(self) -> tuple[Array, Array]:
        """Return the ids of all rows in the order of their episodes, and the start of each episode in it."""
        self.refresh()
        ids, found = self._ring.read_whole(self._marks)
        order, bounds = episodes_of(*found)
        return ids[order], bounds

    def _marks(self) -> tuple[Array, tuple[Array, list[Array]]]:
        """Return all ids in the window, for the look, and these with their actors and endings."""
        ids = self._ids()
        names = ("actor_id", "dones")
        found = [self._ring.take(name, ids) if len(ids) else ids for name in names]
        return ids, (ids, found)

    def _as_asked(self, columns: dict[str, Any]) -> Columns:
        out = self._out
        made = out.arrays(columns) if out.plain == "numpy" else out.tensors(columns)
        return nested(made)

    # -- roles, state ------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of its ring."""
        return self._ring.engine

    @property
    def _writes(self) -> bool:
        return self._ring.buffer.mode == "r+"

    def _writer(self, method: str) -> StepRing:
        if not self._writes:
            raise ReadOnlyError(
                f"{_WHERE}.{method}: this handle of {self._ring.path} only reads; write in the process that opened it "
                "with mode='r+'"
            )
        return self._ring

    def refresh(self) -> None:
        """Move a reader to the newest state. Methods that draw do this themselves; a writer is always up to date."""
        if not self._writes:
            self._ring.buffer.refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return the round, the policy version and the generator, to store with a checkpoint."""
        return self._rounds.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned, over the same rows; if the rows are of later rounds, from
        the newest."""
        check_whole(f"{_WHERE}.load_state_dict", state, self._rounds.state)
        newest = self._round_of_newest()
        self._rounds.state = dict(state)
        self._rounds.number = max(self._rounds.number, newest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a copy to a new directory, for `open`: whole, or not at all.

        Raises:
            ExistsError: the directory exists.
        """
        self._writer("save").save(path, self._notes(), f"{_WHERE}.save")

    def check(self) -> list[Any]:
        """Return the faults of rows and labels, each finding with its file; empty when sound."""
        return self._ring.buffer.check()

    def __repr__(self) -> str:
        path = None if self._ring.path is None else str(self._ring.path)
        if self._ring.closed:
            return f"{_WHERE}(closed, path={path!r})"
        place = "" if path is None else f", path={path!r}"
        return (
            f"{_WHERE}(rows={len(self)}/{self._ring.capacity}, round={self.round}, "
            f"retention={self._retention!r}{place})"
        )


class _Labelled:
    """New labels that are stored together: rows of many actors lie side by side, those of one episode do not."""

    def __init__(self, ring: StepRing, where: str) -> None:
        self.count = 0
        """How many rows have theirs."""
        self._ring, self._where = ring, where
        self._parts: list[dict[str, Array]] = []
        self._waiting, self._since = 0, time.monotonic()

    def add(self, labels: dict[str, Array]) -> None:
        """Add labels of rows by `ids`, and store all if they are many, or if a slow teacher gave the first long ago."""
        self._parts.append(labels)
        self._waiting += len(labels["ids"])
        if self._waiting >= _AT_ONCE or time.monotonic() - self._since > _AT_ONCE_S:
            self.store()

    def store(self) -> None:
        """Store what was added, for rows that are still there."""
        parts, self._parts, self._waiting = self._parts, [], 0
        if parts:
            labels = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            order = np.argsort(labels["ids"])
            order = order[self._ring.holds(labels["ids"][order])]
            labels = {name: values[order] for name, values in labels.items()}
            self._ring.update(labels.pop("ids"), labels, self._where)
            self.count += len(order)
        self._since = time.monotonic()


Read = Callable[[Array], tuple[Columns, Array]]
"""Returns rows by id, and which of them are still stored."""

_LABELS = ("teacher_actions", "teacher_log_std", "teacher_logits")
LABEL_ROUND = "label_round"
MUTABLE = (*_LABELS, LABEL_ROUND)
"""The columns that a relabelling replaces."""


def row_columns(
    given: Mapping[str, Any], schema: Schema | None, obs_shape: Any, round: int, version: int, where: str
) -> dict[str, Array]:
    """Return the input of `add`, by the names of its arguments, as columns."""
    rows, _ = flat({name: value for name, value in given.items() if value is not None}, where)
    columns: dict[str, Any] = {n: as_array(v, f"{where}: {n}", "row") for n, v in rows.items()}
    if _is_single(columns, schema, obs_shape, where):
        columns = {name: v[None] for name, v in columns.items()}
    for name in ("actor_id", "dones"):
        if name in columns:
            columns[name] = _one_a_row(name, columns[name], where)
    arrays = as_columns(columns, where)
    count = len(next(iter(arrays.values())))
    actors = arrays.setdefault("actor_id", np.arange(count))
    if actors.dtype.kind not in "iu":
        raise InputError(f"{where}: actor_id must be integers, got {actors.dtype}")
    dones = arrays.get("dones", np.zeros(count))
    if not np.isin(dones, (0, 1)).all():
        raise InputError(f"{where}: dones must be 0 or 1, got {dones}")
    for name in arrays:
        if root(name) in _LABELS and arrays[name].dtype.kind not in "biufc":
            raise InputError(f"{where}: {name} must be numbers, got {arrays[name].dtype}; store indices of texts")
    arrays |= {
        "actor_id": cast(actors, np.dtype(np.int64), "safe", f"{where}: actor_id"),
        "dones": dones != 0,
        "round": np.full(count, round),
        "policy_version": np.full(count, version),
        LABEL_ROUND: np.full(count, round),
    }
    if schema is not None and arrays.keys() != set(schema.names):
        _without_defaults(schema).fit(arrays, "safe", where)  # raises
    return arrays


def fitted_labels(given: Any, schema: Schema, count: int, where: str) -> dict[str, Array]:
    """Return a teacher's labels for `count` rows, its `teacher_actions` or a mapping of all, as columns."""
    if not isinstance(given, Mapping) and not is_tensordict(given):
        given = {"teacher_actions": given}
    labels, _ = flat(given, where)
    arrays = as_columns(labels, where)
    if arrays and len(next(iter(arrays.values()))) != count:
        raise InputError(f"{where}: {len(next(iter(arrays.values())))} labels for {count} rows; expected one for each")
    own = Schema(tuple(spec for spec in schema.columns if root(spec.name) in _LABELS))
    return _without_defaults(own).fit(arrays, "safe", where)


def _without_defaults(schema: Schema) -> Schema:
    """Return the columns as ones that all must be given: mutable ones that are missing would be stored as zeros."""
    return Schema(tuple(replace(spec, mutable=False) for spec in schema.columns))


def _is_single(columns: Mapping[str, Any], schema: Schema | None, obs_shape: Any, where: str) -> bool:
    """Tell whether these are the values of one step, by the shape of an observation."""
    name = next(n for n in columns if root(n) == "student_observations")
    shape = None
    if schema is not None:
        shape = next((spec.shape for spec in schema.columns if spec.name == name), None)
    elif obs_shape is not None:
        found = flat({"student_observations": obs_shape}, where)[0].get(name)
        shape = None if found is None else tuple(np.atleast_1d(found).tolist())
    if shape is not None:
        return np.ndim(columns[name]) == len(shape)
    return np.ndim(columns["teacher_actions"]) == 0 if "teacher_actions" in columns else False


def _one_a_row(name: str, values: Any, where: str) -> Array:
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise InputError(f"{where}: {name} has shape {array.shape}, expected (N,)")
    return array


def episodes_of(actors: Array, dones: Array) -> tuple[Array, Array]:
    """Return rows, in order of being added, in the order of their episodes, and the start of each episode in it; those
    are in order of first row. O(n log n).

    Example:
        >>> order, bounds = episodes_of(np.array([0, 1, 0, 1, 0]), np.array([0, 0, 1, 0, 0], bool))
        >>> [part.tolist() for part in np.split(order, bounds[1:-1])]
        [[0, 2], [1, 3], [4]]
    """
    count = len(actors)
    if not count:
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    by_actor = np.argsort(actors, kind="stable")
    last = np.ones(count, bool)
    last[:-1] = actors[by_actor][1:] != actors[by_actor][:-1]
    last |= dones[by_actor]
    ends = np.flatnonzero(last) + 1
    starts = np.concatenate([[0], ends[:-1]])
    rank = np.argsort(by_actor[starts], kind="stable")
    sizes = (ends - starts)[rank]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    within = np.arange(count) - np.repeat(bounds[:-1], sizes)
    return by_actor[np.repeat(starts[rank], sizes) + within], bounds


def pieces_of(bounds: Array, length: int) -> tuple[Array, Array]:
    """Return the start of each piece of at most `length` rows in the order of episodes, and its number of rows.

    Example:
        >>> [part.tolist() for part in pieces_of(np.array([0, 5, 7]), 3)]
        [[0, 3, 5], [3, 2, 2]]
    """
    sizes = np.diff(bounds)
    counts = -(-sizes // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(bounds[:-1], counts) + number * length
    return starts, np.minimum(length, np.repeat(bounds[1:], counts) - starts)


def epoch(read: Read, order: Array, size: int, drop_last: bool) -> Iterator[Columns]:
    """Yield rows in this order, in batches of `size`, the last one smaller or dropped."""
    for at in range(0, len(order) - (size - 1 if drop_last else 0), size):
        columns, held = read(order[at : at + size])
        if held.all():
            yield columns
        elif held.any():
            yield {name: values[held] for name, values in columns.items()}


def sequences(
    read: Read,
    ids: Array,
    bounds: Array,
    length: int,
    size: int | None,
    drop_last: bool,
    rng: np.random.Generator | None,
) -> Iterator[Columns]:
    """Yield episodes, whose rows are `ids` and which begin at `bounds`, in pieces of `length` rows, `(length, B, ...)`,
    with `mask` and `is_first`; B is `size`, None: all at once; `rng` shuffles the pieces."""
    starts, sizes = pieces_of(bounds, length)
    first = np.isin(starts, bounds)
    count = len(starts)
    order = np.arange(count) if rng is None else rng.permutation(count)
    size = count if size is None else size
    for at in range(0, count - (size - 1 if drop_last else 0), size):
        chosen = order[at : at + size]
        made = _piece(read, ids, starts[chosen], sizes[chosen], first[chosen], length)
        if made is not None:
            yield made


def _piece(read: Read, ids: Array, starts: Array, sizes: Array, first: Array, length: int) -> Columns | None:
    """Return one batch of pieces; None if all of them lost a row."""
    steps = np.arange(length)[:, None]
    mask = steps < sizes
    taken = ids[np.where(mask, starts + steps, starts)]
    columns, held = read(taken.reshape(-1))
    whole = held.reshape(taken.shape).all(axis=0)
    if not whole.any():
        return None
    mask, first = mask[:, whole], first[whole]
    made: Columns = {}
    for name, values in columns.items():
        block = values.reshape(*taken.shape, *values.shape[1:])[:, whole]
        if root(name) == "hidden":
            made[name] = block[0]
        else:
            block[~mask] = np.zeros((), block.dtype)
            made[name] = block
    made["mask"], made["is_first"] = mask, first & (steps == 0)
    return made


@dataclass(frozen=True, slots=True)
class LinearBeta:
    """From `start` in round 0 to `end` in round `rounds`, and `end` after that.

    Example:
        >>> beta = LinearBeta(rounds=4)
        >>> [beta(round) for round in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    rounds: int
    start: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        positive("LinearBeta", "rounds", self.rounds)
        for name in ("start", "end"):
            fraction("LinearBeta", name, getattr(self, name))

    def __call__(self, round: int) -> float:
        """Return the probability that the teacher acts in this round."""
        share = min(max(round / self.rounds, 0.0), 1.0)
        return float(self.start + (self.end - self.start) * share)


@dataclass(frozen=True, slots=True)
class ExponentialBeta:
    """`decay ** round`: 1 in round 0. A decay of 0: the teacher acts in round 0 only.

    Example:
        >>> beta = ExponentialBeta(0.5)
        >>> [beta(round) for round in range(4)]
        [1.0, 0.5, 0.25, 0.125]
    """

    decay: float

    def __post_init__(self) -> None:
        fraction("ExponentialBeta", "decay", self.decay)

    def __call__(self, round: int) -> float:
        """Return the probability that the teacher acts in this round."""
        return float(self.decay ** max(round, 0))


class Rounds:
    """The round and the policy version of a writer, the probability that the teacher acts, and its generator."""

    def __init__(self, beta: float | Callable[[int], float] | None, seed: int | None, where: str) -> None:
        if beta is not None and not callable(beta):
            fraction(where, "beta, if it is no function of the round,", beta)
        self._beta = beta
        self.draws = WorkerGenerator(seed, where)
        self.number = -1
        """-1 before the first row or `start_round`."""
        self.version = 0

    def beta(self, round: int) -> float:
        """Return the probability that the teacher acts in a round; 0 without a schedule."""
        if self._beta is None:
            return 0.0
        return float(self._beta(round) if callable(self._beta) else self._beta)

    @property
    def state(self) -> dict[str, Any]:
        """The whole state, as JSON values; may be assigned."""
        return {"round": self.number, "version": self.version, "rng": self.draws.state}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        where = "DistillationBuffer.load_state_dict"
        number, version = count(where, "round", state["round"], -1), version_of(state["version"], where)
        self.draws.state = state["rng"]
        self.number, self.version = number, version


class Retention:
    """A rule: `kind` is "all", "last" or "fifo"; `keep_rounds` is for "last".

    Raises:
        InputError: the rule does not exist.
    """

    def __init__(self, kind: str, keep_rounds: int | None, where: str) -> None:
        if kind not in ("all", "last", "fifo"):
            raise InputError(f"{where}: retention must be 'all', 'last' or 'fifo', got {kind!r}")
        if (kind == "last") != (keep_rounds is not None):
            raise InputError(f"{where}: keep_rounds goes with retention='last', and only with it")
        if keep_rounds is not None:
            keep_rounds = positive(where, "keep_rounds", keep_rounds)
        self.kind, self.keep_rounds = kind, keep_rounds
        self._known: tuple[int | None, int] = None, 0

    def first(self, ring: StepRing, round: int | None) -> int:
        """Return the oldest id that is kept, one past the newest if there is none. O(log rows) once per round; for a
        reader each time.

        `round`: the current one, if only this handle adds rows, so that the result stays valid; None: that of the
        newest row.
        """
        if self.keep_rounds is None:
            return ring.oldest
        kept = self.keep_rounds
        if round is None:
            return ring.read_whole(lambda: _first_of(ring, kept))
        oldest = round - kept + 1
        known = self._known  # read once: another thread may change the round
        if known[0] != oldest:
            known = self._known = oldest, ring.read_whole(lambda: _first_of(ring, kept, round))
        return known[1]

    def check_room(self, ring: StepRing, first: int, count: int, where: str) -> None:
        """Raise InputError if `count` more rows would evict kept rows, of which `first` is the oldest."""
        kept = ring.added - first
        if self.kind == "fifo" or kept + count <= ring.capacity:
            return
        what = "of all rounds" if self.keep_rounds is None else f"of {self.keep_rounds} rounds"
        raise InputError(
            f"{where}: {count} more rows do not fit: {kept} rows {what} are kept, and capacity={ring.capacity}; "
            "raise it, keep fewer rounds, or let the oldest rows go with retention='fifo'"
        )

    def __repr__(self) -> str:
        kept: Any = "" if self.keep_rounds is None else f" {self.keep_rounds}"
        return f"{self.kind!r}{kept}"


def _first_of(ring: StepRing, keep_rounds: int, round: int | None = None) -> tuple[Array, int]:
    """Return the examined ids, and the oldest id of the last rounds; `round`: the last one, None: the newest row's."""
    low, high = 0, len(ring)
    looked = [ring.added - 1] if high else []
    if round is None:
        round = max(0, int(ring.take("round", np.array(looked))[0])) if high else 0
    while low < high:
        middle = (low + high) // 2
        looked.append(ring.id_at(middle))
        early = int(ring.take("round", np.array(looked[-1:]))[0]) <= round - keep_rounds
        low, high = (middle + 1, high) if early else (low, middle)
    first = ring.id_at(low) if low < len(ring) else ring.added
    return np.array(looked, np.int64), first


def version_of(given: Any, where: str) -> int:
    """Return a policy version; raise InputError if it is not an integer."""
    try:
        return operator.index(given)
    except TypeError:
        raise InputError(f"{where}: policy_version must be an integer, got {given!r}") from None


def mixed(teacher: Any, student: Any, beta: float, rng: np.random.Generator, where: str) -> Any:
    """Return each row of the teacher's actions with probability `beta`, else of the student's, in the type of these."""
    shape = tuple(np.shape(student))
    if tuple(np.shape(teacher)) != shape:
        raise InputError(
            f"{where}: teacher_actions have shape {tuple(np.shape(teacher))}, student_actions {shape}; expected the "
            "same"
        )
    count = shape[0] if shape else 1
    acts = (rng.random(count) < beta).reshape(shape[:1] + (1,) * (len(shape) - 1))
    if hasattr(teacher, "detach"):
        teacher = teacher.detach().cpu().numpy()
    theirs = np.asarray(teacher)
    kind = _dtype_of(student)
    if theirs.dtype != kind:
        theirs = cast(np.atleast_1d(theirs), kind, "safe", where).reshape(shape)
    if not hasattr(student, "detach"):
        return np.where(acts, theirs, np.asarray(student))
    import torch

    return torch.where(
        torch.from_numpy(acts).to(student.device), torch.as_tensor(theirs, device=student.device), student
    )


def _dtype_of(student: Any) -> np.dtype[Any]:
    if hasattr(student, "detach"):
        return student.detach().new_empty(0).cpu().numpy().dtype  # type: ignore[no-any-return]
    return np.asarray(student).dtype
