"""`ringmap.ray.ReplayBuffer`: the rings of all nodes, read as one buffer by a learner.

    counts      a 700   b 300   c away
    a batch     one multinomial, 256 = 180 + 76             ─► read(180) on a, read(76) on b
    the parts   come through Ray's object store             ─► one copy into memory that is used again, in random order

Invariants: a batch is whole; a part that fails is drawn again, from the nodes that are there; batches come in the order
in which they were asked for.
Not here: nodes and readers (readers.py).
"""

from __future__ import annotations

import logging
import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.arguments import count, positive
from ringmap.buffers.base import Buffer
from ringmap.buffers.batch import Batch
from ringmap.buffers.prefetch import Batches
from ringmap.buffers.rings import RingNumbers, apart, joined
from ringmap.buffers.sharded.buffer import Shard
from ringmap.clips.rings import groups
from ringmap.clips.samplers.prioritized import PrioritizedSampler, checked_priorities
from ringmap.clips.window import WindowSpec
from ringmap.errors import ClosedError, InputError, NoClipsError, RingmapError
from ringmap.ray.cluster import Layout, answer, ray_for
from ringmap.ray.memory import Memory
from ringmap.ray.reader import PLAIN, Changed, Part
from ringmap.ray.readers import Readers, Station, first_line
from ringmap.storage.columns.text import put

__all__ = ["NodeShards", "ReplayBuffer"]

log = logging.getLogger("ringmap")

Array = np.ndarray[Any, np.dtype[Any]]

_WHERE = "ringmap.ray.ReplayBuffer"
_PAUSE_S = 0.05
_MOST_UPDATES = 64


@dataclass(frozen=True, slots=True)
class NodeShards:
    """One node, as `ringmap.ray.ReplayBuffer.nodes` lists it.

    Args:
        name: of the node.
        host: its machine.
        clips: that can be drawn now, of the buffer's history.
        shards: its rings, as `ShardedReplayBuffer.shards` lists them.
        pid: of its reader; None while there is none.
        problem: why it is away; None: it is not.
    """

    name: str
    host: str
    clips: int
    shards: list[Shard]
    pid: int | None
    problem: str | None


@dataclass(slots=True)
class _Asked:
    """A part that was asked for. `size`: its clips."""

    station: Station
    size: int
    ref: Any


