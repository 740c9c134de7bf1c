"""`ringmap.collect`: what it refuses, and what it counts before anything is played.

    arguments ─► lock of the collection ─► locks of all rings, counted ─► supervisor

Invariants: nothing is made or changed before the arguments are checked; two calls never run on one directory.
Not here: the checks (job.py), the processes (process.py).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ringmap.arguments import positive
from ringmap.collection.job import Parts, function_of, job_of, seeds_left
from ringmap.collection.process import THREADS, Processes
from ringmap.collection.rings import FOLDER, alone, finished_below, ring_of
from ringmap.collection.supervisor import Supervisor
from ringmap.errors import InputError
from ringmap.fleet.pace import Pace, checked_pace
from ringmap.fleet.weights import Weights
from ringmap.storage.disk.paths import local_path
from ringmap.storage.disk.system import cores
from ringmap.world.collecting import kept_seeds
from ringmap.world.rollout import bar_of
from ringmap.world.world import World

__all__ = ["collect"]

_WHERE = "ringmap.collect"


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
    drop: str | Iterable[str] = (),
    threads: int | None = None,
    progress: bool = True,
    wait_s: float = 10.0,
    context: str = "spawn",
    **ring: Any,
) -> None:
    """Collect episodes with several processes, each into a ring of its own below one directory.

    Just the seeds `seed ... seed + episodes - 1` are played, each once, whoever is killed meanwhile, and when: a
    collector is started again; after a kill of this process, or of all, the same call goes on, with any number of
    collectors. Read the rings with `ringmap.data.ShardedReplayBuffer(path)`, also meanwhile.

    Args:
        make_world: called in each collector with its number, 0 to `collectors - 1`; returns its `World`. A function at
            the top level of a module, something else that can be pickled, or text, "module:function".
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
        drop: names of columns, and of data of episodes, to leave out.
        threads: of OpenMP and PyTorch in each collector. None: what `OMP_NUM_THREADS` says, else an equal part of the
            cores.
        progress: show a progress bar once it takes a while.
        wait_s: how long to wait for a ring that another process writes, which may be about to end.
        context: how the processes start: "spawn", or "forkserver".
        ring: other arguments of `ReplayBuffer` for each ring, such as `interrupted="keep"`.

    Raises:
        InputError: an argument is wrong; rings below `path` do not fit together, or hold another collection with this
            seed; two hold the same seed. Or as `World.collect` raised it in a collector that could not begin.
        ExistsError: with `resume=False`, there is something to resume.
        LockedError: another call runs on this directory, or another process writes a ring in it.
        RolloutError: `make_world` failed, with its traceback; or every collector ended five times without a new
            episode: the message has the last lines of the log.
        DamageError, EnvironmentFault: a ring is damaged, or the disk fails. So with all of these: what was collected
            stays.
        KeyboardInterrupt: Ctrl-C. The collectors end within two seconds, and what is open is treated as `interrupted`
            says.

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
        >>> ringmap.collect(
        ...     "rooms:make_world", "runs/replay", episodes=6, collectors=2, max_steps=1000, context="forkserver"
        ... )
        >>> buf = ringmap.data.ShardedReplayBuffer("runs/replay")
        >>> sorted(buf.get_episode_data()["seed"])
        [0, 1, 2, 3, 4, 5]
        >>> buf.close()
        >>> sys.path.remove(here)
    """
    path = local_path(path)
    if context not in ("spawn", "forkserver"):
        raise InputError(
            f"{_WHERE}: context must be 'spawn' or 'forkserver', got {context!r}: a forked process would have the "
            "locks of this one"
        )
    pace = checked_pace(pace, _WHERE)
    if pace is not None:
        pace.check_ring(ring_of(path, 0), _WHERE)
    if threads is None and THREADS not in os.environ:
        collectors = positive(_WHERE, "collectors", collectors)
        threads = max(1, cores() // collectors)
    parts = Parts(
        function_of(make_world, _WHERE),
        policy,
        weights,
        pace,
        {**ring, "max_steps": max_steps},
        kept_seeds(drop, _WHERE),
    )
    job = job_of(
        _WHERE,
        parts,
        episodes,
        collectors,
        seed,
        options,
        commit_every,
        threads,
        wait_s,
        pickle.dumps,
    )
    count = job.collection.episodes
    folder = os.path.join(path, FOLDER)
    with alone(folder, _WHERE):
        finished = finished_below(path, job.collection, wait_s, _WHERE)
        seeds = seeds_left(path, job, finished, collectors, resume)
        with bar_of(f"collect {path}", count, progress, count - seeds.left) as bar:
            if seeds.left:
                workers = Processes(job, path, folder, context)
                Supervisor(_WHERE, workers, seeds, collectors, bar).run()
