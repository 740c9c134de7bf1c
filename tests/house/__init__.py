"""The rules of the house, as tests: each runs the real tool, and must catch a planted fault."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests import ROOT

PYTHON = sys.executable


def run(*command: object, cwd: Path = ROOT, **env: str) -> str:
    """Run a command to its end and return what it printed; a failure shows the same."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{shlex.join(words)} gave {done.returncode}\n{done.stdout}"
    return done.stdout
