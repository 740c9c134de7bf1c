"""The results of a run as one page of the documentation; what was not run stays as the page has it.

python -m benchmarks.page benchmarks/results docs/reference/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import re
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.__main__ import NAMES
from benchmarks.table import Table

__all__ = ["main", "page_of"]

_HEAD = """# Benchmarks

Every table of `python -m benchmarks`; where we set ourselves a bar, it says whether it was met.

```sh
pip install -c constraints.txt -e ".[bench,cli,lance,mujoco,pusht,video]" "minari[create]"
pip install -c constraints.txt -r benchmarks/peers.txt     # other libraries
pip install --no-deps -r benchmarks/peers-alone.txt        # and those that ask for much that they do without here
export RINGMAP_BENCH_REVERB=.venv-reverb/bin/python         # if there is one: benchmarks/reverb_server.py
python -m benchmarks --quick                               # a ratio for each headline, in three minutes
python -m benchmarks --publish                             # all of it: this page, and the table of README
```

Ours and theirs take turns over the same data, and what they return is compared before anything is timed. **Medians are compared, here and in README**; p90 and p99 say how steady the machine was. In a table of rivals the rows are sorted, so what we lose comes first. Each rival has a setting from its documentation or from a few tries, which the tables name; none was swept, so a better one may exist.

Not here: LeRobot (asks for torch < 2.11, which this torch is not; its loader is restated in [windows](#windows)); `embodied` and `dreamerv3` (their source packages do not build; the replay's algorithm is restated in [sampling](#sampling)); TorchRL's priorities (its compiled trees are for another torch); MosaicML streaming (litdata stands for it).
"""


def page_of(results: Path, before: str = "") -> str:
    """Return the page for a folder that `python -m benchmarks --out` filled.

    Args:
        results: the folder.
        before: the page so far, from which the sections are taken that have no result.
    """
    found = {n: json.loads(p.read_text()) for n in NAMES if (p := results / f"{n}.json").exists()}
    if not found:
        raise SystemExit(f"{results}: no results there; run python -m benchmarks --out {results}")
    sections = _sections(before)
    for name, kept in found.items():
        about = (import_module(f"benchmarks.{name}").__doc__ or "").partition("\n\n")[0]
        tables = [Table(**table).markdown() for table in kept["tables"]]
        day = date.fromtimestamp((results / f"{name}.json").stat().st_mtime)
        sections[name] = "\n\n".join([about.strip(), _machine(kept["machine"], day), *tables])
    told = [f"## {name}\n\n{sections[name].strip()}" for name in NAMES if name in sections]
    return "\n\n".join([_HEAD.strip(), *told]) + "\n"


def _sections(page: str) -> dict[str, str]:
    """Return the parts of a page by their headings."""
    _, *parts = re.split(r"^## (\w+)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _machine(told: dict[str, Any], day: date) -> str:
    load = f"{told['load']:.1f}" + (f" to {told['load_after']:.1f}" if "load_after" in told else "")
    return (
        f"*{day:%d %B %Y}. {told['processor']}, {told['cores']} cores; {told['system']}; {told['file_system']}; "
        f"Python {told['python']}, NumPy {told['numpy']}; load average {load}.*"
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    asked = parser.parse_args()
    before = asked.page.read_text() if asked.page.exists() else ""
    asked.page.write_text(page_of(asked.results, before))


if __name__ == "__main__":
    main()
