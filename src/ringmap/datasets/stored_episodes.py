"""Read the stored episodes of any dataset or buffer, and their columns, for a writer.

Not here: writing (formats/), copies of whole datasets (formats/catalog/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from ringmap.datasets.base import as_dataset
from ringmap.datasets.episode import stored_layout
from ringmap.errors import ClipIndexError
from ringmap.storage.columns.schema import Schema, as_columns

__all__ = ["EpisodeStream", "count_of", "episodes_of", "outlines_of", "schema_of"]

Array = np.ndarray[Any, np.dtype[Any]]


class EpisodeStream:
    """Episodes that are read in order, of a format that has no index: `convert` copies them.

    Attributes:
        path: where they lie.
        episode_column_names: names of the values that are constant within an episode.
        num_episodes: how many there are.
        reward_at, fps: what is known of all steps, see `Dataset`.
    """

    path: str
    episode_column_names: list[str]
    num_episodes: int
    reward_at: str | None = None
    fps: Fraction | None = None

    @property
    def schema(self) -> Schema:
        """The columns."""
        raise NotImplementedError(f"{type(self).__name__} must supply schema")

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order."""
        return list(self.schema.names)

    def __iter__(self) -> Iterator[tuple[dict[str, Array], dict[str, Any]]]:
        """Yield `(columns, values constant within the episode)` of each episode, images as they are stored."""
        raise NotImplementedError(f"{type(self).__name__} must supply __iter__")


def count_of(dataset: Any) -> int:
    """Return the number of episodes."""
    return dataset.num_episodes if isinstance(dataset, EpisodeStream) else len(dataset.lengths)


def episodes_of(
    dataset: Any, with_data: bool, is_live: bool = False
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield `(columns, values constant within the episode)` of each episode; see `Dataset.each_episode`."""
    if isinstance(dataset, EpisodeStream):
        return ((columns, data if with_data else {}) for columns, data in dataset)
    return as_dataset(dataset, "episodes_of: the dataset").each_episode(with_data, is_live)


def outlines_of(
    dataset: Any, looks_at: Callable[[str, np.dtype[Any]], bool], with_data: bool
) -> Iterator[tuple[dict[str, Array], dict[str, Any]]]:
    """Yield of each episode the columns that are asked for, and its data on request; nothing, if neither is. One that
    is evicted is left out.

    Args:
        dataset: any dataset or buffer.
        looks_at: called with the name and dtype of each column.
        with_data: whether the data are asked for.
    """
    schema = schema_of(dataset, "outlines_of")  # of a view that is pinned an episode would be read
    dataset = (
        dataset if isinstance(dataset, EpisodeStream) else as_dataset(dataset, "outlines_of: the dataset").pinned()
    )
    columns = () if schema is None else schema.columns
    names = [spec.name for spec in columns if looks_at(spec.name, spec.dtype)]
    with_data = with_data and bool(dataset.episode_column_names)
    if not names and not with_data:
        return
    if isinstance(dataset, EpisodeStream):
        for found, constant in dataset:
            yield {name: found[name] for name in names}, constant if with_data else {}
        return
    for number, length in enumerate(np.asarray(dataset.lengths).tolist()):
        rows: dict[str, Array] = {}
        data: dict[str, Any] = {}
        with contextlib.suppress(ClipIndexError):
            if names and dataset.transform is None:
                rows = dataset.steps_as_stored(number, 0, length, names)
            elif names:
                episode = stored_layout(dataset.load_episode(number))
                rows = {name: np.asarray(episode[name]) for name in names}
            if with_data:
                found = dataset.get_episode_data([number])
                data = {name: values[0] for name, values in found.items() if values[0] is not None}
            yield rows, data


def schema_of(dataset: Any, where: str) -> Schema | None:
    """Return the columns of a dataset; None when it has no episodes."""
    if not count_of(dataset):
        return None
    schema = getattr(dataset, "schema", None)
    if isinstance(schema, Schema) and getattr(dataset, "transform", None) is None:
        return schema
    for number in np.flatnonzero(np.asarray(dataset.lengths)).tolist():
        with contextlib.suppress(ClipIndexError):  # evicted since
            return Schema.of(as_columns(stored_layout(dataset.load_episode(number)), where))
    return None
