import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.house import PYTHON, run

LINT_IMPORTS = [Path(PYTHON).with_name("lint-imports"), "--no-cache"]


def test_lower_floors_never_import_upper_ones():
    run(*LINT_IMPORTS, cwd=ROOT)


@pytest.mark.parametrize(
    ("planted", "broken"),
    [
        ({"errors": "import ringmap.storage"}, "Lower floors"),
        ({"storage/planted": "def late():\n    import torch"}, "storage and clips know neither"),
        ({"formats/a": "", "formats/b": "import ringmap.formats.a"}, "Formats never import"),
    ],
)
def test_control(tmp_path, planted, broken):
    package = shutil.copytree(ROOT / "src/ringmap", tmp_path / "ringmap")
    for name, line in planted.items():
        with (package / f"{name}.py").open("a") as module:
            module.write(f"\n{line}\n")
    with pytest.raises(AssertionError, match=rf"{broken}.* BROKEN"):
        run(*LINT_IMPORTS, "--config", ROOT / "pyproject.toml", cwd=tmp_path)


def test_one_loop_reads_again():
    """Who else says that it was overtaken waits for a state, or reads once."""
    found = [
        str(path.relative_to(ROOT / "src/ringmap"))
        for path in sorted((ROOT / "src/ringmap").rglob("*.py"))
        if "raise LappedError" in path.read_text()
    ]
    assert found == [
        "buffers/steps.py", "buffers/transitions/buffer.py", "storage/read_live.py", "storage/reader.py",
        "storage/snapshot.py",
    ]  # fmt: skip
