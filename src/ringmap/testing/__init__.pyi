from ringmap.testing.columns import ColumnTests
from ringmap.testing.computed import ComputedTests
from ringmap.testing.datasets import DatasetTests
from ringmap.testing.formats import FormatTests
from ringmap.testing.samplers import SamplerTests

__all__ = [
    "ColumnTests",
    "ComputedTests",
    "DatasetTests",
    "FormatTests",
    "SamplerTests",
]
