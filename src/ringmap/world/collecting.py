"""Collecting: episodes of a world into a buffer or a dataset, resumable.

    roll ─► EpisodeRows ─► write_episode({..., "_episode_data": {"seed": ...}})      or, with commit_every=,
                           begin_episode, append, finish: each part has its collection and its seed

    a buffer: the progress is a note in the episode's own commit; a dataset: the stored seeds are the progress

Invariants: what was written before an error stays; with a seed exactly the seeds
`seed ... seed + episodes - 1` are run, each once, killed and resumed or not.
Not here: the loop (rollout.py), the arithmetic of progress (progress.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.buffers.base import episode_ring_of
from ringmap.clips.facts import Facts
from ringmap.errors import InputError, RingmapError
from ringmap.fleet.pace import Pace, checked_pace, paced
from ringmap.fleet.weights import POLICY_STEP, Weights, checked_weights
from ringmap.formats.base import EPISODE_DATA_KEY, Writer, validate_write_mode
from ringmap.formats.common.refusals import KEEP_ALL, Drop, Refused, refusal, refused_where_none_fit
from ringmap.formats.common.writer import EpisodeWriter, tell_facts
from ringmap.formats.episode import no_append
from ringmap.formats.registry import resolve_format
from ringmap.storage.disk.paths import local_path
from ringmap.world.actions import blank_action
from ringmap.world.episodes import EpisodeRows, Names
from ringmap.world.infos import Row
from ringmap.world.policies import BasePolicy
from ringmap.world.progress import Progress, identity_of
from ringmap.world.rollout import Stage, Turn, roll
from ringmap.world.wrappers import parts_of

if TYPE_CHECKING:
    from ringmap.buffers.replay import ReplayBuffer
    from ringmap.storage.commit.open_episode import OpenEpisode

__all__ = ["DEFAULT_FORMAT", "Collection", "Recorder", "collect_some", "kept_seeds", "progress_of"]
__all__ += ["to_path", "to_writer"]

log = logging.getLogger("ringmap")

WHERE = "World.collect"
COLLECTION_KEY = "collection"
"""Episode data of a dataset, or of an episode in parts, that can be resumed: the identity of the collection, as
JSON."""

_NOTE = "collections"
_NOTES_MAX = 32


class _Default(str):
    """A default that can be told from the same word given by the caller."""


DEFAULT_FORMAT = _Default("lance")


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection that can be resumed: the seeds `seed ... seed + episodes - 1`, with these reset options."""

    seed: int
    episodes: int
    options: Mapping[str, Any] | None = None

    def identity(self, env: str) -> dict[str, Any]:
        """Return what its notes say of it."""
        return identity_of(env, self.seed, self.episodes, self.options)


def kept_seeds(drop: str | Iterable[str], where: str) -> Drop:
    """Return what a collection that can be resumed leaves out."""
    left_out = Drop(drop, where)
    for name in ("seed", COLLECTION_KEY):
        if name in left_out:
            raise InputError(f"{where}: drop={name!r}: a collection that can be resumed needs this of each episode")
    return left_out


def collect_some(
    world: Stage,
    buffer: ReplayBuffer,
    collection: Collection,
    offsets: Iterable[int],
    finished: Callable[[int, int], None],
    commit_every: int | None = None,
    weights: Weights | None = None,
    pace: Pace | None = None,
    drop: Drop = KEEP_ALL,
) -> None:
    """Collect some episodes of a collection, whose other ones other buffers hold; the arguments are those of
    `World.collect`.

    `offsets` of the episodes, 0 to `episodes - 1`, are asked for one at a time, the first when all is checked; what
    the buffer has already is not played. `finished` is told of each that is committed: its offset, and how many steps
    were played for it.
    """
    world.check_ready(WHERE)
    recorder = Recorder(world, buffer, commit_every, weights, pace, drop)
    sink = to_writer(buffer, collection.identity(world.env_name))
    progress = sink.progress
    assert progress is not None
    if str(collection.seed) not in buffer.notes.get(_NOTE, {}):  # whose parts these are, is asked before one is whole
        buffer.flush(notes=_notes_with(buffer, progress))

    def turns() -> Iterator[Turn]:
        for k in offsets:
            if k in progress:
                finished(k, 0)
            else:
                yield Turn(k, collection.seed + k, collection.options)

    recorder.record(turns(), sink, lambda turn: finished(turn.number, turn.length))


