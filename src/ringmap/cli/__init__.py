"""The command line: `ringmap info DIR` and other commands.

    app         the commands by name, and the form of their errors
    console     printed text, without anything that a terminal or Rich would obey
    arguments   what a command is given

Invariants: a command does nothing that Python could not do through ringmap; nothing heavy is imported
before a command runs; nothing is unpickled.
Not here: facts about buffers (storage/inspect/describe.py), about formats (formats/registry.py).
"""

from __future__ import annotations

import contextlib
import io
import sys

from ringmap.errors import MissingExtraError
from ringmap.extras import require

__all__ = ["main"]


def main() -> None:
    """Run the command that the arguments of this process name, and exit with its code.

    What an output can't hold, such as an umlaut in ASCII, is escaped there.
    """
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # was a file when Python began, and is a pipe now
                output.reconfigure(errors="backslashreplace")
    try:
        require("cli", "the command line")
    except MissingExtraError as error:
        print(f"ringmap: error: {error}", file=sys.stderr)
        sys.exit(2)
    from ringmap.cli.app import app

    app(prog_name="ringmap")
