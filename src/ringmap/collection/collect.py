"""`ringmap.collect`: what it refuses, and what it counts before anything is played.

    arguments ─► lock of the collection ─► locks of all rings, counted ─► supervisor

Invariants: nothing is made or changed before the arguments are checked; two calls never run on one directory.
Not here: the processes (supervisor.py).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ringmap.buffers.options import positive
from ringmap.buffers.replay import ReplayBuffer
from ringmap.collection.collector import Job, Parts
from ringmap.collection.rings import finished_below, ring_of
from ringmap.collection.seeds import Seeds
from ringmap.collection.supervisor import THREADS, Supervisor
from ringmap.errors import EnvironmentFault, ExistsError, InputError, LockedError
from ringmap.fleet.pace import Pace
from ringmap.fleet.weights import Weights
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.advice import clear_errors
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.system import cores
from ringmap.world.collecting import Collection
from ringmap.world.rollout import bar_of, count_of
from ringmap.world.world import World

__all__ = ["collect", "imported"]

_WHERE = "ringmap.collect"
_FOLDER, _LOCK = "collect", "lock"
_NOT_FOR_RINGS = {"self", "max_steps", "path", "seed", "disk"}


def collect(
    make_world: Callable[[int], World] | str,
    path: str | os.PathLike[str],
    episodes: int,
    collectors: int,
    seed: int = 0,
    resume: bool = True,
    *,
    max_steps: int,
    policy: Any = None,
    weights: Weights | None = None,
    pace: Pace | None = None,
    options: Mapping[str, Any] | None = None,
    commit_every: int | None = None,
    threads: int | None = None,
    progress: bool = True,
    wait_s: float = 10.0,
    context: str = "spawn",
    **ring: Any,
) -> None:
    """Collect episodes with several processes, each into a ring of its own below one directory.

    Just the seeds `seed ... seed + episodes - 1` are played, each once, whoever is killed meanwhile, and when: a collector is started
    again; after a kill of this process, or of all, the same call goes on, with any number of collectors. Read the rings with
    `ringmap.data.ShardedReplayBuffer(path)`, also meanwhile.

    Args:
        make_world: called in each collector with its number, 0 to `collectors - 1`; returns its `World`. A function at the top level of a
            module, something else that can be pickled, or text, "module:function".
        path: the directory. The rings are `collector-0`, `collector-1`, ... in it, and what the collectors print is in
            `collect/collector-0.log`, ...
        episodes: how many in all.
        collectors: how many processes.
        seed: of the first episode.
        resume: go on with what the rings hold of this collection; False: refuse if they hold any.
        max_steps: capacity of each ring, in steps.
        policy: as for `World.collect`, pickled for each collector; None: the one that `make_world` has set.
        weights: where a learner publishes the policy, as for `World.collect`.
        pace: as for `World.collect`; of the same directory.
        options: reset options.
        commit_every: commit this many rows of an open episode at a time, as for `World.collect`.
        threads: of OpenMP and PyTorch in each collector. None: what `OMP_NUM_THREADS` says, else an equal part of the cores.
        progress: show a progress bar once it takes a while.
        wait_s: how long to wait for a ring that another process writes, which may be about to end.
        context: how the processes start: "spawn", or "forkserver".
        ring: other arguments of `ReplayBuffer` for each ring, such as `interrupted="keep"`.

    Raises:
        InputError: an argument is wrong; rings below `path` do not fit together, or hold another collection with this seed; two hold
            the same seed. Or as `World.collect` raised it in a collector that could not begin.
        ExistsError: with `resume=False`, there is something to resume.
        LockedError: another call runs on this directory, or another process writes a ring in it.
        RolloutError: `make_world` failed, with its traceback; or every collector ended five times without a new episode: the message
            has the last lines of the log.
        DamageError, EnvironmentFault: a ring is damaged, or the disk fails. So with all of these: what was collected stays.
        KeyboardInterrupt: Ctrl-C. The collectors end within two seconds, and what is open is treated as `interrupted` says.

    Cost: a process and its imports for each collector; a message for each episode. To begin: O(episodes in the rings).

    Processes and threads: the collectors end with this process, however it ends. A script that calls this needs
    `if __name__ == "__main__":` around the call.

    Source: Ape-X (Horgan et al. 2018) for many collectors with one learner; the supervisor is Erlang's one-for-one.

    Example:
        >>> from pathlib import Path
        >>> import ringmap
        >>> _ = Path("rooms.py").write_text('''
        ... import ringmap
        ... def make_world(number):
        ...     world = ringmap.World("ringmap/TwoRoom-v1", num_envs=1, add_pixels=False, max_episode_steps=10)
        ...     world.set_policy(ringmap.policy.RandomPolicy(seed=0))
        ...     return world
        ... ''')
        >>> import sys
        >>> here = str(Path.cwd())  # a script's own folder is there already
        >>> sys.path.insert(0, here)
        >>> ringmap.collect("rooms:make_world", "runs/replay", episodes=6, collectors=2, max_steps=1000, context="forkserver")
        >>> buf = ringmap.data.ShardedReplayBuffer("runs/replay")
        >>> sorted(buf.get_episode_data()["seed"])
        [0, 1, 2, 3, 4, 5]
        >>> buf.close()
        >>> sys.path.remove(here)
    """
    path = os.path.abspath(os.fspath(path))
    count = count_of(episodes, _WHERE)
    positive(_WHERE, "collectors", collectors)
    positive(_WHERE, "max_steps", max_steps)
    if threads is not None:
        positive(_WHERE, "threads", threads)
    if context not in ("spawn", "forkserver"):
        raise InputError(
            f"{_WHERE}: context must be 'spawn' or 'forkserver', got {context!r}: a forked process would have the locks of this one"
        )
    if not (options is None or isinstance(options, Mapping)):
        raise InputError(
            f"{_WHERE}: options must be one mapping for all episodes, got {type(options).__name__}"
        )
    if not (weights is None or isinstance(weights, Weights)):
        raise InputError(
            f"{_WHERE}: weights= must be a ringmap.Weights, got {type(weights).__name__}"
        )
    if pace is not None:
        if not isinstance(pace, Pace):
            raise InputError(f"{_WHERE}: pace= must be a ringmap.Pace, got {type(pace).__name__}")
        pace.check_ring(ring_of(path, 0), _WHERE)
    _check_ring(ring)
    if isinstance(make_world, str):
        make_world = imported(make_world, _WHERE)
    if not callable(make_world):
        raise InputError(
            f"{_WHERE}: make_world must be a function of the collector's number, got {make_world!r}"
        )
    if threads is None and THREADS not in os.environ:
        threads = max(1, cores() // collectors)
    parts = Parts(make_world, policy, weights, pace, {**ring, "max_steps": max_steps})
    collection = Collection(operator.index(seed), count, options)
    job = Job(path, collection, _pickled(parts), commit_every, threads, wait_s, os.getpid())
    folder = os.path.join(path, _FOLDER)
    with _alone(folder):
        finished = finished_below(path, collection, wait_s, _WHERE)
        if finished and not resume:
            raise ExistsError(
                f"{_WHERE}: the rings in {path} hold {len(finished)} episodes of a collection with seed {collection.seed}; choose another "
                "seed or path, or resume=True to go on with it"
            )
        seeds = Seeds(count, finished, collectors)
        with bar_of(f"collect {path}", count, progress, count - seeds.left) as bar:
            if seeds.left:
                Supervisor(job, seeds, collectors, folder, context, bar).run()


def imported(name: str, where: str) -> Any:
    """Return what "module:name" names.

    Raises:
        InputError: there is no such module or name.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise InputError(f"{where}: expected 'module:name', got {name!r}")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{where}: {name!r}: {error}; a module is looked for where Python looks, in PYTHONPATH and beside the script"
        ) from error
    try:
        return operator.attrgetter(attribute)(found)
    except AttributeError as error:
        raise InputError(f"{where}: {name!r}: {error}") from error


