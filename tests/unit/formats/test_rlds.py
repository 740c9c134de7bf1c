"""RLDS data sets that the writer of TensorFlow Datasets made: every value; and what is wrong with records."""

import json
import logging
import os
import pickle
import struct

import numpy as np
import pytest

from ringmap.data import ReplayBuffer, convert, detect_format, get_format, load_dataset, merge
from ringmap.errors import CorruptError, InputError, MissingExtraError, UnknownFormatError, UnsupportedError
from ringmap.formats.rlds import features_of, values_of
from tests.unit.formats.rlds import LARGE, STEPS, data, episode, fixture, flat

TRAIN = (0, 1, 2)


@pytest.fixture(params=["tfrecord", "array_record"])
def path(request, tmp_path):
    if request.param == "array_record":
        pytest.importorskip("array_record", reason="array_record is not installed (extra rlds)")
    return fixture(request.param, tmp_path / "set")


@pytest.fixture
def frames(tmp_path):
    """The data set with TFRecord files."""
    return fixture("tfrecord", tmp_path / "set")


def opened(path):
    return list(get_format("rlds").open_stream(path))


def differences(found):
    """Return what is not as the writer was given it."""
    wrong = []
    numbers = [data["episode_metadata/number"] for _, data in found]
    if sorted(numbers) != list(range(len(STEPS))):
        wrong.append("episodes")
    for number, (got, told) in zip(numbers, found, strict=True):
        given = flat(episode(number))
        terminal = given.pop("is_terminal")
        given["terminated"], given["truncated"] = terminal, given["is_last"] & ~terminal
        if sorted(got) != sorted(given):
            wrong.append("columns")
        for name, rows in given.items():
            if name.endswith("wrist"):  # JPEG
                if abs(got[name].astype(int) - rows).max() > 6:
                    wrong.append(name)
            elif not np.array_equal(got[name], rows):
                wrong.append(name)
            elif rows.dtype.kind != "U" and got[name].dtype != rows.dtype:
                wrong.append(f"{name}: dtype")
        for name, value in flat(data(number)).items():
            if not np.array_equal(told[name], value):
                wrong.append(name)
        if told["split"] != ("train" if number in TRAIN else "test"):
            wrong.append("split")
    return wrong


def test_every_value_is_the_one_that_was_given(path, caplog):
    with caplog.at_level(logging.WARNING, "ringmap"):
        found = get_format("rlds").open_stream(path)
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: feature 'steps/any' is left out: a Sequence of any length is not read"
    ]
    assert detect_format(path).name == "rlds" and found.reward_at == "same"
    assert found.num_episodes == len(STEPS) and differences(list(found)) == []
    assert next(columns["bits"][0] for columns, data in found if data["episode_metadata/number"] == 0) == LARGE
    assert differences(list(pickle.loads(pickle.dumps(found)))) == []


def test_control_a_changed_value_is_found(path, monkeypatch):
    found, given = opened(path), episode(2)
    given["observation"]["depth_mm"][3, 0, 0] += 1
    monkeypatch.setitem(globals(), "episode", lambda n: given if n == 2 else episode_of(n))
    assert differences(found) == ["observation/depth_mm"]


episode_of = episode


def test_it_is_converted(path, tmp_path):
    convert(path, tmp_path / "copy.h5", progress=False)
    copy = load_dataset(tmp_path / "copy.h5", output="numpy", layout="HWC")
    told = copy.get_episode_data()
    found = [(copy.load_episode(n), {k: v[n] for k, v in told.items()}) for n in range(len(copy.lengths))]
    assert differences(found) == [] and copy.reward_at == "same"
    merge([path, path], tmp_path / "both.zarr", progress=False, drop=["observation/wrist"])
    both = load_dataset(tmp_path / "both.zarr")
    assert both.lengths.tolist() == [*copy.lengths, *copy.lengths] and "observation/wrist" not in both.column_names


def test_it_is_not_read_by_index(path, tmp_path):
    for call in (load_dataset, lambda path: load_dataset(path, format="rlds")):
        with pytest.raises(
            UnsupportedError, match=r"read in order, and not by index; convert it: ringmap.data.convert"
        ):
            call(path)
    with pytest.raises(InputError, match="no table of episodes to choose from"):
        convert(path, tmp_path / "copy.h5", where="length > 2", progress=False)
    assert not (tmp_path / "copy.h5").exists()


