"""Print text without control characters or markup, tables, JSON, and progress.

    name of a file, value of an episode, message of an error -> clean -> output

Directories come from anywhere, and with them names, dtypes and episode data: an escape code in one must not move
the cursor, and `[red]` is five characters.

Invariants: all output passes `clean`, or is JSON in ASCII; Rich never receives markup. Output that is not a
terminal is not wrapped, cut or coloured.
Not here: the contents.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "bar",
    "clean",
    "console",
    "count",
    "is_watched",
    "nbytes",
    "percent",
    "plain",
    "say",
    "show",
    "show_json",
    "show_table",
    "value_text",
]


_WIDE = 100_000
"""Columns of an output that is not a terminal: nothing is wrapped."""

_MOST_VALUES = 64
"""Values of an array that are spelled out."""


def clean(text: object) -> str:
    r"""Return a text in one line with all invisible and control characters escaped.

    Example:
        >>> print(clean("a\x1b[31m\nb"))
        a\x1b[31m\nb
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def say(line: object) -> None:
    """Print a line to stderr."""
    print(clean(line), file=sys.stderr)


def show(line: object = "") -> None:
    """Print a line to stdout."""
    print(clean(line))


def show_json(value: Any) -> None:
    """Print a value as JSON, in ASCII: control characters are escaped."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def show_table(header: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> None:
    """Print a table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    target = console()
    table = Table(box=box.SIMPLE_HEAD if target.is_terminal else None, pad_edge=False)
    for name in header:
        side = "right" if name in right.split() else "left"
        table.add_column(Text(clean(name)), justify=side, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    if target.is_terminal:
        target.print(table)
        return
    with target.capture() as captured:
        target.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def console() -> Console:
    """Return Rich's console on stdout, which takes no markup."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    return Console(markup=False, highlight=False, emoji=False, width=width)


# -- values ---------------------------------------------------------------------------------------


def count(number: int, noun: str = "") -> str:
    """Return a number, with a noun in its number.

    Example:
        >>> count(1, "episode"), count(12_345, "episode")
        ('1 episode', '12,345 episodes')
    """
    return f"{number:,} {noun if number == 1 else noun + 's'}" if noun else f"{number:,}"


def nbytes(number: int) -> str:
    """Return bytes for people.

    Example:
        >>> nbytes(0), nbytes(4096), nbytes(123_456_789)
        ('0 B', '4.1 kB', '123.5 MB')
    """
    size = float(number)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:,.1f} {unit}"


def percent(part: float, whole: float) -> str:
    """Return a share.

    Example:
        >>> percent(1, 3), percent(0, 0)
        ('33.3 %', '0.0 %')
    """
    return f"{100 * part / whole if whole else 0:.1f} %"


def value_text(value: Any) -> str:
    """Return a value of an episode for a table: short, and without its type."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    found = plain(value)
    return found if isinstance(found, str) else json.dumps(found)


def plain(value: Any) -> Any:
    """Return a value as JSON has it; a large array by its shape, NaN and infinity as None."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        if value.size > _MOST_VALUES:
            return {"dtype": str(value.dtype), "shape": list(value.shape)}
        return plain(value.tolist()) if value.dtype.kind not in "mM" else str(value)
    if isinstance(value, Iterable):
        return [plain(part) for part in value]
    return str(value)


_AFTER_S = 1.0


def is_watched() -> bool:
    """Return whether a progress bar is visible."""
    return sys.stderr.isatty()


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Lend a function of `(done, of)` episodes that draws the bar; None if it is not visible."""
    if not is_watched():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=what, unit="episode", delay=_AFTER_S, leave=False) as drawn:

        def progress(done: int, of: int) -> None:
            drawn.total = of
            drawn.update(done - drawn.n)

        yield progress
