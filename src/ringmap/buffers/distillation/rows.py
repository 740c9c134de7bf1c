"""A student's rows: their columns, passes over them, and the rounds of DAgger that they are of.

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

Invariants: each row is in one episode, whose rows belong to one actor; a pass covers what is stored when it begins; a
row that is evicted before its turn is left out, and in sequences its whole piece is: no other row replaces it.
`actor_id` and `dones` have one number per row, whatever axes the input had; a row has all labels. The mixed actions
have the shape, the type and the dtype of the student's actions; the rounds of rows never decrease.
Not here: where rows are stored (steps.py), nested names (nested.py).

Source of the schedules: Ross, Gordon and Bagnell, "A Reduction of Imitation Learning and Structured Prediction to
No-Regret Online Learning", AISTATS 2011: beta falls to zero on average, as p ** i or as an indicator of the first
round.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringmap.arguments import count, fraction, positive
from ringmap.buffers.steps import StepRing
from ringmap.buffers.workers import WorkerGenerator
from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.columns.values import as_array, cast, flat, is_tensordict, root

__all__ = [
    "LABEL_ROUND",
    "MUTABLE",
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
Columns = dict[str, Array]
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
