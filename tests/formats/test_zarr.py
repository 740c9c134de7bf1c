"""Zarr: the conformance suite, and what is its own."""

from typing import ClassVar

from ringmap.testing.formats import FormatTests
from tests.formats.others import OtherOptions


class TestZarr(OtherOptions, FormatTests):
    name = "zarr"
    suffix = ".zarr"


class TestSmallChunks(OtherOptions, FormatTests):
    name = "zarr"
    suffix = ".z"
    writer_options: ClassVar = {"chunk_nbytes": 700, "level": None}
