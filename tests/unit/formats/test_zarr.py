"""Zarr: the conformance suite, and what is its own."""

from typing import ClassVar

import pytest

from ringmap.testing.formats import VALUES, FormatTests
from tests.unit.formats.others import OtherOptions


class TestZarr(OtherOptions, FormatTests):
    name = "zarr"
    suffix = ".zarr"


@pytest.mark.slow
class TestSmallChunks(OtherOptions, FormatTests):
    name = "zarr"
    suffix = ".z"
    writer_options: ClassVar = {"chunk_nbytes": 700, "level": None}
    # Every kind of value comes back above; here they are cut into chunks.
    values: ClassVar = {name: VALUES[name] for name in ("int64", "text", "nothing", "odd image")}
