"""`ringmap.ray.read`: the episodes or clips of all nodes' rings, as a dataset of Ray Data.

    roster ─► each node lists its episodes, in parts ─► one dataset a node, whose tasks run there ─► their union

Rows go from there to the next step of the job as Ray Data decides. A part names episodes by position, so what a live
ring evicts meanwhile is passed over.

Invariants: each episode that was stored at the call comes once, unless it is evicted before it is read; a ring is read
at one node. Not here: batches for a learner (buffer.py).
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers.replay import ReplayBuffer
from ringmap.errors import ClipIndexError, InputError, NoClipsError
from ringmap.ray.cluster import Layout, Node, answer, assign, pinned_to, ray_for, scanned

__all__ = ["read"]

_WHERE = "ringmap.ray.read"
_PAUSE_S = 0.5
_PATIENCE_S = 60.0


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
        ray.exceptions.RayError: a node went away meanwhile: a part of all would be no answer.

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
    from ray import data

    rows = partial(
        _rows, columns=None if columns is None else tuple(columns), history_len=history_len, frameskip=frameskip
    )
    parts = _parts(ray, layout, block_steps, wait_s)
    reads = [
        data.from_items([{"part": part} for part in of_node], override_num_blocks=len(of_node)).flat_map(
            rows, **_only_on(node, data.Dataset), **(remote_args or {})
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
    lister = ray.remote(num_cpus=0, max_retries=0)(_listed)
    until = time.monotonic() + wait_s
    while True:
        seen = scanned(ray, layout, _WHERE, _PATIENCE_S, all_answer=True)
        roster, _ = assign(seen, layout, {})
        lists = [
            (seen[key][0], lister.options(scheduling_strategy=pinned_to(seen[key][0])).remote(folders, block_steps))
            for key, folders in roster.items()
        ]
        parts = [(node, answer(ray, ref, _PATIENCE_S)) for node, ref in lists]
        if found := [(node, of_node) for node, of_node in parts if of_node]:
            return found
        if time.monotonic() >= until:
            names = ", ".join(node.name for node, _ in seen.values())
            raise NoClipsError(
                f"{_WHERE}: no episode below {layout.path} on the nodes {names}; start a collector there, or wait "
                "longer (wait_s=)"
            )
        time.sleep(_PAUSE_S)


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


def _rows(
    item: dict[str, Any], columns: tuple[str, ...] | None, history_len: int | None, frameskip: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part: episodes, or with `history_len` clips."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    ring, positions = item["part"]["ring"], item["part"]["positions"]
    with ReplayBuffer.open(ring, mode="r", history_len=history_len or 1, frameskip=frameskip) as buffer:
        for position in positions:
            try:
                number = buffer.episode_number(position)
                if history_len is None:
                    rows = iter([{**buffer.episode_data(number), **buffer.load_episode(number)}])
                else:
                    clips = buffer.view().take([number])
                    rows = (dict(clips[clip]) for clip in range(len(clips)))
                for row in rows:
                    kept = row if columns is None else _some(row, columns, ring)
                    yield {**kept, "_node": node, "_ring": ring, "_position": int(position)}
            except ClipIndexError:  # evicted since the call
                continue


def _some(row: Mapping[str, Any], columns: Iterable[str], ring: str) -> dict[str, Any]:
    try:
        return {name: row[name] for name in columns}
    except KeyError as error:
        raise InputError(f"{_WHERE}: {ring} has no column {error}; it has {sorted(row)}") from error
