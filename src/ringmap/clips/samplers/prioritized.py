"""The prioritized sampler: draws clips in proportion to their priorities, with weights that correct the bias.

    draw                 update_priorities(ids, values)
      |                    |
      v                    v
    SumTree <--- leaf = position % rows ---> storage/sidecars/priorities.py, first

An id of `ids` is the clip's position on the ring, which no other clip ever has: an update for
an evicted clip has no effect, also not on its successor in the same leaf.

Invariants: a leaf has a mass only while a valid clip starts there; the stored values are
those that `update_priorities` had received when it returned.
Not here: sums (sumtree.py), files (storage/sidecars).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ringmap.arguments import positive, positive_real, real
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.draws import Weigh
from ringmap.clips.samplers.base import (
    Array,
    BaseSampler,
    DrawingSampler,
    Seed,
    check_state,
    checked_rng,
    window_of,
)
from ringmap.clips.sumtree import SumTree
from ringmap.errors import InputError, RoleError
from ringmap.storage.columns.copying import aligned
from ringmap.storage.columns.values import as_array
from ringmap.storage.disk.calls import refuse_nested, thread
from ringmap.storage.disk.process import Renew
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.arrays import all_true, highest, lowest
from ringmap.storage.ring.ring import Position, Ring, Slot
from ringmap.storage.sidecars.priorities import Leaves, Opened, Points, Range, StoredPriorities

__all__ = ["PrioritizedSampler", "checked_priorities"]

_NEVER_RANKED = 1 << 62

_MOST = float(np.finfo(np.float32).max)

_ALPHA_MOST, _EPS_LEAST = 7.0, 1e-38
"""Within these limits no mass of a float32 priority is 0 in float64, and no sum of masses is infinite."""


class PrioritizedSampler(DrawingSampler):
    """Draw clips by priority, with replacement; a new clip has the highest priority so far, initially 1.

    Proportional: P(i) is proportional to (priority + eps)**alpha. By rank: to rank**-alpha, where the highest has rank
    1.

    A batch has `ids` for `update_priorities`, and `weights` as factors for the losses.

    Args:
        alpha: 0 draws uniformly, 1 in full proportion; at most 7.
        beta: exponent of the importance weights: a number, or a function of the step such as `Linear(0.4, 1.0,
            100_000)`.
        kind: "proportional" or "rank".
        eps: added to each priority, so that every clip can be drawn again.
        resort_every: by rank: updates after which ranks are computed again; in between, a clip gets the rank that it
            would have had at the last sort. None: a quarter of the number of clips.
        rng: the generator, or its seed; None makes a new one.

    Raises:
        InputError: an option is not valid.

    Cost: O(B log n) for a draw and for an update of B clips; 20 bytes of memory for each row of the ring. A change of
        `history_len` between draws costs O(rows).

    Processes and threads: on a buffer with a path, the writing handle stores priorities in its directory,
        and they are loaded when it is opened, as of the last update that returned. A reader starts
        with the stored priorities and keeps its own in memory; store its `state_dict()` with a checkpoint. A DataLoader
        worker that got the buffer from another process does not draw by priority: it would never see that process's
        updates.

    Source: Schaul et al., Prioritized Experience Replay, 2016, equations 1 and 2. Weights are divided by the
        largest one of the batch.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> sampler = PrioritizedSampler(rng=0)
        >>> buf = ReplayBuffer(max_steps=100, sampler=sampler)
        >>> buf.write_episode({"step": np.arange(10)})
        >>> batch = buf.sample(32)
        >>> sampler.update_priorities(batch.ids, np.where(batch["step"][:, 0] == 7, 100.0, 0.0))
        32
        >>> int(np.bincount(buf.sample(1000)["step"].ravel()).argmax()), float(batch.weights.max())
        (7, 1.0)
    """

    any_order = True

    has_priorities = True

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float | Callable[[int], float] = 0.4,
        *,
        kind: str = "proportional",
        eps: float = 1e-6,
        resort_every: int | None = None,
        rng: Seed = None,
    ) -> None:
        super().__init__(rng)
        where = "PrioritizedSampler"
        alpha = _not_negative(where, "alpha", alpha)
        if not callable(beta):
            beta = _not_negative(where, "beta", beta)
        if alpha > _ALPHA_MOST:
            raise InputError(f"{where}: alpha must be at most {_ALPHA_MOST:g}, got {alpha!r}")
        if kind not in ("proportional", "rank"):
            raise InputError(f"{where}: kind must be 'proportional' or 'rank', got {kind!r}")
        self.alpha, self.beta, self.kind = alpha, beta, kind
        self.eps = positive_real(where, "eps", eps)
        if self.eps < _EPS_LEAST:
            raise InputError(f"{where}: eps must be at least {_EPS_LEAST:g}, got {eps!r}")
        if resort_every is not None:
            resort_every = positive(where, "resort_every", resort_every)
        self.resort_every = resort_every
        self.ids = np.empty(0, np.int64)
        self.weights = np.empty(0, np.float32)
        self._leaves: Leaves | None = None
        self._restored: dict[str, Any] | None = None
        self._kept_by: Callable[[Handle], Opened] | None = None
        self._made_in = os.getpid()
        self._forget()

    def begin_in_worker(self, seeds: np.random.SeedSequence) -> None:
        """Draw from these seeds from now on, if this process made the sampler.

        Raises:
            RoleError: another process did, and its updates do not come here.
        """
        if self._made_in != os.getpid():
            raise RoleError(
                "PrioritizedSampler: this DataLoader worker would draw by priorities that never change, since "
                "update_priorities is called in "
                "another process; draw there, with sample() or batches(), which gathers ahead in a thread"
            )
        super().begin_in_worker(seeds)

    _over: Callable[[], BaseSampler | None] | None = None

    def stand_for(self, over: BaseSampler) -> None:
        """Pass priorities and state on to what draws with these options over many rings, as long as that lives."""
        self._over = weakref.ref(over)

    def _stands_for(self) -> BaseSampler | None:
        return None if self._over is None else self._over()

    def for_ring(self, kept_by: Callable[[Handle], Opened] | None) -> PrioritizedSampler:
        """Return a sampler with the same options and generator for one ring of many. `kept_by`: given the ring, returns
        what keeps its priorities; None: the ring's own directory, as for any buffer."""
        made = PrioritizedSampler(
            self.alpha, self.beta, kind=self.kind, eps=self.eps, resort_every=self.resort_every, rng=self.rng
        )
        made._kept_by = kept_by
        return made

    def _forget(self) -> None:
        """Detach from the buffer, but keep the priorities."""
        self._lock = threading.Lock()
        self._source: Handle | None = None
        self._uuid: bytes | None = None
        self._pid = os.getpid()
        self._stored: StoredPriorities | None = None
        self._tree: SumTree | None = None
        self._era = self._low = self._high = 0
        self._anchors: object = None
        self._sorted = np.empty(0, np.float32)
        self._changes = 0
        self._asked: tuple[weakref.ref[Any], int, ClipRange] | None = None
        self._own = threading.local()

    def attach(self, source: Handle) -> None:
        """Begin with a buffer that was just opened for writing, before anything is written.

        Clips that a power cut removed are no longer at their positions: their priorities must not go to the next clips
        there.
        """
        self._over = None
        with thread.searching, source.lock, self._lock:
            if source is not self._source:
                self._bind(source)

    # -- drawing -----------------------------------------------------------------------------

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size log rows), and O(1) for each step written since the last draw."""
        window, beta = window_of(self, buffer, history_len), self._beta(step)
        with thread.searching, window.lock, self._lock:
            tree = self._follow(window)
            self._asked = weakref.ref(buffer), history_len, window
            total = tree.total
            slots = tree.find(self.rng.random(batch_size) * total)
            positions = self._low + (slots - self._low) % tree.size
            odds = tree.leaves.take(slots)
            odds *= window.count / total
            self._own.weigh = partial(self._weighed, positions, odds, beta)  # of the batch that this thread draws
            ids: Array = window.ids(positions)
        return ids

    def follow(self, buffer: Any, history_len: int) -> None:
        """Learn of the clips that exist now, as after a draw: `update_priorities` may name any of them."""
        window = window_of(self, buffer, history_len)
        with thread.searching, window.lock, self._lock:
            self._follow(window)
            self._asked = weakref.ref(buffer), history_len, window

    def mass_of(self, window: ClipRange, highest: float = 0.0) -> float:
        """Return the mass of all clips of a window: their chance against those of other rings. `highest`: of the
        priorities of other rings, which a new clip gets too."""
        with thread.searching, window.lock, self._lock:
            if window.source is not self._source or self._pid != os.getpid():
                self._bind(window.source)
            assert self._leaves is not None
            self._leaves.highest = max(self._leaves.highest, highest)
            return self._follow(window).total

    @property
    def highest(self) -> float:
        """The highest priority so far; initially 1."""
        return 1.0 if self._leaves is None else self._leaves.highest

    def at(self, masses: Array) -> tuple[Array, Array]:
        """Return the positions of the clips that masses in `[0, mass_of(window))` fall on, and the mass of each. O(B
        log rows)."""
        with thread.searching, self._lock:
            tree = self._tree
            assert tree is not None
            slots = tree.find(masses)
            return self._low + (slots - self._low) % tree.size, tree.leaves[slots]

    def weigher(self, ids: Array, odds: Array, step: int) -> Weigh:
        """Return the function that weighs a batch of the draw `step`, given the ids that were drawn, and the chance of
        each as a multiple of that of a uniform draw."""
        return partial(self._weighed, ids, odds, self._beta(step))

    def _beta(self, step: int) -> float:
        return float(self.beta(step)) if callable(self.beta) else float(self.beta)

    def reset_after_fork(self, renewed: Renew) -> None:
        """Replace the lock as well, which another thread may have held at the fork."""
        super().reset_after_fork(renewed)
        self._lock = threading.Lock()

    def weigh(self) -> Weigh | None:
        """Return the function that weighs the batch just drawn; the buffer asks for it after each draw."""
        weigh: Weigh | None = getattr(self._own, "weigh", None)
        return weigh

    def _weighed(self, drawn: Array, odds: Array, beta: float, positions: Array) -> Array:
        """Return weights from the odds of a draw against a uniform one, and keep them as those of the last batch."""
        # A clip that was redrawn was drawn uniformly: its weight is that of an average clip.
        known = positions == drawn
        known &= odds > 0
        if not all_true(known):
            odds = np.where(known, odds, 1.0)
        weights = odds**-beta
        found = aligned((weights / weights[weights.argmax()]).astype(np.float32))
        self.ids, self.weights = positions, found
        return found

    def probabilities(self, ids: Array) -> Array:
        """Return the probability with which each of these clips was last drawn, float64; 0 for an evicted one.

        Raises:
            InputError: nothing has been drawn yet.
        """
        refuse_nested("PrioritizedSampler.probabilities")
        with thread.searching, self._lock:
            if self._tree is None:
                raise InputError("PrioritizedSampler.probabilities: no clip was drawn with this sampler yet")
            return self._masses_at(np.asarray(ids, np.int64)) / self._tree.total

    def masses(self, positions: Array) -> Array:
        """Return the mass of the clip at each position, as of the last draw; 0 for an evicted one. After a draw
        only."""
        with thread.searching, self._lock:
            return self._masses_at(positions)

    def _masses_at(self, positions: Array) -> Array:
        """Do the work of `masses`. Holds the lock."""
        tree = self._tree
        assert tree is not None
        alive = (positions >= self._low) & (positions < self._high)
        return np.where(alive, tree.leaves[positions % tree.size], 0.0)

    # -- priorities --------------------------------------------------------------------------

    def update_priorities(self, ids: Array, values: Array) -> int:
        """Set the priorities of clips, and store them; return the number updated: evicted clips are skipped.

        Args:
            ids: int64 `(B,)`, from the `ids` of a batch. For an id that is named twice the last value counts.
            values: `(B,)` priorities, such as absolute TD errors: finite and not negative.

        Raises:
            InputError: shapes differ, a value is not valid, or nothing was drawn before. Nothing was changed.
            EnvironmentFault: the disk is full or fails. Nothing was changed.

        Cost: O(B log rows), and one write.
        """
        if (over := self._stands_for()) is not None:
            return over.update_priorities(ids, values)
        where = "PrioritizedSampler.update_priorities"
        places, priorities = checked_priorities(where, ids, values)
        asked = self._asked
        buffer = asked and asked[0]()
        if asked is None or (buffer is None and self._pid != os.getpid()):
            raise InputError(f"{where}: no clip was drawn with this sampler yet")
        # A view may be gone, and what it drew from is not.
        window = asked[2] if buffer is None else window_of(self, buffer, asked[1])
        return self.put(window, places, priorities)

    def put(self, window: ClipRange, places: Array, priorities: Array) -> int:
        """Set the priorities of clips of a window by their positions, int64 `(B,)`, and store them; return the number
        updated. `priorities`: float32 `(B,)`, as `checked_priorities` returns them.

        Raises:
            EnvironmentFault: the disk is full or fails. Nothing was changed.
        """
        refuse_nested("PrioritizedSampler.update_priorities")
        with thread.searching, window.lock, self._lock:
            tree = self._follow(window)
            slots = places % tree.size
            known = tree.leaves.take(slots) > 0
            if not len(places) or not (lowest(places) >= self._low and highest(places) < self._high):
                known &= (places >= self._low) & (places < self._high)
            is_known = all_true(known)
            if not is_known:
                kept = known | self._are_stored(places, window)
                known, places, priorities = known[kept], places[kept], priorities[kept]
                slots = slots[kept]
            if len(places):
                assert self._stored is not None
                assert self._leaves is not None
                self._stored.change(Points(places, priorities, slots))
                drawn = slots if is_known else slots[known]
                tree.set(drawn, self._masses(self._leaves.values.take(drawn)))
                self._changes += len(places)
        return len(places)

    def _are_stored(self, places: Array, window: ClipRange) -> Array:
        """Tell of each position whether a step is stored there: it may be an anchor of another window than the last one
        drawn from."""
        if window.capacity is not None:
            return np.zeros(len(places), np.bool_)
        return window.source.live.has(places)

    def _masses(self, priorities: Array) -> Array:
        if self.kind == "proportional":
            masses = priorities.astype(np.float64)
            masses += self.eps
            masses **= self.alpha
            return masses
        higher = len(self._sorted) - self._sorted.searchsorted(priorities, side="right")
        by_rank: Array = (1.0 + higher) ** -self.alpha
        return by_rank

    # -- updates from the buffer -------------------------------------------------------------

    def _follow(self, window: ClipRange) -> SumTree:
        """Update the tree to what is stored now. O(changes); O(rows) for another span or source. Holds the locks."""
        window.follow()
        source = window.source
        if source is not self._source or self._pid != os.getpid():
            self._bind(source)
        tree, leaves, low, head = self._tree, self._leaves, window.low, window.head
        assert leaves is not None
        if tree is None or window.anchors != self._anchors or source.live.era != self._era:
            tree = self._tree = SumTree(len(leaves.values))
            self._anchors, self._era = window.anchors, source.live.era
            self._low = self._high = low
            self._changes = _NEVER_RANKED
        if low > self._low:
            self._put(tree, self._low, min(low, self._high), None)
            self._low, self._high = low, max(low, self._high)
        if head > self._high:
            fresh = max(source.tail, leaves.upto)  # also steps that are no anchors of this window
            if head > fresh:
                assert self._stored is not None
                self._stored.change(Range(fresh, head, leaves.highest))
            self._put(tree, self._high, head, window.starts(self._high, head))
            late = window.late(self._high)
            if len(late):
                slots = late % tree.size
                tree.set(slots, self._masses(leaves.values[slots]))
            self._changes += head - self._high
            self._high = head
        if self.kind == "rank":
            every = self.resort_every or max(1, window.count // 4)
            if self._changes >= every:
                self._rank(tree, window)
        return tree

    def _put(self, tree: SumTree, first: int, last: int, alive: Array | None) -> None:
        """Set positions `[first, last)` to the masses of their priorities where a clip starts, else to 0."""
        leaves = self._leaves
        assert leaves is not None
        done = 0
        for slot, count in _pieces(first, last - first, tree.size):
            masses: Array | float = 0.0
            if alive is not None:
                masses = self._masses(leaves.values[slot : slot + count]) * alive[done : done + count]
            tree.fill(slot, masses, count)
            done += count

    def _rank(self, tree: SumTree, window: ClipRange) -> None:
        """Compute all ranks again. O(clips log clips)."""
        leaves = self._leaves
        assert leaves is not None
        positions = np.arange(self._low, self._high)[window.starts(self._low, self._high)]
        slots = positions % tree.size
        priorities = leaves.values[slots]
        order = np.argsort(priorities, kind="stable")
        masses = np.empty(len(slots))
        masses[order[::-1]] = np.arange(1.0, len(slots) + 1) ** -self.alpha
        tree.set(slots, masses)
        self._sorted, self._changes = priorities[order], 0

    def _bind(self, source: Handle) -> None:
        """Begin with a buffer: load the priorities that are stored for it."""
        uuid = source.manifest.uuid
        if self._uuid is not None and self._uuid != uuid:
            raise InputError("PrioritizedSampler: it draws from another buffer already; make one for each buffer")
        in_fork = self._pid != os.getpid()
        kept, restored, stored = self._leaves, self._restored, self._stored
        if stored is not None:
            stored.close()
        self._forget()
        self._source, self._uuid = source, uuid
        by = source if self._kept_by is None else self._kept_by(source)
        self._stored = StoredPriorities(by, kept, in_fork)
        self._leaves = self._stored.leaves
        if restored is not None:
            self._restored = None
            self._take_over(restored)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, with priorities, to store with a checkpoint. O(rows)."""
        if (over := self._stands_for()) is not None:
            return over.state_dict() or {}
        refuse_nested("PrioritizedSampler.state_dict")
        with thread.searching, self._lock:
            if self._leaves is None:
                return {**self.small_state(), **(self._restored or {})}
            low, upto = self._low, max(self._low, min(self._leaves.upto, self._high))
            values = self._leaves.values[np.arange(low, upto) % len(self._leaves.values)]
            return {
                **self.small_state(),
                "low": low,
                "values": values,
                "highest": self._leaves.highest,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned: clips that are still live get their priorities back.

        Raises:
            InputError: the state is not valid. Nothing was changed.
        """
        if (over := self._stands_for()) is not None:
            over.load_state_dict(state)
            return
        kept = self.check_state_dict(state)
        self.load_small_state(state)
        if kept is not None:
            with thread.searching, self._lock:
                if self._source is None:
                    self._restored = kept
                else:
                    self._take_over(kept)

    def check_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the priorities of a state, None if it has none.

        Raises:
            InputError: `load_state_dict` would refuse the state.
        """
        where = f"{type(self).__name__}.load_state_dict"
        check_state(self, state)
        checked_rng(self.rng, state.get("rng"), type(self).__name__)
        if "values" not in state:
            return None
        try:
            low, highest = int(state["low"]), float(state["highest"])
            count = np.size(state["values"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{where}: low, values and highest don't make sense ({error!r}). Nothing was changed"
            ) from None
        _, values = checked_priorities(where, np.arange(low, low + count), state["values"])
        checked_priorities(where, [low], [highest])
        return {"low": low, "values": values, "highest": highest}

    def kept_priorities(self) -> Leaves | None:
        """Return a copy of all priorities, for a copy of the buffer; None before the first draw. O(rows)."""
        with thread.searching, self._lock:
            leaves = self._leaves
            return leaves and replace(leaves, values=leaves.values.copy())

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Set the priorities of the positions in a saved state; the next draw rebuilds the tree."""
        leaves = self._leaves
        assert leaves is not None
        assert self._source is not None
        values, tail, head = state["values"], self._source.tail, self._source.head
        positions = np.arange(state["low"], state["low"] + len(values))
        kept = (positions >= tail) & (positions < head)
        leaves.highest = state["highest"]
        upto = int(positions[kept][-1]) + 1 if kept.any() else tail
        Range(max(tail, min(leaves.upto, upto)), max(upto, leaves.upto), leaves.highest).apply(leaves)
        leaves.values[positions[kept] % len(leaves.values)] = values[kept]
        self._tree = None
        if self._stored is not None:
            self._stored.rewrite()

    def flush(self) -> None:
        """Force the priorities to the disk.

        Raises:
            EnvironmentFault: the disk fails. The next call first writes them all again.
        """
        refuse_nested("PrioritizedSampler.flush")
        with thread.searching, self._lock:
            if self._stored is not None:
                self._stored.sync()

    def close(self) -> None:
        """Close the file; the next draw opens it again."""
        refuse_nested("PrioritizedSampler.close")
        with thread.searching, self._lock:
            if self._stored is not None:
                self._stored.close()
            on_disk = self._source is not None and not self._source.disk.volatile
            self._forget()
            if on_disk:
                self._leaves = None

    def check(self) -> list[str]:
        """Return violated invariants, in words; empty when sound. O(rows)."""
        refuse_nested("PrioritizedSampler.check")
        with thread.searching, self._lock:
            return [] if self._tree is None else self._tree.check()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle options and generator; also priorities, unless they are in a directory."""
        refuse_nested("PrioritizedSampler.__getstate__")
        with thread.searching, self._lock:
            names = (
                "rng",
                "_seed_key",
                "alpha",
                "beta",
                "kind",
                "eps",
                "resort_every",
                "ids",
                "weights",
                "_restored",
            )
            state = {name: self.__dict__[name] for name in names}
            on_disk = self._source is not None and not self._source.disk.volatile
            return {**state, "_leaves": None if on_disk else self._leaves}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kept_by, self._made_in = None, 0
        self._forget()


def checked_priorities(where: str, ids: Any, values: Any) -> tuple[Array, Array]:
    """Return ids as int64 and priorities as float32, both `(B,)`.

    Raises:
        InputError: shapes differ, or a value is not valid.
    """
    if hasattr(values, "detach"):
        values = values.detach().double()  # bfloat16 too
    positions = as_array(ids, f"{where}: ids", "id")
    try:
        given = as_array(values, f"{where}: values", "value").astype(np.float64, copy=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: ids and values must be numbers: {error}") from None
    if not positions.ndim or not given.ndim:
        positions, given = np.atleast_1d(positions, given)
    if positions.ndim != 1 or positions.shape != given.shape or positions.dtype.kind not in "iu":
        raise InputError(
            f"{where}: expected integer ids and values of one shape (B,), got {positions.dtype} {positions.shape} "
            f"and {given.dtype} {given.shape}"
        )
    # A NaN is both the least and the greatest.
    if not len(given) or (given[given.argmin()] >= 0 and given[given.argmax()] <= _MOST):
        return positions.astype(np.int64), given.astype(np.float32)
    with np.errstate(over="ignore"):
        priorities = given.astype(np.float32)
    bad = ~(np.isfinite(priorities) & (priorities >= 0))
    if bad.any():
        raise InputError(f"{where}: priorities must be finite (as float32) and not negative, got {given[bad][0]!r}")
    return positions.astype(np.int64), priorities


def _not_negative(where: str, name: str, value: Any) -> float:
    number = real(value)
    if number is None or not 0 <= number < float("inf"):
        raise InputError(f"{where}: {name} must be a number and not negative, got {value!r}")
    return number


def _pieces(position: int, count: int, rows: int) -> list[tuple[Slot, int]]:
    """Return the one or two runs `(slot, count)` of `count` positions."""
    return Ring(rows, 0).pieces(Position(position), count) if count > 0 else []
