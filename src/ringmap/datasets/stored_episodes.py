"""Read the stored episodes of any dataset or buffer, and their columns, for a writer.

Not here: writing (formats/), copies of whole datasets (formats/catalog/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringmap.datasets.image_axes import stored_layout
from ringmap.errors import ClipIndexError
from ringmap.storage.columns.schema import Schema, as_columns

__all__ = ["episodes_of", "schema_of"]

Array = np.ndarray[Any, np.dtype[Any]]


def episodes_of(
    dataset: Any, with_data: bool, only: tuple[Array, Array] | None = None
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield `(columns, values constant within the episode)` of each episode; the latter only on request.

    Args:
        dataset: a dataset or buffer.
        with_data: whether the latter are read.
        only: the numbers of the episodes that are wanted, and the names of all, as `choose` returns them. What was evicted since is left
            out.
    """
    if only is not None:
        yield from _chosen(dataset, with_data, *only)
        return
    for number in range(len(dataset.lengths)):
        episode, data = dict(stored_layout(dataset.load_episode(number))), {}
        if with_data:
            found = dataset.get_episode_data(number)
            data = {name: values[0] for name, values in found.items() if values[0] is not None}
        yield episode, data


def _chosen(
    dataset: Any, with_data: bool, numbers: Array, names: Array
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield chosen episodes. The numbers of a buffer fall with each eviction, so that each is looked up before and after it is read."""
    number_of = getattr(dataset, "episode_number", None)
    for name, chosen in zip(names[numbers].tolist(), numbers.tolist(), strict=True):
        while True:
            try:
                number = chosen if number_of is None else number_of(name)
                episode = dict(stored_layout(dataset.load_episode(number)))
                data = dict(dataset.episode_data(number)) if with_data else {}
                same = number_of is None or number_of(name) == number
            except ClipIndexError:
                if number_of is None:
                    raise
                with contextlib.suppress(ClipIndexError):
                    if number_of(name) != number:
                        continue
                break  # it was evicted
            if same:
                yield episode, data
                break


def schema_of(dataset: Any, where: str) -> Schema | None:
    """Return the columns of a dataset; None when it has no episodes."""
    if not len(dataset.lengths):
        return None
    schema = getattr(dataset, "schema", None)
    if isinstance(schema, Schema) and getattr(dataset, "transform", None) is None:
        return schema
    filled = np.flatnonzero(np.asarray(dataset.lengths))
    if not len(filled):
        return None
    return Schema.of(as_columns(stored_layout(dataset.load_episode(int(filled[0]))), where))
