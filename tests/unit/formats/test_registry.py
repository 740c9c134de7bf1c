import subprocess
import sys

import pytest

from ringmap import data, extras
from ringmap.data import get_format, resolve_format
from ringmap.errors import InputError, MissingExtraError
from ringmap.formats import registry
from ringmap.formats.base import Format, Writer, split_episode_data, validate_write_mode
from ringmap.formats.builtin import BUILT_IN, Parquet
from ringmap.formats.registry import FormatTable


@pytest.fixture
def table(monkeypatch):
    """A fresh registry in place of the real one."""
    fresh = FormatTable(BUILT_IN)
    monkeypatch.setattr(registry, "FORMATS", fresh)
    return fresh


def make(name, detects=lambda path: False):
    return type("Made", (Format,), {"name": name, "detect": classmethod(lambda cls, path: detects(path))})


def test_built_in_formats_are_known_before_they_are_loaded():
    """The face brings in neither NumPy nor torch, and to detect a file no h5py."""
    code = (
        "import sys, ringmap.data; assert not {'numpy', 'torch', 'h5py'} & set(sys.modules);"
        "from ringmap.data import FORMATS, detect_format, list_formats, get_format;"
        "assert 'hdf5' in FORMATS and 'hdf5' in list_formats() and len(FORMATS) >= 1;"
        "assert 'ringmap.formats.hdf5' not in sys.modules;"
        "detect_format('x.h5'); assert not {'h5py', 'torch'} & set(sys.modules);"
        "assert get_format('hdf5').name == 'hdf5' and FORMATS['hdf5'] is get_format('hdf5')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_register(table):
    made = make("mine", lambda path: str(path).endswith(".mine"))
    assert data.register_format(made) is made is data.get_format("mine") is data.detect_format("a.mine")
    assert "mine" in data.list_formats()
    assert data.detect_format("a.h5") is data.get_format("hdf5")
    for name, message in (
        ("", "non-empty"),
        (None, "non-empty"),
        (7, "non-empty"),
        ("mine", "already registered"),
        ("hdf5", "already registered"),
    ):
        with pytest.raises(ValueError, match=message):
            data.register_format(make(name))
    del table["mine"]
    with pytest.raises(ValueError, match=r"unknown format 'mine'.*known: \['hdf5'"):
        data.get_format("mine")
    with pytest.raises(KeyError):
        del table["mine"]
    data.register_format(made)


def test_a_missing_package_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(extras.PACKAGES, "parquet", ("no_such_package",))
    monkeypatch.setattr(registry, "FORMATS", FormatTable(BUILT_IN))
    for error in (ValueError, MissingExtraError, ImportError):
        with pytest.raises(error, match=r'format .parquet. needs no_such_package.*pip install "ringmap\[parquet\]"'):
            data.get_format("parquet")
    with pytest.raises(ValueError, match=r"'parquet' comes with pip install \"ringmap\[parquet\]\""):
        data.get_format("nope")
    assert "parquet" not in data.list_formats()
    (tmp_path / Parquet.marker).touch()
    assert data.detect_format(tmp_path) is None
    with pytest.raises(MissingExtraError):
        registry.refuse_missing(tmp_path)


def test_a_built_in_format_that_fails_is_no_third_partys(table, monkeypatch):
    """Its fault is ours, and is not hidden in a log."""

    def detect(path):
        raise ZeroDivisionError

    monkeypatch.setattr(data.get_format("zarr"), "detect", detect)
    with pytest.raises(ZeroDivisionError):
        data.detect_format("nothing")


def test_a_format_in_the_place_of_a_built_in_one(table):
    """It is the one that recognises paths, too."""
    table["hdf5"] = mine = make("hdf5", lambda path: path == "a.mine")
    assert data.get_format("hdf5") is mine
    assert data.detect_format("a.mine") is mine
    assert data.detect_format("a.h5") is None


def test_entry_points(tmp_path, monkeypatch, caplog):
    """An installed package's formats are found by name; a broken one harms nobody else."""
    (tmp_path / "third_party.py").write_text(
        "from ringmap.data import Format, register_format\n"
        "class Plain(Format):\n"
        "    name = 'plain'\n"
        "    @classmethod\n"
        "    def detect(cls, path): return str(path).endswith('.plain')\n"
    )
    (tmp_path / "third_party_2.py").write_text("raise ImportError('broken on purpose')\n")
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ringmap.formats]\nbroken = third_party_2:Broken\nplain = third_party:Plain\nhdf5 = third_party:Plain\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "FORMATS", FormatTable(BUILT_IN))
    assert "third_party" not in sys.modules
    assert {"hdf5", "plain", "broken"} <= set(data.list_formats())
    assert "third_party" not in sys.modules
    assert data.detect_format("a.plain").name == "plain"
    assert "'broken' can't be used" in caplog.text
    assert data.get_format("plain").__module__ == "third_party"
    assert data.get_format("hdf5") is BUILT_IN["hdf5"]
    with pytest.raises(ImportError, match="on purpose"):
        data.get_format("broken")
    with pytest.raises(ValueError, match="already registered"):
        data.register_format(make("plain"))


