import json
from functools import partial

import pytest

from benchmarks.__main__ import NAMES
from benchmarks.page import page_of
from benchmarks.summary import put_in
from tests import ROOT
from tests.house import PYTHON, run

EXAMPLES = {ROOT / "examples/main_job.py", *(ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("example", sorted(EXAMPLES), ids=lambda path: path.stem)
def test_example_runs(forked, example, tmp_path):
    forked.run(example, "--tiny", cwd=tmp_path)


MACHINE = dict.fromkeys(("processor", "cores", "system", "file_system", "python", "numpy"), "x") | {
    "load": 0.5
}

BENCHMARKS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.__main__ import main
if __name__ == "__main__":
    main()
"""


def test_benchmarks_run(forked, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "all.py").write_text(BENCHMARKS)
    forked.run("all.py", "--tiny", "--out", "results", "--scratch", ".", cwd=tmp_path)
    benchmark = partial(run, PYTHON, "-m", cwd=tmp_path)
    benchmark("benchmarks.page", "results", "page.md")
    page = (tmp_path / "page.md").read_text()
    for name in NAMES:
        assert f"\n## {name}\n" in page
    told = benchmark("benchmarks.summary", "results")
    assert len(told.splitlines()) == 2 + 14
    readme = (ROOT / "README.md").read_text()
    assert put_in(readme, told.strip()).count(told.strip()) == 1
    assert put_in(put_in(readme, told.strip()), "| none |") == put_in(readme, "| none |")


def test_a_page_keeps_what_was_not_measured(tmp_path):
    (tmp_path / "rollout.json").write_text(
        json.dumps({"machine": MACHINE, "tables": [{"title": "new"}]})
    )
    before = "# Old head\n\n## torn\n\nkept\n\n## rollout\n\nold\n"
    page = page_of(tmp_path, before)
    assert "\n## torn\n\nkept\n" in page
    assert "**new**" in page
    assert "old" not in page.partition("## rollout")[2]
