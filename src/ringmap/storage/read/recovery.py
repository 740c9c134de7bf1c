"""Recovery: finds the committed state of a directory, whatever was interrupted.

An opening goes in this order:

    manifest.json -> table, state.bin    sizes, headers
    -> find            which state counts             here, strictly; leniently in inspect/check.py
    -> bad_episodes    rows and blobs that no sync covers, if the page cache was lost
    -> small_state_of
    -> a writer makes the files agree with it         commit/files.py, in the order of `restore`

In the boot in which state.bin was written, the page cache has every write in order: the state is the one shown, with
the records that follow it. A kill leaves one such record at most; for a reader two are an old copy of state.bin
(reader.py), and a writer takes them all. After a reboot (or when the boot is unknown), the disk may hold any mix of old
and new: the state is the newest one whose live records are all whole, and the episodes that no sync covers are
verified.

Invariants: the search changes nothing; a state below a witness (state.bin, what it says was synced, the
manifest) is damage, and never taken.
Not here: how a writer then repairs the files (files.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ringmap.errors import CorruptError, NewerVersionError
from ringmap.storage.columns.rows import Rows, combine
from ringmap.storage.disk.process import mapped
from ringmap.storage.records.blobs import (
    LARGEST_BLOB,
    LARGEST_STATE,
    LAST_OFFSET,
    Segments,
    check_small_state,
    decode_blob,
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
    ends_of,
    next_ordinals,
    origins_of,
    parts_of,
)
from ringmap.storage.ring.links import NONE, Parts
from ringmap.storage.ring.ring import ORIGIN, Position

__all__ = [
    "LiveRecords",
    "Progress",
    "RecoveredState",
    "SmallState",
    "bad_columns",
    "bad_episodes",
    "bad_rows",
    "breaks_of",
    "find",
    "is_clean",
    "is_next",
    "live_records",
    "possible",
    "refuse_impossible",
    "small_state_in",
    "small_state_of",
    "small_states",
]

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int], None]
"""Called with `(done, of)` while episodes are verified."""

_WORDS = (0, 1, 2, 3, 8, 9)
_LIMITS = np.array([MOST, MOST, MOST, MOST, MOST, LAST_TIME], np.uint64)
"""The words of a record, 64 bits each: seq, start, tail, first, ordinal, time."""
_LENGTH, _OFFSET, _SIZE = 12, 14, 15
"""The place of the length, and of the blob's offset and size, in a record, in words of 32 bits."""
_SEQ, _ORDINAL, _KIND = 0, 8, 14
"""That of number and ordinal, and of kind, flags, part and behind, in words of 64 bits."""
_PLAIN = EPISODE | 1 << 32
_PLAIN_BITS = np.uint64(0xFF | DROPPED << 8 | 0xFFFF << 16 | 0xFFFFFFFF << 32)
"""The last of these words of a whole episode that is not dropped and not copied, in the bits that tell this."""

_POSSIBLE = 4096
"""Records that are compared at a time: they stay in the cache."""

NEWEST = 1024
"""So many of the newest records are hashed by each opening, whatever they say."""


