"""Rows of an HDF5 file read from its chunks equal those that HDF5 reads."""

import os

import h5py
import numpy as np
import pytest

from ringmap.errors import CorruptError
from ringmap.formats.hdf5 import Direct
from ringmap.testing.formats import VALUES

PLAIN = [kind for kind, rows in VALUES.items() if rows.dtype.kind in "biufcS" and rows[0].size]


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("step", [1, 2, 7])
def test_equal(tmp_path, kind, step):
    rows = np.concatenate([VALUES[kind]] * 7)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(step, *rows.shape[1:]))
    with h5py.File(tmp_path / "a.h5", "r") as file:
        direct = Direct.of(file["x"], rows.dtype, file.id.get_vfd_handle())
        assert direct is not None
        for starts, length, stride in (([0, 17, 3, 3], 4, 1), ([5], 16, 3), ([0], 21, 1), ([], 4, 1), ([2], 0, 1)):
            got = direct.windows(np.array(starts, np.int64), length, stride)
            assert got.dtype == rows.dtype
            assert got.shape == (len(starts), len(range(0, length, stride)), *rows.shape[1:])
            for start, window in zip(starts, got, strict=True):
                assert window.tobytes() == file["x"][start : start + length : stride].tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "gzip"},
        {"shuffle": True},
        {"fletcher32": True},
        {"chunks": None},
        {"chunks": (4, 1)},
        {"dtype": ">f4"},
        {"dtype": "<f8"},
    ],
    ids=str,
)
def test_left_to_hdf5(tmp_path, options):
    rows = np.arange(40, dtype="<f4").reshape(20, 2)
    options = {"chunks": (4, 2), **options}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape=rows.shape, data=rows, **options)
        assert Direct.of(file["x"], rows.dtype, file.id.get_vfd_handle()) is None


def test_user_block(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file.create_dataset("x", data=np.arange(8), chunks=(4,))
        assert Direct.of(file["x"], np.dtype(int), file.id.get_vfd_handle()) is None


def test_chunks_that_were_never_written(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", shape=(8,), dtype="<i8", chunks=(4,), fillvalue=7)
        made[4:] = 1
    with h5py.File(tmp_path / "a.h5", "r") as file:
        direct = Direct.of(file["x"], np.dtype("<i8"), file.id.get_vfd_handle())
        assert direct.windows(np.array([2]), 4, 1) is None
        assert direct.windows(np.array([4]), 4, 1).tolist() == [[1, 1, 1, 1]]


def test_a_file_that_was_cut(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(100_000), chunks=(100_000,))
    with h5py.File(path, "r", locking=False) as file:
        direct = Direct.of(file["x"], np.dtype(int), file.id.get_vfd_handle())
        os.truncate(path, 10_000)
        with pytest.raises(CorruptError, match="ends at byte"):
            direct.windows(np.array([0]), 100_000, 1)
