from functools import partial

import pytest

from benchmarks.__main__ import NAMES
from tests import ROOT
from tests.house import PYTHON, run

EXAMPLES = {ROOT / "examples/main_job.py", *(ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("example", sorted(EXAMPLES), ids=lambda path: path.stem)
def test_example_runs(forked, example, tmp_path):
    forked.run(example, "--tiny", cwd=tmp_path)


def test_benchmarks_run(tmp_path):
    benchmark = partial(run, PYTHON, "-m", cwd=tmp_path, PYTHONPATH=str(ROOT))
    benchmark("benchmarks", "--tiny", "--out", "results")
    benchmark("benchmarks.page", "results", "page.md")
    page = (tmp_path / "page.md").read_text()
    for name in NAMES:
        assert f"\n## {name}\n" in page
    told = benchmark("benchmarks.summary", "results")
    assert len(told.splitlines()) == 2 + 7
