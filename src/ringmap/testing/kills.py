"""SIGKILL before the N-th system call that changes a file, whichever library makes it.

    child:   fork -> seccomp filter -> work()           every listed call of every thread and child waits
    parent:  notification -> count -> go on             the first `changes` calls
                                   -> SIGKILL           the next one: it is never made

The filter is Linux's own (seccomp user notification, 5.7 and later): no tracer, no compiler, no root.
Invariants: the child, its threads and its children are gone when `killed_after` returns.
Not here: what must hold after a kill. What no filter sees: stores into a mapped file, and writes that
io_uring makes; a kill keeps both, in whatever order they were made.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import os
import pickle
import platform
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Outcome", "killed_after", "reason_why_not"]

_TABLES = {
    "x86_64": """
        write 1, open 2, pwrite64 18, writev 20, msync 26, sendfile 40, truncate 76, ftruncate 77, rename 82,
        mkdir 83, rmdir 84, creat 85, link 86, unlink 87, symlink 88, mknod 133, io_submit 209, openat 257,
        mkdirat 258, mknodat 259, unlinkat 263, renameat 264, linkat 265, symlinkat 266, splice 275,
        fallocate 285, pwritev 296, renameat2 316, copy_file_range 326, pwritev2 328, openat2 437
    """,
    "aarch64": """
        io_submit 2, mknodat 33, mkdirat 34, unlinkat 35, symlinkat 36, linkat 37, renameat 38, truncate 45,
        ftruncate 46, fallocate 47, openat 56, write 64, writev 66, pwrite64 68, pwritev 70, sendfile 71,
        splice 76, msync 227, renameat2 276, copy_file_range 285, pwritev2 287, openat2 437
    """,
}
"""The calls that change a file, and their numbers."""
_NUMBERS = {
    arch: {name: int(number) for name, number in (pair.split() for pair in table.split(","))}
    for arch, table in _TABLES.items()
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}

_OPENED_WITH = {"open": 1, "openat": 2}
"""Which argument says how a file is opened."""
_CHANGES = os.O_CREAT | os.O_TRUNC | 0o20000000  # O_TMPFILE, without the O_DIRECTORY in it

_WRITES_TO = {
    "write": 0,
    "writev": 0,
    "pwrite64": 0,
    "pwritev": 0,
    "pwritev2": 0,
    "sendfile": 0,
    "splice": 2,
    "copy_file_range": 2,
}
"""Which argument is the descriptor that is written: a pipe or a socket is no file."""

_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_NEW_LISTENER = 1 << 3
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION, _ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_GO_ON = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended.

    Args:
        killed: whether it was; otherwise it ended well before the call at which it would have been.
        calls: the calls that it made, by name, in order; the last one was not made if it was killed.
    """

    killed: bool
    calls: tuple[str, ...]


def killed_after(changes: int, work: Callable[[], object], *, fresh: bool = False) -> Outcome:
    """Run `work` in a fork of this process, and kill all of it after a number of changes to files.

    Args:
        changes: how many calls are made; the next one is not.
        work: what is done; tell through a pipe or a file what has returned.
        fresh: fork a process that has not used what `work` uses, for libraries whose threads do not survive a fork;
            `work` can be pickled then.

    Raises:
        OSError: the system has no such filter (`reason_why_not`).
        RuntimeError: `work` raised; its traceback is on stderr.

    Processes and threads: calls of several threads are counted as they come; one that another thread
    has begun may or may not be made, as with any kill.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = tempfile.mkdtemp() + "/made"
        >>> def work():
        ...     with open(path, "wb", 0) as file:
        ...         file.write(b"one")
        ...         file.write(b"two")
        >>> if not reason_why_not():
        ...     outcome = killed_after(2, work)
        ...     assert outcome.killed and Path(path).read_text() == "one"
        ...     assert outcome.calls == ("openat", "write", "write")
    """
    if fresh:
        return _Fresh.run(changes, work)
    arch = platform.machine()
    names = {number: name for name, number in _NUMBERS[arch].items()}
    code = ctypes.create_string_buffer(_filter(arch))
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        _run(work, code, _SECCOMP[arch], theirs)
    theirs.close()
    try:
        with ours:
            said, given, _, _ = socket.recv_fds(ours, 16, 1)
        if not given:
            code_of = int(said or errno.EIO)
            os.waitpid(child, 0)
            raise OSError(code_of, f"seccomp: {os.strerror(code_of)}")
        (listener,) = given
        try:
            killed, calls = _watch(listener, child, changes, names)
        finally:
            os.close(listener)
    except BaseException:
        _kill(child)
        raise
    _, status = os.waitpid(child, 0)
    if not killed and status:
        raise RuntimeError(f"killed_after: the work failed (status {status}): see stderr")
    return Outcome(killed, tuple(calls))


