"""Find what lies below paths: rings, fleets, other buffers, and datasets of every format.

    runs/            two rings or more of the same columns: a fleet, and each ring; one that can't be read is of the
    fleet, too
      a/ b/
    expert.h5        a dataset
    broken/          a place with a problem

Invariants: a link is followed only to what lies below the given paths; a place is named by a key, so that no request
holds a path; nothing is changed.
Not here: what is in a place (sources.py).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ringmap.buffers.opening import DATASET, EPISODES, FLEET, TRANSITIONS, has_parts, is_dataset, kind_at
from ringmap.errors import NotFoundError, RingmapError
from ringmap.formats.registry import detect_format
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import Paths, refuse_address
from ringmap.storage.records.manifest import read_manifest

__all__ = ["FLEET", "PROBLEM", "Place", "find"]


PROBLEM = "problem"

_DEEPEST, _SUFFIX = 5, 12
_MOST_ENTRIES = 20_000
_Columns = tuple[str, frozenset[ColumnSpec]]


@dataclass(frozen=True, slots=True)
class Place:
    """What lies at a path.

    `key`: names it in requests; `name`: its path as the user would say it; `kind`: of a buffer ("episodes",
    "transitions", "distillation"), "fleet", "dataset" or "problem"; `format`: of a dataset; `problem`: why it can't be
    shown; `rings`: the keys of a fleet's rings.
    """

    key: str
    path: str
    name: str
    kind: str
    format: str | None = None
    problem: str | None = None
    rings: tuple[str, ...] = ()


def key_of(path: str) -> str:
    """Return what names a path in requests."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def find(paths: Sequence[str | os.PathLike[str]], fleets: Collection[str] = ()) -> list[Place]:
    """Return the places at and below paths, in order, each once.

    Cost: looks at up to 20,000 entries, five folders deep; reads the manifests of buffers.
    """
    roots = []
    for path in paths:
        refuse_address(path)
        if not os.path.lexists(path):
            raise NotFoundError(f"view: {os.fspath(path)}: nothing is there; check its spelling")
        roots.append((os.path.realpath(path), os.fspath(path).rstrip("/") or "/"))
    search = _Search([real for real, _ in roots], fleets)
    found: dict[str, Place] = {}
    for real, shown in roots:
        search.others.clear()
        inside = list(search.at(real, shown, 0))
        if not inside and search.others and key_of(real) not in found:
            inside = [search.nothing_in(real, shown)]
        for place in inside:
            found.setdefault(place.key, place)
    if search.is_cut:
        why = f"only the first {_MOST_ENTRIES:,} entries were looked at; give a folder closer to the data"
        cut = Place(key_of("..."), "", ", ".join(shown for _, shown in roots), PROBLEM, problem=why)
        found[cut.key] = cut
    return list(found.values())


class _Search:
    def __init__(self, roots: list[str], fleets: Collection[str]) -> None:
        self.roots, self.fleets = roots, fleets
        self.left, self.is_cut = _MOST_ENTRIES, False
        self.seen: set[str] = set()
        self.others = Counter[str]()
        """Files that hold nothing of ours, by suffix."""

    def at(self, path: str, name: str, depth: int) -> Iterator[Place]:
        if path in self.seen or depth > _DEEPEST:
            return
        if self.left <= 0:
            self.is_cut = True
            return
        self.seen.add(path)
        self.left -= 1
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            yield self._problem(path, name, f"can't be looked at: {error.strerror}")
            return
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            return  # a pipe or a device: opening it may hang
        try:
            place = _place(path, name)
        except (RingmapError, OSError) as error:
            yield self._problem(path, name, str(error))
            return
        if place is not None:
            yield place
            return
        if stat.S_ISDIR(mode):
            yield from self._below(path, name, depth)
        else:
            self.others[os.path.splitext(path)[1][:_SUFFIX] or "no suffix"] += 1

    def nothing_in(self, path: str, name: str) -> Place:
        """Return a place that says what was found at a path in place of buffers and datasets."""
        if not os.path.isdir(path):
            return self._problem(
                path,
                name,
                "is a file of no format that ringmap reads; `ringmap formats` lists them",
            )
        shown = ", ".join(f"{count:,} {suffix}" for suffix, count in self.others.most_common(5))
        more = ", ..." if len(self.others) > 5 else ""
        return self._problem(
            path,
            name,
            f"holds no buffer and no dataset that ringmap reads, but other files: {shown}{more}",
        )

    def _below(self, path: str, name: str, depth: int) -> Iterator[Place]:
        try:
            names = sorted(os.listdir(path))
        except OSError as error:
            yield self._problem(path, name, f"can't be listed: {error.strerror}")
            return
        inside: list[Place] = []
        rings: dict[str, _Columns | None] = {}  # by key: what it holds; None if it can't be read
        for child in names:
            if child.startswith("."):
                continue
            at, shown = os.path.join(path, child), f"{name}/{child}"
            if os.path.islink(at):
                at = os.path.realpath(at)
                if not any(at == root or at.startswith(root.rstrip("/") + "/") for root in self.roots):
                    inside.append(
                        self._problem(
                            os.path.join(path, child), shown, "a link that leads out of the given paths is not followed"
                        )
                    )
                    continue
            for place in self.at(at, shown, depth + 1):
                inside.append(place)
                if os.path.dirname(place.path) == path and _is_ring(place):
                    rings[place.key] = _columns_of(place)
        sound = [columns for columns in rings.values() if columns is not None]
        told = {columns for _, columns in sound if columns}
        alike = len(sound) > 1 and len(told) == 1 and len({kind for kind, _ in sound}) == 1
        if alike or (rings and path in self.fleets):
            yield Place(key_of(path), path, name, FLEET, rings=tuple(rings))
        yield from inside

    @staticmethod
    def _problem(path: str, name: str, why: str) -> Place:
        return Place(key_of(path), path, name, PROBLEM, problem=why)


def _place(path: str, name: str) -> Place | None:
    kind = kind_at(path)
    if kind is not None:
        return Place(key_of(path), path, name, kind)
    if has_parts(path):
        read_manifest(Disk(), path)  # it is what is left of a buffer: this says what is wrong
        return None
    if is_dataset(path):
        found = detect_format(path)
        if found is not None and found.name == "hdf5" and os.path.isdir(path):
            return None  # a file of HDF5 stands for its folder, in which other things may be: it is found by itself
        return Place(key_of(path), path, name, DATASET, None if found is None else found.name)
    return None


def _is_ring(place: Place) -> bool:
    """Return whether a place is a ring of episodes or transitions, or one that can't be read."""
    if place.kind == PROBLEM:
        try:
            return Disk().exists(Paths(place.path).manifest)
        except OSError:  # that can't be told
            return True
    return place.kind in (EPISODES, TRANSITIONS)


def _columns_of(place: Place) -> _Columns | None:
    """Return the kind and the columns of a ring, none before its first episode; None if it can't be read."""
    if place.kind == PROBLEM:
        return None
    try:
        schema = read_manifest(Disk(), place.path).schema
    except (RingmapError, OSError):  # it was removed at this moment
        return None
    return place.kind, frozenset(() if schema is None else schema.columns)
