"""Compressed columns through the whole buffer: what holds for memmaps holds for them."""

import gc
import json
import os

import numpy as np
import pytest
import zarr

import ringmap
from ringmap import ReplayBuffer, Zarr
from ringmap.errors import CorruptError, InputError
from tests.unit.buffers.steps import columns, episode, same

STORAGES = {
    "zarr": "zarr",
    "lz4": Zarr("lz4", 3),
    "mixed": {"obs/x": Zarr("none", 4)},
    "steps": Zarr("zstd", 1),
    "one chunk": Zarr("lz4", 1000),
}


@pytest.fixture(params=STORAGES.values(), ids=STORAGES)
def storage(request):
    return request.param


def held(buf):
    """Return number -> length of what a buffer holds, every row checked."""
    found = {}
    for i, steps in enumerate(buf.episodes()):
        steps.pop("_episode_data", None)
        number, length = int(steps["episode"][0]), len(steps["episode"])
        same({name: np.array(rows) for name, rows in steps.items()}, columns(number, 0, length))
        same(buf.load_episode(i), columns(number, 0, length))
        found[number] = length
    return found


def test_names_may_be_anything(buffer):
    names = ["obs/képek", "..", "c.0.0", "zarr.json", "next.tmp", "obs/kepek"]
    rows = {name: np.arange(12.0).reshape(6, 2) + i for i, name in enumerate(names)}
    buf = buffer(10, spare_rows=3, storage=dict.fromkeys(names, Zarr("lz4", 4)))
    for _ in range(3):
        buf.write_episode(rows)
    same(buf.load_episode(-1), rows)
    assert buf.check() == []
    if buf.path is not None:
        folders = sorted(path.name for path in (buf.path / "columns").iterdir())
        assert folders == [
            "000-obs-kepek.zarr",
            "001-.zarr",
            "002-c-0-0.zarr",
            "003-zarr-json.zarr",
            "004-next-tmp.zarr",
            "005-obs-kepek.zarr",
        ]
        array = zarr.open_array(buf.path / "columns" / folders[0], mode="r")
        assert (array[12 % 13] == rows[names[0]][0]).all()


def test_a_schema_with_storage(buffer, storage):
    buf = buffer(20, schema=columns(0, 0, 1), spare_rows=5, storage=storage)
    chosen = buf.engine.owned.manifest.choices
    assert "zarr" in {choice.backend for choice in chosen}
    assert held(buf) == {}
    buf.write_episode(episode(1, 4))
    assert buf.engine.owned.manifest.choices == chosen
    assert held(buf) == {1: 4}


def test_other_storage_than_on_disk_is_refused(disk_buffer):
    buf = disk_buffer(20, spare_rows=5, storage={"obs/x": Zarr("lz4", 4)})
    buf.write_episode(episode(1, 4))
    buf.close()
    before = (buf.path / "manifest.json").read_bytes()
    for other, words in (
        ("zarr", "storage 'zarr' for column 'episode', but on disk it is 'memmap'"),
        ({"obs/x": Zarr("lz4", 5)}, "chunk_steps 5 for column 'obs/x', but on disk it is 4"),
        ({"obs/x": Zarr("zstd", 4)}, "codecs .* for column 'obs/x', but on disk it is"),
        ({"obs/x": "memmap", "step": "zarr"}, "but on disk it is"),
        ({"obs/x": "zarr", "nope": "zarr"}, "storage names column 'nope'"),
    ):
        with pytest.raises(InputError, match=words):
            ReplayBuffer(20, path=buf.path, spare_rows=5, storage=other)
    assert (buf.path / "manifest.json").read_bytes() == before
    for same_as in ({"obs/x": "zarr"}, {"obs/x": Zarr(chunk_steps=4)}, {"obs/x": Zarr("lz4")}):
        buf = ReplayBuffer(20, path=buf.path, spare_rows=5, storage=same_as)
        assert held(buf) == {1: 4}
        buf.close()


def test_estimate_is_the_most_that_chunks_come_to(tmp_path):
    schema = {"noise": ((100,), "u1"), "action": ((2,), "f4")}
    told = ReplayBuffer.estimate(schema, 64, storage=Zarr("lz4", 5), spare_rows=6)
    buf = ReplayBuffer(64, path=tmp_path / "buf", schema=schema, storage=Zarr("lz4", 5), spare_rows=6)
    rng = np.random.default_rng(0)
    for _ in range(8):
        noise = rng.integers(0, 256, (20, 100), np.uint8)
        buf.write_episode({"noise": noise, "action": rng.random((20, 2), np.float32)})
    for name in buf.engine.owned.manifest.files:
        chunks = sum(p.stat().st_size for p in (buf.path / name).glob("c.*"))
        assert (0.9 if "noise" in name else 0.5) * told[name] <= chunks <= told[name]
    assert told["total"] == sum(size for name, size in told.items() if name != "total")
    buf.close()


