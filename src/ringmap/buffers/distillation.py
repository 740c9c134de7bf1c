"""A buffer for learning from a teacher: what the student saw, and what the teacher would have done.

    DIR/rows     [ round 0 | round 1 | round 2 ]      a ring of rows, one commit per add
    DIR/labels   [ ep 3 | ep 5 ]                      later labels of some, one commit per episode
                        |
    epochs, sequences, batch, sample   <- rows of the window, each with its newest label

Invariants: a row knows its round, its policy version and its actor for life; what is drawn lies in the window
that `retention` leaves; an episode has the labels of one relabelling or of none.
Not here: the ring (steps.py), the log of labels (labels.py), which rows are an episode (lanes.py), beta (beta.py).
"""

from __future__ import annotations

import operator
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ringmap.buffers.handout import HandOut
from ringmap.buffers.labels import LABELS_PER_ROW, LabelLog
from ringmap.buffers.lanes import episodes_of, pieces_of
from ringmap.buffers.nested import flat, is_tensordict, nested, root
from ringmap.buffers.options import positive
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.steps import StepRing, numpy_rows, whole
from ringmap.errors import InputError, LappedError, NoClipsError, ReadOnlyError
from ringmap.storage.birth import examine
from ringmap.storage.schema import ColumnSpec, Schema, as_columns

__all__ = ["DistillationBuffer"]

Array = np.ndarray[Any, np.dtype[Any]]
Batch = dict[str, Any]
TeacherFn = Callable[[Batch], Any]

_WHERE = "DistillationBuffer"
_TRIES = 10
LABELS = ("teacher_actions", "teacher_log_std", "teacher_logits")


