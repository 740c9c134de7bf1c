"""A buffer or dataset as a `datasets.Dataset` of Hugging Face, in memory.

Not here: files, which `convert(..., dest_format="parquet")` writes (formats/parquet).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringmap.datasets.stored_episodes import episodes_of, outlines_of, schema_of
from ringmap.errors import InputError
from ringmap.extras import require
from ringmap.formats.common.refusals import Drop, Refused, refusal, refused_where_none_fit
from ringmap.formats.parquet import arrow_schema, table_of
from ringmap.storage.columns.schema import Schema, as_columns

__all__ = ["to_datasets"]


def to_datasets(data: Any, *, drop: str | Iterable[str] = ()) -> Any:
    """Return the steps of a buffer or dataset as a `datasets.Dataset`: one row per step.

    Args:
        data: a buffer, or a dataset of `load_dataset`; its episodes of this moment.
        drop: names of columns, and of data of episodes, to leave out, as for `convert`: a row has no place for data of
            its episode.

    Returns:
        Rows of `episode_index`, `step_index` and the columns. Pictures (uint8, (H, W, 1 or 3)) are of the Image
        feature, as PNG; arrays are lists of fixed length, which `with_format("numpy")` turns into arrays.

    Raises:
        InputError: there are no episodes, or they have data, which are named, beside `seed` and `policy_step`.
        MissingExtraError: the package `datasets` is not installed.

    Cost: reads everything and holds it, pictures compressed. For more than memory holds, write Parquet files
        (`convert(data, path, dest_format="parquet")`), which `datasets` maps or streams.
    """
    require("datasets", "to_datasets", 'convert(data, path, dest_format="parquet")')
    import datasets
    import pyarrow as pa

    schema = schema_of(data, "to_datasets")
    if schema is None:
        raise InputError("to_datasets: there are no episodes, and so no columns")
    left_out, refused = Drop(drop, "to_datasets"), Refused()
    left_out.check(schema.names, lambda: data.episode_column_names)
    for _, values in outlines_of(data, lambda name, dtype: False, True):
        refused |= refused_where_none_fit(left_out.of(values))
    if refused:
        raise refusal(refused, "a `datasets.Dataset`", "to_datasets")
    schema = Schema(tuple(spec for spec in schema.columns if spec.name not in left_out))
    kind, tables = arrow_schema(schema), []
    for number, (episode, _) in enumerate(episodes_of(data, False)):
        columns = as_columns(left_out.of(episode), "to_datasets")
        length = len(next(iter(columns.values())))
        tables.append(table_of(number, length, columns, schema, kind))
    return datasets.Dataset(pa.concat_tables(tables))
