"""Pages whose blocks need other libraries run here, each as one script."""

import os
import subprocess
import textwrap

import pytest

from tests import ROOT
from tests.house import PYTHON
from tests.programs.test_docs_blocks import FENCE

NEEDS = {
    "how-to/use-stable-baselines3": ["stable_baselines3"],
    "how-to/write-lerobot": ["av", "pyarrow"],
    "how-to/write-minari": ["minari"],
    "how-to/write-parquet": ["datasets"],
    "how-to/use-grain-and-torchdata": ["grain", "torchdata"],
    "migrate/from-lerobot": ["pyarrow"],
    "migrate/from-stable-baselines3": ["stable_baselines3"],
    "migrate/from-torchrl": ["torchrl"],
}
THEIRS = "<!-- no-run: lines of another project -->"
"""Stands before the block that shows code as it was."""


HOMES = ("MINARI_DATASETS_PATH", "HF_LEROBOT_HOME", "HF_HOME")
"""Where libraries keep their files, which are not to be the user's here."""


@pytest.mark.parametrize("page", NEEDS)
def test_blocks_run(tmp_path, page):
    for library in NEEDS[page]:
        pytest.importorskip(library, reason=f"{library} is not installed (extra exits)")
    text = (ROOT / f"docs/{page}.md").read_text()
    fences = [f for f in FENCE.finditer(text) if f["info"] == "python"]
    ours = [f for f in fences if not text[: f.start()].rstrip().endswith(THEIRS)]
    blocks = [textwrap.dedent(f["body"]) for f in ours]
    assert blocks
    (tmp_path / "page.py").write_text("\n".join(blocks))
    env = {**os.environ, **{name: str(tmp_path) for name in HOMES}}
    done = subprocess.run([PYTHON, "page.py"], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
