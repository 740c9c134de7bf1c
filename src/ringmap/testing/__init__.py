"""Test suites that our parts pass, and a third party's should."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmap.faces import lazily

if TYPE_CHECKING:
    from ringmap.testing.columns import ColumnTests
    from ringmap.testing.datasets import DatasetTests
    from ringmap.testing.formats import FormatTests
    from ringmap.testing.samplers import SamplerTests

__all__ = ["ColumnTests", "DatasetTests", "FormatTests", "SamplerTests"]

_HOMES = {
    "ColumnTests": "ringmap.testing.columns",
    "DatasetTests": "ringmap.testing.datasets",
    "FormatTests": "ringmap.testing.formats",
    "SamplerTests": "ringmap.testing.samplers",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
