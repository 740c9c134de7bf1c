"""The rows of one episode in a Parquet file of many: read in batches, straight into arrays.

    row groups whose episode_index may be it -> batches of a column -> values without Python objects -> (T, ...)

Invariants: beside the arrays that are returned, a sixteenth of a column is held, or 64 KiB, and a page of the file.
Not here: which file an episode is in (__init__.py), pictures (media/).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.errors import CorruptError, UnsupportedError
from ringmap.formats.common.arrow import leaves
from ringmap.storage.columns.schema import ColumnSpec

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["EpisodeRows"]

Array = np.ndarray[Any, np.dtype[Any]]

_INDEX = "episode_index"

_BUFFER_NBYTES = 1 << 16
"""Read at once: without a buffer a column's bytes in the whole row group are."""

_BATCH_NBYTES = 1 << 16


class EpisodeRows:
    """The rows of an episode in an open file.

    Args:
        path: of the file.
        episode: its index.
        length: its steps.

    Raises:
        CorruptError: the file has another number of rows of it.
    """

    def __init__(self, path: str, episode: int, length: int) -> None:
        import pyarrow.parquet as pq

        self.length = length
        """Its steps."""
        self._path = path
        self._file = pq.ParquetFile(path, buffer_size=_BUFFER_NBYTES)
        self._runs = list(_runs(self._file, episode))
        rows = sum(stop - start for _, start, stop in self._runs)
        if rows != length:
            self.close()
            raise CorruptError(f"{path}: {rows} rows of episode {episode}, expected {length}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def names(self) -> list[str]:
        """The names of the columns in the file."""
        names: list[str] = self._file.schema_arrow.names
        return names

    def column(self, spec: ColumnSpec) -> Array:
        """Return the values of a column of numbers, `(T, ...)`.

        Raises:
            UnsupportedError: a value is missing, or lists are not of one length; the file has other numbers than it
                says.
        """
        out = np.empty((self.length, *spec.shape), spec.dtype)
        for start, run in self._parts(spec.name, spec.row_nbytes):
            rows = len(run)
            values = leaves(run, spec, self._path).to_numpy(zero_copy_only=False)
            part = out[start : start + rows].reshape(-1)
            if len(values) != len(part):
                raise UnsupportedError(
                    f"{self._path}: column {spec.name!r} has lists of another length than {spec.shape}; leave it out: "
                    "keys_to_load="
                )
            part[:] = values.astype(spec.dtype, copy=False)
            if values.dtype != spec.dtype and not np.array_equal(
                part.astype(values.dtype), values, equal_nan=values.dtype.kind == "f"
            ):
                raise UnsupportedError(
                    f"{self._path}: column {spec.name!r} is of {values.dtype}, and meta/info.json says {spec.dtype}, "
                    "which does not hold its values; leave it out: keys_to_load="
                )
        return out

    def texts(self, spec: ColumnSpec) -> Array:
        """Return a column of text, as wide as its longest."""
        runs = (leaves(run, spec, self._path).to_pylist() for _, run in self._parts(spec.name, 1))
        return np.array(list(chain.from_iterable(runs)), str)

    def files(self, spec: ColumnSpec) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the bytes of pictures, each with the step that its run begins at."""
        for start, part in self._parts(spec.name, spec.row_nbytes):
            yield start, part.field("bytes").to_pylist()

    def _parts(self, name: str, nbytes: int) -> Iterator[tuple[int, pa.Array]]:
        """Yield the values of a column in runs of steps, each with the step that it begins at."""
        at = 0
        most = max(1, self.length // 16, _BATCH_NBYTES // max(1, nbytes))
        for group, start, stop in self._runs:
            row = 0
            for batch in self._file.iter_batches(most, row_groups=[group], columns=[name]):
                first, last = max(start, row), min(stop, row + len(batch))
                if first < last:
                    yield at, batch.column(name).slice(first - row, last - first)
                    at += last - first
                row += len(batch)
                if row >= stop:
                    break


def _runs(file: pq.ParquetFile, episode: int) -> Iterator[tuple[int, int, int]]:
    """Yield row group, first row in it and the row after the last, of the runs of rows of an episode."""
    footer = file.metadata
    paths = (
        [footer.row_group(0).column(c).path_in_schema for c in range(footer.num_columns)]
        if footer.num_row_groups
        else []
    )
    for group in range(footer.num_row_groups):
        known = footer.row_group(group).column(paths.index(_INDEX)).statistics
        if known is not None and known.has_min_max and not known.min <= episode <= known.max:
            continue
        numbers = file.read_row_group(group, columns=[_INDEX]).column(_INDEX).to_numpy()
        there = np.flatnonzero(numbers == episode)
        for run in np.split(there, np.flatnonzero(np.diff(there) != 1) + 1):
            if len(run):
                yield group, int(run[0]), int(run[-1]) + 1
