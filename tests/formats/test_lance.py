"""Lance: the conformance suite, and what is its own."""

from ringmap.testing.formats import FormatTests


class TestLance(FormatTests):
    name = "lance"
    suffix = ".lance"
