"""What a browser gets: pictures encoded, columns thinned, values as JSON, what one reply may hold, and why something
can't be drawn.

    uint8 (H, W, 1, 3 or 4), (C, H, W), (H, W)   pictures: PNG if small, JPEG if large
    numbers, up to 64 a step                     lines, thinned to the least and the greatest value of each part
    strings, dates                               text

Not here: where the values come from (sources.py).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringmap.errors import ClipIndexError, InputError
from ringmap.formats.media.images import axes_of, channels_last, encode, shown
from ringmap.storage.columns.schema import ColumnSpec

__all__ = [
    "FRAMES",
    "LINES",
    "MARK_NBYTES",
    "MOST_NBYTES",
    "POINTS",
    "ROWS",
    "GoneError",
    "TooLargeError",
    "encoded",
    "kind_of",
    "lines_of",
    "packed",
    "plain",
    "thumbnail",
]


Array = np.ndarray[Any, np.dtype[Any]]

_PNG_UP_TO = 160 * 160
"""Pixels: a PNG of more takes longer to encode than a JPEG, and is many times larger."""
_CHUNK = 8 << 20


def kind_of(spec: ColumnSpec) -> tuple[str, str | None]:
    """Return how a column is drawn: "picture", "lines", "text" or "none", and for the last why."""
    shape, kind = spec.shape, spec.dtype.kind
    if axes_of(shape, spec.dtype):
        nbytes = math.prod(shape)
        if nbytes > MOST_NBYTES:
            return "none", f"a picture of {nbytes:,} bytes; at most {MOST_NBYTES:,} are drawn"
        return "picture", None
    if kind in "SUmM":
        return "text", None
    if kind not in "biuf":
        return "none", f"values of {spec.dtype} are not drawn"
    count = math.prod(shape)
    if count > LINES:
        return (
            "none",
            f"{' x '.join(map(str, shape))} = {count:,} values a step; at most {LINES} are drawn as lines",
        )
    if not count:
        return "none", "no values"
    return "lines", None


def encoded(picture: Array, exact: bool = False) -> bytes:
    """Return a picture (...) of a column as the bytes of a PNG or, if it is large and need not be exact, a JPEG."""
    pixels = channels_last(picture)
    if exact or pixels.shape[0] * pixels.shape[1] <= _PNG_UP_TO:
        return encode(pixels[None], "png")[0]
    return encode(shown(picture)[None], "jpeg")[0]


def thumbnail(picture: Array, side: int = 96) -> bytes:
    """Return a picture (...) of a column as a PNG or JPEG of at most `side` pixels each way."""
    from PIL import Image

    small = Image.fromarray(np.ascontiguousarray(shown(picture)))
    small.thumbnail((side, side))
    return encode(np.asarray(small)[None], "png")[0]


def packed(pictures: Sequence[bytes], start: int) -> bytes:
    """Return encoded pictures as one reply: a header of lengths, then the bytes of each."""
    head = struct.pack(f"<II{len(pictures)}I", start, len(pictures), *map(len, pictures))
    body = b"".join([head, *pictures])
    if len(body) > MOST_NBYTES:
        raise TooLargeError(f"pictures of {len(body):,} bytes; ask for fewer")
    return body


def lines_of(
    read: Callable[[int, int], dict[str, Array]], specs: Sequence[ColumnSpec], start: int, end: int, points: int
) -> bytes:
    """Return columns of steps `[start, end)` as one reply: a header, the steps, then the lines of each column, float64.

    Memory: 8 MiB of rows at a time.
    """
    count = end - start
    row_nbytes = max(1, sum(s.row_nbytes for s in specs))
    if count <= points:
        steps = np.arange(start, end, dtype=np.float64)
        edges = np.arange(count)
    else:
        edges = np.unique(np.linspace(0, count, points // 2 + 1).astype(np.int64))[:-1]
        sizes = np.diff(np.append(edges, count))
        steps = start + np.stack([edges, edges + sizes // 2], 1).reshape(-1).astype(np.float64)
    found: dict[str, list[Array]] = {s.name: [] for s in specs}
    most = max(1, _CHUNK // row_nbytes)
    at = 0
    while at < len(edges):  # whole parts at a time
        last = max(at + 1, int(np.searchsorted(edges, edges[at] + most)))
        low, high = int(edges[at]), int(edges[last]) if last < len(edges) else count
        values = read(start + low, start + high)
        for spec in specs:
            rows = np.asarray(values[spec.name], np.float64).reshape(high - low, -1)
            if count > points:
                inner = edges[at:last] - low
                both = np.stack([np.fmin.reduceat(rows, inner), np.fmax.reduceat(rows, inner)], 1)
                rows = both.reshape(-1, rows.shape[1])
            found[spec.name].append(rows)
        at = last
    header: dict[str, Any] = {
        "start": start,
        "end": end,
        "thinned": count > points,
        "points": len(steps),
        "columns": [],
    }
    body = [steps.tobytes()]
    for spec in specs:
        lines = np.concatenate(found[spec.name]) if found[spec.name] else np.empty((0, math.prod(spec.shape)))
        header["columns"].append({"name": spec.name, "lines": lines.shape[1]})
        body.append(np.ascontiguousarray(lines.T).tobytes())
    told = json.dumps(header).encode()
    told += b" " * (-(len(told) + 4) % 8)
    reply = b"".join([struct.pack("<I", len(told)), told, *body])
    if len(reply) > MOST_NBYTES:
        raise TooLargeError(f"lines of {len(reply):,} bytes; ask for fewer columns or points")
    return reply


_MOST_TEXT, _MOST_ITEMS = 400, 32
_EXACT = 2**53
"""Greater integers are not exact in a browser."""


def plain(value: Any) -> Any:
    """Return a value as JSON: a number, a text, a short list; of anything larger its dtype and shape.

    Example:
        >>> plain(np.arange(3)), plain(np.zeros((4, 50), "f4")), plain(2**60)
        ([0, 1, 2], 'float32 (4, 50)', '1152921504606846976')
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        if value.size == 1:
            return plain(value.reshape(-1)[0])
        if value.size > _MOST_ITEMS or value.dtype.kind == "O":
            return f"{value.dtype} {value.shape}"
        return [plain(item) for item in value] if value.ndim else plain(value.item())
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _EXACT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes: {value[:16].hex(' ')}"
    if isinstance(value, list | tuple):
        if len(value) == 1:
            return plain(value[0])
        return [plain(v) for v in value[:_MOST_ITEMS]]
    if isinstance(value, dict):
        return {str(k)[:_MOST_TEXT]: plain(v) for k, v in list(value.items())[:_MOST_ITEMS]}
    return str(value)[:_MOST_TEXT]


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