def test_it_is_read_only(path, tmp_path):
    for call in (
        lambda: convert(path, tmp_path / "copy", dest_format="rlds", progress=False),
        lambda: ReplayBuffer(10).dump(tmp_path / "copy", format="rlds"),
    ):
        with pytest.raises(InputError, match="'rlds' is read-only; choose another"):
            call()
    with pytest.raises(UnsupportedError, match="read-only"):
        get_format("rlds").open_writer(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_array_record_needs_its_extra(tmp_path, monkeypatch):
    path = fixture("array_record", tmp_path / "set")
    monkeypatch.setitem(__import__("sys").modules, "array_record", None)
    with pytest.raises(MissingExtraError, match=r'pip install "ringmap\[rlds\]"'):
        opened(path)


def first(path):
    """Return the first file of records."""
    return min(path.glob("robot-train*"))


def change(file, at, byte):
    raw = bytearray(file.read_bytes())
    raw[at] ^= byte
    file.write_bytes(raw)


def test_a_flipped_bit_is_found(frames):
    """Bits of the first record, in turn."""
    file = first(frames)
    whole = file.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    for at in [*range(12), *range(12, 12 + size, 97), *range(12 + size, 16 + size)]:
        change(file, at, 1 << at % 8)
        with pytest.raises(CorruptError, match=file.name):
            opened(frames)
        file.write_bytes(whole)
    assert differences(opened(frames)) == []


def test_control_without_checksums_a_flipped_bit_is_a_value(frames, monkeypatch):
    file, (_, told) = first(frames), opened(frames)[0]
    given = episode(told["episode_metadata/number"])["action"]["arm"]
    at = file.read_bytes().index(given.tobytes())
    change(file, at, 1)
    with pytest.raises(CorruptError, match="another checksum"):
        opened(frames)

    class Any:
        __eq__, __ne__ = lambda self, other: True, lambda self, other: False

    monkeypatch.setattr("ringmap.formats.rlds._masked", lambda data: Any())
    assert not np.array_equal(opened(frames)[0][0]["action/arm"], given)


@pytest.mark.parametrize("cut", [1, 4, 5, 200, -3])
def test_a_cut_file_is_found(path, cut):
    file = first(path)
    os.truncate(file, file.stat().st_size - cut if cut > 0 else -cut)
    with pytest.raises(CorruptError, match=file.name):
        opened(path)


def test_a_file_that_is_missing_or_of_another_set_is_found(path):
    file = first(path)
    others = sorted(path.glob("robot-train*"))
    counts = [int(n) for n in json.loads((path / "dataset_info.json").read_text())["splits"][0]["shardLengths"]]
    assert sorted(counts) == [1, 2]
    one, two = (others[counts.index(n)] for n in (1, 2))
    kept = two.read_bytes()
    two.write_bytes(one.read_bytes())
    with pytest.raises(CorruptError, match="has 1 records, expected 2"):
        opened(path)
    two.write_bytes(kept)
    file.unlink()
    with pytest.raises(CorruptError, match=file.name):
        opened(path)


def edit(path, name, change):
    body = json.loads((path / name).read_text())
    change(body)
    (path / name).write_text(json.dumps(body))


def test_what_is_no_such_data_set(frames):
    edit(frames, "dataset_info.json", lambda body: body.update(fileFormat="riegeli"))
    with pytest.raises(UnknownFormatError, match="'riegeli', expected one of"):
        opened(frames)
    edit(frames, "dataset_info.json", lambda body: body.update(fileFormat="tfrecord"))
    edit(frames, "dataset_info.json", lambda body: body["splits"][0].update(filepathTemplate="{SPLIT}"))
    with pytest.raises(UnknownFormatError, match="'{SPLIT}', expected"):
        opened(frames)
    edit(frames, "features.json", lambda body: body["featuresDict"]["features"].pop("steps"))
    assert detect_format(frames) is None
    with pytest.raises(UnknownFormatError, match="is no RLDS data set"):
        opened(frames)


def of_steps(body):
    return body["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]


@pytest.mark.parametrize(
    ("name", "told", "message"),
    [
        ("reward", {"dtype": "int64", "shape": {}, "encoding": "none"}, "is float32, expected int64"),
        ("codes", {"dtype": "int8", "shape": {"dimensions": ["5"]}, "encoding": "none"}, "numbers that int8 can't"),
        ("codes", {"dtype": "uint8", "shape": {"dimensions": ["6"]}, "encoding": "none"}, "expected"),
        ("small", {"dtype": "int16", "shape": {"dimensions": ["3"]}, "encoding": "bytes"}, "expected 6"),
        ("packed", {"dtype": "uint8", "shape": {"dimensions": ["5"]}, "encoding": "zlib"}, "more than 5 bytes"),
        ("packed", {"dtype": "uint8", "shape": {"dimensions": ["7"]}, "encoding": "zlib"}, "expected 7"),
        ("small", {"dtype": "int16", "shape": {}, "encoding": "zlib"}, "small.*incorrect header"),
        ("small", {"dtype": "int16", "shape": {}, "encoding": "none"}, "is text"),
        ("codes", {"dtype": "uint8", "shape": {"dimensions": ["-7"]}, "encoding": "none"}, "has shape"),
        ("reward", {"dtype": "float32", "shape": {"dimensions": ["1" + "0" * 12]}, "encoding": "none"}, "expected"),
    ],
)
def test_values_that_are_not_as_described(frames, name, told, message):
    edit(frames, "features.json", lambda body: of_steps(body)[name].update(tensor=told))
    with pytest.raises(CorruptError, match=message):
        opened(frames)


@pytest.mark.parametrize(
    ("name", "told", "message"),
    [
        ("image", {"dtype": "uint8", "shape": {"dimensions": ["8", "7", "3"]}}, r"uint8 \(8, 6, 3\), expected"),
        ("depth", {"dtype": "uint16", "shape": {"dimensions": ["4", "5", "1"]}}, r"uint8 \(4, 5, 4\), expected uint16"),
        ("depth_mm", {"dtype": "float32", "shape": {"dimensions": ["4", "5", "1"]}}, r"uint16 \(4, 5, 1\), expected"),
        ("depth", {"dtype": "uint8", "shape": {"dimensions": ["9999", "9999", "1"]}}, "pixels"),
    ],
)
def test_pictures_that_are_not_as_described(frames, name, told, message):
    edit(
        frames,
        "features.json",
        lambda body: of_steps(body)["observation"]["featuresDict"]["features"][name].update(image=told),
    )
    with pytest.raises(CorruptError, match=message):
        opened(frames)


def test_data_of_an_episode_may_be_missing_and_pictures_of_any_size(frames):
    def changed(body):
        metadata = body["featuresDict"]["features"]["episode_metadata"]["featuresDict"]["features"]
        metadata["map"]["image"]["shape"]["dimensions"] = ["-1", "-1", "3"]
        metadata["more"] = metadata["path"]

    edit(frames, "features.json", changed)
    told = opened(frames)[0][1]
    assert told["episode_metadata/map"].shape == (3, 4, 3) and "episode_metadata/more" not in told
    edit(frames, "features.json", lambda body: of_steps(body).update(more=of_steps(body)["reward"]))
    with pytest.raises(CorruptError, match="record 0: 'steps/more' has 0 values"):
        opened(frames)


# -- the wire format ---------------------------------------------------------------------------


def sized(number, body):
    return bytes([number << 3 | 2]) + varint(len(body)) + body


def varint(value):
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def example(**features):
    return sized(1, b"".join(sized(1, sized(1, n.encode()) + sized(2, f)) for n, f in features.items()))


def test_packed_or_each_alone():
    numbers = [0, 1, 127, 128, 300, 2**63 - 1, -1, -(2**63)]
    raws = [varint(n % 2**64) for n in numbers]
    floats = np.array([0.5, -1], "<f4")
    made = example(
        packed=sized(3, sized(1, b"".join(raws))),
        alone=sized(3, b"".join(b"\x08" + raw for raw in raws)),
        both=sized(3, sized(1, raws[4]) + b"\x08" + raws[5]),
        floats=sized(2, sized(1, floats.tobytes())),
        single=sized(2, b"".join(b"\x0d" + f.tobytes() for f in floats)),
        nothing=b"",
        bytes=sized(1, sized(1, b"a") + sized(1, b"")),
        later=b"\x48\x01" + sized(3, sized(1, b"\x05") + b"\x11" + bytes(8)),  # fields of a later version
    )
    places = features_of(made)
    found = {name: values_of(made, place) for name, place in places.items()}
    assert found["packed"].tolist() == found["alone"].tolist() == numbers
    assert found["both"].tolist() == [300, 2**63 - 1]
    assert found["floats"].tolist() == found["single"].tolist() == [0.5, -1]
    assert found["bytes"] == [b"a", b""] and len(found["nothing"]) == 0
    assert found["later"].tolist() == [5]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (sized(1, b"ab")[:-1], "beyond"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "beyond"),
        (b"\x0a" + b"\xff" * 20, "does not end"),
        (b"\x0a\x80", "does not end"),
        (b"\x0b", "wire type 3"),
        (b"\x09\x00", "beyond"),
        (example(a=sized(3, sized(1, b"\x01\x80"))), "does not end with one"),
        (example(a=sized(3, sized(1, b"\x80" * 11 + b"\x01"))), "does not end with one"),
        (example(a=sized(2, sized(1, b"\x01\x80"))), "no multiple of 4"),
        (example(a=sized(2, b"\x0d\x00\x00")), "beyond"),
        (example(a=sized(2, b"") + sized(3, b"")), "several kinds"),
    ],
)
def test_what_is_no_example(raw, message):
    with pytest.raises(ValueError, match=message):
        for place in features_of(raw).values():
            values_of(raw, place)


def test_damaged_records_are_refused_or_read(frames):
    """Whatever bytes a record has, reading it ends in values or in a ValueError: 500 damages."""
    file = first(frames)
    size = struct.unpack("<Q", file.read_bytes()[:8])[0]
    whole = file.read_bytes()[12 : 12 + size]
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        raw = bytearray(whole)
        for at in rng.integers(0, size, rng.integers(1, 9)):
            raw[at] = rng.integers(256)
        raw = bytes(raw[: size if rng.random() < 0.8 else rng.integers(size)])
        try:
            for place in features_of(raw).values():
                values_of(raw, place)
        except ValueError:
            refused += 1
    assert 50 < refused < 500