@dataclass(slots=True)
class LiveRecords:
    """What memory needs of a run of records.

    `starts`, `lengths`, `origins`, `parts`: of the live episodes among them, oldest first, as for `LiveEpisodes`;
    `ends`: the chains that they end, and the number of the record of each; `segments`: the newest record that names
    each; `newest`: the last of the records; `bad`: the first one that is damaged, 0 for none: the rest means nothing
    then; `hashed`: whether the checksum of each one was compared.
    """

    starts: Array
    lengths: Array
    origins: Array
    parts: Parts | None = None
    ends: list[tuple[int, int]] = field(default_factory=list)
    segments: dict[int, int] = field(default_factory=dict)
    newest: Record | None = None
    bad: int = 0
    hashed: bool = True

    def keep(self, kept: Any) -> None:
        """Leave out all live episodes but those of a slice or mask."""
        self.starts, self.lengths, self.origins = self.starts[kept], self.lengths[kept], self.origins[kept]
        if self.parts is not None:
            self.parts = Parts(*(column[kept] for column in _columns(self.parts)))

    @classmethod
    def none(cls) -> LiveRecords:
        """Return those of no record."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64))


@dataclass(slots=True)
class RecoveredState:
    """The recovered state of a directory.

    `clean`: the page cache can be trusted; `live`: the records `[first, seq]`; `unsynced`: those of them, of any kind,
    that may not be durable, with the blobs that they name; `wipe`: slots of records that are torn, or newer than the
    state; `segment`: the largest number that a record names.
    """

    seq: int = 0
    first: int = 1
    tail: Position = ORIGIN
    head: Position = ORIGIN
    synced: int = 0
    era: int = 0
    generation: int = 0
    clean: bool = True
    live: LiveRecords = field(default_factory=LiveRecords.none)
    unsynced: Array = field(default_factory=lambda: np.empty(0, RECORD))
    wipe: list[int] = field(default_factory=list)
    segment: int = 0

    def drop(self, numbers: Collection[int]) -> None:
        """Leave out the episodes of these unsynced records."""
        if numbers:
            gone = np.isin(self.unsynced["seq"], list(numbers))
            self.live.keep(~np.isin(self.live.starts, self.unsynced["start"][gone]))
            self.live.ends = [(chain, seq) for chain, seq in self.live.ends if seq not in numbers]

    def doubtful(self) -> Array:
        """Return the records of the live episodes whose rows may not be durable."""
        records: Array = self.unsynced[are_live(self.unsynced, self.tail)]
        return records


def is_clean(shown: State | None, boot: bytes | None) -> bool:
    """Tell whether the shown state is from this boot, so that the page cache can be trusted."""
    return shown is not None and boot is not None and shown.boot == boot != NO_BOOT


def find(table: EpisodeTable, shown: State | None, boot: bytes | None, manifest: Manifest, path: str) -> RecoveredState:
    """Return the state of the table, at `path`, given the newest valid state of state.bin. O(records), vectorised.

    Raises:
        CorruptError: a live record is damaged or missing, or the table is older than a witness. See `live_records` for
            the damages that reads find.
        NewerVersionError: a live record is of an unknown kind.
    """
    clean = is_clean(shown, boot)
    recovered = _shown(table, shown, path) if clean and shown is not None else _scan(table, manifest.max_steps)
    recovered.clean = clean
    if shown is not None:
        recovered.synced, recovered.era, recovered.generation = shown.synced, shown.era, shown.generation
    witness = max(manifest.witness, recovered.synced)
    if recovered.seq < witness:
        raise CorruptError(
            f"{path}: the newest whole state is that of record {recovered.seq}, but record {witness} was "
            "stored durably: the table is damaged or an old copy; run ringmap.check on the buffer"
        )
    state = recovered.seq, recovered.tail, recovered.head
    recovered.live = live_records(table, recovered.first, state, manifest.max_steps, path)
    if not clean:
        recovered.unsynced, valid = table.read_range(max(recovered.first, recovered.synced + 1), recovered.seq)
        if not valid.all():
            recovered.live.bad = int(recovered.unsynced["seq"][np.argmin(valid)])
    if recovered.live.bad:
        raise CorruptError(f"{path}: record {recovered.live.bad} is damaged; run ringmap.check on the buffer")
    return recovered


def live_records(
    table: EpisodeTable, first: int, state: tuple[int, int, int], max_steps: int, path: str
) -> LiveRecords:
    """Return what memory needs of records `[first, seq]`. O(records), vectorised.

    Most records are of whole episodes, each after the one before it. Of those, only the fields that memory takes are
    compared, each with its neighbours: number, start, length, kind, ordinal, and whether it was copied. A flipped bit
    in one of them is found here, and one in another field by who reads the record, which compares its checksum. The
    checksum of all others, of the oldest ones and of the newest `NEWEST` ones is compared here.

    A writer may be overwriting records that are no longer live: then the result counts only if a later peek at
    state.bin shows that it did not, or if all are `hashed`. `state`: `(seq, tail, head)` as of the newest record.

    Raises what `refuse_impossible` does.
    """
    seq, tail, head = state
    if first > seq + 1:
        _refuse(f"record {seq} calls record {first} the oldest live one", head, max_steps, path)
    count = table.count(first, seq)
    live = LiveRecords(np.empty(count, np.int64), np.empty(count, np.int32), np.empty(count, np.int64))
    of_chains, at = list[Array](), 0
    block = np.empty(0, RECORD)
    refuse_impossible(block, state, max_steps, table.slots, path)
    for number, block in table.blocks(first, seq):
        is_first = number == first
        new = block if is_first else block[1:]  # the record before it is there to be compared
        stop = at + len(new)
        live.starts[at:stop], live.lengths[at:stop] = new["start"], new["length"]
        if (
            not is_first
            and number + len(new) <= seq + 1 - NEWEST
            and _are_next_episodes(block, number, live.starts[at:stop], live.lengths[at:stop])
        ):
            live.hashed = False
        else:
            before = number - (not is_first)
            valid = table.valid(block, before)
            if not valid.all():
                live.bad = before + int(np.argmin(valid))
                return live
            refuse_impossible(block, state, max_steps, table.slots, path)
            of_chains.append(new[new["part"] & PART != 0])
            live.ends += ends_of(new)
            new = new[are_live(new, tail)]
            stop = at + len(new)
            live.starts[at:stop], live.lengths[at:stop] = new["start"], new["length"]
            parts = parts_of(new)
            if parts is not None:
                if live.parts is None:
                    live.parts = Parts(*(np.full(count, none, np.int64) for none in (NONE, 0, NONE, NONE)))
                for column, values in zip(_columns(live.parts), _columns(parts), strict=True):
                    column[at:stop] = values
        live.origins[at:stop] = origins_of(new)
        at = stop
        _note_segments(live.segments, number, block[0 if is_first else 1 :]["blob_segment"])
    for number, what in _breaks_of_chains(np.concatenate(of_chains)) if any(map(len, of_chains)) else ():
        _refuse(f"record {number} {what}", head, max_steps, path)
    live.keep(slice(int(live.starts[:at].searchsorted(tail)), at))
    live.newest = Record.of(block[-1]) if len(block) else None
    return live


def _columns(parts: Parts) -> list[Array]:
    return [column for column in parts if column is not None]


def _are_next_episodes(block: Array, number: int, starts: Array, lengths: Array) -> bool:
    """Tell whether all but the first of these records are of whole episodes, each after the record before it, all of
    them copied or none.

    `number`, `starts`, `lengths`: of the first of them, and of each.
    """
    words = block.view("<u8").reshape(-1, RECORD.itemsize // 8)
    seq, ordinal, kind = words[:, _SEQ], words[:, _ORDINAL], words[:, _KIND] & _PLAIN_BITS
    return bool(
        int(kind[0]) & ~(COPIED << 16) == _PLAIN
        and (kind == kind[0]).all()
        and seq[0] == number - 1
        and (seq[1:] - seq[:-1] == 1).all()
        and (ordinal[1:] - ordinal[:-1] == 1).all()
        and starts[0] == int(block["start"][0]) + int(block["length"][0])
        and (starts[1:] == starts[:-1] + lengths[:-1]).all()
        and (lengths > 0).all()
    )


def _note_segments(known: dict[int, int], number: int, segments: Array) -> None:
    """Note the newest record of each segment, given those of the records from a number on: they rise."""
    for last in (*(segments[1:] != segments[:-1]).nonzero()[0].tolist(), len(segments) - 1):
        known[int(segments[last])] = number + last


def _shown(table: EpisodeTable, shown: State, path: str) -> RecoveredState:
    """Take the shown state, and the records after it: written whole, not shown yet."""
    at = shown.seq
    record = Record(0, shown.head, shown.tail, shown.first) if not at else table.read(at)
    if record is None or (record.first, record.tail, record.head) != (shown.first, shown.tail, shown.head):
        raise CorruptError(
            f"{path}: record {at} is damaged: state.bin shows it as the newest; run ringmap.check on the buffer"
        )
    while (after := table.read(at + 1)) is not None:
        at, record = at + 1, after
    recovered = RecoveredState(at, record.first, record.tail, record.head)
    slot = (at + 1) % table.slots
    if not table.is_empty(slot) and (at + 1 < table.slots or table.read(at + 1 - table.slots) is None):
        recovered.wipe = [slot]  # only this record can be torn
    recovered.segment = record.blob_segment
    return recovered


def _scan(table: EpisodeTable, max_steps: int) -> RecoveredState:
    """Take the greatest number whose live records are all whole."""
    records, valid, slots = table.scan()
    for at in range(0, len(records), _POSSIBLE):
        valid[at : at + _POSSIBLE] &= possible(records[at : at + _POSSIBLE], max_steps, table.slots)
    recovered = RecoveredState()
    whole_ones = np.flatnonzero(valid)
    numbers = records["seq"].astype(np.int64)[whole_ones]
    order = np.argsort(numbers, kind="stable")  # fast on nearly sorted data
    numbers, whole_ones = numbers[order], whole_ones[order]
    if len(numbers):
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        starts = np.zeros(len(numbers), np.int64)
        starts[breaks] = breaks
        run_first = numbers[np.maximum.accumulate(starts)]
        whole = np.flatnonzero(run_first <= records["first"].astype(np.int64)[whole_ones])
        if len(whole):  # each number from its `first` to its own exists once
            record = Record.of(records[whole_ones[whole[-1]]])
            recovered = RecoveredState(record.seq, record.first, record.tail, record.head)
        recovered.segment = int(records["blob_segment"][whole_ones].max())
    newer = slots[whole_ones[numbers > recovered.seq]]
    recovered.wipe = sorted({*newer.tolist(), *slots[~valid].tolist()})
    return recovered


def possible(records: Array, max_steps: int, slots: int) -> Array:
    """Return which records are possible for such a ring. O(records), vectorised.

    A forged record has a valid checksum: memory is never allocated on its word alone.
    """
    words = records.view("<u8").reshape(-1, RECORD.itemsize // 8)
    halves = words.view("<u4")
    seq, start, tail, first = words.T[:4]
    length = halves[:, _LENGTH].astype(np.uint64)
    # As unsigned numbers, negative ones are huge: one comparison detects both.
    good: Array = np.asarray((words[:, _WORDS] <= _LIMITS).all(axis=1))
    good &= (halves[:, _OFFSET] <= LAST_OFFSET) & (halves[:, _SIZE] <= LARGEST_BLOB)
    good &= (length <= max_steps) & (tail <= start + length) & (start + length - tail <= max_steps)
    good &= (first >= 1) & (first <= seq) & (seq - first < slots)
    return good


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


def breaks_of(records: Array) -> list[tuple[int, str]]:
    """Return, in words, where consecutive records contradict themselves or each other, by the number of the first
    record of each contradiction. O(records log records), vectorised."""
    parts = records[records["part"] & PART != 0]
    return [*_breaks_of_chains(parts), *_breaks_of_order(records)]


def _breaks_of_order(records: Array) -> list[tuple[int, str]]:
    """Return what is wrong with single records, and with those after another one."""
    kind, part, length, start = (records[n] for n in ("kind", "part", "length", "start"))
    chain, step, previous = (records[n] for n in ("chain", "step", "previous"))
    is_episode, is_part, many = kind == EPISODE, part & PART != 0, part & MANY != 0
    dropped = records["flags"] & DROPPED
    begins = is_episode & ~(is_part & (chain != start)) & (dropped == 0)
    heads, ordinals = start + length, next_ordinals(records)
    later = is_part & (step != 0)
    faults = {
        "starts before the head of the record before it": start[1:] != heads[:-1],
        "has a smaller tail than the record before it": records["tail"][1:] < records["tail"][:-1],
        "has an earlier time than the record before it": records["time"][1:] < records["time"][:-1],
        "gives an ordinal that was given before": (ordinals[1:] < ordinals[:-1])
        | (begins[1:] & (records["ordinal"][1:].astype(np.int64) < ordinals[:-1])),
        "counts the ordinals that were given wrongly": (begins & ~many & (records["behind"] != 1))
        | (many & (records["behind"] > length))
        | (~is_episode & (records["behind"] != 0)),
        "has no steps": (length == 0) & is_episode & (dropped == 0),
        "has steps, but no episode": (length != 0) & ~is_episode,
        "has a damaged flag": (dropped != 0) & (dropped != DROPPED),
        "is part of a chain in an unknown way": (part & ~np.uint16(PART | END | COPIED | MANY) != 0)
        | (part & (PART | END) == END)
        | (many & (part != MANY)),
        "is no part of a chain, but names one": ~is_part & ((chain != NONE) | (step != 0) | (previous != NONE)),
        "is part of a chain that begins after it": is_part & ((chain < 0) | (chain > start)),
        "has an impossible place in its chain": is_part
        & ((step < 0) | (step > start - chain) | (((chain == start) & is_episode) != (step == 0))),
        "names an impossible part before it": later & ((previous < chain) | (previous >= start))
        | (is_part & ~later & (previous != NONE)),
        "has no steps and ends no chain": is_part & ~is_episode & (part & END == 0),
    }
    return _numbered(records, faults)


def _breaks_of_chains(parts: Array) -> list[tuple[int, str]]:
    """Return what is wrong with parts of the same chains."""
    parts = parts[parts["flags"] & DROPPED == 0]  # else the steps may be stored again, from their file of steps
    parts = parts[np.argsort(parts["chain"], kind="stable")]
    one, other = parts[:-1], parts[1:]
    same = one["chain"] == other["chain"]
    before = one["step"] + one["length"]
    has_rows = (one["kind"] == EPISODE) & (other["kind"] == EPISODE)
    parted = (other["step"] == before) & (other["previous"] != one["start"])
    parted |= has_rows & (one["ordinal"] != other["ordinal"])
    faults = {
        "has steps of its chain that are stored before it": same & (other["step"] < before),
        "does not follow the part before it": same & parted,
    }
    return _numbered(parts, faults)


def _numbered(records: Array, faults: Mapping[str, Array]) -> list[tuple[int, str]]:
    """Return each fault with the number of the first record that has it; an array without the first record tells of
    the others."""
    found = []
    for what, bad in faults.items():
        if bad.any():
            found.append((int(records["seq"][len(records) - len(bad) :][bad].min()), what))
    return found


def refuse_impossible(records: Array, state: tuple[int, int, int], max_steps: int, slots: int, path: str) -> None:
    """Raise if consecutive records with valid checksums, or the state `(seq, tail, head)`, are impossible for a ring.
    Chains are not compared. O(records), vectorised.

    Raises:
        NewerVersionError: a record is of an unknown kind: it comes from a newer version.
        CorruptError: anything else.
    """
    seq, tail, head = state
    refuse_unknown(records, path)
    fits = possible(records, max_steps, slots)
    if not (0 <= tail <= head < MOST and head - tail <= max_steps):
        _refuse(f"the state of record {seq} reaches from position {tail} to {head}", head, max_steps, path)
    if not fits.all():
        record = Record.of(records[int(np.argmin(fits))])
        _refuse(f"record {record.seq} can't be right: it is {record}", head, max_steps, path)
    for number, what in _breaks_of_order(records):
        _refuse(f"record {number} {what}", head, max_steps, path)


def refuse_unknown(records: Array, path: str) -> None:
    """Raise NewerVersionError if a record is of an unknown kind."""
    unknown = (records["kind"] < EPISODE) | (records["kind"] > CLEAR)
    if unknown.any():
        row = records[int(np.argmax(unknown))]
        raise NewerVersionError(
            f"{path}: record {int(row['seq'])} is of kind {int(row['kind'])}, this ringmap reads kinds {EPISODE} "
            f"(episode), {RETIRE} (retire) and {CLEAR} (clear); upgrade ringmap"
        )


def _refuse(fault: str, head: int, max_steps: int, path: str) -> NoReturn:
    raise CorruptError(
        f"{path}: {fault}, in a ring of max_steps={max_steps} that was written up to position {head}; "
        "run ringmap.check on the buffer"
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

    `newest`: the number of the newest record; `blob_of`: reads a record's blob, None when it is damaged or deleted;
    `kept`: the small state in the manifest.
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
    seq, segment, lost, what = record.seq, record.blob_segment, True, "is damaged or missing"
    try:
        offset, size, check = decode_blob(blob)[1]
        place = record._replace(blob_offset=offset, blob_size=size, blob_sum=check)
        text = blob_of(place) if size <= LARGEST_STATE else None
        if text is not None:
            return SmallState(check_small_state(text), seq, at=(segment, offset, size))
    except ValueError as error:
        lost, what = False, f"does not make sense: {error}"
    return SmallState({}, seq, fault=f"the small state that record {seq} names {what}", lost=lost)


def bad_episodes(records: Array, rows: Rows, segments: Segments, progress: Progress | None = None) -> dict[int, str]:
    """Verify episodes by their checksums, in parallel; return the number of each bad record -> the fault."""

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
    """Return the fault in the rows of an episode, with the columns, or None when sound. See `bad_columns`."""
    bad = bad_columns(record, sums, blob)
    if not bad:
        return None
    where = f"rows of record {record.seq} (positions {record.start} to {record.head})"
    return f"columns {[names[i] for i in bad]}: {where} are damaged"


def bad_columns(record: Record, sums: list[int], blob: bytes | None) -> list[int]:
    """Return the columns whose rows are not what an episode was stored with, given their present checksums; all, where
    its blob (None if it was deleted) does not tell which."""
    if combine(sums) == record.rows_sum:
        return []
    expected: list[int] = []
    with contextlib.suppress(ValueError):  # of a forged blob
        expected = decode_blob(blob or b"")[0]
    return [i for i, (got, want) in enumerate(zip(sums, expected, strict=False)) if got != want] or [*range(len(sums))]
