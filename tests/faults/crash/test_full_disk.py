"""A disk that is really full: a small tmpfs, and a small ext4 on a loop device.

Needs the right to mount in a namespace of its own, and is left out where that is refused.
"""

import json
import shutil
import subprocess
import sys

import pytest

from tests import ROOT
from tests.tiers import few

MOUNTS = {
    "tmpfs": "mount -t tmpfs -o size=4m none {mount}",
    "ext4": "truncate -s 8m {image} && mkfs.ext4 -q -m 0 {image} && mount -o loop {image} {mount}",
}


def in_a_namespace(command):
    unshare = ["unshare", "--mount", "sh", "-ec", command]
    return subprocess.run(unshare, cwd=ROOT, text=True, capture_output=True)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize(
    ("kind", "durability", "storage"),
    few(
        [
            ("tmpfs", "process", "memmap"),
            ("tmpfs", "power", "mixed"),
            ("tmpfs", "process", "zarr"),
            ("ext4", "power", "memmap"),
            ("ext4", "process", "mixed"),
            ("ext4", "power", "zarr"),
        ],
        2,
    ),
)
def test_a_disk_fills_and_has_room_again(tmp_path, kind, durability, storage):
    mount, image = tmp_path / "mount", tmp_path / "image"
    mount.mkdir()
    mounting = MOUNTS[kind].format(mount=mount, image=image)
    tried = in_a_namespace(mounting)
    if tried.returncode:
        pytest.skip(f"can't mount {kind} here: {tried.stderr.strip()}")
    image.unlink(missing_ok=True)
    done = in_a_namespace(
        f"{mounting} && exec {sys.executable} -m tests.faults.crash.full_disk {mount} {durability} {storage}"
    )
    assert done.returncode == 0, done.stderr
    print(f"{kind}, {durability}, {storage}: {done.stdout.strip()}")
    assert json.loads(done.stdout)["stored while full"] > 5
