"""Draws batches ahead: a thread gathers the next ones while the model trains on this one.

    thread: sample -> tensors -> page-locked   | queue of `prefetch` |   __next__: device

Invariants: batches come in the order in which they were drawn; an error is raised in place of its batch;
after `close` no thread is left.
Not here: what is drawn (sampled.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ringmap.arguments import positive
from ringmap.buffers.batch import Batch
from ringmap.buffers.lookup import Clips
from ringmap.clips.cut import Cut
from ringmap.clips.draws import Drawn
from ringmap.errors import InputError, RoleError
from ringmap.extras import require

__all__ = ["Batches", "drawn_ahead"]

Sample = Callable[[int], Batch[Any]]
Ahead = Callable[[int, int | None], Iterator[Batch[Any]]]
Item = tuple[Batch[Any] | None, BaseException | None]
_LOOK_S = 0.1


def drawn_ahead(clips: Clips, draw: Callable[[], Drawn], cut: Cut, count: int | None) -> Iterator[Batch[Any]]:
    """Yield `count` batches; draw each, and ask the disk for it, before the last one is read.

    Args:
        clips: reads.
        draw: returns the clips of a batch.
        cut: what an item holds.
        count: number of batches; None: without end.
    """
    positions, crossing, weigh = draw()
    clips.want(positions, cut)
    for number in itertools.count(1):
        failed: BaseException | None = None
        try:
            if number != count:
                following = draw()
                clips.want(following.positions, cut)
        except BaseException as error:  # it is the next one's, not this one's
            failed = error
        drawn, numbers = positions.copy(), clips.numbering(cut)
        columns = clips.read(positions, cut, asked=True, crossing=crossing, numbers=numbers)
        numbered = None if numbers is None else numbers.table()
        yield Batch(columns, positions, weigh and weigh(positions), drawn, numbered)
        if failed is not None:
            raise failed
        positions, crossing, weigh = following


class Batches(Iterator[Batch[Any]]):
    """An endless, closable iterator over `buffer.sample`, made by `buffer.batches()`.

    Draws are ahead of the loop by up to `prefetch` + 1 batches, and so is the sampling state.
    Close it, or use it in a `with` block, to end its thread. The thread also ends when the iterator is no longer
    referenced.

    `sample` draws one batch; `ahead` draws many, and asks the disk for each before the last one is read. `wait` is
    called before each is handed out; the first call comes before anything is drawn. `hand_out` is called with each
    batch that is.
    """

    def __init__(
        self,
        sample: Sample,
        ahead: Ahead,
        batch_size: int,
        steps: int | None,
        prefetch: int,
        to: str,
        device: Any,
        pin_memory: bool,
        where: str = "ReplayBuffer.batches",
        wait: Callable[[], None] | None = None,
        hand_out: Callable[[Batch[Any]], None] | None = None,
    ) -> None:
        batch_size = positive(where, "batch_size", batch_size)
        if steps is not None and steps < 0:
            raise InputError(f"{where}: steps must not be negative, got {steps}")
        if prefetch < 0:
            raise InputError(f"{where}: prefetch must not be negative, got {prefetch}")
        if to not in ("numpy", "torch"):
            raise InputError(f"{where}: to must be 'numpy' or 'torch', got {to!r}")
        if to == "numpy" and (device is not None or pin_memory):
            raise InputError(f"{where}: device and pin_memory are for tensors; pass to='torch'")
        if to == "torch":
            require("torch", where, instead="pass to='numpy'")
        drawn = ahead(batch_size, steps) if prefetch else None
        draw = partial(sample, batch_size) if drawn is None else drawn.__next__
        self._make = _maker(draw, to == "torch", pin_memory)
        self._device = device
        self._left = steps
        self._shelf = _Shelf(prefetch)
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._wait_first, self._hand_out = wait, hand_out
        self._starts_later = bool(prefetch) and steps != 0
        if wait is None:
            self._start()

    def _start(self) -> None:
        """Start the thread, once."""
        if self._starts_later:
            self._starts_later = False
            self._thread = threading.Thread(
                target=_fill,
                args=(self._make, self._shelf, self._left),
                daemon=True,
                name="ringmap-batches",
            )
            try:
                self._thread.start()
            except RuntimeError:  # no thread can start here: batches are gathered on request
                self._thread = None

    def __next__(self) -> Batch[Any]:
        if self._shelf.closed or self._left == 0:
            self.close()
            raise StopIteration
        if self._wait_first is not None:
            self._wait_first()
            self._start()
        if self._thread is None:
            batch: Batch[Any] | None = self._make()
        else:
            batch, error = self._wait()
            if error is not None:
                self.close()
                raise error
        assert batch is not None
        if self._hand_out is not None:
            self._hand_out(batch)
        if self._left is not None:
            self._left -= 1
        if self._device is not None:  # here, on the stream of the caller's computation
            device = self._device
            return batch.mapped(lambda v: v.to(device, non_blocking=True) if hasattr(v, "to") else v)
        return batch

    def _wait(self) -> Item:
        if self._pid != os.getpid():
            raise RoleError(
                f"ReplayBuffer.batches: this iterator belongs to process {self._pid}, and its thread is there; "
                "call batches() in this one"
            )
        while True:
            try:
                return self._shelf.take()
            except queue.Empty:
                if self._shelf.closed:  # by another thread, meanwhile
                    return None, StopIteration()

    def close(self) -> None:
        """End the thread. Drop what it had drawn."""
        self._shelf.close()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._shelf.drop()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_shelf"):
            self._shelf.close()


class _Shelf:
    """The batches drawn ahead: up to `size`, put by one thread, taken by another.

    Made of `SimpleQueue`s, which are C code: Ctrl-C in the middle of a `queue.Queue`, an `Event` or a `Condition`,
    which are Python code, leaves its lock taken, and both threads wait forever.
    """

    def __init__(self, size: int) -> None:
        self.closed = False
        self._size = size
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._taken: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes a thread

    def take(self) -> Item:
        """Return the oldest batch; raise `queue.Empty` after a while without one."""
        item = self._items.get(timeout=_LOOK_S)
        self._taken.put(None)
        return item

    def put(self, item: Item) -> None:
        """Wait for room."""
        while not self.closed:
            if self._items.qsize() < self._size:
                self._items.put(item)
                with contextlib.suppress(queue.Empty):  # or tokens that no thread waits for pile up
                    self._taken.get_nowait()
                return
            with contextlib.suppress(queue.Empty):
                self._taken.get(timeout=_LOOK_S)

    def close(self) -> None:
        """Stop all waits."""
        self.closed = True
        self._taken.put(None)

    def drop(self) -> None:
        """Drop the batches that were not taken."""
        self._items = queue.SimpleQueue()


def _maker(draw: Callable[[], Batch[Any]], tensors: bool, pinned: bool) -> Callable[[], Batch[Any]]:
    def make() -> Batch[Any]:
        batch = draw()
        if tensors:
            from ringmap.datasets.worker_slots import as_tensor

            batch = batch.mapped(as_tensor)
            if pinned:
                batch = batch.mapped(lambda v: v.pin_memory() if hasattr(v, "pin_memory") else v)
        return batch

    return make


def _fill(make: Callable[[], Batch[Any]], shelf: _Shelf, steps: int | None) -> None:
    left = steps
    while not shelf.closed and left != 0:
        try:
            item: Item = (make(), None)
        except BaseException as error:
            item = None, error
        shelf.put(item)
        if item[1] is not None:
            return
        left = None if left is None else left - 1
