"""Names and texts of any kind, in places that do not take any.

    column "obs/pixels"  ->  file "obs%2Fpixels"         column ".."  ->  "%2E%2E"
    text "a\\0b"          ->  "\\ufdd0a\\\\x00b"              UTF-8 that C strings can hold

Invariants: two columns never share a file; what `escape` made, `unescape` gives back.
Not here: which file is which column: a format keeps the names themselves (ep_len.json, attributes).
"""

from __future__ import annotations

from collections.abc import Collection

import xxhash

__all__ = ["ESCAPED", "escape", "file_name", "quoted", "unescape"]

ESCAPED = "\ufdd0"
"""Starts a text that can't be held as it is (NUL, lone surrogates): a code point that Unicode
sets apart for internal use. A text that starts with it by itself is escaped as well."""

_LONGEST = 180
"""Bytes of a file name that leave room for suffixes within the usual limit of 255."""


def quoted(column: str, reserved: Collection[str] = ()) -> str:
    """Return a column's name as that of one link, key or file: its own wherever that is possible.

    Example:
        >>> quoted("état"), quoted("obs/pixels"), quoted(".."), quoted("ep_len", ["ep_len"])
        ('état', 'obs%2Fpixels', '%2E%2E', '%65p_len')
    """
    if column in (".", "..") or column in reserved:
        head = column if column in (".", "..") else column[0]
        return "".join(f"%{ord(c):02X}" for c in head) + column[len(head) :]
    return "".join(_quote(c) for c in column) or "%"


def file_name(column: str, reserved: Collection[str] = ()) -> str:
    """Return a column's name as that of a file: not hidden, not too long.

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
    """Return a text without NUL and lone surrogates that stands for this one."""
    return ESCAPED + text.encode("unicode_escape").decode("ascii")


def unescape(text: str) -> str:
    """Return what `escape` was given."""
    return text[1:].encode("ascii", "replace").decode("unicode_escape")


def _quote(char: str) -> str:
    if char in "/%" or char < " " or "\ud800" <= char <= "\udfff":
        return "".join(f"%{byte:02X}" for byte in char.encode(errors="surrogatepass"))
    return char
