"""Collecting: episodes of a world into a buffer or a dataset, resumable.

    roll ─► EpisodeRows ─► writer.write_episode({..., "_episode_data": {"seed": ...}})
                              buffer: the progress is a note in the episode's own commit
                              dataset: the stored seeds are the progress
    roll ─► EpisodeRows ─► begin_episode(commit_every=...)       each part stores its collection and its seed

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
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ringmap.arguments import whole
from ringmap.clips.facts import Facts
from ringmap.errors import InputError, RingmapError
from ringmap.fleet.pace import Pace
from ringmap.fleet.weights import NO_POLICY, POLICY_STEP, Weights
from ringmap.formats.base import EPISODE_DATA_KEY, Writer, validate_write_mode
from ringmap.formats.common.refusals import KEEP_ALL, Drop, Refused, refusal, refused_where_none_fit
from ringmap.formats.common.writer import EpisodeWriter, tell_facts
from ringmap.formats.episode import no_append
from ringmap.storage.disk.paths import local_path
from ringmap.world.actions import blank_action
from ringmap.world.episodes import EpisodeRows, Names
from ringmap.world.infos import Row
from ringmap.world.policies import BasePolicy
from ringmap.world.progress import Progress, identity_of
from ringmap.world.rollout import Stage, Turn, bar_of, count_of, options_of, roll
from ringmap.world.wrappers import parts_of

if TYPE_CHECKING:
    from ringmap.buffers.replay import ReplayBuffer
    from ringmap.storage.commit.open_episode import OpenEpisode

__all__ = ["DEFAULT_FORMAT", "Collection", "collect", "collect_some", "kept_seeds", "progress_of"]

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


def collect(
    world: Stage,
    path: str | os.PathLike[str] | None,
    episodes: int,
    seed: int | None,
    options: Any,
    format: str,
    writer: Any,
    progress: bool,
    resume: bool,
    mode: str | None,
    commit_every: int | None = None,
    weights: Weights | None = None,
    pace: Pace | None = None,
    drop: str | Iterable[str] = (),
) -> None:
    """Collect episodes; see `World.collect`."""
    left_out = kept_seeds(drop, WHERE) if resume else Drop(drop, WHERE)
    if (path is None) == (writer is None):
        raise InputError(f"{WHERE}: pass exactly one of path= (a dataset) and writer= (a buffer or a writer)")
    count = count_of(episodes, WHERE)
    if seed is not None:
        seed = whole(WHERE, "seed", seed)
    if resume and seed is None:
        raise InputError(f"{WHERE}: resume=True needs a seed: it tells the episodes apart")
    if resume and not (options is None or isinstance(options, Mapping)):
        raise InputError(
            f"{WHERE}: resume=True with options for each environment: which one plays which seed depends on "
            "the kills; pass one dict for all"
        )
    world.check_ready(WHERE)
    given = options_of(options, world.num_envs, WHERE)
    room = _room_of(pace, writer)
    played = _Played(weights, world.policy)
    identity = identity_of(world.env_name, seed, count, options) if resume and seed is not None else None
    with contextlib.ExitStack() as stack:
        sink: _Sink
        if commit_every is not None:
            _check_parts(writer, commit_every)
        sink = _to_path(path, format, identity, mode) if path is not None else _to_writer(writer, identity)
        finished = sink.progress
        offsets = range(count) if finished is None else finished.missing()
        turns = (Turn(k, None if seed is None else seed + k, given) for k in offsets)
        if isinstance(sink, _ToPath) and offsets:
            stack.enter_context(sink.opened())
        done = count - len(offsets)
        bar = stack.enter_context(bar_of(f"collect {world.env_name}", count, progress, done))
        _play(world, sink, turns, lambda turn: bar.update(), commit_every, played, room, left_out)


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
    """Return what a collection that can be resumed leaves out.

    Raises:
        InputError: it needs one of these.
    """
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
    """Collect some episodes of a collection, whose other ones other buffers hold.

    Args:
        world: has a policy.
        buffer: open to write.
        collection: as for `World.collect(resume=True)`.
        offsets: of the episodes, 0 to `episodes - 1`; asked for one at a time, the first when all else is checked. What
            the buffer has already is not played.
        finished: told of an episode that is committed: its offset, and how many steps were played for it.
        commit_every: as for `World.collect`.
        weights: as for `World.collect`.
        pace: as for `World.collect`.
        drop: what to leave out of them.

    Raises:
        RingmapError: as `World.collect`.
    """
    world.check_ready(WHERE)
    room = _room_of(pace, buffer)
    if commit_every is not None:
        _check_parts(buffer, commit_every)
    played = _Played(weights, world.policy)
    sink = _to_writer(buffer, collection.identity(world.env_name))
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

    def ended(turn: Turn) -> None:
        finished(turn.number, turn.length)

    _play(world, sink, turns(), ended, commit_every, played, room, drop)


def progress_of(buffer: ReplayBuffer, collection: Collection) -> Progress | None:
    """Return which episodes of a collection a buffer has, open to write; None if it has no part in it.

    What a kill left of an episode in parts is dropped, or counts, as the buffer's `interrupted` says.

    Raises:
        InputError: it holds another collection with this seed.
    """
    kept = buffer.notes.get(_NOTE, {}).get(str(collection.seed))
    if kept is None:
        return None
    return _to_writer(buffer, collection.identity(kept["env"])).progress


def _play(
    world: Stage,
    sink: _Sink,
    turns: Iterable[Turn],
    done: _Done,
    commit_every: int | None,
    played: _Played,
    room: _Room,
    drop: Drop,
) -> None:
    space = world.envs.single_action_space
    names = Names(frozenset(parts_of("action", blank_action(space), space)), world.envs.observation_names)
    if commit_every is None:
        roll(world.envs, world.act, turns, [_Recorder(sink, names, done, played, room, drop)], prepared=played.load)
        return
    assert isinstance(sink, _ToWriter)
    recorder = _PartRecorder(sink, names, done, commit_every, played, room, drop)
    try:
        roll(world.envs, world.act, turns, [recorder], prepared=played.load)
    finally:
        recorder.give_up()


class _Played:
    """Which weights play: loaded whenever episodes begin, and named in the data of these.

    Raises:
        InputError, DamageError, EnvironmentFault: of the first load; nothing was collected.
    """

    def __init__(self, weights: Weights | None, policy: Any) -> None:
        if weights is not None and not isinstance(weights, Weights):
            raise InputError(f"{WHERE}: weights= must be a ringmap.Weights, got {type(weights).__name__}")
        self._weights = weights
        played = policy.trained_part() if isinstance(policy, BasePolicy) else policy
        self._model = played if weights is None or weights.model is None else weights.model
        self.load()

    def load(self, reset: Any = None) -> None:
        """Load the newest weights, if there are newer ones."""
        if self._weights is not None:
            self._weights.load_into(self._model)

    def data_of(self, turn: Turn) -> dict[str, Any]:
        """Return the episode data of a turn that begins now."""
        data: dict[str, Any] = {}
        if turn.seed is not None:
            data["seed"] = turn.seed
        if self._weights is not None:
            data[POLICY_STEP] = NO_POLICY if self._weights.step is None else self._weights.step
        return data


_Done = Callable[[Turn], object]
"""Told of a turn whose episode is written."""

_Room = Callable[[int], contextlib.AbstractContextManager[None]]
"""Waits until a commit of so many rows may come in, which is made in the `with` block."""


def _room_of(pace: Pace | None, writer: Any) -> _Room:
    """Return what keeps a pace.

    Raises:
        InputError: it is none, or it does not count what the writer writes.
    """
    if pace is None:
        return lambda rows: contextlib.nullcontext()
    if not isinstance(pace, Pace):
        raise InputError(f"{WHERE}: pace= must be a ringmap.Pace, got {type(pace).__name__}")
    from ringmap.buffers.replay import ReplayBuffer

    if not isinstance(writer, ReplayBuffer):
        raise InputError(f"{WHERE}: pace= is for a ReplayBuffer, writer=, in {pace.path}")
    pace.check_ring(writer.path, WHERE)
    return lambda rows: pace.insert(rows, writer.flush) if rows else contextlib.nullcontext()


class _Sink(Protocol):
    progress: Progress | None

    def write(self, episode: dict[str, Any], data: dict[str, Any], turn: Turn) -> None: ...


class _Recorder:
    """A watcher that keeps the rows of each turn, and writes them when it ends."""

    def __init__(self, sink: _Sink, names: Names, done: _Done, played: _Played, room: _Room, drop: Drop) -> None:
        self._sink, self._names, self._done, self._played = sink, names, done, played
        self._room, self._drop, self._checked = room, drop, False
        self._open: dict[int, tuple[EpisodeRows, dict[str, Any]]] = {}

    def began(self, turn: Turn, row: Row) -> None:
        rows = EpisodeRows(self._names, f"{WHERE}: {turn.label}")
        self._open[turn.number] = rows, self._played.data_of(turn)
        self.stepped(turn, row)

    def stepped(self, turn: Turn, row: Row) -> None:
        self._open[turn.number][0].add(row)

    def ended(self, turn: Turn, data: dict[str, Any] | None) -> None:
        rows, begun = self._open.pop(turn.number)
        with self._room(len(rows)), _refusals(turn):
            columns, every = rows.columns(), _joined(data, begun)
            if not self._checked:
                self._drop.check(columns, lambda: every)
                self._checked = True
            self._sink.write(self._drop.of(columns), self._drop.of(every), turn)
        self._done(turn)


def _joined(data: Mapping[str, Any] | None, begun: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an environment says of its episode, and what we do.

    Raises:
        InputError: both have a name, and not the same value.
    """
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


