"""Dump, convert, merge, snapshot: what arrives is what was there."""

import sys

import h5py
import numpy as np
import pytest

from ringmap.data import ConcatDataset, ReplayBuffer, load_dataset
from ringmap.formats.registry import FORMATS, describe_formats
from tests.unit.cli.conftest import fill


def same(one, other):
    assert one.lengths.tolist() == other.lengths.tolist()
    assert one.get_episode_data() == other.get_episode_data()
    for number in range(len(one.lengths)):
        mine, theirs = one.load_episode(number), other.load_episode(number)
        assert set(mine) == set(theirs)
        for name, values in mine.items():
            values = np.asarray(values)
            assert np.array_equal(values, np.asarray(theirs[name]), equal_nan=values.dtype.kind == "f")


COPIES = [
    (4, "x.h5", "hdf5", "dump replay x.h5"),
    (4, "x.zarr", "zarr", "dump replay x.zarr"),
    (4, "x.lance", "lance", "dump replay x.lance"),
    (4, "x.hdf5", "hdf5", "convert replay x.hdf5"),
    (4, "x", "zarr", "convert a.h5 x --format zarr"),
    (4, "x.h5", "hdf5", "merge replay -o x.h5"),
    (8, "x.zarr", "zarr", "merge replay a.h5 x.zarr"),  # into the last argument
    (12, "x.h5", "hdf5", "merge replay a.h5 replay -o x.h5"),
    (8, "set", "zarr", "dump replay set --mode append"),  # by what is there
    (8, "set", "zarr", "convert a.h5 set --mode append"),
    (8, "set", "zarr", "merge a.h5 -o set --mode append"),
    (4, "set", "zarr", "dump replay set --mode overwrite"),
    (4, "set", "zarr", "convert a.h5 set --mode overwrite"),
    (4, "set", "zarr", "merge a.h5 -o set --mode overwrite"),
]


