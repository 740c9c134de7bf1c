"""What a buffer asks of a file system, on each one that can be mounted here; reflinks for real."""

import json

import pytest

from tests.filesystems.mounts import MOUNTS, REFLINKS, run_on


@pytest.mark.slow
@pytest.mark.parametrize("kind", MOUNTS)
def test_kill_lock_live_reader_and_snapshot(tmp_path, kind):
    found = json.loads(run_on(kind, 320, tmp_path, "tests.filesystems.life"))
    print(f"\n{kind}: {found}")
    if kind in REFLINKS:
        assert found["columns shared"] == 2
        assert found["snapshot_nbytes"] < found["live_nbytes"] / 4
    else:
        assert found["columns shared"] == 0
        assert found["snapshot_nbytes"] >= found["live_nbytes"]


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("kind", [kind for kind in MOUNTS if kind in REFLINKS])
def test_a_disk_fills_and_has_room_again(tmp_path, kind, durability):
    """The same for tmpfs and ext4, which can be smaller: tests/crash/test_full_disk.py."""
    done = run_on(kind, 320, tmp_path, "tests.filesystems.fill", durability)
    print(f"\n{kind}, {durability}: {done.strip()}")


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_reader_of_files_that_a_writer_copied_up_says_so(tmp_path, when):
    said = run_on("tmpfs", 64, tmp_path, "tests.filesystems.copied_up", when)
    assert said.endswith("[0, 1, 2, 3, 4] []\n")
    if when == "early":
        assert "lies on overlayfs" in said and "Open it again" in said
    else:
        assert said.startswith("4 ")
