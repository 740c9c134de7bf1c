"""Extras: what is missing names its own at the call."""

import subprocess
import tomllib

from ringmap.extras import PACKAGES
from tests.house import PYTHON, ROOT, run

WITHOUT = """
import sys
for name in ("torch", "lance", "pyarrow", "av", "torchrl", "tensordict", "minari", "matplotlib", "safetensors",
             "stable_baselines3"):
    sys.modules[name] = None
"""


def test_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["optional-dependencies"]
    assert set(PACKAGES) <= set(named)
    distributions = {"av": "av", "gym_pusht": "gym-pusht", "lance": "pylance"}
    distributions["stable_baselines3"] = "stable-baselines3"
    for extra, modules in PACKAGES.items():
        brought = " ".join(named[extra])
        for module in modules:
            if (extra, module) != ("lance", "pyarrow"):  # pylance brings it
                assert distributions.get(module, module) in brought, (extra, module)


CALLS = [
    ("torch", "next(iter(buf.batches(2, steps=1, to='torch')))"),
    ("torch", "load_dataset('kept.h5').load_episode(0)"),
    ("torch", "ringmap.RolloutBuffer(1, 1, (1,), (1,))"),
    ("torch", "ringmap.TransitionReplayBuffer(9, (1,), path='never')"),
    ("torch", "ringmap.TransitionReplayBuffer.open('never')"),
    ("torch", "steps.sample(1, to='torch')"),
    ("torch", "next(iter(steps.batches(1, device='cpu')))"),
    ("lance", "buf.dump('kept.lance', format='lance')"),
    ("lance", "convert(buf, 'kept2.lance', dest_format='lance')"),
    ("lance", "os.makedirs('found.lance/_versions'); load_dataset('found.lance')"),
    ("video", "buf.dump('kept.mp4s', format='video')"),
    ("torchrl", "torchrl_storage(buf)"),
    ("sb3", "ringmap.sb3.ReplayBuffer"),
    ("weights", "ringmap.Weights('policy')"),
]


def test_a_missing_extra_is_named_at_the_call(tmp_path):
    """Each call in a fork of one process, so that none finds what another one imported."""
    program = f"""{WITHOUT}
import os
import numpy as np
import ringmap
from ringmap.data import ReplayBuffer, convert, load_dataset, torchrl_storage
from ringmap.errors import MissingExtraError
buf = ReplayBuffer(max_steps=50)
buf.write_episode({{"pixels": np.zeros((9, 4, 4, 3), np.uint8), "action": np.zeros((9, 1))}})
buf.dump("kept.h5", format="hdf5")
steps = ringmap.TransitionReplayBuffer(9, (1,), device=None)
steps.add(np.zeros(1), 0, 0.0, np.zeros(1), False)
assert load_dataset("kept.h5", output="numpy").load_episode(0)["pixels"].shape == (9, 3, 4, 4)
for call in {[call for _, call in CALLS]!r}:
    if not os.fork():
        said = "nothing was raised"
        try:
            exec(call)
        except MissingExtraError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        print(said.replace("\\n", " "), flush=True)
        os._exit(0)
    os.wait()
"""
    # From 3.12 on Python warns of a fork beside a thread.
    quiet = "-W", "ignore::DeprecationWarning"
    said = run(PYTHON, *quiet, "-c", program, cwd=tmp_path).splitlines()
    for (extra, call), line in zip(CALLS, said, strict=True):
        assert f'pip install "ringmap[{extra}]"' in line, (call, line)
    assert not (tmp_path / "never").exists()


def test_the_command_line_names_its_extra():
    program = "import sys; sys.modules['typer'] = None; from ringmap.cli import main; main()"
    said = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert 'typer is not installed; pip install "ringmap[cli]"' in said.stderr
