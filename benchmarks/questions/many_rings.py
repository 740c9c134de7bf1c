"""What do many rings, long episodes and a cluster cost? Collectors, rings read as one, batches over Ray.

What these numbers do not show: rings on several disks, hosts with a network between them, and writers at work, which
take cores. All raylets share the cores here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.data import noise
from benchmarks.harness.place import Place
from benchmarks.harness.processes import Remote, process
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from ringmap import ReplayBuffer
from ringmap.data import ConcatDataset, ShardedReplayBuffer

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, HISTORY = 256, 4


# -- episodes in parts ---------------------------------------------------------------------------

LANES = 32
WHOLE, PARTS = "whole episodes", "parts"


def parts(place: Place) -> Iterator[Table]:
    """Draw from 32 lanes in parts of 1,000 steps, beside whole episodes of the same length as a part: state vectors,
    and small pictures."""
    states = {"obs": (17,), "action": (6,), "reward": ()}
    yield _draws(place, "state vectors", states, ((256, 1), (256, 4), (256, 16), (256, 64)), 4)
    yield _draws(place, "64x64x3 pixels", {"pixels": (64, 64, 3), "action": (6,)}, ((64, 4), (256, 4)), 1)


def _draws(
    place: Place, name: str, shapes: dict[str, tuple[int, ...]], batches: tuple[tuple[int, int], ...], count: int
) -> Table:
    length = place.size(1000 if count > 1 else 250, 80)
    steps, rng, folder = LANES * length * count, np.random.default_rng(0), place.new_folder(ram=True)
    rows = {
        column: rng.integers(0, 256, (length, *shape), np.uint8)
        if column == "pixels"
        else rng.normal(size=(length, *shape)).astype(np.float32)
        for column, shape in shapes.items()
    }
    bufs = {
        kind: place.closing(ReplayBuffer(steps, path=folder / kind, seed=0, spare_rows=length))
        for kind in (WHOLE, PARTS)
    }
    lanes = [bufs[PARTS].begin_episode(commit_every=length, lane=lane) for lane in range(LANES)]
    for lane in lanes * count:
        bufs[WHOLE].write_episode(rows)
        for at in range(length):
            lane.append({column: values[at] for column, values in rows.items()})
    for lane in lanes:
        lane.finish(truncated=True)
    table = Table(f"clips of {name}, {LANES} lanes in parts of {length:,} steps, {steps:,} steps")
    for size, history in batches:
        calls = {
            f"{kind}, {size} clips of {history}": lambda buf=buf, n=size, h=history: buf.sample(n, history_len=h)
            for kind, buf in bufs.items()
        }
        table.time(calls, place.size(300, 5))
        whole, in_parts = calls
        table.ratio(in_parts, whole, at_most=1.05)
    table.notes.append("a number that lies across parts is looked up part by part")
    return table


# -- collectors ----------------------------------------------------------------------------------

STEPS, STATE = 100, 17


class Writer:
    """Writes episodes of states to a ring of its own, or into a queue, by way of its feeding thread."""

    def __init__(self, where: Any) -> None:
        states = np.random.default_rng(0).normal(size=(STEPS, STATE)).astype(np.float32)
        self._episode = {"state": states, "reward": states[:, 0], "step": np.arange(STEPS)}
        ring = isinstance(where, str)
        self._put = ReplayBuffer(50 * STEPS, path=where).write_episode if ring else where.put

    def write(self, episodes: int) -> int:
        """Write so many; return the number of steps."""
        for _ in range(episodes):
            self._put(self._episode)
        return episodes * STEPS


def _writers(place: Place, wheres: list[Any], method: str) -> list[Remote]:
    return [place.stack.enter_context(process(Writer, where, method=method)) for where in wheres]


def _written(writers: list[Remote], episodes: int, then: Callable[[], object] = int) -> int:
    for writer in writers:
        writer.ask("write", episodes)
    then()
    return sum(writer.answer() for writer in writers)


def _assert_clips(batch: Mapping[str, Any]) -> None:
    assert (batch["step"][:, 0] + 1 == batch["step"][:, 1]).all(), "no clips"


# -- many rings ----------------------------------------------------------------------------------

ONE_RING, CONCAT = "one ring", "ConcatDataset over the rings"


def fleet(place: Place) -> Iterator[Table]:
    """Time collectors, looks at idle rings, and batches of pixels and of state vectors from many rings: beside a queue
    into one writer, one ring of the same rows, a `ConcatDataset`."""
    folder = place.new_folder()
    yield _collectors(place, folder / "inserts")
    table, calls = Table("A look at idle rings, before a draw"), dict[str, Callable[[], object]]()
    for rings in place.size((1, 16, 64), (1, 4)):
        _fill(folder / "looks" / f"{rings}", "vectors", rings, place.size(6400, 640))
        calls[f"{rings} rings"] = ShardedReplayBuffer(folder / "looks" / f"{rings}", history_len=HISTORY).engine.look
    table.time(calls, place.size(200, 2), place.size(20, 2))
    yield table
    yield _batches(place, folder / "pixels", "pixels", place.size((16,), (4,)), place.size(16_000, 640))
    yield _batches(place, folder / "vectors", "vectors", place.size((1, 4, 16, 64), (1, 4)), place.size(64_000, 640))


def _collectors(place: Place, folder: Path) -> Table:
    """Time collectors that do nothing but write: each to a ring of its own, or through a queue to one writer."""
    count, episodes = place.size(8, 2), place.size(300, 2)
    table = Table(f"{count} collectors: {episodes} episodes of {STEPS} states of {STATE} floats each")
    queue = multiprocessing.get_context(place.method).Queue(64)
    one = place.closing(ReplayBuffer(50 * STEPS, path=folder / "queue"))
    rings = _writers(place, [str(folder / "rings" / str(n)) for n in range(count)], place.method)
    senders = _writers(place, [queue] * count, place.method)

    def read() -> None:
        for _ in range(count * episodes):
            one.write_episode(queue.get())

    calls = {
        "a ring for each collector": lambda: _written(rings, episodes),
        "a queue into one writer": lambda: _written(senders, episodes, read),
    }
    assert {call() for call in calls.values()} == {count * episodes * STEPS}
    table.time(calls, place.size(10, 1))
    for name in calls:
        table.fact(f"{name}: steps/s", round(count * episodes * STEPS / table.median(name)))
    table.faster(*calls)
    with ShardedReplayBuffer(folder / "rings", history_len=2) as buf:
        _assert_clips(buf.sample(64))
    _assert_clips(one.sample(64, history_len=2))
    table.notes.append(
        "the queue is that of multiprocessing, with room for 64 episodes; the writer is the process that reads it"
    )
    return table


def _fill(folder: Path, kind: str, rings: int, steps: int) -> None:
    """Write the same episodes to so many rings, in turn."""
    length = max(10, min(100, steps // rings))
    count, frames, at = steps // length, noise(length), np.arange(length, dtype=np.float32)
    buffers = [ReplayBuffer(-(-count // rings) * length, path=folder / f"{number:03}") for number in range(rings)]
    for number in range(count):
        episode = {"action": np.stack([np.full(length, number, np.float32), at], 1)}
        if kind == "pixels":
            episode["pixels"] = frames[number % len(frames)]
        else:
            episode |= {"obs": np.repeat(at[:, None], 17, 1), "reward": at}
        buffers[number % rings].write_episode(episode)
    for buffer in buffers:
        buffer.close()


def _batches(place: Place, folder: Path, kind: str, rings: tuple[int, ...], steps: int) -> Table:
    row = "64x64x3 pixels" if kind == "pixels" else "17 floats, and 2 small columns"
    table = Table(f"sample({BATCH}) of {HISTORY} rows of {row}, {steps:,} steps in all")
    _fill(folder / "one", kind, 1, steps)
    buffers: dict[str, Any] = {ONE_RING: ReplayBuffer.open(folder / "one" / "000", history_len=HISTORY, seed=0)}
    for count in rings:
        _fill(folder / f"{count}", kind, count, steps)
        buffers[f"{count} rings"] = ShardedReplayBuffer(folder / f"{count}", history_len=HISTORY, seed=0)
    for buffer in buffers.values():
        batch = place.closing(buffer).sample(BATCH)
        numbers, at = batch["action"][..., 0], batch["action"][..., 1]
        assert (numbers == numbers[:, :1]).all(), "steps of several episodes"
        assert (at == at[:, :1] + np.arange(HISTORY)).all(), "steps that do not follow"
        assert len(np.unique(numbers)) > 1, "every clip is of one episode"
        assert (batch.get("reward", at) == at).all(), "columns of different steps"
    most = f"{rings[-1]} rings"
    each = [ReplayBuffer.open(path, history_len=HISTORY) for path in sorted((folder / f"{rings[-1]}").iterdir())]
    concat, rng = ConcatDataset(each), np.random.default_rng(0)
    calls: dict[str, Callable[[], object]] = {n: lambda buf=buf: buf.sample(BATCH) for n, buf in buffers.items()}
    calls[CONCAT] = lambda: concat.__getitems__(rng.integers(0, len(concat), BATCH).tolist())
    table.time(calls, place.size(100, 2), place.size(5, 2))
    if kind == "pixels":
        table.ratio(most, ONE_RING, at_most=1 / 0.85)
    table.faster(most, CONCAT)
    return table


# -- over Ray ------------------------------------------------------------------------------------

Call = Callable[[], Mapping[str, Any]]
Stream = Callable[[int], Iterator[Mapping[str, Any]]]

LENGTH, AHEAD, WRITERS = 100, 4, 8
BARE, PLAIN, TORCHRL, RLLIB = (
    "an actor that returns a ready batch",
    "an actor around our ReplayBuffer",
    "TorchRL RayReplayBuffer",
    "RLlib ReplayBuffer in an actor",
)
PROCESSES, ACTORS = "processes that write rings", "actors that write rings"
ONE, TWO = "ringmap.ray, a reader on 1 node", "ringmap.ray, readers on 2 nodes"


def ray(place: Place) -> Iterator[Table]:
    """Time inserts, and batches one at a time and with four under way, to a learner on another raylet.

        8 processes that write rings, as they are  |  8 actors that write rings, on `a` and `b`
        learner on `head`  <-- one actor on `a`: a ready batch; our ReplayBuffer; TorchRL's RayReplayBuffer; RLlib's
                           <-- our readers on `a`, or on `a` and `b`

    A bare actor with a ready batch shows the object store's own limit.
    """
    table = Table(f"{BATCH} clips of {HISTORY} frames of 64x64x3 over Ray, one at a time")
    ahead = Table(f"the same, {AHEAD} under way")
    if find_spec("ray") is None:
        table.notes.append("not measured: Ray is not installed")
        yield table
        return
    frames, folder = noise(LENGTH, place.size(40, 6)), place.new_folder(ram=True)
    with _cluster() as cluster:
        yield _inserts(cluster, folder / "inserts", place)
        for path, numbers in (("one/a", slice(None)), ("two/a", slice(0, None, 2)), ("two/b", slice(1, None, 2))):
            _fill_ring(folder / path / "0", frames, range(len(frames))[numbers])
        single, many = _calls(cluster, folder, frames, place.stack, table)
        for name, call in single.items():
            for batch in (call(), call(), call(), *many[name](3)):
                _prove(name, batch, frames)
        _judge(table, in_turn(single, place.size(12, 1), place.size(5, 1)))
        count = place.size(30, 5)
        runs = {name: lambda stream=stream: deque(stream(count), 0) for name, stream in many.items()}
        # From the first request to the last batch: what is asked for ahead in another's turn would count for none.
        _judge(ahead, {name: taken / count for name, taken in in_turn(runs, place.size(8, 1)).items()})
        yield table
        yield ahead
        place.stack.close()  # ours go before Ray does


def _inserts(ray: Any, folder: Path, place: Place) -> Table:
    """Time writers that do nothing else: as processes, and as actors."""
    from ringmap.ray.cluster import nodes_of, pinned_to

    episodes = place.size(300, 2)  # about a second: collectors of `collect` say no more
    table = Table(f"{WRITERS} writers: {episodes} episodes of {STEPS} states of {STATE} floats each")
    on = [pinned_to(node) for node in nodes_of(ray) if node.name != "head"]
    rings = [str(folder / "actors" / str(n)) for n in range(WRITERS)]
    remotes = [ray.remote(Writer).options(num_cpus=0, scheduling_strategy=on[n % len(on)]) for n in range(WRITERS)]
    actors = [remote.remote(ring) for remote, ring in zip(remotes, rings, strict=True)]
    # Spawned: a fork would have the threads of Ray.
    writers = _writers(place, [str(folder / "processes" / str(n)) for n in range(WRITERS)], "spawn")
    calls = {
        PROCESSES: lambda: _written(writers, episodes),
        ACTORS: lambda: sum(ray.get([actor.write.remote(episodes) for actor in actors])),
    }
    for name, call in calls.items():
        assert call() == WRITERS * episodes * STEPS, f"{name}: other steps"
    table.time(calls, place.size(10, 1))
    for actor in actors:
        ray.kill(actor)
    for ring in folder.glob("*/*"):
        with ReplayBuffer.open(ring, history_len=2) as buf:
            _assert_clips(buf.sample(64))
    for name in calls:
        table.fact(f"{name}: steps/s", round(WRITERS * episodes * STEPS / table.median(name)))
    table.faster(ACTORS, PROCESSES, at_least=0.9)
    return table


def _judge(table: Table, times: dict[str, Array]) -> None:
    table.add_all(times)
    table.ratio(ONE, BARE, at_most=1 / 0.95)
    table.ratio(TWO, BARE)
    table.faster(ONE, PLAIN)
    table.faster(TWO, PLAIN, at_least=1.3)
    for rival, bar in ((TORCHRL, 3.0), (RLLIB, None)):
        if rival in times:
            table.faster(ONE, rival, at_least=bar)


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """Start three raylets: the learner's, `a` and `b`."""
    import ray
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray keeps the address of a cluster there
    given = {"num_cpus": 2, "object_store_memory": 600_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**given, "node_name": "head"})
    try:
        for name in ("a", "b"):
            cluster.add_node(**given, node_name=name)
        ray.init(address=cluster.address, log_to_driver=False)
        yield ray
    finally:
        ray.shutdown()
        cluster.shutdown()


