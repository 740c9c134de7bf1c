"""`ringmap dump`: the episodes of a buffer as a dataset."""

from __future__ import annotations

from ringmap.cli.options import Buffer, Destination, FormatName, Mode
from ringmap.cli.places import EPISODES, format_for, look
from ringmap.cli.terminal import count, show


def dump(path: Buffer, dest: Destination, format: FormatName = None, mode: Mode = "error") -> None:
    """Write the episodes of a buffer as a dataset.

    Each is verified by its checksum; a writer may be at work. `ringmap convert` does the same for datasets.
    """
    look(path, "dump", (EPISODES,))
    from ringmap.buffers.replay import ReplayBuffer

    chosen = format_for(dest, format, "dump")
    buffer = ReplayBuffer.open(path)
    try:
        stored = buffer.num_episodes, buffer.num_steps_stored
        buffer.dump(dest, chosen, mode=mode)
    finally:
        buffer.close()
    show(
        f"wrote {dest}: {count(stored[0], 'episode')}, {count(stored[1], 'step')}, format {chosen}"
    )
