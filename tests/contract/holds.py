"""Which values each target holds, from what its library documents: written down before the code, with no call of ours.

A value comes back exactly (dtype, shape, bytes, payloads of NaN), or the call refuses and says which column, what it
met and what to do.
"""

import numpy as np

STEPS = 5
_R = np.random.default_rng(0)


def _nans(dtype, bits):
    return np.array(bits, f"u{np.dtype(dtype).itemsize}").view(dtype)


VALUES = {
    "uint8 HWC": _R.integers(0, 256, (STEPS, 32, 34, 3), np.uint8),
    "uint8 CHW": _R.integers(0, 256, (STEPS, 3, 32, 34), np.uint8),
    "grey": _R.integers(0, 256, (STEPS, 32, 34, 1), np.uint8),
    "grey without channels": _R.integers(0, 256, (STEPS, 32, 34), np.uint8),
    "RGBA": _R.integers(0, 256, (STEPS, 32, 34, 4), np.uint8),
    "uint16 grey": _R.integers(0, 65536, (STEPS, 32, 34, 1), np.uint16),
    "uint16 without channels": _R.integers(0, 65536, (STEPS, 32, 34), np.uint16),
    "uint16 HWC": _R.integers(0, 65536, (STEPS, 32, 34, 3), np.uint16),
    "float32 depth": _R.random((STEPS, 32, 34), np.float32) * 9,
    "text": np.array(["", "a", "naïve \U0001f642", "a much longer one", "\ufdd0"]),
    "texts": np.array([["a", ""]] * STEPS),
    "0-d": np.arange(STEPS, dtype=np.int16),
    "one in a box": np.arange(STEPS, dtype=np.float32)[:, None],
    "empty": np.zeros((STEPS, 0, 2), np.float32),
    "bool": np.array([1, 0, 0, 1, 1], bool),
    "float16": np.array([1, 6.1e-5, -np.inf, 65504, 6e-8], np.float16),
    "int64 beyond 2^53": np.array([2**53 + 1, -(2**63), 2**63 - 1, 0, -(2**53) - 1]),
    "uint64": np.array([2**53 + 1, 2**64 - 1, 0, 1, 2**63], np.uint64),
    "NaN": _nans("f4", [0x7FC00001, 0xFFC12345, 0x7FC00000, 0x3F800000, 0x80000000]),
    "NaN of 8 bytes": _nans("f8", [0x7FF8000000000001, 0xFFF8DEADBEEF0000, 0, 1, 1 << 63]),
    "inf": np.array([np.inf, -np.inf, -0.0, 5e-324, 1.7e308]),
    "date": np.array(["2024-02-29T12:00:00.000001", "NaT", "1677-10-01", "1970", "2100"], "M8[ns]"),
    "day": np.array(["2024-02-29", "NaT", "0001-10-01", "1970-01-01", "9999-12-31"], "M8[D]"),
    "duration": np.array([1, -(2**62), 0, 5, 7], "m8[us]"),
    "nested": _R.random((STEPS, 2)),
    "complex": np.array([1 + 2j, complex(np.nan, 1), -0.0, 1e308j, 0]),
    "bytes": np.array([b"", b"\xff\0\xfe", b"abc", b"x", b"y"], "S5"),
    "big-endian": np.array([1.5, 2, 3, 4, np.nan], ">f4"),
}
"""Rows of an episode. Bytes are kept little-endian; dtype and values are the same."""

MASKED = np.ma.masked_array(np.arange(STEPS, dtype=np.float64), [0, 0, 1, 0, 0])
"""No target holds it: one does not know what stands below a mask."""

ALL = frozenset(VALUES)
DATES = {"date", "day", "duration"}
PICTURES = {"uint8 HWC", "grey"}
"""What a codec of pictures takes. The lossy ones are asked for by the name of the format, or by an option."""

REFUSES = {
    "ram": set(),
    "memmap": set(),
    "zarr storage": set(),
    "hdf5": set(),
    "zarr": set(),
    "lance": set(),
    "parquet": set(),
    "folder png": set(),
    "folder": set(),
    "video lossless": set(),
    "video": set(),
    # features of `datasets`: numbers, flags, one text; arrays of 1 to 5 axes, none of them empty
    "lerobot": {"texts", "empty", "complex", "bytes", *DATES},
    "lerobot videos": {"texts", "empty", "complex", "bytes", *DATES},
    # infos are what HDF5 holds, flags and numbers complex or not, bytes, texts; HDF5 has no dates
    "minari": {*DATES},
    "robomimic": {*DATES},
}
"""target -> the values that it can't hold."""

LOSSY = {"folder": PICTURES, "video": PICTURES, "lerobot videos": PICTURES}
"""target -> the values that its documented codec changes; dtype and shape stay."""

DATA = {
    "int": 7,
    "large int": 2**70,
    "float": -0.1,
    "flag": True,
    "text": "ünï",
    "text with NUL": "a\0b",
    "bytes": b"\0\xff",
    "array": np.arange(6, dtype=np.float16).reshape(2, 3),
    "0-d array": np.array(5, np.int16),
    "scalar": np.float32(0.1),
    "large array": np.zeros(20_000),
    "date": np.datetime64("2024-02-29", "ns"),
    "complex": np.complex64(1 + 2j),
    "complex number": 1 - 2j,
    "texts": np.array(["a", "ü"]),
    "NaN": _nans("f4", [0x7FC00001]),
}
"""Data of an episode."""

REFUSES_DATA = {
    **{name: set() for name in REFUSES},
    "lerobot": set(DATA),
    "lerobot videos": set(DATA),
    # attributes of HDF5: no dates, at most 64 kB, no integer of more than 64 bits, text without NUL
    "minari": {"large int", "text with NUL", "bytes", "large array", "date"},
    "robomimic": {"large int", "text with NUL", "bytes", "large array", "date"},
}
"""target -> the data that it can't hold. bytes: an attribute is text, or an array."""

REFUSED_WAYS = {"add": {"text", "texts", "bytes", "nested", *DATES}}
"""way in -> the values that it does not take: further columns of transitions are of numbers and flags, and without
parts."""
