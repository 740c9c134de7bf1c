"""Names beyond ASCII where the terminal, or the log of a job, takes ASCII alone."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.cli import main
from ringmap.cli.app import COMMANDS
from tests import ROOT
from tests.tiers import few
from tests.unit.cli.conftest import episode

CALLS = {
    "info": ["info", "flö"],
    "info of a ring": ["info", "flö/größe"],
    "view": ["view", "fehlt-ö"],
    "watch": ["watch", "flö", "--once"],
    "collect": ["collect", "fehlt_ö:welt", "--path", "x", "--episodes", "1", "--max-steps", "9"],
    "episodes": ["episodes", "flö/größe", "--where", "room = Küche"],
    "a wrong where": ["episodes", "flö/größe", "--where", "räume = 3"],
    "plot": ["plot", "flö/größe", "-o", "bö.png"],
    "preview": ["preview", "flö/größe", "-o", "vö.png"],
    "check": ["check", "flö"],
    "repair": ["repair", "flö/größe"],
    "snapshot": ["snapshot", "flö/größe", "kopie-ö"],
    "dump": ["dump", "flö/größe", "aö.h5"],
    "convert": ["convert", "flö/größe", "bö.zarr", "--drop", "größe"],
    "merge": ["merge", "flö/größe", "flö/zwei", "cö.h5"],
    "formats": ["formats"],
    "a wrong command": ["größe"],
    "a wrong option": ["info", "flö", "--größe"],
}


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("größe", "zwei"):
        with ReplayBuffer(100, path=tmp_path / "flö" / name, seed=0) as ring:
            for number in range(2):
                made = episode(number, room="Küche")
                ring.write_episode({**made, "größe": np.zeros(len(made["action"]))})


@pytest.mark.parametrize("encoding", few(["ascii", "iso8859-2"]))
def test_every_command_works_with_a_stdout_that_holds_no_umlauts(fleet, monkeypatch, encoding):
    assert set(COMMANDS) <= {words[0] for words in CALLS.values()}
    said = {}
    for call, words in CALLS.items():
        outputs, text = {}, []
        with monkeypatch.context() as patch:
            for name in ("stdout", "stderr"):
                raw = io.BytesIO()
                outputs[raw] = io.TextIOWrapper(raw, encoding)
                patch.setattr(sys, name, outputs[raw])
            patch.setattr(sys, "argv", ["ringmap", *words])
            with pytest.raises(SystemExit) as ended:
                main()
            for raw, output in outputs.items():
                output.flush()
                text.append(raw.getvalue().decode(encoding))
        said[call] = (ended.value.code or 0, *text)
    wrong = {"view", "collect"} | {call for call in CALLS if call.startswith("a wrong")}
    assert {call for call, (code, *_) in said.items() if code} == wrong
    name = "gr\\xf6\\xdfe" if encoding == "ascii" else "größe"
    assert name in said["info"][1]
    assert name in said["episodes"][1] + said["info of a ring"][1]
    assert name in said["a wrong option"][2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_process_of_its_own(fleet, environment):
    done = subprocess.run(
        [sys.executable, "-m", "ringmap", "info", "flö"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert b"zwei" in done.stdout
