"""Inserts by collectors that are actors, and batches of clips over Ray, to a learner on another raylet.

    8 processes that write rings, as they are  |  8 actors that write rings, on `a` and `b`
    learner on `head`  ◄── one actor on `a`: a ready batch; our ReplayBuffer; TorchRL's RayReplayBuffer; RLlib's
                       ◄── our readers on `a`, or on `a` and `b`

A bare actor with a ready batch shows the object store's own limit.

What these numbers do not show: hosts with a network between them, and more than one disk. All raylets share the cores
here.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.data import noise
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from benchmarks.harness.writers import STATE, STEPS, Writer, writing
from ringmap import ReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], Mapping[str, Any]]
Stream = Callable[[int], Iterator[Mapping[str, Any]]]

BATCH, HISTORY, LENGTH, AHEAD = 256, 4, 100, 4
STORE_NBYTES = 600_000_000
BARE, PLAIN, TORCHRL, RLLIB = (
    "an actor that returns a ready batch",
    "an actor around our ReplayBuffer",
    "TorchRL RayReplayBuffer",
    "RLlib ReplayBuffer in an actor",
)
PROCESSES, ACTORS = "processes that write rings", "actors that write rings"
WRITERS = 8
ONE, TWO = "ringmap.ray, a reader on 1 node", "ringmap.ray, readers on 2 nodes"


def run(place: Place) -> list[Table]:
    """Time inserts, and batches one at a time and with four under way; where there is no Ray, say so."""
    table = Table(f"{BATCH} clips of {HISTORY} frames of 64x64x3 over Ray, one at a time")
    ahead = Table(f"the same, {AHEAD} under way")
    if find_spec("ray") is None:
        table.notes.append("not measured: Ray is not installed")
        return [table]
    episodes = place.size(40, 6)
    frames = noise(LENGTH, episodes)
    with place.folder(ram=True) as folder, _cluster() as ray, contextlib.ExitStack() as stack:
        inserts = _inserts(ray, folder / "inserts", place)
        for path, count in (("one/a", 1), ("two/a", 2), ("two/b", 2)):
            _fill(folder / path / "0", frames, count, path.endswith("b"))
        single, many = _calls(ray, folder, frames, stack, table)
        for name, call in single.items():
            for _ in range(3):
                _prove(name, call(), frames)
        for name, stream in many.items():
            for batch in stream(3):
                _prove(name, batch, frames)
        _judge(table, in_turn(single, place.size(12, 1), place.size(5, 1)))
        count = place.size(30, 5)
        runs = {name: lambda stream=stream: deque(stream(count), 0) for name, stream in many.items()}
        # From the first request to the last batch: what is asked for ahead in another's turn would count for none.
        times = in_turn(runs, place.size(8, 1))
        _judge(ahead, {name: taken / count for name, taken in times.items()})
    return [inserts, table, ahead]


def _inserts(ray: Any, folder: Path, place: Place) -> Table:
    """Time writers that do nothing else: as processes, and as actors."""
    from ringmap.ray.cluster import nodes_of, pinned_to

    episodes = place.size(300, 2)  # about a second: collectors of `collect` say no more
    table = Table(f"{WRITERS} writers: {episodes} episodes of {STEPS} states of {STATE} floats each")
    on = [pinned_to(node) for node in nodes_of(ray) if node.name != "head"]
    actors = [
        ray.remote(Writer)
        .options(num_cpus=0, scheduling_strategy=on[n % len(on)])
        .remote(str(folder / "actors" / str(n)))
        for n in range(WRITERS)
    ]
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(writing(str(folder / "processes" / str(n)))) for n in range(WRITERS)]

        def by_processes() -> int:
            for pipe in pipes:
                pipe.send(episodes)
            return sum(pipe.recv() for pipe in pipes)

        def by_actors() -> int:
            return sum(ray.get([actor.write.remote(episodes) for actor in actors]))

        calls = {PROCESSES: by_processes, ACTORS: by_actors}
        for name, call in calls.items():
            assert call() == WRITERS * episodes * STEPS, f"{name}: other steps"
        times = in_turn(calls, place.size(10, 1))
    for actor in actors:
        ray.kill(actor)
    for ring in folder.glob("*/*"):
        with ReplayBuffer.open(ring, history_len=2) as buf:
            at = buf.sample(64)["step"]
            assert (at[:, 0] + 1 == at[:, 1]).all(), f"{ring}: no clips"
    table.add_all(times)
    for name, taken in times.items():
        table.fact(f"{name}: steps/s", round(WRITERS * episodes * STEPS / float(np.median(taken))))
    table.faster(ACTORS, PROCESSES, at_least=0.9)
    return table


def _judge(table: Table, times: dict[str, Array]) -> None:
    table.add_all(times)
    table.ratio(ONE, BARE, at_most=1 / 0.95)
    table.ratio(TWO, BARE)
    table.faster(ONE, PLAIN)
    table.faster(TWO, PLAIN, at_least=1.3)
    for rival in (TORCHRL, RLLIB):
        if rival in times:
            table.faster(ONE, rival, at_least=3.0 if rival == TORCHRL else None)


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """Start three raylets: the learner's, `a` and `b`."""
    import ray
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray keeps the address of a cluster there
    given = {"num_cpus": 2, "object_store_memory": STORE_NBYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**given, "node_name": "head"})
    try:
        for name in ("a", "b"):
            cluster.add_node(**given, node_name=name)
        ray.init(address=cluster.address, log_to_driver=False)
        yield ray
    finally:
        ray.shutdown()
        cluster.shutdown()


