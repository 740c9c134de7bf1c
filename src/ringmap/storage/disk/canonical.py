"""Canonical JSON: one text for each object, independent of its layout, and its checksum.

Not here: where an object keeps its checksum (manifest.py, columns/zarr.py).
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

__all__ = ["json_checksum"]


def json_checksum(body: Any) -> str:
    """Return the XXH3 of an object as JSON in ASCII, keys sorted, without spaces: 16 hexadecimal digits.

    Example:
        >>> json_checksum({"b": 1, "a": 2}) == json_checksum({"a": 2, "b": 1})
        True
    """
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())
