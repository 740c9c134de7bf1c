"""`ringmap.ray.collect`: a collection by actors, each into a ring on the disk of its own node.

    arguments ─► locks of all rings on all nodes, counted ─► supervisor ─► actors, wherever Ray has room

Invariants: nothing is made or changed before the arguments are checked; what is committed anywhere is counted before
anything is played. Not here: the count (census.py), the collectors (actors.py), leases and restarts
(ringmap.collection).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ringmap.collection.job import Parts, function_of, job_of, seeds_left
from ringmap.collection.supervisor import Supervisor
from ringmap.errors import InputError
from ringmap.fleet.weights import Weights
from ringmap.ray.actors import Actors
from ringmap.ray.census import Census
from ringmap.ray.cluster import Layout, ray_for
from ringmap.world.collecting import kept_seeds
from ringmap.world.rollout import bar_of
from ringmap.world.world import World

__all__ = ["collect"]

_WHERE = "ringmap.ray.collect"
_OURS = ("max_restarts", "concurrency_groups", "max_concurrency", "lifetime")


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
    options: Mapping[str, Any] | None = None,
    commit_every: int | None = None,
    drop: str | Iterable[str] = (),
    threads: int | None = None,
    actor: Mapping[str, Any] | None = None,
    lost: Iterable[str] = (),
    progress: bool = True,
    wait_s: float = 30.0,
    **ring: Any,
) -> None:
    """Collect episodes with the processors of a Ray cluster; each collector is an actor with a ring on its node's own
    disk.

    Just the seeds `seed ... seed + episodes - 1` are played, each once, whoever is killed meanwhile, collectors, nodes
    or this process: the rings of all nodes are counted before anything is played. A collector that dies is started
    again, on its node or, if that is gone, on another one. What was leased to a ring on a node that is away is played
    once the ring can be counted.

    Args:
        make_world: as for `ringmap.collect`; a function of the script that calls this, too.
        path: as for `ringmap.ray.ReplayBuffer`. The rings of a node are `path/NODE/collector-3`, ...
        episodes: how many in all.
        collectors: how many actors. Ray starts as many as it has room for; the others wait, and the seeds do not.
        seed: of the first episode.
        resume: go on with what the rings hold of this collection; False: refuse if they hold any.
        max_steps: capacity of each ring, in steps.
        policy: as for `ringmap.collect`.
        weights: as for `ringmap.collect`, in a directory that all nodes see.
        options: reset options.
        commit_every: as for `ringmap.collect`.
        drop: as for `ringmap.collect`.
        threads: of OpenMP and PyTorch in each collector. None: as many as the actor has processors, as Ray says to
            OpenMP.
        actor: options of Ray for each actor, such as `{"num_cpus": 2, "resources": {"rings": 1}}`. By default one
            processor each, spread over the nodes; a collector whose ring is there goes to its node.
        lost: names of nodes that held rings and whose disks are gone for good: their seeds are played again.
        progress: show a progress bar once it takes a while.
        wait_s: how long to wait for a ring that another process writes, and for a node that holds rings and is away.
        ring: other arguments of `ReplayBuffer` for each ring.

    Raises:
        MissingExtraError, RoleError: Ray is not installed, or not initialised.
        InputError, ExistsError, LockedError, RolloutError, DamageError: as `ringmap.collect`.
        EnvironmentFault: a node that holds rings of this collection is away for `wait_s` seconds, at the beginning, or
            at the end, when only its seeds are left; or a disk fails. What was collected stays.
        KeyboardInterrupt: Ctrl-C. The collectors end, and what is open is treated as `interrupted` says.

    Cost: an actor for each collector, and one for each node; some calls of an actor a second for each collector. To
    begin:
        O(episodes in the rings), on all nodes at once.

    Processes and threads: actors end with this process, however it ends. A collector plays in a thread of its actor.

    Source: Ape-X (Horgan et al. 2018); the supervisor is Erlang's one-for-one.

    Example, in a cluster::

        ray.init("auto")
        rr.collect("rooms:make_world", "/data/replay", episodes=10_000, collectors=64, max_steps=1_000_000)
    """
    layout = Layout(path, _WHERE)
    made = function_of(make_world, _WHERE)
    given = dict(actor or {})
    for name in _OURS:
        if name in given:
            raise InputError(f"{_WHERE}: actor= must not have {name!r}: the supervisor restarts collectors")
    if isinstance(lost, str):
        raise InputError(f"{_WHERE}: lost= must list names of nodes, got {lost!r}")
    ray = ray_for(_WHERE)
    from ray import cloudpickle

    parts = Parts(made, policy, weights, None, {**ring, "max_steps": max_steps}, kept_seeds(drop, _WHERE))
    job = job_of(_WHERE, parts, episodes, collectors, seed, options, commit_every, threads, wait_s, cloudpickle.dumps)
    count = job.collection.episodes
    with Census(ray, layout, job, lost) as census:
        seeds = seeds_left(layout.path, job, census.count(), collectors, resume)
        with bar_of(f"collect {layout.path}", count, progress, count - seeds.left) as bar:
            if seeds.left:
                actors = Actors(ray, census, layout, job, given)
                Supervisor(_WHERE, actors, seeds, collectors, bar, wait_s).run()
