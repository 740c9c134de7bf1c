"""What a collection refuses, and what it tells its collectors: on one machine and over Ray.

Invariants: nothing is made or changed here before all is checked, but for the lock of `alone`.
Not here: the rings (rings.py), the collectors (supervisor.py).
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

from ringmap.arguments import positive, whole
from ringmap.buffers.replay import ReplayBuffer
from ringmap.collection.collector import Job, Parts
from ringmap.collection.seeds import Seeds
from ringmap.errors import EnvironmentFault, ExistsError, InputError, LockedError
from ringmap.fleet.weights import Weights
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.system import clear_errors
from ringmap.world.collecting import Collection
from ringmap.world.rollout import count_of
from ringmap.world.world import World

__all__ = ["FOLDER", "alone", "function_of", "imported", "job_of", "seeds_left"]

FOLDER = "collect"
"""Beside the rings: the lock of a collection, and logs."""

_LOCK = "lock"
_NOT_FOR_RINGS = {"self", "max_steps", "path", "seed", "disk"}


def job_of(
    where: str,
    parts: Parts,
    episodes: int,
    collectors: int,
    seed: int,
    options: Mapping[str, Any] | None,
    commit_every: int | None,
    threads: int | None,
    wait_s: float,
    dumps: Callable[[Any], bytes],
) -> Job:
    """Return what every collector is told.

    Args:
        where: the call, for messages.
        parts: what is pickled for each.
        episodes: as for `ringmap.collect`, as those that follow.
        collectors: how many.
        seed: of the first episode.
        options: reset options.
        commit_every: rows.
        threads: of each.
        wait_s: for a ring that is held.
        dumps: pickles.

    Raises:
        InputError: an argument is wrong.
    """
    count = count_of(episodes, where)
    collectors = positive(where, "collectors", collectors)
    positive(where, "max_steps", parts.ring["max_steps"])
    if threads is not None:
        threads = positive(where, "threads", threads)
    if not (options is None or isinstance(options, Mapping)):
        raise InputError(f"{where}: options must be one mapping for all episodes, got {type(options).__name__}")
    if not (parts.weights is None or isinstance(parts.weights, Weights)):
        raise InputError(f"{where}: weights= must be a ringmap.Weights, got {type(parts.weights).__name__}")
    _check_ring(parts.ring, where)
    collection = Collection(whole(where, "seed", seed), count, options)
    return Job(where, collection, _pickled(parts, where, dumps), commit_every, threads, wait_s)


def function_of(make_world: Any, where: str) -> Callable[[int], World]:
    """Return what makes the worlds, which may be given as "module:function".

    Raises:
        InputError: it is no function.
    """
    found = imported(make_world, where) if isinstance(make_world, str) else make_world
    if not callable(found):
        raise InputError(f"{where}: make_world must be a function of the collector's number, got {found!r}")
    given: Callable[[int], World] = found
    return given


def seeds_left(path: str, job: Job, finished: set[int], collectors: int, resume: bool) -> Seeds:
    """Return the seeds that the collectors share.

    Raises:
        ExistsError: some are finished, and it is not to be resumed.
    """
    if finished and not resume:
        raise ExistsError(
            f"{job.where}: the rings in {path} hold {len(finished)} episodes of a collection with seed "
            f"{job.collection.seed}; choose another seed or path, or resume=True to go on with it"
        )
    return Seeds(job.collection.episodes, finished, collectors)


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
            f"{where}: {name!r}: {error}; a module is looked for where Python looks, in PYTHONPATH and beside the "
            "script"
        ) from error
    try:
        return operator.attrgetter(attribute)(found)
    except AttributeError as error:
        raise InputError(f"{where}: {name!r}: {error}") from error


def _check_ring(ring: Mapping[str, Any], where: str) -> None:
    known = [n for n in inspect.signature(ReplayBuffer.__init__).parameters if n not in _NOT_FOR_RINGS]
    for name in ring:
        if name not in {*known, "max_steps"}:
            raise InputError(f"{where}: unknown argument {name!r}; for a ring there are {known}")


def _pickled(parts: Parts, where: str, dumps: Callable[[Any], bytes]) -> bytes:
    # Not multiprocessing's own pickling: it would put a model's tensors into memory that all collectors share.
    try:
        return dumps(parts)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        for name in ("make_world", "policy", "weights", "pace", "ring"):
            try:
                dumps(getattr(parts, name))
            except (pickle.PicklingError, AttributeError, TypeError) as found:
                raise InputError(
                    f"{where}: {name} can't be sent to another process: {found}; define it at the top level of a module"
                ) from error
        raise


@contextlib.contextmanager
def alone(folder: str, where: str) -> Iterator[None]:
    """Hold the lock of a collection.

    Raises:
        LockedError: another call holds it.
        EnvironmentFault: the disk refuses it, or is another host's.
    """
    disk = Disk()
    with clear_errors(where, folder):
        make_folder(disk, folder)
    if disk.system.is_network(folder):
        raise EnvironmentFault(
            f"{where}: {folder} lies on a network file system, where locks and maps of other hosts are not ours; put "
            "the rings on a local disk"
        )
    lock = WriterLock(disk, os.path.join(folder, _LOCK), folder)
    try:
        lock.acquire()
    except LockedError:
        raise LockedError(
            f"{where}: {describe(holder_of(lock.path))} is collecting here already; wait for it, or choose another path"
        ) from None
    try:
        yield
    finally:
        lock.release()
