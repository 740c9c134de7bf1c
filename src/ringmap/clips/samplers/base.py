"""What a sampler is, and what those of ours have in common: a generator whose state can be kept.

    buffer.sample(B) -> sampler(step, buffer, B, history_len) -> B ids in [0, buffer.num_valid_ends(history_len))

A sampler of ours is also asked for `small_state()`, which the buffer stores with each commit that
follows a draw and with each flush, and is given it back when the directory is opened again.

Invariants: the same state gives the same draws from the same buffer; NumPy's global generator is left alone.
Not here: which clips are drawn (the other modules of this package).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ringmap.errors import InputError, RingmapError
from ringmap.storage.forks import Forkable

__all__ = ["Array", "Draws", "HasClips", "Sampler", "Seed", "Weigh", "check_state", "generator", "positive", "weights_of", "window_of"]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]
Seed = np.random.Generator | int | None
Weigh = Callable[[Array], Array]
"""Returns the weights of a batch, given where its clips are in the end: some may have been drawn anew."""


class HasClips(Protocol):
    """What a sampler needs to know of a buffer."""

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips of this length."""
        ...


class Sampler(Protocol):
    """Draws clip ids: any callable with this signature.

    Returns an integer array of shape `(batch_size,)` in `[0, buffer.num_valid_ends(history_len))`.
    It may keep state; one with `state_dict` and `load_state_dict` has it saved by the buffer's own.
    """

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return the ids of `batch_size` clips."""
        ...


class Draws(Forkable):
    """A sampler that draws from a generator of its own.

    Args:
        rng: the generator, or its seed; None makes a fresh one.
    """

    is_quick = True
    """Whether it answers at once, so that a buffer may keep the writer waiting while it is asked."""

    def __init__(self, rng: Seed = None) -> None:
        self.rng = generator(rng, type(self).__name__)

    def small_state(self) -> dict[str, Any]:
        """Return the state that a buffer stores with its commits: JSON, and small."""
        return {"kind": type(self).__name__, "rng": self.rng.bit_generator.state}

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `small_state` was taken.

        Raises:
            InputError: it is that of another sampler.
        """
        check_state(self, state)
        self.rng.bit_generator.state = state["rng"]

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, to go beside a checkpoint."""
        return self.small_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.load_small_state(state)


def generator(seed: Seed, where: str, name: str = "rng") -> np.random.Generator:
    """Return a generator: the one given, or a new one with this seed."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {name} must be a Generator, a seed or None: {error}") from None


def check_state(sampler: Any, state: Mapping[str, Any]) -> None:
    """Raise InputError unless the state is of a sampler of this kind."""
    kind = state.get("kind")
    if kind != type(sampler).__name__:
        raise InputError(
            f"{type(sampler).__name__}.load_state_dict: the state is that of {kind!r}; load it into such a sampler"
        )


def positive(where: str, name: str, value: Any, integer: bool = True) -> Any:
    """Return `value` if it is a positive number."""
    try:
        number = operator.index(value) if integer else float(value)
        if 0 < number < float("inf") and not isinstance(value, bool):
            return number
    except (TypeError, ValueError):
        pass
    what = "a positive integer" if integer else "a positive number"
    raise InputError(f"{where}: {name} must be {what}, got {value!r}")


def weights_of(sampler: Any) -> Weigh | None:
    """Return what weighs the batch that a sampler just drew; None if it weighs nothing.

    Asked for before the sampler draws again. It has a method `weigh`, or an attribute `weights`.
    """
    weigh: Weigh | None = getattr(sampler, "weigh", lambda: None)()
    weights = getattr(sampler, "weights", None)
    if weigh is None and weights is not None:
        kept = np.array(weights, np.float32)
        return lambda positions: kept
    return weigh


def window_of(sampler: Any, buffer: Any, history_len: int) -> Any:
    """Return the buffer's window, for a sampler that needs more of it than `num_valid_ends`."""
    try:
        ask = buffer.clip_window
    except AttributeError:
        raise InputError(
            f"{type(sampler).__name__}: draws from buffers of ringmap, got {type(buffer).__name__}"
        ) from None
    except RingmapError:
        raise
    return ask(history_len)
