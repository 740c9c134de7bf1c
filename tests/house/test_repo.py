import re
import subprocess

import pytest

from tests import ROOT
from tests.house import run

COMMAND = re.compile(r"^python3 -m venv \.venv && .*$", re.MULTILINE)
ELSEWHERE = re.compile(
    r"(?<![\w.:/])/(?:home|root|[w]ork|Users)/\w"  # a path of somebody's machine
    r"|(?:\.\./|\b)[s]hared/\w"  # a folder beside the checkout
    r"|\bspec/[\w-]+\.md|\bseed 0\d\d\b"
)


def files():
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = run(*git, "--cached", "--others", "--exclude-standard").split("\0")
    return [path for name in listed if name and (path := ROOT / name).is_file()]


def test_files_are_small():
    assert [path for path in files() if path.stat().st_size > 1_000_000] == []


def test_nothing_refers_to_what_a_clone_does_not_have():
    texts = {path: path.read_bytes().decode(errors="ignore") for path in files()}
    assert [(p, found[0]) for p, text in texts.items() if (found := ELSEWHERE.search(text))] == []


@pytest.mark.parametrize(
    "text", ["see /" + "home/me/x", "as ../share" + "d/x says", "spec" + "/x.md", "seed" + " 000"]
)
def test_control(text):
    assert ELSEWHERE.search(text)


def test_readme_has_two_commands():
    job, test = COMMAND.findall((ROOT / "README.md").read_text())
    assert job.endswith("examples/main_job.py")
    assert test.endswith("-m pytest -n auto")


def test_ci_runs_the_command_of_the_readme(tmp_path):
    stub = tmp_path / "python3"
    stub.write_text('#!/bin/sh\necho "stub $@"\nexit 7\n')
    stub.chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci/run"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    _, test = COMMAND.findall((ROOT / "README.md").read_text())
    assert done.returncode == 7
    assert done.stdout.startswith(f"+ {test}\nstub -m venv /")
