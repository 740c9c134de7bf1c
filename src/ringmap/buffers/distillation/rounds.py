"""Rounds of DAgger: their number, the teacher's probability of acting in them, which of their rows are drawn.

    round 0: the teacher   round 1: beta(1) teacher, the rest student   ...   round n: the student

    retention   all    every round; a full ring refuses more rows  [ r0 r0 r1 r1 r2 r2 ]
                last   those of the last `keep_rounds` rounds              [ r1 r2 r2 ]
                fifo   the newest `capacity` rows, of any round

Invariants: the mixed actions have the shape, the type and the dtype of the student's actions; the rounds of rows never
decrease, and the kept rows are the newest ones, from an id on.
Not here: the rows (steps.py, buffer.py).

Source of the schedules: Ross, Gordon and Bagnell, "A Reduction of Imitation Learning and Structured Prediction to
No-Regret Online Learning", AISTATS 2011: beta falls to zero on average, as p ** i or as an indicator of the first
round.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.arguments import count, fraction, positive
from ringmap.buffers.steps import StepRing
from ringmap.buffers.worker_generator import WorkerGenerator
from ringmap.errors import InputError
from ringmap.storage.columns.values import cast

__all__ = ["ExponentialBeta", "LinearBeta", "Retention", "Rounds", "mixed", "version_of"]

Array = np.ndarray[Any, np.dtype[Any]]


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
