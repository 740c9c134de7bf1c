"""Faults: each breach of the invariants that check states, found part by part.

Invariants: reads only; what a live writer evicts or changes meanwhile is no fault.
Not here: the invariants, in words (check.py); where the bytes lie (scan.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from ringmap.errors import DamageError, NewerVersionError
from ringmap.storage.directory.entries import FINE, NAMES
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.inspect.raw_files import Part, words_of
from ringmap.storage.inspect.scan import Scan
from ringmap.storage.read.recovery import Progress, breaks_of, why_impossible
from ringmap.storage.records.blobs import segment_number
from ringmap.storage.records.names import (
    COLUMNS,
    DATA,
    MANIFEST,
    OPEN,
    SALVAGE,
    SALVAGED,
    STATE,
    STREAM,
    TABLE,
    WORDS,
)
from ringmap.storage.records.step_file import StoredSteps, read_steps
from ringmap.storage.records.table import EPISODE, Record
from ringmap.storage.sidecars import SIDECARS, Home, Sidecar

__all__ = [
    "ASIDE",
    "FRESH",
    "NO_FILE",
    "ORPHAN",
    "Finding",
    "faults_in",
    "home_of",
    "orphans_in",
    "sidecar_faults",
    "stream_of",
]

ASIDE, FRESH = ".aside", ".new"
"""What repair adds to the name of a file that it set aside, and of one that is not finished."""

NO_FILE = ", expected a regular file: what leads elsewhere is not followed"
"""The end of what is said of a segment that is none."""

ORPHAN = "segment is an orphan: no record names it"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    `file`: which file, relative to the buffer's directory, with forward slashes; `what`: what is
    wrong with it; `seq`: the record of the episode that it concerns, if it concerns one.
    """

    file: str
    what: str
    seq: int | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def faults_in(survey: Scan, progress: Progress | None = None) -> Iterator[Finding]:
    """Yield what is wrong with what was surveyed: all that an opening refuses is among it."""
    sound = True
    for finding in _found_in(survey, progress):
        sound = False
        yield finding
    refused = survey.refused
    if sound and refused is not None and not survey.has_moved():
        yield Finding(TABLE, _words_of(survey, refused))


def _words_of(survey: Scan, refused: DamageError) -> str:
    """Return the words of an error, without the path and the advice."""
    path = survey.files.path(TABLE)
    return str(refused).removeprefix(f"{path}: ").removesuffix("; run ringmap.check on the buffer")


def _found_in(survey: Scan, progress: Progress | None) -> Iterator[Finding]:
    parts = survey.parts
    for part in (parts.manifest_part, parts.table, parts.state, *parts.columns):
        yield from (Finding(part.file, fault) for fault in part.faults)
    if parts.manifest is None:
        yield Finding(
            MANIFEST,
            "can't be made again from the other files, and little can be checked without it",
        )
        for name in survey.files.names(COLUMNS):
            if name not in parts.labels:
                yield Finding(name, "its label can't be read either, so nothing tells what it was")
        return
    yield from _manifest(survey)
    if parts.state.at is not None:
        yield from _states(survey)
    if parts.table.at is not None:
        yield from _table(survey)
    yield from _blobs_and_rows(survey, progress)
    yield from _streams(survey)
    yield from _beside(survey)
    yield from _others(survey)


# -- file by file --------------------------------------------------------------------------------


def _manifest(survey: Scan) -> Iterator[Finding]:
    manifest = survey.manifest
    for one, size in zip(manifest.columns, manifest.sizes, strict=True):
        if one.is_known and size != one.nbytes:
            said = f"{one.file} has {size} bytes, expected {one.nbytes}"
            yield Finding(MANIFEST, f"says that {said}")
    stored = survey.reached.seq
    if manifest.witness > stored:
        yield Finding(
            MANIFEST,
            f"says that record {manifest.witness} was stored, but record {stored} is the newest",
        )
    counts, number = manifest.table, manifest.table.get("seq", 0)
    record = survey.table.read(number) if number else None
    if record is not None and any(counts.get(name) != getattr(record, name) for name in ("first", "tail", "head")):
        yield Finding(MANIFEST, f"counts disagree with record {number}, which they name")