def _fill_ring(ring: Path, frames: Array, numbers: range) -> None:
    """Write these episodes; `at` says which episode and step a row is."""
    with ReplayBuffer(len(numbers) * LENGTH, path=ring, history_len=HISTORY) as buf:
        for number in numbers:
            at = np.stack([np.full(LENGTH, number), np.arange(LENGTH)], 1).astype(np.int32)
            buf.write_episode({"pixels": frames[number], "at": at})


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

    ring, on_a = str(folder / "one" / "a" / "0"), {n.name: pinned_to(n) for n in nodes_of(ray)}["a"]

    def actor(kind: type, *arguments: Any) -> Any:
        return ray.remote(kind).options(scheduling_strategy=on_a, num_cpus=0).remote(*arguments)

    actors = {BARE: actor(Holder, ring, True), PLAIN: actor(Holder, ring, False)}
    if not all(map(find_spec, ("tree", "scipy"))):
        table.notes.append("RLlib is not measured: dm-tree or SciPy is not installed")
    else:
        actors[RLLIB] = actor(RLlib, ring)
    single: dict[str, Call] = {n: lambda actor=a: ray.get(actor.sample.remote()) for n, a in actors.items()}
    many: dict[str, Stream] = {
        n: lambda count, actor=a: _under_way(actor.sample.remote, ray.get, count) for n, a in actors.items()
    }
    if find_spec("torchrl") is None:
        table.notes.append("TorchRL is not measured: it is not installed")
    else:
        theirs, pool = _torchrl(ring, on_a), stack.enter_context(ThreadPoolExecutor(AHEAD))
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
