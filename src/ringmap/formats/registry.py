"""The registry of formats.

    "hdf5" -> ringmap.formats.builtin.HDF5    (built in)
    "mine" -> entry point of `ringmap.formats` (a third party's, found by its installation)
              or @register_format              (a third party's, found by its import)
    "x.h5" -> "hdf5"                          (the suffix of a path to write, if no name is given)

Invariants: a name belongs to one format, and a format has one name; a format whose package is missing
is not listed, but the error for it names what to install.
Not here: what a format must do (base.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

from ringmap.errors import InputError, MissingFormatError, UnsupportedError
from ringmap.extras import missing
from ringmap.formats.base import Format
from ringmap.formats.builtin import BUILT_IN, BuiltIn
from ringmap.storage.disk.paths import refuse_address

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ENTRY_POINT_GROUP",
    "FORMATS",
    "SUFFIXES",
    "FormatFacts",
    "FormatTable",
    "describe_formats",
    "detect_format",
    "get_format",
    "list_formats",
    "refuse_missing",
    "register_format",
    "resolve_format",
]

F = TypeVar("F", bound=type[Format])

ENTRY_POINT_GROUP = "ringmap.formats"
"""Where a package announces a format: `mine = "my_package.my_module:MyFormat"`."""

log = logging.getLogger("ringmap")


SUFFIXES = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr", ".lance": "lance"}
"""Suffixes of paths that name a format; any other format is named by its own name as a suffix."""


class FormatTable(MutableMapping[str, type[Format]]):
    """Formats by name: a dict that imports the format of a third party when it is looked up.

    Args:
        built_in: formats known from the start.
    """

    def __init__(self, built_in: Mapping[str, type[BuiltIn]]) -> None:
        self._built_in = dict(built_in)
        self._points: dict[str, EntryPoint] | None = None
        self._loaded: dict[str, type[Format]] = {}

    def __getitem__(self, name: str) -> type[Format]:
        if name not in self._loaded:
            ours = self._built_in.get(name)
            if ours is not None:
                if not ours.available():
                    raise KeyError(name)
                return ours
            loaded = self._entry_points()[name].load()
            self._loaded.setdefault(name, loaded)  # the import may have registered it by itself
        return self._loaded[name]

    def __setitem__(self, name: str, value: type[Format]) -> None:
        self._loaded[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        for table in (self._loaded, self._built_in, self._entry_points()):
            table.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return any(name == known for known in self)

    def __iter__(self) -> Iterator[str]:
        ours = [name for name, one in self._built_in.items() if one.available()]
        others = [name for name in self._loaded if name not in self._built_in]
        yield from dict.fromkeys([*ours, *self._entry_points(), *others])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"FormatTable({list(self)})"

    def add(self, cls: type[Format]) -> None:
        """Register a format under its name.

        Raises:
            InputError: it has no name, or the name belongs to another format.
        """
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name:
            raise InputError(f"{cls.__name__}: a format must set a non-empty `name`")
        point = self._entry_points().get(name)
        its_own = point is not None and point.module == cls.__module__
        if name in self._loaded or name in self._built_in or (name in self and not its_own):
            raise InputError(f"format {name!r} is already registered; choose another name")
        self._loaded[name] = cls

    def missing(self) -> dict[str, type[BuiltIn]]:
        """Return the built-in formats whose package is not installed."""
        return {name: one for name, one in self._built_in.items() if not one.available()}

    def recognising(self, path: str | PathLike[str]) -> Iterator[type[Format]]:
        """Yield the formats that recognise a path, in order, also those whose packages are not installed: only a match
        asks for these.

        A third party's format that fails to load is logged and left out.
        """
        sharing = [name for name, one in self._built_in.items() if one.shares]
        general = [name for name, one in self._built_in.items() if one.general]
        names = dict.fromkeys([*sharing, *self._built_in, *self._entry_points(), *self._loaded])
        for name in (*(n for n in names if n not in general), *general):
            try:
                found = self._loaded.get(name) or self._built_in.get(name) or self[name]
                if found.detect(path):
                    yield found
            except Exception:
                if name in self._built_in:
                    raise
                log.warning("format %r can't be used", name, exc_info=True)

    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._points is None:
            from importlib.metadata import entry_points  # here: it imports email, zipfile and more

            found = entry_points(group=ENTRY_POINT_GROUP)
            self._points = {p.name: p for p in found if p.name not in self._built_in}
        return self._points


FORMATS = FormatTable(BUILT_IN)
"""Every format by name."""


def register_format(cls: F) -> F:
    """Register a subclass of `Format` under its `name`; use it as a decorator.

    Raises:
        InputError: its name is empty, or already registered.
    """
    FORMATS.add(cls)
    return cls


def list_formats() -> list[str]:
    """Return the names of the formats that can be used. Imports no module of a third party."""
    return list(FORMATS)


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """What a format can do.

    `reads`, `writes`, `appends`, `lossless`: None if this is unknown without its package.
    `available`: whether it can be used here; `install`: the requirement for pip if not; "" for a third party's.
    """

    name: str
    reads: bool | None
    writes: bool | None
    appends: bool | None
    lossless: bool | None
    available: bool
    install: str


def describe_formats() -> list[FormatFacts]:
    """Return what each format can do: the built-in ones in order, installed or not, then those of third parties.

    A third party's format that fails to load is logged, and listed as not available.

    Cost: imports each format's module, which imports its package only if a third party's does.

    Example:
        >>> hdf5 = describe_formats()[0]
        >>> hdf5.name, hdf5.writes, hdf5.lossless
        ('hdf5', True, True)
    """
    found = []
    for name in dict.fromkeys([*BUILT_IN, *FORMATS]):
        ours = BUILT_IN.get(name)
        install = ours.install() if ours is not None else ""
        try:
            cls = FORMATS[name]
        except Exception:
            if ours is None:
                log.warning("format %r can't be used", name, exc_info=True)
            found.append(FormatFacts(name, None, None, None, None, False, install))
            continue
        writes = cls.can_write()
        lossless = cls.lossless if writes else None
        found.append(FormatFacts(name, cls.can_read(), writes, writes and cls.appends, lossless, True, install))
    return found


def get_format(name: str) -> type[Format]:
    """Return a format by name.

    Raises:
        MissingFormatError: its package is not installed; the message says what to install.
        InputError: there is no format of that name.
    """
    try:
        return FORMATS[name]
    except KeyError:
        pass
    absent = FORMATS.missing()
    if name in absent:
        lacking = " and ".join(missing(absent[name].extra))
        raise MissingFormatError(
            f"format {name!r} needs {lacking}, not installed; pip install "
            f'"{absent[name].install()}", or choose one of {list_formats()}'
        )
    hint = "".join(f'; {n!r} comes with pip install "{m.install()}"' for n, m in absent.items())
    raise InputError(f"unknown format {name!r}{_meant(name)}; known: {list_formats()}{hint}")


def _meant(name: str) -> str:
    """Return a question if an unknown format name is a suffix of a format, or close to its name."""
    import difflib  # here: an import of it is for errors alone

    said = str(name).lower().lstrip(".")
    close = difflib.get_close_matches(said, [*FORMATS, *FORMATS.missing()], n=1)
    meant = SUFFIXES.get(f".{said}", *close[:1])
    return f"; did you mean {meant!r}?" if meant else ""


def resolve_format(
    path: str | PathLike[str],
    format: str | None = None,
    *,
    mode: str = "append",
    default: str | None = None,
    where: str = "resolve_format",
    option: str = "format=NAME",
) -> type[Format]:
    """Return the format to write at a path: the requested one, by suffix, by existing content, or the default.

    Args:
        path: where to write.
        format: its name; None: the path decides.
        mode: one of `WRITE_MODES`: "append" extends an existing dataset, which has to be of this format.
        default: the format if nothing else decides.
        where: the call to name in an error.
        option: the caller's option for the format.

    Raises:
        InputError: two of them contradict each other, nothing decides, there is no format of that name, or it is
            read only.
        UnsupportedError: the path names a zip file.
        MissingFormatError: its package is not installed.

    Example:
        >>> resolve_format("runs/demo.h5").name, resolve_format("runs/demo", default="zarr").name
        ('hdf5', 'zarr')
    """
    refuse_address(path)
    refuse_zip(path, where)
    place, named, there = os.fspath(path), _by_suffix(path), None
    if named is not None and format in BUILT_IN and named not in (format, BUILT_IN[format].shares):
        raise InputError(
            f"{where}: the suffix of {place} names format {named!r}, but the format is to be {format!r}; "
            "choose another suffix, or the format that it names"
        )
    if os.path.exists(place):
        there = detect_format(place)
    name = format or named or (there and there.name) or default
    if name is None:
        raise InputError(
            f"{where}: the suffix of {place} names no format ({', '.join(SUFFIXES)} do); say which: "
            f"{option}, one of {_writable()}"
        )
    found = get_format(name)
    if not found.can_write():
        raise InputError(f"{where}: format {found.name!r} is read-only; choose another: {option}, one of {_writable()}")
    if mode == "append" and there is not None and there is not found and not found.detect(place):
        raise InputError(
            f"{where}: {place} holds a dataset of format {there.name!r}, to which no {found.name!r} can be appended; "
            "choose another path, or that format"
        )
    return found


def refuse_zip(path: str | PathLike[str], where: str) -> None:
    """Raise for a path that names a zip file, such as `replay_buffer.zarr.zip`.

    Raises:
        UnsupportedError: it does; the message says how to unpack it.
    """
    place = os.fspath(path).rstrip("/")
    stem, suffix = os.path.splitext(place)
    if suffix.lower() == ".zip":
        raise UnsupportedError(
            f"{where}: {place}: datasets are not read or written in zip files; unpack it (python -m zipfile -e {place} "
            f"{stem}) and name the folder, {stem}"
        )


def _by_suffix(path: str | PathLike[str]) -> str | None:
    """Return the name of the format that the suffix of a path names, or None. It imports no format."""
    suffix = os.path.splitext(os.fspath(path).rstrip("/"))[1].lower()
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    own = suffix[1:]
    return own if own and (own in FORMATS or own in FORMATS.missing()) else None


def _writable() -> list[str]:
    return [facts.name for facts in describe_formats() if facts.writes]


def detect_format(path: str | PathLike[str]) -> type[Format] | None:
    """Return the first format that recognises `path`, or None.

    A format whose packages are not installed is skipped; `refuse_missing` names it. A third party's format that fails
    to load is logged and skipped.
    """
    return next((found for found in FORMATS.recognising(path) if found.name in FORMATS), None)


def refuse_missing(path: str | PathLike[str]) -> None:
    """Raise if `path` holds a dataset of a built-in format whose packages are not installed.

    Raises:
        MissingFormatError: it does; the message says what to install.
    """
    for found in FORMATS.recognising(path):
        get_format(found.name)
