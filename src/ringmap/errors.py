"""The tree of exceptions, grouped by what the caller does next.

Every class is also the builtin that people already catch for the same
mistake, so `except ValueError` goes on working:

    RingmapError
      InputError           ValueError      fix the call
        UnknownColumnError KeyError        ... of a column's name
        SubscriptError     TypeError       ... in the brackets
        ArgumentTypeError  TypeError       ... of another kind of value
        UnsupportedError NotImplementedError ... or leave out what is not read, or not held
      ClipIndexError       IndexError      fix the index
      NoClipsError         RuntimeError    collect more first
        LappedError                        ... or raise max_steps
      RoleError            RuntimeError    use another handle
        ClosedError, ReadOnlyError, LockedError, StaleCopyError, ReplacedError
      NotFoundError        FileNotFoundError   fix the path
      ExistsError          FileExistsError     choose another path, or a mode that may replace
      BadRingsError        RuntimeError    mend or remove the rings that it names
      RolloutError         RuntimeError    mend the environment (of the reinforcement learning kind)
      EnvironmentFault     OSError         fix the machine, then go on
        SyncFailedError                    ... and open the buffer again
      DamageError          ValueError      the bytes are wrong: check, repair
        CorruptError, NewerVersionError, UnreleasedVersionError, UnknownFormatError
      MissingExtraError    ImportError     install an extra
        MissingFormatError ValueError      ... that reads and writes a format
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ArgumentTypeError",
    "BadRingsError",
    "ClipIndexError",
    "ClosedError",
    "CorruptError",
    "DamageError",
    "EnvironmentFault",
    "ExistsError",
    "InputError",
    "LappedError",
    "LockedError",
    "MissingExtraError",
    "MissingFormatError",
    "NewerVersionError",
    "NoClipsError",
    "NotFoundError",
    "ReadOnlyError",
    "ReplacedError",
    "RingmapError",
    "RoleError",
    "RolloutError",
    "StaleCopyError",
    "SubscriptError",
    "SyncFailedError",
    "UnknownColumnError",
    "UnknownFormatError",
    "UnreleasedVersionError",
    "UnsupportedError",
]


class RingmapError(Exception):
    """Root of everything that ringmap raises on purpose."""


class InputError(RingmapError, ValueError):
    """An argument is wrong. Nothing was changed; fix the call."""


class UnknownColumnError(InputError, KeyError):
    """A column of that name is not stored."""

    __str__ = Exception.__str__  # KeyError's own shows the repr of the message


class SubscriptError(InputError, TypeError):
    """What stands in the brackets is no clip id, or the buffer has none."""


class ArgumentTypeError(InputError, TypeError):
    """An argument is of a kind that the call does not take; the message says which argument takes it."""


class UnsupportedError(InputError, NotImplementedError):
    """Something is sound, but not supported: the message names it, and what to do instead."""


class ClipIndexError(RingmapError, IndexError):
    """A clip, episode or step number lies outside what is stored."""


class NoClipsError(RingmapError, RuntimeError):
    """Nothing to sample yet: collect more first."""


class LappedError(NoClipsError):
    """The writer overtook a reader time after time: raise `max_steps`."""


class RoleError(RingmapError, RuntimeError):
    """This handle may not do what was asked; another one may."""


class ClosedError(RoleError):
    """The buffer was closed."""


class ReadOnlyError(RoleError):
    """A reader, or a forked or unpickled copy, was asked to write."""


class LockedError(RoleError):
    """Another handle holds the writer's lock."""


class StaleCopyError(RoleError):
    """Persistent workers would go on serving an old copy of a RAM buffer."""


class ReplacedError(RoleError):
    """What is at the path of a buffer or dataset is no longer what was opened."""


class NotFoundError(RingmapError, FileNotFoundError):
    """Nothing is stored at this path."""


class ExistsError(RingmapError, FileExistsError):
    """Something is stored at this path already, and the mode says to leave it alone."""


class BadRingsError(RingmapError, RuntimeError):
    """Rings of a fleet can't be read, and nothing is drawn from a part of a fleet unasked.

    `rings`: why, by the directory of each.
    """

    def __init__(self, message: str, rings: Mapping[str, Exception]) -> None:
        super().__init__(message)
        self.rings = dict(rings)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.rings)


class RolloutError(RingmapError, RuntimeError):
    """An environment raised, broke its contract, or its process died: mend it, and collect on."""


class EnvironmentFault(RingmapError, OSError):
    """The machine said no: a full disk, an I/O error, a file system that lacks a service."""


class SyncFailedError(EnvironmentFault):
    """A sync failed, so this writer stopped: close it and open the buffer again."""


class DamageError(RingmapError, ValueError):
    """The bytes on disk are not what was written."""


class CorruptError(DamageError):
    """A file is cut, flipped, missing, swapped or foreign."""


class NewerVersionError(DamageError):
    """The format is from a newer ringmap."""


class UnreleasedVersionError(DamageError):
    """The format is from a version of ringmap that was never released: record again."""


class UnknownFormatError(DamageError):
    """The path holds something else."""


class MissingExtraError(RingmapError, ImportError):
    """An optional package is needed: install the named extra."""


class MissingFormatError(MissingExtraError, InputError):
    """The format is known, but the package that reads and writes it is not installed."""