# -- a chunk that is lost, in a buffer that goes on being written ------------------------------------------


def hurt(buf, name, chunk, how):
    path = buf.path / "columns" / name / chunk
    assert path.is_file()
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, 5)


@pytest.mark.parametrize("how", ["missing", "cut"])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_lost_chunk_of_live_rows_is_never_replaced_by_zeros(disk_buffer, how, reopened):
    """The write is refused, by the file's name, until a repair has dropped what was in it."""
    storage = Zarr("lz4", 8)
    buf = disk_buffer(40, seed=0, spare_rows=9, storage=storage)
    for number in range(3):
        buf.write_episode(episode(number, 6))
    if reopened:  # else the newest chunk is still in memory
        buf.close()
        buf = disk_buffer(40, seed=0, spare_rows=9, storage=storage)
    hurt(buf, "002-obs-x.zarr", "c.2.0", how)  # steps 4 and 5 of the newest episode, rows yet to come
    if not reopened:  # it was written whole once more
        buf.write_episode(episode(3, 6))
        assert held(buf) == dict.fromkeys(range(4), 6)
        assert buf.check() == []
        return
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"002-obs-x\.zarr.c\.2\.0: .*holds rows of stored episodes"):
            buf.write_episode(episode(3, 6))
        assert list(buf.lengths) == [6, 6, 6]
    with pytest.raises(CorruptError, match=r"c\.2\.0"):
        buf.sample(64)
    (found,) = buf.check()
    assert found.file == "columns/002-obs-x.zarr"
    assert "rows of record 3 (positions 12 to 18) are damaged: c.2.0 " in found.what
    buf.close()
    assert any(action.seq == 3 for action in ringmap.repair(buf.path, dry_run=False))
    assert ringmap.check(buf.path) == []
    buf = disk_buffer(40, seed=0, spare_rows=9, storage=storage)
    for number in range(3, 14):  # once round the ring
        buf.write_episode(episode(number, 6))
        assert list(held(buf))[-1] == number
    assert list(held(buf)) == list(range(8, 14))
    assert buf.check() == []


def test_a_lost_chunk_ahead_of_the_ring_is_refused_too(disk_buffer):
    """The end of a write may share a chunk with the oldest episode."""
    buf = disk_buffer(24, seed=0, spare_rows=4, storage=Zarr("lz4", 8))
    for number in range(6):
        buf.write_episode(episode(number, 4))
    hurt(buf, "000-episode.zarr", "c.0", "cut")
    buf.write_episode(episode(6, 4))  # rows 24 to 27, the last ones: another chunk
    with pytest.raises(CorruptError, match=r"c\.0: .*holds rows of stored episodes"):
        buf.write_episode(episode(7, 4))  # rows 0 to 3; 4 to 7 are live


def test_what_a_killed_writer_left_is_no_finding(disk_buffer):
    buf = disk_buffer(20, spare_rows=5, storage="zarr")
    buf.write_episode(episode(0, 4))
    (buf.path / "columns/000-episode.zarr/next.tmp").write_bytes(b"half a chunk")
    assert buf.check() == []
    buf.close()
    buf = disk_buffer(20, spare_rows=5, storage="zarr")
    buf.write_episode(episode(1, 4))
    assert not (buf.path / "columns/000-episode.zarr/next.tmp").exists()
    assert held(buf) == {0: 4, 1: 4}


def test_no_descriptor_is_left_open(disk_buffer, storage):
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    buf = disk_buffer(20, 2, seed=0, spare_rows=5, storage=storage)

    def work(first):
        for number in range(first, first + 8):
            buf.write_episode(episode(number, 4))
            buf.sample(4)
            buf.flush()
        buf.engine.owned.rows.by_name["action"].want(np.arange(8))
        assert buf.check() == []

    work(0)
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    work(8)
    assert len(os.listdir("/proc/self/fd")) == before


def test_zarr_json_says_whose_it_is(disk_buffer):
    buf = disk_buffer(20, storage="zarr")
    buf.write_episode(episode(0, 4))
    with open(buf.path / "columns/003-action.zarr/zarr.json") as file:
        told = json.load(file)["attributes"]["ringmap"]
    assert told == buf.engine.owned.manifest.label(3)
