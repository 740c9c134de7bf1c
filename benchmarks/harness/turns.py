"""Parties that take turns, each in a process of its own with a memory limit of its own.

    here                    there: python -m benchmarks.questions.cold FOLDER STEPS LENGTH LIMIT PARTY
    Party.turn(way, 4.0) -> the page cache is dropped, batches for 4 s -> seconds of each, bytes read

Libraries that share a process share its limit: what one of them imports, another can't keep rows in.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness.limit import drop_cache

__all__ = ["DiedError", "Party", "Way", "here", "serve", "spawned", "timed"]


class DiedError(Exception):
    """A party's process has ended: most often there was not enough memory for it."""


@dataclass(frozen=True)
class Way:
    """One way to get a batch. `group`: batches timed together, for those that arrive in bunches."""

    call: Callable[[], object]
    setting: str = ""
    group: int = 1


@dataclass(frozen=True)
class Party:
    """Ways by their names, wherever they run: `turn(way, seconds) -> {"seconds": [...], "read": bytes, "calls": n}`."""

    settings: Mapping[str, str]
    turn: Callable[[str, float], dict[str, Any]]
    notes: Mapping[str, str] = field(default_factory=dict)


def timed(way: Way, folder: Path, seconds: float) -> dict[str, Any]:
    """Return the seconds per batch of one turn, cold, and what was read from the disk for it."""
    drop_cache(folder)
    for _ in range(way.group if seconds else 1):  # what was on its way before the cache was dropped
        way.call()
    before, began, times = _read_bytes(), perf_counter(), list[float]()
    while not times or perf_counter() - began < seconds:
        start = perf_counter()
        for _ in range(way.group):
            way.call()
        times.append((perf_counter() - start) / way.group)
    return {
        "seconds": times,
        "read": _read_bytes() - before,
        "calls": len(times) * way.group,
    }


def here(ways: Mapping[str, Way], folder: Path, notes: Mapping[str, str]) -> Party:
    """Return a party of this process."""
    settings = {name: way.setting for name, way in ways.items()}
    return Party(settings, lambda name, seconds: timed(ways[name], folder, seconds), notes)


def serve(ways: Mapping[str, Way], folder: Path, notes: Mapping[str, str]) -> None:
    """Answer the turns that come in, until there are no more."""
    party = here(ways, folder, notes)
    _tell({"settings": dict(party.settings), "notes": dict(notes)})
    for line in sys.stdin:
        asked = json.loads(line)
        _tell(party.turn(asked["name"], asked["seconds"]))


@contextlib.contextmanager
def spawned(*command: object) -> Iterator[Party]:
    """Start a command that serves a party, and end it."""
    with subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def answer() -> dict[str, Any]:
            for line in child.stdout or ():
                if line.startswith(_MARK):
                    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                    return found
            raise DiedError(f"{command[-1]} ended with status {child.wait()}")

        def turn(name: str, seconds: float) -> dict[str, Any]:
            with contextlib.suppress(BrokenPipeError):  # answer() says that it has died
                print(json.dumps({"name": name, "seconds": seconds}), file=child.stdin, flush=True)
            return answer()

        first = answer()
        try:
            yield Party(first["settings"], turn, first["notes"])
        finally:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:  # threads of a library that never end
                child.kill()


_MARK = "turn: "


def _tell(found: Mapping[str, Any]) -> None:
    print(_MARK + json.dumps(found), flush=True)


def _read_bytes() -> int:
    """Return what this process and its workers have read from the disk itself."""
    pids, total = [os.getpid()], 0
    while pids:
        process = Path("/proc", str(pids.pop()))
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = (process / "io").read_text().splitlines()
            total += int(next(line for line in lines if line.startswith("read_bytes")).split()[1])
            for task in (process / "task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return total
