"""What to do about an error of the operating system, in words, by its number.

Not here: what an error did to the caller's data (the caller knows).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ringmap.errors import EnvironmentFault, RingmapError

__all__ = ["clear_reads", "remedy"]

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
def clear_reads(where: str, folder: str) -> Iterator[None]:
    """Say where an error of the operating system struck a call that only reads, and what to do about it."""
    try:
        yield
    except (RingmapError, FileNotFoundError):  # what is missing has an error of its own
        raise
    except OSError as error:
        raise EnvironmentFault(
            error.errno,
            f"{where}: {error.strerror or error} ({error.filename or folder}); {remedy(error)}, then call it again",
        ) from error
