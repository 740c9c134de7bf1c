"""The options of a buffer: their names, their valid values, and which must agree with the disk.

Not here: what they do (replay.py, storage/).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from typing import Any

from ringmap.arguments import positive, real
from ringmap.clips.facts import Facts
from ringmap.errors import InputError
from ringmap.storage.columns.backends import Storage, disagreement
from ringmap.storage.columns.schema import Schema
from ringmap.storage.commit.store import Settings
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.ring.ring import spare_rows

__all__ = [
    "Options",
    "check_reads",
    "check_whole",
    "log_progress",
    "must_agree",
    "sendable",
    "settings_of",
    "spare_of",
]


log = logging.getLogger("ringmap")


@dataclass(frozen=True)
class Options:
    """The settings that a buffer stores in its directory for `ReplayBuffer.open`."""

    history_len: int = 1
    frameskip: int = 1
    durability: str = "process"
    casting: str = "safe"
    interrupted: str = "drop"
    sync_every_s: float = 30.0
    reward_at: str | None = None
    fps: Fraction | float | None = None

    @classmethod
    def remembered(cls, stored: Mapping[str, Any], folder: str) -> Options:
        """Return the options stored in a directory; an invalid one is replaced by the default."""
        known = {field.name for field in fields(cls)} & stored.keys()
        with contextlib.suppress(InputError):
            options = cls(**{name: stored[name] for name in known})
            options.check(folder)
            return options
        options = cls()
        for name in sorted(known):
            try:
                options = replace(options, **{name: stored[name]})
                options.check(folder)
            except InputError as error:
                log.warning("%s; the manifest says so, and it is left out", error)
                options = replace(options, **{name: getattr(cls, name)})
        return options

    def with_kept(self, stored: Options, where: str) -> Options:
        """Return these options, with the stored place of rewards and rate, unless these contradict them."""
        if self.reward_at and stored.reward_at and self.reward_at != stored.reward_at:
            raise InputError(
                f"{where}: reward_at={self.reward_at!r}, but the buffer on disk has reward_at={stored.reward_at!r}"
            )
        mine, kept = Facts.of(self), Facts.of(stored)
        mine.refuse_rate(kept, where, "the argument", "the buffer on disk")
        facts = kept.over(mine)
        return replace(self, reward_at=facts.reward_at, fps=facts.fps)

    def check(self, where: str) -> None:
        """Raise InputError for an invalid value."""
        for name in ("history_len", "frameskip"):
            object.__setattr__(self, name, positive(where, name, getattr(self, name)))
        for name, known in (
            ("durability", ("process", "power")),
            ("casting", ("safe", "unsafe")),
            ("interrupted", ("drop", "keep")),
        ):
            if getattr(self, name) not in known:
                raise InputError(f"{where}: {name} must be one of {known}, got {getattr(self, name)!r}")
        object.__setattr__(self, "fps", Facts.named(where, self.reward_at, self.fps).fps)
        most = threading.TIMEOUT_MAX
        seconds = real(self.sync_every_s)
        if seconds is None or not 0 <= seconds <= most:
            raise InputError(f"{where}: sync_every_s must be seconds, 0 for never, got {self.sync_every_s!r}")
        object.__setattr__(self, "sync_every_s", seconds)


def sendable(where: str, name: str, value: Any) -> Any:
    """Return a value for the pickle, if another process can find it by name: no lambda, and nothing made inside a
    function."""
    found = value
    while isinstance(found, functools.partial):
        found = found.func
    named = found if isinstance(found, types.FunctionType | type) else type(found)
    if "<" in named.__qualname__:  # <lambda>, <locals>
        raise InputError(
            f"{where}: {name} is {value!r}, which can't be pickled for another process: a lambda, or what is made "
            "inside a "
            "function, has no name there; give a function at the top of a module, or a functools.partial of one"
        )
    return value


def check_whole(where: str, state: Any, names: Iterable[str]) -> None:
    """Raise InputError unless a state has the keys that `state_dict` writes."""
    missing = [name for name in names if not isinstance(state, Mapping) or name not in state]
    if missing:
        raise InputError(f"{where}: the state has no {missing}; give what state_dict returned. Nothing was changed")


def spare_of(max_steps: int, asked: int | None, where: str) -> int:
    """Return the number of spare rows: the given number, or the default for `max_steps`."""
    if asked is None:
        return spare_rows(max_steps)
    # Without spare rows, each episode would need a retire record and a sync for it.
    return positive(where, "spare_rows", asked)


def check_reads(reads: str, where: str) -> bool:
    """Return whether rows are read through maps; raise InputError for an unknown way."""
    if reads not in ("map", "pread"):
        raise InputError(f"{where}: reads must be 'map' or 'pread', got {reads!r}")
    return reads == "map"


def settings_of(options: Options, storage: Storage, mapped: bool = True) -> Settings:
    """Return the options that the store needs."""
    return Settings(
        options.durability == "power",
        float(options.sync_every_s),
        storage,
        asdict(options),
        log_progress,
        mapped,
    )


def must_agree(
    fixed: Manifest,
    max_steps: int,
    schema: Schema | None,
    storage: Storage,
    spare: int | None,
    where: str,
) -> None:
    """Raise unless the arguments agree with what is fixed on disk."""
    ways = "make a new buffer and fill it with extend_from, or open this one as it is with ReplayBuffer.open"
    for name, asked, found in (
        ("max_steps", max_steps, fixed.max_steps),
        ("spare_rows", spare, fixed.spare),
    ):
        if asked is not None and asked != found:
            raise InputError(
                f"{where}: {name}={asked}, but the buffer on disk has {name}={found}; there is no resize: {ways}"
            )
    if fixed.schema is None:
        return
    known = fixed.schema
    if schema is not None and (schema != known or schema.mutable != known.mutable):
        raise InputError(
            f"{where}: schema {[str(c) for c in schema.columns]}, but the buffer on disk has "
            f"{[str(c) for c in fixed.schema.columns]}; {ways}"
        )
    fault = disagreement(storage, fixed.schema, list(fixed.choices), where)
    if fault is not None:
        raise InputError(f"{where}: {fault}; {ways}")


def log_progress(done: int, of: int) -> None:
    """Log the progress of a verification."""
    if done == of or done % 1000 == 0:
        log.info("verified %d of %d episodes", done, of)