class ReplayBuffer(Buffer):
    """The rings of all nodes of a Ray cluster, read as one buffer. Read-only.

    On each node a reader runs: an actor that looks for rings, draws from them and hands its part of a batch to this
    process through Ray's object store. Rings and nodes that are added later join. While a node is away the others
    serve, and the log says so.

    Args:
        path: the directory, the same on each node. A node's rings are the children of `path/NODE`, and of `path`
            itself. With `{node}` or `{host}` in it: a template of the directory whose children are the rings.
        history_len: observations per clip; None: as the rings have stored.
        frameskip: stride between the observations of a clip; None: as the rings have stored.
        wait_s: how long to wait for the first ring, and for a node that is away while no other has clips.
        patience_s: how long a reader's answer may take before its node counts as away.
        threads: as for `ringmap.ReplayBuffer`, in each reader.
        sampler: a `PrioritizedSampler(kind="proportional")`, whose priorities then span the rings of all nodes; None:
            every clip is equally likely. It needs `state`. Each node draws by the priorities of its own rings; a node's
            share is up to a second old. Another window than that of the last draw waits for a look at all nodes,
            O(rows).
        state: with a sampler, the directory on each node where its reader keeps priorities: a template like `path`.
            They survive a kill of the reader and of the learner; one learner at a time. When another node reads a ring,
            because the first is gone, all its clips have the highest priority again.
        seed: of the draws: while rings, nodes and priorities stay as they are, `sample` gives the same batches again. A
            reader hands out the parts that `batches` asks ahead two at a time, in any order.

    Raises:
        MissingExtraError, RoleError: Ray is not installed, or not initialised.
        InputError: an argument is wrong.
        NoClipsError: no ring is there after `wait_s` seconds.

    Cost: an actor on each node, without a share of its processors (`num_cpus=0`), so that it starts where collectors
        have them all. A batch: rows are copied twice where they lie (out of the ring, and into the
        object store), and once here; between hosts Ray transfers them in between. A ring, known by its uuid, is read at
        one place, however many nodes see it.

    Processes and threads: any number of learners, each with readers of its own, which end with it. Methods may be
        called from several threads.

    Source: Ape-X (Horgan et al., 2018), replay on many machines; the sharding of Reverb (Cassirer et al., 2021).

    Example, in a cluster::

        ray.init("auto")
        buf = ringmap.ray.ReplayBuffer("/data/replay", history_len=4)
        for batch in buf.batches(256, prefetch=4):
            train(batch)
    """

    def __init__(
        self,
        path: Any,
        history_len: int | None = None,
        frameskip: int | None = None,
        *,
        wait_s: float = 60.0,
        patience_s: float = 30.0,
        threads: int | None = None,
        sampler: PrioritizedSampler | None = None,
        state: Any = None,
        seed: int | None = None,
    ) -> None:
        for name, value in (("history_len", history_len), ("frameskip", frameskip), ("threads", threads)):
            if value is not None:
                positive(_WHERE, name, value)
        for name, seconds in (("wait_s", wait_s), ("patience_s", patience_s)):
            if not seconds >= 0:
                raise InputError(f"{_WHERE}: {name} must not be negative, got {seconds!r}")
        if seed is not None:
            count(_WHERE, "seed", seed)
        layout = Layout(path, _WHERE)
        drawing = _drawing(sampler, state, layout)
        self._sampler, self._step = sampler, 0
        self._updates = deque[Any]()
        self._ray = ray_for(_WHERE)
        self.path = layout.path
        self._wait_s, self._patience_s = float(wait_s), float(patience_s)
        self._numbers = RingNumbers()
        self._rng = np.random.default_rng(seed)
        self._memory = Memory()
        self._is_closed = False
        options = {"history_len": history_len, "frameskip": frameskip, "threads": threads}
        self._readers = Readers(self._ray, layout, options, self._patience_s, drawing, seed)
        try:
            if not self._readers.wait(lambda: bool(self._readers.sizes()), self._wait_s):
                raise NoClipsError(f"{_WHERE}: {self._readers.why_none()}")
            found = self._readers.sizes()
            if len(found) > 1:
                differ = ", ".join(f"{name}: {sizes}" for sizes, name in found.items())
                raise InputError(
                    f"{_WHERE}: the rings have several (history_len, frameskip): {differ}; pass history_len= and "
                    "frameskip="
                )
            self.history_len, self.frameskip = next(iter(found))
        except BaseException:
            self.close()
            raise

    # -- what is there ------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeShards]:
        """The nodes that are alive, by name, with their rings as of the last look."""
        self._check_open()
        readers = self._readers
        readers.follow()
        found = []
        with readers.lock:
            for s in readers.stations.values():
                shards, pid = ([], None) if s.report is None else (s.report.shards, s.report.pid)
                found.append(NodeShards(s.node.name, s.node.host, s.clips(PLAIN), list(shards), pid, s.problem))
        return sorted(found, key=lambda node: node.name)

    def refresh(self) -> None:
        """Look at all nodes now, and wait for their answers, up to `patience_s` seconds for each."""
        self._check_open()
        asked, stations = time.monotonic(), self._readers.stations
        self._readers.wait(
            lambda: all(s.asked_at > asked or s.problem for s in stations.values()), 2 * self._patience_s
        )

    def __len__(self) -> int:
        return sum(node.clips for node in self.nodes)

    # -- batches ------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int,
        history_len: int | None = None,
        *,
        out: Mapping[str, Array] | None = None,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
    ) -> Batch[Array]:
        """Draw a batch of clips: every clip of all nodes is equally likely.

        Args:
            batch_size: B, clips.
            history_len: H, observations per clip; None for the buffer's own.
            out: column -> array to fill and return, of exactly the shape and dtype of the result, C-contiguous; missing
                columns are returned in new arrays.
            window: as for `ringmap.ReplayBuffer.sample`. Functions are computed by the readers, over their part of the
                batch.
            columns: names of the columns to read; None: all.
            anchors: as for `ringmap.ReplayBuffer.sample`.
            drop_all_padded: as for `ringmap.ReplayBuffer.sample`.

        Returns:
            column -> `(B, H, ...)` array, in memory that is used again once nobody refers to it. Its `ids` are unique
            to each clip, whatever node it comes from. With priorities it has `weights`, float32 `(B,)`.

        Raises:
            InputError: an argument is wrong; the rings of two nodes have other columns.
            NoClipsError: there are no clips, or every node that has some is away for `wait_s` seconds.
            ClosedError: the buffer is closed.

        Cost: a round trip to each node that has a part; `batches` asks ahead.
        """
        batch_size = positive(f"{_WHERE}.sample", "batch_size", batch_size)
        request = _request(history_len, window, columns, anchors, drop_all_padded)
        return self._sample(batch_size, request, out)

    def _sample(self, size: int, request: bytes, out: Mapping[str, Array] | None = None) -> Batch[Array]:
        (batch,) = self._together(self._ask(size, request), size, 1, request, out)
        return batch

    def batches(
        self,
        batch_size: int,
        steps: int | None = None,
        prefetch: int = 4,
        to: str = "numpy",
        device: Any = None,
        pin_memory: bool = False,
        *,
        history_len: int | None = None,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
    ) -> Batches:
        """Return an endless iterator over `sample(batch_size)`; requests for the next batches are always under way.

        Args:
            batch_size: B, clips.
            steps: batches until it ends; None: never.
            prefetch: batches asked for ahead of the loop, at most twice as many; 0: none. A reader hands over half of
                them at once, in memory that later batches use again once no variable refers to any of them.
            to: "numpy" arrays or "torch" tensors.
            device: where tensors go.
            pin_memory: whether they go there from page-locked memory.
            history_len: as for `sample`.
            window: as for `sample`.
            columns: as for `sample`.
            anchors: as for `sample`.
            drop_all_padded: as for `sample`.

        Raises:
            InputError: an argument is wrong. Errors of `sample` are raised by the iterator.
        """
        request = _request(history_len, window, columns, anchors, drop_all_padded)

        def ahead(size: int, count: int | None) -> Iterator[Batch[Any]]:
            # A message of any size costs Ray as much as 5 MB more, so it brings several batches; two are under way.
            each = max(1, prefetch // 2)
            under_way = deque[tuple[int, list[_Asked]]]()
            left = count

            batches: list[Batch[Array]] = []
            while True:
                while sum(n for n, _ in under_way) < prefetch and left != 0:
                    n = each if left is None else min(each, left)
                    under_way.append((n, self._ask(n * size, request)))
                    left = None if left is None else left - n
                while batches:  # and keep none: its memory is used again
                    yield batches.pop(0)
                if not under_way:
                    return
                n, asked = under_way.popleft()
                batches = self._together(asked, size, n, request)

        return Batches(
            lambda size: self._sample(size, request),
            ahead,
            batch_size,
            steps,
            prefetch,
            to,
            device,
            pin_memory,
            f"{_WHERE}.batches",
        )

    def _ask(self, size: int, request: bytes) -> list[_Asked]:
        """Ask for clips, each node for its part."""
        self._check_open()
        stations = self._readers.shares(request, self._wait_s)
        shares = np.array(list(stations.values()), np.float64)
        picks = self._rng.multinomial(size, shares / shares.sum()).tolist()
        return [
            _Asked(station, n, station.actor.read.options(concurrency_group="read").remote(n, request))
            for station, n in zip(stations, picks, strict=True)
            if n
        ]

    def _together(
        self, asked: list[_Asked], each: int, count: int, request: bytes, out: Mapping[str, Array] | None = None
    ) -> list[Batch[Array]]:
        """Wait for the parts of so many batches of `each` clips, and put them together."""
        size, until = each * count, time.monotonic() + self._wait_s
        places = self._rng.permutation(size)  # or the halves of a batch would be of different nodes
        columns, ids, masses, at = dict[str, Array](), np.empty(size, np.int64), np.empty(size), 0
        while asked:
            failed = 0
            for one in asked:
                part = self._part(one, request, time.monotonic() < until)
                if part is None:
                    failed += one.size
                    continue
                own = np.sort(places[at : at + one.size])
                self._put(part, one, own, columns, size, out)
                with self._readers.lock:
                    rings = np.array([self._numbers.of(uuid) for uuid in part.uuids])
                numbers, positions = apart(part.ids)
                ids[own] = joined(rings[numbers], positions)
                if part.masses is not None:
                    masses[own] = part.masses
                at += one.size
            asked = self._ask(failed, request) if failed else []
        found = []
        for rows in (slice(n * each, (n + 1) * each) for n in range(count)):
            batch = Batch({name: values[rows] if count > 1 else values for name, values in columns.items()})
            batch.ids = ids[rows]
            if self._sampler is not None:
                self._step += 1
                # Of a batch that is scaled by its largest weight, masses are as good as odds.
                batch.weights = self._sampler.weigher(batch.ids, masses[rows], self._step)(batch.ids)
            found.append(batch)
        return found

    # -- priorities ---------------------------------------------------------------------------

    def update_priorities(self, ids: Any, values: Any) -> int:
        """Send the priorities of clips to the nodes that have them, and return without waiting for them.

        Args:
            ids: int64 `(B,)`: `batch.ids`.
            values: `(B,)` priorities, such as absolute TD errors: finite and not negative. For an id that is named
                twice the last one counts.

        Returns:
            The number that was sent: those of nodes that are away are passed over, as those of evicted clips are when
            they arrive.

        Raises:
            InputError: the buffer has no `PrioritizedSampler`; shapes differ, a value is not valid, or an id is of no
                ring that was drawn from. Nothing was sent.
            EnvironmentFault: an earlier update failed on its node: the disk is full or fails.
            ClosedError: the buffer is closed.

        Cost: a message to each node; it waits when more than 64 are under way.
        """
        where = f"{_WHERE}.update_priorities"
        if self._sampler is None:
            raise InputError(
                f"{where}: the buffer draws uniformly; make it with sampler=PrioritizedSampler() and state=DIRECTORY"
            )
        self._check_open()
        places, priorities = checked_priorities(where, ids, values)
        numbers, positions = apart(places)
        with self._readers.lock:
            uuids = list(self._numbers.uuids)
        parts = groups(numbers)
        if parts and not 0 <= parts[0][0] <= parts[-1][0] < len(uuids):
            raise InputError(f"{where}: an id is of no ring that this buffer has drawn from; pass batch.ids")
        self._settle(_MOST_UPDATES - 1)
        sent, changes = 0, dict[Station, list[Changed]]()
        for number, at in parts:
            station = self._readers.of_ring(uuids[number])
            if station is not None:
                changes.setdefault(station, []).append((uuids[number], positions[at], priorities[at]))
                sent += len(at)
        for station, its in changes.items():
            self._updates.append(station.actor.update.options(concurrency_group="update").remote(its))
        return sent

    def flush(self) -> None:
        """Wait until the priorities that were sent have arrived.

        Raises:
            EnvironmentFault: a node could not store them.
        """
        self._check_open()
        self._settle(0)

    def _settle(self, most: int) -> None:
        """Take what updates returned, until at most so many are under way."""
        while self._updates:
            self._check_open()
            ref = self._updates[0]
            if len(self._updates) <= most and not self._ray.wait([ref], timeout=0)[0]:
                return
            self._updates.popleft()
            try:
                answer(self._ray, ref, self._patience_s)
            except self._ray.exceptions.RayTaskError:
                raise
            except (self._ray.exceptions.RayError, TimeoutError) as error:  # its node is away
                log.warning("%s: priorities were lost with a reader: %s", _WHERE, error)

    def _part(self, one: _Asked, request: bytes, may_fail: bool) -> Part | None:
        """Return a part; None if it is to be drawn again."""
        faults = self._ray.exceptions
        self._check_open()
        try:
            part: Part = self._ray.get(one.ref, timeout=self._patience_s)
            return part
        except (faults.RayError, TimeoutError) as error:
            fault = error.cause if isinstance(error, faults.RayTaskError) else error
            if isinstance(fault, NoClipsError) and may_fail:  # evicted meanwhile, or the reader was restarted
                self._readers.empty(one.station, request)
                return None
            if isinstance(fault, InputError | IndexError | NoClipsError):
                raise fault from error
            if not isinstance(fault, RingmapError | OSError | faults.RayError):
                raise
            text = first_line(fault)
            if isinstance(fault, faults.ObjectStoreFullError | faults.OutOfDiskError):
                text = f"the object store is full; release batches, or start Ray with a larger one: {text}"
                time.sleep(_PAUSE_S)  # it gets free as batches are released
            if not may_fail:
                raise NoClipsError(
                    f"{_WHERE}: no part of a batch came for {self._wait_s:g} s; node {one.station.node.name}: {text}"
                ) from error
            self._readers.lose(one.station, text)
            return None

    def _put(
        self,
        part: Part,
        one: _Asked,
        places: Array,
        batch: dict[str, Array],
        size: int,
        out: Mapping[str, Array] | None,
    ) -> None:
        """Copy a part to its places in the columns of a batch."""
        if batch and part.columns.keys() != batch.keys():
            raise self._differs(one, sorted(batch), sorted(part.columns))
        for name, values in part.columns.items():
            into = batch.get(name)
            if into is None:
                into = batch[name] = self._room(name, (size, *values.shape[1:]), values.dtype, out)
            is_text = into.dtype.kind == values.dtype.kind == "U"  # as wide as each part's longest
            if into.shape[1:] != values.shape[1:] or not (is_text or into.dtype == values.dtype):
                before, here = (into.shape[1:], into.dtype), (values.shape[1:], values.dtype)
                raise self._differs(one, f"{name} {before}", here)
            if len(places) == size and values.dtype == into.dtype:
                np.copyto(into, values)
            else:
                batch[name] = put(into, places, values)

    def _room(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], out: Mapping[str, Array] | None) -> Array:
        into = None if out is None else out.get(name)
        if into is None or dtype.kind == "U":  # text is as wide as the batch's longest
            return self._memory.empty(shape, dtype)
        if (into.shape, into.dtype) != (shape, dtype) or not into.flags.c_contiguous:
            raise InputError(
                f"{_WHERE}.sample: out[{name!r}] must be a C-contiguous {dtype} array of shape {shape}, got "
                f"{into.dtype} {into.shape}"
            )
        return into

    def _differs(self, one: _Asked, before: Any, here: Any) -> InputError:
        return InputError(
            f"{_WHERE}: the rings of node {one.station.node.name} have other columns than those before them: {here} "
            f"here, {before} there; give rings of one schema"
        )

    # -- the end ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{_WHERE}: the buffer of {self.path} is closed; open it again")
        self._readers.check(f"{_WHERE}: the buffer of {self.path}")

    def close(self) -> None:
        """End the readers. A closed buffer raises ClosedError on use; closing twice is allowed, and after
        `ray.shutdown()`.

        Close it, and its `batches`, before `ray.shutdown()`: Ray ends a process in which another thread calls it at
        that moment.
        """
        if not self._is_closed:
            self._is_closed = True
            self._readers.close()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._is_closed or self._readers.is_over:
            return f"ringmap.ray.ReplayBuffer(closed, {self.path})"
        found = [node for node in self.nodes if node.shards]
        rings, clips = sum(len(node.shards) for node in found), sum(node.clips for node in found)
        return f"ringmap.ray.ReplayBuffer(nodes={len(found)}, rings={rings}, clips={clips}, below {self.path})"


