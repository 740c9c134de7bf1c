import json
import os
from dataclasses import dataclass

import numpy as np
import pytest
from typer.testing import CliRunner

from ringmap.cli.app import app
from ringmap.data import ReplayBuffer


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """Runs a command in `tmp_path`; what is no error of ours is raised."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STABLEWM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RINGMAP_TRACEBACK", raising=False)

    def run(*words):
        result = CliRunner().invoke(app, [os.fspath(word) for word in words], prog_name="ringmap")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    return run


def episode(number, length=None, **data):
    length = length or 10 + number % 3
    rng = np.random.default_rng(number)
    return {
        "pixels": rng.integers(0, 256, (length, 8, 8, 3), np.uint8),
        "action": rng.normal(size=(length, 2)).astype(np.float32),
        "reward": np.r_[np.nan, np.full(length - 1, number)].astype(np.float32),
        "terminated": np.arange(length) == length - 1 if number % 2 else np.zeros(length, np.bool_),
        "truncated": np.zeros(length, np.bool_),
        "_episode_data": {"seed": 100 + number, "room": "left" if number % 2 else "right", **data},
    }


def fill(path, episodes=6, max_steps=50, **options):
    buffer = ReplayBuffer(max_steps, path=path, **options)
    for number in range(episodes):
        buffer.write_episode(episode(number))
    return buffer


@pytest.fixture
def replay(tmp_path):
    """A buffer that was closed: episodes 2 to 5 of 12, 10, 11, 12 steps; 0 and 1 were evicted."""
    fill(tmp_path / "replay").close()
    return "replay"
