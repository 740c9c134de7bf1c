"""Many rings, each with a writer of its own, as one buffer to read.

    runs/replay/collector-0   <- one process writes
    runs/replay/collector-1   <- another                 -> ShardedReplayBuffer("runs/replay") in the learner
    runs/replay/collector-2   <- joins later

Rings hold episodes, or transitions: then there are no episodes and windows, and a batch is that of a
`TransitionReplayBuffer`.

Invariants: no ring is written; a ring is read by its own protocol, so no reader waits for a writer; episodes are
numbered ring by ring, in the order in which the rings joined.
Not here: draws and gathers (engine.py), finding rings (rings.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ringmap.arguments import fraction, positive
from ringmap.buffers.batch import Batch
from ringmap.buffers.engine import Engine, door
from ringmap.buffers.options import Options, check_reads, sendable
from ringmap.buffers.rings import Ring, RingNumbers, idle_s, remove_ring
from ringmap.buffers.sampled import Sampled
from ringmap.buffers.sharded.priorities import LearnerState
from ringmap.buffers.sharded.reader import Weights
from ringmap.buffers.sharded.rings import Fleet, as_paths
from ringmap.clips.cut import Cut
from ringmap.clips.facts import Facts, check_fps
from ringmap.clips.rings import RING_FAULTS
from ringmap.clips.samplers.base import Sampler
from ringmap.datasets.base import Transform
from ringmap.datasets.batch import worker
from ringmap.errors import ClipIndexError, ClosedError, ExistsError, InputError, ReadOnlyError
from ringmap.fleet.pace import Pace
from ringmap.fleet.weights import POLICY_STEP
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.paths import local_path
from ringmap.storage.inspect.check import Finding
from ringmap.storage.inspect.describe import WriterFacts, writer_of

__all__ = ["Shard", "ShardedReplayBuffer"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One ring, as `ShardedReplayBuffer.shards` lists it.

    Args:
        name: of its directory; in a list or a glob its path.
        path: its directory.
        episodes: stored now; 0 for transitions.
        steps: stored now; transitions that count.
        clips: stored now, of the buffer's history; transitions that count.
        written: steps ever written.
        writer: who writes it: `alive`, `host`, `pid`; None for a ring that can't be read.
        idle_s: seconds since its last commit; None before the first.
        redraws: clips of it that this process redrew.
        problem: why it is not read; None: it is read.
        policy_step: the step of the weights that played its newest episode (see `ringmap.Weights`); None: not known.
        number: of the ring in columns `<name>_ring` of `Index`, for as long as this buffer is open; None for one that
            is not read.
    """

    name: str
    path: Path
    episodes: int
    steps: int
    clips: int
    written: int
    writer: WriterFacts | None
    idle_s: float | None
    redraws: int
    problem: str | None
    policy_step: int | None = None
    number: int | None = None


def _refused(name: str) -> Callable[..., NoReturn]:
    """Return a method that raises: a ring is written by its own writer."""

    def refuse(self: ShardedReplayBuffer, *_: Any, **__: Any) -> NoReturn:
        self.engine.refuse(f"ShardedReplayBuffer.{name}")

    refuse.__name__ = name
    refuse.__doc__ = """Raise: a ring is written, and copied, by itself.

        Raises:
            ReadOnlyError: always; it names the rings.
        """
    return refuse