def _states(survey: Scan) -> Iterator[Finding]:
    one, other = survey.states
    if one is not None and other is not None and abs(one.generation - other.generation) != 1:
        between = f"{one.generation} and {other.generation}"
        yield Finding(STATE, f"generations of its slots are {between}, expected neighbours")
    for slot, state in enumerate(survey.states):
        if state is None:
            if one is not None or other is not None:
                yield Finding(STATE, f"slot {slot} is torn or damaged")
            continue
        need = max(state.mark, state.seq if survey.clean else 0)
        if need > survey.reached.seq and not survey.has_moved():
            stored = survey.reached.seq
            yield Finding(STATE, f"slot {slot} shows record {need}, but record {stored} is the newest")
        record = survey.table.read(state.seq) if state.seq else None
        if record is not None and (record.first, record.tail, record.head) != (
            state.first,
            state.tail,
            state.head,
        ):
            yield Finding(STATE, f"slot {slot} disagrees with record {state.seq}, which it shows")
    shown, newest, counts = survey.shown, survey.reached, survey.manifest.table
    if shown is None:
        return
    # A kill may come between record and state: one is not shown then. A flush has shown all that it counts.
    stored = newest.seq - 1 if survey.clean and newest.by == TABLE else 0
    if shown.seq < max(stored, counts.get("seq", 0)):
        again = max((s for s in survey.look_at_states() if s), key=lambda s: s.generation, default=shown)
        if again == shown:
            yield Finding(STATE, f"shows record {shown.seq}, but {newest.seq} is stored: an old copy")


def _table(survey: Scan) -> Iterator[Finding]:
    reached, records, valid = survey.reached, survey.records, survey.valid
    manifest = survey.manifest
    if isinstance(survey.refused, NewerVersionError):
        yield Finding(TABLE, _words_of(survey, survey.refused))
    for first, last in survey.broken():
        run = f"record {first} is" if first == last else f"records {first} to {last} are"
        whole = survey.table.read(first) if first == last else None
        if whole is not None:  # its checksum holds
            yield Finding(TABLE, why_impossible(whole, manifest.max_steps), first)
            continue
        why = f"; {reached.by} knows of record {reached.seq}" if reached.by != TABLE else ""
        yield Finding(TABLE, f"{run} damaged or missing{why}", first)
    for at in np.split(np.arange(len(records)), np.flatnonzero(np.diff(valid)) + 1):
        if len(at) and valid[at[0]]:
            yield from (Finding(TABLE, f"record {seq} {what}") for seq, what in breaks_of(records[at]))
    if reached.head - reached.tail > manifest.max_steps:
        steps = reached.head - reached.tail
        yield Finding(TABLE, f"{steps} steps are live, expected at most max_steps={manifest.max_steps}")
    if survey.misled and not survey.has_moved():
        yield Finding(TABLE, survey.misled)
    for number in [] if survey.has_moved() else survey.strays:
        yield Finding(TABLE, f"record {number} can't be of this ring: record {reached.seq} is the newest")


def _blobs_and_rows(survey: Scan, progress: Progress | None) -> Iterator[Finding]:
    parts, files = survey.parts, survey.files
    for folder in (DATA, OPEN):
        if not files.disk.is_folder(files.path(folder)):
            yield Finding(folder, "folder is missing")
    for file, at in survey.find_segments().items():
        yield Finding(file, f"swapped: its blobs lie at {at}")
    if parts.columns:
        for record, faults in survey.verify(progress):
            yield from (Finding(file, what, record.seq) for file, what in faults)
    newest = survey.table.read(survey.reached.seq) if survey.reached.seq else None
    if newest is not None and newest.kind != EPISODE and newest.blob_size and survey.blob(newest) is None:
        again = survey.look_at_states()
        if survey.states == again:
            file = survey.segment_file(newest.blob_segment)
            yield Finding(
                file,
                f"blob of record {newest.seq}, which carries the small state, is damaged",
                newest.seq,
            )
    small = next(survey.small_states())
    carrier = survey.table.read(small.seq) if small.fault else None
    if carrier is not None and not survey.has_moved():
        yield Finding(survey.segment_file(carrier.blob_segment), small.fault)
    if (fault := survey.kept_fault()) and not survey.has_moved():
        yield Finding(MANIFEST, fault)


def _streams(survey: Scan) -> Iterator[Finding]:
    for folder in survey.files.names(OPEN):
        stream = stream_of(survey, folder)
        if stream is not None and stream.fault:
            yield Finding(
                f"{folder}/{STREAM}",
                f"{stream.fault}; the {stream.count} steps before it are whole",
            )