def _drawing(sampler: Any, state: Any, layout: Layout) -> tuple[PrioritizedSampler, Layout] | None:
    """Return how readers draw by priority, and where each keeps them; None: every clip is equally likely."""
    if sampler is None:
        if state is not None:
            raise InputError(
                f"{_WHERE}: state={str(state)!r} keeps the priorities of a PrioritizedSampler; pass sampler= too"
            )
        return None
    if not isinstance(sampler, PrioritizedSampler) or sampler.kind != "proportional":
        raise InputError(
            f"{_WHERE}: sampler must be a PrioritizedSampler(kind='proportional'): no other spans nodes; got "
            f"{sampler!r:.80}"
        )
    if state is None:
        raise InputError(
            f"{_WHERE}: a PrioritizedSampler needs state=, the directory on each node where its reader keeps "
            "priorities: readers are started again"
        )
    kept = Layout(state, _WHERE)
    if kept.path == layout.path:
        raise InputError(f"{_WHERE}: state={kept.path} is where the rings lie; give a directory of its own")
    return sampler, kept


def _request(
    history_len: int | None,
    window: WindowSpec | None,
    columns: Iterable[str] | None,
    anchors: slice | None,
    drop_all_padded: bool,
) -> bytes:
    """Return a request as readers take it: equal ones are equal bytes."""
    if history_len is not None:
        history_len = positive(f"{_WHERE}.sample", "history_len", history_len)
        if window is not None:
            raise InputError(
                f"{_WHERE}.sample: history_len={history_len} and a window contradict; a window says which steps of "
                "each column an item holds"
            )
    columns = columns if columns is None or isinstance(columns, str) else tuple(columns)
    values = history_len, window, columns, anchors, drop_all_padded or None
    names = "history_len", "window", "columns", "anchors", "drop_all_padded"
    wanted = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    try:
        return pickle.dumps(wanted)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"{_WHERE}.sample: the request can't be sent to a reader: {error}; define its functions at the top level "
            "of a module"
        ) from error
