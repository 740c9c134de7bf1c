"""A view over many rings: the episodes of one moment, as a dataset whose ids do not change.

    part 0: starts, lengths on ring 0     part 1: starts, lengths on ring 4     ...
    home     [0, 0, 0, 1, 1]              episode of the view -> part, and its number in there
    local    [0, 1, 2, 0, 1]

Invariants: those of `BufferView`; what a view holds is numbers, so that it travels without rings, and outlives one that
is away. Not here: rows (engine.py), the view of one ring (buffers/view.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringmap.buffers.moments import RingEpisodes, episodes_of, moment_of, pack, unpack
from ringmap.buffers.pinned_view import PinnedView
from ringmap.buffers.sharded.engine import ShardEngine
from ringmap.buffers.sharded.numbers import apart, joined
from ringmap.buffers.sharded.rings import Ring
from ringmap.buffers.view import BufferView
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut
from ringmap.clips.rings import groups
from ringmap.clips.window import WindowSpec
from ringmap.errors import ClipIndexError, InputError, NoClipsError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.read.episodes import origins_at

__all__ = ["ShardedView"]

Array = np.ndarray[Any, np.dtype[Any]]


class _Part(NamedTuple):
    """Episodes of one ring, by its number."""

    number: int
    episodes: RingEpisodes


class ShardedView(PinnedView):
    """Pinned episodes of many rings, made by `view()` and `split()` of a `ShardedReplayBuffer`.

    Args:
        buffer: the buffer to read.
        parts: the episodes of each ring.
        home: for each episode of the view, its part; None: part after part.
        local: its number in there.
        cut: what an item holds; None: a clip of the buffer.

    Processes and threads: as the buffer. A pickled view carries its episodes, 12 bytes each.
    """

    def __init__(
        self,
        buffer: Any,
        parts: Sequence[_Part],
        home: Array | None = None,
        local: Array | None = None,
        cut: Cut | None = None,
    ) -> None:
        counts = [len(part.episodes.starts) for part in parts]
        self._parts = tuple(parts)
        self._home = np.repeat(np.arange(len(counts)), counts) if home is None else home
        own = np.concatenate([np.arange(n) for n in counts]) if counts else np.empty(0, np.int64)
        self._local = own if local is None else local
        sizes, starts = np.zeros(len(self._home), np.int64), np.zeros(len(self._home), np.int64)
        for which, places in groups(self._home):
            part = self._parts[which]
            sizes[places] = part.episodes.lengths[self._local[places]]
            starts[places] = joined(part.number, part.episodes.starts[self._local[places]])
        super().__init__(buffer, starts, sizes, cut)
        if cut is not None and cut.across:
            raise InputError(
                "ShardedReplayBuffer.view: a sequence with across=True runs on into the next episode of its ring, "
                "which a view over many rings can't number; use sample(window=...), or views of the rings"
            )
        self._views: dict[int, tuple[Ring, BufferView]] = {}

    @classmethod
    def of(cls, buffer: Any, cut: Cut | None = None) -> ShardedView:
        """Return a view of all that is stored, as of the last refresh."""
        rings = buffer.engine.all_rings()
        return cls(buffer, [_Part(ring.number, ring.buffer.pinned().ring_episodes) for ring in rings], cut=cut)

    @property
    def engine(self) -> ShardEngine:
        """The engine of the buffer."""
        engine: ShardEngine = self._buffer.engine
        return engine

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        names: list[str] = self._buffer.column_names
        return names

    def _schema(self, where: str) -> Schema:
        return self.engine.schema or super()._schema(where)

    def with_cut(self, cut: Cut | None) -> ShardedView:
        """Return a view of the same episodes with other items."""
        self._check_moment()
        made = ShardedView(self._buffer, self._parts, self._home, self._local, cut)
        made._source_episodes, made._arcs = self._source_episodes, self._arcs
        return made

    def take(self, episodes: Sequence[int] | Array) -> ShardedView:
        """Return a view of some of the episodes, in this order."""
        chosen = self._episode_numbers(episodes)
        home, local = self._home[chosen], self._local[chosen]
        numbers, parts = np.zeros(len(chosen), np.int64), list(self._parts)
        for which in range(len(parts)):  # a part without any is empty: numbers of parts stay
            mine = (home == which).nonzero()[0]
            parts[which] = parts[which]._replace(episodes=parts[which].episodes.take(local[mine]))
            numbers[mine] = np.arange(len(mine))
        made = ShardedView(self._buffer, parts, home, numbers, self._cut)
        made._source_episodes, made._arcs = self.source_episodes[chosen], self._arcs
        return made

    # -- clips --------------------------------------------------------------------------------

    def origins(self) -> tuple[Array, Array]:
        """Return what each episode that is still stored was first stored as; see `Dataset.origins`."""
        count = len(self.lengths)
        lineages, ordinals = np.zeros((count, 16), np.uint8), np.zeros(count, np.uint64)
        for which, places in groups(self._home):
            part = self._parts[which]
            ring = self.engine.members.of(part.number)
            if ring is not None:
                names = part.episodes.starts[self._local[places]]
                lineages[places], ordinals[places], _ = origins_at(ring.source, names)
        return lineages, ordinals

    def positions_of(self, episodes: Array, steps: Array) -> Array:
        """Return the ids in the engine (see numbers.py) of steps of episodes."""
        found = np.zeros(len(episodes), np.int64)
        for which, places in groups(self._home[episodes]):
            part = self._parts[which]
            local = self._local[episodes[places]]
            found[places] = joined(part.number, part.episodes.positions(local, steps[places]))
        return found

    def steps_of(self, episodes: Array, positions: Array) -> Array:
        """Return which steps of episodes have these ids in the engine, -1 for none."""
        found = np.full(len(episodes), -1)
        for which, places in groups(self._home[episodes]):
            local = self._local[episodes[places]]
            found[places] = self._parts[which].episodes.steps_of(local, apart(positions[places])[1])
        return found

    @property
    def ended(self) -> Array:
        """Tell of each episode whether it had ended: bool `(episodes,)`."""
        found = np.ones(len(self.lengths), np.bool_)
        for which, places in groups(self._home):
            found[places] = self._parts[which].episodes.ended[self._local[places]]
        return found

    def _named(self) -> dict[str, Any]:
        uuids = self.engine.rings.numbers.uuids
        rings = [moment_of(uuids[part.number], part.episodes) for part in self._parts]
        return {"rings": rings, **pack({"home": self._home, "local": self._local})}

    @classmethod
    def _at(cls, buffer: Any, moment: Any, where: str) -> ShardedView:
        """Return the view of the episodes of a moment; a ring of it that is away may come back.

        Raises:
            InputError: it is no moment of many rings.
        """
        order = unpack(moment, ("home", "local"), where)
        parts = list[_Part]()
        rings = moment.get("rings")
        if not isinstance(rings, list):
            raise InputError(f"{where}: this is no moment of many rings: rings={rings!r:.80}")
        for one in rings:
            uuid, episodes = episodes_of(one, where)
            parts.append(_Part(buffer.engine.rings.numbers.of(uuid), episodes))
        home, local = order["home"], order["local"]
        counts = np.array([len(part.episodes.starts) for part in parts], np.int64)
        if len(home) != len(local) or (
            len(home)
            and (home.min() < 0 or home.max() >= len(parts) or local.min() < 0 or (local >= counts[home]).any())
        ):
            raise InputError(f"{where}: this is no moment of a view: its episodes do not fit")
        return cls(buffer, parts, home, local)

    def _over(self, part: _Part, ring: Ring) -> BufferView:
        """Return the view of one ring; another one, if that was opened again."""
        known = self._views.get(part.number)
        if known is None or known[0] is not ring:
            known = self._views[part.number] = ring, BufferView(ring.buffer, part.episodes, self.cut)
        return known[1]

    # -- draws --------------------------------------------------------------------------------

    def redraw(self, count: int) -> Array:
        """Return the ids in the engine of `count` clips drawn uniformly from those that are still stored.

        Raises:
            NoClipsError: all were evicted, or their rings are away.
        """
        engine = self.engine
        with engine.members.lock:
            ranges = self.ranges()
            counts = np.array([clips.count for _, clips in ranges], np.float64)
            total, drawn = max(1.0, float(counts.sum())), list[Array]()
            shares = engine.rng.multinomial(count, [*(counts / total), 0.0]).tolist()
            for (ring, clips), share in zip(ranges, shares[:-1], strict=True):
                if share and (found := clips.draw(share, engine.rng)) is not None:
                    drawn.append(joined(ring.number, found))
        if sum(map(len, drawn)) < count:
            raise NoClipsError(f"ShardedView: {self.why_no_clips()}")
        return np.concatenate(drawn)[engine.rng.permutation(count)]

    def ranges(self) -> list[tuple[Ring, ClipRange]]:
        """Return the clips of the view that are still stored, ring by ring: those of each ring follow each other."""
        found = list[tuple[Ring, ClipRange]]()
        for part in self._parts:
            ring = self.engine.members.of(part.number)
            if ring is not None and len(part.episodes.starts):
                found.append((ring, self._over(part, ring).clip_window()))
        return found

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips that can be drawn: those of episodes that are still stored, on rings that are
        open."""
        return sum(clips.count for _, clips in self.ranges())

    def clip_window(self, history_len: int = 1) -> ClipRange:
        """Raise: a clip range is one of a single ring.

        Raises:
            InputError: always.
        """
        return self.engine.window(self.cut)

    def why_no_clips(self) -> str:
        """Return, in words, why no clip of the view can be drawn."""
        return (
            "no clip of the view is left: its episodes are too short, were evicted, or their rings are away; make a "
            "new view"
        )

    # -- episodes -----------------------------------------------------------------------------

    def _cut_for(
        self, window: WindowSpec | None, columns: Iterable[str] | None, anchors: Any, drop_all_padded: bool
    ) -> Cut | None:
        if drop_all_padded or any(given is not None for given in (window, columns, anchors)):
            self._buffer.episodes_only("view(window=, columns=, anchors=)")
        return super()._cut_for(window, columns, anchors, drop_all_padded)

    def _view_of(self, ep: int) -> tuple[BufferView, int]:
        self._buffer.episodes_only("load_episode")
        part = self._parts[int(self._home[ep])]
        ring = self.engine.members.of(part.number)
        if ring is None:
            raise ClipIndexError(f"ShardedView: the ring of episode {ep} is away")
        return self._over(part, ring), int(self._local[ep])

    def load_episode(self, episode_idx: int, *, nest: bool = False) -> dict[str, Any]:
        """Return one whole episode, every column dense; as `Dataset.load_episode`.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted since, or its ring is away.
        """
        view, local = self._view_of(self._episode_number(episode_idx))
        return view.load_episode(local, nest=nest)

    def load_steps(
        self, episode_idx: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return steps `[start, end)` of one episode, dense: every column, or those of `columns`, which alone are read.

        Raises:
            ClipIndexError: there are no such steps, or they were evicted since, or their ring is away.
            UnknownColumnError: there is no such column.
        """
        view, local = self._view_of(self._episode_number(episode_idx))
        return view.load_steps(local, start, end, columns)

    def episode_data(self, episode_idx: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} if it has none. Reads its data alone.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted since, or its ring is away.
        """
        view, local = self._view_of(self._episode_number(episode_idx))
        return view.episode_data(local)

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Any]:
        view, local = self._view_of(ep)
        return view.load_steps(local, start, end)

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the episode data of the episodes that the rings hold now."""
        names: list[str] = self._buffer.episode_column_names
        return names

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return values constant within an episode: name -> one value per requested episode, None where it has none.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted since, or its ring is away.
        """
        names, rows = self.episode_column_names, list[dict[str, list[Any]]]()
        for ep in self._episode_numbers(idx).tolist():
            view, local = self._view_of(ep)
            rows.append(view.get_episode_data(local))
        return {name: [row[name][0] if name in row else None for row in rows] for name in names}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_views": {}}
