"""Zarr: the conformance suite, and what is its own."""

from typing import ClassVar

import pytest

from ringmap.testing.formats import VALUES, FormatTests
from tests.unit.formats.others import OtherOptions

SOME = {name: VALUES[name] for name in ("int64", "text", "nothing", "odd image")}
"""Every kind comes back in tests/contract: here some, at a time each."""


class TestZarr(OtherOptions, FormatTests):
    name = "zarr"
    suffix = ".zarr"
    values: ClassVar = SOME


@pytest.mark.slow
class TestSmallChunks(OtherOptions, FormatTests):
    name = "zarr"
    suffix = ".z"
    writer_options: ClassVar = {"chunk_nbytes": 700, "level": None}
    values: ClassVar = SOME
