"""Power cuts of real file systems on a volume that loses, tears and reorders what was not flushed."""

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.faults.filesystems.blocks.campaign import PLANTED
from tests.faults.filesystems.blocks.mounted import MAKE, missing
from tests.faults.filesystems.blocks.volume import BLOCK, SECTOR, Volume


@pytest.fixture
def volume(tmp_path):
    """A volume of 16 blocks of zeros."""
    image = tmp_path / "image"
    image.write_bytes(bytes(16 * BLOCK))
    return Volume(image, bytearray(8), whole=[3])


def sectors(volume, block):
    """Return the first byte of each sector of a block."""
    return [volume.read(block * BLOCK + at, 1)[0] for at in range(0, BLOCK, SECTOR)]


def cuts(volume, block, at, tries=300):
    """Return what cuts behind `at` entries of the log leave of a block."""
    found = set()
    for seed in range(tries):
        volume.cut(at, seed)
        found.add(tuple(sectors(volume, block)))
        volume.back()
    return found


OLD, NEW = (0,) * 8, (7,) * 8


def test_what_was_flushed_is_there(volume):
    volume.write(0, b"\7" * BLOCK)
    volume.flush()
    volume.write(BLOCK, b"\7" * BLOCK)
    assert cuts(volume, 0, 3) == {NEW}
    assert cuts(volume, 0, 1) >= {NEW, OLD}


def test_what_was_not_is_lost_kept_or_torn(volume):
    volume.write(5 * BLOCK, b"\7" * BLOCK)
    found = cuts(volume, 5, 1, 3000)
    assert {OLD, NEW, (7, *OLD[1:]), (*OLD[1:], 7)} <= found
    assert len(found) > 20


def test_a_superblock_is_never_torn(volume):
    volume.write(3 * BLOCK, b"\7" * BLOCK)
    assert cuts(volume, 3, 1) == {OLD, NEW}


def test_a_later_write_may_be_there_without_an_earlier_one(volume):
    volume.write(0, b"\7" * SECTOR)
    volume.write(BLOCK, b"\7" * SECTOR)
    found = set()
    for seed in range(100):
        volume.cut(2, seed)
        found.add((volume.read(0, 1)[0], volume.read(BLOCK, 1)[0]))
        volume.back()
    assert found == {(0, 0), (0, 7), (7, 0), (7, 7)}


def test_a_cut_disk_is_cut_again(volume):
    volume.write(0, b"\7" * BLOCK)
    volume.flush()
    volume.cut(2, 0)
    volume.write(BLOCK, b"\7" * BLOCK)
    volume.flush()
    assert cuts(volume, 0, 2) == {NEW}
    assert cuts(volume, 1, 2) == {NEW}
    volume.back()
    assert cuts(volume, 1, 2) == {OLD}


def run(kind, folder, *words):
    if why := missing(kind):
        pytest.skip(why)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.filesystems.blocks.campaign", kind, *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", MAKE)
def test_campaign(tmp_path, kind):
    found = run(kind, tmp_path, "--minutes", os.environ.get("MINUTES", "4"), "--seed", "1")
    print(f"\n{found}")
    assert found["violation"] is None
    assert found["lossy"] > 10


@pytest.mark.campaign
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("kind", MAKE)
def test_control(tmp_path, kind, planted):
    found = run(kind, tmp_path, "--lives", "12", "--seed", "1", "--planted", planted)
    assert found["violation"] is not None, found
    print(f"\n{kind}, {planted}: caught after {found['cuts']} cuts: {found['violation'][:300]}")
