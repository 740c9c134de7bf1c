import json
import re
import shutil

import pytest

from benchmarks.harness.pages import publish, put_in, put_tables, summary_of
from benchmarks.harness.plots import PLOTS
from benchmarks.harness.table import Table
from benchmarks.harness.timing import QUANTILES
from tests import ROOT

EXAMPLES = {ROOT / "examples/main_job.py", *(ROOT / "examples").glob("*.py")}
EXAMPLES -= {ROOT / "examples/sb3_curves.py"}  # tests/peers/test_sb3.py runs it, where Stable-Baselines3 is installed


@pytest.mark.parametrize("example", sorted(EXAMPLES), ids=lambda path: path.stem)
def test_example_runs(forked, example, tmp_path):
    forked.run(example, "--tiny", cwd=tmp_path)


MACHINE = dict.fromkeys(("processor", "cores", "system", "file_system", "python", "numpy"), "x") | {"load": 0.5}

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
    shutil.copytree(ROOT / "docs/performance", tmp_path / "docs/performance")
    (tmp_path / "docs/assets").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    publish(tmp_path / "results", tmp_path)
    for page in (ROOT / "docs/performance").glob("*.md"):
        places = page.read_text().count("<!-- benchmark: ")
        told = (tmp_path / "docs/performance" / page.name).read_text()
        assert told.count("<!-- benchmark: ") == told.count("<!-- end -->") == places
        assert not places or told != page.read_text()
    plots = {path.name for path in (tmp_path / "docs/assets").glob("*.svg")}
    assert plots == {f"{name}.svg" for name in PLOTS}
    told, readme = summary_of(tmp_path / "results"), (ROOT / "README.md").read_text()
    assert len(told.splitlines()) == 2 + 11
    assert (tmp_path / "README.md").read_text() == put_in(readme, told)
    assert put_in(put_in(readme, told), "| none |") == put_in(readme, "| none |")


PAGE = """# Rollouts

<!-- benchmark: torn
-->
kept
<!-- end -->

<!-- benchmark: rollout
old.*
new
-->
replaced
<!-- end -->

After.
"""


@pytest.mark.parametrize("titles", [["new one", "older", "other"], ["new one", "other"]])
def test_a_page_keeps_what_was_not_measured(tmp_path, titles, capsys):
    """A place is filled in the order that it names, and stays as it is if a table is missing."""
    (tmp_path / "rollout.json").write_text(
        json.dumps({"machine": MACHINE, "tables": [{"title": title} for title in titles]})
    )
    page = put_tables(tmp_path, PAGE)
    assert page.startswith("# Rollouts\n\n<!-- benchmark: torn\n-->\nkept\n<!-- end -->\n")
    assert page.endswith("<!-- end -->\n\nAfter.\n")
    if "older" in titles:
        assert re.findall(r"\*\*(.*)\*\*", page) == ["older", "new one"]
        assert "replaced" not in page
    else:
        assert page == PAGE
        assert "no table begins with 'old.*'" in capsys.readouterr().err


def test_a_table_names_what_is_faster_in_a_column():
    table = Table("draws", {name: dict.fromkeys((*QUANTILES, "calls"), 1.0) for name in "abc"})
    table.faster("b", "a", at_least=2)
    table.faster("b", "c")
    table.ratio("c", "a", at_most=3)
    told = table.markdown()
    assert "| b: times as fast |" in told
    assert "| a | 1.00 s | 1.00 s | 1.00 s | 1 (at least 2: MISSED) |" in told
    assert "| c / a, median | 1 (at most 3: met) |" in told
