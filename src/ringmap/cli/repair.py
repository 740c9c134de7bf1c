"""`ringmap repair`: mend a buffer."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ringmap.cli.check import findings_at
from ringmap.cli.console import count, show, show_json
from ringmap.cli.options import AsJson, Buffer
from ringmap.cli.progress import bar
from ringmap.errors import NotFoundError
from ringmap.storage.disk.paths import local_path

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