def _fill(ring: Path, frames: Array, nodes: int, is_second: bool) -> None:
    """Write the episodes, or the part of them that one of two nodes has."""
    numbers = range(len(frames))[is_second::nodes]
    with ReplayBuffer(len(numbers) * LENGTH, path=ring, history_len=HISTORY) as buf:
        for number in numbers:
            buf.write_episode({"pixels": frames[number], "at": _marks(number)})


def _marks(number: int) -> Array:
    return np.stack([np.full(LENGTH, number), np.arange(LENGTH)], 1).astype(np.int32)


def _prove(name: str, batch: Mapping[str, Any], frames: Array) -> None:
    """Raise unless each clip holds consecutive frames of one episode, the right ones, and not all of one episode."""
    at = np.asarray(batch["at"]).reshape(BATCH, HISTORY, 2)
    pixels = np.asarray(batch["pixels"]).reshape(BATCH, HISTORY, 64, 64, 3)
    assert (at[:, :, 0] == at[:, :1, 0]).all(), f"{name}: steps of several episodes"
    assert (at[:, :, 1] == at[:, :1, 1] + np.arange(HISTORY)).all(), f"{name}: no clips"
    assert (pixels == frames[at[..., 0], at[..., 1]]).all(), f"{name}: other frames"
    assert len(np.unique(at[:, 0, 0])) > 1, f"{name}: one episode alone"


class Holder:
    """An actor that samples from a buffer, or returns a batch that is ready."""

    def __init__(self, ring: str, is_ready: bool) -> None:
        self._buffer = ReplayBuffer.open(ring, seed=0)
        self._batch = dict(self._buffer.sample(BATCH)) if is_ready else None

    def sample(self) -> dict[str, Any]:
        """Return a batch."""
        return self._batch or dict(self._buffer.sample(BATCH))


class RLlib:
    """An actor with RLlib's buffer, whose items are the clips of a ring."""

    def __init__(self, ring: str) -> None:
        from ray.rllib.policy.sample_batch import SampleBatch
        from ray.rllib.utils.replay_buffers import ReplayBuffer as Theirs

        clips = _all_clips(ring)
        self._buffer = Theirs(capacity=len(clips["at"]))
        for n in range(len(clips["at"])):
            self._buffer.add(SampleBatch({name: values[n : n + 1] for name, values in clips.items()}))

    def sample(self) -> dict[str, Any]:
        """Return a batch."""
        return dict(self._buffer.sample(BATCH))


def _all_clips(ring: str) -> dict[str, Array]:
    with ReplayBuffer.open(ring) as buf:
        items = buf.view()[range(len(buf.view()))]
        return {name: np.ascontiguousarray(items[name]) for name in ("pixels", "at")}


def _calls(
    ray: Any, folder: Path, frames: Array, stack: contextlib.ExitStack, table: Table
) -> tuple[dict[str, Call], dict[str, Stream]]:
    """Return the calls that get a batch, one at a time and with several under way."""
    import ringmap.ray as rr
    from ringmap.ray.cluster import nodes_of, pinned_to

    place = {node.name: pinned_to(node) for node in nodes_of(ray)}
    ring = str(folder / "one" / "a" / "0")
    on_a = {"scheduling_strategy": place["a"], "num_cpus": 0}
    actors = {
        BARE: ray.remote(Holder).options(**on_a).remote(ring, True),
        PLAIN: ray.remote(Holder).options(**on_a).remote(ring, False),
    }
    if not all(map(find_spec, ("tree", "scipy"))):
        table.notes.append("RLlib is not measured: dm-tree or SciPy is not installed")
    else:
        actors[RLLIB] = ray.remote(RLlib).options(**on_a).remote(ring)
    single: dict[str, Call] = {n: lambda actor=a: ray.get(actor.sample.remote()) for n, a in actors.items()}
    many: dict[str, Stream] = {
        n: lambda count, actor=a: _under_way(actor.sample.remote, ray.get, count) for n, a in actors.items()
    }
    if find_spec("torchrl") is None:
        table.notes.append("TorchRL is not measured: it is not installed")
    else:
        theirs = _torchrl(ring, place["a"])
        pool = stack.enter_context(ThreadPoolExecutor(AHEAD))
        single[TORCHRL] = theirs.sample
        many[TORCHRL] = lambda count: _under_way(
            lambda: pool.submit(theirs.sample), lambda asked: asked.result(), count
        )
    for name, path in ((ONE, "one"), (TWO, "two")):
        buf = stack.enter_context(rr.ReplayBuffer(folder / path, history_len=HISTORY, wait_s=120))
        single[name] = lambda buf=buf: buf.sample(BATCH)
        many[name] = lambda count, buf=buf: buf.batches(BATCH, steps=count, prefetch=AHEAD)
    return single, many


def _under_way(ask: Callable[[], Any], get: Callable[[Any], Any], count: int) -> Iterator[Any]:
    """Yield so many batches, with some of them under way."""
    asked = deque[Any]()
    for n in range(count + AHEAD):
        if n < count:
            asked.append(ask())
        if n >= min(AHEAD, count) and asked:
            yield get(asked.popleft())


def _torchrl(ring: str, place: Any) -> Any:
    """Return theirs, whose items are the clips of a ring, in memory: no windows are cut."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, RayReplayBuffer

    clips = _all_clips(ring)
    count = len(clips["at"])
    theirs = RayReplayBuffer(
        storage=lambda: LazyTensorStorage(count),
        batch_size=BATCH,
        remote_config={"num_cpus": 0, "scheduling_strategy": place},
    )
    for first in range(0, count, 500):
        part = {name: torch.from_numpy(values[first : first + 500]) for name, values in clips.items()}
        theirs.extend(TensorDict(part, batch_size=[len(part["at"])]))
    return theirs
