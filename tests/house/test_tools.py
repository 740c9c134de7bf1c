"""`ruff`, `mypy` and `lint-imports` are commands of their own (README): here, that each finds a planted fault, and what
`mypy` says of a user's program. And that a test which leaves a process alive fails, by name."""

import re
import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.house import PYTHON, run

CONFIG = ("--config", ROOT / "pyproject.toml")


def said_of(words, *paths, cwd=ROOT):
    """Return what a tool says, which must find something."""
    with pytest.raises(AssertionError) as caught:
        run(*words, *paths, cwd=cwd)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "planted", "found"),
    [
        (("ruff", "check", *CONFIG), "import os\n", "F401"),
        (("ruff", "format", "--check", *CONFIG), "x = [ 1 ]\n", "would be reformatted"),
        (("mypy",), "def double(x):\n    return 2 * x\n", "no-untyped-def"),
        pytest.param(
            ("mypy", "--strict"),
            "import ringmap\nringmap.ReplayBuffer(max_steps=1)[0] + 1\nwrong: int = ringmap.data.load_dataset('x')\n",
            r"(?s)Unsupported operand.*Incompatible types",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_planted_fault_is_found(tmp_path, words, planted, found):
    (tmp_path / "planted.py").write_text(planted)
    assert re.search(found, said_of([PYTHON, "-m", *words], tmp_path / "planted.py"))


PLANTED = {
    "errors": "import ringmap.storage",
    "storage/disk/checksums": "import ringmap.storage.records.table",
    "storage/columns/planted": "def late():\n    import torch",
    "datasets/planted": "def late():\n    import ringmap.formats.base",
    "formats/a": "",
    "formats/b": "import ringmap.formats.a",
}


def test_each_contract_of_imports_finds_something(tmp_path):
    package = shutil.copytree(ROOT / "src/ringmap", tmp_path / "ringmap")
    for name, line in PLANTED.items():
        with (package / f"{name}.py").open("a") as module:
            module.write(f"\n{line}\n")
    said = said_of([Path(PYTHON).with_name("lint-imports"), "--no-cache", *CONFIG], cwd=tmp_path)
    for broken in ("Lower floors", "The rooms of the storage", "storage and clips know", "Formats never"):
        assert re.search(rf"{broken}.* BROKEN", said), broken
    assert "ringmap.datasets is not allowed to import ringmap.formats" in said


PROGRAM = """
from typing import Any, SupportsFloat, assert_type

import gymnasium
import numpy as np
import torch
from torch.utils.data import DataLoader

import ringmap
from ringmap.data import ConcatDataset, Dataset, ReplayBuffer, load_dataset

buf = ReplayBuffer(max_steps=100)
assert_type(buf[0], dict[str, Any])
assert_type(buf.sample(batch_size=2)["obs"], np.ndarray[Any, np.dtype[Any]])
dataset = load_dataset("replay.h5", num_steps=2)
assert_type(dataset, Dataset)
assert_type(dataset[0], dict[str, Any])
theirs: torch.utils.data.Dataset[dict[str, Any]] = buf
for source in (buf, dataset, ConcatDataset([dataset, dataset])):
    assert_type(DataLoader(source, batch_size=2, shuffle=True), DataLoader[dict[str, Any]])

env = ringmap.ReplayBufferCollectionWrapper(gymnasium.make("CartPole-v1"), buf)
assert_type(env.reset(seed=0), tuple[Any, dict[str, Any]])
assert_type(env.step(0), tuple[Any, SupportsFloat, bool, bool, dict[str, Any]])
any_env: gymnasium.Env[Any, Any] = ringmap.ReplayBufferCollectionWrapper.shared(env, buf)
envs = ringmap.ReplayBufferCollectionWrapper(gymnasium.make_vec("CartPole-v1"), buf, stream=True)
any_envs: gymnasium.vector.VectorEnv[Any, Any, Any] = envs
assert_type(envs.step(np.zeros(2)), tuple[Any, Any, Any, Any, dict[str, Any]])
"""


@pytest.mark.slow
def test_a_users_program_is_typed(tmp_path):
    readme = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    for name, text in (("readme_program", readme), ("user_program", PROGRAM)):
        (tmp_path / f"{name}.py").write_text(text)
    run(PYTHON, "-m", "mypy", "--strict", *tmp_path.glob("*.py"))


LEFT = """
import multiprocessing, os, time

def test_of_a_fork():
    if not os.fork():
        time.sleep(60)
        os._exit(0)

def test_of_a_fork_server():
    multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,)).start()

def test_of_nothing():
    assert not os.system("true")
"""


@pytest.mark.slow
def test_a_process_that_a_test_leaves_alive_fails_it(tmp_path):
    shared = (ROOT / "conftest.py").read_text()
    assert "PATIENCE_S = 30" in shared
    (tmp_path / "conftest.py").write_text(shared.replace("PATIENCE_S = 30", "PATIENCE_S = 1"))
    (tmp_path / "test_planted.py").write_text(LEFT)
    words = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}"]
    said = said_of(words, tmp_path, cwd=tmp_path)
    assert "3 passed, 2 errors" in said
    for name in ("fork", "fork_server"):
        assert f"ERROR test_planted.py::test_of_a_{name} - " in said
