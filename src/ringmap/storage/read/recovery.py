"""Recovery: finds the committed state of a directory, whatever was interrupted.

Two cases. In the boot in which state.bin was written, the page cache has every write in order:
the state is the one shown, or one record more. After a reboot (or when the boot is unknown),
the disk may hold any mix of old and new: the state is the newest one whose live
records are all whole, and the episodes that no sync covers are verified.

Invariants: the search changes nothing; a state below a witness (state.bin, its mark, the
manifest) is damage, and never taken.
Not here: how a writer then repairs the files (commit_files.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, NewerVersionError
from ringmap.storage.columns.rows import Rows, combine
from ringmap.storage.disk.threads import mapped
from ringmap.storage.disk.xxh3 import BLOCK
from ringmap.storage.records.blobs import (
    LARGEST_BLOB,
    LARGEST_STATE,
    LAST_OFFSET,
    Segments,
    check_small_state,
    decode_blob,
    decode_small_state,
)
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.records.state import NO_BOOT, State
from ringmap.storage.records.table import (
    CLEAR,
    COPIED,
    DROPPED,
    END,
    EPISODE,
    LAST_TIME,
    MANY,
    MOST,
    PART,
    RECORD,
    RETIRE,
    EpisodeTable,
    Record,
    are_live,
    next_ordinals,
)
from ringmap.storage.ring.links import NONE
from ringmap.storage.ring.ring import ORIGIN, Position

__all__ = [
    "Progress",
    "RecoveredState",
    "SmallState",
    "bad_episodes",
    "bad_rows",
    "breaks_of",
    "broken_order",
    "find",
    "is_clean",
    "possible",
    "refuse_impossible",
    "small_state_in",
    "small_state_of",
    "small_states",
    "why_impossible",
]

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int], None]
"""Called with `(done, of)` while episodes are verified."""

log = logging.getLogger("ringmap")

_WORDS = (0, 1, 2, 3, 8, 9)
_LIMITS = np.array([MOST, MOST, MOST, MOST, MOST, LAST_TIME], np.uint64)
"""The words of a record, 64 bits each: seq, start, tail, first, ordinal, time."""
_LENGTH, _OFFSET, _SIZE = 12, 14, 15
"""The place of the length, and of the blob's offset and size, in a record, in words of 32 bits."""
_CHAIN, _KIND = 10, 14
"""That of the chain, and of kind, flags, part and behind, in words of 64 bits."""
_PLAIN = np.uint64(EPISODE | 1 << 32)
_PLAIN_BITS = np.uint64(0xFF | DROPPED << 8 | (COPIED ^ 0xFF) << 16 | 0xFFFFFFFF << 32)
"""The last of these words of a whole episode that is not dropped, in the bits that tell this."""


@dataclass(slots=True)
class RecoveredState:
    """The recovered state of a directory.

    `records`: the records `[first, seq]`; `clean`: the page cache can be trusted; `wipe`: slots of
    records that are torn, or newer than the state; `segment`: the largest number that a record names.
    """

    seq: int = 0
    first: int = 1
    tail: Position = ORIGIN
    head: Position = ORIGIN
    mark: int = 0
    era: int = 0
    generation: int = 0
    clean: bool = True
    records: Array = field(default_factory=lambda: np.empty(0, RECORD))
    wipe: list[int] = field(default_factory=list)
    segment: int = 0

    def live(self) -> Array:
        """Return the records of the live episodes, oldest first."""
        r = self.records
        kept = are_live(r, self.tail)
        # Usually all are, and a copy of a million takes longer than the rest of an opening.
        live: Array = r if kept.all() else r[kept]
        return live

    def unvouched(self) -> Array:
        """Return the records, of any kind, that may not be durable, with the blobs that they name."""
        records = self.records
        return records[:0] if self.clean else records[records["seq"] > self.mark]

    def doubtful(self) -> Array:
        """Return the records of the live episodes whose rows may not be durable."""
        if self.clean:
            return self.records[:0]
        live = self.live()
        return live[live["seq"] > self.mark]


