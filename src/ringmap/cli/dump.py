"""`ringmap dump`: the episodes of a buffer as a dataset."""

from __future__ import annotations

from ringmap.cli.options import Buffer, Destination, FormatName, Mode, WriterOptions, writer_options
from ringmap.cli.progress import is_watched
from ringmap.cli.resolve import EPISODES, format_for, look, say_written


def dump(
    path: Buffer,
    dest: Destination,
    format: FormatName = None,
    mode: Mode = "error",
    option: WriterOptions = None,
) -> None:
    """Write the episodes of a buffer as a dataset.

    Each is verified by its checksum; a writer may be at work. `ringmap convert` does the same for datasets.
    """
    look(path, "dump", (EPISODES,))
    from ringmap.buffers.replay import ReplayBuffer

    chosen = format_for(dest, format, mode, "dump")
    buffer = ReplayBuffer.open(path)
    try:
        buffer.dump(
            dest, chosen, mode=mode, progress=is_watched(), **writer_options(option, "dump")
        )
    finally:
        buffer.close()
    say_written(dest, chosen)
