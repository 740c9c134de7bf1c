"""`mypy` is a command of its own (README): here, that it finds something."""

import pytest

from tests.house import PYTHON, run


def test_control(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text("def double(x):\n    return 2 * x\n")
    with pytest.raises(AssertionError, match="no-untyped-def"):
        run(PYTHON, "-m", "mypy", planted)