def _beside(survey: Scan) -> Iterator[Finding]:
    for sidecar in SIDECARS:
        for _ in range(3):  # a write may be under way
            found = sidecar_faults(survey, sidecar, survey.newest())
            if not found:
                break
        if not sidecar.of_newest or not survey.has_moved():  # or else a writer has gone on
            yield from (Finding(sidecar.names[0], fault) for fault in found)


def sidecar_faults(survey: Scan, sidecar: type[Sidecar], newest: Record | None) -> list[str]:
    """Return what is wrong with a sidecar, in words, given the newest live episode; nothing where there is none."""
    home = home_of(survey)
    return words_of(lambda: sidecar.faults(home, newest)) if sidecar.is_part_of(home) else []


def home_of(survey: Scan) -> Home:
    """Return the directory as sidecars know it."""
    files, manifest = survey.files, survey.manifest
    return Home(files.disk, files.folder, manifest.uuid, manifest.rows, manifest.schema)


def stream_of(survey: Scan, folder: str) -> StoredSteps | None:
    """Return what the stream in a folder of `open/` holds, None when there is none (any more)."""
    files, stream = survey.files, None
    if not files.is_file(f"{folder}/{STREAM}"):  # a link leads elsewhere
        return None
    for _ in range(3):  # a frame may be under way
        try:
            path = files.path(f"{folder}/{STREAM}")
            stream = read_steps(files.disk, path, survey.manifest.max_steps)
        except (OSError, NotAFileError):
            return None
        if not stream.fault:
            break
    return stream


def orphans_in(survey: Scan, without: Collection[int] = ()) -> list[str]:
    """Return the segments that no record names, but for those `without`, and that are not the newest."""
    records, valid, _ = survey.table.scan()
    valid = valid & ~np.isin(records["seq"], list(without))
    live = survey.live()
    newest = live["blob_segment"][~np.isin(live["seq"], list(without))].max(initial=0)
    named = {survey.segment_file(int(number)) for number in np.unique(records["blob_segment"][valid])}
    return [
        name
        for name in survey.files.names(DATA)
        if (number := segment_number(name.rpartition("/")[2])) is not None
        and number < newest
        and name not in named
        and survey.files.is_file(name)
    ]


def _strays(survey: Scan, index: int, part: Part) -> Iterator[Finding]:
    """Find what lies in a column's folder and is no part of it."""
    one, files = survey.manifest.column(index), survey.files
    if part.at is not None and one.is_known:
        for name in one.at(files.disk, files.path(part.at)).strays():
            yield Finding(f"{part.at}/{name}", "is not part of a buffer")


def _others(survey: Scan) -> Iterator[Finding]:
    """Find what is not part of a buffer, and segments that nothing names."""
    files, parts = survey.files, survey.parts
    ours = NAMES | {part.at for part in (parts.manifest_part, parts.table, parts.state, *parts.columns) if part.at}
    ours |= set(survey.find_segments().values())
    for name in (SALVAGE, SALVAGED):
        if files.disk.exists(files.path(name)):
            yield Finding(name, "was left by a repair that was interrupted")
    # Where records are lost, the segments that they named are no news.
    orphans = [] if survey.broken() else orphans_in(survey)
    for index, part in enumerate(parts.columns):
        yield from _strays(survey, index, part)
    names = [
        *files.names(),
        *(files.names(COLUMNS) if parts.columns else ()),
        *files.names(DATA),
    ]
    for name in [*names, *files.names(OPEN)]:
        base = name.rpartition("/")[2]
        number = segment_number(base) if name.startswith(f"{DATA}/") else None
        if name in ours or name in survey.manifest.files or base in FINE or base.startswith(".nfs"):
            continue
        if name.startswith(f"{OPEN}/") and files.disk.is_folder(files.path(name)):
            known = {f"{name}/{STREAM}", f"{name}/{WORDS}"}
            strange = [inner for inner in files.names(name) if inner not in known]
            yield from (Finding(inner, "is not part of a buffer") for inner in strange)
        elif number is not None:
            if not files.is_file(name) and files.disk.exists(files.path(name)):
                yield Finding(name, f"is {files.disk.kind(files.path(name)) or 'a file'}{NO_FILE}")
            elif name in orphans:
                yield Finding(name, ORPHAN)
        elif base.endswith(ASIDE):
            yield Finding(name, "was set aside by repair: move it to where it belongs, or remove it")
        elif base.endswith(FRESH):
            yield Finding(name, "was left by a repair that was interrupted")
        elif files.disk.exists(files.path(name)):
            yield Finding(name, "is not part of a buffer")
