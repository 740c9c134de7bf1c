"""Which node reads which ring: each ring one node, however many see it.

    node a sees   ring 1 (/data/a/0)  ring 2 (/data/b/0)  ─►  a reads 1
    node b sees   ring 1 (/data/a/0)  ring 2 (/data/b/0)  ─►  b reads 2        two raylets on one host
    node c sees   ring 1, at another host                 ─►  a copy: named, and not read

Invariants: a ring, known by its uuid, is read by at most one node: the one in whose folder it lies, else the one that
read it before. Not here: how a node looks (cluster.py), when (readers.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from ringmap.ray.cluster import Found, Layout, Node, Scan

__all__ = ["Roster", "assign", "copies"]

Roster = dict[str, tuple[str, ...]]
"""Node id -> folders of the rings that it reads."""


def assign(
    seen: Mapping[str, tuple[Node, Scan]], layout: Layout, before: Mapping[bytes, str]
) -> tuple[Roster, dict[bytes, str]]:
    """Give each ring to one of the nodes that see it.

    Args:
        seen: node id -> the node, and what it sees.
        layout: whose folder is whose.
        before: uuid -> the id of the node that read it so far.

    Returns:
        The folders of each node, and uuid -> node id. O(rings seen).
    """
    best: dict[bytes, tuple[tuple[bool, bool, str, str], str, str]] = {}
    for node, scan in seen.values():
        own = layout.folder(node)
        for ring in scan.rings:
            is_own = ring.folder.startswith(own + "/")
            rank = not is_own, before.get(ring.uuid) != node.id, node.name, node.id
            if ring.uuid not in best or rank < best[ring.uuid][0]:
                best[ring.uuid] = rank, node.id, ring.folder
    folders: dict[str, list[str]] = {}
    for _, node_id, folder in best.values():
        folders.setdefault(node_id, []).append(folder)
    roster = {node_id: tuple(sorted(found)) for node_id, found in folders.items()}
    return roster, {uuid: node_id for uuid, (_, node_id, _) in best.items()}


def copies(seen: Mapping[str, tuple[Node, Scan]]) -> list[tuple[Found, Found]]:
    """Return pairs of places that hold one ring: copies, or a disk that two hosts share. One place, seen twice, is
    none."""
    first: dict[bytes, Found] = {}
    found: dict[tuple[str, str], tuple[Found, Found]] = {}
    for _, scan in seen.values():
        for ring in scan.rings:
            other = first.setdefault(ring.uuid, ring)
            if (other.home, other.host) != (ring.home, ring.host):
                found[ring.home, ring.host] = other, ring
    return list(found.values())
