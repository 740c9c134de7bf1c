"""`ringmap convert`: a dataset in another format."""

from __future__ import annotations

from ringmap.cli.options import Destination, FormatName, Mode, Place
from ringmap.cli.places import episodes_at, format_for, say_written
from ringmap.cli.progress import is_watched


def convert(
    source: Place, dest: Destination, format: FormatName = None, mode: Mode = "error"
) -> None:
    """Write a dataset or a buffer in another format.

    Episode data comes along, as far as the format holds it.
    """
    from ringmap.datasets.transfer import convert as convert_dataset

    chosen = format_for(dest, format, "convert")
    dataset = episodes_at(source, "convert")
    convert_dataset(dataset, dest, dest_format=chosen, progress=is_watched(), mode=mode)
    say_written(dest, chosen)
