"""The kinds of buffers: what the rows of a directory are, and which class opens it.

Not here: where the kind stands (manifest.py).
"""

from __future__ import annotations

from ringmap.errors import InputError
from ringmap.storage.records.manifest import Manifest

__all__ = ["DISTILLATION", "EPISODES", "LABELS", "ROWS", "TRANSITIONS", "must_be"]

EPISODES, TRANSITIONS, ROWS = "episodes", "transitions", "rows"
DISTILLATION, LABELS = "distillation", "labels"
"""A student's rows, and the log of a teacher's labels beside them."""

_OPENED_BY = {
    EPISODES: "ReplayBuffer",
    TRANSITIONS: "TransitionReplayBuffer",
    ROWS: "OfflineToOnlineReplayBuffer",
    DISTILLATION: "DistillationBuffer, which takes the directory above",
    LABELS: "DistillationBuffer, which takes the directory above",
}


def must_be(fixed: Manifest, kind: str, folder: str, where: str) -> None:
    """Raise InputError unless the rows of the buffer in a directory are of a kind."""
    if fixed.kind != kind:
        way = _OPENED_BY.get(fixed.kind)
        then = "upgrade ringmap" if way is None else f"open it with {way}"
        raise InputError(f"{where}: {folder} holds {fixed.kind}, expected {kind}; {then}")
