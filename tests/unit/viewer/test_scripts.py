"""The pages' scripts without a browser: in Node, over as much of a document as they need (scripts/document.mjs)."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import ringmap.viewer

STATIC = Path(ringmap.viewer.__file__).parent / "static"
SCRIPTS = Path(__file__).parent / "scripts"


def node():
    """Return the path of Node: the system's, or the one that comes with Playwright."""
    if found := shutil.which("node"):
        return found
    driver = pytest.importorskip("playwright._impl._driver", reason="neither Node nor Playwright is installed")
    return driver.compute_driver_executable()[0]


def run(script, static=STATIC):
    command = [node(), str(SCRIPTS / script), f"{static.as_uri()}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def pages(tmp_path):
    """A copy of the scripts that Node takes for modules, whatever its release."""
    shutil.copytree(STATIC, tmp_path / "static")
    (tmp_path / "static/package.json").write_text('{"type": "module"}')
    return tmp_path / "static"


def test_a_table_that_is_scrolled_through_and_back(pages):
    """No row is missing after more rows were seen than are held, after a request that failed, after an eviction."""
    seen = run("table.mjs", pages)
    assert seen["tops"] == list(range(0, 6000, 50))
    assert seen["back"] == [5000, 3000, 1500, 100, 0]
    assert seen["again"] == 8999
    assert seen["shifted"] == 107


def test_control_a_block_that_is_dropped_stays_asked_for(pages):
    path = pages / "blocks.js"
    text = path.read_text()
    assert text.count("      this.asked.delete(old);\n") == 1
    path.write_text(text.replace("      this.asked.delete(old);\n", ""))
    assert run("table.mjs", pages)["back"][-1] != 0
