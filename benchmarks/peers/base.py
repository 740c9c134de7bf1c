"""The protocol of a peer, and how peers are made: those that are not installed are named with how to install them.

Peer(spec) -> fill(stored), or add(rows) -> sample(size) -> clips(batch): column -> (B, H, ...) -> close()
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.data import Stored
from benchmarks.harness.table import Table

__all__ = ["Peer", "Spec", "expect_random", "full", "made"]

Array = np.ndarray[Any, np.dtype[Any]]

EXTRA = "pip install -c constraints.txt -e '.[bench]'"
PEERS = "pip install -c constraints.txt -r benchmarks/peers.txt"
NO_DEPS = "pip install --no-deps -r benchmarks/peers-alone.txt"
"""How to install what cannot stand in an extra: some require much that their buffers alone do without."""


@dataclass(frozen=True)
class Spec:
    """What a peer is to hold.

    `first`: columns of some steps, for their dtypes and shapes; `size`: how many steps. `folder`: for files; None: in
    RAM. `batch`, `history`: clips of a batch, steps of a clip. `lanes`: environments that step together. `stack`:
    frames of a stack, 0: no stacks. `threads`: for rows on a disk, how many may wait for it at once; 0: in memory.
    """

    first: Mapping[str, Array]
    size: int
    folder: Path | None = None
    batch: int = 256
    history: int = 1
    lanes: int = 1
    prioritized: bool = False
    stack: int = 0
    threads: int = 0

    @classmethod
    def of(cls, stored: Stored, folder: Path, batch: int, history: int, threads: int = 0) -> Spec:
        """Return the spec of a buffer of all these episodes."""
        return cls(stored.first, stored.num_steps, folder, batch, history, threads=threads)


class Peer:
    """A library's buffer or files, set up as its documentation says, with the options that make it fastest here.

    Attributes:
        package: what is installed, for its version.
        called, way: the library for people, and which way of it.
        setting: how it is set up, for people.
        install: the command that installs it.
        lacks: columns that it does not return.
        whole: whether a clip stays in its episode.
        workers: how many it does best with from a disk.
    """

    package = called = way = setting = ""
    install = EXTRA
    lacks: tuple[str, ...] = ()
    whole = True
    workers = 0
    batches: Callable[[int], Iterable[Any]] | None = None
    """Number of workers -> a pass of batches, where the library has passes."""

    def __init__(self, spec: Spec) -> None:
        """Make it; raises ImportError where the library is not installed."""
        self.spec = spec

    @property
    def name(self) -> str:
        """The library, its version and the way."""
        return " ".join(filter(None, (self.called, version(self.package) if self.package else ""))) + self.way

    def fill(self, stored: Stored) -> None:
        """Add all episodes, many steps at a time."""
        for chunk in stored.chunks():
            self.add({name: values for name, values in chunk.items() if name != "episode"})

    def add(self, rows: Mapping[str, Any]) -> object:
        """Add steps, column -> `(n, ...)`: the next ones, or one of each lane."""
        raise NotImplementedError

    def add_one(self, step: Mapping[str, Any]) -> object:
        """Add a step without an axis of lanes, where the library has another call or shape for it."""
        return self.add(step)

    def sample(self, size: int) -> Any:
        """Draw a batch as the library does."""
        raise NotImplementedError

    def clips(self, batch: Any) -> Mapping[str, Any]:
        """Return a batch as column -> array."""
        return dict(batch)

    def update(self, priorities: Array) -> object:
        """Set the priorities of the newest batch."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of it."""


def made(kinds: Sequence[type[Peer]], spec: Spec, table: Table) -> Iterator[Peer]:
    """Make those that are installed; the table names the others."""
    for kind in kinds:
        try:
            yield kind(spec)
        except ImportError as error:
            table.fact(f"skipped, {kind.called}{kind.way}", f"{error}; {kind.install}")
        except RuntimeError as error:  # its compiled part is for another PyTorch
            table.notes.append(f"{kind.called} is left out: {str(error).splitlines()[0].rstrip('.')}")


def full(kinds: Sequence[type[Peer]], spec: Spec, stored: Stored, table: Table) -> list[Peer]:
    """Make and fill them, and prove a batch of each that draws."""
    found = []
    for peer in made(kinds, spec, table):
        peer.fill(stored)
        prove(peer, stored)
        found.append(peer)
    return found


def prove(peer: Peer, stored: Stored) -> None:
    """Raise unless a batch holds what is stored; where little is, a pass may have a smaller one."""
    draws = type(peer).sample is not Peer.sample
    batch = peer.clips(peer.sample(peer.spec.batch) if draws else next(iter(peer.batches(0))))  # type: ignore[misc]
    size = np.asarray(batch["reward"]).size // peer.spec.history
    assert size == peer.spec.batch or stored.num_steps < 10_000
    stored.assert_holds(batch, size, peer.spec.history, peer.whole, peer.lacks)


def release(package: str) -> str:
    """Return the version of a package, "" if it is no distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def expect_random(address: int, nbytes: int) -> None:
    """Turn the system's readahead off for a map, which is given by its address."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), mmap.MADV_RANDOM):
        raise OSError(ctypes.get_errno(), "madvise")
