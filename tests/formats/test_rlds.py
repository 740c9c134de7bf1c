"""RLDS data sets that the writer of TensorFlow Datasets made: every value; and what is wrong with records."""

import json
import logging
import os
import pickle
import shutil
import struct

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap.data import ReplayBuffer, convert, detect_format, get_format, load_dataset
from ringmap.errors import (
    CorruptError,
    InputError,
    MissingExtraError,
    ReplacedError,
    RoleError,
    UnknownFormatError,
    UnsupportedError,
)
from ringmap.formats.rlds import records
from ringmap.formats.rlds.example import features_of, values_of
from tests.formats.others import later_than
from tests.formats.rlds import LARGE, STEPS, data, episode, fixture, flat

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


def opened(path, **options):
    return load_dataset(path, output="numpy", layout="HWC", **options)


def differences(found):
    """Return what is not as the writer was given it."""
    wrong = []
    told = found.get_episode_data()
    numbers = told["episode_metadata/number"]
    if sorted(numbers) != list(range(len(STEPS))):
        wrong.append("episodes")
    for at, number in enumerate(numbers):
        got, given = found.load_episode(at), flat(episode(number))
        terminal = given.pop("is_terminal")
        given["terminated"], given["truncated"] = terminal, given["is_last"] & ~terminal
        if sorted(got) != sorted(given):
            wrong.append("columns")
        for name, rows in given.items():
            rows = rows.tolist() if rows.dtype.kind == "U" else rows
            if name.endswith("wrist"):  # JPEG
                if abs(got[name].astype(int) - rows).max() > 6:
                    wrong.append(name)
            elif not np.array_equal(got[name], rows):
                wrong.append(name)
            elif isinstance(rows, np.ndarray) and got[name].dtype != rows.dtype:
                wrong.append(f"{name}: dtype")
        for name, value in flat(data(number)).items():
            if not np.array_equal(told[name][at], value):
                wrong.append(name)
        if told["split"][at] != ("train" if number in TRAIN else "test"):
            wrong.append("split")
    return wrong


def test_every_value_is_the_one_that_was_given(path, caplog):
    with caplog.at_level(logging.WARNING, "ringmap"):
        found = opened(path)
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: feature 'steps/any' is left out: a Sequence of any length is not read"
    ]
    assert detect_format(path).name == "rlds" and found.reward_at == "same"
    assert len(found.lengths) == len(STEPS) and differences(found) == []
    assert found.load_episode(0)["bits"][0] == LARGE
    assert differences(pickle.loads(pickle.dumps(found))) == []


def test_control_a_changed_value_is_found(path, monkeypatch):
    found, given = opened(path), episode(2)
    given["observation"]["depth_mm"][3, 0, 0] += 1
    monkeypatch.setitem(globals(), "episode", lambda n: given if n == 2 else episode_of(n))
    assert differences(found) == ["observation/depth_mm"]


episode_of = episode


@pytest.mark.parametrize("path", ["tfrecord"], indirect=True)
def test_in_workers(path):
    found = load_dataset(path, num_steps=2)
    loader = DataLoader(found, batch_size=3, num_workers=2, multiprocessing_context="fork")
    rows = [row for batch in loader for row in batch["codes"].tolist()]
    assert rows == [found[i]["codes"].tolist() for i in range(len(found))]
    assert len(rows) == sum(max(0, steps - 1) for steps in STEPS)


@pytest.mark.parametrize("path", ["array_record"], indirect=True)
def test_array_record_is_refused_after_a_fork(path):
    """Its package would hang or crash there, now and then."""
    found = load_dataset(path, num_steps=2)
    found[0]
    pid = os.fork()
    if not pid:
        try:
            with pytest.raises(RoleError, match="before this process was forked"):
                load_dataset(path)[0]
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_it_goes_into_a_buffer_and_other_formats(path, tmp_path):
    buf = ReplayBuffer(100)
    found = load_dataset(path)
    keys = ["observation/image", "action/arm", "reward", "terminated"]
    buf.extend_from(load_dataset(path, keys_to_load=keys))
    assert buf.lengths.tolist() == found.lengths.tolist()
    convert(path, tmp_path / "copy.h5", progress=False)
    copy = opened(tmp_path / "copy.h5")
    assert differences(copy) == []


def test_numbers_are_read_without_pictures(path, monkeypatch):
    from ringmap.formats.rlds import features

    found = opened(path)
    monkeypatch.setattr(features, "decode_into", None)
    assert len(found.get_col_data("reward")) == sum(STEPS)
    with pytest.raises(CorruptError, match="NoneType"):
        found.get_col_data("observation/image")


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
        load_dataset(path)


