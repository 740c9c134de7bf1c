"""Statistics of a LeRobot set against NumPy's: of pictures by channel, of other columns by value; in little memory."""

import tracemalloc

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra lerobot)")

from ringmap.formats.lerobot import writer


def by_numpy(rows, image):
    values = rows.astype(np.float64) / (255 if image else 1)
    axes = (0, 1, 2) if image else 0
    return {key: getattr(np, key)(values, axis=axes) for key in ("min", "max", "mean", "std")}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((7, 5, 4, 3), "u1"), ((1, 2, 2, 1), "u1"), ((9,), "f4"), ((6, 2, 3), "i8"), ((5,), "?"), ((40, 9, 9), "u2")],
)
def test_equal_to_numpy(monkeypatch, shape, dtype):
    monkeypatch.setattr(writer, "_PIECE_NBYTES", 2000)
    image = dtype == "u1"
    rows = (np.random.default_rng(0).random(shape) * (200 if dtype != "?" else 2)).astype(dtype)
    found = writer._stats(rows, image)
    assert found.pop("count") == [len(rows)]
    for key, value in by_numpy(rows, image).items():
        want = value[:, None, None] if image else np.atleast_1d(value)
        assert np.shape(found[key]) == want.shape
        assert np.allclose(found[key], want, rtol=1e-12, atol=1e-15), key


@pytest.mark.parametrize("image", [True, False])
def test_memory(image):
    """A frame or some megabytes at a time, however many there are."""
    rows = np.zeros((40, 240, 320, 3) if image else (80, 240, 320), np.uint8 if image else np.uint16)
    tracemalloc.start()
    writer._stats(rows, image)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (1 << 20 if image else 5 * writer._PIECE_NBYTES), peak
