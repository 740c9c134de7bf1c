"""`ringmap.ray.ReplayBuffer` over a cluster of three raylets: what is drawn, what joins, what fails."""

import os
import shutil
import signal
from collections import Counter

import numpy as np
import pytest

import ringmap.ray as rr
from ringmap.errors import ClosedError, InputError, NoClipsError
from ringmap.ray.memory import Memory
from tests.unit.buffers.steps import prove
from tests.unit.ray.conftest import OPTIONS, Nodes, until

pytest.importorskip("ray")


@pytest.fixture
def buf(nodes):
    with rr.ReplayBuffer(nodes.folder, history_len=4, wait_s=90) as buffer:
        until(lambda: len(buffer) == nodes.clips(4))
        yield buffer


def by_name(buf):
    return {node.name: node for node in buf.nodes}


def test_each_ring_once(buf, nodes):
    """Three raylets see all rings, and each ring is read by the node in whose folder it lies."""
    found = by_name(buf)
    assert {name: [s.name for s in node.shards] for name, node in found.items()} == {
        "a": [str(nodes.folder / "a" / "0")],
        "b": [str(nodes.folder / "b" / "0")],
        "head": [],
    }
    assert len({node.pid for node in found.values()}) == 3


def test_clips_are_equally_likely(buf, nodes):
    drawn, ids = Counter(), {}
    for _ in range(40):
        batch = buf.sample(256)
        clips = prove(batch, nodes.lengths, 4)
        drawn.update(clips)
        for clip, clip_id in zip(clips, batch.ids.tolist(), strict=True):
            assert ids.setdefault(clip_id, clip) == clip, "one id for two clips"
    count, mean = nodes.clips(4), 40 * 256 / nodes.clips(4)
    assert len(drawn) == len(ids) == count
    squares = sum((n - mean) ** 2 / mean for n in drawn.values())
    assert squares < count + 5 * (2 * count) ** 0.5  # chi-square


def test_a_seed_decides_the_draws(nodes):
    drawn = []
    for seed in (3, 3, 4):
        with rr.ReplayBuffer(nodes.folder, history_len=4, wait_s=90, seed=seed) as buffer:
            until(lambda buffer=buffer: len(buffer) == nodes.clips(4))
            drawn.append([prove(buffer.sample(64), nodes.lengths, 4) for _ in range(3)])
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(InputError, match="seed must be an integer"):
        rr.ReplayBuffer(nodes.folder, seed=-1)


def test_mixed_within_a_batch(buf, nodes):
    """A part of a batch is a batch: its first half does not come from one node."""
    halves = [np.mean(buf.sample(256)["episode"][:128, 0] < 10) for _ in range(10)]
    share = 10 * 27 / nodes.clips(4)
    assert abs(np.mean(halves) - share) < 0.1


def test_batches_in_order_and_kept(buf, nodes):
    """What the caller keeps stays as it is, while memory that nobody refers to is used again."""
    with buf.batches(64, steps=30, prefetch=4) as batches:
        kept = [(batch, batch["step"].copy()) for batch in batches]
    assert len(kept) == 30
    for batch, steps in kept:
        prove(batch, nodes.lengths, 4)
        np.testing.assert_array_equal(batch["step"], steps)


def test_a_message_brings_several_batches(buf, nodes, monkeypatch):
    """Half of what is under way comes at once, and the last message brings what is left."""
    asked, ask = [], rr.ReplayBuffer._ask
    monkeypatch.setattr(
        rr.ReplayBuffer, "_ask", lambda self, size, request: asked.append(size) or ask(self, size, request)
    )
    for prefetch, steps, sizes in [
        (4, 7, [2, 2, 2, 1]),
        (5, 7, [2, 2, 2, 1]),
        (1, 3, [1] * 3),
        (0, 2, [1] * 2),
        (9, 2, [2]),
    ]:
        asked.clear()
        with buf.batches(32, steps=steps, prefetch=prefetch) as batches:
            found = list(batches)
        assert asked == [32 * n for n in sizes]
        assert [len(batch.ids) for batch in found] == [32] * steps
        for batch in found:
            prove(batch, nodes.lengths, 4)
            assert {values.shape[:1] for values in batch.values()} == {(32,)}
        assert len({batch.ids.tobytes() for batch in found}) == steps


def test_requests(buf, nodes):
    from ringmap.data import Window

    assert prove(buf.sample(32, 7), nodes.lengths, 7)
    batch = buf.sample(32, window={"step": Window(range(-2, 3), pad="edge")}, columns=["episode", "step"])
    assert {name: values.shape for name, values in batch.items()} == {
        "episode": (32,),
        "step": (32, 5),
        "step_is_pad": (32, 5),
    }
    out = {"step": np.empty((32, 4), np.int32)}
    assert buf.sample(32, out=out)["step"] is out["step"]
    with pytest.raises(InputError, match=r"out\['step'\] must be a C-contiguous int32 array of shape \(16, 4\)"):
        buf.sample(16, out=out)
    with pytest.raises(InputError, match="nothing"):
        buf.sample(16, columns=["nothing"])
    with pytest.raises(InputError, match="can't be sent to a reader"):
        buf.sample(16, window={"step": lambda batch: batch["step"]})
    with pytest.raises(NoClipsError, match="node a has no clips that are long enough"):
        buf.sample(16, 40)


