"""The manifest: what goes in comes out; what was edited, damaged, newer or foreign is refused by name."""

import json
import re
import uuid
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap.errors import (
    CorruptError,
    NewerVersionError,
    UnknownFormatError,
    UnreleasedVersionError,
)
from ringmap.storage.columns.backends import Choice
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk import checksums
from ringmap.storage.records import manifest as module
from ringmap.storage.records.manifest import VERSION, Kind, Manifest, column_file, lineage_of

PATH = "/somewhere/manifest.json"
SCHEMA = Schema.parse({"obs/é": ((3, 2), "f4"), "..": ((), "U5"), "t": ((), "M8[ns]")})


def make(schema=SCHEMA, **change):
    made = Manifest(
        uuid.UUID(int=5).bytes,
        100,
        50,
        settings={"history_len": 4, "durability": "power"},
        table={"count": 3, "first": 2, "tail": 10, "head": 20, "seq": 4},
    )
    if schema is not None:
        made = made.with_columns(schema, [Choice("memmap", {})] * len(schema.columns), locked=True)
    return replace(made, **change)


@pytest.mark.parametrize("schema", [None, SCHEMA], ids=["without columns", "with columns"])
def test_what_went_in_comes_out(schema):
    made = make(schema, carried={"seq": 4, "state": {"sampling": {"step": 7}}})
    assert Manifest.decode(made.encode(), PATH) == made
    assert make(schema).without_columns().schema is None


@given(
    names=st.lists(st.text(max_size=300), min_size=1, max_size=5, unique=True),
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    dtype=st.sampled_from(["f4", "?", "i8", "U3", "S1", "M8[ms]", "c16"]),
)
def test_every_name_shape_and_dtype(names, shape, dtype):
    made = make(Schema.parse(dict.fromkeys(names, (shape, dtype))))
    assert Manifest.decode(made.encode(), PATH).schema == made.schema


def compressed():
    """Return a manifest whose first column is a Zarr array."""
    options = {"codecs": "zstd", "chunk_steps": 8}
    return make(None).with_columns(SCHEMA, [Choice("zarr", options), *2 * [Choice("memmap", {})]], locked=True)


def test_options_of_a_column_come_out_and_are_in_its_label():
    made = compressed()
    assert Manifest.decode(made.encode(), PATH) == made
    assert made.files[0] == "columns/000-obs-e.zarr"
    assert made.label(0)["chunk_steps"] == 8
    assert made.label(0)["codecs"] == "zstd"
    assert "codecs" not in made.label(1)
    assert "codecs" not in json.loads(made.encode())["columns"][1]


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_steps": 0},
        {"chunk_steps": -8},
        {"chunk_steps": "8"},
        {"chunk_steps": 1 << 40},
        {"chunk_steps": 8.0},
        {"codecs": 3},
        {"codecs": "gzip"},
        {"codecs": ["zstd"]},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(change):
    with pytest.raises(CorruptError, match=f"^{PATH}: the manifest does not make sense"):
        Manifest.decode(signed(compressed(), columns=changed(compressed(), change)), PATH)


def test_it_is_readable_json_that_says_what_it_is():
    text = make().encode().decode("ascii")
    body = json.loads(text)
    assert text.endswith("}\n")
    assert text.count("\n") > 20, "for people: one item per line"
    assert (body["format"], body["version"], body["byte_order"]) == ("ringmap", 3, "little")
    assert (body["max_steps"], body["spare"], body["rows"]) == (100, 50, 150)
    assert body["columns"][0] == {
        "name": "obs/é",
        "file": "columns/000-obs-e.npy",
        "backend": "memmap",
        "dtype": "<f4",
        "shape": [3, 2],
    }
    assert "NumPy" in body["about"]


def edited(**change):
    body = json.loads(make().encode())
    body.update(change)
    return json.dumps(body).encode()


def signed(made=None, **change):
    """A manifest whose checksum was made to hold: forged, or written by another version."""
    body = json.loads((made or make()).encode())
    body.update(change)
    body.pop("checksum")
    return json.dumps({**body, "checksum": module.json_checksum(body)}).encode()


