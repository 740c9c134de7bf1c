"""All formats that write, and names of their datasets; what takes long in the suites of formats, made shorter; the
clock of a file system."""

import os

import pytest

OURS = ["hdf5", "zarr", "folder", "video", "lance", "parquet"]
OTHERS = ["lerobot", "robomimic", "minari"]
NAMES = {"minari": "a-v0", "robomimic": "a.hdf5", "hdf5": "a.h5", "lance": "a.lance"}
"""What a dataset of a format is called, where its name says the format."""


class OtherOptions:
    """Starts workers from a fork server: to spawn one takes seconds, as Lance and a plain dataset do.

    What reaches the worker is pickled in both ways.
    """

    @pytest.mark.parametrize("start", ["fork", "forkserver"])
    def test_data_loader(self, tmp_path, start):
        super().test_data_loader(tmp_path, start)


def later_than(folder):
    """Return when a file that is written now has a later time than all that are there."""
    newest = max(os.stat(os.path.join(at, n)).st_ctime_ns for at, _, names in os.walk(folder) for n in names)
    probe = folder / ".probe"
    while True:
        probe.write_text("")
        if os.stat(probe).st_ctime_ns > newest:
            probe.unlink()
            return
