"""`ringmap convert`: a dataset in another format."""

from __future__ import annotations

from ringmap.cli.options import Destination, FormatName, Mode, Place, WriterOptions, writer_options
from ringmap.cli.progress import is_watched
from ringmap.cli.resolve import episodes_at, format_for, say_written


def convert(
    source: Place,
    dest: Destination,
    format: FormatName = None,
    mode: Mode = "error",
    option: WriterOptions = None,
) -> None:
    """Write a dataset or a buffer in another format.

    Episode data comes along, as far as the format holds it.
    """
    from ringmap.formats.catalog.convert import convert as convert_dataset

    chosen = format_for(dest, format, mode, "convert")
    dataset = episodes_at(source, "convert")
    convert_dataset(
        dataset,
        dest,
        dest_format=chosen,
        progress=is_watched(),
        mode=mode,
        **writer_options(option, "convert"),
    )
    say_written(dest, chosen)
