"""What a type checker says of a user's program: mypy, strict, over the README's block and over a small one."""

import pytest

from tests import ROOT
from tests.house import PYTHON, run

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


def readme_block():
    return (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]


def mypy(tmp_path, **programs):
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
    paths = [tmp_path / f"{name}.py" for name in programs]
    return run(PYTHON, "-m", "mypy", "--strict", *paths)


@pytest.mark.slow
def test_a_users_program_is_typed(tmp_path):
    mypy(tmp_path, readme_program=readme_block(), user_program=PROGRAM)


@pytest.mark.slow
def test_control(tmp_path):
    planted = "import ringmap\nringmap.ReplayBuffer(max_steps=1)[0] + 1\nwrong: int = ringmap.data.load_dataset('x')\n"
    with pytest.raises(AssertionError, match=r"(?s)Unsupported operand.*Incompatible types"):
        mypy(tmp_path, planted=planted)