def test_formatting_does_not_count():
    assert Manifest.decode(edited(), PATH) == make(), "the checksum is over what it says"


@pytest.mark.parametrize(
    "change",
    [
        {"max_steps": 101},
        {"settings": {}},
        {"uuid": str(uuid.UUID(int=6))},
        {"more": 1},
        {"columns": None},
        {"about": ""},
        {"checksum": "0" * 16},
        {"checksum": None},
    ],
    ids=str,
)
def test_edited_by_hand_is_refused(change):
    with pytest.raises(CorruptError, match=f"^{PATH}: the manifest was edited or damaged.*ringmap.repair"):
        Manifest.decode(edited(**change), PATH)


@pytest.mark.parametrize("version", [VERSION + 1, 10**9, "2", None, 1.5])
def test_a_newer_version_is_refused_first(version):
    for data in (signed(version=version),):
        with pytest.raises(NewerVersionError, match=f"^{PATH}: format version .*upgrade ringmap"):
            Manifest.decode(data, PATH)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": "ringmap"', b"\0" * 500])
def test_no_json_is_refused(data):
    with pytest.raises(CorruptError, match=f"^{PATH}: the manifest is not valid JSON"):
        Manifest.decode(data, PATH)


@pytest.mark.parametrize("data", [b"{}", b"[]", b"3", b'"ringmap"', b'{"format": "zarr"}', b'{"manifest_version": 3}'])
def test_something_else_is_refused(data):
    with pytest.raises(UnknownFormatError, match=f"^{PATH}: not a ringmap buffer"):
        Manifest.decode(data, PATH)


def changed(made, change):
    first, *rest = json.loads(made.encode())["columns"]
    return [{**first, **change}, *rest]


def column(**change):
    return {"columns": changed(make(), change)}


@pytest.mark.parametrize(
    "change",
    [
        {"max_steps": 0},
        {"max_steps": -1},
        {"max_steps": "100"},
        {"max_steps": 1.0},
        {"max_steps": True},
        {"spare": -1},
        {"table_slots": 0},
        {"uuid": "?"},
        {"table": 3},
        {"settings": None},
        {"columns": 3},
        {"columns": [3]},
        column(file="../../etc/passwd"),
        column(file="/etc/passwd"),
        column(file="columns/../manifest.json"),
        column(file="columns/000-a/b.npy"),
        column(file="columns/000-é.npy"),
        column(name=3),
        column(name=".."),
        column(dtype="|O"),
        column(dtype=">f4"),
        column(dtype="<f16"),
        column(dtype="V8"),
        column(dtype="<f4,<f4"),
        column(file="columns/000-a.zarr"),
        column(backend="zarr"),
        column(dtype=3),
        column(shape=3),
        column(shape=["a"]),
        {"kind": 3},
        {"capacity": 0},
        {"capacity": 101},
        {"capacity": 90, "older": 11},
        {"older": None},
        {"stack": 4},
        {"stack": [4]},
        {"stack": [0, "zero"]},
        {"lineage": "ab"},
        {"lineage": None},
        {"fps": 30},
        {"fps": "30"},
        {"fps": "0/1"},
        {"fps": "1/0"},
        {"fps": "9" * 400 + "/1"},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_even_with_a_checksum(change):
    with pytest.raises(CorruptError, match=f"^{PATH}: "):
        Manifest.decode(signed(**change), PATH)


def test_a_backend_of_a_newer_version_is_named():
    words = r"column 'obs/é' has backend 'future', this ringmap has \['memmap', 'zarr'\]; upgrade ringmap"
    with pytest.raises(NewerVersionError, match=f"^{PATH}: {words}"):
        Manifest.decode(signed(**column(backend="future")), PATH)


def test_every_flipped_byte_is_refused_or_says_the_same():
    data, made = make().encode(), make()
    for at in range(len(data)):
        for bit in (1, 32):
            flipped = bytearray(data)
            flipped[at] ^= bit
            try:
                found = Manifest.decode(bytes(flipped), PATH)
            except (
                CorruptError,
                NewerVersionError,
                UnreleasedVersionError,
                UnknownFormatError,
            ) as error:
                refused = str(error).startswith(PATH)
            else:
                refused = found == made
            assert refused, (at, bit)


@given(
    name=st.text(max_size=300),
    index=st.integers(0, 99_999),
    backend=st.sampled_from(["memmap", "zarr"]),
)
def test_a_column_file_lies_inside_whatever_its_name(name, index, backend):
    file = column_file(index, name, backend)
    assert re.fullmatch(r"columns/[0-9]{3,5}-[a-z0-9-]{0,40}\.(npy|zarr)", file)
    assert file.endswith("zarr") == (backend == "zarr")
    assert int(file.partition("/")[2].partition("-")[0]) == index


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("pixels", "columns/007-pixels.npy"),
        ("obs/Pixels é", "columns/007-obs-pixels-e.npy"),
        ("..", "columns/007-.npy"),
        ("漢字", "columns/007-.npy"),
        ("a" * 300, "columns/007-" + "a" * 40 + ".npy"),
        ("CON\0\n", "columns/007-con.npy"),
        ("\ud800x", "columns/007-x.npy"),
    ],
)
def test_column_files(name, file):
    assert column_file(7, name, "memmap") == file


