"""File systems that can be mounted here, each in a namespace of its own."""

import shutil
import subprocess
import sys

import pytest

from tests import ROOT

MOUNTS = {
    "tmpfs": "mount -t tmpfs -o size={size}m none {mount}",
    "ext4": "truncate -s {size}m {image} && mkfs.ext4 -q -m 0 {image} && mount -o loop {image} {mount}",
    "xfs": "truncate -s {size}m {image} && mkfs.xfs -q -m reflink=1 {image} && mount -o loop {image} {mount}",
    "btrfs": "truncate -s {size}m {image} && mkfs.btrfs -q {image} > {image}.log && mount -o loop {image} {mount}",
    "overlay": "mount -t tmpfs -o size={size}m none {image}.d && cd {image}.d && mkdir low up work && "
    "mount -t overlay -o lowerdir=low,upperdir=up,workdir=work none {mount}",
}
NEEDS = {"ext4": "mkfs.ext4", "xfs": "mkfs.xfs", "btrfs": "mkfs.btrfs"}
REFLINKS = {"xfs", "btrfs"}


def run_on(kind, size, folder, module, *arguments):
    """Run `python -m module MOUNT arguments...` in a new file system of `size` MiB; return what it printed."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    if kind in NEEDS and shutil.which(NEEDS[kind]) is None:
        pytest.skip(f"needs {NEEDS[kind]}")
    mount, image = folder / "mount", folder / "image"
    for made in (mount, folder / "image.d"):
        made.mkdir()
    mounting = MOUNTS[kind].format(mount=mount, image=image, size=size)
    tried = in_a_namespace(mounting)
    if tried.returncode:
        pytest.skip(f"can't mount {kind} here: {tried.stderr.strip()}")
    image.unlink(missing_ok=True)
    run = " ".join([sys.executable, "-m", module, str(mount), *map(str, arguments)])
    done = in_a_namespace(f"({mounting}) && cd {ROOT} && exec {run}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_a_namespace(command):
    return subprocess.run(["unshare", "--mount", "sh", "-ec", command], cwd=ROOT, text=True, capture_output=True)
