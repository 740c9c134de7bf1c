"""`ringmap check` and `ringmap repair`: what is wrong with a buffer, or a dataset; mend a buffer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ringmap.buffers.opening import is_dataset
from ringmap.cli.arguments import AsJson, Buffer, Place, Quiet
from ringmap.cli.console import bar, count, show, show_json
from ringmap.errors import DamageError, NotFoundError
from ringmap.storage.disk.paths import local_path

if TYPE_CHECKING:
    from ringmap.storage.inspect.check import Finding


def check(path: Place, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Find what is wrong with a buffer or a dataset, file by file.

    Of a directory of rings, each is checked.

    Reads every live byte, takes no lock and changes nothing: a writer may be at work. Works on a directory that can't
    be opened, too. Rows of an open group are counted, and are no finding. Exit code 0: sound; 1: something is wrong; 2:
    nothing of ours is there, or it can't be read.
    """
    found = findings_at(path, "check")
    pending = 0 if found or is_dataset(path) else pending_at(path)
    if as_json:
        show_json(
            {
                "path": path,
                "sound": not found,
                "findings": [{"file": f, "what": x.what, "record": x.seq} for f, x in found],
                "pending": pending,
            }
        )
    elif not quiet:
        for file, finding in found:
            show(f"{file}: {finding.what}")
        more = f"; {count(pending, 'row')} not committed yet" if pending else ""
        show(f"{path}: {count(len(found), 'finding')}" if found else f"{path}: sound{more}")
    raise typer.Exit(bool(found))


def pending_at(path: str) -> int:
    """Return how many rows of the buffer at a path are stored, but not committed yet."""
    from ringmap.storage.inspect.describe import facts_of

    return sum(facts_of(os.path.join(path, name)).pending for name in _rings_of(path) or [""])


def _rings_of(path: str) -> list[str]:
    """Return the names of the rings below a path; [] where it is none of them."""
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.inspect.check import rings_below

    return rings_below(Disk(), local_path(path))


def findings_at(path: str, where: str) -> list[tuple[str, Finding]]:
    """Return what is wrong with the buffer at a path: files, relative to it, and findings."""
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.inspect.check import check as check_buffer
    from ringmap.storage.inspect.check import check_ring

    if not os.path.lexists(local_path(path)):
        raise NotFoundError(f"{where}: {path}: nothing is there")
    if where == "check" and is_dataset(path):
        return _of_dataset(path)
    found: list[tuple[str, Finding]] = []
    if where == "check" and (rings := _rings_of(path)):
        for name in rings:
            with bar(f"check {name}") as progress:
                found += [(x.file, x) for x in check_ring(Disk(), local_path(path), name, progress)]
        return found
    with bar("check") as progress:
        return [(finding.file, finding) for finding in check_buffer(path, progress)]


def _of_dataset(path: str) -> list[tuple[str, Finding]]:
    """Return what is wrong with a dataset: every step and value of every episode is read."""
    from ringmap.formats.catalog.load import load_arrays
    from ringmap.storage.inspect.check import Finding

    found: list[tuple[str, Finding]] = []

    def note(error: Exception) -> None:
        found.append((path, Finding(path, str(error))))

    try:
        dataset = load_arrays(path)
    except DamageError as error:
        note(error)
        return found
    with bar("check") as progress:
        count = len(dataset.lengths)
        for number in range(count):
            try:
                dataset.load_episode(number)
                dataset.get_episode_data(number)
            except DamageError as error:
                note(error)
            if progress is not None:
                progress(number + 1, count)
    dataset.close()
    return found


Apply = Annotated[bool, typer.Option("--apply", help="Do it; otherwise only say what would be done.")]

To = Annotated[
    str | None,
    typer.Option("--to", metavar="DIR", help="Mend a copy in DIR; PATH is only read."),
]


def repair(path: Buffer, apply: Apply = False, to: To = None, as_json: AsJson = False) -> None:
    """Mend a buffer: whole episodes stay, the others are dropped.

    Says what would be done and what would be lost; with --apply it is done, under the writer's lock. What is dropped
    does not come back: if you have a backup of a damaged file, put that back first. With --to, a copy
    of what is whole is made in DIR: for a disk that is failing, or can't be written to.
    Exit code 0: sound, or mended; 1: there is something to do, or some of it can't be mended; 2: no answer.
    """
    from ringmap.storage.inspect.repair import repair as repair_buffer

    if not os.path.lexists(local_path(path)):
        raise NotFoundError(f"repair: {path}: nothing is there")
    with bar("repair") as progress:
        done = repair_buffer(path, dry_run=not apply, progress=progress, to=to)
    actions = [(action.file, action) for action in done]
    left = findings_at(to or path, "repair") if apply or not actions else []
    episodes = sum(action.episodes for _, action in actions)
    steps = sum(action.steps for _, action in actions)
    if as_json:
        show_json(
            {
                "path": path,
                "applied": apply,
                "actions": [
                    {
                        "file": f,
                        "what": a.what,
                        "record": a.seq,
                        "episodes": a.episodes,
                        "steps": a.steps,
                    }
                    for f, a in actions
                ],
                "lost": {"episodes": episodes, "steps": steps},
                "left": [{"file": f, "what": x.what, "record": x.seq} for f, x in left],
            }
        )
        raise typer.Exit(bool(left or (actions and not apply)))
    for file, action in actions:
        show(f"{file}: {action.what}")
    for file, finding in left:
        show(f"{file}: {finding.what}: can't be mended")
    if actions:
        what = f"{count(episodes, 'episode')}, {count(steps, 'step')}" if episodes else "nothing"
        verb, loses = ("done", "lost") if apply else ("to do", "would be lost")
        show(f"{path}: {count(len(actions), 'action')} {verb}; {loses}: {what}")
        if not apply:
            show("Nothing was changed; say --apply to do it.")
    elif not left:
        show(f"{path}: sound, nothing to do")
    raise typer.Exit(bool(left or (actions and not apply)))
