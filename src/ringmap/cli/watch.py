"""`ringmap watch`: a buffer, or a directory of rings, while it fills."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmap.buffers.opening import BUFFERS, EPISODES, FLEET, kind_of
from ringmap.cli.arguments import AsJson, Buffer
from ringmap.cli.console import clean, console, count, percent, plain, show, show_table
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.paths import local_path

if TYPE_CHECKING:
    from ringmap.buffers.sharded.buffer import Shard, ShardedReplayBuffer

__all__ = ["HEADER", "NUMBERS", "cells", "opened", "total", "watch"]


Once = Annotated[bool, typer.Option("--once", help="Print one line, and exit.")]
Interval = Annotated[
    float,
    typer.Option("--interval", "-n", metavar="S", min=0.05, help="Seconds between two polls."),
]


def watch(path: Buffer, once: Once = False, interval: Interval = 1.0, as_json: AsJson = False) -> None:
    """Show how a buffer fills while a collector writes it.

    Each line says what is stored, and at which rate steps come; of a directory with buffers below it, a table does. A
    terminal shows one line that changes; anything else gets a line for each poll, with --json an object. Takes no lock
    and slows no writer. Ends on Ctrl-C, with exit code 0.
    """
    kind = kind_of(path, "watch", BUFFERS)
    is_fleet, noun = kind == FLEET, "step" if kind == EPISODES else "row"
    try:
        with contextlib.ExitStack() as held:
            polls = held.enter_context(contextlib.closing(_fleet_facts(path) if is_fleet else _facts(path)))
            tell: Callable[[dict[str, Any]], None]
            if as_json:
                tell = lambda facts: show(json.dumps(plain(facts)))  # noqa: E731 - as the others
            elif is_fleet:
                tell = lambda facts: show_table(HEADER, cells(facts), NUMBERS)  # noqa: E731
            elif once or not sys.stdout.isatty():
                tell = lambda facts: show(_line(facts, noun))  # noqa: E731
            else:
                tell = held.enter_context(_one_line(f"{path}: ", noun))
            for facts in polls:
                tell(facts)
                sys.stdout.flush()
                if once:
                    return
                time.sleep(interval)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _facts(path: str) -> Generator[dict[str, Any]]:
    """Yield what a buffer holds, at each poll, and at which rate steps come."""
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.inspect.describe import writer_of
    from ringmap.storage.read.reader import Reader

    with contextlib.closing(Reader(Disk(), local_path(path))) as reader:
        last: tuple[float, int] | None = None
        gone: int | None = None
        while True:
            with thread.searching, reader.lock:
                live, now = reader.live, (time.monotonic(), reader.head)
                stored, episodes, commits = live.num_steps, live.num_episodes, reader.seq
                alive = writer_of(reader.folder).alive
            gone = now[1] - stored if gone is None else gone
            yield {
                "path": path,
                "steps": stored,
                "max_steps": reader.manifest.max_steps,
                "episodes": episodes,
                "steps_written": now[1],
                "commits": commits,
                "steps_per_s": _rate(now, last),
                "steps_evicted": now[1] - stored - gone,
                "writer_alive": alive,
            }
            last = now
            reader.refresh()


def _rate(now: tuple[float, int], before: tuple[float, int] | None) -> float | None:
    """Return steps per second between two polls, `(time, steps written)`; None where the buffer is another one."""
    if before is None or now[0] <= before[0] or now[1] < before[1]:
        return None
    return round((now[1] - before[1]) / (now[0] - before[0]), 1)


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


@contextlib.contextmanager
def _one_line(before: str, noun: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give what shows facts as one line that changes."""
    from rich.live import Live
    from rich.text import Text

    with Live(console=console(), auto_refresh=False) as live:
        yield lambda facts: live.update(Text(clean(before + _line(facts, noun))), refresh=True)


# -- a directory of rings ---------------------------------------------------------------------


HEADER = ("ring", "episodes", "steps", "written", "writer", "last commit", "problem")
NUMBERS = "episodes steps written"


@contextlib.contextmanager
def opened(path: str) -> Iterator[ShardedReplayBuffer]:
    """Open the rings below a directory; one that can't be read has its problem in its row."""
    from ringmap.buffers.sharded.buffer import ShardedReplayBuffer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with ShardedReplayBuffer(path, wait_s=0, on_bad="skip") as buffer:
            yield buffer


def _fleet_facts(path: str) -> Generator[dict[str, Any]]:
    with opened(path) as buffer:
        last: tuple[float, int] | None = None
        while True:
            buffer.refresh()
            facts = total(path, buffer.shards, last)
            yield facts
            last = time.monotonic(), facts["steps_written"]


def total(path: str, shards: list[Shard], last: tuple[float, int] | None = None) -> dict[str, Any]:
    """Return what the rings hold together, and at which rate steps come."""
    episodes, steps, written = (sum(getattr(shard, n) for shard in shards) for n in ("episodes", "steps", "written"))
    return {
        "path": path,
        "kind": "rings",
        "rings": len(shards),
        "episodes": episodes,
        "steps": steps,
        "steps_written": written,
        "steps_per_s": _rate((time.monotonic(), written), last),
        "writers_alive": sum(s.writer is not None and bool(s.writer.alive) for s in shards),
        "problems": sum(s.problem is not None for s in shards),
        "shards": [_described(shard) for shard in shards],
    }


def _described(shard: Shard) -> dict[str, Any]:
    writer = shard.writer
    return {
        "name": shard.name,
        "path": str(shard.path),
        "episodes": shard.episodes,
        "steps": shard.steps,
        "steps_written": shard.written,
        "idle_s": None if shard.idle_s is None else round(shard.idle_s, 1),
        "writer": None if writer is None else {"alive": writer.alive, "pid": writer.pid, "host": writer.host},
        "problem": shard.problem,
        "policy_step": shard.policy_step,
    }


def cells(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table, the total last."""
    rows = list[tuple[str, ...]]()
    for shard in facts["shards"]:
        writer, idle = shard["writer"] or {}, shard["idle_s"]
        alive = writer.get("alive")
        who = "?" if alive is None else f"process {writer['pid']}" if alive else "none"
        rows.append(
            (
                shard["name"],
                count(shard["episodes"]),
                count(shard["steps"]),
                count(shard["steps_written"]),
                who,
                "-" if idle is None else f"{idle:,.0f} s ago",
                shard["problem"] or "",
            )
        )
    rate = "" if facts["steps_per_s"] is None else f"{facts['steps_per_s']:,.0f} steps/s"
    bad = f"{count(facts['problems'])} left out" if facts["problems"] else ""
    rows.append(
        (
            f"total of {count(facts['rings'], 'ring')}",
            count(facts["episodes"]),
            count(facts["steps"]),
            count(facts["steps_written"]),
            f"{count(facts['writers_alive'])} alive",
            rate,
            bad,
        )
    )
    return rows
