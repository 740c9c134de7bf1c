import pytest

from tests import ROOT
from tests.house import PYTHON, run

RUFF = [PYTHON, "-m", "ruff"]


def test_ruff_finds_nothing():
    run(*RUFF, "check", ".")


def test_everything_is_formatted():
    run(*RUFF, "format", "--check", ".")


def test_control(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text("import os\nx = [ 1 ]\n")
    config = ["--config", ROOT / "pyproject.toml", planted]
    with pytest.raises(AssertionError, match="F401"):
        run(*RUFF, "check", *config)
    with pytest.raises(AssertionError, match="would be reformatted"):
        run(*RUFF, "format", "--check", *config)
