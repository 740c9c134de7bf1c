"""The names of the files and folders that every buffer has, in its directory.

Not here: when each is made, and which others there may be (directory/entries.py).
"""

from __future__ import annotations

__all__ = [
    "COLUMNS",
    "DATA",
    "LOCK",
    "MANIFEST",
    "OPEN",
    "STATE",
    "STREAM",
    "TABLE",
    "WORDS",
]

LOCK, MANIFEST, TABLE, STATE = "lock", "manifest.json", "episodes.npy", "state.bin"
DATA, OPEN, COLUMNS = "data", "open", "columns"

STREAM = "steps.bin"
"""The file in a folder of `open/`."""

WORDS = "words.bin"
"""The file beside it, where there are columns of text."""