class _PartRecorder:
    """A watcher that writes the rows of each turn as they come, in parts."""

    def __init__(
        self,
        sink: _ToWriter,
        names: Names,
        done: _Done,
        commit_every: int,
        played: _Played,
        room: _Room,
        drop: Drop,
    ) -> None:
        self._sink, self._names, self._done, self._every = sink, names, done, commit_every
        self._played, self._room, self._drop = played, room, drop
        self._open: dict[int, tuple[EpisodeRows, OpenEpisode, dict[str, Any]]] = {}

    def began(self, turn: Turn, row: Row) -> None:
        data = self._played.data_of(turn)
        with _refusals(turn):
            episode = self._sink.begin(turn, self._every, self._drop.of(data))
        rows = EpisodeRows(self._names, f"{WHERE}: {turn.label}")
        self._open[turn.number] = rows, episode, data
        self.stepped(turn, row)

    def stepped(self, turn: Turn, row: Row) -> None:
        rows, episode, _ = self._open[turn.number]
        rows.add(row)
        if len(rows) > 1:  # the row before it has its action now
            with self._room(self._commits(len(rows) - 1)), _refusals(turn):
                episode.append(self._drop.of(rows.take_oldest(ends=False)))

    def ended(self, turn: Turn, data: dict[str, Any] | None) -> None:
        rows, episode, begun = self._open[turn.number]
        last = len(rows) % self._every or self._every
        with self._room(last), _refusals(turn):
            last_row, every = rows.take_oldest(ends=True), _joined(data, begun)
            self._drop.check(last_row, lambda: every)
            episode.append(self._drop.of(last_row))
            self._sink.finish(episode, self._drop.of(every), turn)
        del self._open[turn.number]
        self._done(turn)

    def _commits(self, row: int) -> int:
        """Return how many rows the append of an episode's row of this number, from 1, commits."""
        return 0 if row % self._every else self._every

    def give_up(self) -> None:
        """End what is open, after an error."""
        for _, episode, _ in self._open.values():
            with contextlib.suppress(RingmapError):  # the next opening does it
                episode.abandon()


