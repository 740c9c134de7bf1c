"""Opening what a stranger made: it is refused by name, or opened without harm, in little time and memory."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import ROOT
from tests.disks import ram_folder
from tests.faults.hostile.makers import CASES, FORMATS
from tests.faults.hostile.sound import KINDS, NEEDS

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="pipes, limits of memory and eyes on files are Linux's",
)
pytestmark = [linux, pytest.mark.slow]

HERE = Path(__file__).parent
PAGE = ROOT / "docs/explanation/untrusted-data.md"

MOST_NBYTES = 128 << 20
SECONDS = 5
MAY = ("repair", "repair, dry", "snapshot")
"""A repair mends what it can, and a snapshot copies chunks and data as they are: both without looking into them."""

GROUPS = [
    [k for k in KINDS if k not in (*FORMATS, "rollout")],
    [k for k in KINDS if k in (*FORMATS, "rollout")],
]


def available(kind):
    return kind not in NEEDS or importlib.util.find_spec(NEEDS[kind]) is not None


def run(kinds, home, **env):
    """Return what a child says of these kinds: case -> surface -> result."""
    found = {}
    done = subprocess.run(
        [sys.executable, HERE / "child.py", *kinds],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "TMPDIR": str(home), **env},
    )
    for line in done.stdout.splitlines():
        result = json.loads(line)
        found.setdefault(result["case"], {})[result["surface"]] = result
    assert done.returncode == 0, done.stderr[-2000:]
    return found


def met():
    """Meet every case in a folder in RAM, where there is one: a thousand syncs take a minute elsewhere."""
    groups = [[kind for kind in group if available(kind)] for group in GROUPS]
    with ram_folder() as home, ThreadPoolExecutor(len(groups)) as pool:
        parts = list(pool.map(lambda group: run(group, home), groups))
    return {name: surfaces for part in parts for name, surfaces in part.items()}


@pytest.fixture(scope="module")
def results(made_once):
    return made_once("hostile", met)


def faults_of(result, case=None):
    """Return what a surface did that it must not, whatever it was given."""
    found = []
    if result["kind"] in ("hung", "raw"):
        found.append(f"{result['kind']}: {result['told']}")
    if result["changed"]:
        found.append("what lies outside was changed")
    if result["seen"] and not (case and case.named):
        found.append(f"what lies outside was looked at: {result['seen']}")
    if result["leaked"] and not (case and case.named):
        found.append("what lies outside was shown")
    if result["seconds"] > SECONDS:
        found.append(f"took {result['seconds']} s")
    if result["nbytes"] > MOST_NBYTES:
        found.append(f"took {result['nbytes']} bytes of memory")
    return found


def faults_in(case, surfaces):
    """Return what is wrong with how a case was met."""
    found = [f"{name}: {fault}" for name, r in surfaces.items() for fault in faults_of(r, case)]
    for name, result in surfaces.items():
        if case.opens or name in MAY:
            continue
        if result["kind"] == "opened" or not result["told"]:
            found.append(f"{name}: was taken for sound")
        elif case.says not in result["told"] and "No format detected" not in result["told"]:
            found.append(f"{name}: does not say {case.says!r}: {result['told']}")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sound_is_opened(results, kind):
    if not available(kind):
        pytest.skip(f"{NEEDS[kind]} is not installed")
    for name, result in results[f"{kind}: sound"].items():
        assert faults_of(result) == []
        assert result["kind"] == ("found" if name == "check" else "opened"), result
        assert result["told"] == ""


@pytest.mark.parametrize("name", CASES)
def test_hostile(results, name):
    case = CASES[name]
    if not available(case.kind):
        pytest.skip(f"{NEEDS[case.kind]} is not installed")
    assert faults_in(case, results[name]) == []


def test_there_are_many_cases():
    assert len(CASES) >= 50
    assert {case.kind for case in CASES.values()} == set(KINDS)


def test_the_page_counts_them():
    assert re.search(rf"\b{len(CASES)} cases\b", PAGE.read_text())


if __name__ == "__main__":
    print("| what | what a stranger did to it |\n| --- | --- |")
    for case in CASES.values():
        print(f"| {case.kind} | {case.name} |")
