"""reads="pread": no map is touched, and what would be SIGBUS is an error."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault, InputError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from tests import ROOT
from tests.disks import Through
from tests.unit.buffers.steps import episode, prove, stored

LENGTHS = {number: 30 + number % 5 for number in range(20)}


def fill(buffer):
    for number, length in LENGTHS.items():
        buffer.write_episode(episode(number, length, {"number": number}))


def use(buffer):
    """Read in every way there is."""
    lengths = {number: LENGTHS[number] for number in stored(buffer)}
    prove(buffer.sample(64), lengths, 3)
    with buffer.batches(8) as batches:
        prove(next(batches), lengths, 3)
    assert buffer.get_episode_data()["number"] == list(lengths)
    assert len(buffer.get_col_data("obs/x")) == sum(lengths.values())
    assert buffer.get_row_data([0, 5, 0])["step"].tolist() == [0, 5, 0]
    assert buffer[3]["episode"].shape == (3,)
    assert buffer.check() == []


def maps_of(path):
    """Return which files of the buffer at `path` this process maps."""
    with open("/proc/self/maps") as file:
        return sorted({os.path.basename(line.split()[-1]) for line in file if str(path) in line})


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_no_file_is_mapped(tmp_path, mode):
    path = tmp_path / "buf"
    with ReplayBuffer(100, 3, path=path, reads="pread", spare_rows=40, sync_every_s=0) as buffer:
        assert buffer.reads == "pread"
        fill(buffer)
        use(buffer)
        assert maps_of(path) == []
    buffer.close()
    buffer = ReplayBuffer.open(path, mode=mode, reads="pread")
    use(buffer)
    if mode == "r+":
        buffer.clear()
        fill(buffer)
        use(buffer)
        recorded = buffer.begin_episode()
        recorded.append({name: values[0] for name, values in episode(50, 1).items()})
        recorded.finish()
    assert maps_of(path) == []
    buffer.close()
    control = ReplayBuffer.open(path)
    assert control.reads == "map", "it is not remembered"
    control.sample(4)
    assert len(maps_of(path)) > 1
    control.close()


def workers_reads(_):
    info = torch.utils.data.get_worker_info()
    source = info.dataset.engine.source
    return np.array([source.mapped, len(maps_of(source.folder))])


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_copies_and_workers_read_the_same_way(tmp_path, context):
    buffer = ReplayBuffer(400, 3, path=tmp_path / "buf", reads="pread", sync_every_s=0)
    fill(buffer)
    copied = pickle.loads(pickle.dumps(buffer))
    assert copied.reads == "pread"
    use(copied)
    assert maps_of(tmp_path) == []
    copied.close()
    loader = torch.utils.data.DataLoader(
        buffer,
        batch_size=4,
        num_workers=1,
        multiprocessing_context=context,
        collate_fn=workers_reads,
    )
    found = next(iter(loader))
    assert found.tolist() == [False, 0]
    buffer.close()


def test_a_wrong_way_and_ram(tmp_path):
    for make in (
        lambda: ReplayBuffer(9, reads="mmap"),
        lambda: ReplayBuffer.open(tmp_path, reads=1),
    ):
        with pytest.raises(InputError, match="reads must be 'map' or 'pread'"):
            make()
    assert ReplayBuffer(9, reads="pread").reads == "map", "RAM is its own map"


@pytest.mark.parametrize("portable", [False, True])
def test_the_same_bytes_either_way(tmp_path, portable, rng):
    Buffer = Through(ReplayBuffer, Disk(System(portable=portable)))

    with Buffer(200, path=tmp_path / "buf", sync_every_s=0) as buffer:
        for _ in range(9):
            length = int(rng.integers(20, 40))
            buffer.write_episode(
                {
                    "pixels": rng.integers(0, 256, (length, 9, 7), dtype=np.uint8),
                    "action": rng.normal(size=(length, 2)),
                    "name": np.array(["abc", "de", "f"])[rng.integers(0, 3, length)],
                    "when": rng.integers(0, 10**9, length).astype("M8[s]"),
                    "none": np.empty((length, 0), np.float32),
                }
            )
    buffer.close()
    for history, frameskip in ((1, 1), (4, 1), (3, 5)):
        handles = [
            Buffer.open(tmp_path / "buf", reads=reads, seed=1, history_len=history, frameskip=frameskip)
            for reads in ("map", "pread")
        ]
        one, other = (handle.sample(128) for handle in handles)
        rows, same = (handle.get_row_data(rng.permutation(150)[:80] * 0 + 7) for handle in handles)
        for name in one:
            assert one[name].tobytes() == other[name].tobytes(), name
            assert one[name].dtype == other[name].dtype
            assert rows[name].tobytes() == same[name].tobytes()
        for handle in handles:
            handle.close()


# -- what is SIGBUS through a map ------------------------------------------------------------------

CUT = """
import json, os, sys
import numpy as np
from ringmap import ReplayBuffer

