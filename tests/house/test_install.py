"""What is installed: the bare package runs the first example, and what is missing names its extra."""

import shutil
import subprocess
import tomllib
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ringmap.extras import PACKAGES
from tests.house import PYTHON, ROOT, run

BARE_NBYTES = 170 << 20

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
    said = run(PYTHON, "-c", program, cwd=tmp_path).splitlines()
    for (extra, call), line in zip(CALLS, said, strict=True):
        assert f'pip install "ringmap[{extra}]"' in line, (call, line)


def test_the_command_line_names_its_extra():
    program = "import sys; sys.modules['typer'] = None; from ringmap.cli import main; main()"
    said = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert 'typer is not installed; pip install "ringmap[cli]"' in said.stderr


def test_the_bare_wheel_runs_the_first_example(tmp_path):
    """The wheel, and of what is installed here all that it requires: an empty environment has nothing else."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    python = str(home / "bin" / "python")
    libraries = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    before = nbytes(libraries)
    run(PYTHON, "-m", "pip", "--python", python, "install", "-q", "--no-compile", "--no-deps", str(ROOT))  # fmt: skip
    (wheel,) = (d for d in metadata.distributions(path=[str(libraries)]) if d.name == "ringmap")
    for name in sorted(required_by(wheel)):
        install_what_is_here(metadata.distribution(name), libraries)
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


def required_by(distribution, found=frozenset()):
    """Return the names of the distributions that one requires without an extra, and of those that they require."""
    for line in distribution.requires or ():
        asked = Requirement(line)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(asked.name) not in found:
            other = metadata.distribution(asked.name)
            assert asked.specifier.contains(other.version, prereleases=True), line
            found = required_by(other, found | {canonicalize_name(asked.name)})
    return found


def install_what_is_here(distribution, libraries):
    for file in distribution.files:
        if ".." not in file.parts and file.suffix != ".pyc":
            target = libraries / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(distribution.locate_file(file), target)


def nbytes(folder):
    files = (p for p in folder.rglob("*") if p.suffix != ".pyc")
    return sum(p.lstat().st_size for p in files if p.is_file())
