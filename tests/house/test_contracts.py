"""`lint-imports` is a command of its own (README): here, that each contract finds something."""

import re
import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.house import PYTHON, run

LINT_IMPORTS = [Path(PYTHON).with_name("lint-imports"), "--no-cache"]


PLANTED = {
    "errors": "import ringmap.storage",
    "storage/disk/checksums": "import ringmap.storage.records.table",
    "storage/columns/planted": "def late():\n    import torch",
    "datasets/planted": "def late():\n    import ringmap.formats.base",
    "formats/a": "",
    "formats/b": "import ringmap.formats.a",
}


def test_control(tmp_path):
    package = shutil.copytree(ROOT / "src/ringmap", tmp_path / "ringmap")
    for name, line in PLANTED.items():
        with (package / f"{name}.py").open("a") as module:
            module.write(f"\n{line}\n")
    with pytest.raises(AssertionError) as raised:
        run(*LINT_IMPORTS, "--config", ROOT / "pyproject.toml", cwd=tmp_path)
    for broken in (
        "Lower floors",
        "The rooms of the storage",
        "storage and clips know",
        "Formats never",
    ):
        assert re.search(rf"{broken}.* BROKEN", str(raised.value)), broken
    assert "ringmap.datasets is not allowed to import ringmap.formats" in str(raised.value)


def test_one_loop_reads_again():
    """Who else says that it was overtaken waits for a state, or reads once."""
    found = [
        str(path.relative_to(ROOT / "src/ringmap"))
        for path in sorted((ROOT / "src/ringmap").rglob("*.py"))
        if "raise LappedError" in path.read_text()
    ]
    assert found == [
        "buffers/steps.py",
        "buffers/transitions/buffer.py",
        "storage/inspect/snapshot.py",
        "storage/read/read_live.py",
        "storage/sidecars/values.py",
    ]
