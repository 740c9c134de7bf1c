"""Checksums of JSON objects.

A signed object has a checksum of all else that is in it, as canonical JSON, one text for each object: so it holds in
any layout of the file.

Not here: what an object means, and which keys it has.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

__all__ = ["CHECKSUM", "decode_signed", "encode_signed", "json_checksum"]

CHECKSUM = "checksum"
"""The key of the checksum."""


def json_checksum(body: Any) -> str:
    """Return the XXH3 of an object as JSON in ASCII, keys sorted, without spaces: 16 hexadecimal digits.

    Example:
        >>> json_checksum({"b": 1, "a": 2}) == json_checksum({"a": 2, "b": 1})
        True
    """
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def encode_signed(body: dict[str, Any], indent: int | None = None) -> bytes:
    """Return an object with its checksum, as JSON in ASCII; with an `indent` in lines, for people."""
    text = json.dumps({**body, CHECKSUM: json_checksum(body)}, indent=indent, ensure_ascii=True)
    return text.encode() + b"\n" * (indent is not None)


def decode_signed(data: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return the object without its checksum, and what is wrong with it in words, empty for nothing.

    The object is None if the bytes are no JSON, {} if they are JSON of something else; with a wrong checksum it is
    returned all the same, for who has to know its version first.

    Example:
        >>> decode_signed(encode_signed({"a": 2}))
        ({'a': 2}, '')
        >>> decode_signed(b'{"a": 2}')[1]
        "was edited or damaged: its checksum is None, expected '12c7c1dc69f1e404'"
    """
    try:
        body = json.loads(data)
        found = body.pop(CHECKSUM, None) if isinstance(body, dict) else None
        expected = json_checksum(body)  # nested too deep, it raises as loading it does
    except (ValueError, RecursionError):
        return None, "is not valid JSON"
    fault = "" if found == expected else f"was edited or damaged: its checksum is {found!r}, expected {expected!r}"
    return (body if isinstance(body, dict) else {}), fault