@pytest.mark.parametrize(("count", "dest", "name", "words"), COPIES, ids=[words for *_, words in COPIES])
def test_what_arrives_is_what_was_there(cli, replay, tmp_path, count, dest, name, words):
    with ReplayBuffer.open(tmp_path / replay) as given:
        given.dump(tmp_path / "a.h5", progress=False)
        given.dump(tmp_path / "set", "zarr", progress=False)
        done = cli(*words.split())
        steps = 45 * count // 4
        assert done.out == f"wrote {dest}, format {name}: it holds {count} episodes, {steps} steps\n"
        same(ConcatDataset([given] * (count // 4)), load_dataset(tmp_path / dest, layout="HWC"))


def test_progress_is_drawn_for_people_only(cli, replay, monkeypatch):
    monkeypatch.setattr("ringmap.formats.catalog.convert._BAR_AFTER_S", 0)
    assert cli("dump", replay, "file.h5").err == ""
    monkeypatch.setattr("ringmap.cli.copies.is_watched", lambda: True)
    assert "convert to hdf5" in cli("dump", replay, "terminal.h5").err


@pytest.mark.parametrize("command", ["dump", "convert", "merge"])
def test_options_of_a_writer(cli, replay, tmp_path, command):
    assert cli(command, replay, "x.h5", "-O", "compression=gzip", "-O", "compression_opts=9").code == 0
    with h5py.File(tmp_path / "x.h5") as file:
        assert {d.compression for n, d in file.items() if not n.startswith("ep_")} >= {"gzip"}


@pytest.mark.parametrize("dest", ["x.h5", "x.zarr"])
def test_check_of_a_dataset(cli, replay, tmp_path, dest):
    cli("dump", replay, dest)
    assert (cli("check", dest).code, cli("check", dest).out) == (0, f"{dest}: sound\n")
    if dest == "x.h5":
        (tmp_path / dest).write_bytes((tmp_path / dest).read_bytes()[:-100])
    else:
        for chunk in (tmp_path / dest / "data/pixels").glob("[0-9]*"):
            chunk.write_bytes(b"nonsense")
    done = cli("check", dest)
    assert done.code == 1
    assert "finding" in done.out


def test_a_snapshot_while_the_writer_goes_on(cli, tmp_path):
    buffer = fill(tmp_path / "live")
    assert cli("snapshot", "live", "kept").out == "wrote kept: 4 episodes, 45 steps\n"
    kept = ReplayBuffer.open(tmp_path / "kept")
    same(kept, ReplayBuffer.open(tmp_path / "live"))
    done = cli("snapshot", "live", "kept")
    assert done.code == 2
    assert "something is at" in done.err
    buffer.close()


def test_formats(cli):
    found = {row["name"]: row for row in cli("formats", "--json").json}
    assert found["hdf5"] == {
        "name": "hdf5",
        "reads": True,
        "writes": True,
        "appends": True,
        "lossless": True,
        "installed": True,
        "install": "ringmap",
    }
    assert found["ringmap"]["writes"] is False
    lines = cli("formats").out.splitlines()
    assert lines[0].split() == ["format", "read", "write", "append", "lossless", "installed"]
    assert [line.split()[0] for line in lines[1:]] == list(found)


def test_a_format_that_is_not_installed(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "lance", None)
    monkeypatch.setattr(FORMATS, "_loaded", {})
    lines = cli("formats").out.splitlines()
    (line,) = (line for line in lines if line.startswith("lance"))
    assert line.split(maxsplit=5)[1:] == ["-", "-", "-", "-", 'pip install "ringmap[lance]"']


def test_lossless_is_true_of_those_that_say_so(cli, replay, tmp_path):
    buffer = ReplayBuffer.open(tmp_path / "replay")
    for facts in describe_formats():
        if not facts.writes or facts.name not in ("hdf5", "zarr", "lance", "folder", "video"):
            continue
        dest = tmp_path / f"as-{facts.name}"
        cli("dump", replay, dest, "--format", facts.name)
        dataset = load_dataset(dest, format=facts.name, layout="HWC")
        equal = all(
            np.array_equal(buffer.load_episode(i)["pixels"], np.asarray(dataset.load_episode(i)["pixels"]))
            for i in range(4)
        )
        assert equal == facts.lossless, facts.name


def test_conditions_are_joined(cli, replay, tmp_path):
    """`--where` given twice: both have to be met, whatever each of them joins by `or`."""
    words = ["--where", "seed = 103 or seed = 104", "-w", "length = 10 or length = 12"]
    assert cli("convert", replay, "a.h5", *words).code == 0
    assert load_dataset(tmp_path / "a.h5").get_episode_data()["seed"] == [103]
    assert [row["episode"] for row in cli("episodes", replay, *words, "--json").json] == [1]


def test_what_is_dropped(cli, tmp_path):
    """Each command says all that a format can't hold, and leaves out what is named."""
    episode = {"obs": [[0.0]] * 3, "action": [[0.0]] * 3, "when": np.zeros(3, "M8[s]"), "wave": [1j] * 3}
    with ReplayBuffer(10, path=tmp_path / "ring") as buf:
        buf.write_episode({**episode, "_episode_data": {"seed": 1, "goal": 2**70}})
    for verb in ("dump", "convert", "merge"):
        words = [verb, "ring", "set.hdf5", "-f", "robomimic"]
        refused = cli(*words)
        assert refused.code
        assert "drop=['when', 'goal']" in " ".join(refused.err.split())
        assert not (tmp_path / "set.hdf5").exists()
        assert not cli(*words, "--drop", "when", "--drop", "goal").code
        dataset = load_dataset(tmp_path / "set.hdf5", format="robomimic")
        assert sorted(dataset.column_names) == ["action", "done", "next_obs/flat", "obs/flat", "wave"]
        assert dataset.episode_column_names == ["seed"]
        dataset.close()
        (tmp_path / "set.hdf5").unlink()
