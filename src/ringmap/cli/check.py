"""`ringmap check`: what is wrong with a buffer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from ringmap.cli.options import AsJson, Buffer, Quiet
from ringmap.cli.places import folders_of
from ringmap.cli.progress import bar
from ringmap.cli.terminal import count, show, show_json
from ringmap.errors import NotFoundError

if TYPE_CHECKING:
    from ringmap.storage.check import Finding


def check(path: Buffer, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Find what is wrong with a buffer, file by file.

    Reads every live byte, takes no lock and changes nothing: a writer may be at work. Works on a directory that can't
    be opened, too. Exit code 0: sound; 1: something is wrong; 2: no buffer is there, or it can't be read.
    """
    found = findings_at(path, "check")
    if as_json:
        show_json(
            {
                "path": path,
                "sound": not found,
                "findings": [{"file": f, "what": x.what, "record": x.seq} for f, x in found],
            }
        )
    elif not quiet:
        for file, finding in found:
            show(f"{file}: {finding.what}")
        show(f"{path}: {count(len(found), 'finding')}" if found else f"{path}: sound")
    raise typer.Exit(bool(found))


def findings_at(path: str, where: str) -> list[tuple[str, Finding]]:
    """Return what is wrong with the buffer at a path: files, relative to it, and findings.

    Raises:
        NotFoundError, UnknownFormatError: no buffer is there.
    """
    from ringmap.storage.check import check as check_buffer

    if not os.path.lexists(path):
        raise NotFoundError(f"{where}: {path}: nothing is there")
    found: list[tuple[str, Finding]] = []
    for part, folder in folders_of(path).items():
        with bar(f"check {part}".strip()) as progress:
            found += [
                (f"{part}/{x.file}" if part else x.file, x) for x in check_buffer(folder, progress)
            ]
    return found
