"""Upgrade: what it prints, that it may be called again, and when it is refused."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ringmap.data import DistillationBuffer, ReplayBuffer
from tests.cli.conftest import fill


def version(path):
    body = json.loads((path / "manifest.json").read_text())
    return body["version"], body.get("features", [])


def test_it_says_what_it_did_and_may_be_called_again(cli, replay, tmp_path):
    done = cli("upgrade", replay)
    assert (done.code, done.out, done.err) == (
        0,
        "replay: format version 1 -> 2, with chains, groups, mutable\n",
        "",
    )
    assert version(tmp_path / "replay") == (2, ["chains", "groups", "mutable"])
    before = (tmp_path / "replay/manifest.json").read_bytes()
    done = cli("upgrade", replay)
    assert (done.code, done.out) == (0, "replay: format version 2, nothing to do\n")
    assert (tmp_path / "replay/manifest.json").read_bytes() == before
    assert cli("check", replay).code == 0
    assert "format version 2" in cli("info", replay).out
    with ReplayBuffer.open(replay) as buf:
        assert buf.lengths.tolist() == [12, 10, 11, 12]


def test_a_buffer_at_work_is_refused(cli, tmp_path):
    buf = fill(tmp_path / "open")
    done = cli("upgrade", "open")
    assert (done.code, done.out) == (1, "")
    assert "is being written by process" in done.err
    assert version(tmp_path / "open") == (1, [])
    buf.close()


def test_nothing_there_is_2(cli, tmp_path):
    assert cli("upgrade", "nothing").err == "ringmap: error: upgrade: nothing: nothing is there\n"
    (tmp_path / "folder").mkdir()
    done = cli("upgrade", "folder")
    assert (done.code, "no buffer is there" in done.err) == (2, True)


def test_both_parts_of_a_teachers_buffer(cli, tmp_path):
    with DistillationBuffer(100, path=tmp_path / "d", seed=0) as buf:
        ids = buf.add(np.zeros((8, 4), np.float32), np.arange(8))
        buf.relabel(ids, lambda rows: rows["teacher_actions"] + 1)
        buf.close()
    done = cli("upgrade", "d")
    assert done.out.splitlines() == [
        "d/rows: format version 1 -> 2, with chains, groups, mutable",
        "d/labels: format version 1 -> 2, with chains, groups, mutable",
    ]


def test_a_read_only_disk_is_called_that(cli, replay, tmp_path):
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    if shutil.which("unshare") is None or subprocess.run(
        ["unshare", "--mount", "sh", "-ec", mount], capture_output=True, check=False
    ).returncode:  # fmt: skip
        pytest.skip("can't mount here")
    run = f"{mount} && exec {sys.executable} -m ringmap upgrade {tmp_path}/replay"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", run], capture_output=True, text=True, cwd=os.sep
    )
    assert done.returncode == 1
    assert "the file system is read-only" in done.stderr
    assert version(tmp_path / "replay") == (1, [])