path, name, reads, mode = sys.argv[1:]
buffer = ReplayBuffer.open(path, mode=mode, reads=reads)
buffer.sample(100)
os.truncate(os.path.join(path, name), 4096)
found = {}
for way, call in {
    "sample": lambda: buffer.sample(100),
    "load_episode": lambda: buffer.load_episode(0),
    "get_col_data": lambda: buffer.get_col_data("obs"),
    "clip": lambda: buffer[5],
    "get_episode_data": lambda: buffer.get_episode_data(),
}.items():
    try:
        call()
        found[way] = "returned"
    except Exception as error:
        found[way] = f"{type(error).__name__}: {error}"
print(json.dumps(found), flush=True)
os._exit(0)
"""


def cut_under_a_reader(tmp_path, name, reads, mode="r"):
    with ReplayBuffer(3000, 2, path=tmp_path / "buf", sync_every_s=0) as buffer:
        for number in range(200):
            buffer.write_episode({"obs": np.full((10, 8), number), "_episode_data": {"n": number}})
    buffer.close()
    command = [sys.executable, "-c", CUT, str(tmp_path / "buf"), name, reads, mode]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["columns/000-obs.npy", "episodes.npy"])
def test_control_a_map_of_a_file_that_was_cut(tmp_path, name):
    assert cut_under_a_reader(tmp_path, name, "map").returncode == -signal.SIGBUS


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_column_that_was_cut_is_an_error(tmp_path, mode):
    done = cut_under_a_reader(tmp_path, "columns/000-obs.npy", "pread", mode)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("get_episode_data") == "returned"
    for way, words in found.items():
        assert words.startswith("CorruptError: "), way
        assert "000-obs.npy: column file was cut since it was opened" in words


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_table_that_was_cut_is_an_error(tmp_path, mode):
    done = cut_under_a_reader(tmp_path, "episodes.npy", "pread", mode)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for way in ("load_episode", "get_episode_data"):
        assert "episodes.npy: episode table was cut since it was opened" in found[way], found
    assert found["sample"] == found["get_col_data"] == "returned", "they need no record"


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_bad_sector_is_an_error(tmp_path, monkeypatch, mode):
    with ReplayBuffer(400, 3, path=tmp_path / "buf", sync_every_s=0) as buffer:
        fill(buffer)
    buffer.close()
    buffer = ReplayBuffer.open(tmp_path / "buf", mode=mode, reads="pread")
    whole = System.pread_into

    def bad(self, fd, room, offset):
        if "action" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(self, fd, room, offset)

    with monkeypatch.context() as patched:
        patched.setattr(System, "pread_into", bad)
        for call in (lambda: buffer.sample(8), lambda: buffer.load_episode(1)):
            with pytest.raises(EnvironmentFault, match=r"action\.npy: rows can\'t be read") as raised:
                call()
            assert raised.value.errno == errno.EIO
    use(buffer)
    buffer.close()


def test_a_read_that_returns_less_goes_on(tmp_path, monkeypatch):
    """A signal, or a kernel that reads 2 GiB at most."""
    with ReplayBuffer(400, 3, path=tmp_path / "buf", sync_every_s=0) as buffer:
        fill(buffer)
    buffer.close()
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, rooms, offset: whole(fd, (rooms[0][:11],), offset))
    buffer = ReplayBuffer.open(tmp_path / "buf", reads="pread")
    use(buffer)
    buffer.close()


def test_a_target_that_is_not_contiguous_is_refused(tmp_path):
    with ReplayBuffer(400, 3, path=tmp_path / "buf", reads="pread", sync_every_s=0) as buffer:
        fill(buffer)
        column = buffer.engine.source.rows.by_name["obs/x"]
        with pytest.raises(ValueError, match="contiguous"):
            column.take(np.arange(4), np.zeros((4, 6), np.uint8)[:, ::2])
    buffer.close()