def is_clean(shown: State | None, boot: bytes | None) -> bool:
    """Tell whether the shown state is from this boot, so that the page cache can be trusted."""
    return shown is not None and boot is not None and shown.boot == boot != NO_BOOT


def find(table: EpisodeTable, shown: State | None, boot: bytes | None, manifest: Manifest, path: str) -> RecoveredState:
    """Return the state of the table. Reads only. O(records), vectorised.

    Args:
        table: the open table.
        shown: the newest valid state of state.bin.
        boot: the id of this boot.
        manifest: its counts are known to have been reached by the table.
        path: the table's path, for messages.

    Raises:
        CorruptError: a live record is damaged or missing, or the table is older than a witness.
        NewerVersionError: a live record is of an unknown kind.
    """
    clean = is_clean(shown, boot)
    found = _walk(table, shown, path) if clean and shown is not None else _scan(table, manifest.max_steps)
    found.clean = clean
    if shown is not None:
        found.mark, found.era, found.generation = shown.mark, shown.era, shown.generation
    witness = max(manifest.witness, found.mark)
    if found.seq < witness:
        raise CorruptError(
            f"{path}: the newest whole state is that of record {found.seq}, but record {witness} was "
            "stored durably: the table is damaged or an old copy; run ringmap.check on the buffer"
        )
    if found.first > max(found.seq, 1):
        raise CorruptError(
            f"{path}: record {found.seq} calls record {found.first} the oldest live one, which is newer; "
            "run ringmap.check on the buffer"
        )
    if found.seq and not len(found.records):  # a scan has them already
        found.records, valid = table.read_range(found.first, found.seq)
        if not valid.all():
            bad = found.first + int(np.argmin(valid))
            raise CorruptError(f"{path}: record {bad} is damaged; run ringmap.check on the buffer")
    state = found.seq, found.tail, found.head
    refuse_impossible(found.records, state, manifest, table.slots, path)
    return found


def _walk(table: EpisodeTable, shown: State, path: str) -> RecoveredState:
    """Take the shown state, and the records after it: written whole, not shown yet."""
    at = shown.seq
    record = Record(0, shown.head, shown.tail, shown.first) if not at else table.read(at)
    if record is None or (record.first, record.tail, record.head) != (
        shown.first,
        shown.tail,
        shown.head,
    ):
        raise CorruptError(
            f"{path}: record {at} is damaged: state.bin shows it as the newest; run ringmap.check on the buffer"
        )
    while (after := table.read(at + 1)) is not None:
        at, record = at + 1, after
    found = RecoveredState(at, record.first, record.tail, record.head)
    slot = (at + 1) % table.slots
    if not table.is_empty(slot) and (at + 1 < table.slots or table.read(at + 1 - table.slots) is None):
        found.wipe = [slot]  # only this record can be torn
    found.segment = record.blob_segment
    return found


def _scan(table: EpisodeTable, max_steps: int) -> RecoveredState:
    """Take the greatest number whose live records are all whole."""
    records, valid, slots = table.scan()
    valid &= possible(records, max_steps, table.slots)
    torn = slots[~valid]
    found = RecoveredState()
    whole_ones = np.flatnonzero(valid)
    numbers = records["seq"].astype(np.int64)[whole_ones]
    order = np.argsort(numbers, kind="stable")  # fast on nearly sorted data
    numbers, whole_ones = numbers[order], whole_ones[order]
    if len(numbers):
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        starts = np.zeros(len(numbers), np.int64)
        starts[breaks] = breaks
        run_first = numbers[np.maximum.accumulate(starts)]
        firsts = records["first"].astype(np.int64)[whole_ones]
        whole = np.flatnonzero(run_first <= firsts)
        if len(whole):
            record = Record.of(records[whole_ones[whole[-1]]])
            found = RecoveredState(record.seq, record.first, record.tail, record.head)
            # Whole means: each number from `first` to `seq` exists once, and they are in order now.
            stop = int(whole[-1]) + 1
            run = whole_ones[stop - (record.seq + 1 - record.first) : stop]
            in_place = len(run) and (np.diff(run) == 1).all()  # unless the table has wrapped
            found.records = records[run[0] : run[-1] + 1] if in_place else records[run]  # no copy
        found.segment = int(records["blob_segment"][whole_ones].max())
    newer = slots[whole_ones[numbers > found.seq]]
    found.wipe = sorted({*newer.tolist(), *torn.tolist()})
    return found


