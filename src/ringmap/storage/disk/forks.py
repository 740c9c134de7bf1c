"""Forks: a child process never waits for a lock that a thread of its parent held.

    parent   thread A draws: NumPy holds the generator's lock     thread B forks
    child    the lock is held, and A does not exist to release it

Before a fork every `Forkable` object may store what the child will look for. In a child, each gets new generators in
the states of the old ones, and new locks.

Invariants: attributes that shared a generator before the fork share one after it.
Not here: what a forked child of the writer releases (store.py).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Self

import numpy as np

__all__ = ["Forkable", "Renew"]

Renew = Callable[[np.random.Generator], np.random.Generator]


class Forkable:
    """Base class for objects with generators as attributes; a subclass with locks replaces them as well."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make an object that a fork finds: here, since copied and unpickled objects skip `__init__`."""
        made = super().__new__(cls)
        _made.add(made)
        return made

    def before_fork(self) -> None:
        """Do what a child relies on; called in the parent, in the thread that forks. May not raise."""

    def reset_after_fork(self, renewed: Renew) -> None:
        """Replace each generator; called in a child, right after the fork.

        Args:
            renewed: returns the replacement of a generator.
        """
        for name, value in list(vars(self).items()):
            if isinstance(value, np.random.Generator):
                vars(self)[name] = renewed(value)


_made: weakref.WeakSet[Forkable] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    known: dict[np.random.Generator, np.random.Generator] = {}

    def renewed(old: np.random.Generator) -> np.random.Generator:
        if old not in known:
            bits = type(old.bit_generator)()
            bits.state = old.bit_generator.state  # takes no lock, as any method of `old` would
            known[old] = np.random.Generator(bits)
        return known[old]

    for made in list(_made):
        made.reset_after_fork(renewed)


def _before_fork() -> None:
    for made in list(_made):
        made.before_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
