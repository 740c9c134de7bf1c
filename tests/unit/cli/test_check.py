"""Check and repair: exit codes, and what is said to be lost is what is lost."""

import json

import numpy as np
import pytest

from ringmap.data import DistillationBuffer, ReplayBuffer
from ringmap.storage.disk.checksums import json_checksum
from tests.unit.cli.conftest import fill


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def hurt(replay, tmp_path):
    """The buffer with a byte of episode 1 (record 4, positions 33 to 43) flipped."""
    flip(tmp_path / "replay/columns/001-action.npy", 4096 + 35 * 8)
    return replay


def test_sound(cli, replay):
    assert cli("check", replay) == type(cli("check", replay))(0, "replay: sound\n", "")
    assert cli("check", replay, "--json").json == {"path": "replay", "sound": True, "findings": [], "pending": 0}
    done = cli("repair", replay)
    assert (done.code, done.out) == (0, "replay: sound, nothing to do\n")
    assert cli("repair", replay, "--apply").code == 0


def test_findings(cli, hurt):
    done = cli("check", hurt)
    what = "rows of record 4 (positions 33 to 43) are damaged"
    assert (done.code, done.err) == (1, "")
    assert done.out == f"columns/001-action.npy: {what}\nreplay: 1 finding\n"
    done = cli("check", hurt, "--json")
    assert done.code == 1
    assert done.json["findings"] == [{"file": "columns/001-action.npy", "what": what, "record": 4}]
    done = cli("check", hurt, "--quiet")
    assert (done.code, done.out, done.err) == (1, "", "")


def test_a_newer_version_is_the_one_finding(cli, tmp_path):
    fill(tmp_path / "new").close()
    body = json.loads((tmp_path / "new/manifest.json").read_text()) | {"version": 99}
    del body["checksum"]
    (tmp_path / "new/manifest.json").write_text(json.dumps({**body, "checksum": json_checksum(body)}))
    done = cli("check", "new")
    assert (done.code, done.out.splitlines()[1]) == (1, "new: 1 finding")


def test_repair_changes_nothing_unless_told(cli, hurt, tmp_path):
    before = contents(tmp_path / "replay")
    done = cli("repair", hurt)
    assert done.code == 1
    assert contents(tmp_path / "replay") == before
    assert "replay: 3 actions to do; would be lost: 1 episode, 10 steps\n" in done.out
    assert done.out.endswith("Nothing was changed; say --apply to do it.\n")


def test_what_is_said_to_be_lost_is_what_is_lost(cli, hurt, tmp_path):
    flip(tmp_path / "replay/episodes.npy", 4096 + 6 * 128 + 20)  # and the newest record
    said = cli("repair", hurt, "--json").json
    assert said["applied"] is False
    done = cli("repair", hurt, "--apply", "--json")
    assert done.code == 0
    assert done.json == {**said, "applied": True}
    assert said["lost"] == {"episodes": 2, "steps": 22}
    kept = ReplayBuffer.open(tmp_path / "replay")
    assert kept.lengths.tolist() == [12, 11]
    assert kept.get_episode_data()["seed"] == [102, 104]
    assert cli("check", hurt).code == 0


def test_what_loses_nothing_says_so(cli, replay, tmp_path):
    (tmp_path / "replay/state.bin").write_bytes(bytes(8192))
    assert "would be lost: nothing\n" in cli("repair", replay).out
    assert "lost: nothing\n" in cli("repair", replay, "--apply").out


def test_what_cant_be_mended_stays_1(cli, replay, tmp_path):
    (tmp_path / "replay/stray.txt").write_text("mine")
    done = cli("repair", replay, "--apply")
    assert done.code == 1
    assert "stray.txt: " in done.out
    assert done.out.rstrip().endswith("can't be mended")
    assert cli("repair", replay).code == 1
    assert (tmp_path / "replay/stray.txt").read_text() == "mine"


def test_a_writer_at_work_is_no_answer(cli, tmp_path):
    buffer = fill(tmp_path / "open")
    flip(tmp_path / "open/columns/001-action.npy", 4096 + 35 * 8)
    done = cli("repair", "open", "--apply")
    assert done.code == 2
    assert "is being written by process" in done.err
    assert cli("repair", "open").code == 1  # looking is fine
    buffer.close()


def test_a_teachers_buffer(cli, tmp_path):
    buffer = DistillationBuffer(100, path=tmp_path / "d", seed=0)
    buffer.start_round()
    buffer.add(np.zeros((8, 4), np.float32), np.arange(8))
    buffer.close()
    column = next((tmp_path / "d/columns").iterdir())
    flip(column, 4096)
    done = cli("check", "d")
    assert done.code == 1
    assert done.out.startswith(f"columns/{column.name}: rows of record 1")
    done = cli("repair", "d", "--apply")
    assert done.code == 0
    assert "episodes.npy: drop the episode of record 1" in done.out
    assert cli("check", "d").code == 0


def test_progress_is_drawn_for_people_only(cli, replay, monkeypatch):
    from ringmap.cli import console

    monkeypatch.setattr(console, "is_watched", lambda: True)
    monkeypatch.setattr(console, "_AFTER_S", 0)
    done = cli("check", replay)
    assert (done.code, done.out) == (0, "replay: sound\n")
    assert "check: " in done.err
    monkeypatch.undo()


def test_repair_of_a_copy(cli, hurt, tmp_path):
    before = contents(tmp_path / "replay")
    done = cli("repair", hurt, "--to", "kept")
    assert done.code == 1
    assert "1 episode" in done.out
    assert not (tmp_path / "kept").exists()
    done = cli("repair", hurt, "--to", "kept", "--apply")
    assert (done.code, contents(tmp_path / "replay")) == (0, before)
    assert "copy what can be read to" in done.out
    assert cli("check", "kept").code == 0
    assert cli("check", hurt).code == 1
    assert cli("repair", hurt, "--to", "kept", "--apply").code == 2
