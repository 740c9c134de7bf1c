"""The paths that callers give: of this machine's file systems, and no addresses.

    "runs/replay"  ->  "/jobs/runs/replay"          "s3://bucket/replay"  ->  InputError

Without this an address would become a folder of that name: `os.path.abspath("s3://bucket/replay")` is
"/jobs/s3:/bucket/replay". Invariants: no other module makes a given path absolute.
Not here: ids with a prefix, such as "minari:door/human-v2" (formats/catalog/prefixes.py).
"""

from __future__ import annotations

import os
import re

from ringmap.errors import InputError

__all__ = ["local_path", "refuse_address"]

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")


def refuse_address(path: str | os.PathLike[str]) -> None:
    """Raise InputError if a path is an address: a scheme, such as s3, gs, hf, https or file, and "://".

    A `pathlib.Path` of an address has one slash; as a text, "a:/b" is a path below the folder "a:".
    """
    address = _ADDRESS.match(os.fspath(path))
    if address is not None and (address[2] or not isinstance(path, str)):
        raise InputError(
            f"{os.fspath(path)}: is an address (scheme {address[1]!r}), expected the path of a local file or folder; "
            "copy the data to this machine first, or mount them as a folder"
        )


def local_path(path: str | os.PathLike[str]) -> str:
    """Return a path that a caller gives, absolute.

    Raises:
        InputError: it is an address.

    Example:
        >>> local_path("/runs/../replay")
        '/replay'
        >>> local_path("s3://bucket/replay")
        Traceback (most recent call last):
        ringmap.errors.InputError: s3://bucket/replay: is an address (scheme 's3'), expected ...
    """
    refuse_address(path)
    return os.path.abspath(path)
