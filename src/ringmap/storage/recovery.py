"""Recovery: which committed state a directory is in, whatever was interrupted.

Two cases. In the boot in which state.bin was written, the page cache has every write in order:
the state shown, or one record more. After a reboot (or when nobody vouches for the boot),
the disk may hold any mix of old and new: the state taken is the newest one whose live
records are all whole, and the episodes that no sync vouches for are verified.

Invariants: looking changes nothing; a state below a witness (state.bin, its mark, the
manifest) is damage, never taken.
Not here: what a writer then mends (journal.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringmap.errors import CorruptError
from ringmap.storage.blobs import LARGEST_BLOB, LAST_OFFSET, Segments, decode_blob
from ringmap.storage.episodes import DROPPED, EPISODE, RECORD, EpisodeTable, Record
from ringmap.storage.rows import Rows, combine
from ringmap.storage.state import NO_BOOT, State
from ringmap.storage.threads import mapped

__all__ = [
    "MOST",
    "Found",
    "Progress",
    "bad_episodes",
    "bad_rows",
    "blobs_fit",
    "broken_order",
    "find",
    "refuse_impossible",
]

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int], None]
"""Called with `(done, of)` while episodes are verified."""

log = logging.getLogger("ringmap")

MOST = 1 << 62
"""Positions are below this: what is computed from them stays in 64 bits."""


@dataclass(slots=True)
class Found:
    """The state that a directory is in.

    `records`: the records `[first, seq]`; `clean`: the page cache can be trusted; `wipe`: slots of
    records that are torn, or newer than the state; `segment`: the largest number that a record names.
    """

    seq: int = 0
    first: int = 1
    tail: int = 0
    head: int = 0
    mark: int = 0
    epoch: int = 0
    generation: int = 0
    clean: bool = True
    records: Array = field(default_factory=lambda: np.empty(0, RECORD))
    wipe: list[int] = field(default_factory=list)
    segment: int = 0

    def live(self) -> Array:
        """Return the records of the live episodes, oldest first."""
        r = self.records
        kept = (r["kind"] == EPISODE) & (r["flags"] & DROPPED == 0) & (r["start"] >= self.tail)
        # As a rule all are, and a copy of a million takes longer than all else that an opening does.
        live: Array = r if kept.all() else r[kept]
        return live

    def unvouched(self) -> Array:
        """Return the records, of whichever kind, that the disk may not have, nor what they name."""
        records = self.records
        return records[:0] if self.clean else records[records["seq"] > self.mark]

    def doubtful(self) -> Array:
        """Return the records of the live episodes whose rows the disk may not have."""
        if self.clean:
            return self.records[:0]
        live = self.live()
        return live[live["seq"] > self.mark]


def find(
    table: EpisodeTable, shown: State | None, boot: bytes | None, witness: int, path: str
) -> Found:
    """Return the state that the table is in. Reads only. O(records), vectorised.

    Args:
        table: the open table.
        shown: the newest valid state of state.bin.
        boot: the id of this boot.
        witness: a sequence number that the table is known to have reached.
        path: the table's path, for messages.

    Raises:
        CorruptError: a live record is damaged or missing, or the table is older than a witness.
    """
    clean = shown is not None and boot is not None and shown.boot == boot and boot != NO_BOOT
    found = _walk(table, shown, path) if clean and shown is not None else _scan(table)
    found.clean = clean
    if shown is not None:
        found.mark, found.epoch, found.generation = shown.mark, shown.epoch, shown.generation
    witness = max(witness, found.mark)
    if found.seq < witness:
        raise CorruptError(
            f"{path}: the newest whole state is that of record {found.seq}, but record {witness} was "
            "stored durably: the table is damaged or an old copy; run ringmap.check on the buffer"
        )
    if found.seq:
        if not len(found.records):  # a scan has them already
            found.records, valid = table.read_range(found.first, found.seq)
            if not valid.all():
                bad = found.first + int(np.argmin(valid))
                raise CorruptError(
                    f"{path}: record {bad} is damaged; run ringmap.check on the buffer"
                )
        for fault in broken_order(found.records):
            raise CorruptError(f"{path}: {fault}; run ringmap.check on the buffer")
    return found


def _walk(table: EpisodeTable, shown: State, path: str) -> Found:
    """Take the state shown, and the records after it: written whole, not shown yet."""
    at = shown.seq
    record = Record(0, shown.head, 0, shown.tail, shown.first) if not at else table.read(at)
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
    found = Found(at, record.first, record.tail, record.head)
    slot = (at + 1) % table.slots
    if not table.is_empty(slot) and (
        at + 1 < table.slots or table.read(at + 1 - table.slots) is None
    ):
        found.wipe = [slot]  # only this one can be torn
    found.segment = record.blob_segment
    return found


def _scan(table: EpisodeTable) -> Found:
    """Take the greatest number whose live records are all whole."""
    records, valid, slots = table.scan()
    torn = slots[~valid]
    found = Found()
    whole_ones = np.flatnonzero(valid)
    numbers = records["seq"].astype(np.int64)[whole_ones]
    order = np.argsort(numbers, kind="stable")  # fast on what is nearly in order
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
            found = Found(record.seq, record.first, record.tail, record.head)
            # Whole means: each number from `first` to `seq` is there once, and they are in order now.
            stop = int(whole[-1]) + 1
            run = whole_ones[stop - (record.seq + 1 - record.first) : stop]
            in_place = len(run) and (np.diff(run) == 1).all()  # unless the table was gone round
            found.records = records[run[0] : run[-1] + 1] if in_place else records[run]  # no copy
        found.segment = int(records["blob_segment"][whole_ones].max())
    newer = slots[whole_ones[numbers > found.seq]]
    found.wipe = sorted({*newer.tolist(), *torn.tolist()})
    return found


def broken_order(records: Array) -> list[str]:
    """Return in words where consecutive records contradict each other."""
    heads = records["start"] + records["length"]
    faults = []
    for what, bad in (
        ("starts before the head of the record before it", records["start"][1:] != heads[:-1]),
        (
            "has a smaller tail than the record before it",
            records["tail"][1:] < records["tail"][:-1],
        ),
        ("has a tail beyond its head", records["tail"] > heads),
        ("has a negative length", records["length"] < 0),
        ("has a damaged flag", ~np.isin(records["flags"] & DROPPED, (0, DROPPED))),
    ):
        if bad.any():
            at = int(np.argmax(bad)) + (len(records) - len(bad))
            faults.append(f"record {int(records['seq'][at])} {what}")
    return faults


def refuse_impossible(
    records: Array, state: tuple[int, int, int], max_steps: int, path: str
) -> None:
    """Raise if records with checksums that hold, or the state `(seq, tail, head)`, can't be of such a ring.

    Whoever forges a record can give it a checksum: memory is never asked for by its word alone. O(records).
    """
    seq, tail, head = state
    # As unsigned numbers, negative ones are huge: one walk tells of both.
    fields = ("length", "start", "blob_size", "blob_offset")
    most = [int(records[name].view("<u8").max(initial=0)) for name in fields]
    if not (0 <= tail <= head < MOST and head - tail <= max_steps):
        fault = f"the state of record {seq} reaches from position {tail} to {head}"
    elif most[0] > max_steps:
        fault = f"a record has {_signed(most[0])} steps"
    elif most[1] > head:
        fault = f"a record starts at position {_signed(most[1])}"
    elif most[2] > LARGEST_BLOB or most[3] > LAST_OFFSET:
        fault = f"a record's blob has {most[2]:,} bytes from byte {most[3]:,} on"
    else:
        return
    raise CorruptError(
        f"{path}: {fault}, in a ring of max_steps={max_steps} that was written up to position {head}; run "
        "ringmap.check on the buffer"
    )


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def blobs_fit(records: Array) -> Array:
    """Return which records name a blob of a size, and in a place, that there can be."""
    fit: Array = (records["blob_size"] <= LARGEST_BLOB) & (records["blob_offset"] <= LAST_OFFSET)
    return fit


def bad_episodes(
    records: Array, rows: Rows, segments: Segments, progress: Progress | None = None
) -> dict[int, str]:
    """Verify episodes by their checksums, in parallel.

    Returns:
        Number of each bad record -> what is wrong, naming the file.
    """

    def verify(row: Any) -> str | None:
        record = Record.of(row)
        blob = segments.read(
            record.blob_segment, record.blob_offset, record.blob_size, record.blob_sum
        )
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
    """Return what is wrong with the rows of an episode, naming the columns, or None when sound.

    Args:
        record: the episode's record.
        names: column names, schema order.
        sums: checksum of each column's rows as they stand.
        blob: the record's blob, which knows the checksum of each column; None if it is gone.
    """
    if combine(sums) == record.rows_sum:
        return None
    if blob is not None:
        expected = decode_blob(blob)[0]
        names = [
            n for n, got, want in zip(names, sums, expected, strict=False) if got != want
        ] or names
    where = f"rows of record {record.seq} (positions {record.start} to {record.head})"
    return f"columns {names}: {where} are damaged"
