"""When the blow falls: at the N-th executed line, or after the N-th call.

Lines and calls are those of the code under test, by `sys.settrace`, in the main thread: what the pool
threads of a verification execute is hit only by the asynchronous kills.
"""

import ast
import dis
import os
import signal
import sys
from functools import cache
from pathlib import Path

import filelock

import ringmap

PACKAGE = Path(ringmap.__file__).parent
OURS = tuple(str(PACKAGE / part) + os.sep for part in ("storage", "buffers"))
UNDER = (
    *OURS,
    str(Path(filelock.__file__).parent) + os.sep,
    os.path.join(os.path.dirname(os.__file__), "contextlib.py"),
)
"""Ours, and the Python code of others that runs between our lines: an interrupt may come there too."""


def kill(_place):
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(place):
    raise KeyboardInterrupt(place)


class Blow:
    """Counts what it watches; at the `at`-th one it strikes. `at=0` never does, and lists the places.

    `forgiving`: an interrupt is forgotten, with the frames that it holds, before the process goes on.
    """

    forgiving = False

    def __init__(self, at, strike):
        self.at = at
        self.strike = strike
        self.count = 0
        self.places = []
        self.struck = ""

    def here(self, place, possible=True):
        self.count += 1
        if not self.at:
            self.places.append((place, possible))
        elif self.count == self.at:
            self.struck = place
            self.strike(place)

    def arm(self):
        raise NotImplementedError

    def disarm(self):
        raise NotImplementedError


class AtLine(Blow):
    """Strikes before the N-th line of our code."""

    paths = OURS

    before = None

    def arm(self):
        self.before = sys.gettrace()
        sys.settrace(self._call)

    def disarm(self):
        sys.settrace(self.before)

    def _call(self, frame, event, _):
        if not _watched(frame.f_code, self.paths):
            return None
        return self._local if self.at else self._list(frame)

    def _local(self, frame, event, _):
        if event == "line":
            self.here(_name(frame))
        return self._local

    def _list(self, frame):
        """Return what lists the lines of a frame, and whether an interrupt can come there."""
        frame.f_trace_opcodes = True
        code, before, dying = frame.f_code, (None, None), _in_del(frame)

        def local(frame, event, _):
            nonlocal before
            if event == "line":
                possible = not dying and can_be_interrupted(code, frame.f_lasti, *before)
                self.here(_name(frame), possible)
            elif event == "opcode":
                before = before[1], frame.f_lasti
            return local

        return local


class AfterCall(AtLine):
    """Strikes where CPython looks for signals: when a function is entered, after a call, at a jump back.

    Finer than lines: between the call and the assignment in `self._lock = take()`, say. What such an
    interrupt leaves may go only with its traceback.
    """

    paths = UNDER
    forgiving = True

    def _call(self, frame, event, _):
        code = frame.f_code
        if not _watched(code, self.paths):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        looks, before, possible = _looks(code), None, not _in_del(frame)
        self.here(_name(frame) + ", entered", possible)

        def local(frame, event, _):
            nonlocal before
            if event == "opcode":
                if before in looks:
                    self.here(_name(frame) + ", after a call", possible)
                before = frame.f_lasti
            elif event == "exception":  # of a call: CPython goes to the handler without a look
                before = None
            return local

        return local


# -- code ----------------------------------------------------------------------------------------


@cache
def _watched(code, paths):
    return code.co_filename.startswith(paths)


def _in_del(frame):
    """Tell whether a frame runs below a `__del__`, where Python itself prints and drops any exception."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _name(frame):
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"


_LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}


@cache
def _looks(code):
    """Return the offsets of the instructions after which CPython 3.11 looks for pending signals."""
    return {i.offset for i in dis.get_instructions(code) if i.opname in _LOOKS}


def can_be_interrupted(code, at, last_but_one, last):
    """Tell whether a signal can strike before the line that begins at offset `at` of the bytecode.

    A trace function can raise at every line, a signal can't: CPython looks for one only on entering a
    function, after a call and at a jump back. Two kinds of line are left out:

    - The exit of a `with` statement, normal or by an exception. Its line event comes before `__exit__` is
      called, and nothing in between looks for signals: a real one comes before the block ended, or
      once `__exit__` runs. Raised there, `__exit__` never runs and a lock stays taken for ever. The
      same goes for a `finally` that begins by releasing a lock, or without a call.
    - A line without any call, entered without a look since the line before it: `try:` after an
      assignment, an assignment first in a `finally`. What it would leave, no signal leaves.
    """
    kinds = _kinds(code)
    if at in kinds["exits"]:
        return False
    looked = last is None or last in _looks(code)
    looked = looked or (last in kinds["pops"] and last_but_one in _looks(code))
    return looked or at not in kinds["without a call"]


@cache
def _kinds(code):
    exits, silent, pops = set(), set(), set()
    instructions = list(dis.get_instructions(code))
    finals = _final_lines(code.co_filename)
    line = []
    for at, first in enumerate(instructions):
        names = [i.opname for i in instructions[at : at + 2]]
        if names[0] == "POP_TOP":
            pops.add(first.offset)
        rest = instructions[at + (names[0] in ("NOP", "SWAP")) :][:3]
        nones = len(rest) == 3 and all(i.opname == "LOAD_CONST" and i.argval is None for i in rest)
        if nones or names == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"] or first.starts_line in finals:
            exits.add(first.offset)
        if first.starts_line is not None:
            line = [first.offset]
            silent.add(first.offset)
        if first.opname in _LOOKS | {"PUSH_EXC_INFO", "RESUME"}:
            silent -= set(line)
    return {"exits": exits, "without a call": silent, "pops": pops}


@cache
def _final_lines(path):
    """Return the lines that begin a `finally` by releasing a lock, or without a call."""
    with open(path) as source:
        tree = ast.parse(source.read())
    finals = [node.finalbody[0] for node in ast.walk(tree) if getattr(node, "finalbody", [])]
    return {final.lineno for final in finals if all(map(_releases, _calls(final)))}


def _calls(statement):
    return [node for node in ast.walk(statement) if isinstance(node, ast.Call)]


def _releases(call):
    return isinstance(call.func, ast.Attribute) and call.func.attr == "release"
