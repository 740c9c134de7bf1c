"""`ringmap merge`: several datasets as one."""

from __future__ import annotations

from typing import Annotated

import typer

from ringmap.cli.options import FormatName, Mode
from ringmap.cli.places import episodes_at, format_for, say_written
from ringmap.cli.progress import is_watched

Sources = Annotated[
    list[str], typer.Argument(metavar="DIR...", help="Datasets and buffers, of the same columns.")
]
Output = Annotated[str, typer.Option("--output", "-o", metavar="DEST", help="Where to write.")]


def merge(
    sources: Sources, output: Output, format: FormatName = None, mode: Mode = "error"
) -> None:
    """Write the episodes of several datasets into one.

    One after the other, in the order given. Sources that do not fit together are refused before anything is written.
    """
    from ringmap.datasets.transfer import merge as merge_datasets

    chosen = format_for(output, format, "merge")
    datasets = [episodes_at(source, "merge") for source in sources]
    merge_datasets(datasets, output, dest_format=chosen, mode=mode, progress=is_watched())
    say_written(output, chosen)
