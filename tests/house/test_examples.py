import pytest

from tests import ROOT
from tests.house import PYTHON, run

EXAMPLES = {ROOT / "examples/main_job.py", *(ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("example", sorted(EXAMPLES), ids=lambda path: path.stem)
def test_example_runs(example, tmp_path):
    run(PYTHON, example, "--tiny", cwd=tmp_path)


def test_benchmarks_run(tmp_path):
    run(PYTHON, "-m", "benchmarks", "--tiny", cwd=tmp_path, PYTHONPATH=str(ROOT))
