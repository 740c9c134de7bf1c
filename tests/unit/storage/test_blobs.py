"""Blobs and their segments: what comes back is what was put in; what may go, goes, and nothing else."""

import json
import math
import os

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ringmap.errors import InputError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.records.blobs import (
    Segments,
    decode_blob,
    decode_data,
    encode_blob,
    encode_data,
    segment_name,
    segment_number,
)
from ringmap.storage.records.table import Record
from ringmap.storage.ring.ring import Position

# -- one blob ----------------------------------------------------------------------------------


U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(
    sums=st.lists(U64, max_size=9),
    at=U32,
    check=U64,
    state=st.binary(),
    has_it=st.booleans(),
    data=st.binary(),
    words=st.binary(),
)
def test_a_blob_gives_its_parts_back(sums, at, check, state, has_it, data, words):
    place = at, len(state), check
    blob = encode_blob(sums, place, data, state if has_it else b"", words)
    assert decode_blob(blob) == (sums, place, data, words)


def test_a_blob_whose_parts_do_not_add_up():
    blob = encode_blob([1], (32, 2, 0), b"cd", b"ab")
    for wrong in (blob[:-1], blob + b"x"):
        with pytest.raises(ValueError, match="add up"):
            decode_blob(wrong)


# -- episode data ------------------------------------------------------------------------------

arrays = st.one_of(
    npst.arrays(
        st.one_of(
            npst.integer_dtypes(endianness="?"),
            npst.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
            npst.boolean_dtypes(),
            npst.complex_number_dtypes(endianness="?"),
            npst.datetime64_dtypes(endianness="?"),
        ),
        npst.array_shapes(min_dims=0, max_dims=3, min_side=0),
    ),
    npst.arrays(st.just(np.dtype("U4")), 3, elements=st.text(max_size=4).map(lambda s: s.rstrip("\0"))),
)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=40))


@given(values=st.dictionaries(st.text(), st.one_of(plain, arrays), max_size=5))
def test_episode_data_comes_back_as_it_went_in(values):
    back = decode_data(encode_data(values, "here"))
    assert list(back) == list(values), "in order"
    for name, value in values.items():
        same(back[name], value)


def same(got, value):
    if isinstance(value, np.ndarray | np.generic):
        assert type(got) is type(value)
        assert got.dtype == value.dtype.newbyteorder("<")
        assert got.shape == value.shape
        np.testing.assert_array_equal(got, value)
    else:
        assert type(got) is type(value)
        assert got == value or (math.isnan(got) and math.isnan(value))


@pytest.mark.parametrize(
    "value",
    [
        2**200,
        -(2**63) - 1,
        -0.0,
        5e-324,
        math.inf,
        "",
        "\ud800",
        "é\n\0",
        b"",
        b"\0\xff",
        True,
        np.float32(0.1),
        np.int64(-1),
        np.bool_(True),
        np.str_("ab"),
        np.bytes_(b"ab"),
        np.datetime64("2020-01-01", "s"),
        np.float64(1.5),
        np.zeros((0, 3)),
        np.str_(""),
        np.bytes_(b""),
        np.array("abc"),
        np.array(3.5),
    ],
    ids=repr,
)
def test_odd_values(value):
    back = decode_data(encode_data({"x": value}, "here"))["x"]
    same(back, value)
    if isinstance(value, float):
        assert math.copysign(1, back) == math.copysign(1, value)


def test_lists_and_tensors_come_back_as_arrays():
    back = decode_data(encode_data({"a": [1, 2], "b": torch.ones(2), "c": (1.0, 2.0)}, "here"))
    assert [type(value) for value in back.values()] == [np.ndarray] * 3
    assert back["a"].tolist() == [1, 2]
    assert back["b"].dtype == np.float32


def test_arrays_are_copies_of_one_s_own():
    given = np.arange(3)
    packed = encode_data({"x": given}, "here")
    given[:] = 9
    one = decode_data(packed)["x"]
    one[:] = 7
    assert decode_data(packed)["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {"a": 1},
        [object()],
        {1},
        np.array([0, None], object),
        np.zeros(2, "V4"),
        np.longdouble(1),
    ],
    ids=lambda value: str(value)[:12],
)
def test_values_of_another_type_are_refused_by_name(value):
    with pytest.raises(InputError, match=r"^here: episode data 'bad' .*expected str, bytes, a number"):
        encode_data({"good": 1, "bad": value}, "here")


@pytest.mark.parametrize("value", [[[1], [1, 2]], torch.zeros(2, dtype=torch.bfloat16)], ids=str)
def test_values_that_are_no_array_are_refused_by_name(value):
    with pytest.raises(InputError, match=r"^here: episode data 'bad'.*(ragged|a tensor of a dtype that NumPy has)"):
        encode_data({"bad": value}, "here")


def test_names_are_strings():
    with pytest.raises(InputError, match="names are strings, got 3"):
        encode_data({3: 1}, "here")


def test_nothing_is_nothing():
    assert encode_data({}, "here") == b""
    assert decode_data(b"") == {}


# -- segments ----------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "ram"])
def segments(request, tmp_path):
    disk = Disk() if request.param == "disk" else MemoryDisk()
    folder = str(tmp_path) if request.param == "disk" else "RAM/data"
    segments = Segments(disk, folder, nbytes=100)
    yield segments
    segments.close()


def put(segments, seq, size=40):
    """Append one blob for record `seq`; return how to read it and what it holds."""
    blob = bytes([seq % 256]) * size
    number, offset = segments.append(blob, seq)
    return (number, offset, size, xxhash.xxh3_64_intdigest(blob)), blob


