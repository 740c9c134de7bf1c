"""Fill: writes episodes to a dataset of any format, if it can hold all of them.

Invariants: what can't be held is refused as one list, before anything is created or changed.
Not here: what a writer of ours refuses (writer.py), how refusals are told (refusals.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.formats.base import Format
from ringmap.formats.common.refusals import Drop, Refused, refusal, refused_where_none_fit
from ringmap.formats.common.writer import EpisodeWriter, tell_facts
from ringmap.formats.episode import EPISODE_DATA_KEY

__all__ = ["fill"]

Array = np.ndarray[Any, np.dtype[Any]]

Ahead = Callable[
    [Callable[[str, np.dtype[Any]], bool], bool],
    Iterable[tuple[Mapping[str, Array], Mapping[str, Any]]],
]
"""Yields of each episode some columns and its data: called with which columns, by name and dtype, and whether the data
are asked for."""


def fill(
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
    """Write episodes to a dataset of a format, if it can hold all of them: else nothing is created or changed.

    Args:
        format: of the dataset.
        path: its target.
        episodes: to write.
        where: the call to name in an error.
        facts: what is known of them.
        drop: what to leave out of them.
        ahead: called with a condition on a column's name and dtype; yields of each episode these columns, and its data.
        options: of the format's writer.

    Raises:
        InputError: the format can't hold a column, or data of an episode; all of them are named.
    """
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
