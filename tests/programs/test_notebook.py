"""The notebook runs, cell by cell, and is stored without outputs."""

import json

import pytest

from tests import ROOT

PAGE = ROOT / "docs/tutorials/notebook.ipynb"


def run_notebook(forked, notebook, folder):
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] or cell["execution_count"] for cell in cells] == [None] * len(cells), "strip the outputs"
    (folder / "cells.py").write_text("\n".join("".join(cell["source"]) for cell in cells))
    forked.run("cells.py", cwd=folder, warn=["error", "ignore:This process:DeprecationWarning"])


def test_notebook_runs(forked, tmp_path):
    run_notebook(forked, json.loads(PAGE.read_text()), tmp_path)


@pytest.mark.parametrize(
    ("planted", "message"), [({"source": ["1 / 0"]}, "ZeroDivisionError"), ({"execution_count": 3}, "strip")]
)
def test_control(forked, tmp_path, planted, message):
    cell = {"cell_type": "code", "source": [], "outputs": [], "execution_count": None}
    with pytest.raises(AssertionError, match=message):
        run_notebook(forked, {"cells": [cell | planted]}, tmp_path)
