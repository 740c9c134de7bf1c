"""`ruff check .` and `ruff format --check .` are commands of their own (README): here, that they find something."""

import pytest

from tests import ROOT
from tests.house import PYTHON, run

RUFF = [PYTHON, "-m", "ruff"]


def test_control(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text("import os\nx = [ 1 ]\n")
    config = ["--config", ROOT / "pyproject.toml", planted]
    with pytest.raises(AssertionError, match="F401"):
        run(*RUFF, "check", *config)
    with pytest.raises(AssertionError, match="would be reformatted"):
        run(*RUFF, "format", "--check", *config)
