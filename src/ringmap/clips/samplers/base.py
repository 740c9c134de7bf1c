"""Samplers: the callable protocol, and the base class for samplers with state or priorities.

    buffer.sample(B) -> sampler(step, buffer, B, history_len) -> B ids in [0, buffer.num_valid_ends(history_len))

    a function, or any callable -> as_sampler -> BaseSampler -> stored and called by a buffer

Invariants: the same state gives the same draws from the same buffer; NumPy's global generator is not used;
only `as_sampler` checks which methods an object has.
Not here: which clips are drawn (the other modules of this package).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ringmap.arguments import finite, integer, positive_real
from ringmap.clips.draws import Weigh
from ringmap.errors import ClosedError, InputError
from ringmap.storage.disk.calls import nested, thread
from ringmap.storage.disk.process import Forkable
from ringmap.storage.read.handle import Handle
from ringmap.storage.sidecars.priorities import Leaves

if TYPE_CHECKING:
    from ringmap.clips.clip_range import ClipRange

__all__ = [
    "Array",
    "BaseSampler",
    "DrawingSampler",
    "HasClips",
    "Linear",
    "Sampler",
    "Seed",
    "as_sampler",
    "check_state",
    "draw_with",
    "generator",
    "ids_of",
    "seed_key",
    "window_of",
    "windows_of",
]

Array = np.ndarray[Any, np.dtype[Any]]
Seed = np.random.Generator | int | None


class HasClips(Protocol):
    """The part of a buffer that a sampler needs."""

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips of this length."""
        ...


_NO_SAMPLER = "load_state_dict: the state has that of a sampler; make the buffer with such a sampler first"


