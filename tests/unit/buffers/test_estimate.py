"""How large a buffer will be: told beforehand, and warned of where it can't be."""

import os
import shutil

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.errors import InputError

SCHEMA = {"pixels": ((8, 8, 3), "u1"), "action": ((2,), "f4")}


def test_the_estimate_is_what_the_files_come_to(tmp_path):
    buf = ReplayBuffer(500, path=tmp_path / "buf", schema=SCHEMA, spare_rows=70)
    found = {
        path.relative_to(buf.path).as_posix(): path.stat().st_size
        for path in buf.path.rglob("*")
        if path.suffix in (".npy", ".bin")
    }
    told = ReplayBuffer.estimate(SCHEMA, 500, spare_rows=70)
    assert told.pop("total") == sum(found.values())
    assert told == found
    episode = {"pixels": np.zeros((3, 8, 8, 3), np.uint8), "action": np.zeros((3, 2), np.float32)}
    assert ReplayBuffer.estimate(episode, 500, {"pixels": "memmap"}, 70)["total"] == sum(found.values())
    buf.close()


def test_what_is_on_the_disk_grows_to_it(tmp_path):
    def on_disk():
        return sum(os.stat(path).st_blocks * 512 for path in (tmp_path / "buf").rglob("*") if path.is_file())

    told = ReplayBuffer.estimate({"x": ((1000,), "u1")}, 2000, spare_rows=100)
    with ReplayBuffer(2000, path=tmp_path / "buf", spare_rows=100) as buf:
        buf.write_episode({"x": np.ones((10, 1000), np.uint8)})
        assert on_disk() < told["total"] * 0.8
        for _ in range(30):
            buf.write_episode({"x": np.ones((100, 1000), np.uint8)})
        buf.flush()
        columns = told["columns/000-x.npy"]
        assert columns <= on_disk() <= told["total"] * 1.1 + 100_000
    buf.close()


def test_more_than_there_is_room_for(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.warns(UserWarning, match=r"takes 3,\d+,\d+ bytes.*only 1,000,000 free.*ENOSPC after about \d+"):
        one = ReplayBuffer(10_000, path=tmp_path / "one", schema=SCHEMA)
    one.close()
    other = ReplayBuffer(10_000, path=tmp_path / "other")
    with pytest.warns(UserWarning, match="lower max_steps"):
        other.write_episode({"pixels": np.zeros((3, 8, 8, 3), np.uint8)})
    other.write_episode({"pixels": np.zeros((3, 8, 8, 3), np.uint8)})
    other.close()
    ReplayBuffer(10_000, schema=SCHEMA).close()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ((SCHEMA, 0), "max_steps"),
        ((SCHEMA, 10, "tape"), "tape"),
        ((3, 10), "schema"),
        ((SCHEMA, 10, "memmap", 0), "spare_rows"),
    ],
)
def test_wrong_arguments(args, word):
    with pytest.raises(InputError, match=word):
        ReplayBuffer.estimate(*args)
