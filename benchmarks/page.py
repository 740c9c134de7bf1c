"""The results of a run as one page of the documentation.

python -m benchmarks.page benchmarks/results docs/reference/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.__main__ import NAMES
from benchmarks.table import Table

__all__ = ["main", "page_of"]

_HEAD = """# Benchmarks

Every table of `python -m benchmarks`, in one sitting; where we set ourselves a bar, it says whether it was met.

```sh
pip install -c constraints.txt -e ".[bench,cli,mujoco,pusht,video]" "minari[create]"
pip install --no-deps stable-worldmodel==0.1.1 sheeprl==0.8.4
python -m benchmarks                                                        # about half an hour
python -m benchmarks.page benchmarks/results docs/reference/benchmarks.md   # this page
python -m benchmarks.summary benchmarks/results                             # the table of README
```

Ours and theirs take turns over the same data, and what they return is compared before anything is timed. Medians are judged; the tails say how steady the machine was.
"""


def page_of(results: Path) -> str:
    """Return the page for a folder that `python -m benchmarks --out` filled."""
    found = {n: json.loads(p.read_text()) for n in NAMES if (p := results / f"{n}.json").exists()}
    if not found:
        raise SystemExit(f"{results}: no results there; run python -m benchmarks --out {results}")
    last = max((results / f"{name}.json").stat().st_mtime for name in found)
    parts = [
        _HEAD,
        _machines([kept["machine"] for kept in found.values()], date.fromtimestamp(last)),
    ]
    for name, kept in found.items():
        about = (import_module(f"benchmarks.{name}").__doc__ or "").partition("\n\n")[0]
        parts.append(f"## {name}\n\n{about.strip()}")
        parts += [Table(**table).markdown() for table in kept["tables"]]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _machines(told: list[dict[str, Any]], day: date) -> str:
    first = told[0]
    loads = [machine["load"] for machine in told]
    return (
        f"{day:%d %B %Y}. {first['processor']}, {first['cores']} cores; {first['system']}; {first['file_system']}; "
        f"Python {first['python']}, NumPy {first['numpy']}. Load average when each began, what ran "
        f"before it included: {min(loads):.1f} to {max(loads):.1f}."
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    asked = parser.parse_args()
    asked.page.write_text(page_of(asked.results))


if __name__ == "__main__":
    main()
