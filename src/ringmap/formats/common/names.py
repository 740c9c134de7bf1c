"""Escape names and texts of any kind for places that do not support all of them.

    column "obs/pixels"  ->  file "obs%2Fpixels"         column ".."  ->  "%2E%2E"
    text "a\\0b"          ->  "\\ufdd0a\\\\x00b"              UTF-8 that C strings can hold

Invariants: two columns never share a file; `unescape` reverts `escape`.
Not here: which file is which column: a format stores the names themselves (ep_len.json, attributes).
"""

from __future__ import annotations

from collections.abc import Collection

import xxhash

__all__ = ["ESCAPED", "escape", "file_name", "quoted", "unescape"]

ESCAPED = "\ufdd0"
"""The first character of an escaped text, which could not be stored unchanged (NUL, lone surrogates): a code point that
Unicode reserves for internal use. An original text that starts with it is escaped as well."""

_LONGEST = 180
"""Bytes of a file name that leave room for suffixes within the usual limit of 255."""


def quoted(column: str, reserved: Collection[str] = ()) -> str:
    """Return a name for a column's link, key or file: the column's own name if possible.

    Example:
        >>> quoted("état"), quoted("obs/pixels"), quoted(".."), quoted("ep_len", ["ep_len"])
        ('état', 'obs%2Fpixels', '%2E%2E', '%65p_len')
    """
    if column in (".", "..") or column in reserved:
        head = column if column in (".", "..") else column[0]
        return "".join(f"%{ord(c):02X}" for c in head) + column[len(head) :]
    return "".join(_quote(c) for c in column) or "%"


def file_name(column: str, reserved: Collection[str] = ()) -> str:
    """Return a file name for a column: not hidden, not too long.

    Example:
        >>> file_name(".hidden"), len(file_name("x" * 300))
        ('%2Ehidden', 157)
    """
    name = quoted(column, reserved)
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name.encode(errors="surrogateescape")) > _LONGEST:
        kept = name[:140].encode(errors="surrogateescape")[:140].decode(errors="ignore")
        name = f"{kept}%{xxhash.xxh3_64_hexdigest(column.encode(errors='surrogatepass'))}"
    return name


def escape(text: str) -> str:
    """Return an escaped text, without NUL and lone surrogates."""
    return ESCAPED + text.encode("unicode_escape").decode("ascii")


def unescape(text: str) -> str:
    """Return the argument of `escape`, from its result."""
    return text[1:].encode("ascii", "replace").decode("unicode_escape")


def _quote(char: str) -> str:
    if char in "/\\%" or char < " " or "\ud800" <= char <= "\udfff":
        return "".join(f"%{byte:02X}" for byte in char.encode(errors="surrogatepass"))
    return char
