"""Processes: objects that live in one of their own, with a memory limit of its own where that is asked for.

    here                                   there
    process(Writer, "ring") -> remote      Writer("ring"), made there; `close()` at the end
    remote("write", 300)                   write(300) -> what it returned, or raised
    once(function, ...)                    a process for one call

Libraries that share a process share its limit: what one of them imports, another can't keep rows in.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

__all__ = [
    "DiedError",
    "Remote",
    "cold_turn",
    "drop_cache",
    "limit_memory",
    "once",
    "peak_memory",
    "private_memory",
    "process",
]


class DiedError(Exception):
    """A process has ended: most often there was not enough memory for it."""


class Remote:
    """An object of another process: `remote(name, *args)` calls a method, or returns an attribute."""

    def __init__(self, pipe: Connection, pid: int | None = None) -> None:
        self._pipe, self.pid = pipe, pid

    def __call__(self, name: str, *args: Any) -> Any:
        """Call, and wait for the answer."""
        self.ask(name, *args)
        return self.answer()

    def ask(self, name: str, *args: Any) -> None:
        """Have it called."""
        with contextlib.suppress(BrokenPipeError):  # answer() says that it has died
            self._pipe.send((name, args))

    def answer(self) -> Any:
        """Wait for what was asked first."""
        try:
            found, error = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise DiedError("its process has ended") from None
        if error is not None:
            raise error
        return found


@contextlib.contextmanager
def process(make: Callable[..., Any], *args: Any, method: str = "spawn", limit: int = 0) -> Iterator[Remote]:
    """Start a process that makes an object and calls its methods, and end it; `limit`: bytes that it may have."""
    context: Any = multiprocessing.get_context(method)
    pipe, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs, make, args, limit))
    child.start()
    theirs.close()
    try:
        yield Remote(pipe, child.pid)
    finally:
        with contextlib.suppress(BrokenPipeError):
            pipe.send(None)
        child.join(20)
        if child.exitcode is None:  # threads of a library that never end
            child.kill()
            child.join()


def once(function: Callable[..., Any], *args: Any, method: str = "spawn", limit: int = 0) -> Any:
    """Return what a function returns in a process of its own."""
    with process(partial, function, *args, method=method, limit=limit) as remote:
        return remote("__call__")


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...], limit: int) -> None:
    multiprocessing.set_start_method(None, force=True)  # its workers start as they do anywhere, not as it was started
    # Before anything is written: what a process has mapped from before stays in memory whatever is asked.
    limited = limit_memory(limit) if limit else True
    made, error = None, None
    try:
        made = make(*args)
    except Exception as raised:
        error = raised
    while (asked := pipe.recv()) is not None:
        try:
            if error is not None:
                raise error
            name, given = asked
            found = limited if name == "limited" else getattr(made, name)
            pipe.send((found(*given) if callable(found) else found, None))
        except Exception as raised:
            pipe.send((None, raised))
    if made is not None and hasattr(made, "close"):
        made.close()


# -- memory --------------------------------------------------------------------------------------

_ROOTS = {
    "memory.limit_in_bytes": Path("/sys/fs/cgroup/memory"),  # version 1
    "memory.max": Path("/sys/fs/cgroup"),
}


def limit_memory(nbytes: int) -> bool:
    """Put this process into a group of its own with this limit, page cache included, as a container's.

    Returns:
        False where that is not allowed (it takes root).
    """
    for name, root in _ROOTS.items():
        group = root / f"ringmap-bench-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / name).write_text(str(nbytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return True
    return False


def peak_memory() -> int:
    """Return the most bytes that this process ever held, maps included."""
    with contextlib.suppress(OSError):  # getrusage's own figure starts with the peak of the parent
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- cold reads ----------------------------------------------------------------------------------


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


def cold_turn(call: Callable[[], object], group: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Return the seconds per batch of one turn, cold, and what was read from the disk for it.

    `group`: batches timed together, for those that arrive in bunches.
    """
    drop_cache(folder)
    for _ in range(group if seconds else 1):  # what was on its way before the cache was dropped
        call()
    before, began, times = _read_bytes(), perf_counter(), list[float]()
    while not times or perf_counter() - began < seconds:
        start = perf_counter()
        for _ in range(group):
            call()
        times.append((perf_counter() - start) / group)
    return {"seconds": times, "read": _read_bytes() - before, "calls": len(times) * group}


def _read_bytes() -> int:
    """Return what this process and its workers have read from the disk itself."""
    pids, total = [os.getpid()], 0
    while pids:
        entry = Path("/proc", str(pids.pop()))
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = (entry / "io").read_text().splitlines()
            total += int(next(line for line in lines if line.startswith("read_bytes")).split()[1])
            for task in (entry / "task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return total


# -- what a process takes ------------------------------------------------------------------------


def private_memory(pid: int, folder: Path) -> dict[str, float]:
    """Return the megabytes that only this process has mapped, by what they are; empty where the system does not tell.

    `folder`: below it are the rows.
    """
    kinds = {"of its own": 0.0, "in shared memory": 0.0, "of the rows": 0.0}
    try:
        lines = Path("/proc", str(pid), "smaps").read_text().splitlines()
    except OSError:
        return {}
    kind = ""
    for line in lines:
        first, *rest = line.split()
        if not first.endswith(":"):  # a mapping: addresses, rights, offset, device, inode, path
            path = " ".join(rest[4:])
            shared = path.startswith(("/dev/shm", "/dev/zero", "/memfd"))
            kind = "in shared memory" if shared else "of its own"
            kind = "of the rows" if path.startswith(f"{folder}/") and path.endswith(".npy") else kind
        elif first in ("Private_Clean:", "Private_Dirty:"):
            kinds[kind] += int(rest[0]) * 1024 / 1e6
    return kinds
