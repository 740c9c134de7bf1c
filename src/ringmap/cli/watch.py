"""`ringmap watch`: a buffer while it fills."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmap.buffers.opening import BUFFERS, EPISODES, FLEET, kind_of
from ringmap.cli.console import clean, console, count, percent, plain, show, show_table
from ringmap.cli.options import AsJson, Buffer
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.paths import local_path

if TYPE_CHECKING:
    from ringmap.storage.read.reader import Reader

Once = Annotated[bool, typer.Option("--once", help="Print one line, and exit.")]
Interval = Annotated[
    float,
    typer.Option("--interval", "-n", metavar="S", min=0.05, help="Seconds between two polls."),
]


@dataclass(frozen=True, slots=True)
class Poll:
    """One observation: counters since the buffer was created, and the stored amounts."""

    at: float
    written: int
    commits: int
    steps: int
    episodes: int
    alive: bool | None


def watch(path: Buffer, once: Once = False, interval: Interval = 1.0, as_json: AsJson = False) -> None:
    """Show how a buffer fills while a collector writes it.

    Each line says what is stored, and at which rate steps come; of a directory with buffers below it, a table does. A
    terminal shows one line that changes; anything else gets a line for each poll, with --json an object. Takes no lock
    and slows no writer. Ends on Ctrl-C, with exit code 0.
    """

    from ringmap.storage.disk.files import Disk
    from ringmap.storage.read.reader import Reader

    kind = kind_of(path, "watch", BUFFERS)
    if kind == FLEET:
        _watch_rings(path, once, interval, as_json)
        return
    reader = Reader(Disk(), local_path(path))
    noun = "step" if kind == EPISODES else "row"
    try:
        first = seen = _poll(reader)
        if once or as_json or not sys.stdout.isatty():
            _tell(path, reader, seen, None, first, noun, as_json)
            while not once:
                time.sleep(interval)
                reader.refresh()
                before, seen = seen, _poll(reader)
                _tell(path, reader, seen, before, first, noun, as_json)
        else:
            _live(path, reader, noun, interval)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        reader.close()


def _watch_rings(path: str, once: bool, interval: float, as_json: bool) -> None:
    """Print a table of all rings, with the total, at each poll."""
    import json

    from ringmap.cli.fleet import HEADER, NUMBERS, cells, opened, poll, total

    with opened(path) as buffer:
        try:
            before, now = None, poll(buffer)
            while True:
                facts = total(path, now, before)
                if as_json:
                    print(json.dumps(plain(facts)), flush=True)
                else:
                    show_table(HEADER, cells(facts), NUMBERS)
                    sys.stdout.flush()
                if once:
                    return
                time.sleep(interval)
                before, now = now, poll(buffer)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


def _poll(reader: Reader) -> Poll:
    from ringmap.storage.inspect.describe import writer_of

    with thread.searching, reader.lock:
        live = reader.live
        return Poll(
            time.monotonic(),
            reader.head,
            reader.seq,
            live.num_steps,
            live.num_episodes,
            writer_of(reader.folder).alive,
        )


def _rate(now: Poll, before: Poll | None) -> float | None:
    """Return steps per second between two polls; None for a single look, or if the buffer was created again between
    them."""
    if before is None or now.at <= before.at or now.written < before.written:
        return None
    return (now.written - before.written) / (now.at - before.at)


def _facts(path: str, reader: Reader, now: Poll, before: Poll | None, first: Poll) -> dict[str, Any]:
    rate = _rate(now, before)
    evicted = (now.written - now.steps) - (first.written - first.steps)
    return {
        "path": path,
        "steps": now.steps,
        "max_steps": reader.manifest.max_steps,
        "episodes": now.episodes,
        "steps_written": now.written,
        "commits": now.commits,
        "steps_per_s": None if rate is None else round(rate, 1),
        "steps_evicted": evicted,
        "writer_alive": now.alive,
    }


def _line(facts: dict[str, Any], noun: str) -> str:
    rate, evicted = facts["steps_per_s"], facts["steps_evicted"]
    parts = [
        f"{count(facts['steps'])} of {count(facts['max_steps'], noun)}, {percent(facts['steps'], facts['max_steps'])}",
        count(facts["episodes"], "episode") if noun == "step" else count(facts["commits"], "commit"),
        f"{'-' if rate is None else f'{rate:,.0f}'} {noun}s/s",
        f"{count(facts['steps_written'])} written",
        f"{count(evicted)} evicted since",
        {True: "writer alive", False: "no writer", None: "writer unknown"}[facts["writer_alive"]],
    ]
    return " | ".join(parts)


def _tell(path: str, reader: Reader, now: Poll, before: Poll | None, first: Poll, noun: str, as_json: bool) -> None:
    facts = _facts(path, reader, now, before, first)
    if as_json:
        import json

        print(json.dumps(plain(facts)), flush=True)
    else:
        show(_line(facts, noun))
        sys.stdout.flush()


def _live(path: str, reader: Reader, noun: str, interval: float) -> None:
    """Show one line that changes, until an interrupt."""
    from rich.live import Live
    from rich.text import Text

    first = before = _poll(reader)

    def text(now: Poll, then: Poll | None) -> Text:
        facts = _facts(path, reader, now, then, first)
        return Text(f"{clean(path)}: {clean(_line(facts, noun))}")

    with Live(text(first, None), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            reader.refresh()
            now = _poll(reader)
            live.update(text(now, before), refresh=True)
            before = now
