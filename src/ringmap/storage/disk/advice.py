"""Advice, in words, for an error of the operating system, by its number.

Not here: what an error did to the caller's data (the caller knows).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator

from ringmap.errors import EnvironmentFault, RingmapError

__all__ = ["clear_error", "clear_errors", "clear_reads", "remedy"]

_REMEDIES = {
    errno.EMFILE: "close files, or raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close files: the whole machine has too many open",
    errno.EROFS: "mount the file system for writing, or choose another path",
    errno.EACCES: "give this process the permission, or choose another path",
    errno.EPERM: "give this process the permission, or choose another path",
}


def remedy(error: OSError) -> str:
    """Return the remedy before the call is repeated.

    Example:
        >>> remedy(OSError(errno.ENOSPC, "No space left on device"))
        'free space or mend the disk'
    """
    return _REMEDIES.get(error.errno or 0, "free space or mend the disk")


def clear_error(error: OSError, where: str, folder: str, became: str = "", then: str = "") -> EnvironmentFault:
    """Return an error that says where an error of the operating system struck, its effect, and the remedy.

    Args:
        error: of the operating system.
        where: the method to name.
        folder: named if the error names no file.
        became: the effect on the caller's data.
        then: the remedy; "" for the remedy of the error, and another call.
    """
    said = [f"{where}: {error.strerror or error} ({error.filename or folder})", became]
    said.append(then or f"{remedy(error)}, then call it again")
    return EnvironmentFault(error.errno, "; ".join(filter(None, said)))


@contextlib.contextmanager
def clear_errors(
    where: str,
    folder: str,
    became: Callable[[], str] = str,
    then: str = "",
    passing: tuple[type[Exception], ...] = (RingmapError,),
) -> Iterator[None]:
    """Replace an error of the operating system by that of `clear_error`. Where each microsecond counts, call that
    instead.

    Args:
        where: as for `clear_error`, and so `folder` and `then`.
        folder: see there.
        became: returns the effect on the caller's data.
        then: see there.
        passing: errors that are not replaced.

    Raises:
        EnvironmentFault: in place of an OSError that is not ours.
    """
    try:
        yield
    except passing:
        raise
    except OSError as error:
        raise clear_error(error, where, folder, became(), then) from error


@contextlib.contextmanager
def clear_reads(where: str, folder: str) -> Iterator[None]:
    """Do the work of `clear_errors` for a call that only reads; a missing file has a separate error."""
    with clear_errors(where, folder, passing=(RingmapError, FileNotFoundError)):
        yield
