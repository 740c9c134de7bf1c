"""What is installed: the bare package runs the first example, and what is missing names its extra."""

import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

from ringmap.extras import PACKAGES
from tests.house import PYTHON, ROOT, run

BARE_NBYTES = 170 << 20

WITHOUT = """
import sys
for name in ("torch", "lance", "pyarrow", "av", "torchrl", "tensordict", "minari", "matplotlib"):
    sys.modules[name] = None
"""


def test_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["optional-dependencies"]
    assert set(PACKAGES) <= set(named)
    distributions = {"av": "av", "gym_pusht": "gym-pusht", "lance": "pylance"}
    for extra, modules in PACKAGES.items():
        brought = " ".join(named[extra])
        for module in modules:
            if (extra, module) != ("lance", "pyarrow"):  # pylance brings it
                assert distributions.get(module, module) in brought, (extra, module)


@pytest.mark.parametrize(
    ("extra", "call"),
    [
        ("torch", "next(iter(buf.batches(2, steps=1, to='torch')))"),
        ("torch", "load_dataset('kept.h5').load_episode(0)"),
        ("torch", "ringmap.RolloutBuffer(1, 1, (1,), (1,))"),
        ("lance", "buf.dump('kept.lance', format='lance')"),
        ("lance", "convert(buf, 'kept2.lance', dest_format='lance')"),
        ("lance", "os.makedirs('found.lance/_versions'); load_dataset('found.lance')"),
        ("video", "buf.dump('kept.mp4s', format='video')"),
        ("torchrl", "torchrl_storage(buf)"),
    ],
)
def test_a_missing_extra_is_named_at_the_call(extra, call, tmp_path):
    program = f"""{WITHOUT}
import os
import numpy as np
import ringmap
from ringmap.data import ReplayBuffer, convert, load_dataset, torchrl_storage
from ringmap.errors import MissingExtraError
buf = ReplayBuffer(max_steps=50)
buf.write_episode({{"pixels": np.zeros((9, 4, 4, 3), np.uint8), "action": np.zeros((9, 1))}})
buf.dump("kept.h5", format="hdf5")
assert load_dataset("kept.h5", output="numpy").load_episode(0)["pixels"].shape == (9, 3, 4, 4)
try:
    {call}
except MissingExtraError as error:
    print(error)
"""
    said = subprocess.run(
        [PYTHON, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert f'pip install "ringmap[{extra}]"' in said.stdout, said


def test_the_command_line_names_its_extra():
    program = "import sys; sys.modules['typer'] = None; from ringmap.cli import main; main()"
    said = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert 'typer is not installed; pip install "ringmap[cli]"' in said.stderr


def test_the_bare_wheel_runs_the_first_example(tmp_path):
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    python = str(home / "bin" / "python")
    run(PYTHON, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("ringmap-*.whl")
    libraries = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    before = nbytes(libraries)
    install = [PYTHON, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
    run(*install, "-c", str(ROOT / "constraints.txt"), str(wheel))
    added = nbytes(libraries) - before
    absent = run(
        python,
        "-c",
        "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('lance'))",
    )
    assert absent.split() == ["None", "None"]
    said = run(python, str(ROOT / "examples" / "quickstart.py"), "--tiny")
    assert "4 episodes dumped, loaded and compared" in said
    print(f"the bare package and what it needs: {added / 1e6:.0f} MB")
    assert added < BARE_NBYTES


def nbytes(folder):
    files = (p for p in folder.rglob("*") if p.suffix != ".pyc")
    return sum(p.lstat().st_size for p in files if p.is_file())