def progress_of(buffer: ReplayBuffer, collection: Collection) -> Progress | None:
    """Return which episodes of a collection a buffer has, open to write; None if it has no part in it.

    What a kill left of an episode in parts is dropped, or counts, as the buffer's `interrupted` says.
    """
    kept = buffer.notes.get(_NOTE, {}).get(str(collection.seed))
    if kept is None:
        return None
    return to_writer(buffer, collection.identity(kept["env"])).progress


def _ring_of(writer: Any, what: str) -> ReplayBuffer:
    """Return a writer that has to be a buffer."""
    ring: ReplayBuffer | None = episode_ring_of(writer)
    if ring is None:
        raise InputError(f"{WHERE}: {what}")
    return ring


class Recorder:
    """A watcher that keeps the rows of each turn and stores them when it ends, or with `commit_every` as they come.

    Whenever episodes begin it loads the newest weights, and names them in their data.
    """

    def __init__(
        self,
        world: Stage,
        writer: Any,
        commit_every: int | None,
        weights: Weights | None,
        pace: Pace | None,
        drop: Drop,
    ) -> None:
        pace = checked_pace(pace, WHERE)
        if pace is not None:
            pace.check_ring(_ring_of(writer, f"pace= is for a ReplayBuffer, writer=, in {pace.path}").path, WHERE)
        if commit_every is not None:
            what = f"commit_every={commit_every!r} is for a ReplayBuffer, writer=; a dataset takes whole episodes"
            _ring_of(writer, what).check_commit_every(WHERE, commit_every)
        checked_weights(weights, WHERE)
        played = world.policy.trained_part() if isinstance(world.policy, BasePolicy) else world.policy
        self._model = played if weights is None or weights.model is None else weights.model
        self._world, self._writer, self._every = world, writer, commit_every
        self._weights, self._pace, self._drop = weights, pace, drop
        self._checked = False
        space = world.envs.single_action_space
        self._names = Names(frozenset(parts_of("action", blank_action(space), space)), world.envs.observation_names)
        self._open: dict[int, tuple[EpisodeRows, dict[str, Any], OpenEpisode | None]] = {}
        self._load()

    def record(self, turns: Iterable[Turn], sink: ToWriter | ToPath, done: Callable[[Turn], object]) -> None:
        """Play turns into a sink; `done` is told of each that is stored."""
        self._sink, self._done = sink, done
        try:
            with sink.opened():
                roll(self._world, turns, [self], prepared=self._load)
        finally:
            for _, _, stream in self._open.values():
                if stream is not None:
                    with contextlib.suppress(RingmapError):  # the next opening does it
                        stream.abandon()

    def began(self, turn: Turn, row: Row) -> None:
        """Begin an episode."""
        data: dict[str, Any] = {} if turn.seed is None else {"seed": turn.seed}
        if self._weights is not None:
            data[POLICY_STEP] = self._weights.policy_step
        stream = None
        if self._every is not None:
            assert isinstance(self._sink, ToWriter)
            with _refusals(turn):
                stream = self._sink.begin(turn, self._every, self._drop.of(data))
        self._open[turn.number] = EpisodeRows(self._names, f"{WHERE}: {turn.label}"), data, stream
        self.stepped(turn, row)

    def stepped(self, turn: Turn, row: Row) -> None:
        """Take a row; the one before it has its action now."""
        rows, _, stream = self._open[turn.number]
        rows.add(row)
        before = len(rows) - 1
        if stream is not None and self._every is not None and before:
            with paced(self._pace, 0 if before % self._every else self._every, self._writer), _refusals(turn):
                stream.append(self._drop.of(rows.take_oldest(ends=False)))

    def ended(self, turn: Turn, data: dict[str, Any] | None) -> None:
        """Store the episode, or its last part."""
        rows, begun, stream = self._open[turn.number]
        commits = len(rows) if self._every is None else len(rows) % self._every or self._every
        with paced(self._pace, commits, self._writer), _refusals(turn):
            left = rows.columns() if stream is None else rows.take_oldest(ends=True)
            every = _joined(data, begun)
            if not self._checked:
                self._drop.check(left, lambda: every)
                self._checked = True
            self._sink.store(self._drop.of(left), self._drop.of(every), turn, stream)
        del self._open[turn.number]
        self._done(turn)

    def _load(self, reset: Any = None) -> None:
        """Load the newest weights, if there are newer ones."""
        if self._weights is not None:
            self._weights.load_into(self._model)


