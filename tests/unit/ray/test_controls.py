"""Controls: a guard of `ringmap.ray` is taken out, and what guards it fails."""

import shutil
from types import SimpleNamespace

import pytest

import ringmap.ray as rr
from ringmap.errors import NoClipsError
from ringmap.ray import memory, readers
from tests.unit.ray import test_buffer
from tests.unit.ray.conftest import OPTIONS, until

pytest.importorskip("ray")


def everything(seen, layout, before):
    """Give each node all that it sees."""
    roster = {key: tuple(ring.folder for ring in scan.rings) for key, (_, scan) in seen.items()}
    return {key: folders for key, folders in roster.items() if folders}, {}


def test_without_the_roster_rings_count_once_for_each_raylet(nodes, monkeypatch):
    monkeypatch.setattr(readers, "assign", everything)
    with rr.ReplayBuffer(nodes.folder, history_len=4, wait_s=90) as buf:
        until(lambda: len(buf) == 3 * nodes.clips(4))
        with pytest.raises(AssertionError):
            test_buffer.test_each_ring_once(buf, nodes)


def test_without_uuids_a_copy_is_read(nodes, monkeypatch, caplog):
    def by_folder(seen, layout, before):
        roster = {}
        for key, (node, scan) in seen.items():
            own = tuple(r.folder for r in scan.rings if r.folder.startswith(layout.folder(node) + "/"))
            if own:
                roster[key] = own
        return roster, {}

    monkeypatch.setattr(readers, "assign", by_folder)
    with rr.ReplayBuffer(nodes.folder, history_len=4, wait_s=90) as buf:
        until(lambda: len(buf) == nodes.clips(4))
        shutil.copytree(nodes.folder / "b" / "0", nodes.folder / "a" / "copy")
        until(lambda: len(buf) > nodes.clips(4))


def test_without_the_redraw_a_node_that_goes_ends_the_learner(cluster, nodes, monkeypatch):
    part = rr.ReplayBuffer._part
    monkeypatch.setattr(rr.ReplayBuffer, "_part", lambda self, one, request, _: part(self, one, request, False))
    extra = cluster.add_node(**OPTIONS, node_name="c")
    nodes.ring("c")
    nodes.write("c", 300)
    with rr.ReplayBuffer(nodes.folder, history_len=4, wait_s=90) as buf:
        until(lambda: len(buf) == nodes.clips(4))
        with buf.batches(64, prefetch=4) as batches, pytest.raises(NoClipsError):
            next(batches)
            cluster.remove_node(extra, allow_graceful=False)
            for _ in range(2000):
                next(batches)


def test_memory_that_is_used_at_once_is_shared(monkeypatch):
    """The block goes back when it is handed out, not when nobody refers to it."""

    def at_once(handle, call, *args):
        call(*args)
        return SimpleNamespace(atexit=False)

    monkeypatch.setattr(memory, "weakref", SimpleNamespace(finalize=at_once))
    with pytest.raises(AssertionError):
        test_buffer.test_memory_is_never_shared()
