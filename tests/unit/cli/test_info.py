"""What lies at a path."""

import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from ringmap import TransitionReplayBuffer, Zarr
from ringmap.data import DistillationBuffer, OfflineToOnlineReplayBuffer, ReplayBuffer, convert
from ringmap.errors import InputError
from tests.unit.cli.conftest import fill


def test_a_buffer(cli, replay):
    done = cli("info", replay)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "replay: buffer of episodes, format version 3"
    assert "  fill        45 of 50 steps, 90.0 %; 4 episodes" in lines
    assert "  written     66 so far, of which 21 are gone" in lines
    assert "  lengths     10 to 12, median 11.5" in lines
    assert any(line.startswith("  writer      none; the last was process ") for line in lines)
    assert "pixels      uint8    8 x 8 x 3  memmap" in lines
    assert not any(line.endswith(" ") for line in lines)


def test_the_same_as_json(cli, replay, tmp_path):
    found = cli("info", replay, "--json").json
    manifest = json.loads((tmp_path / "replay/manifest.json").read_text())
    reader = ReplayBuffer.open(tmp_path / "replay")
    assert found["uuid"] == manifest["uuid"].replace("-", "")
    assert found["steps"] == reader.num_steps_stored
    assert found["episodes"] == reader.num_episodes
    assert (found["steps_written"], found["commits"], found["max_steps"]) == (66, 6, 50)
    assert found["settings"]["durability"] == "process"
    assert [c["name"] for c in found["columns"]] == reader.column_names
    assert found["columns"][0] == {
        "name": "pixels",
        "dtype": "uint8",
        "shape": [8, 8, 3],
        "storage": "memmap",
        "codecs": [],
    }
    files = [p for p in (tmp_path / "replay").rglob("*") if p.is_file()]
    assert found["nbytes"] == sum(p.stat().st_blocks * 512 for p in files)


def test_a_fleet_of_transitions(cli, tmp_path):
    for number in range(2):
        with TransitionReplayBuffer(50, (3,), (), None, path=tmp_path / f"fleet/{number}") as ring:
            for _ in range(10 + number):
                ring.add(np.zeros(3), 1, 0.5, np.zeros(3), False)
    assert "total of 2 rings         0     21       21" in cli("info", "fleet").out
    found = cli("info", "fleet", "--json").json
    assert [(ring["name"], ring["steps"]) for ring in found["shards"]] == [("0", 10), ("1", 11)]


def test_who_writes(cli, tmp_path):
    buffer = fill(tmp_path / "open")
    done = cli("info", "open", "--json").json["writer"]
    assert done["alive"] is True
    assert "  writer      alive: process " in cli("info", "open").out
    buffer.close()
    assert cli("info", "open", "--json").json["writer"]["alive"] is False


def test_rows_that_are_not_committed_yet(cli, tmp_path):
    begun = _add_in_a_child(tmp_path / "steps")
    rest = "; the next writer commits them when it opens the buffer"
    assert "  pending     3 rows not committed yet" in (alive := cli("info", "steps").out)
    assert rest not in alive
    os.kill(begun.pid, signal.SIGKILL)
    begun.join()
    assert f"  pending     3 rows not committed yet{rest}" in cli("info", "steps").out
    with TransitionReplayBuffer.open(tmp_path / "steps", "r+", device=None) as buf:
        assert len(buf) == 3
        buf.close()
    assert "pending" not in cli("info", "steps").out


def _add_in_a_child(path):
    """Add three transitions in a process that holds the buffer open; return the process."""
    context = multiprocessing.get_context("spawn")
    told, tell = context.Pipe(False)
    begun = context.Process(target=_add_and_wait, args=(path, tell), daemon=True)
    begun.start()
    assert told.recv()
    return begun


def _add_and_wait(path, tell):
    with TransitionReplayBuffer(10, (1,), device=None, path=path, sync_every_s=1e9) as buf:
        for number in range(3):
            buf.add([number], 0, 0.0, [number + 1], False)
        tell.send(True)
        time.sleep(600)


def test_settings_and_codecs(cli, tmp_path):
    options = {"durability": "power", "history_len": 3, "frameskip": 2}
    fill(tmp_path / "z", storage={"pixels": Zarr("zstd")}, **options).close()
    out = cli("info", "z").out
    assert "  durability  power: each commit is synced" in out
    assert "  clips       history_len 3, frameskip 2" in out
    assert "zarr" in next(line for line in out.splitlines() if line.startswith("pixels"))


