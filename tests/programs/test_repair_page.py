"""What the page on repair shows is what its blocks print."""

import re

from tests import ROOT
from tests.programs.test_docs_blocks import run_page

PAGE = (ROOT / "docs/how-to/inspect-and-repair.md").read_text()
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_output_is_real(forked, tmp_path):
    assert run_page(forked, PAGE, tmp_path) == "".join(SHOWN.findall(PAGE))
