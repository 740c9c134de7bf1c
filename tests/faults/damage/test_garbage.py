"""Numbers and dtypes that only a forger writes, with checksums that hold: refused, not believed."""

import contextlib
import json
import logging
import os
import tracemalloc

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import CorruptError, RingmapError
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.checksums import FINISH, framed, json_checksum
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import holder_of
from ringmap.storage.records import step_file
from ringmap.storage.records.step_file import read_steps, seed_of
from tests.faults.damage.buffers import make, rows_of
from tests.faults.damage.forge import Forger
from tests.faults.damage.fuzz import bytes_in
from tests.tiers import few


def run_of(*payloads):
    """Return the frames of a file of steps."""
    first, *others = payloads
    seed = seed_of(first)
    return framed(first, 0) + b"".join(framed(payload, number, seed) for number, payload in enumerate(others, 1))


def described(*columns):
    return json.dumps({"columns": columns}).encode()


FORGED = {
    "objects": described(["x", [1], "|O"]),
    "objects in a struct": described(["x", [], "|i1,|O"]),
    "long double": described(["x", [], "<f16"]),
    "big-endian": described(["x", [], ">f4"]),
    "an alias": described(["x", [], "|a5"]),
    "no string": described(["x", [], 7]),
    "a dtype that is none": described(["x", [], "<f3"]),
    "a wide string": described(["x", [], "<U999999999"]),
    "a huge shape": described(["x", [1 << 40, 1 << 40], "<f8"]),
    "a shape whose size wraps to 0": described(["x", [1 << 32, 1 << 32], "<f8"]),
    "a negative shape": described(["x", [-1], "<f8"]),
    "a fractional shape": described(["x", [1.5], "<f8"]),
    "no shape": described(["x", None, "<f8"]),
    "too many axes": described(["x", [1] * 70, "<f8"]),
    "a name twice": described(["x", [], "<f8"], ["x", [], "<f8"]),
    "a name that is none": described([3, [], "<f8"]),
    "no columns": b"[]",
    "a mapping": b'{"x": 1}',
    "a number": b"7",
    "not JSON": b"\xff\xfe",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("keep", ["keep", "drop"])
def test_forged_columns_of_a_stream(place, forged, keep, caplog):
    ReplayBuffer(10, path=place / "a").close()
    folder = place / "a/open" / ("0" * 32)
    os.makedirs(folder)
    (folder / "steps.bin").write_bytes(run_of(FORGED[forged], bytes(8), bytes(8)))
    tracemalloc.start()
    (finding,) = ringmap.check(place / "a")
    assert "does not make sense" in finding.what
    with caplog.at_level(logging.WARNING, "ringmap"):
        buf = ReplayBuffer.open(place / "a", "r+", interrupted=keep)
    assert "does not make sense" in caplog.text, "nothing says that it was no group's"
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()
    assert buf.num_episodes == 0
    assert not folder.exists()
    buf.close()


def test_forged_sizes_of_a_stream(place):
    path = str(place / "steps.bin")
    columns = described(["x", [2], "<f4"])

    def read(data, sparse=0):
        (place / "steps.bin").write_bytes(data)
        if sparse:
            os.truncate(path, sparse)
        tracemalloc.start()
        steps = read_steps(Disk(), str(place), 5)
        assert tracemalloc.get_traced_memory()[1] < 40e6
        tracemalloc.stop()
        return steps.count, steps.fault

    whole, six = (run_of(columns, *[bytes(8)] * count) for count in (5, 6))
    assert read(whole) == (5, "")
    assert read(six) == (5, "holds more than max_steps=5 steps")
    assert read(whole[:-1]) == (4, "")
    assert read(whole, sparse=1 << 40)[0] == 5
    assert read(b"", sparse=1 << 40) == (0, "")  # as a kill leaves one that was just made
    assert read(bytes(12) + FINISH) == (0, "frame 0, which names the columns, is damaged")
    assert read(bytes([255] * 4) + whole[4:], sparse=1 << 40)[0] == 0
    assert read(run_of(columns, bytes(9))) == (0, "frame 1 is damaged")
    assert read(run_of(columns, bytes(8), bytes(16))) == (1, "frame 2 is damaged")


def test_control_without_the_check_a_forged_stream_is_not_refused_clearly(place, monkeypatch, caplog):
    def trusting(name, shape, dtype):
        return ColumnSpec(name, tuple(shape), np.dtype(dtype))

    monkeypatch.setattr(step_file, "stored_spec", trusting)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        test_forged_columns_of_a_stream(place, "objects", "keep", caplog)


def test_finish_refuses_a_stream_that_was_damaged_meanwhile(place):
    buf = ReplayBuffer(100, path=place / "a")
    for damage in ("cut", "flip", "gone"):
        episode = buf.begin_episode()
        for t in range(5):
            episode.append({"x": np.arange(4.0) + t})
        (path,) = (place / "a/open").glob("*/steps.bin")
        data = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
        elif damage == "cut":
            os.truncate(path, len(data) - 15)
        else:
            data[-60] ^= 1
            path.write_bytes(data)
        with pytest.raises(CorruptError, match="whole steps, but 5 were appended"):
            episode.finish()
        episode.abandon()
    assert buf.num_episodes == 0
    buf.close()


@pytest.mark.parametrize("seed", few(range(40), 10))
def test_forged_manifest(place, seed):
    """Something in it is gone, or a value that makes no sense: an error of ours, and no memory for what it asks."""
    make("cleared", place / "a")
    whole = bytes_in(place / "a")
    forger = Forger(place / "a", np.random.default_rng(seed))
    for _ in range(4):
        forged = forger.forge_manifest()
        tracemalloc.start()
        for what in (
            lambda: ReplayBuffer.open(place / "a").close(),
            lambda: ringmap.check(place / "a"),
            lambda: ringmap.repair(place / "a"),
            lambda: ReplayBuffer.open(place / "a", "r+").close(),
        ):
            with contextlib.suppress(RingmapError):
                what()
        assert tracemalloc.get_traced_memory()[1] < 1e9, forged
        tracemalloc.stop()
        for name, data in whole.items():
            (place / "a" / name).write_bytes(data)
        forger.body = json.loads(whole["manifest.json"])
    assert ringmap.check(place / "a") == []


def test_a_manifest_that_contradicts_every_column_is_made_again(place):
    truth = make("wrapped", place / "a")
    path = place / "a/manifest.json"
    body = json.loads(path.read_bytes())
    del body["checksum"]
    body["max_steps"] += 7
    path.write_text(json.dumps({**body, "checksum": json_checksum(body)}))
    (finding,) = ringmap.check(place / "a")
    assert str(finding).startswith("manifest.json: the manifest does not make sense")
    ringmap.repair(place / "a", dry_run=False)
    assert ringmap.check(place / "a") == []
    assert ReplayBuffer.open(place / "a").num_episodes == len(truth.episodes)


@pytest.mark.parametrize("data", [b"[" * 4096, b"\xff" * 600, b"7", b"", b'{"pid": [1]}', bytes(10_000)])
def test_garbage_in_the_lock_file(place, data):
    ReplayBuffer(10, path=place / "a").close()
    (place / "a/lock").write_bytes(data)
    assert isinstance(holder_of(str(place / "a/lock")), dict)
    with ReplayBuffer(10, path=place / "a") as buf:
        buf.write_episode(rows_of(0, 3))
        with pytest.raises(RingmapError, match="is being written by"):
            ReplayBuffer(10, path=place / "a")
    buf.close()
    assert ringmap.check(place / "a") == []
