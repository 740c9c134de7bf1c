"""What a buffer asks of a file system, on each one that can be mounted here; reflinks for real."""

import json

import numpy as np
import pytest

import ringmap
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from ringmap.storage.read import reader as reader_of_files
from tests.faults.filesystems.mounts import MOUNTS, REFLINKS, run_on
from tests.tiers import few


@pytest.mark.slow
@pytest.mark.parametrize("kind", MOUNTS)
def test_kill_lock_live_reader_and_snapshot(tmp_path, kind):
    found = json.loads(run_on(kind, 320, tmp_path, "tests.faults.filesystems.life"))
    print(f"\n{kind}: {found}")
    if kind in REFLINKS:
        assert found["columns shared"] == 2
        assert found["snapshot_nbytes"] < found["live_nbytes"] / 4
    else:
        assert found["columns shared"] == 0
        assert found["snapshot_nbytes"] >= found["live_nbytes"]


FILLED = [
    ("tmpfs", "process", "memmap"),
    ("ext4", "power", "memmap"),
    ("tmpfs", "power", "mixed"),
    ("tmpfs", "process", "zarr"),
    ("ext4", "process", "mixed"),
    ("ext4", "power", "zarr"),
    *[(kind, durability, "memmap") for kind in sorted(REFLINKS) for durability in ("process", "power")],
]


@pytest.mark.parametrize(("kind", "durability", "storage"), few(FILLED, 2))
def test_a_disk_fills_and_has_room_again(tmp_path, kind, durability, storage):
    size, ballast = (320, 100 << 20) if kind in REFLINKS else (8 if kind == "ext4" else 4, 1_500_000)
    done = run_on(kind, size, tmp_path, "tests.faults.filesystems.fill", durability, storage, ballast)
    assert json.loads(done)["stored while full"] > 5


@pytest.mark.parametrize("kind", few([kind for kind in MOUNTS if kind != "overlay"], 1))
def test_a_mount_point_is_repaired_full_read_only_through_a_link_and_beside_a_reader(tmp_path, kind):
    said = run_on(kind, 320 if kind in REFLINKS else 32, tmp_path, "tests.faults.filesystems.repaired")
    assert "read-only" in said
    assert "whole" in said  # the reader went on


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_reader_of_files_that_a_writer_copied_up_says_so(tmp_path, when):
    said = run_on("tmpfs", 64, tmp_path, "tests.faults.filesystems.copied_up", when)
    assert said.endswith("[0, 1, 2, 3, 4] []\n")
    if when == "early":
        assert "lies on overlayfs" in said and "Open it again" in said
    else:
        assert said.startswith("4 ")


def test_a_state_that_a_writer_shows_during_the_comparison_is_no_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(System, "copies_up", lambda self, path: True)
    monkeypatch.setattr(reader_of_files, "HELD_S", 0)
    real = Disk.read_file
    with ringmap.ReplayBuffer(100, path=tmp_path / "ring", seed=0) as writer:
        writer.write_episode({"x": np.zeros(3)})
        with ringmap.ReplayBuffer.open(tmp_path / "ring") as reader:
            written = []

            def read_file(self, path, limit):
                if path.endswith("state.bin"):
                    monkeypatch.setattr(Disk, "read_file", real)
                    writer.write_episode({"x": np.zeros(3)})
                    written.append(path)
                return real(self, path, limit)

            monkeypatch.setattr(Disk, "read_file", read_file)
            reader.refresh()
            assert written
            assert reader.num_episodes == 2
