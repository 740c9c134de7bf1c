"""The Minari format: local datasets of the Farama Foundation's Minari, read through its package.

    observation  next_observation  action  reward  terminated  truncated      one row per step
    info/<key>   next_info/<key>

An episode of T steps has T + 1 observations: `next_observation` is `observation` one step later, and
holds the last. Spaces of several parts become columns: observation/position, ...
Not here: downloads (`minari download`).
"""

from __future__ import annotations

import os

from ringmap.formats.common.source_format import StoredFormat
from ringmap.formats.registry import register_format

__all__ = ["Minari"]


@register_format
class Minari(StoredFormat):
    """Minari datasets. Read-only."""

    name = "minari"
    source = "ringmap.formats.minari.reader:MinariSource"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `data/metadata.json` and what lies beside it."""
        folder = os.path.join(os.fspath(path), "data")
        return os.path.isfile(os.path.join(folder, "metadata.json")) and any(
            name == "main_data.hdf5" or name.isdigit() for name in os.listdir(folder)
        )
