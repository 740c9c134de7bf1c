"""Thread pools, where the system can start threads.

Not here: the work of the threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["mapped", "pool"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def pool(count: int, name: str) -> ThreadPoolExecutor | None:
    """Return a pool with `count` running threads, or None if so many can't start (a limit on processes).

    All start at once: a pool starts its threads as work comes, and a job whose thread can't start stays in its queue.
    """
    made, go = ThreadPoolExecutor(count, name), threading.Event()
    try:
        for _ in range(count):
            made.submit(go.wait)
    except RuntimeError:
        made.shutdown(wait=False, cancel_futures=True)
        return None
    finally:
        go.set()
    return made


def mapped(
    work: Callable[[Item], Result], items: Iterable[Item], count: int, name: str
) -> Iterator[Result]:
    """Yield `work(item)` for each item in order, done by `count` threads, or by this thread if none can start."""
    threads = pool(count, name)
    if threads is None:
        yield from map(work, items)
        return
    with threads:
        yield from threads.map(work, items)
