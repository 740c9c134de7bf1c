"""Video: the conformance suite, and what is its own."""

from typing import ClassVar

import pytest

pytest.importorskip("av", reason="PyAV is not installed (pip install 'ringmap[video]')")

from ringmap.testing.formats import FormatTests
from tests.unit.formats.others import OtherOptions


class TestVideo(OtherOptions, FormatTests):
    name = "video"
    suffix = ""
    mean_error = 4.0


@pytest.mark.slow
class TestLossless(OtherOptions, FormatTests):
    name = "video"
    suffix = ".v"
    writer_options: ClassVar = {"lossless": True}
