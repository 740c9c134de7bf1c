"""A directory of rings: `info` and `watch` show them as one table, and in total."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringmap.cli.console import count

if TYPE_CHECKING:
    from ringmap.buffers.sharded.buffer import Shard, ShardedReplayBuffer

__all__ = ["HEADER", "NUMBERS", "FleetPoll", "cells", "opened", "poll", "total"]

HEADER = ("ring", "episodes", "steps", "written", "writer", "last commit", "problem")
NUMBERS = "episodes steps written"


@dataclass(frozen=True, slots=True)
class FleetPoll:
    """One observation: the rings, and when."""

    at: float
    shards: list[Shard]

    def sum_of(self, name: str) -> int:
        """Return the sum of one of the counts."""
        return sum(getattr(shard, name) for shard in self.shards)


def opened(path: str) -> ShardedReplayBuffer:
    """Open the rings below a directory; one that can't be read has its problem in its row."""
    from ringmap.buffers.sharded.buffer import ShardedReplayBuffer

    with _rows_say_it():
        return ShardedReplayBuffer(path, wait_s=0, on_bad="skip")


@contextlib.contextmanager
def _rows_say_it() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def poll(buffer: ShardedReplayBuffer) -> FleetPoll:
    """Poll at all rings, and for new ones."""
    with _rows_say_it():
        buffer.refresh()
    return FleetPoll(time.monotonic(), buffer.shards)


def total(path: str, now: FleetPoll, before: FleetPoll | None) -> dict[str, Any]:
    """Return what the rings hold together, and at which rate steps come."""
    rate = None
    if before is not None and now.at > before.at and now.sum_of("written") >= before.sum_of("written"):
        rate = round((now.sum_of("written") - before.sum_of("written")) / (now.at - before.at), 1)
    return {
        "path": path,
        "kind": "rings",
        "rings": len(now.shards),
        "episodes": now.sum_of("episodes"),
        "steps": now.sum_of("steps"),
        "steps_written": now.sum_of("written"),
        "steps_per_s": rate,
        "writers_alive": sum(s.writer is not None and bool(s.writer.alive) for s in now.shards),
        "problems": sum(s.problem is not None for s in now.shards),
        "shards": [_described(shard) for shard in now.shards],
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