class _ToWriter:
    """Into a writer of the caller's; into a buffer with its progress."""

    def __init__(self, writer: Any, progress: Progress | None) -> None:
        self._writer, self.progress = writer, progress

    def write(self, episode: dict[str, Any], data: dict[str, Any], turn: Turn) -> None:
        if data:
            episode[EPISODE_DATA_KEY] = data
        if self.progress is None:
            self._writer.write_episode(episode)
            return
        notes = _notes_with(self._writer, self.progress.plus(turn.number))
        self._writer.write_episode(episode, notes=notes)
        self.progress.add(turn.number)

    def begin(self, turn: Turn, commit_every: int, data: dict[str, Any]) -> OpenEpisode:
        """Begin an episode in parts, with this data."""
        if self.progress is not None:
            data[COLLECTION_KEY] = json.dumps(self.progress.identity, sort_keys=True)
        begun: OpenEpisode = self._writer.begin_episode(commit_every=commit_every, episode_data=data, lane=turn.env)
        return begun

    def finish(self, episode: OpenEpisode, data: dict[str, Any], turn: Turn) -> None:
        """End an episode in parts."""
        notes = None
        if self.progress is not None:
            notes = _notes_with(self._writer, self.progress.plus(turn.number))
        episode.finish(turn.terminated, turn.truncated, data, notes=notes)
        if self.progress is not None:
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