def possible(records: Array, max_steps: int, slots: int) -> Array:
    """Return which records are possible for such a ring. O(records), vectorised.

    A forged record has a valid checksum: memory is never allocated on its word alone.
    """
    found = np.empty(len(records), np.bool_)
    for at in range(0, len(records), BLOCK):  # each word is examined while it is in the cache
        words = records[at : at + BLOCK].view("<u8").reshape(-1, RECORD.itemsize // 8)
        halves = words.view("<u4")
        seq, start, tail, first = words.T[:4]
        length = halves[:, _LENGTH].astype(np.uint64)
        # As unsigned numbers, negative ones are huge: one comparison detects both.
        good = (words[:, _WORDS] <= _LIMITS).all(axis=1)
        good &= (halves[:, _OFFSET] <= LAST_OFFSET) & (halves[:, _SIZE] <= LARGEST_BLOB)
        good &= (length <= max_steps) & (tail <= start + length)
        good &= start + length - tail <= max_steps
        good &= (first >= 1) & (first <= seq) & (seq - first < slots)
        found[at : at + BLOCK] = good
    return found


def is_next(record: Record, tail: int, head: int, ordinal: int, time: int, max_steps: int, slots: int) -> bool:
    """Tell whether a record is that of a whole episode that came after (`tail`, `head`), with nothing about it to
    examine further.

    `ordinal`, `time`: the next ordinal to give, and the time, as of the record before.

    Such a record passes `refuse_impossible`. Others may be sound, too. For the one record that a reader finds when it
    keeps up: in place of twenty calls of NumPy.
    """
    stop = record.start + record.length
    return (
        record.kind == EPISODE
        and record.part in (0, COPIED, MANY)
        and record.chain == record.previous == NONE
        and not record.step
        and not record.flags & DROPPED
        and ordinal <= record.ordinal < MOST
        and (record.behind <= record.length if record.part == MANY else record.behind == 1)
        and time <= record.time
        and record.start == head
        and 0 < record.length <= max_steps
        and tail <= record.tail <= stop <= record.tail + max_steps
        and stop < MOST
        and 1 <= record.first <= record.seq < record.first + slots
        and record.seq < MOST
        and record.blob_offset <= LAST_OFFSET
        and record.blob_size <= LARGEST_BLOB
    )


def broken_order(records: Array) -> list[str]:
    """Return, in words, where consecutive records contradict themselves or each other. O(records), vectorised."""
    return [f"record {seq} {what}" for seq, what in breaks_of(records)]


def breaks_of(records: Array) -> list[tuple[int, str]]:
    """Return the number of the first record of each contradiction, and what it is; see `broken_order`."""
    faults, are_plain = dict[tuple[int, str], None](), True
    for at in range(0, len(records), BLOCK):  # each is examined while it is in the cache
        block = records[max(0, at - 1) : at + BLOCK]  # with the record before it
        if not _are_plain_episodes(block):
            are_plain = False
            faults |= dict.fromkeys(_broken_order(block))
    return [] if are_plain else [*_faults_of(records, _broken_parts(records)), *faults]


def _are_plain_episodes(records: Array) -> bool:
    """Tell whether consecutive records are of episodes that are whole, and in order: nothing else about them is to be
    examined."""
    words = records.view("<u8").reshape(-1, RECORD.itemsize // 8)
    if not ((words[:, _KIND] & _PLAIN_BITS) == _PLAIN).all():
        return False
    chain, step, previous = words.T[_CHAIN : _CHAIN + 3]
    start, length, tail, time = (records[n] for n in ("start", "length", "tail", "time"))
    heads, ordinal = start + length, records["ordinal"]
    return bool(
        ((chain & previous) == np.uint64((1 << 64) - 1)).all()  # both are NONE
        and not step.any()
        and length.all()
        and (start[1:] == heads[:-1]).all()
        and (tail <= heads).all()
        and (tail[1:] >= tail[:-1]).all()
        and (time[1:] >= time[:-1]).all()
        and (ordinal[1:] > ordinal[:-1]).all()
    )


def _broken_order(records: Array) -> list[tuple[int, str]]:
    heads = records["start"] + records["length"]
    dropped = records["flags"] & DROPPED
    ordinals = next_ordinals(records)
    begins = _begin_episodes(records) & (dropped == 0)
    many = records["part"] & MANY != 0
    return _faults_of(
        records,
        [
            ("starts before the head of the record before it", records["start"][1:] != heads[:-1]),
            (
                "has a smaller tail than the record before it",
                records["tail"][1:] < records["tail"][:-1],
            ),
            ("has a tail beyond its head", records["tail"] > heads),
            ("has an earlier time than the record before it", records["time"][1:] < records["time"][:-1]),
            (
                "gives an ordinal that was given before",
                (ordinals[1:] < ordinals[:-1])
                | (begins[1:] & (records["ordinal"][1:].astype(np.int64) < ordinals[:-1])),
            ),
            (
                "counts the ordinals that were given wrongly",
                (begins & ~many & (records["behind"] != 1))
                | (many & (records["behind"] > records["length"]))
                | ((records["kind"] != EPISODE) & (records["behind"] != 0)),
            ),
            ("has no steps", (records["length"] == 0) & (records["kind"] == EPISODE) & (dropped == 0)),
            ("has steps, but no episode", (records["length"] != 0) & (records["kind"] != EPISODE)),
            ("has a damaged flag", (dropped != 0) & (dropped != DROPPED)),
        ],
    )


def _begin_episodes(records: Array) -> Array:
    """Tell which records are the first ones of their episodes."""
    is_later = (records["part"] & PART != 0) & (records["chain"] != records["start"])
    found: Array = (records["kind"] == EPISODE) & ~is_later
    return found


def _faults_of(records: Array, found: list[tuple[str, Array]]) -> list[tuple[int, str]]:
    """Return the number of the first record of each fault; an array without the first record tells of the others."""
    faults = []
    for what, bad in found:
        if bad.any():
            at = int(np.argmax(bad)) + (len(records) - len(bad))
            faults.append((int(records["seq"][at]), what))
    return faults


def _broken_parts(records: Array) -> list[tuple[str, Array]]:
    """Return what is wrong with the parts of chains among the records, and with which of them."""
    part = records["part"]
    is_part = part & PART != 0
    chain, step, start, previous = (records[n] for n in ("chain", "step", "start", "previous"))
    odd = [
        (
            "is part of a chain in an unknown way",
            (part & ~np.uint8(PART | END | COPIED | MANY) != 0)
            | (part & (PART | END) == END)
            | ((part & MANY != 0) & (part != MANY)),
        ),
        (
            "is no part of a chain, but names one",
            ~is_part & ((chain != NONE) | (step != 0) | (previous != NONE)),
        ),
    ]
    if not is_part.any():
        return odd
    overlaps, parted = np.zeros((2, len(records)), np.bool_)
    later = is_part & (step != 0)
    order = np.flatnonzero(
        is_part & (records["flags"] & DROPPED == 0)
    )  # else the steps may be stored again, from their stream
    order = order[np.argsort(chain[order], kind="stable")]
    one, other = order[:-1], order[1:]
    before = step[one] + records["length"][one]
    same = chain[one] == chain[other]
    overlaps[other] = same & (step[other] < before)
    parted[other] = same & (step[other] == before) & (previous[other] != start[one])
    has_rows = (records["kind"][one] == EPISODE) & (records["kind"][other] == EPISODE)
    parted[other] |= same & has_rows & (records["ordinal"][one] != records["ordinal"][other])
    is_first = (chain == start) & (records["kind"] == EPISODE)
    return [
        *odd,
        ("is part of a chain that begins after it", is_part & ((chain < 0) | (chain > start))),
        (
            "has an impossible place in its chain",
            is_part & ((step < 0) | (step > start - chain) | (is_first != (step == 0))),
        ),
        ("has steps of its chain that are stored before it", overlaps),
        ("does not follow the part before it", parted),
        (
            "names an impossible part before it",
            later & ((previous < chain) | (previous >= start)) | (is_part & ~later & (previous != NONE)),
        ),
        (
            "has no steps and ends no chain",
            is_part & (records["kind"] != EPISODE) & (part & END == 0),
        ),
    ]


def refuse_impossible(records: Array, state: tuple[int, int, int], manifest: Manifest, slots: int, path: str) -> None:
    """Raise if records with valid checksums, or the state `(seq, tail, head)`, are impossible for such a ring.
    O(records).

    Args:
        records: consecutive records.
        state: the state according to the newest of them.
        manifest: of the ring.
        slots: number of records in the table.
        path: the table's, for messages.

    Raises:
        NewerVersionError: a record is of an unknown kind: it comes from a newer version.
        CorruptError: anything else.
    """
    refuse_unknown(records, path)
    seq, tail, head = state
    fits = possible(records, manifest.max_steps, slots)
    faults = broken_order(records)
    if not (0 <= tail <= head < MOST and head - tail <= manifest.max_steps):
        faults = [f"the state of record {seq} reaches from position {tail} to {head}"]
    elif not fits.all():
        faults = [why_impossible(Record.of(records[int(np.argmin(fits))]), manifest.max_steps)]
    for fault in faults:
        raise CorruptError(
            f"{path}: {fault}, in a ring of max_steps={manifest.max_steps} that was written up to position {head}; "
            "run ringmap.check on the buffer"
        )


def why_impossible(record: Record, max_steps: int) -> str:
    """Return, in words, why a record is impossible for a ring: for one that is not `possible`."""
    live = record.head - record.tail
    if live < 0:
        why = "has a tail beyond its head"
    elif live > max_steps:
        why = f"says that {live} steps are live, expected at most max_steps={max_steps}"
    else:
        why = (
            f"can't be right: it has start {record.start}, length {record.length}, tail {record.tail}, "
            f"first {record.first}, blob_offset {record.blob_offset}, ordinal {record.ordinal}, time {record.time}"
        )
    return f"record {record.seq} {why}"


def refuse_unknown(records: Array, path: str) -> None:
    """Raise NewerVersionError if a record is of an unknown kind."""
    unknown = (records["kind"] < EPISODE) | (records["kind"] > CLEAR)
    if unknown.any():
        row = records[int(np.argmax(unknown))]
        raise NewerVersionError(
            f"{path}: record {int(row['seq'])} is of kind {int(row['kind'])}, this ringmap reads kinds {EPISODE} "
            f"(episode), {RETIRE} (retire) and {CLEAR} (clear); upgrade ringmap"
        )


@dataclass(frozen=True, slots=True)
class SmallState:
    """The small state that an opening takes.

    `seq`: the record that it belongs to; `kept`: whether it is from the manifest, not from a segment; `at`: segment,
    offset and size otherwise; `fault`: why it is not valid, in words; `lost`: whether its bytes are damaged or missing,
    as a power cut may leave them.
    """

    state: dict[str, Any]
    seq: int
    kept: bool = False
    at: tuple[int, int, int] | None = None
    fault: str = ""
    lost: bool = False


def small_state_of(
    newest: int,
    table: EpisodeTable,
    blob_of: Callable[[Record], bytes | None],
    kept: Mapping[str, Any],
) -> SmallState:
    """Return the newest small state that is not lost. Usually O(1). See `small_states`."""
    return next(small for small in small_states(newest, table, blob_of, kept) if not small.lost)


def small_states(
    newest: int,
    table: EpisodeTable,
    blob_of: Callable[[Record], bytes | None],
    kept: Mapping[str, Any],
) -> Iterator[SmallState]:
    """Yield the small states that whole blobs name, newest first, then that of the manifest, which is newer than all
    others.

    Args:
        newest: number of the newest record.
        table: the records.
        blob_of: reads a record's blob, None when it is damaged or deleted.
        kept: the small state in the manifest.
    """
    since = int(kept["seq"]) if kept else 0
    for seq in range(newest, max(since, newest - table.slots), -1):
        record = table.read(seq)
        blob = None if record is None else blob_of(record)
        if record is not None and blob is not None:
            yield small_state_in(record, blob, blob_of)
    fault = ""
    if kept:
        try:
            check_small_state(kept["state"])
        except ValueError as error:
            fault = f"the small state that it carries does not make sense: {error}"
    state = dict(kept["state"]) if kept and not fault else {}
    yield SmallState(state, since, kept=bool(kept), fault=fault)


def small_state_in(record: Record, blob: bytes, blob_of: Callable[[Record], bytes | None]) -> SmallState:
    """Return the small state that the blob of a record names: its bytes lie in the same segment."""
    seq, segment = record.seq, record.blob_segment
    try:
        offset, size, check = decode_blob(blob)[1]
        place = replace(record, blob_offset=offset, blob_size=size, blob_sum=check)
        text = blob_of(place) if size <= LARGEST_STATE else None
        if text is not None:
            return SmallState(decode_small_state(text), seq, at=(segment, offset, size))
    except ValueError as error:
        what = f"the small state that record {seq} names does not make sense: {error}"
        return SmallState({}, seq, fault=what)
    what = f"the small state that record {seq} names is damaged or missing"
    return SmallState({}, seq, fault=what, lost=True)


def bad_episodes(records: Array, rows: Rows, segments: Segments, progress: Progress | None = None) -> dict[int, str]:
    """Verify episodes by their checksums, in parallel.

    Returns:
        Number of each bad record -> the fault, with the file.
    """

    def verify(row: Any) -> str | None:
        record = Record.of(row)
        blob = segments.blob_of(record)
        if blob is None:
            return f"{segments.path(record.blob_segment)}: blob of record {record.seq} is damaged or missing"
        return bad_rows(record, rows.schema.names, rows.sums(record.start, record.length), blob)

    bad: dict[int, str] = {}
    faults = mapped(verify, records, 4, "ringmap-verify")  # xxhash and copies release the GIL
    for done, (row, fault) in enumerate(zip(records, faults, strict=True), 1):
        if fault is not None:
            bad[int(row["seq"])] = fault
        if progress is not None:
            progress(done, len(records))
    return bad


def bad_rows(record: Record, names: list[str], sums: list[int], blob: bytes | None) -> str | None:
    """Return the fault in the rows of an episode, with the columns, or None when sound.

    Args:
        record: the episode's record.
        names: column names, schema order.
        sums: present checksum of each column's rows.
        blob: the record's blob, which has the checksum of each column; None if it was deleted.
    """
    if combine(sums) == record.rows_sum:
        return None
    if blob is not None:
        try:
            expected = decode_blob(blob)[0]
        except ValueError as error:
            return f"blob of record {record.seq}: {error}"
        names = [n for n, got, want in zip(names, sums, expected, strict=False) if got != want] or names
    where = f"rows of record {record.seq} (positions {record.start} to {record.head})"
    return f"columns {names}: {where} are damaged"
