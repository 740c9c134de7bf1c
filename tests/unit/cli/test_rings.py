"""A directory of rings: one table, and the total."""

import errno
import os

from ringmap import ReplayBuffer
from ringmap.data import convert, load_dataset
from ringmap.storage.disk.files import Disk
from tests.unit.cli.conftest import episode, fill


def test_info_and_watch_of_a_directory_of_rings(cli, tmp_path):
    fill(tmp_path / "fleet" / "one", 2).close()
    writer = fill(tmp_path / "fleet" / "two", 3)
    (tmp_path / "fleet" / "bad").mkdir()
    (tmp_path / "fleet" / "bad" / "manifest.json").write_text("{")
    (tmp_path / "fleet" / "policy").mkdir()
    for command in (("info", "fleet"), ("watch", "fleet", "--once")):
        done = cli(*command)
        assert done.code == 0
        lines = [line.split() for line in done.out.splitlines()]
        assert lines[0][:5] == ["ring", "episodes", "steps", "written", "writer"]
        assert [line[0] for line in lines[1:]] == ["bad", "one", "two", "total"]
        assert lines[2][1:5] == ["2", "21", "21", "none"]
        assert lines[3][1:6] == ["3", "33", "33", "process", str(os.getpid())]
        assert lines[4][:8] == ["total", "of", "3", "rings", "5", "54", "54", "1"]
        assert "manifest.json" in done.out
        found = cli(*command, "--json").json
        assert (found["rings"], found["episodes"], found["steps"], found["problems"]) == (3, 5, 54, 1)
        assert [shard["name"] for shard in found["shards"]] == ["bad", "one", "two"]
    writer.close()


def test_a_ring_that_may_not_be_read_is_named(cli, tmp_path, monkeypatch):
    """As under another user's umask 077; what is written of the others alone is no copy of the fleet."""
    fill(tmp_path / "fleet" / "one", 2).close()
    fill(tmp_path / "fleet" / "two", 3).close()
    real = Disk._stat

    def stat(disk, path):
        if "fleet/two/" in path:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(disk, path)

    monkeypatch.setattr(Disk, "_stat", stat)
    done = cli("check", "fleet")
    assert done.code == 1
    assert "two: [Errno 13] check: Permission denied" in done.out
    for command in (("info", "fleet"), ("watch", "fleet", "--once")):
        done = cli(*command)
        assert [line.split()[0] for line in done.out.splitlines()[1:]] == ["one", "two", "total"]
        assert "Permission denied" in done.out
        assert done.err == ""
    for command in (("episodes", "fleet"), ("dump", "fleet", "o.h5"), ("convert", "fleet", "o.h5")):
        done = cli(*command)
        assert done.code == 1
        assert "1 of 2 rings" in done.err
        assert "fleet/two: " in done.err
        assert not (tmp_path / "o.h5").exists()


def test_a_ring_and_its_parts_are_no_directory_of_rings(cli, tmp_path):
    with ReplayBuffer(100, path=tmp_path / "ring") as ring:
        ring.write_episode(episode(0))
    assert "ringmap" in cli("info", "ring", "--json").json["format"]
    assert cli("info", ".").code == 0  # the directory above it


def test_check_of_a_directory_of_rings(cli, tmp_path):
    import ringmap

    for number in (1, 2):
        fill(tmp_path / "fleet" / f"ring-{number}", number).close()
    (tmp_path / "fleet" / "policy").mkdir()
    assert ringmap.check(tmp_path / "fleet") == []
    done = cli("check", "fleet")
    assert (done.code, done.out) == (0, "fleet: sound\n")
    (tmp_path / "fleet" / "ring-2" / "state.bin").write_bytes(b"")
    (finding,) = [f for f in ringmap.check(tmp_path / "fleet") if "state.bin" in f.file]
    assert finding.file == "ring-2/state.bin"
    done = cli("check", "fleet")
    assert done.code == 1
    assert "ring-2/state.bin: " in done.out


def test_what_reads_a_ring_reads_a_directory_of_them(cli, tmp_path):
    """`episodes, convert, preview, plot, dump, snapshot, merge`, and the functions behind them; a writer may be at
    work."""
    fill(tmp_path / "fleet" / "one", 2, reward_at="next").close()
    writer = fill(tmp_path / "fleet" / "two", 3, reward_at="next")
    rows = cli("episodes", "fleet", "--json").json
    assert [(row["episode"], row["ring"], row["data"]["seed"]) for row in rows] == [
        (0, "one", 100),
        (1, "one", 101),
        (2, "two", 100),
        (3, "two", 101),
        (4, "two", 102),
    ]
    assert [row["episode"] for row in cli("episodes", "fleet", "-w", "ring = two and seed > 100", "--json").json] == [
        3,
        4,
    ]
    assert "ring" in cli("episodes", "fleet").out.splitlines()[0]
    assert cli("preview", "fleet", "-o", "a.png").code == 0
    assert cli("snapshot", "fleet", "copy").out == "wrote copy: 5 episodes, 54 steps\n"
    assert cli("snapshot", "fleet", "copy").code == 2
    assert sorted(os.listdir(tmp_path / "copy")) == ["one", "two"]
    seeds = [100, 101, 100, 101, 102]
    for command, name in (("convert", "b.h5"), ("dump", "c.h5"), ("merge", "d.h5")):
        done = cli(command, "fleet", name)
        assert done.out == f"wrote {name}, format hdf5: it holds 5 episodes, 54 steps\n", command
        assert load_dataset(tmp_path / name).get_episode_data()["seed"] == seeds
        assert load_dataset(tmp_path / name).reward_at == "next"
    convert(tmp_path / "fleet", tmp_path / "e.h5", where="seed = 101", progress=False)
    assert load_dataset(tmp_path / "e.h5").get_episode_data()["seed"] == [101, 101]
    whole = load_dataset(tmp_path / "fleet", num_steps=2, output="numpy")
    assert whole.get_episode_data()["seed"] == seeds and whole[0]["reward"].shape == (2,)
    writer.close()
    with fill(tmp_path / "fleet" / "odd", 1, reward_at="same"):  # a ring that does not fit is not left out in silence
        for command in (
            ["episodes", "fleet"],
            ["convert", "fleet", "f.h5"],
            ["dump", "fleet", "f.h5"],
            ["snapshot", "fleet", "g"],
        ):
            done = cli(*command)
            assert done.code != 0 and "'same'" in done.err, command
    assert not (tmp_path / "f.h5").exists() and not (tmp_path / "g").exists()
