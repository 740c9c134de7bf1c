"""A progress bar on stderr, for people: nothing if stderr is not a terminal, or in the first moments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bar", "is_watched"]

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