def _check_ring(ring: Mapping[str, Any]) -> None:
    known = [
        n for n in inspect.signature(ReplayBuffer.__init__).parameters if n not in _NOT_FOR_RINGS
    ]
    for name in ring:
        if name not in known:
            raise InputError(f"{_WHERE}: unknown argument {name!r}; for a ring there are {known}")


def _pickled(parts: Parts) -> bytes:
    # Not multiprocessing's own pickling: it would put a model's tensors into memory that all collectors share.
    try:
        return pickle.dumps(parts)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        for name in ("make_world", "policy", "weights", "pace", "ring"):
            try:
                pickle.dumps(getattr(parts, name))
            except (pickle.PicklingError, AttributeError, TypeError) as found:
                raise InputError(
                    f"{_WHERE}: {name} can't be sent to another process: {found}; define it at the top level of a module"
                ) from error
        raise


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Hold the lock of a collection.

    Raises:
        LockedError: another call holds it.
        EnvironmentFault: the disk refuses it, or is another host's.
    """
    disk = Disk()
    with clear_errors(_WHERE, folder):
        make_folder(disk, folder)
    if disk.system.is_network(folder):
        raise EnvironmentFault(
            f"{_WHERE}: {folder} lies on a network file system, where locks and maps of other hosts are not ours; put the rings on a local disk"
        )
    lock = WriterLock(disk, os.path.join(folder, _LOCK), folder)
    try:
        lock.acquire()
    except LockedError:
        raise LockedError(
            f"{_WHERE}: {describe(holder_of(lock.path))} is collecting here already; wait for it, or choose another path"
        ) from None
    try:
        yield
    finally:
        lock.release()