def test_labels_differ_by_column_and_buffer():
    made = make()
    other = replace(made, uuid=uuid.UUID(int=6).bytes)
    labels = [json.dumps(m.label(i)) for m in (made, other) for i in range(3)]
    assert len(set(labels)) == 6


def test_control_a_checksum_that_forgets_a_part_is_caught(monkeypatch):
    whole = checksums.json_checksum
    monkeypatch.setattr(
        checksums,
        "json_checksum",
        lambda body: whole({k: v for k, v in body.items() if k != "settings"}),
    )
    forged = make().encode()
    assert Manifest.decode(forged, PATH) == make()
    body = json.loads(forged)
    body["settings"] = {}
    assert Manifest.decode(json.dumps(body).encode(), PATH).settings == {}, "an edit goes unnoticed"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"version": 1}, "format version 1"),
        ({"version": 2, "features": ["chains"]}, "format version 2"),
        ({"layout": "0" * 16}, "another layout of format version 3"),
    ],
)
def test_what_was_never_released_is_refused_by_name(change, what):
    with pytest.raises(UnreleasedVersionError, match=f"^{PATH}: {what} was made by an unreleased"):
        Manifest.decode(signed(**change), PATH)


def test_what_a_ring_is_born_with_stands_in_each_label_too():
    born = Kind("transitions", capacity=80, older=12, stack=(4, "zero"))
    made = make(born=born, lineage=bytes(range(16)))
    assert Manifest.decode(made.encode(), PATH) == made
    assert (made.kind, made.capacity, made.older, made.stack) == (
        "transitions",
        80,
        12,
        (4, "zero"),
    )
    said = {"kind": "transitions", "capacity": 80, "older": 12, "stack": [4, "zero"]}
    assert {**said, "lineage": bytes(range(16)).hex()}.items() <= made.label(2).items()
    assert said.items() <= json.loads(made.encode()).items()
    assert (make().kind, make().capacity) == ("episodes", 100)


@pytest.mark.parametrize("rate", [30, 29.97, 30000 / 1001, 1 / 3, 1e-5, 5e-324, 1.7e308, None])
def test_the_rate_is_a_ratio_that_is_exactly_the_number(rate):
    made = make(settings={"fps": rate, "reward_at": "next"})
    body = json.loads(made.encode())
    assert body["reward_at"] == "next"
    assert body["settings"] == {}
    found = Manifest.decode(made.encode(), PATH)
    assert found.settings.get("fps") == (None if rate is None else Fraction(str(rate)))
    assert (found.fps, found.reward_at) == (body["fps"], "next")
    if rate == 29.97:
        assert body["fps"] == "2997/100"


def test_a_repeated_run_has_the_same_lineage():
    assert lineage_of(7, "run") == lineage_of(7, "run")
    assert (
        len(
            {
                lineage_of(7, "run"),
                lineage_of(8, "run"),
                lineage_of(7, "ran"),
                lineage_of(None, "run"),
                lineage_of(None, "run"),
            }
        )
        == 5
    )
    assert len(lineage_of(0, "\udcff")) == 16
