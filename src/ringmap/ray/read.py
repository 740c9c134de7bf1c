"""`ringmap.ray.read`: the episodes or clips of all nodes' rings, as a dataset of Ray Data.

    roster ─► each node lists its episodes, in parts ─► one dataset a node, whose tasks run there ─► their union

Rows go from there to the next step of the job as Ray Data decides. A part names episodes by position, so what a live
ring evicts meanwhile is passed over.

Invariants: each episode that was stored at the call comes once, unless it is evicted before it is read; a ring is read
at one node. Not here: batches for a learner (buffer.py).
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers.replay import ReplayBuffer
from ringmap.errors import ClipIndexError, DamageError, InputError, NoClipsError
from ringmap.extras import require
from ringmap.ray.cluster import Layout, Node, Scan, answer, nodes_of, pinned_to, ray_for, rings_at
from ringmap.ray.roster import assign, copies

__all__ = ["read"]

log = logging.getLogger("ringmap")

_WHERE = "ringmap.ray.read"
_PAUSE_S = 0.5
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class _What:
    """What a row is: an episode, or with `history_len` a clip."""

    columns: tuple[str, ...] | None
    history_len: int | None
    frameskip: int


def read(
    path: str | os.PathLike[str],
    history_len: int | None = None,
    frameskip: int = 1,
    *,
    columns: Iterable[str] | None = None,
    block_steps: int = 10_000,
    wait_s: float = 60.0,
    remote_args: Mapping[str, Any] | None = None,
) -> Any:
    """Return a `ray.data.Dataset` of the episodes, or the clips, of the rings of all nodes. Nothing is read before it
    is used.

    Args:
        path: as for `ringmap.ray.ReplayBuffer`.
        history_len: observations per clip: each row is a clip; None: each row is a whole episode.
        frameskip: stride between the observations of a clip.
        columns: names of the columns to read; None: all.
        block_steps: about how many steps a task reads. A longer episode is one task.
        wait_s: how long to wait for the first episode.
        remote_args: options of Ray for the tasks that read, such as `{"num_cpus": 0.5}`.

    Returns:
        Rows: column -> `(T, ...)` array of an episode, with the values that are constant within it under their own
        names, or `(H, ...)` of a clip; `_node`, the id of the node that read it; `_ring`, the ring's directory; and
        `_position`, which names the episode there.

    Raises:
        MissingExtraError, RoleError: Ray is not installed, or not initialised.
        InputError: an argument is wrong.
        NoClipsError: no ring is there after `wait_s` seconds.
        DamageError: a ring can't be read.

    Cost: to begin: O(episodes), on all nodes at once. A task runs on the node whose disk has its ring.

    Example, in a cluster::

        ray.init("auto")
        returns = rr.read("/data/replay").map(lambda row: {"return": row["reward"][1:].sum()})
        print(returns.mean("return"))
    """
    layout = Layout(path, _WHERE)
    if history_len is not None:
        history_len = positive(_WHERE, "history_len", history_len)
    frameskip = positive(_WHERE, "frameskip", frameskip)
    block_steps = positive(_WHERE, "block_steps", block_steps)
    if isinstance(columns, str):
        raise InputError(f"{_WHERE}: columns= must list names, got {columns!r}")
    ray = ray_for(_WHERE)
    require("ray", _WHERE)
    from ray import data

    what = _What(None if columns is None else tuple(columns), history_len, frameskip)
    given = dict(remote_args or {})
    parts = _parts(ray, layout, block_steps, wait_s)
    reads = [
        data.from_items([{"part": part} for part in of_node], override_num_blocks=len(of_node)).flat_map(
            partial(_rows, what=what), **_only_on(node, data.Dataset), **given
        )
        for node, of_node in parts
    ]
    return reads[0].union(*reads[1:]) if len(reads) > 1 else reads[0]


def _only_on(node: Node, dataset: Any) -> dict[str, Any]:
    """Return what places the tasks of a dataset on one node."""
    if "label_selector" in inspect.signature(dataset.flat_map).parameters:
        return {"label_selector": {"ray.io/node-id": node.id}}
    return {"scheduling_strategy": pinned_to(node)}  # of a Ray that has no labels here


def _parts(ray: Any, layout: Layout, block_steps: int, wait_s: float) -> list[tuple[Node, list[dict[str, Any]]]]:
    """Return what each node reads."""
    scout = ray.remote(num_cpus=0, max_retries=0)(rings_at)
    lister = ray.remote(num_cpus=0, max_retries=0)(_listed)
    until = time.monotonic() + wait_s
    while True:
        found, why = [], ""
        try:
            seen = _seen(ray, scout, layout)
            roster, _ = assign(seen, layout, {})
            lists = [
                (seen[key][0], lister.options(scheduling_strategy=pinned_to(seen[key][0])).remote(folders, block_steps))
                for key, folders in roster.items()
            ]
            parts = [(node, answer(ray, ref, _PATIENCE_S)) for node, ref in lists]
            found = [(node, of_node) for node, of_node in parts if of_node]
            why = f"on the nodes {', '.join(node.name for node, _ in seen.values())}"
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:  # a node that is going: a part of all would be no answer
            if time.monotonic() >= until:
                raise
            log.info("%s: looks again: %s", _WHERE, error)
        if found:
            return found
        if time.monotonic() >= until:
            raise NoClipsError(
                f"{_WHERE}: no episode below {layout.path} {why}; start a collector there, or wait longer (wait_s=)"
            )
        time.sleep(_PAUSE_S)


def _seen(ray: Any, scout: Any, layout: Layout) -> dict[str, tuple[Node, Scan]]:
    """Return what each node sees.

    Raises:
        DamageError, InputError: a ring can't be read, or is there twice.
        RayError: a node does not answer.
    """
    asked = [
        (node, scout.options(scheduling_strategy=pinned_to(node)).remote(layout.patterns)) for node in nodes_of(ray)
    ]
    seen = {node.id: (node, answer(ray, ref, _PATIENCE_S)) for node, ref in asked}
    for node, scan in seen.values():
        for folder, problem in scan.problems.items():
            raise DamageError(f"{_WHERE}: node {node.name}: {folder}: {problem}")
    for one, other in copies(seen):
        raise InputError(
            f"{_WHERE}: {one.folder} on host {one.host} and {other.folder} on host {other.host} are the same ring, by "
            "a copy or a shared disk: its episodes would come twice; move one of them elsewhere"
        )
    return seen


def _listed(folders: Iterable[str], block_steps: int) -> list[dict[str, Any]]:
    """Return the episodes of rings in parts: a ring, and positions in it."""
    parts = []
    for folder in folders:
        with ReplayBuffer.open(folder, mode="r") as buffer:
            starts, lengths = buffer.episode_spans()
        blocks = (np.cumsum(lengths) - lengths) // block_steps
        for block in np.unique(blocks):
            of_block = starts[blocks == block]
            parts.append({"ring": folder, "positions": of_block.tolist()})
    return parts


def _rows(item: dict[str, Any], what: _What) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    ring, positions = item["part"]["ring"], item["part"]["positions"]
    sizes: dict[str, Any] = {"history_len": what.history_len or 1, "frameskip": what.frameskip}
    with ReplayBuffer.open(ring, mode="r", **sizes) as buffer:
        for position in positions:
            try:
                number = buffer.episode_number(position)
                found = _clips_of(buffer, number) if what.history_len else [_episode(buffer, number)]
                for row in found:
                    kept = row if what.columns is None else _some(row, what.columns, ring)
                    yield {**kept, "_node": node, "_ring": ring, "_position": int(position)}
            except ClipIndexError:  # evicted since the call
                continue


def _episode(buffer: ReplayBuffer, number: int) -> dict[str, Any]:
    return {**buffer.episode_data(number), **buffer.load_episode(number)}


def _clips_of(buffer: ReplayBuffer, number: int) -> Iterator[dict[str, Any]]:
    view = buffer.view().take([number])
    for clip in range(len(view)):
        yield dict(view[clip])


def _some(row: Mapping[str, Any], columns: Iterable[str], ring: str) -> dict[str, Any]:
    try:
        return {name: row[name] for name in columns}
    except KeyError as error:
        raise InputError(f"{_WHERE}: {ring} has no column {error}; it has {sorted(row)}") from error