def read(segments, *place):
    """Return the blob at a place: segment, offset, size and checksum."""
    fields = zip(("blob_segment", "blob_offset", "blob_size", "blob_sum"), place, strict=True)
    return segments.blob_of(Record(1, Position(0), Position(0), 1, **dict(fields)))


def numbers(segments):
    """Return the numbers of the segments on the disk."""
    return sorted(map(segment_number, segments._disk.names(segments.folder)))


def test_blobs_come_back(segments):
    written = [put(segments, seq) for seq in range(1, 9)]
    for place, blob in written:
        assert read(segments, *place) == blob
    assert [place[0] for place, _ in written] == [1, 1, 1, 2, 2, 2, 3, 3], "a full one gets a successor"
    assert numbers(segments) == [1, 2, 3]
    assert put(segments, 9, 0)[1] == b""


def test_nothing_is_read_that_the_checksum_does_not_vouch_for(segments):
    (number, offset, size, check), blob = put(segments, 1)
    assert read(segments, number, offset, size, check) == blob
    for wrong in (
        (number, offset, size, check ^ 1),
        (number, offset, size + 1, check),
        (number, offset, size - 1, check),
        (number, offset + 1, size, check),
        (number, offset, 2**60, check),
        (number, 2**60, size, check),
        (number + 1, offset, size, check),
    ):
        assert read(segments, *wrong) is None, wrong
    assert read(segments, number, offset, size, check) == blob


def test_a_number_is_never_used_again(segments):
    for seq in range(1, 9):
        put(segments, seq)
    segments.adopt({3: 8}, beyond=5)
    assert put(segments, 9)[0][0] == 6, "beyond what a record names"
    segments._disk.create(segments.path(9)).close()
    segments.adopt({3: 8, 6: 9}, beyond=5)
    assert put(segments, 10)[0][0] == 10, "beyond what lies on the disk"


def test_what_no_record_names_goes(segments):
    for seq in range(1, 9):
        put(segments, seq)
    segments.adopt({2: 6}, beyond=3)
    assert numbers(segments) == [2]


@pytest.mark.parametrize(
    ("first", "newest", "left"),
    [
        (1, 11, [1, 2, 3, 4]),
        (3, 11, [1, 2, 3, 4]),
        (4, 11, [2, 3, 4]),
        (7, 11, [3, 4]),
        (10, 11, [4]),
        (12, 11, [4]),
        (99, 6, [2, 4]),
    ],
)
def test_a_segment_goes_when_its_last_record_has_gone(segments, first, newest, left):
    """Records 1-3, 4-6, 7-9 and 10-11 lie in segments 1 to 4; the fourth takes the next append."""
    written = [put(segments, seq) for seq in range(1, 12)]
    segments.delete_before(first, newest)
    assert numbers(segments) == left
    for place, blob in written:
        assert read(segments, *place) == (blob if place[0] in left else None)
    assert put(segments, 12)[0][0] == 4


def test_full_segments_are_closed_once_synced(segments):
    for seq in range(1, 6):
        put(segments, seq)
    unsynced = segments.unsynced()
    assert sorted(unsynced) == [1, 2]
    segments.forget_synced(unsynced)
    assert sorted(segments.unsynced()) == [2], "the one that is appended to stays open"
    segments.sync_all([1, 2, 77])


def test_rewriting_changes_nothing(segments):
    place, blob = put(segments, 1)
    segments.rewrite(*place[:3])
    assert read(segments, *place) == blob


@given(number=st.integers(0, 10**15), other=st.text(max_size=20))
def test_names_and_numbers(number, other):
    assert segment_number(segment_name(number)) == number
    for name in (f"{number}.bin", f"{number:012d}.tmp", f"x{number:012d}.bin", f"{number:012d}"):
        assert segment_number(name) in (None, number if len(name) > 15 else None)
    if segment_number(other) is not None:
        assert segment_number(segment_name(segment_number(other))) == segment_number(other)


def test_what_is_not_ours_is_no_segment(tmp_path):
    for name in (
        "000000000001.bin",
        "1.bin",
        "notes.txt",
        "٠٠٠٠٠٠٠٠٠٠٠٢.bin",
        "000000000003.bin.tmp",
    ):
        (tmp_path / name).touch()
    Segments(Disk(), str(tmp_path)).adopt({}, beyond=0)
    assert len(os.listdir(tmp_path)) == 4
    assert "000000000001.bin" not in os.listdir(tmp_path)


def test_data_is_readable_without_us():
    """As the format's document says: four bytes of size, JSON heads, payloads in their order."""
    packed = encode_data({"seed": 7, "goal": np.arange(3, dtype="<f4"), "who": b"me"}, "here")
    size = int.from_bytes(packed[:4], "little")
    heads = json.loads(packed[4 : 4 + size])
    assert [head[:2] for head in heads] == [["seed", "json"], ["goal", "array"], ["who", "bytes"]]
    payload = packed[4 + size :]
    assert np.frombuffer(payload[:12], "<f4").tolist() == [0, 1, 2]
    assert payload[12:] == b"me"


def test_control_segments_that_go_too_early_are_caught(tmp_path):
    class Hasty(Segments):
        def delete_before(self, first, newest):
            super().delete_before(first + 1, newest)

    os.makedirs(tmp_path / "data")
    hasty = Hasty(Disk(), str(tmp_path / "data"), nbytes=100)
    for seq in range(1, 12):
        put(hasty, seq)
    hasty.delete_before(3, 11)
    assert numbers(hasty) != [1, 2, 3, 4]
    hasty.close()
