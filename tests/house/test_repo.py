import re
import subprocess
import tomllib

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


def test_the_formatter_is_never_told_to_skip_code():
    told = re.compile(r"# fmt: " + "(?:skip|off)")
    assert [path for path in files() if path.suffix == ".py" and told.search(path.read_text("utf-8"))] == []


def test_nothing_refers_to_what_a_clone_does_not_have():
    texts = {path: path.read_bytes().decode(errors="ignore") for path in files()}
    assert [(p, found[0]) for p, text in texts.items() if (found := ELSEWHERE.search(text))] == []


@pytest.mark.parametrize("text", ["see /" + "home/me/x", "as ../share" + "d/x says", "spec" + "/x.md", "seed" + " 000"])
def test_control(text):
    assert ELSEWHERE.search(text)


def test_readme_has_two_commands():
    job, test = COMMAND.findall((ROOT / "README.md").read_text())
    assert job.endswith("examples/main_job.py")
    suite = ".venv/bin/python -m pytest -n auto"
    assert test.endswith(f" && {suite} && {suite} -m slow && {suite} tests/programs")
    for tool in ("ruff check .", "ruff format --check .", "mypy", "lint-imports"):
        assert f" && .venv/bin/{tool} && " in test


def test_the_package_says_its_version():
    with open(ROOT / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert f'__version__ = "{version}"\n' in (ROOT / "src/ringmap/__init__.py").read_text()


def unlisted(docs):
    """Return the pages below a folder that no index page above them links to."""
    found = []
    for page in docs.rglob("*/*.md"):
        index = next(i for i in (p / "index.md" for p in page.parents) if i.is_file())
        if page != index and f"]({page.relative_to(index.parent)})" not in index.read_text():
            found.append(str(page.relative_to(docs)))
    return sorted(found)


def test_every_page_is_in_an_index():
    assert unlisted(ROOT / "docs") == []


def test_unlisted_control(tmp_path):
    for name in ("a/index.md", "a/one.md", "a/two.md", "a/b/three.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("[1](one.md), two.md, [3](b/other.md)")
    (tmp_path / "index.md").write_text("")
    assert unlisted(tmp_path) == ["a/b/three.md", "a/two.md"]


LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_outside_the_site_lead_somewhere(name):
    """The site's own links are checked where it is built."""
    assert [to for to in LINK.findall((ROOT / name).read_text()) if not (ROOT / to).exists()] == []


def test_a_link_that_leads_nowhere_is_seen():
    found = LINK.findall("[a](docs/no.md#x) [b](https://x.org/y.md) [c](docs/index.md)")
    assert found == ["docs/no.md", "docs/index.md"]
    assert not (ROOT / found[0]).exists()


@pytest.mark.parametrize(("versions", "suite", "status"), [(0, 0, 0), (3, 0, 3), (0, 7, 7), (3, 7, 7)])
def test_ci_runs_the_versions_and_the_command_of_the_readme(tmp_path, versions, suite, status):
    """Where any fails it fails, and what the command of the README prints comes last."""
    stub = tmp_path / "python3"
    stub.write_text(
        f'#!/bin/sh\necho "stub $@"\n[ "$1" = .ci/versions ] && exit {versions}\n'
        f'mkdir -p "$3/bin"\nprintf "#!/bin/sh\\necho closing line\\n" > "$3/bin/pip"\n'
        f'cd "$3/bin"; for name in python ruff mypy lint-imports; do cp pip "$name"; done\n'
        f"chmod +x *\nexit {suite}\n"
    )
    stub.chmod(0o755)
    done = subprocess.run([ROOT / ".ci/run"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True)
    _, test = COMMAND.findall((ROOT / "README.md").read_text())
    lines = done.stdout.splitlines()
    assert done.returncode == status
    assert lines[0].startswith("+ python3 -m venv .exits ") and lines[0].endswith(
        " tests/unit/buffers/test_torchrl_storage.py"
    )
    assert lines[1].startswith("stub -m venv /")
    at = lines.index("+ python3 .ci/versions")
    assert lines[at + 1 : at + 3] == ["stub .ci/versions", f"+ {test}"]
    assert lines[lines.index(f"+ {test}") + 1].startswith("stub -m venv /")
    assert suite or lines[-1] == "closing line"


def test_the_newest_releases_are_those_of_every_dependency():
    with open(ROOT / "pyproject.toml", "rb") as file:
        stated = {re.split("[<>=]", one)[0] for one in tomllib.load(file)["project"]["dependencies"]}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints-newest.txt").read_text().splitlines()}
    assert stated <= pinned
