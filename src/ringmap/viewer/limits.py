"""What one request may take, and the errors of requests.

Not here: who asks (access.py).
"""

from __future__ import annotations

from ringmap.errors import ClipIndexError, InputError

__all__ = [
    "FRAMES",
    "LINES",
    "MARK_NBYTES",
    "MOST_NBYTES",
    "POINTS",
    "ROWS",
    "GoneError",
    "TooLargeError",
]

MOST_NBYTES = 64 << 20
"""Bytes that a request may read at once, and reply with."""
MARK_NBYTES = 1 << 16
"""Bytes of a request that marks an episode."""
FRAMES = 64
"""Pictures in a reply."""
LINES = 64
"""Values of a step that are drawn as lines of one chart."""
POINTS = 4000
"""Steps of a line; a longer one is thinned to its least and its greatest value in each part."""
ROWS = 500
"""Rows of the table in a reply."""


class GoneError(ClipIndexError):
    """The episode was evicted."""


class TooLargeError(InputError):
    """What was asked for does not fit into a reply."""
