import shutil

import pytest

from tests import ROOT
from tests.house import PYTHON, run


def build(root, site):
    run(PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", site, cwd=root)


def test_docs_build_without_a_warning(tmp_path):
    build(ROOT, tmp_path)


def test_control(tmp_path):
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/hooks.py", tmp_path / "docs")
    (tmp_path / "docs/index.md").write_text("[gone](gone.md)\n")
    with pytest.raises(AssertionError, match=r"'gone\.md', but the target is not found"):
        build(tmp_path, tmp_path / "site")