@functools.cache
def reason_why_not() -> str:
    """Return why processes can't be killed like this here; "" if they can."""
    if not sys.platform.startswith("linux") or platform.machine() not in _NUMBERS:
        return f"needs Linux on {' or '.join(_NUMBERS)}, not {sys.platform} on {platform.machine()}"
    try:
        killed_after(0, lambda: None)
    except OSError as error:
        return f"the system refuses a seccomp filter that tells of calls: {error}"
    return ""


class _Fresh:
    """A process that forks what is to be killed; started when it is first asked, it ends with this one."""

    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def run(cls, changes: int, work: Callable[[], object]) -> Outcome:
        if cls.process is None:
            told = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            cls.process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=told
            )
            atexit.register(cls.end, cls.process)
        assert cls.process.stdin is not None
        assert cls.process.stdout is not None
        pickle.dump((changes, work), cls.process.stdin)
        cls.process.stdin.flush()
        found: Outcome | Exception = pickle.load(cls.process.stdout)
        if isinstance(found, Exception):
            raise found
        return found

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        """Tell the process to end: the end of its input is no sign where a fork of this one holds that open."""
        assert process.stdin is not None
        with process, contextlib.suppress(BrokenPipeError):
            pickle.dump(None, process.stdin)
            process.stdin.close()


def _serve() -> None:
    """Run what is asked for until nobody asks any more."""
    from ringmap.testing import kills  # this module is `__main__`, whose classes nobody else knows

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if asked is None:
            return
        found: Outcome | Exception
        try:
            found = kills.killed_after(*asked)
        except Exception as error:
            found = error
        pickle.dump(found, answers)
        answers.flush()


def _filter(arch: str) -> bytes:
    """Return the filter's program: it asks about each listed call, opens only if they make or cut a file."""
    made: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCH[arch]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 0),
    ]
    for name, number in _NUMBERS[arch].items():
        argument = _OPENED_WITH.get(name)
        if argument is None:
            made += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOTIFY)]
        else:
            made += [
                (_IF_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, 16 + 8 * argument),
                (_IF_ANY_BIT, 0, 1, _CHANGES),
                (_RETURN, 0, 0, _NOTIFY),
                (_RETURN, 0, 0, _ALLOW),
            ]
    made.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in made)


def _run(work: Callable[[], object], code: ctypes.Array[ctypes.c_char], seccomp: int, parent: socket.socket) -> None:
    """Be the child: put the filter in place, hand its listener over, work, and end."""
    status = 1
    try:
        os.setsid()  # one group, which dies together
        libc = ctypes.CDLL(None, use_errno=True)
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(code))
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which only root may filter
        listener = libc.syscall(seccomp, 1, _NEW_LISTENER, program)
        if listener < 0:
            parent.send(str(ctypes.get_errno()).encode())
            os._exit(0)
        socket.send_fds(parent, [b"!"], [listener])
        os.close(listener)
        parent.close()
        work()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _watch(listener: int, child: int, changes: int, names: dict[int, str]) -> tuple[bool, list[str]]:
    """Let `changes` calls pass, then kill; return when nothing that the filter holds is left."""
    import fcntl

    calls: list[str] = []
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        ((_, events),) = poll.poll()
        if not events & select.POLLIN:
            return False, calls
        given = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, given)
        except OSError as error:
            if error.errno == errno.ENOENT:  # it was interrupted, and asks again or is gone
                continue
            raise
        call, caller, _, number, _, _, *arguments = _NOTIFICATION.unpack(given)
        if _changes_a_file(names[number], caller, arguments):
            calls.append(names[number])
            if len(calls) > changes:
                _kill(child)
                poll.modify(listener, 0)
                poll.poll()  # until the last of them is gone
                return True, calls
        try:
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(call, 0, 0, _GO_ON))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise


def _changes_a_file(name: str, caller: int, arguments: list[int]) -> bool:
    if name not in _WRITES_TO:
        return True
    fd = arguments[_WRITES_TO[name]] & 0xFFFFFFFF
    if fd in (1, 2):  # what it says, into whatever file that goes
        return False
    try:
        return stat.S_ISREG(os.stat(f"/proc/{caller}/fd/{fd}").st_mode)
    except OSError:
        return False


def _kill(child: int) -> None:
    """Kill a child and all in its group."""
    for send in (os.killpg, os.kill):
        try:
            send(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    _serve()
