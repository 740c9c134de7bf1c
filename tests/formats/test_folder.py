"""Folder: the conformance suite, and what is its own."""

from typing import ClassVar

from ringmap.testing.formats import FormatTests


class TestFolder(FormatTests):
    name = "folder"
    suffix = ""
    mean_error = 2.0


class TestFolderPNG(FormatTests):
    name = "folder"
    suffix = ".d"
    writer_options: ClassVar = {"image_format": "png"}
