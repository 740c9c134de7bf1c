"""`ringmap.ray.read`: each stored episode or clip of all nodes comes once, where it lies."""

import numpy as np
import pytest

import ringmap.ray as rr
from ringmap.errors import InputError, NoClipsError

pytest.importorskip("ray")
# Ray Data warns of its own calls.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray")


def look(row):
    """Return what an episode says of itself, and where it was read."""
    assert (row["episode"] == row["episode"][0]).all()
    assert (row["step"] == np.arange(len(row["step"]))).all()
    return {"episode": row["episode"][0], "length": len(row["step"]), "node": row["_node"], "ring": row["_ring"]}


def test_all_episodes(nodes):
    """A map over all, counted and compared; tasks run on the node of the ring; more than one task a ring."""
    import ray

    dataset = rr.read(nodes.folder, block_steps=100)
    found = dataset.map(look).take_all()
    assert sorted((int(f["episode"]), int(f["length"])) for f in found) == sorted(nodes.lengths.items())
    names = {n["NodeID"]: n["NodeName"] for n in ray.nodes()}
    assert {(names[f["node"]], f["ring"]) for f in found} == {
        (name, str(nodes.folder / name / "0")) for name in ("a", "b")
    }
    assert dataset.count() == len(nodes.lengths)


def test_all_clips(nodes):
    rows = rr.read(nodes.folder, history_len=4, columns=["episode", "step"], block_steps=100).take_all()
    assert len(rows) == nodes.clips(4)
    assert set(rows[0]) == {"episode", "step", "_node", "_ring", "_position"}
    firsts = {(int(row["episode"][0]), int(row["step"][0])) for row in rows}
    assert len(firsts) == len(rows), "a clip came twice"
    for row in rows:
        assert (row["step"] == row["step"][0] + np.arange(4)).all()


def test_what_is_evicted_is_passed_over(nodes):
    dataset = rr.read(nodes.folder)
    before = set(nodes.lengths)
    writer = nodes.writers["a", "0"]
    while writer.num_steps_stored < 5000 - 300 or 0 in _stored(writer):
        nodes.write("a", 100)
    left = {int(row["episode"][0]) for row in dataset.take_all()}
    assert 0 not in left
    assert left == {n for n in before if n >= 10 or n in _stored(writer)}


def _stored(writer):
    return {int(writer.load_episode(n)["episode"][0]) for n in range(writer.num_episodes)}


def test_bad_reads(nodes, tmp_path):
    for match, options in [
        ("history_len", {"history_len": 0}),
        ("block_steps", {"block_steps": 0}),
        ("columns= must list names", {"columns": "step"}),
    ]:
        with pytest.raises(InputError, match=match):
            rr.read(nodes.folder, **options)
    with pytest.raises(NoClipsError, match="no episode below"):
        rr.read(tmp_path / "absent", wait_s=0)
    with pytest.raises(Exception, match="has no column 'nothing'"):
        rr.read(nodes.folder, columns=["nothing"]).take_all()
