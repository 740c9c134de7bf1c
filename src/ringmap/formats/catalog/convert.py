"""Copy a dataset into another format, or several into one: episode by episode, in constant memory.

    source -> load_episode, get_episode_data -> writer.write_episode -> dest

Invariants: sources that do not fit together are refused, by name, before the destination is touched.
Not here: reading and writing (formats/), datasets joined without a copy (datasets/joined.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from ringmap.clips.facts import REWARDS, Facts, name_among
from ringmap.datasets.base import Where, as_dataset
from ringmap.datasets.stored_episodes import EpisodeStream, count_of, episodes_of, outlines_of, schema_of
from ringmap.errors import InputError
from ringmap.formats.base import EPISODE_DATA_KEY, Format, validate_write_mode
from ringmap.formats.catalog.load import load_arrays, open_stream, place_of
from ringmap.formats.common.refusals import Drop, Refused, refusal, refused_where_none_fit
from ringmap.formats.common.writer import EpisodeWriter, tell_facts
from ringmap.formats.registry import resolve_format
from ringmap.storage.columns.schema import ColumnSpec

__all__ = ["bar", "convert", "copy_episodes", "merge"]

_BAR_AFTER_S = 2.0

Array = np.ndarray[Any, np.dtype[Any]]


def convert(
    source: Any,
    dest: str | os.PathLike[str],
    *,
    dest_format: str | None = None,
    source_format: str | None = None,
    mode: str = "error",
    progress: bool = True,
    where: Where = "",
    marks: str | os.PathLike[str] | None = None,
    reward_at: str | None = None,
    fps: Any = None,
    drop: str | Iterable[str] = (),
    **writer_options: Any,
) -> None:
    """Write a dataset in another format, episode data included.

    From one LeRobot set to another, videos and pictures are copied as they are stored, unless `fps=`, `crf=` or
    `videos=` asks for others.

    Args:
        source: a path, a name (see `load_dataset`), or a dataset or buffer.
        dest: where to; "minari:name/set-v0" and "lerobot:user/set" are places in these libraries' own folders.
        dest_format: name of the format to write; by default the one that the suffix of `dest` names
            (.h5, .hdf5, .zarr, .lance), that of what is there, or "lance".
        source_format: name of the format to read; found out by default.
        mode: what to do where something is: "error", "append" or "overwrite".
        progress: show a progress bar.
        where: write only these episodes, as for `Dataset.view`: a condition, such as `return > 100 and not flags
            contains bad`, over `episode` (its number), `length`, `return`, `ended`, `flags`, `note` (`Marks`), and the
            names of episode data; or a function of an episode's data.
        marks: the file of marks, by default the one beside the source.
        reward_at: where rewards stand, "next" or "same", as for `ReplayBuffer`; None: as the source says, if it does. A
            format that has a row for each step, and its reward in that row (LeRobot, Minari, robomimic), has to know
            it.
        fps: steps per second; None: as the source says, if it does. LeRobot's is an integer.
        drop: names of columns, and of data of episodes, to leave out. What the format can't hold has to be here: but
            for it, and for `seed` and `policy_step`, which `World` adds, nothing is left out.
        writer_options: for the format's writer.

    Raises:
        NotFoundError, UnknownFormatError, InputError: the source can't be read, an option is wrong,
            both are the same, or the suffix of `dest` names another format than `dest_format`; rewards stand elsewhere
            than in what is appended to, or it is not known where; the rate is another one, or one that the
            format can't hold; the format can't hold a column, or data of an episode: all of them are named, with
            the `drop=` that would do, and nothing was written.
        ExistsError: mode="error" and something is at `dest`.
        ValueError: the writer refuses an episode.

    Cost: reads and writes everything; holds one episode.

    Example:
        >>> import tempfile
        >>> from ringmap.data import ReplayBuffer, load_dataset
        >>> buf = ReplayBuffer(10)
        >>> buf.write_episode({"state": [[0.0], [1.0]], "action": [0, 1]})
        >>> path = tempfile.mkdtemp() + "/copy.h5"
        >>> convert(buf, path, dest_format="hdf5", progress=False)
        >>> load_dataset(path).lengths.tolist()
        [2]
    """
    dest, named = place_of(dest)
    chosen = _format_of(dest, dest_format or named, mode, "convert")
    drop = Drop(drop, "convert").names
    name, part = _opened(source, source_format, "convert", drop)
    if marks is not None and where == "":
        raise InputError("convert: marks without where change nothing; give where='not flags contains bad', say")
    is_live = False
    if callable(where) or where.strip():
        if isinstance(part, EpisodeStream):
            raise InputError(
                f"convert: {name} is read in order, and has no table of episodes to choose from; convert all, and "
                "choose from the copy"
            )
        whole = as_dataset(part, "convert: the source")
        part = whole.selected(where, "convert", marks)
        is_live = whole.pinned() is not whole
    options = {**writer_options, "mode": mode}
    told = Facts.named("convert", reward_at, fps)
    copy_episodes([(name, part)], dest, chosen, progress, "convert", options, told, drop, is_live)


def merge(
    sources: Sequence[Any],
    dest: str | os.PathLike[str],
    *,
    dest_format: str | None = None,
    mode: str = "error",
    progress: bool = True,
    reward_at: str | None = None,
    fps: Any = None,
    drop: str | Iterable[str] = (),
    **writer_options: Any,
) -> None:
    """Write the episodes of several datasets into one, one dataset after the other.

    Of LeRobot sets into one, videos and pictures are copied as they are stored, as by `convert`.

    Args:
        sources: paths, names, datasets or buffers, of the same columns, per-step shapes and dtypes.
        dest: where to; "minari:name/set-v0" and "lerobot:user/set" are places in these libraries' own folders.
        dest_format: name of the format to write; by default the one that the suffix of `dest` names
            (.h5, .hdf5, .zarr, .lance), that of what is there, or "lance".
        mode: what to do where something is: "error", "append" or "overwrite".
        progress: show a progress bar.
        reward_at: where rewards stand in all of them, "next" or "same"; None: as they say.
        fps: steps per second of all of them; None: as they say. One that does not say has that of the others.
        drop: names of columns, and of data of episodes, to leave out, as for `convert`.
        writer_options: for the format's writer.

    Raises:
        InputError: (ValueError) there are no sources; one has other columns, which it names; the suffix of
            `dest` names another format; their rewards stand in different places, or their rates (`fps`)
            differ. The destination was not touched.
        NotFoundError, UnknownFormatError: a source can't be read.

    Cost: reads and writes everything; holds one episode.
    """
    if not sources:
        raise InputError("merge: Need at least one dataset")
    dest, named = place_of(dest)
    chosen = _format_of(dest, dest_format or named, mode, "merge")
    drop = Drop(drop, "merge").names
    parts = [_opened(source, None, "merge", drop) for source in sources]
    told = Facts.named("merge", reward_at, fps)
    copy_episodes(parts, dest, chosen, progress, "merge", {**writer_options, "mode": mode}, told, drop)


def copy_episodes(
    parts: list[tuple[str, Any]],
    dest: str | os.PathLike[str],
    chosen: type[Format],
    progress: bool,
    where: str,
    options: dict[str, Any],
    told: Facts,
    drop: str | Iterable[str],
    is_live: bool = False,
) -> None:
    """Write the episodes of `parts`, each with its name in messages; see `convert` and `merge`."""
    left_out = Drop(drop, where)
    for name, part in parts:
        path = getattr(part, "path", None)
        if path is not None and os.path.exists(dest) and os.path.realpath(path) == os.path.realpath(dest):
            raise InputError(f"{where}: {name} is both source and destination; choose another dest")
    names = dict.fromkeys(name for _, part in parts for name in (*part.column_names, *getattr(part, "dropped", ())))
    left_out.check(names, lambda: dict.fromkeys(n for _, p in parts for n in p.episode_column_names))
    widths = _aligned(parts, left_out, where)
    facts = Facts(told.reward_at or _reward_at(parts, where), told.fps or _rate(parts, where).fps)
    total = sum(count_of(part) for _, part in parts)
    copier = chosen.copier([part for _, part in parts], facts, options)
    episodes: Iterable[Any] = _with_data(parts, chosen.supports_episode_data, widths, is_live, copier)
    if progress:
        episodes = bar(episodes, total, f"{where} to {chosen.name}")

    def ahead(looks_at: Callable[[str, Any], bool], with_data: bool) -> Iterator[Any]:
        for _, part in parts:
            yield from outlines_of(part, looks_at, with_data)

    _fill(chosen, dest, episodes, where, facts=facts, drop=left_out, ahead=ahead, options=options)


def bar(items: Iterable[Any], total: int, what: str) -> Iterable[Any]:
    """Show a progress bar if the work takes a while."""
    from tqdm import tqdm

    shown: Iterable[Any] = tqdm(items, total=total, desc=what, delay=_BAR_AFTER_S, unit="episode")
    return shown


def _reward_at(parts: list[tuple[str, Any]], where: str) -> str | None:
    """Return where the rewards of the sources stand, None if that is not known of any, or refuse to mix them."""
    known: dict[str, str] = {}
    unknown = None
    for name, part in parts:
        placed = getattr(part, "reward_at", None)
        if placed is not None:
            known.setdefault(placed, name)
        elif count_of(part) and name_among(REWARDS, part.column_names):
            unknown = name
    (placed, name), *others = [*known.items(), (None, "")][: 2 if len(known) > 1 else 1]
    if others:
        raise InputError(
            f"{where}: the rewards of {name} stand at {placed!r}, those of {others[0][1]} stand at {others[0][0]!r}; "
            "convert one of them first, to rows of one kind"
        )
    if placed is not None and unknown is not None:
        raise InputError(
            f"{where}: the rewards of {name} stand at {placed!r}, and it is not known where those of {unknown} do: say "
            "it by load_dataset(..., reward_at=), or reward_at= if all stand alike"
        )
    return placed


def _rate(parts: list[tuple[str, Any]], where: str) -> Facts:
    """Return the rate of the sources that know it, or refuse two."""
    first, known = "", Facts()
    for name, part in parts:
        facts = Facts.of(part)
        known.refuse_rate(facts, where, first, name)
        if known.fps is None:
            first, known = name, facts
    return known


def _format_of(dest: str | os.PathLike[str], name: str | None, mode: str, where: str) -> type[Format]:
    return resolve_format(
        dest, name, mode=validate_write_mode(mode), default="lance", where=where, option="dest_format=NAME"
    )


def _opened(source: Any, source_format: str | None, where: str, drop: list[str]) -> tuple[str, Any]:
    if isinstance(source, str | os.PathLike):
        stream = open_stream(source, source_format)
        return str(source), load_arrays(source, source_format, drop) if stream is None else stream
    whole = getattr(source, "episode_dataset", None)
    if whole is not None:  # of transitions
        return repr(source), whole()
    if not (isinstance(source, EpisodeStream) or hasattr(source, "load_episode")):
        raise InputError(f"{where}: a source is a path, a name, a dataset or a buffer, got {type(source).__name__}")
    return repr(source), source


def _with_data(
    parts: list[tuple[str, Any]], keeps: bool, widths: dict[str, np.dtype[Any]], is_live: bool, copier: Any
) -> Iterator[dict[str, Any]]:
    for _, part in parts:
        for episode, data in episodes_of(part, keeps, is_live) if copier is None else copier(part):
            wide = {n: _wide(episode[n], d) for n, d in widths.items() if n in episode}
            yield {**episode, **wide, **({EPISODE_DATA_KEY: data} if data else {})}


def _wide(texts: Any, dtype: np.dtype[Any]) -> Array:
    """Return texts in arrays of at least this width; none is cut."""
    given = np.asarray(texts)
    return given.astype(np.promote_types(given.dtype, dtype), copy=False)


def _aligned(parts: list[tuple[str, Any]], drop: Drop, where: str) -> dict[str, np.dtype[Any]]:
    """Return the widest dtype of each column of text, or refuse parts that do not fit together."""
    widths: dict[str, np.dtype[Any]] = {}
    first: tuple[str, dict[str, ColumnSpec]] | None = None
    for name, part in parts:
        schema = schema_of(part, where)
        if schema is None:
            continue  # no episodes: nothing that could not fit
        specs = {spec.name: spec for spec in schema.columns if spec.name not in drop}
        if first is None:
            first = name, specs
        for column in {**first[1], **specs}:
            if column not in specs or column not in first[1]:
                lacks, has = (name, first[0]) if column not in specs else (first[0], name)
                raise InputError(
                    f"{where}: {lacks} has no column {column!r}, which {has} has; sources must have the same columns"
                )
            mine, known = specs[column], first[1][column]
            text = mine.dtype.kind in "SU" and mine.dtype.kind == known.dtype.kind
            if mine.shape != known.shape or (mine.dtype != known.dtype and not text):
                raise InputError(
                    f"{where}: column {column!r} is {mine.dtype} {mine.shape} in {name}, but "
                    f"{known.dtype} {known.shape} in {first[0]}; convert one of them first"
                )
            if text:
                widths[column] = max(widths.get(column, mine.dtype), mine.dtype, key=lambda d: d.itemsize)
    return {name: dtype for name, dtype in widths.items() if dtype.itemsize}


Ahead = Callable[
    [Callable[[str, np.dtype[Any]], bool], bool],
    Iterable[tuple[Mapping[str, Array], Mapping[str, Any]]],
]
"""Yields of each episode some columns and its data: called with which columns, by name and dtype, and whether the data
are asked for."""


def _fill(
    format: type[Format],
    path: str | os.PathLike[str],
    episodes: Iterable[Mapping[str, Any]],
    where: str,
    *,
    facts: Facts,
    drop: Drop,
    ahead: Ahead,
    options: Mapping[str, Any],
) -> None:
    """Write episodes to a dataset of a format, if it can hold all of them: else nothing is created or changed."""
    writer = format.open_writer(path, **options)
    tell_facts(writer, facts, where)
    left = (drop(episode) for episode in episodes)
    some, refused = list(islice(left, 1)), Refused()
    ours = writer if isinstance(writer, EpisodeWriter) else None
    if ours is not None:
        for first in some:
            refused |= ours.refusals(first)
        looks = type(ours).looks_at is not EpisodeWriter.looks_at or ours.looks_at_data
        for columns, data in ahead(ours.looks_at, ours.looks_at_data) if looks else ():
            refused |= {
                **ours.refused_columns(drop.of(columns)),
                **ours.refused_data(drop.of(data)),
            }
    elif not format.supports_episode_data:
        for _, data in ahead(lambda name, dtype: False, True):
            refused |= refused_where_none_fit(drop.of(data))
    if refused:
        raise refusal(refused, f"format {format.name!r}", where)
    with writer as opened:
        for episode in chain(some, left):
            if ours is None and not format.supports_episode_data:
                episode = {n: v for n, v in episode.items() if n != EPISODE_DATA_KEY}
            opened.write_episode(episode)