def test_opening_reads_no_picture(frames, monkeypatch):
    """But the first one whose size features.json does not tell."""
    read, real = [], records._Part.__getitem__

    def counted(self, part):
        read.append((self._record, part.start, part.stop))
        return real(self, part)

    monkeypatch.setattr(records._Part, "__getitem__", counted)
    opened(frames)
    seen = {"image": 0, "wrist": 0, "text": 0}
    for record in {record for record, _, _ in read}:
        whole = records.TFRecord.read(record)
        for name, (begin, end) in features_of(whole, len(whole)).items():
            inside = [1 for r, start, stop in read if r == record and start >= begin and stop <= end]
            seen[name.rpartition("/")[2]] = seen.get(name.rpartition("/")[2], 0) + len(inside)
    assert (seen["image"], seen["wrist"], seen["text"]) == (0, 1, len(STEPS))


def first(path):
    """Return the first file of records."""
    return min(path.glob("robot-train*"))


def change(file, at, byte):
    raw = bytearray(file.read_bytes())
    raw[at] ^= byte
    file.write_bytes(raw)


def test_a_flipped_bit_is_found(frames):
    """In the length of a record when it is opened, elsewhere when it is read; each bit of the first record, in turn."""
    file = first(frames)
    whole = file.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    for at in [*range(12), *range(12, 12 + size, 97), *range(12 + size, 16 + size)]:
        change(file, at, 1 << at % 8)
        with pytest.raises(CorruptError, match=file.name):
            found = opened(frames)
            found.load_episode(0)
        file.write_bytes(whole)
    assert differences(opened(frames)) == []


def test_control_without_checksums_a_flipped_bit_is_a_value(frames, monkeypatch):
    file, found = first(frames), opened(frames)
    number = found.get_episode_data()["episode_metadata/number"][0]
    at = file.read_bytes().index(episode(number)["action"]["arm"].tobytes())
    change(file, at, 1)
    with pytest.raises(CorruptError, match="another checksum"):
        opened(frames).load_episode(0)
    monkeypatch.setattr(records, "_masked", lambda data: None)
    real = records.TFRecord.read

    def unchecked(record):
        with open(record.file, "rb") as opened_file:
            opened_file.seek(record.at)
            return opened_file.read(record.size)

    monkeypatch.setattr(records.TFRecord, "read", staticmethod(unchecked))
    assert real is not unchecked
    monkeypatch.setattr(found.source, "_refuse_newer", lambda path: None)  # it would see it
    assert not np.array_equal(found.load_episode(0)["action/arm"], episode(number)["action"]["arm"])


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


def test_it_is_overwritten_while_it_is_open(frames, tmp_path):
    """A record that was not read before is not read from other files."""
    found = opened(frames)
    first = found.load_episode(0)["observation/state"].tolist()
    later_than(frames)
    for file in frames.glob("*.tfrecord*"):
        shutil.copyfile(file, tmp_path / "copy")
        shutil.copyfile(tmp_path / "copy", file)
    with pytest.raises(ReplacedError, match="was written since"):
        found.load_episode(2)
    assert opened(frames).load_episode(0)["observation/state"].tolist() == first


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
        load_dataset(frames, format="rlds")


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
        ("reward", {"dtype": "float32", "shape": {"dimensions": ["1" + "0" * 12]}, "encoding": "none"}, "takes"),
    ],
)
def test_values_that_are_not_as_described(frames, name, told, message):
    edit(frames, "features.json", lambda body: of_steps(body)[name].update(tensor=told))
    with pytest.raises(CorruptError, match=message):
        opened(frames).load_episode(0)


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
        opened(frames).load_episode(0)


def test_data_of_an_episode_may_be_missing_and_pictures_of_any_size(frames):
    def changed(body):
        metadata = body["featuresDict"]["features"]["episode_metadata"]["featuresDict"]["features"]
        metadata["map"]["image"]["shape"]["dimensions"] = ["-1", "-1", "3"]
        metadata["more"] = metadata["path"]

    edit(frames, "features.json", changed)
    found = opened(frames)
    data = found.get_episode_data()
    assert data["episode_metadata/map"][0].shape == (3, 4, 3)
    assert data.get("episode_metadata/more", [None])[0] is None
    edit(frames, "features.json", lambda body: of_steps(body).update(more=of_steps(body)["reward"]))
    with pytest.raises(CorruptError, match="'steps/more' of episode 0.* has 0 values"):
        opened(frames).load_episode(0)


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
    places = features_of(made, len(made))
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
        for place in features_of(raw, len(raw)).values():
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
            for place in features_of(raw, len(raw)).values():
                values_of(raw, place)
        except ValueError:
            refused += 1
    assert 50 < refused < 500