def test_rings_join(buf, nodes):
    nodes.ring("a", "1")
    nodes.write("a", 25, "1")
    nodes.write("b", 25)
    until(lambda: len(buf) == nodes.clips(4))
    assert {e for e, _ in prove(buf.sample(2000), nodes.lengths, 4)} == set(nodes.lengths)


def test_a_copy_is_not_read(buf, nodes, caplog):
    before = len(buf)
    shutil.copytree(nodes.folder / "a" / "0", nodes.folder / "b" / "copy")
    until(lambda: "are the same ring" in (buf.nodes and caplog.text))
    assert "by a copy or a shared disk; it is read at one place" in caplog.text
    buf.refresh()
    assert len(buf) == before


def test_a_reader_is_killed(buf, nodes, caplog):
    """Batches that were asked for come whole; the other node serves meanwhile; Ray starts it again."""
    killed = by_name(buf)["a"].pid
    with buf.batches(64, prefetch=4) as batches:
        next(batches)
        os.kill(killed, signal.SIGKILL)
        for _ in range(50):
            prove(next(batches), nodes.lengths, 4)
        until(lambda: next(batches) and by_name(buf)["a"].pid not in (None, killed))
        until(lambda: (next(batches)["episode"] < 10).any())
    assert "the reader of node a is away, and the others serve" in caplog.text
    assert "node a is back" in caplog.text


def test_a_node_is_removed_and_another_added(cluster, nodes, caplog):
    """Its rings are read by another raylet of the same host; the new node of its name takes its new rings."""
    extra = cluster.add_node(**OPTIONS, node_name="c")
    try:
        nodes.ring("c")
        nodes.write("c", 30)
        with rr.ReplayBuffer(nodes.folder, history_len=4, wait_s=90) as buf:
            until(lambda: by_name(buf)["c"].clips == 27)
            with buf.batches(64, prefetch=4) as batches:
                cluster.remove_node(extra, allow_graceful=False)
                extra = None
                for _ in range(20):
                    prove(next(batches), nodes.lengths, 4)
                until(lambda: next(batches) and "c" not in by_name(buf))
                until(lambda: next(batches) and len(buf) == nodes.clips(4))
                assert "node c is gone" in caplog.text
                extra = cluster.add_node(**OPTIONS, node_name="c")
                nodes.ring("c", "1")
                nodes.write("c", 30, "1")
                until(lambda: next(batches) and len(buf) == nodes.clips(4))
                prove(next(batches), nodes.lengths, 4)
    finally:
        if extra is not None:
            cluster.remove_node(extra)


def test_a_full_store(buf, nodes):
    """While the learner's store is full of what it keeps, batches still come."""
    import ray

    kept = [ray.put(np.zeros(50_000_000, np.uint8)) for _ in range(8)]
    views = [ray.get(ref) for ref in kept]
    with buf.batches(4096, steps=10) as batches:
        for batch in batches:
            prove({name: values[:50] for name, values in batch.items()}, nodes.lengths, 4)
    assert len(views) == 8


def test_what_bad_input_gets(cluster, tmp_path, nodes):
    with pytest.raises(
        NoClipsError, match="node a does not have the path; node b does not have the path; node head does not have"
    ):
        rr.ReplayBuffer(tmp_path / "absent", wait_s=20)
    with pytest.raises(InputError, match="path must be a directory, got 3"):
        rr.ReplayBuffer(3)
    with pytest.raises(InputError, match="history_len"):
        rr.ReplayBuffer(nodes.folder, history_len=0)
    with pytest.raises(InputError, match="wait_s must not be negative"):
        rr.ReplayBuffer(nodes.folder, wait_s=-1)


def test_readers_that_have_not_answered_are_named(nodes):
    with pytest.raises(NoClipsError, match="node a has not answered yet; node b has not .* wait longer"):
        rr.ReplayBuffer(nodes.folder, wait_s=0)


def test_other_columns(buf, nodes):
    writer = nodes.ring("head")
    writer.write_episode({"other": np.arange(500)})
    until(lambda: by_name(buf)["head"].clips)
    with pytest.raises(InputError, match="have other columns than those before them"):
        for _ in range(20):
            buf.sample(256)


def test_text_of_other_lengths(cluster, tmp_path):
    """One node has only short text; no part of a batch says how wide it is."""
    made = Nodes(tmp_path)
    for node, word in (("a", "x"), ("b", "word ")):
        ring = made.ring(node)
        ring.write_episode({"step": np.arange(40), "task": [word * (1 + t % 9) for t in range(40)], "of": [word] * 40})
        ring.close()
    with rr.ReplayBuffer(tmp_path, history_len=1, wait_s=90) as buffer:
        until(lambda: len(buffer) == 80)
        batch = None
        for _ in range(2):
            batch = buffer.sample(256, out=batch)
            steps, of = batch["step"].ravel().tolist(), batch["of"].ravel().tolist()
            assert {*of} == {"x", "word "}
            expected = [word * (1 + t % 9) for t, word in zip(steps, of, strict=True)]
            assert batch["task"].ravel().tolist() == expected


def test_closed(buf):
    buf.close()
    buf.close()
    assert "closed" in repr(buf)
    with pytest.raises(ClosedError):
        buf.sample(4)


def test_memory_is_never_shared():
    memory, kept = Memory(keep=2), []
    for n in range(200):
        made = memory.empty((n % 3 + 1, 5), np.dtype(np.int64))
        made[:] = n
        if n % 2:
            kept.append((made[:, 1:], n))
    assert all((values == n).all() for values, n in kept)
    assert memory.empty((0, 3), np.dtype(np.int64)).shape == (0, 3)
