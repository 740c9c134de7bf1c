"""Test suites that our parts pass, and a third party's should."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringmap.testing.columns import ColumnTests
    from ringmap.testing.datasets import DatasetTests
    from ringmap.testing.formats import FormatTests
    from ringmap.testing.samplers import SamplerTests

__all__ = ["ColumnTests", "DatasetTests", "FormatTests", "SamplerTests"]

_HOMES = {
    "ColumnTests": "columns",
    "DatasetTests": "datasets",
    "FormatTests": "formats",
    "SamplerTests": "samplers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ringmap.testing.{_HOMES[name]}"), name)