class ShardedReplayBuffer(Sampled):
    """Many rings, read as one buffer. The rings are only read; no server runs.

    Each ring is the directory of a `ReplayBuffer`, with a writer of its own. Rings that are added later join without a
    restart; one that is removed leaves. Where one is damaged, of other columns, or may not be read, `on_bad` says what
    happens.

    All rings may be directories of `TransitionReplayBuffer` instead. Then batches, items and views hold transitions,
    with the columns that a `TransitionReplayBuffer` gives, as NumPy arrays; `out` may be an earlier batch, nested as it
    is. An n-step sum stays in its ring. `history_len`, `frameskip`, windows and all that is about episodes are refused.
    In a view the transitions that were committed together stand for an episode, so `split` parts these.

    Args:
        paths: a directory whose children are rings (other children are passed over), a glob, or a list of rings. In the
            first two cases, and in a list whose rings are not all there yet, new rings join: at `refresh`, and at a
            draw at most a second later.
        history_len: observations per clip; None: as the first ring has stored.
        frameskip: stride between the observations of a clip; None: as the first ring has stored.
        sampler: a `PrioritizedSampler`, whose priorities then span all rings; a `RecencySampler`, which goes by the
            times of commits (those of one machine agree); a `UniformSampler`, `EpisodeSampler` or `EpochSampler`; a
            mixture of all but the first; or `fn(step, buffer, batch_size, history_len) -> ids` with the attribute
            `any_order = True`: ids run ring by ring, so the highest are not the newest clips. None draws by `weights`.
            No lock is held meanwhile: what a sampler counts is of one moment. Over one ring any sampler draws.
        transform: dict -> dict, applied to each clip read by index or DataLoader, not to `sample`.
        weights: how often `sample` draws from a ring: "clips": every clip of all rings is equally likely; "equal":
            every ring with clips is; name -> weight, as `shards` names them (a ring without one is not drawn from).
            Ids, views and passes know no weights.
        on_bad: what to do with rings that can't be read (damaged, of other columns, or not to be looked at by this
            process): "raise": an error that names all of them, at the opening and at each draw until they are read, or
            gone; "skip": go on with the others, with a `RuntimeWarning` at each change, and look again after 1, 2, 4,
            ... 60 s. `shards` names them either way.
            A ring whose directory is removed is no such ring: it is evicted.
        wait_s: how long to wait for the first ring.
        state: the learner's own directory, which keeps the priorities of a `PrioritizedSampler`, as of the last call
            that returned, also after a kill; one learner at a time. After a reboot priorities begin again. None:
            priorities are in memory alone, and begin with those that each ring's writer stored.
        pace: what every batch waits for and is counted by: of `sample`, `batches`, clips by id and a DataLoader without
            workers. Batches of workers are gathered ahead: count them with `pace.over(loader, num_steps)`. Views are
            not counted.
        seed: of the generator.
        threads: as for `ReplayBuffer`.
        reads: as for `ReplayBuffer`.
        n_step: of transitions, as for `TransitionReplayBuffer`; None: 1.
        gamma: of transitions, as for `TransitionReplayBuffer`; None: 0.99.
        fps: steps per second of all rings of episodes, whatever they say; None: as they say, and a ring of another rate
            is refused.

    Raises:
        InputError: an argument is wrong, or is for rings of the other kind; the same ring twice, by a link or a copy;
            the path is a ring itself; a `PrioritizedSampler` by rank; a sampler that may take the highest ids for the
            newest; a sampler and `weights`.
        LockedError: another learner holds `state`.
        NoClipsError: no ring is there after `wait_s` seconds.
        BadRingsError: rings can't be read, with on_bad="raise"; methods that draw raise it, too.

    Cost: opening reads the records of each ring once. A draw looks at all rings in one sweep: 4 us for 64 that are
    idle. A batch
        takes one copy of its rows, 20 to 40 us more than one of a single ring, and less than 1 us for each ring that it
        touches. Where the files of the rings can't be mapped side by side (compressed or mutable columns,
        `reads="pread"`, padded windows, episodes in parts, a limit of address space, systems other than Linux) it is 10
        to 50 us for each ring, and large clips of 16 rings take up to 3 times as long as from one.

    Processes and threads: as a live reader (`ReplayBuffer.open`). A pickle holds paths, settings and ring numbers.
    DataLoader workers
        read the rings that the loader's process knows, as of its last refresh.

    Source: Reverb (Cassirer et al., 2021), sharded tables; Ape-X (Horgan et al., 2018), many actors and one learner.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> for number in range(2):
        ...     buf = ReplayBuffer(max_steps=100, path=f"fleet/{number}")
        ...     buf.write_episode({"obs": np.full(20, number)})
        ...     buf.close()
        >>> buf = ShardedReplayBuffer("fleet", history_len=4, seed=0)
        >>> buf.num_episodes, len(buf), buf.sample(8)["obs"].shape
        (2, 34, (8, 4))
        >>> [(shard.name, shard.steps, shard.problem) for shard in buf.shards]
        [('0', 20, None), ('1', 20, None)]

        Transitions:

        >>> from ringmap import TransitionReplayBuffer
        >>> for number in range(2):
        ...     ring = TransitionReplayBuffer(100, obs_shape=(3,), path=f"steps/{number}", device=None)
        ...     for t in range(10):
        ...         ring.add(np.full(3, t), action := number, 1.0, np.full(3, t + 1), t == 9)
        ...     ring.close()
        >>> buf = ShardedReplayBuffer("steps", n_step=3, gamma=0.5, seed=0)
        >>> batch = buf.sample(8)
        >>> len(buf), {name: values.shape for name, values in batch.items()}
        (20, {'observations': (8, 3), 'actions': (8,), 'rewards': (8,), 'next_observations': (8, 3), 'dones': (8,),
        'discounts': (8,)})
        >>> bool((batch["rewards"] <= 1.75).all()), sorted(set(batch["actions"].tolist()))
        (True, [0, 1])
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        history_len: int | None = None,
        frameskip: int | None = None,
        sampler: Sampler | None = None,
        transform: Transform | None = None,
        *,
        weights: Weights = "clips",
        on_bad: str = "raise",
        wait_s: float = 10.0,
        state: str | os.PathLike[str] | None = None,
        pace: Pace | None = None,
        seed: int | None = None,
        threads: int | None = None,
        reads: str = "map",
        n_step: int | None = None,
        gamma: float | None = None,
        fps: Any = None,
    ) -> None:
        where = "ShardedReplayBuffer"
        for name, value in (
            ("history_len", history_len),
            ("frameskip", frameskip),
            ("threads", threads),
            ("n_step", n_step),
        ):
            if value is not None:
                positive(where, name, value)
        if on_bad not in ("raise", "skip"):
            raise InputError(f"{where}: on_bad must be 'raise' or 'skip', got {on_bad!r}")
        if not wait_s >= 0:
            raise InputError(f"{where}: wait_s must not be negative, got {wait_s!r}")
        check_reads(reads, where)
        told = Facts(fps=check_fps(where, fps))
        if gamma is not None:
            gamma = float(fraction(where, "gamma", gamma))
        n_step = None if n_step is None else int(n_step)
        sums = {n: v for n, v in (("n_step", n_step), ("gamma", gamma)) if v is not None}
        given = (("history_len", history_len), ("frameskip", frameskip))
        asked = next((f"{name}={value}" for name, value in given if value not in (None, 1)), None)
        if asked is not None and sums:
            raise InputError(
                f"{where}: {asked} is for rings of episodes, {' and '.join(sums)} for transitions; give those that fit "
                "the rings"
            )
        rings = Fleet(as_paths(paths), {"reads": reads}, on_bad, RingNumbers(), sums, asked, told)
        shares = _weights(weights)
        kept = None if state is None else LearnerState(local_path(state), True, door(None))
        try:
            self.engine = Engine(rings, sampler, seed, weights=shares, state=kept)
        except BaseException:
            if kept is not None:
                kept.close()
            raise
        self.engine.threads = threads
        self.transform, self.pace = transform, pace
        try:
            self.engine.start(float(wait_s))
        except BaseException:
            self.engine.close()
            raise
        first = self.engine.rings[0]
        stored = Options.remembered(first.source.manifest.settings, first.folder)
        self.num_steps = stored.history_len if history_len is None else int(history_len)
        self.frameskip = stored.frameskip if frameskip is None else int(frameskip)

    # -- rings --------------------------------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        """The rings that are open, and how they are followed: for classes that build their own buffer."""
        fleet = self.engine.fleet
        assert fleet is not None
        return fleet

    def _open(self) -> tuple[Ring, ...]:
        """Return the rings that are open, whatever is wrong with others."""
        self.engine.check_open()
        return self.engine.rings

    @property
    def shards(self) -> list[Shard]:
        """The rings, by name, also those that can't be read. Looks at each writer's lock."""
        found, cut = [], self.cut
        for ring in self._open():
            source = ring.source
            with thread.searching, source.lock:
                live = source.live
                episodes, steps, written = live.num_episodes, live.num_steps, int(source.head)
            idle = idle_s(ring) if source.seq else None
            clips, redraws = ring.reader.pin(cut).count, ring.reader.num_redraws
            if not ring.reader.holds_episodes:
                episodes, steps = 0, clips
            counts = episodes, steps, clips, written
            writer = writer_of(ring.folder)
            played = _policy_step(ring) if episodes else None
            found.append(
                Shard(
                    ring.name,
                    Path(ring.folder),
                    *counts,
                    writer,
                    idle,
                    redraws,
                    None,
                    played,
                    ring.number,
                )
            )
        for bad in list(self.fleet.problems.values()):
            why = str(bad.error)
            found.append(Shard(bad.name, Path(bad.folder), 0, 0, 0, 0, None, None, bad.redraws, why))
        return sorted(found, key=lambda shard: shard.name)

    def remove_ring(self, name: str) -> None:
        """Remove a ring that nobody writes, with its directory. Its clips are lost to all readers, as by an eviction.

        A collection that is resumed (`ringmap.collect`) knows the seeds in its rings alone: it would play those of this
        one again.

        Args:
            name: as in `shards`; also of one that can't be read.

        Raises:
            InputError: there is no ring of this name.
            LockedError: a process writes it. Nothing was changed.
            EnvironmentFault: the disk fails, or does not allow it.
        """
        where = "ShardedReplayBuffer.remove_ring"
        rings = {ring.name: ring for ring in self._open()}
        bad = {one.name: one for one in self.fleet.problems.values()}
        if name in rings:
            self.engine.remove(rings[name], where)
        elif name in bad:
            remove_ring(bad[name].folder, where)
            self.refresh()
        else:
            raise InputError(f"{where}: no ring {name!r}; there are {sorted([*rings, *bad])}")

    @property
    def reward_at(self) -> str | None:  # type: ignore[override]
        """Where rewards stand in the rings, as for `ReplayBuffer`; None where that is not known, as before the first
        episode."""
        return self.fleet.facts.reward_at

    @property
    def fps(self) -> Fraction | None:  # type: ignore[override]
        """Steps per second of the rings that know it, or as named; None where that is not known, as before the first
        episode."""
        return self.fleet.facts.fps

    @property
    def ring_paths(self) -> list[Path]:
        """The folder, or the directories of the rings where there is none."""
        path = self.path
        return [path] if path is not None and path.is_dir() else [shard.path for shard in self.shards]

    write_episode = _refused("write_episode")
    write_episodes = _refused("write_episodes")
    write_joined = _refused("write_joined")
    begin_episode = _refused("begin_episode")
    extend_from = _refused("extend_from")
    add = _refused("add")
    extend = _refused("extend")
    clear = _refused("clear")

    def update(self, ids: Any, values: Mapping[str, Any]) -> NoReturn:
        """Raise: values of stored steps change in the process that writes their ring.

        Raises:
            ReadOnlyError: always; it names the way.
        """
        raise ReadOnlyError(
            "ShardedReplayBuffer.update: rings are only read here; call ReplayBuffer.update in the process that writes "
            "the ring, or store the value at collection"
        )

    # -- by id --------------------------------------------------------------------------------

    def __getitem__(self, idx: Any) -> dict[str, Any]:
        """Return one clip, or a batch of a list of ids, as `ReplayBuffer.__getitem__` does.

        Raises:
            ClipIndexError: the id is out of range. Negative ids count from the end.
            InputError: the ids are not integers; in a DataLoader worker, of a buffer with `pace`.
        """
        self._keep_pace(np.size(idx))
        return super().__getitem__(idx)

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips, as `ReplayBuffer.__getitems__` does. PyTorch's DataLoader calls this method.

        Raises:
            InputError: in a DataLoader worker, of a buffer with `pace`.
        """
        ids = list(indices)
        self._keep_pace(len(ids))
        return super().__getitems__(ids)

    def _keep_pace(self, count: int) -> None:
        """Wait until so many clips may be drawn."""
        if self.pace is None or not count:
            return
        if worker() is not None:
            raise InputError(
                "ShardedReplayBuffer(pace=...): a DataLoader worker gathers ahead, and its batches count when they are "
                "handed out; open the buffer without pace=, and read pace.over(loader, num_steps), or use num_workers=0"
            )
        self.pace.draw(count * self.cut.widest)

    # -- what is stored -----------------------------------------------------------------------

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order, of transitions with the next observations; [] before the first episode of any
        ring."""
        schema = self.engine.schema
        if self.engine.transitions is not None:
            return list(self.engine.layout(self.cut, 0))
        return [] if schema is None else schema.names

    def __len__(self) -> int:
        if self.engine.transitions is not None:
            return self.num_valid_ends()
        return super().__len__()

    @property
    def clip_indices(self) -> Sequence[tuple[int, int]]:
        """The `(episode, first step)` of every clip. Makes a list: O(clips)."""
        found, before = list[tuple[int, int]](), 0
        for ring in self._rings("clip_indices"):
            counts = self.cut.counts(ring.lengths)
            for ep, count in enumerate(counts.tolist(), before):
                found += [(ep, step) for step in range(count)]
            before += len(counts)
        return found

    def check(self) -> list[Finding]:
        """Return the faults of all open rings, and of the priorities, each with its file; empty when sound. Reads all
        rows.

        A file of a ring is named as in `shards`, `collector-0/episodes.npy`; a ring that can't be read stands by its
        name, with the reason.
        """
        found = [
            replace(finding, file=f"{ring.name}/{finding.file}") for ring in self._open() for finding in ring.check()
        ]
        found += [Finding(bad.name, str(bad.error)) for bad in self.fleet.problems.values()]
        return [*found, *(Finding("memory", fault) for fault in self.engine.sampler.check())]

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Copy each ring that can be read now to a directory of its name below `path`, one after the other: a directory
        of rings.

        Args:
            path: a directory that is new or empty.

        Raises:
            InputError: two rings have one name.
            ExistsError: something is there.
            EnvironmentFault: the disk failed; the rings that were copied before are whole.
        """
        self.engine.episodes_only("snapshot")
        path = local_path(path)
        rings = list(self.engine.all_rings())
        names = [os.path.basename(ring.folder) for ring in rings]
        if len(set(names)) < len(names):
            raise InputError(
                f"ShardedReplayBuffer.snapshot: rings have the same name ({sorted(names)}); copy each with "
                "ReplayBuffer.snapshot"
            )
        if os.path.isdir(path) and os.listdir(path):
            raise ExistsError(f"ShardedReplayBuffer.snapshot: {path} is not empty; choose another path")
        for ring, name in zip(rings, names, strict=True):
            self.engine.snapshot(os.path.join(path, name), "ShardedReplayBuffer.snapshot", ring=ring)

    # -- draws --------------------------------------------------------------------------------

    def _sample(
        self,
        cut: Cut,
        clips: Any,
        size: int,
        step: int | None = None,
        out: Mapping[str, Array] | None = None,
    ) -> Batch[Array]:
        if out is not None and self.engine.transitions is not None:  # an earlier batch
            out = {name: array for name, array in out.items() if name not in ("ids", "weights")}
        return super()._sample(cut, clips, size, step, out)

    def _anchor_lengths(self) -> Array:
        return np.empty(0, np.int32) if self.engine.transitions is not None else self.lengths

    # -- copies -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Force what `state` keeps to the disk: for a power cut. A kill loses nothing.

        Raises:
            EnvironmentFault: the disk fails. The next call first writes them all again.
        """
        self.engine.flush("ShardedReplayBuffer.flush")

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle paths, settings and ring numbers. A callable without an importable name is refused."""
        return {
            "num_steps": self.num_steps,
            "frameskip": self.frameskip,
            "transform": sendable("ShardedReplayBuffer", "transform", self.transform),
            "engine": self.engine.to_send(),
            "pace": self.pace,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "engine": Engine.received(state["engine"])})

    @property
    def _num_open(self) -> int:
        """Episodes of the rings that are open, whatever is wrong with others."""
        return sum(ring.num_episodes for ring in self._open())

    def _card(self) -> dict[str, str]:
        rings = len(self._open())
        counts = {"transitions": f"{self.num_steps_stored:,}"}
        if self.engine.transitions is None:
            counts = {
                "episodes": f"{self._num_open:,}",
                "steps": f"{self.num_steps_stored:,}",
            }
        columns = ", ".join(self.column_names[:20]) or "none yet"
        return {
            "rings": f"{rings:,}",
            **counts,
            "columns": columns,
            "path": self.fleet.where,
        }

    def __repr__(self) -> str:
        where = self.fleet.where
        with contextlib.suppress(ClosedError):
            if self.engine.transitions is not None:
                return (
                    f"ShardedReplayBuffer(rings={len(self._open())}, transitions={self.num_steps_stored}, "
                    f"n_step={self.fleet.n_step}, columns={self.column_names}, {where})"
                )
            return (
                f"ShardedReplayBuffer(rings={len(self._open())}, episodes={self._num_open}, "
                f"steps={self.num_steps_stored}, history_len={self.num_steps}, frameskip={self.frameskip}, "
                f"columns={self.column_names}, {where})"
            )
        return f"ShardedReplayBuffer(closed, {where})"


def _weights(weights: Any) -> Weights:
    where = "ShardedReplayBuffer"
    if isinstance(weights, Mapping):
        found = {str(name): float(weight) for name, weight in weights.items()}
        if all(0 <= weight < float("inf") for weight in found.values()) and any(found.values()):
            return found
    elif weights in ("clips", "equal"):
        return str(weights)
    raise InputError(
        f"{where}: weights must be 'clips', 'equal', or name -> weight, none negative and one positive, got {weights!r}"
    )


def _policy_step(ring: Ring) -> int | None:
    """Return which weights played the newest episode of a ring; None if it does not say, or is gone by now."""
    with contextlib.suppress(*RING_FAULTS, ClipIndexError):
        # Not get_episode_data: that reads all episodes once, for their names.
        step = ring.episodes.data_of(-1, "ShardedReplayBuffer.shards").get(POLICY_STEP)
        return None if step is None else int(step)
    return None
