"""The bare package, from its wheel in an empty environment, runs the first example."""

import shutil
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house import PYTHON, ROOT, run

BARE_NBYTES = 170 << 20


def test_the_bare_wheel_runs_the_first_example(tmp_path):
    """The wheel, and of what is installed here all that it requires: an empty environment has nothing else."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    python = str(home / "bin" / "python")
    libraries = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    before = nbytes(libraries)
    run(PYTHON, "-m", "pip", "--python", python, "install", "-q", "--no-compile", "--no-deps", str(ROOT))
    (wheel,) = (d for d in metadata.distributions(path=[str(libraries)]) if d.name == "ringmap")
    for name in sorted(required_by(wheel)):
        install_what_is_here(metadata.distribution(name), libraries)
    added = nbytes(libraries) - before
    absent = run(python, "-c", "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('lance'))")
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
