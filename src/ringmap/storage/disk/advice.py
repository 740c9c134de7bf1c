"""What to do about an error of the operating system, in words, by its number.

Not here: what an error did to the caller's data (the caller knows).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator

from ringmap.errors import EnvironmentFault, RingmapError

__all__ = ["clear_errors", "clear_reads", "remedy"]

_REMEDIES = {
    errno.EMFILE: "close files, or raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close files: the whole machine has too many open",
    errno.EROFS: "mount the file system for writing, or choose another path",
    errno.EACCES: "give this process the permission, or choose another path",
    errno.EPERM: "give this process the permission, or choose another path",
}


def remedy(error: OSError) -> str:
    """Return what to do before the call is made again.

    Example:
        >>> remedy(OSError(errno.ENOSPC, "No space left on device"))
        'free space or mend the disk'
    """
    return _REMEDIES.get(error.errno or 0, "free space or mend the disk")


@contextlib.contextmanager
def clear_errors(
    where: str,
    folder: str,
    became: Callable[[], str] = str,
    then: str = "",
    passing: tuple[type[Exception], ...] = (RingmapError,),
) -> Iterator[None]:
    """Say where an error of the operating system struck, what it did, and what to do about it.

    Args:
        where: the method to name.
        folder: named where the error names no file.
        became: returns what became of the caller's data.
        then: what to do; "" for the remedy of the error, and another call.
        passing: errors that are left as they are.

    Raises:
        EnvironmentFault: in the place of an OSError that is none of ours.
    """
    try:
        yield
    except passing:
        raise
    except OSError as error:
        said = [f"{where}: {error.strerror or error} ({error.filename or folder})", became()]
        said.append(then or f"{remedy(error)}, then call it again")
        raise EnvironmentFault(error.errno, "; ".join(filter(None, said))) from error


@contextlib.contextmanager
def clear_reads(where: str, folder: str) -> Iterator[None]:
    """Do what `clear_errors` does for a call that only reads; what is missing has an error of its own."""
    with clear_errors(where, folder, passing=(RingmapError, FileNotFoundError)):
        yield
