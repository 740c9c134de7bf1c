"""`ringmap upgrade`: the newest version of the format."""

from __future__ import annotations

import os

from ringmap.cli.console import show
from ringmap.cli.options import Buffer
from ringmap.cli.resolve import folders_of
from ringmap.errors import NotFoundError


def upgrade(path: Buffer) -> None:
    """Upgrade a buffer to the newest version of the format.

    Older releases refuse it then, by name. A buffer needs no upgrade to be opened, and the first write that needs one
    does it. No process may be writing the buffer. Only its manifest changes its form.
    """
    from ringmap.storage.directory.opening import read_manifest
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.inspect.upgrade import upgrade as upgrade_buffer

    if not os.path.lexists(path):
        raise NotFoundError(f"upgrade: {path}: nothing is there")
    for folder in folders_of(path).values():
        before = read_manifest(Disk(), os.path.abspath(folder)).version
        added = upgrade_buffer(folder)
        after = read_manifest(Disk(), os.path.abspath(folder)).version
        if added:
            show(f"{folder}: format version {before} -> {after}, with {', '.join(added)}")
        else:
            show(f"{folder}: format version {after}, nothing to do")
