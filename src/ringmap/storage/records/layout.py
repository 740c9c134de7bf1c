"""The layout of version 3, while it is not released: a checksum that changes with it.

Until the release the version stays 3 while files change, and a directory of another layout is refused by its checksum.
From the release on the version alone counts.
Not here: what the fields mean (docs/reference/on-disk-format.md).
"""

from __future__ import annotations

from ringmap.storage.disk.canonical import json_checksum
from ringmap.storage.records.state import SLOT
from ringmap.storage.records.table import RECORD

__all__ = ["LAYOUT"]

_FILES = {
    "blob": "sizes <III: sums, words, data; small state <IIQ: offset, size, sum; sums <Q each; words; small state if "
    "it is new; data",
    "column": "header 4096, rows, label; codecs of a Zarr array by name",
    "frame": "size <I, check <Q seeded by the number and the file, payload",
    "open": "frame 0 JSON with salt, whose check seeds steps.bin and words.bin; a frame of rows for each call",
    "manifest": "lineage, kind, ordinal and closed are known",
    "mutable": "headers at 0 and 4096: magic, number, highest, synced, boot, check; marks at 8192; two planes; copy: "
    "check, generation, position, values",
    "priorities": "headers at 0 and 4096, unsure at 56, leaves, two logs, frames of kinds 1 to 3",
    "text": "codes <i4, dtype <U0; words: count <I, sizes <I each, UTF-8;",
    "transitions": "column _episode <i8 after lanes; records with MANY in part",
    "successors": "RINGMAPN, head, rows_sum, size, check, check, payload",
}
"""The files that no structure below describes, in words: change them with the file."""

LAYOUT = json_checksum([RECORD.descr, SLOT.format, _FILES])
"""16 hexadecimal digits."""
