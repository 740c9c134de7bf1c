"""What does a collector pay for one who watches it in the viewer?

python -m ringmap view FOLDER      a process of its own
a collector                        a process that is told when to write how much
a follower                         reads the events of its page, in no browser
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks.harness.data import fill, states
from benchmarks.harness.place import Place
from benchmarks.harness.processes import process
from benchmarks.harness.table import Table
from ringmap import ReplayBuffer

LENGTH, KEPT = 100, 5_000


def _key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:12]


@contextlib.contextmanager
def _server(path: Path) -> Iterator[str]:
    """Serve a folder from a process of its own, and give the address."""
    command = [sys.executable, "-m", "ringmap", "view", str(path), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "300"}) as server:
        found = next((found for line in server.stdout or () if (found := re.search(r"http://\S+", line))), None)
        if found is None:
            raise RuntimeError(f"{' '.join(command)}: ended")
        try:
            yield found[0]
        finally:
            server.terminate()


class Collector:
    """Writes as many episodes as it is told."""

    def __init__(self, path: Path) -> None:
        self._episodes, self._buffer = states(LENGTH), ReplayBuffer(KEPT * LENGTH, path=path)

    def write(self, episodes: int) -> tuple[float, float]:
        """Write so many; return the seconds of the clock and of the processor."""
        start, began = perf_counter(), process_time()
        fill(self._buffer, self._episodes, episodes)
        return perf_counter() - start, process_time() - began

    def close(self) -> None:
        """Close the ring."""
        self._buffer.close()


def viewer(place: Place) -> Iterator[Table]:
    """Write the same number of episodes in turns, with somebody who follows and without."""
    missing = [n for n in ("starlette", "uvicorn", "typer") if importlib.util.find_spec(n) is None]
    if missing:
        yield Table(f"viewer: left out, not installed: {', '.join(missing)}")
        return
    path, count = place.new_folder() / "collected", place.size(3_000, 20, 1_500)
    table = Table(f"a collector: {count:,} episodes of {LENGTH} steps of 64 bytes a turn, one thread")
    beside = "beside one who follows"
    found: dict[str, list[tuple[float, float]]] = {"alone": [], beside: []}
    with process(Collector, path, method=place.method) as collector:
        collector("write", 2 * place.size(KEPT, 10))  # the ring is full: each episode evicts one
        with _server(path) as address:
            ways: dict[str, Callable[[], Any]] = {"alone": contextlib.nullcontext}
            ways[beside] = partial(_following, address, _key(path))
            for number in range(place.size(40, 1, 16)):
                for name in found if number % 2 else reversed(found):
                    with ways[name]():
                        found[name].append(collector("write", count))
    taken = {name: np.array(both) / count for name, both in found.items()}
    for at, (what, mark) in enumerate((("time", ""), ("processor time", ", processor time"))):
        table.add_all({name + mark: both[:, at] for name, both in taken.items()})
        pairs = taken[beside][:, at] / taken["alone"][:, at]
        # The 95 % interval of the median, by resampling.
        drawn = np.random.default_rng(0).choice(pairs, (2000, len(pairs)))
        low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
        table.fact(f"{what}, interval of the median of pairs", f"{low:.3f} to {high:.3f}")
        table.bar(f"{what} beside one who follows / alone, median of pairs", float(np.median(pairs)), at_most=1.03)
    table.notes.append(
        "the collector writes as fast as it can; the follower reads the events of its page, in no browser"
    )
    yield table


@contextlib.contextmanager
def _following(address: str, key: str) -> Iterator[None]:
    """Read the events of a place, and do nothing else."""
    port, token = re.search(r":(\d+)/\?token=(\S+)", address).groups()  # type: ignore[union-attr]
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", f"/api/events?p={key}", headers={"Cookie": f"ringmap-{port}={token}"})
    reply = connection.getresponse()
    assert reply.status == 200

    def read() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while reply.readline():
                pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(2)
    thread.join(5)
    connection.close()
