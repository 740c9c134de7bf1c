"""The conformance suites on the pages of docs/ pass, with the classes that the pages make."""

import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.programs.test_docs_blocks import PAGES, script

SUITE = re.compile(r"^class \w+\(\w+Tests\):$", re.MULTILINE)
SUITES = {page: len(SUITE.findall((ROOT / page).read_text())) for page in PAGES}


def outcome_of(source, folder):
    """Run pytest on the Python of a page; return its exit status, and what it printed.

    A worker that is not forked imports the page, and so runs it, in a folder of its own.
    """
    apart = f"import os, tempfile; os.chdir(tempfile.mkdtemp(dir={str(folder)!r}))\n"
    (folder / "test_page.py").write_text(apart + source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "test_page.py"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("page", [page for page, count in SUITES.items() if count])
def test_suites_pass(page, tmp_path):
    status, said = outcome_of(script((ROOT / page).read_text()), tmp_path)
    assert status == 0, said


def test_control(tmp_path):
    """A sampler that counts steps, not clips, fails the suite of its page."""
    source = script((ROOT / "docs/how-to/choose-what-to-draw.md").read_text())
    planted = source.replace("ids % buffer.num_valid_ends(history_len)", "ids % buffer.num_steps_stored")
    assert planted != source
    status, said = outcome_of(planted, tmp_path)
    assert status == 1
    assert "test_returns_ids_of_clips" in said