class DistillationBuffer:
    """Rows of a student's experience with a teacher's labels, in rounds: DAgger, and teacher to student.

    Args:
        capacity: rows.
        retention: which rows are drawn. "all": every round, aggregated; a full buffer refuses more.
            "last": those of the last `keep_rounds` rounds, which must fit. "fifo": the newest `capacity`.
        keep_rounds: for "last".
        obs_shape: of one student observation, or name -> shape: tells a single step from a batch in `add`.
            Without it the first `add` is of a batch.
        beta: how often the teacher acts: a number, or a function of the round (`LinearBeta`, `ExponentialBeta`).
        path: directory; None for RAM. One that holds such a buffer is opened, with its rounds.
        to: "numpy" or "torch": what batches are made of.
        device: where tensors go.
        pin_memory: whether they go there through page-locked memory.
        seed: of the generator that draws, shuffles and mixes. Counts when the buffer is made.
        durability: "process" or "power", as for `ReplayBuffer`.
        sync_every_s: seconds between background syncs, as for `ReplayBuffer`.

    Raises:
        InputError: an argument is wrong, or contradicts what is on disk.
        LockedError: another handle is writing it.

    Cost: an `add` is one commit. Memory: as the rows fill, in RAM; eight to sixteen bytes per row once
        something is relabelled.

    Processes and threads: one writer; `DistillationBuffer.open(path)` is a live reader, in any process. A pickled
    buffer with a path wakes up as a reader.

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
    ) -> None:
        self._options: dict[str, Any] = {"durability": durability, "sync_every_s": sync_every_s}
        self._choose(retention, keep_rounds, obs_shape, beta, HandOut(to, device, bool(pin_memory)))
        positive(_WHERE, "capacity", capacity)
        rows = None if path is None else os.path.join(os.path.abspath(path), "rows")
        self._path = None if path is None else os.path.abspath(path)
        self._rng = np.random.default_rng(seed)
        self._round, self._version = -1, 0
        self._ring = StepRing(capacity, path=rows, where=_WHERE, **self._options)
        try:
            saved = self._ring.buffer.notes.get("distillation")
            if saved is not None:
                self._round, self._version = int(saved["round"]), int(saved["version"])
                self._rng.bit_generator.state = saved["rng"]
            self._log = self._found_log("r+")
        except BaseException:
            self._ring.close()
            raise

    def _choose(
        self, retention: str, keep_rounds: int | None, obs_shape: Any, beta: Any, out: HandOut
    ) -> None:
        if retention not in ("all", "last", "fifo"):
            raise InputError(
                f"{_WHERE}: retention must be 'all', 'last' or 'fifo', got {retention!r}"
            )
        if (retention == "last") != (keep_rounds is not None):
            raise InputError(f"{_WHERE}: keep_rounds goes with retention='last', and only with it")
        if keep_rounds is not None:
            positive(_WHERE, "keep_rounds", keep_rounds)
        out.check(_WHERE, ("numpy", "torch"))
        if beta is not None and not callable(beta) and not 0 <= beta <= 1:
            raise InputError(
                f"{_WHERE}: beta must be between 0 and 1 or a function of the round, got {beta!r}"
            )
        self.retention, self.keep_rounds = retention, keep_rounds
        self._kept: tuple[int | None, int] = None, 0
        self._obs_shape, self._beta, self._out = obs_shape, beta, out

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], mode: str = "r", **options: Any
    ) -> DistillationBuffer:
        """Open the buffer at `path`.

        Args:
            path: its directory.
            mode: "r" for a live reader; "r+" for the writer.
            options: as for the constructor, but for `capacity` and `path`. `seed` is that of a reader.

        Raises:
            NotFoundError, UnknownFormatError, CorruptError, LockedError: as `ReplayBuffer.open`.
        """
        rows = os.path.join(os.path.abspath(path), "rows")
        if mode == "r+":
            return cls(StepRing.capacity_at(rows, f"{_WHERE}.open"), path=path, **options)
        if mode != "r":
            raise InputError(
                f"{_WHERE}.open: mode must be 'r' (read) or 'r+' (write), got {mode!r}"
            )
        buffer = cls.__new__(cls)
        out = HandOut(*(options.pop(name, default) for name, default in _OUT))
        asked = {name: options.pop(name, default) for name, default in _HOW}
        buffer._rng = np.random.default_rng(options.pop("seed", None))
        if options:
            raise InputError(f"{_WHERE}.open: unknown options {sorted(options)} for a reader")
        buffer._choose(**asked, out=out)
        buffer._path = os.path.abspath(path)
        buffer._round = buffer._version = -1
        buffer._ring, buffer._log = StepRing.open(rows), None
        return buffer

    # -- rounds ------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The current round; rounds count from 0. Of a reader: that of the newest row."""
        if self._writes:
            return max(0, self._round)
        added = self._ring.added
        newest = np.array([added - 1])
        return int(self._ring.column("round", newest)[0]) if len(self._ring) else 0

    @property
    def policy_version(self) -> int:
        """The version that rows get that are added without one."""
        return self._version

    @property
    def beta(self) -> float:
        """How often the teacher acts in this round; 0 without a schedule."""
        if self._beta is None:
            return 0.0
        return float(self._beta(self.round) if callable(self._beta) else self._beta)

    def start_round(self, policy_version: int | None = None) -> int:
        """Begin the next round, the first time round 0, and return its number. It is on the disk itself then.

        Args:
            policy_version: of the student that plays now; None: the number of the round.
        """
        ring = self._writer("start_round")
        asked = (
            None if policy_version is None else _integer(f"{_WHERE}.start_round", policy_version)
        )
        before = self._round, self._version
        self._round += 1
        self._version = self._round if asked is None else asked
        try:
            ring.buffer.flush(notes={"distillation": self._state()})
        except BaseException:
            self._round, self._version = before
            raise
        return self._round

    def mix(self, teacher_actions: Any, student_actions: Any) -> Any:
        """Return what is to be executed: each row the teacher's action with probability `beta`, else the student's.

        Args:
            teacher_actions: `(N, ...)`, array or tensor.
            student_actions: likewise; the result is of its kind.
        """
        teacher = self._rng.random(len(student_actions)) < self.beta
        shape = (-1, *[1] * (np.ndim(student_actions) - 1))
        if hasattr(student_actions, "detach"):
            import torch

            chosen = torch.from_numpy(teacher).to(student_actions.device).reshape(shape)
            theirs = torch.as_tensor(teacher_actions, device=student_actions.device)
            return torch.where(chosen, theirs, student_actions)
        return np.where(teacher.reshape(shape), np.asarray(teacher_actions), student_actions)

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
        """Store a step of one or of N actors, in one commit, and return the ids of the rows, int64 `(N,)`.

        Args:
            student_observations: `(N, ...)`, array or tensor, or a nested mapping of such.
            teacher_actions: `(N, ...)`, what the teacher would have done.
            teacher_observations: what the teacher saw, if that is something else.
            executed_actions: what was done.
            teacher_log_std: of a Gaussian teacher whose mean `teacher_actions` is.
            teacher_logits: of a categorical teacher.
            actor_id: `(N,)`, which actor each row is of; by default row i is of actor i. An actor's rows,
                in order, up to one that is done, are an episode.
            dones: `(N,)`, whether an episode ended with this row.
            hidden: the student's recurrent state before this step, if sequences are to begin with it.
            policy_version: of the student that played; None: that of the round.

        Raises:
            InputError: what was not given at first or is missing now, unequal lengths, values that do not fit; more rows than
                `retention` leaves room for. Nothing was changed.
            ReadOnlyError: this handle only reads.
        """
        where = f"{_WHERE}.add"
        ring = self._writer("add")
        given = {
            "student_observations": student_observations, "teacher_actions": teacher_actions,
            "teacher_log_std": teacher_log_std, "teacher_logits": teacher_logits,
            "teacher_observations": teacher_observations, "executed_actions": executed_actions, "hidden": hidden,
            "actor_id": actor_id, "dones": dones,
        }  # fmt: skip
        asked = {name: v for name, v in given.items() if v is not None}
        rows, _ = flat(asked, where)
        columns: dict[str, Any] = numpy_rows(rows)
        if self._is_single(columns):
            columns = {name: np.asarray(v)[None] for name, v in columns.items()}
        arrays = as_columns(columns, where)
        count = len(next(iter(arrays.values())))
        actors = arrays.setdefault("actor_id", np.arange(count))
        if actors.dtype.kind not in "iu":
            raise InputError(f"{where}: actor_id must be integers, got {actors.dtype}")
        version = self._version if policy_version is None else _integer(where, policy_version)
        arrays |= {
            "actor_id": actors.astype(np.int64),
            "dones": arrays.get("dones", np.zeros(count)) != 0,
            "round": np.full(count, self.round),
            "policy_version": np.full(count, version),
            "stamp": np.full(count, secrets.randbits(64), np.uint64),
        }
        if self.retention != "fifo":
            kept = self._ring.added - self._first()
            if kept + count > self._ring.capacity:
                what = (
                    "of all rounds" if self.retention == "all" else f"of {self.keep_rounds} rounds"
                )
                raise InputError(
                    f"{where}: {kept} rows {what} and {count} more exceed capacity={self._ring.capacity}; raise it, "
                    "keep fewer rounds, or let the oldest rows go with retention='fifo'"
                )
        state = {**self._state(), "round": self.round}
        ids = ring.add(arrays, {"distillation": state}, where)
        self._round = self.round  # rows without a start_round() before them are of round 0
        return ids

    def _is_single(self, columns: Mapping[str, Any]) -> bool:
        """Tell whether these are the values of one step: known by the shape of an observation."""
        name = next(n for n in columns if root(n) == "student_observations")
        schema, shape = self._ring.schema, None
        if schema is not None:
            shape = next((spec.shape for spec in schema.columns if spec.name == name), None)
        elif self._obs_shape is not None:
            shapes, _ = flat({"student_observations": self._obs_shape}, _WHERE)
            found = shapes.get(name)
            shape = None if found is None else tuple(np.atleast_1d(found).tolist())
        if shape is not None:
            return np.ndim(columns[name]) == len(shape)
        return np.ndim(columns["teacher_actions"]) == 0 if "teacher_actions" in columns else False

    def relabel(self, which: Any, teacher_fn: TeacherFn) -> int:
        """Let a teacher label stored rows again, and return how many were.

        The new labels are there from now on wherever rows are read. Those of an episode are one commit: all are there
        or none, whenever the process is killed. An episode whose labels do not fit raises, and stays as it was; those
        before it are done.

        Args:
            which: ids of rows; or some of `episodes()`; or None for all. Ids of rows that are gone are left out.
            teacher_fn: takes a batch, as `batch` returns it, of the rows of one episode; returns their `teacher_actions`,
                `(n, ...)`. Where rows have `teacher_log_std` or `teacher_logits` as well: a mapping of all of them.

        Raises:
            InputError: labels of the wrong columns, shape or dtype.

        Cost: reads the rows; writes the labels once, and as much again, amortised, to keep room in the log.
        """
        where = f"{_WHERE}.relabel"
        self._writer("relabel")
        groups = self._grouped(which, where)
        schema = self._ring.schema
        if schema is None:
            return 0
        specs = [s for s in schema.columns if root(s.name) in LABELS]
        done = 0
        for ids in groups:
            if not len(ids):
                continue
            given = teacher_fn(self._handed(ids))
            if not isinstance(given, Mapping) and not is_tensordict(given):
                given = {"teacher_actions": given}
            labels, _ = flat(given, where)
            arrays = as_columns(numpy_rows(labels), where)
            if arrays and len(next(iter(arrays.values()))) != len(ids):
                raise InputError(
                    f"{where}: {len(next(iter(arrays.values())))} labels for {len(ids)} rows; expected one for each"
                )
            fitted = Schema(tuple(specs)).fit(arrays, "safe", where)
            self._labels(specs).write(ids, self.round, fitted)
            done += len(ids)
        return done

    def _grouped(self, which: Any, where: str) -> list[Array]:
        """Return ids of the window, by episode."""
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
        return (
            np.split(found[kept], np.flatnonzero(np.diff(number[kept])) + 1) if kept.any() else []
        )

    # -- reading -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many rows there are to draw from."""
        return self._ring.added - self._first() if self.retention == "last" else len(self._ring)

    @property
    def num_episodes(self) -> int:
        """How many episodes the rows are of, those cut or unfinished included. O(rows log rows)."""
        return len(self._episodes()[1]) - 1

    def episodes(self) -> list[Array]:
        """Return the ids of the rows of each episode, by first row. O(rows log rows)."""
        ids, bounds = self._episodes()
        return np.split(ids, bounds[1:-1]) if len(ids) else []

    def batch(self, batch_size: int) -> Batch:
        """Draw rows uniformly, with replacement.

        Returns:
            What was added, with its newest labels; `actor_id, dones, round, policy_version`; `ids`; and
            `label_round`, the round in which the row's label was given. Each `(batch_size, ...)`.

        Raises:
            InputError: the size is not positive.
            NoClipsError: nothing is stored.
        """
        positive(f"{_WHERE}.batch", "batch_size", batch_size)
        ids = self._look()
        return self._handed(ids[self._rng.integers(0, len(ids), operator.index(batch_size))])

    def sample(self, batch_size: int) -> tuple[Any, Any]:
        """Draw rows as `batch` does, and return `(student observations, teacher actions)` alone."""
        batch = self.batch(batch_size)
        return batch["student_observations"], batch["teacher_actions"]

    def rows(self, ids: Any) -> Batch:
        """Return the rows with these ids, as `batch` does, in this order.

        Raises:
            InputError: one of them is gone, or was never there.
        """
        self.refresh()
        asked = np.asarray(ids, np.int64).reshape(-1)
        gone = asked[(asked < self._first()) | ~self._ring.holds(asked)]
        if len(gone):
            raise InputError(f"{_WHERE}.rows: row {gone[0]} is not stored, or not any more")
        return self._handed(asked)

    def epochs(
        self,
        batch_size: int,
        num_epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield every row that there is when its epoch begins exactly once, in batches as of `batch`.

        Args:
            batch_size: rows in a batch; the last one of an epoch may be smaller.
            num_epochs: how often.
            shuffle: a new order for each epoch; False: oldest first.
            drop_last: leave out a last batch that is smaller.

        Raises:
            InputError: a number is not positive.
            NoClipsError: nothing is stored.
        """
        for name, value in (("batch_size", batch_size), ("num_epochs", num_epochs)):
            positive(f"{_WHERE}.epochs", name, value)
        return self._epochs(batch_size, num_epochs, shuffle, drop_last)

    def _epochs(self, size: int, epochs: int, shuffle: bool, drop: bool) -> Iterator[Batch]:
        for _ in range(epochs):
            ids = self._look()
            order = self._rng.permutation(ids) if shuffle else ids
            for at in range(0, len(order) - (size - 1 if drop else 0), size):
                yield self._handed(order[at : at + size])

    def sequences(
        self,
        length: int,
        batch_size: int | None = None,
        num_epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield every episode in pieces of `length` rows, time-major: `(length, B, ...)`.

        Besides the columns of `batch`: `mask` `(length, B)`, False where a piece is shorter and rows are zeros;
        `is_first` `(length, B)`, True at the first row that is stored of an episode. `hidden` is `(B, ...)`: the state with which each
        piece begins.

        Args:
            length: T, rows of a piece.
            batch_size: B, pieces; None: all at once.
            num_epochs: how often.
            shuffle: pieces in a new order for each epoch; False: in the order of episodes.
            drop_last: leave out a last batch with fewer pieces.

        Raises:
            InputError: a number is not positive.
            NoClipsError: nothing is stored.
        """
        for name, value in (
            ("length", length),
            ("batch_size", batch_size),
            ("num_epochs", num_epochs),
        ):
            if value is not None:
                positive(f"{_WHERE}.sequences", name, value)
        return self._sequences(length, batch_size, num_epochs, shuffle, drop_last)

    def _sequences(
        self, length: int, batch_size: int | None, epochs: int, shuffle: bool, drop: bool
    ) -> Iterator[Batch]:
        for _ in range(epochs):
            self._look()
            ids, bounds = self._episodes()
            starts, sizes = pieces_of(bounds, length)
            pieces = self._rng.permutation(len(starts)) if shuffle else np.arange(len(starts))
            size = len(pieces) if batch_size is None else batch_size
            first = np.isin(starts, bounds)
            for at in range(0, len(pieces) - (size - 1 if drop else 0), size):
                chosen = pieces[at : at + size]
                yield self._piece(ids, starts[chosen], sizes[chosen], first[chosen], length)

    def _piece(self, ids: Array, starts: Array, sizes: Array, first: Array, length: int) -> Batch:
        steps = np.arange(length)[:, None]
        mask = steps < sizes
        taken = ids[np.where(mask, starts + steps, starts)]
        columns = self._columns(taken.reshape(-1))
        blocks = {n: v.reshape(*taken.shape, *v.shape[1:]) for n, v in columns.items()}
        made: dict[str, Any] = {}
        for name, values in blocks.items():
            if root(name) == "hidden":
                made[name] = values[0]
            else:
                values[~mask] = np.zeros((), values.dtype)
                made[name] = values
        made["mask"], made["is_first"] = mask, first & (steps == 0)
        return self._as_asked(made)

    # -- rows --------------------------------------------------------------------------------

    def _first(self) -> int:
        """Return the oldest id that retention leaves, one past the newest if there is none."""
        ring = self._ring
        if self.retention != "last":
            return ring.oldest
        assert self.keep_rounds is not None
        oldest = self.round - self.keep_rounds + 1
        if self._kept[0] != oldest or not self._writes:
            low, high = 0, len(ring)
            while low < high:  # rounds never decrease
                middle = (low + high) // 2
                at = np.array([ring.id_at(middle)])
                early = int(ring.column("round", at)[0]) < oldest
                low, high = (middle + 1, high) if early else (low, middle)
            self._kept = oldest, ring.id_at(low) if low < len(ring) else ring.added
        return self._kept[1]

    def _ids(self) -> Array:
        ids = self._ring.ids()
        return ids if self.retention != "last" else ids[ids >= self._first()]

    def _look(self) -> Array:
        """Return the ids to draw from, of what is newest."""
        self.refresh()
        ids = self._ids()
        if not len(ids):
            raise NoClipsError(f"{_WHERE}: nothing is stored to draw from; add rows first")
        return ids

    def _episodes(self) -> tuple[Array, Array]:
        """Return the ids of all rows in the order of their episodes, and where each begins in it."""
        for tries in range(_TRIES):
            self.refresh()
            ids = self._ids()
            try:
                found = (self._ring.column(n, ids) for n in ("actor_id", "dones") if len(ids))
                order, bounds = episodes_of(*found) if len(ids) else episodes_of(ids, ids)
                return ids[order], bounds
            except LappedError:
                if tries == _TRIES - 1:
                    raise
        raise AssertionError

    def _columns(self, ids: Array) -> dict[str, Array]:
        """Return rows with their newest labels, flat."""
        columns, ids = self._ring.rows_at(ids)
        columns["label_round"] = columns["round"].copy()
        del columns["stamp"]
        columns["ids"] = ids
        if self._log is not None:
            self._log.overlay(ids, columns)
        return columns

    def _handed(self, ids: Array) -> Batch:
        return self._as_asked(self._columns(ids))

    def _as_asked(self, columns: dict[str, Any]) -> Batch:
        out = self._out
        made = out.arrays(columns) if out.plain == "numpy" else out.tensors(columns)
        return nested(made)

    # -- the log of labels -------------------------------------------------------------------

    def _log_path(self) -> str | None:
        return None if self._path is None else os.path.join(self._path, "labels")

    def _found_log(self, mode: str) -> LabelLog | None:
        """Return the log of labels if there is one on disk."""
        path = self._log_path()
        disk = ReplayBuffer.disk
        if path is None or not disk.exists(path) or examine(disk, path) != "buffer":
            return None
        if mode == "r":
            return LabelLog(self._ring, ReplayBuffer.open(path))
        log = ReplayBuffer.open(path, mode="r+", **self._options)
        return LabelLog(self._ring, log)

    def _labels(self, specs: list[ColumnSpec]) -> LabelLog:
        if self._log is None:
            log = ReplayBuffer(
                LABELS_PER_ROW * self._ring.capacity,
                path=self._log_path(),
                schema=LabelLog.schema(specs),
                **self._options,
            )
            self._log = LabelLog(self._ring, log)
        return self._log

    # -- roles, state ------------------------------------------------------------------------

    @property
    def _writes(self) -> bool:
        return self._ring.buffer.mode == "r+"

    def _writer(self, method: str) -> StepRing:
        if not self._writes:
            raise ReadOnlyError(
                f"{_WHERE}.{method}: this handle of {self._path} only reads; write in the process that opened it with "
                "mode='r+'"
            )
        return self._ring

    def refresh(self) -> None:
        """Show a reader what came since. Whatever draws does it by itself; a writer is always up to date."""
        if self._writes:
            return
        if self._log is None:
            self._log = self._found_log("r")
        if self._log is not None:
            self._log.refresh()
        else:
            self._ring.buffer.refresh()

    def _state(self) -> dict[str, Any]:
        return {
            "round": self._round,
            "version": self._version,
            "rng": self._rng.bit_generator.state,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the round, the policy version and the generator, to go beside a checkpoint."""
        return self._state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, over the same rows."""
        self._round, self._version = int(state["round"]), int(state["version"])
        self._rng.bit_generator.state = state["rng"]

    def flush(self) -> None:
        """Force rows, labels and state to the disk itself. A reader: nothing."""
        if self._writes:
            self._ring.buffer.flush(notes={"distillation": self._state()})
            if self._log is not None:
                self._log.log.flush()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a copy to a new directory, which `open` opens: whole, or not at all.

        Raises:
            ExistsError: something is there.
        """
        self._writer("save")
        made = os.path.abspath(path)
        with whole(ReplayBuffer.disk, made, f"{_WHERE}.save") as folder:
            self._ring.copy_to(os.path.join(folder, "rows"), {"distillation": self._state()})
            if self._log is not None:
                self._log.log.snapshot(os.path.join(folder, "labels"))

    def close(self) -> None:
        """Flush, and give files and locks back. Closing twice is fine."""
        if self._ring.closed:
            return
        self.flush()
        if self._log is not None:
            self._log.log.close()
        self._ring.close()

    def check(self) -> list[Any]:
        """Return what is wrong with rows and labels, each finding naming its file; empty when sound."""
        log = [] if self._log is None else self._log.log.check()
        return [*self._ring.buffer.check(), *log]

    def __enter__(self) -> DistillationBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        """Flush; the buffer stays open."""
        if not self._ring.closed:
            self.flush()

    def __repr__(self) -> str:
        place = "" if self._path is None else f", path={self._path!r}"
        kept = "" if self.keep_rounds is None else f" {self.keep_rounds}"
        return (
            f"{_WHERE}(rows={len(self)}/{self._ring.capacity}, round={self.round}, "
            f"retention={self.retention!r}{kept}{place})"
        )


def _integer(where: str, version: Any) -> int:
    try:
        return operator.index(version)
    except TypeError:
        raise InputError(f"{where}: policy_version must be an integer, got {version!r}") from None


_OUT = (("to", None), ("device", None), ("pin_memory", False))
_HOW = (("retention", "all"), ("keep_rounds", None), ("obs_shape", None), ("beta", None))