def test_before_the_first_episode(cli, tmp_path):
    ReplayBuffer(50, path=tmp_path / "new").close()
    out = cli("info", "new").out
    assert "0 of 50 steps, 0.0 %; 0 episodes" in out
    assert "none before the first episode" in out
    assert cli("info", "new", "--json").json["lengths"] is None
    assert cli("episodes", "new").out == "no episodes\n"


def test_transitions(cli, tmp_path):
    buffer = TransitionReplayBuffer(20, obs_shape=(3,), device=None, path=tmp_path / "t")
    for step in range(30):
        buffer.add(np.full((2, 3), step), [0, 1], [0.0, 1.0], np.full((2, 3), step + 1), [False] * 2)
    buffer.close()
    out = cli("info", "t").out
    assert "t: buffer of transitions" in out
    assert "20 of 20 rows, 100.0 %" in out
    found = cli("info", "t", "--json").json
    assert (found["kind"], found["capacity"], found["steps_written"]) == ("transitions", 20, 60)
    assert (found["episodes"], found["lengths"]) == (None, None)  # a call is none
    episodes = cli("episodes", "t", "--json").json
    assert [(row["length"], row["return"]) for row in episodes] == [(11, 0.0), (11, 10.0)]  # by lane
    for command in ("dump", "convert"):
        assert "2 episodes, 22 steps" in cli(command, "t", f"{command}.h5").out
    done = cli("snapshot", "t", "x.h5")
    assert done.code == 2
    assert "buffer of transitions" in done.err
    assert cli("watch", "t", "--once").out.startswith("40 of")
    assert cli("check", "t").code == 0


def test_the_rows_of_a_mix(cli, tmp_path):
    """They are no episodes by their commits, but by their ends."""
    mix = OfflineToOnlineReplayBuffer(ReplayBuffer(9), online_capacity=50, path=tmp_path / "m")
    for number in range(0, 20, 4):
        step = np.arange(number, number + 4)
        mix.extend({"obs": step, "reward": np.ones(4), "terminated": step % 10 == 9})
    mix.close()
    found = cli("info", "m", "--json").json
    assert (found["kind"], found["capacity"], found["steps"]) == ("rows", 50, 20)
    episodes = cli("episodes", "m", "--json").json
    assert [(row["length"], row["return"]) for row in episodes] == [(10, 10.0)] * 2
    for command in ("dump", "convert"):
        assert "2 episodes, 20 steps" in cli(command, "m", f"{command}.h5").out
    with pytest.raises(InputError, match="holds rows, expected episodes; open it with Offline"):
        ReplayBuffer.open(tmp_path / "m")


def test_a_teachers_labels(cli, tmp_path):
    buffer = DistillationBuffer(100, path=tmp_path / "d", seed=0)
    buffer.start_round()
    buffer.add(np.zeros((8, 4), np.float32), np.arange(8))
    buffer.close()
    found = cli("info", "d", "--json").json
    assert (found["kind"], found["capacity"], found["steps"]) == ("distillation", 100, 8)
    assert "8 of 100 rows, 8.0 %" in cli("info", "d").out
    assert cli("check", "d").out == "d: sound\n"
    assert " | 1 commit | " in cli("watch", "d", "--once").out
    assert cli("episodes", "d").code == 2


FORMATS = {"hdf5": "x.h5", "zarr": "x.zarr", "lance": "x.lance", "folder": "x", "video": "x"}


@pytest.mark.parametrize("name", FORMATS)
def test_datasets(cli, replay, tmp_path, name):
    if name == "video":
        pytest.importorskip("av")
    dest = FORMATS[name]
    convert(ReplayBuffer.open(tmp_path / "replay"), tmp_path / dest, dest_format=name, progress=False)
    found = cli("info", dest, "--json").json
    assert (found["kind"], found["format"]) == ("dataset", name)
    assert (found["episodes"], found["steps"]) == (4, 45)
    assert found["lengths"] == {"least": 10, "median": 11.5, "most": 12}
    shapes = {c["name"]: (c["dtype"], c["shape"]) for c in found["columns"]}
    assert shapes["pixels"] == ("uint8", [8, 8, 3])
    assert shapes["reward"] == ("float32", [])
    assert found["nbytes"] > 0
    assert f"{dest}: dataset, format {name}" in cli("info", dest).out
    assert [row["length"] for row in cli("episodes", dest, "--json").json] == [12, 10, 11, 12]


def test_damage_is_an_error_that_says_what_to_do(cli, replay, tmp_path):
    (tmp_path / "replay/episodes.npy").unlink()
    done = cli("info", replay)
    assert done.code == 1
    assert "ringmap.check" in done.err
    (tmp_path / "replay/manifest.json").write_text("{")
    assert cli("info", replay).code == 1