class Sampler(Protocol):
    """Draws clip ids: any callable with this signature.

    Returns an integer array of shape `(batch_size,)` in `[0, buffer.num_valid_ends(history_len))`.
    A sampler with state or priorities derives from `BaseSampler`.
    """

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return the ids of `batch_size` clips."""
        ...


class BaseSampler(ABC):
    """Base class of samplers. A subclass implements `__call__`; the other methods do nothing unless overridden.

    A buffer calls:

    - `attach` when it is opened for writing, or receives the sampler; before anything is written;
    - `begin_in_worker` before it first draws in a DataLoader worker;
    - `__call__` for a batch, then `weigh`, from the same thread and before its next draw. Other threads may draw and
      write meanwhile;
    - `update_priorities` when the user does;
    - `small_state` with each commit that follows a draw and with each flush; `load_small_state` when the directory is
      opened again with a sampler of this class;
    - `state_dict` and `load_state_dict` from its own methods of the same names;
    - `flush` from its own, and before it closes; `close` when it closes, or receives another sampler. A closed sampler
      may be used again;
    - `kept_priorities` for a copy of the buffer, `check` from its own.

    It may be called from several threads. A pickled buffer pickles its sampler.

    Example:
        >>> class Newest(BaseSampler):
        ...     def __call__(self, step, buffer, batch_size, history_len):
        ...         return np.full(batch_size, buffer.num_valid_ends(history_len) - 1)
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, sampler=Newest())
        >>> buf.write_episode({"step": np.arange(10)})
        >>> buf.sample(2)["step"].ravel().tolist()
        [9, 9]
    """

    has_priorities: bool = False
    """Whether clips can be given priorities, by the ids of a batch."""
    any_order: bool = False
    """Whether it draws rightly where the highest ids are not the newest clips. Those of many rings have ids ring by
    ring, so a `ShardedReplayBuffer` takes no other sampler, unless it is `by_age`."""
    by_age: bool = False
    """Whether an id means to it an age alone: over many rings its ids are taken in the order of commits, at more
    cost."""

    @property
    def given(self) -> Any:
        """The callable that the user gave: this sampler, or the one that `as_sampler` wrapped."""
        return self

    @abstractmethod
    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return the ids of `batch_size` clips: integers `(B,)` in `[0, buffer.num_valid_ends(history_len))`."""

    def weigh(self) -> Weigh | None:
        """Return the function that weighs the batch just drawn; None if the batch has no weights."""
        return None

    def attach(self, source: Handle) -> None:  # noqa: B027 - nothing to do
        """Begin with a buffer that was just opened for writing."""

    def begin_in_worker(self, seeds: np.random.SeedSequence) -> None:  # noqa: B027
        """Draw from these seeds from now on: this process is a DataLoader worker, and others have copies of this
        sampler.

        Args:
            seeds: of this sampler in this worker; they follow from the worker's seed and the buffer's.

        Raises:
            RoleError: it draws by what only the process knows that made it.
        """

    def follow(self, buffer: Any, history_len: int) -> None:  # noqa: B027
        """Learn of the clips that exist now, as after a draw: `update_priorities` may name any of them."""

    def update_priorities(self, ids: Array, values: Array) -> int:
        """Set the priorities of clips; return the number updated: evicted clips are skipped.

        Raises:
            InputError: the sampler does not draw by priority.
        """
        raise InputError(
            "update_priorities: the sampler does not draw by priority; make the buffer with "
            "sampler=PrioritizedSampler()"
        )

    def kept_priorities(self) -> Leaves | None:
        """Return a copy of all priorities, for a copy of the buffer; None if there are none."""
        return None

    def small_state(self) -> dict[str, Any] | None:
        """Return the state that a buffer stores with its commits: JSON, small, with the class name as `kind`; None: no
        state."""
        return None

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `small_state` returned. A buffer calls it with the state of this class alone.

        Raises:
            InputError: the sampler has no state.
        """
        raise InputError(_NO_SAMPLER)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the whole state, to store with a checkpoint: the small one, if that is all; None if there is none."""
        return self.small_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned.

        Raises:
            InputError: the state belongs to another sampler.
        """
        check_state(self, state)
        self.load_small_state(state)

    def flush(self) -> None:  # noqa: B027
        """Force data in files to the disk."""

    def close(self) -> None:  # noqa: B027
        """Release open files."""

    def check(self) -> list[str]:
        """Return violated invariants, in words; empty when sound."""
        return []


def as_sampler(sampler: Sampler, where: str = "as_sampler") -> BaseSampler:
    """Return a sampler with all methods: a `BaseSampler` is returned as it is, another callable is wrapped.

    The wrapper calls those methods of `BaseSampler` that the callable has; the others do nothing. An attribute
    `weights` stands for `weigh`.

    Args:
        sampler: `fn(step, buffer, batch_size, history_len) -> ids`.
        where: the caller to name in an error.

    Raises:
        InputError: it can't be called, or is a sampler class instead of an instance.

    Example:
        >>> sampler = as_sampler(lambda step, buffer, batch_size, history_len: np.zeros(batch_size, int))
        >>> sampler(0, None, 3, 1).tolist(), sampler.state_dict()
        ([0, 0, 0], None)
    """
    if isinstance(sampler, BaseSampler):
        return sampler
    if isinstance(sampler, type) and issubclass(sampler, BaseSampler):
        name = sampler.__name__
        raise InputError(f"{where}: sampler is the class {name}; give one that was made: {name}()")
    if not callable(sampler):
        raise InputError(
            f"{where}: sampler must be callable, got {sampler!r}; give a function (step, buffer, batch_size, "
            "history_len) -> ids, or a sampler of ringmap.samplers"
        )
    return _Wrapped(sampler)


_OPTIONAL = (
    "attach",
    "begin_in_worker",
    "follow",
    "update_priorities",
    "kept_priorities",
    "small_state",
    "load_small_state",
    "state_dict",
    "load_state_dict",
    "flush",
    "close",
    "check",
)


class _Wrapped(BaseSampler):
    """A wrapped callable: its own methods replace those that do nothing."""

    def __init__(self, given: Sampler) -> None:
        self._given: Any = given
        self.has_priorities = hasattr(given, "update_priorities")
        self.any_order = getattr(given, "any_order", False)
        self.by_age = getattr(given, "by_age", False)
        for name in _OPTIONAL:
            if hasattr(given, name):
                setattr(self, name, getattr(given, name))

    @property
    def given(self) -> Any:
        return self._given

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        ids: Array = self._given(step, buffer, batch_size, history_len)
        return ids

    def weigh(self) -> Weigh | None:
        weigh: Weigh | None = getattr(self._given, "weigh", super().weigh)()
        weights = getattr(self._given, "weights", None)
        if weigh is None and weights is not None:
            kept = np.array(weights, np.float32)
            return lambda positions: kept
        return weigh


class DrawingSampler(Forkable, BaseSampler):
    """A sampler with its own generator.

    Args:
        rng: the generator, or its seed; None makes a new one.
    """

    def __init__(self, rng: Seed = None) -> None:
        self.rng = generator(rng, type(self).__name__)
        self._seed_key = seed_key(rng)

    def begin_in_worker(self, seeds: np.random.SeedSequence) -> None:
        """Draw from these seeds, and that of this sampler, from now on."""
        self.rng = np.random.default_rng([self._seed_key, *seeds.generate_state(4).tolist()])

    def small_state(self) -> dict[str, Any]:
        """Return the state that a buffer stores with its commits: JSON, and small."""
        return {"kind": type(self).__name__, "rng": self.rng.bit_generator.state}

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `small_state` returned.

        Raises:
            InputError: the state belongs to another sampler.
        """
        check_state(self, state)
        self.rng.bit_generator.state = checked_rng(self.rng, state.get("rng"), type(self).__name__)


