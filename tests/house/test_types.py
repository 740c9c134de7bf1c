import pytest

from tests.house import PYTHON, run


def test_src_is_strictly_typed():
    run(PYTHON, "-m", "mypy")


def test_control(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text("def double(x):\n    return 2 * x\n")
    with pytest.raises(AssertionError, match="no-untyped-def"):
        run(PYTHON, "-m", "mypy", planted)
