"""`ringmap merge`: several datasets as one."""

from __future__ import annotations

from typing import Annotated

import typer

from ringmap.cli.options import DropNames, FormatName, Mode, WriterOptions, writer_options
from ringmap.cli.progress import is_watched
from ringmap.cli.resolve import episodes_at, format_for, say_written
from ringmap.errors import InputError

Sources = Annotated[
    list[str],
    typer.Argument(metavar="DIR... DEST", help="Datasets and buffers, of the same columns, and where to write."),
]
Output = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="DEST", help="Where to write, if not the last argument."),
]


def merge(
    sources: Sources,
    output: Output = None,
    format: FormatName = None,
    mode: Mode = "error",
    option: WriterOptions = None,
    drop: DropNames = None,
) -> None:
    """Write the episodes of several datasets into one.

    One after the other, in the order given. Sources that do not fit together are refused before anything is written.
    """
    from ringmap.formats.catalog.convert import merge as merge_datasets

    *given, dest = sources if output is None else [*sources, output]
    if not given:
        raise InputError(f"merge: {dest}: say at least one source, and where to write: merge DIR... DEST")
    chosen = format_for(dest, format, mode, "merge")
    options = writer_options(option, "merge")
    datasets = [episodes_at(source, "merge") for source in given]
    merge_datasets(
        datasets,
        dest,
        dest_format=chosen,
        mode=mode,
        progress=is_watched(),
        drop=drop or (),
        **options,
    )
    say_written(dest, chosen)