def test_a_format_that_only_reads_or_writes():
    for builtin in (InputError, NotImplementedError):
        with pytest.raises(builtin, match=r"'half' does not support reading; .*`ringmap formats`"):
            make("half").open_reader("x")
        with pytest.raises(builtin, match=r"'half' does not support writing \(it is read-only\); .*`ringmap formats`"):
            make("half").open_writer("x")
    with pytest.raises(NotImplementedError, match="detect"):
        Format.detect("x")


def test_modes():
    assert data.WRITE_MODES == ("append", "overwrite", "error")
    assert [validate_write_mode(mode) for mode in data.WRITE_MODES] == list(data.WRITE_MODES)
    with pytest.raises(ValueError, match=r"write mode must be one of .* got 'w'"):
        validate_write_mode("w")


def test_split_episode_data():
    episode = {"a": [1], data.EPISODE_DATA_KEY: {"seed": 1}}
    assert split_episode_data(episode) == ({"a": [1]}, {"seed": 1})
    assert set(episode) == {"a", "_episode_data"}
    assert split_episode_data({"a": [1], "_episode_data": None}) == ({"a": [1]}, {})
    with pytest.raises(ValueError, match="must be a mapping"):
        split_episode_data({"_episode_data": [1]})


def test_writer_protocol():
    class Duck:
        def __enter__(self): ...
        def __exit__(self, *exc): ...
        def write_episode(self, ep_data): ...
        def write_episodes(self, episodes): ...

    assert isinstance(Duck(), Writer)
    assert not isinstance(object(), Writer)


def test_the_face():
    """Every name of `ringmap.data` is there."""
    assert all(getattr(data, name) is not None for name in data.__all__)
    assert set(data.__all__) <= set(dir(data))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = data.nonsense


def test_resolve(tmp_path):
    """As asked, by suffix, by content, or the default; what contradicts is named."""
    for path, given, default, expected in (
        ("a.h5", None, None, "hdf5"),
        ("a.HDF5", None, "lance", "hdf5"),
        ("a.zarr/", None, None, "zarr"),
        ("a", None, "zarr", "zarr"),
        ("a", "folder", "zarr", "folder"),
        ("a.b", "hdf5", None, "hdf5"),
        ("a.folder", None, "zarr", "folder"),
    ):
        assert resolve_format(tmp_path / path, given, default=default).name == expected
    there = tmp_path / "there"
    with get_format("folder").open_writer(there):
        pass
    assert resolve_format(there, default="zarr").name == "folder"
    for mode in ("overwrite", "error"):
        assert resolve_format(there, "zarr", mode=mode).name == "zarr"
    for path, given, message in (
        (there, "zarr", "holds a dataset of format 'folder', to which no 'zarr' can be appended"),
        (tmp_path / "a.h5", "zarr", "suffix of .*a.h5 names format 'hdf5', but the format is to be 'zarr'"),
        (tmp_path / "a", None, "mine: the suffix of .* names no format .* say which: format=NAME, one of"),
        (tmp_path / "a.ringmap", None, "read-only"),
    ):
        with pytest.raises(InputError, match=message):
            resolve_format(path, given, where="mine")
