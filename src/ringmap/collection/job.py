"""A job: what every collector of a collection is told, on one machine and over Ray; and what a call is refused for.

Invariants: nothing is made or changed here.
Not here: the rings (rings.py), the collectors (supervisor.py).
"""

from __future__ import annotations

import importlib
import inspect
import operator
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ringmap.arguments import positive, whole
from ringmap.buffers.replay import ReplayBuffer
from ringmap.collection.seeds import Seeds
from ringmap.errors import ExistsError, InputError
from ringmap.fleet.weights import checked_weights
from ringmap.formats.common.refusals import KEEP_ALL, Drop
from ringmap.world.collecting import Collection
from ringmap.world.rollout import count_of
from ringmap.world.world import World

__all__ = ["Job", "Parts", "function_of", "imported", "job_of", "seeds_left"]

_NOT_FOR_RINGS = {"self", "path", "seed", "disk"}


@dataclass(frozen=True, slots=True)
class Parts:
    """What the caller gave, pickled as one: a policy and the model that its weights are loaded into stay one object."""

    make_world: Callable[[int], World]
    policy: Any
    weights: Any
    pace: Any
    ring: dict[str, Any]
    drop: Drop = KEEP_ALL


@dataclass(frozen=True, slots=True)
class Job:
    """What every collector of a collection is told. `where`: the call, for messages; `parts`: pickled."""

    where: str
    collection: Collection
    parts: bytes
    commit_every: int | None
    threads: int | None
    wait_s: float


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
    """Check the arguments of `ringmap.collect`, and return what every collector is told."""
    count = count_of(episodes, where)
    positive(where, "collectors", collectors)
    positive(where, "max_steps", parts.ring["max_steps"])
    if threads is not None:
        threads = positive(where, "threads", threads)
    if not (options is None or isinstance(options, Mapping)):
        raise InputError(f"{where}: options must be one mapping for all episodes, got {type(options).__name__}")
    checked_weights(parts.weights, where)
    known = [name for name in inspect.signature(ReplayBuffer.__init__).parameters if name not in _NOT_FOR_RINGS]
    for name in parts.ring:
        if name not in known:
            raise InputError(f"{where}: unknown argument {name!r}; for a ring there are {known}")
    collection = Collection(whole(where, "seed", seed), count, options)
    return Job(where, collection, _pickled(parts, where, dumps), commit_every, threads, wait_s)


def function_of(make_world: Any, where: str) -> Callable[[int], World]:
    """Return what makes the worlds, which may be given as "module:function"."""
    found = imported(make_world, where) if isinstance(make_world, str) else make_world
    if not callable(found):
        raise InputError(f"{where}: make_world must be a function of the collector's number, got {found!r}")
    made: Callable[[int], World] = found
    return made


def seeds_left(path: str, job: Job, finished: set[int], collectors: int, resume: bool) -> Seeds:
    """Return the seeds that the collectors share; raise ExistsError if some are finished, and are not to be resumed."""
    if finished and not resume:
        raise ExistsError(
            f"{job.where}: the rings in {path} hold {len(finished)} episodes of a collection with seed "
            f"{job.collection.seed}; choose another seed or path, or resume=True to go on with it"
        )
    return Seeds(job.collection.episodes, finished, collectors)


def imported(name: str, where: str) -> Any:
    """Return what "module:name" names."""
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