def _check_parts(writer: Any, commit_every: int) -> None:
    from ringmap.buffers.replay import ReplayBuffer

    if not isinstance(writer, ReplayBuffer):
        raise InputError(
            f"{WHERE}: commit_every={commit_every!r} is for a ReplayBuffer, writer=; a dataset takes whole episodes"
        )
    writer.check_commit_every(WHERE, commit_every)


def _to_writer(writer: Any, identity: dict[str, Any] | None) -> _Sink:
    if not isinstance(writer, Writer):
        raise InputError(
            f"{WHERE}: writer= must have write_episode (a ReplayBuffer, a format's writer), got {type(writer).__name__}"
        )
    from ringmap.buffers.replay import ReplayBuffer

    tell_facts(writer, Facts("next"), WHERE)
    if identity is None:
        return _ToWriter(writer, None)
    if not isinstance(writer, ReplayBuffer):
        raise InputError(
            f"{WHERE}: resume=True needs a ReplayBuffer or path=: what a {type(writer).__name__} holds can't be asked"
        )
    return _ToWriter(writer, _with_chains(writer, _progress_in(writer, identity)))


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


class _ToPath:
    """Into a dataset of our own opening."""

    def __init__(self, path: str, format: Any, progress: Progress | None, mode: str) -> None:
        self.path, self.format, self.progress, self.mode = path, format, progress, mode
        self._writer: Any = None
        self._open: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        os.makedirs(os.path.dirname(local_path(self.path)), exist_ok=True)
        self._writer = self.format.open_writer(self.path, mode=self.mode)
        tell_facts(self._writer, Facts("next"), WHERE)
        with contextlib.ExitStack() as stack:
            self._open = partial(stack.enter_context, self._writer)
            if os.path.lexists(self.path):  # else with the first episode, if the format can hold it
                self._begin()
            yield

    def _begin(self) -> None:
        self._open()
        self._open = lambda: None

    def write(self, episode: dict[str, Any], data: dict[str, Any], turn: Turn) -> None:
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


def _to_path(path: str | os.PathLike[str], name: str, identity: dict[str, Any] | None, mode: str | None) -> _ToPath:
    from ringmap.formats.registry import resolve_format

    asked = None if isinstance(name, _Default) else name
    wanted = validate_write_mode("append" if mode is None else mode)
    chosen = resolve_format(path, asked, mode=wanted, default=str(DEFAULT_FORMAT), where=WHERE)
    path = os.fspath(path)
    if not chosen.appends:
        if identity is not None or mode == "append":
            raise no_append(WHERE, path)
        wanted = "error" if mode is None else mode
    if identity is None:
        return _ToPath(path, chosen, None, wanted)
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
    return _ToPath(path, chosen, progress, wanted)
