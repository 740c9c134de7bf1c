"""Every Python and console block of the README and of docs/ runs: those of a page, in order, as one script."""

import re
import textwrap
from pathlib import Path

import pytest

from tests import ROOT
from tests.programs import console
from tests.programs.forked import Forked

FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks) *$",
    re.DOTALL | re.MULTILINE,
)
NO_RUN = re.compile(r"<!-- no-run: \w.* -->\s*\Z")
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]


def script(page: str) -> str:
    """Return the Python blocks of a page, and a call for each console block, on the lines where they stand in it."""
    lines = [""] * page.count("\n")
    for fence in FENCE.finditer(page):
        language = (fence["info"].split() or [""])[0]
        if NO_RUN.search(page[: fence.start()]):
            continue
        start = page.count("\n", 0, fence.start("body"))
        if language == "console":
            lines[start] = f"import page_console; page_console.run({textwrap.dedent(fence['body'])!r})"
            continue
        if "py" not in language:
            continue
        assert language == "python", f"```{language}: write ```python, so that it is run"
        body = textwrap.dedent(fence["body"]).splitlines()
        lines[start : start + len(body)] = body
    return "\n".join(lines)


def run_page(forked: Forked, page: str, folder) -> str:
    (folder / "page.py").write_text(script(page))
    (folder / "page_console.py").write_text(Path(console.__file__).read_text())
    warn = ["error", "ignore:This process:DeprecationWarning"]
    return forked.run("page.py", cwd=folder, warn=warn)


@pytest.mark.parametrize("page", [p for p in PAGES if script((ROOT / p).read_text()).strip()])
def test_blocks_run(forked, page, tmp_path):
    run_page(forked, (ROOT / page).read_text(), tmp_path)


PLANTED = """\
# A page

```python
x = 1
```

<!-- no-run: never ends -->
```python
while True: ...
```

- in a list

    ```python title="two.py"
    print("x is", x)
    ```

```sh
exit 1
```

```console
$ echo "one $((1 + 1))"; echo uuid 0123456789abcdef0123456789abcdef
one 2
uuid ffffffffffffffffffffffffffffffff
$ true
$ printf 'a\\nb\\nc 12 d\\n'
a
...
c ... d
```
"""


def test_blocks_share_names_and_skip_with_a_reason(forked, tmp_path):
    assert run_page(forked, PLANTED, tmp_path) == "x is 1\n"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("```python\nraise RuntimeError('planted')\n```\n", r'page.py", line 33'),
        ("```console\n$ echo 1\n2\n```\n", r"\$ echo 1\n1\n\nbut the page says:\n2"),
        ("```console\n$ echo 1\n```\n", r"\$ echo 1\n1\n\nbut the page says:"),
        ("```console\n$ true\n...\nx\n```\n", "but the page says"),
        ("```console\nls\n```\n", "begins with `\\$ command`"),
        ("```python\nimport warnings; warnings.warn('planted')\n```\n", "UserWarning: planted"),
        ("<!-- no-run: -->\n```python\nraise RuntimeError('planted')\n```\n", "planted"),
        ("```pycon\n>>> 1\n```\n", "write ```python"),
    ],
)
def test_control(forked, tmp_path, block, message):
    with pytest.raises(AssertionError, match=message):
        run_page(forked, PLANTED + block, tmp_path)
