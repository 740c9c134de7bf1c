"""Parquet: the conformance suite, and what is its own."""

import itertools
import json

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra parquet)")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ringmap.data import get_format, load_dataset
from ringmap.errors import CorruptError, NewerVersionError
from ringmap.formats.common.arrow import from_arrow, to_arrow
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.testing.formats import FormatTests
from tests.unit.formats.others import OtherOptions


class TestParquet(OtherOptions, FormatTests):
    name = "parquet"
    suffix = ".parquet"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 2}, NewerVersionError, "version 2"),
        ({"lengths": [2, 2]}, CorruptError, "rows"),
        ({"lengths": [7, -2]}, CorruptError, "rows"),
        ({"columns": [["x", "|O", []]]}, CorruptError, "no such columns"),
        ({"columns": [["x", "<f8", [1 << 40]]]}, CorruptError, "column 'x'"),
    ],
)
def test_a_forged_footer_is_refused(tmp_path, change, error, message):
    path = tmp_path / "a.parquet"
    with get_format("parquet").open_writer(path) as writer:
        writer.write_episodes([{"x": np.arange(2.0)}, {"x": np.arange(3.0)}])
    file = path / "data-00000.parquet"
    facts = json.loads(pq.read_metadata(file).metadata[b"ringmap"])
    table = pq.read_table(file)
    with pq.ParquetWriter(file, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"ringmap": json.dumps(facts | change)})
    with pytest.raises(error, match=message):
        load_dataset(path)


@pytest.mark.parametrize("lists", [*itertools.product([False, True], repeat=3)])
def test_lists_in_lists_of_either_kind(lists):
    rows = np.arange(2 * 3 * 4 * 5, dtype=np.int32).reshape(2, 3, 4, 5)
    kind = pa.int32()
    for varies, size in zip(lists, (5, 4, 3), strict=True):
        kind = pa.list_(kind, -1 if varies else size)
    made = to_arrow(rows, kind)
    assert made.type == kind
    assert made.to_pylist() == rows.tolist()
    assert (from_arrow(made, ColumnSpec("x", (3, 4, 5), rows.dtype), "a file") == rows).all()
