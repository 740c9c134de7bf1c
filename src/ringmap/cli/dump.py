"""`ringmap dump`: the episodes of a buffer as a dataset."""

from __future__ import annotations

import contextlib

from ringmap.buffers.opening import EPISODES, FLEET, ROWS, TRANSITIONS, kind_of
from ringmap.cli.convert import convert
from ringmap.cli.options import (
    Buffer,
    Destination,
    DropNames,
    FormatName,
    Mode,
    WriterOptions,
    writer_options,
)
from ringmap.cli.progress import is_watched
from ringmap.cli.resolve import episodes_at, format_for, say_written


def dump(
    path: Buffer,
    dest: Destination,
    format: FormatName = None,
    mode: Mode = "error",
    option: WriterOptions = None,
    drop: DropNames = None,
) -> None:
    """Write the episodes of a buffer as a dataset.

    Each is verified by its checksum; a writer may be at work. Of a directory of rings it is those of all, ring by ring;
    transitions, and rows of a mix, are cut into episodes. `ringmap convert` does the same for datasets.
    """
    options, kind = writer_options(option, "dump"), kind_of(path, "dump", (EPISODES, TRANSITIONS, ROWS, FLEET))
    if kind != FLEET:
        options["progress"] = is_watched()
    chosen = format_for(dest, format, mode, "dump")
    if kind in (TRANSITIONS, ROWS):
        convert(path, dest, chosen, mode, option, drop=drop)
        return
    with contextlib.closing(episodes_at(path, "dump")) as buffer:
        buffer.dump(dest, chosen, mode=mode, drop=drop or (), **options)
    say_written(dest, chosen)