def _joined(data: Mapping[str, Any] | None, begun: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an environment says of its episode, and what we do."""
    given = dict(data or {})
    for name, value in begun.items():
        if name in given and not np.array_equal(given[name], value):
            raise InputError(
                f"the environment's get_episode_data() has {name!r}, which {WHERE} stores itself; rename it"
            )
    return {**given, **begun}


@contextlib.contextmanager
def _refusals(turn: Turn) -> Iterator[None]:
    """Say in an error whose episode could not be written."""
    try:
        yield
    except ValueError as error:
        raise InputError(
            f"{WHERE}: {turn.label}: the writer refused it: {error}; what was collected before stays"
        ) from error
    except Exception as error:
        error.add_note(f"{WHERE}: {turn.label}: it was not written; what was collected before stays")
        raise


class ToWriter:
    """Into a writer of the caller's; into a buffer with its progress."""

    def __init__(self, writer: Any, progress: Progress | None) -> None:
        self._writer, self.progress = writer, progress

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: it is open."""
        return contextlib.nullcontext()

    def begin(self, turn: Turn, commit_every: int, data: dict[str, Any]) -> OpenEpisode:
        """Begin an episode in parts, with this data."""
        if self.progress is not None:
            data[COLLECTION_KEY] = json.dumps(self.progress.identity, sort_keys=True)
        begun: OpenEpisode = self._writer.begin_episode(commit_every=commit_every, episode_data=data, lane=turn.env)
        return begun

    def store(self, left: dict[str, Any], data: dict[str, Any], turn: Turn, stream: OpenEpisode | None) -> None:
        """Store a whole episode, or the last row of one in parts; the progress is in its commit."""
        store: Callable[..., object]
        if stream is None:
            store = partial(self._writer.write_episode, {**left, EPISODE_DATA_KEY: data} if data else left)
        else:
            stream.append(left)
            store = partial(stream.finish, turn.terminated, turn.truncated, data)
        if self.progress is None:
            store()
            return
        store(notes=_notes_with(self._writer, self.progress.plus(turn.number)))
        self.progress.add(turn.number)


def _notes_with(buffer: ReplayBuffer, progress: Progress) -> dict[str, Any]:
    """Return the notes of a buffer about its collections, with that of one of them."""
    notes = dict(buffer.notes.get(_NOTE, {}))
    key = str(progress.identity["seed"])
    notes.pop(key, None)  # the newest stands last
    notes[key] = progress.as_json()
    for old in list(notes)[: max(0, len(notes) - _NOTES_MAX)]:
        del notes[old]
    return {_NOTE: notes}


def to_writer(writer: Any, identity: dict[str, Any] | None) -> ToWriter:
    """Return the sink for a writer of the caller's; with an identity, the collection goes on in a buffer."""
    if not isinstance(writer, Writer):
        raise InputError(
            f"{WHERE}: writer= must have write_episode (a ReplayBuffer, a format's writer), got {type(writer).__name__}"
        )
    tell_facts(writer, Facts("next"), WHERE)
    if identity is None:
        return ToWriter(writer, None)
    what = f"resume=True needs a ReplayBuffer or path=: what a {type(writer).__name__} holds can't be asked"
    buffer = _ring_of(writer, what)
    return ToWriter(writer, _with_chains(buffer, _progress_in(buffer, identity)))


def _progress_in(buffer: ReplayBuffer, identity: dict[str, Any]) -> Progress:
    kept = buffer.notes.get(_NOTE, {}).get(str(identity["seed"]))
    if kept is None:
        return Progress(identity)
    progress = Progress.resumed(kept, identity, WHERE, _place_of(buffer))
    # Opening dropped the episodes that a power cut lost, whatever the newest note says.
    dropped = buffer.dropped_episode_data()
    if not dropped:
        return progress
    if None in dropped:
        log.warning(
            "%s: an episode was lost with its data; if it was of this collection, it stays lost",
            WHERE,
        )
    stored = set(buffer.get_episode_data().get("seed", []))
    seeds = {data.get("seed") for data in dropped if data is not None} - stored
    return progress.without(int(seed) - identity["seed"] for seed in seeds if seed is not None)


def _with_chains(buffer: ReplayBuffer, progress: Progress) -> Progress:
    """Return the progress with the stored episodes in parts. One that a kill cut off is dropped, or counts as finished.

    A seed that is played again must not be stored twice.
    """
    first = int(progress.identity["seed"])
    whole, rest = set[int](), dict[int, list[int]]()
    for chain in buffer.engine.episodes.chains():
        offset = _offset_of(chain.data, progress, buffer)
        if offset is not None and chain.is_whole:
            whole.add(offset)
        elif offset is not None:
            rest.setdefault(offset, []).append(chain.name)
    if rest and buffer.options.interrupted == "drop":
        progress = progress.without(set(rest) - whole)
        buffer.engine.drop_chains([name for names in rest.values() for name in names], WHERE)
        seeds = sorted(first + offset for offset in rest)
        log.info("%s: dropped the parts of interrupted episodes, seeds %s", WHERE, seeds)
        rest = {}
    counted = [offset for offset in (*whole, *rest) if offset not in progress]
    for offset in counted:
        progress.add(offset)
    if counted:  # else it would be played again once the episode is evicted
        buffer.flush(notes=_notes_with(buffer, progress))
    return progress


def _offset_of(data: Mapping[str, Any], progress: Progress, buffer: ReplayBuffer) -> int | None:
    """Return which episode of a collection has such data; None if it is of another one."""
    mark, seed = data.get(COLLECTION_KEY), data.get("seed")
    if not isinstance(mark, str) or not isinstance(seed, int):
        return None
    try:
        kept = json.loads(mark)
    except ValueError:  # a user's own data
        return None
    if not isinstance(kept, dict) or kept.get("seed") != progress.identity["seed"]:
        return None
    Progress.resumed({**kept, "watermark": 0, "beyond": []}, progress.identity, WHERE, _place_of(buffer))
    return seed - int(progress.identity["seed"])


def _place_of(buffer: ReplayBuffer) -> str:
    return f"the buffer {buffer.path or 'in RAM'}"


class ToPath:
    """Into a dataset of our own opening."""

    def __init__(self, path: str, format: Any, progress: Progress | None, mode: str) -> None:
        self.path, self.format, self.progress, self.mode = path, format, progress, mode
        self._writer: Any = None
        self._open: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open it, and end it: at once where something is at the path, else with the first episode that it can hold."""
        os.makedirs(os.path.dirname(local_path(self.path)), exist_ok=True)
        self._writer = self.format.open_writer(self.path, mode=self.mode)
        tell_facts(self._writer, Facts("next"), WHERE)
        with contextlib.ExitStack() as stack:
            self._open = partial(stack.enter_context, self._writer)
            if os.path.lexists(self.path):
                self._begin()
            yield

    def _begin(self) -> None:
        self._open()
        self._open = lambda: None

    def store(self, episode: dict[str, Any], data: dict[str, Any], turn: Turn, stream: OpenEpisode | None) -> None:
        """Store a whole episode."""
        if self.progress is not None:
            mark = json.dumps(self.progress.identity, sort_keys=True)
            data = _joined(data, {COLLECTION_KEY: mark})
        refused = Refused() if self.format.supports_episode_data else refused_where_none_fit(data)
        if data and self.format.supports_episode_data:
            episode[EPISODE_DATA_KEY] = data
        if isinstance(self._writer, EpisodeWriter):
            refused = Refused(self._writer.refusals(episode) | refused)
        if refused:
            raise refusal(refused, f"format {self.format.name!r}", WHERE)
        self._begin()
        self._writer.write_episode(episode)


def to_path(path: str | os.PathLike[str], name: str, identity: dict[str, Any] | None, mode: str | None) -> ToPath:
    """Return the sink for a dataset at a path; with an identity, the collection goes on there."""
    asked = None if isinstance(name, _Default) else name
    wanted = validate_write_mode("append" if mode is None else mode)
    chosen = resolve_format(path, asked, mode=wanted, default=str(DEFAULT_FORMAT), where=WHERE)
    path = os.fspath(path)
    if not chosen.appends:
        if identity is not None or mode == "append":
            raise no_append(WHERE, path)
        wanted = "error" if mode is None else mode
    if identity is None:
        return ToPath(path, chosen, None, wanted)
    if wanted != "append":
        raise InputError(f"{WHERE}: resume=True goes on with what is there: it needs mode='append', got {mode!r}")
    if not chosen.supports_episode_data:
        raise InputError(
            f"{WHERE}: resume=True needs to store the seed of each episode, and format {chosen.name!r} holds no "
            "episode data"
        )
    progress = Progress(identity)
    if os.path.exists(path):
        dataset = chosen.open_dataset(path)
        try:
            data = dataset.get_episode_data()
        finally:
            dataset.close()
        seeds, marks = data.get("seed", []), data.get(COLLECTION_KEY, [])
        for seed, mark in zip(seeds, marks, strict=True):
            if not mark or seed is None:
                continue
            kept = json.loads(str(mark))
            if kept["seed"] == identity["seed"]:
                Progress.resumed({**kept, "watermark": 0, "beyond": []}, identity, WHERE, path)
                progress.add(operator.index(seed) - int(identity["seed"]))
    return ToPath(path, chosen, progress, wanted)