def generator(seed: Seed, where: str, name: str = "rng") -> np.random.Generator:
    """Return a generator: the given one, or a new one with this seed."""
    whole = integer(seed)
    try:
        return np.random.default_rng(seed if whole is None else whole)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {name} must be a Generator, a seed or None: {error}") from None


def checked_rng(rng: np.random.Generator, state: Any, where: str) -> Any:
    """Return the state of a generator, if this one takes it.

    Raises:
        InputError: it is not such a state. The generator is as before.
    """
    tried = type(rng.bit_generator)(0)
    try:
        tried.state = state
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"{where}.load_state_dict: rng is no state of {type(tried).__name__} ({error!r}); give what state_dict "
            "returned. Nothing was changed"
        ) from None
    return tried.state


def seed_key(seed: Seed) -> int:
    """Return a number that follows from a seed, or from the state of a generator; 0 for None.

    Example:
        >>> seed_key(None), seed_key(3) == seed_key(np.random.default_rng(3)) != seed_key(4)
        (0, True)
    """
    if seed is None:
        return 0
    return int(copy.deepcopy(np.random.default_rng(seed)).integers(1 << 62))


def check_state(sampler: Any, state: Mapping[str, Any]) -> None:
    """Raise InputError unless the state is of a sampler of this kind; that of a wrapped one need not say its kind."""
    given = sampler.given
    if given is not sampler and isinstance(state, Mapping) and "kind" not in state:
        return
    kind = state.get("kind") if isinstance(state, Mapping) else state
    if not isinstance(kind, str) or kind != type(given).__name__:
        if given is None:
            raise InputError(_NO_SAMPLER)
        raise InputError(
            f"{type(given).__name__}.load_state_dict: the state is that of {kind!r}; load it into such a sampler"
        )


def draw_with(
    sampler: BaseSampler, step: int, buffer: Any, size: int, history_len: int, where: str
) -> tuple[Array, Weigh | None]:
    """Return the ids of a draw, as `ids_of` does, and what weighs it. No lock is held meanwhile.

    Raises:
        RoleError: the sampler is in the middle of another draw of this thread.
    """
    before = thread.samplers
    if sampler in before:
        raise nested(where)
    try:
        thread.samplers = (*before, sampler)
        return ids_of(sampler, step, buffer, size, history_len, where), sampler.weigh()
    finally:
        thread.samplers = before


def ids_of(sampler: BaseSampler, step: int, buffer: Any, size: int, history_len: int, where: str) -> Array:
    """Return the ids of `size` clips from a sampler, int64.

    Raises:
        InputError: it returned another number of ids, or values that are not integers.
        ClosedError: it reads a closed buffer.
    """
    try:
        ids = np.asarray(sampler(step, buffer, size, history_len))
    except ClosedError as error:
        raise ClosedError(f"{where}: the sampler {_name(sampler)} reads a buffer that is closed: {error}") from error
    if ids.shape != (size,):
        raise InputError(f"{where}: the sampler returned shape {ids.shape}, expected ({size},)")
    if ids.dtype.kind not in "iu":
        raise InputError(f"{where}: the sampler returned dtype {ids.dtype}, expected integers")
    return ids.astype(np.int64)


def _name(sampler: BaseSampler) -> str:
    given = sampler.given
    name: str = getattr(given, "__name__", type(given).__name__)
    return name


def window_of(sampler: Any, buffer: Any, history_len: int) -> Any:
    """Return the buffer's clip range, for a sampler that needs more than `num_valid_ends`."""
    try:
        ask = buffer.clip_window
    except AttributeError:
        raise InputError(
            f"{type(sampler).__name__}: draws from buffers of ringmap, got {type(buffer).__name__}"
        ) from None
    return ask(history_len)


def windows_of(sampler: Any, buffer: Any, history_len: int) -> list[ClipRange]:
    """Return the buffer's clips ring by ring, for a sampler that takes them from many: the ids of each follow those of
    the one before."""
    ask = getattr(buffer, "clip_windows", None)
    return [window_of(sampler, buffer, history_len)] if ask is None else ask(history_len)


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear from `start` at step 0 to `stop` at step `steps`, and `stop` after that.

    Raises:
        InputError: an end is not a finite number, or `steps` is not a positive number.

    Example:
        >>> beta = Linear(0.4, 1.0, steps=100)
        >>> beta(0), beta(50), beta(1000)
        (0.4, 0.7, 1.0)
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name in ("start", "stop"):
            object.__setattr__(self, name, finite("Linear", name, getattr(self, name)))
        object.__setattr__(self, "steps", positive_real("Linear", "steps", self.steps))

    def __call__(self, step: int) -> float:
        """Return the value at a step."""
        share = min(max(step / self.steps, 0.0), 1.0)
        return self.start + (self.stop - self.start) * share
