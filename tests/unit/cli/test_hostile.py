"""Directories that somebody else made: nothing in them reaches the terminal as it is, or is unpickled."""

import json
import os
import pickle
import pty
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from ringmap.cli.console import clean, plain
from ringmap.data import ReplayBuffer
from tests.tiers import few
from tests.unit.cli.conftest import episode, fill

ATTACK = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202e[red]x[/red][link=http://a]:smile:"
UNSEEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


@pytest.fixture
def hostile(tmp_path):
    """A buffer whose path, column names and episode data are an attack."""
    path = tmp_path / ATTACK.replace("/", "|")
    buffer = ReplayBuffer(50, path=path)
    for number in range(2):
        steps = episode(number)
        steps["_episode_data"] = {ATTACK: ATTACK, "bytes": ATTACK.encode()}
        buffer.write_episode({ATTACK: np.zeros(len(steps["reward"])), **steps})
    buffer.close()
    return path.name


COMMANDS = [
    ["info"],
    ["info", "--json"],
    ["watch", "--once"],
    ["watch", "--once", "--json"],
    ["check"],
    ["check", "--json"],
    ["repair"],
    ["episodes"],
    ["episodes", "--json"],
    ["episodes", "--sort", "nope"],
    ["episodes", "--where", "nope=1"],
    ["plot"],
    ["preview"],
    ["preview", "--column", "nope"],
    ["dump", "x.h5"],
    ["dump", "noformat"],
    ["convert", "y.h5"],
    ["snapshot", "kept"],
    ["merge", "-o", "z.h5"],
    ["info", "one-more"],
    ["bogus"],
]


@pytest.mark.parametrize("words", few(COMMANDS, 8), ids=" ".join)
def test_nothing_that_a_terminal_obeys_is_printed(cli, hostile, words):
    done = cli(words[0], hostile, *words[1:])
    assert done.out + done.err
    assert not UNSEEN.search(done.out + done.err)


def test_markup_and_escapes_are_shown_as_they_stand(cli, hostile):
    shown = clean(ATTACK)
    assert shown == (r"\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202e[red]x[/red][link=http://a]:smile:")
    assert shown in cli("info", hostile).out
    header, *rows = cli("episodes", hostile).out.splitlines()
    assert shown in header
    assert all(shown in row for row in rows)
    (row, _) = json.loads(cli("episodes", hostile, "--json").out)
    assert row["data"][ATTACK] == ATTACK  # JSON gives it back, to whoever parses it


@pytest.mark.parametrize("command", few(["info", "episodes", "check"]))
def test_nor_on_a_real_terminal(tmp_path, hostile, command):
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "200", "FORCE_COLOR": "1"}
    words = [sys.executable, "-m", "ringmap", command, hostile]
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, cwd=tmp_path, env=env)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # the other end is closed
        pass
    finally:
        assert process.wait(60) == 0
        os.close(ours)
    assert b"\x1b]0;" not in seen
    assert b"\x1b[2J" not in seen
    assert b"\x1b]8;" not in seen  # a link
    assert b"\\x1b]0;owned" in seen
    plain_text = re.sub(rb"\x1b\[[0-9;]*m|[\r\n]|\s", b"", seen)
    assert b"[red]x[" in plain_text


def test_names_that_are_no_text(cli, tmp_path):
    fill(tmp_path / "replay").close()
    name = os.fsdecode(b"bad\xff")
    os.rename(tmp_path / "replay", tmp_path / name)
    assert cli("check", name).out == r"bad\udcff: sound" + "\n"
    assert cli("info", name).code == 0
    assert r"bad\udcff" in cli("info", name).out
    assert json.loads(cli("info", name, "--json").out)["path"] == name


class Bomb:
    def __reduce__(self):
        return open, ("exploded", "w")


def test_nothing_is_unpickled(cli, tmp_path, replay):
    cli("dump", replay, "set", "--format", "folder")
    archive = next((tmp_path / "set").rglob("*.npz"))
    with zipfile.ZipFile(archive) as found:
        names = found.namelist()
    bomb = np.empty(10, object)
    bomb[:] = [Bomb()] * 10
    np.savez(archive, **{name.removesuffix(".npy"): bomb for name in names})
    shutil.copytree(tmp_path / "replay", tmp_path / "bomb")
    for column in (tmp_path / "bomb/columns").iterdir():
        np.save(column, bomb, allow_pickle=True)
    (tmp_path / "alone.npy").write_bytes(pickle.dumps(Bomb()))
    for place in ("set", "bomb", "alone.npy"):
        for command in ("info", "episodes", "check", "repair", "preview", "plot", "watch"):
            words = [command, place, *(["--once"] if command == "watch" else [])]
            assert cli(*words).code in (0, 1, 2)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("inf"), None),
        (np.float32(0.5), 0.5),
        (np.array([1, 2]), [1, 2]),
        (np.array(["a"]), ["a"]),
        (np.array([np.nan]), [None]),
        (np.zeros((10, 10), np.uint8), {"dtype": "uint8", "shape": [10, 10]}),
        (np.datetime64("2020-01-01"), "2020-01-01"),
        ({"a": (1, b"\x01")}, {"a": [1, "01"]}),
        (object, "<class 'object'>"),
    ],
)
def test_values_as_json(value, expected):
    assert plain(value) == expected
