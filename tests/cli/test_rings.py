"""A directory of rings: one table, and the total."""

import os

from ringmap import ReplayBuffer
from tests.cli.conftest import episode, fill


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
        assert (found["rings"], found["episodes"], found["steps"], found["problems"]) == (
            3,
            5,
            54,
            1,
        )
        assert [shard["name"] for shard in found["shards"]] == ["bad", "one", "two"]
    writer.close()


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
