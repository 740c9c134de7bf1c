"""Console blocks of a page: `$ command`, then what it prints. Each is run, and its output compared.

    $ ringmap check runs/demo
    runs/demo: sound

What differs from run to run (sizes on disk, rates, processes, times, uuids) is compared by its kind alone. Where that
does not do, `...` in a line stands for any text, and as a line for any lines.

`python -m tests.programs.console docs/reference/cli.md` writes what is printed today into a page.
"""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

VARIES = [
    (r"\b[0-9a-f]{32}\b", "<uuid>"),
    (r"process \d+ on \S+ since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", "<process>"),
    (r"\b\d[\d,]*(\.\d)? (B|kB|MB|GB|TB)\b", "<size>"),
    (r"\b\d[\d,]* (step|row)s/s", "<rate>"),
]
NOTED = "CONSOLE_NOTED"
LISTENER = "RINGMAP_TESTS_LISTENER"
ASK = """\
import json, os, socket, sys
asking = socket.socket(socket.AF_UNIX)
asking.connect(sys.argv[1])
job = {"module": "ringmap", "argv": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}
socket.send_fds(asking, [json.dumps(job).encode()], [0, 1, 2])
sys.exit(int(asking.recv(9)))
"""


def commands(body):
    """Return the commands of a block, each with what is printed below it."""
    lines = body.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
    assert starts and starts[0] == 0, f"a console block begins with `$ command`: {lines[:1]}"
    found = [(lines[i][2:], lines[i + 1 : j]) for i, j in pairwise([*starts, len(lines)])]
    return [(command, "\n".join(printed).rstrip()) for command, printed in found]


def normal(text):
    """Return a text without what differs from run to run."""
    for pattern, kind in VARIES:
        text = re.sub(pattern, kind, text)
    return text


def matches(expected, got):
    """Tell whether an output is as a page says."""
    lines = [
        "(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in normal(expected).splitlines()
    ]
    return re.fullmatch("".join(lines), normal(got) + "\n" * bool(got)) is not None


def printed_by(command, folder="."):
    """Run a command as a user would; return what it prints, without blanks at the ends of lines and where it ran."""
    bin = Path(folder, ".bin").absolute()
    bin.mkdir(exist_ok=True)
    way = "-m ringmap"
    if LISTENER in os.environ:  # see forked.py
        (bin / "ask.py").write_text(ASK)
        way = f'-I -S "{bin}/ask.py" "{os.environ[LISTENER]}"'
    (bin / "ringmap").write_text(f'#!/bin/sh\nexec "{sys.executable}" {way} "$@"\n')
    (bin / "ringmap").chmod(0o755)
    env = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}", "COLUMNS": "80", "TERM": "dumb"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    text = done.stdout.replace(f"{Path(folder).absolute()}/", ".../")
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def run(body):
    """Run a block, and raise if a command does not print what stands below it."""
    for command, expected in commands(body):
        got = printed_by(command)
        if matches(expected, got):
            continue
        if NOTED not in os.environ:
            raise AssertionError(f"$ {command}\n{got}\n\nbut the page says:\n{expected}")
        with open(os.environ[NOTED], "a") as file:
            file.write(json.dumps([command, expected, got]) + "\n")


def rewrite(page, folder):
    """Write what is printed today into a page; what matches stays."""
    from tests.programs.forked import Forked
    from tests.programs.test_docs_blocks import FENCE, run_page

    noted = Path(folder, "noted")
    noted.write_text("")
    os.environ[NOTED] = str(noted)
    with Forked() as forked:
        run_page(forked, page.read_text(), Path(folder))
    found = [json.loads(line) for line in noted.read_text().splitlines()]

    def renewed(fence):
        text, at = fence[0], 0
        while found and fence["info"].startswith("console"):
            command, expected, got = found[0]
            before = "".join(f"{line}\n" for line in ["$ " + command, *expected.splitlines()])
            then = "".join(f"{line}\n" for line in ["$ " + command, *got.splitlines()])
            at = text.find(before, at)
            if at < 0:
                break
            text = text[:at] + then + text[at + len(before) :]
            at += len(then)
            found.pop(0)
        return text

    page.write_text(FENCE.sub(renewed, page.read_text()))


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as place:
            rewrite(Path(name), place)
