"""A process that may not have more memory than so much: page cache counts, as it does in a container."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

__all__ = ["drop_cache", "limit_memory", "peak_memory"]

_ROOTS = {
    "memory.limit_in_bytes": Path("/sys/fs/cgroup/memory"),  # version 1
    "memory.max": Path("/sys/fs/cgroup"),
}


def limit_memory(nbytes: int) -> bool:
    """Put this process into a group of its own with this limit; False where that is not allowed (it takes root)."""
    for name, root in _ROOTS.items():
        group = root / f"ringmap-bench-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / name).write_text(str(nbytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return True
    return False


def drop_cache(folder: Path) -> None:
    """Let the system forget what it holds of the files below a folder."""
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def peak_memory() -> int:
    """Return the most bytes that this process ever held, maps included."""
    with contextlib.suppress(OSError):  # getrusage's own figure starts with the peak of the parent
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
