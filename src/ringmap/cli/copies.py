"""`ringmap convert`, `dump`, `merge` and `snapshot`: episodes, written elsewhere."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from ringmap.buffers.opening import EPISODES, FLEET, ROWS, TRANSITIONS, kind_of
from ringmap.cli.arguments import (
    Buffer,
    Destination,
    DropNames,
    FormatName,
    Mode,
    Place,
    WriterOptions,
    episodes_at,
    format_for,
    say_written,
    writer_options,
)
from ringmap.cli.console import count, is_watched, show
from ringmap.errors import InputError

Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="CONDITION",
        help="Only these episodes, as in `return > 100 and not flags contains bad`. Given again, all have to be met.",
    ),
]
MarksFile = Annotated[
    str | None, typer.Option("--marks", metavar="FILE", help="The file of marks; by default that beside the source.")
]


def convert(
    source: Place,
    dest: Destination,
    format: FormatName = None,
    mode: Mode = "error",
    option: WriterOptions = None,
    where: Where = None,
    marks: MarksFile = None,
    drop: DropNames = None,
) -> None:
    """Write a dataset or a buffer in another format.

    Episode data comes along. What the format can't hold is named, and has to be dropped.
    """
    from ringmap.clips.where import Condition

    wanted = Condition.all_of(where or (), "convert: where").text
    _convert("convert", source, dest, format, mode, option, wanted, marks, drop)


def _convert(
    caller: str,
    source: str,
    dest: str,
    format: str | None,
    mode: str,
    option: list[str] | None,
    where: str,
    marks: str | None,
    drop: list[str] | None,
) -> None:
    from ringmap.formats.catalog.convert import convert as convert_dataset

    chosen, options = format_for(dest, format, mode, caller), writer_options(option, caller)
    with contextlib.closing(episodes_at(source, caller)) as dataset:
        convert_dataset(
            dataset,
            dest,
            dest_format=chosen,
            progress=is_watched(),
            mode=mode,
            where=where,
            marks=marks,
            drop=drop or (),
            **options,
        )
    say_written(dest, chosen)


def dump(
    path: Buffer,
    dest: Destination,
    format: FormatName = None,
    mode: Mode = "error",
    option: WriterOptions = None,
    drop: DropNames = None,
) -> None:
    """Write the episodes of a buffer as a dataset.

    Each is verified by its checksum; a writer may be at work. Of a directory of rings it is those of all, ring by ring;
    transitions, and rows of a mix, are cut into episodes. `ringmap convert` does the same for datasets.
    """
    kind_of(path, "dump", (EPISODES, TRANSITIONS, ROWS, FLEET))
    _convert("dump", path, dest, format, mode, option, "", None, drop)


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


def snapshot(path: Buffer, dest: Destination) -> None:
    """Copy a buffer as it is now, while its writer goes on.

    The copy is a buffer of its own, equal to one committed state. DEST is a directory that is new or empty; it is
    there whole, or not at all. Of a directory of rings each ring is copied, one after the other.
    """
    kind_of(path, "snapshot", (EPISODES, FLEET))
    with contextlib.closing(episodes_at(path, "snapshot")) as buffer:
        buffer.snapshot(dest)
    with contextlib.closing(episodes_at(dest, "snapshot")) as made:
        stored = made.num_episodes, made.num_steps_stored
    show(f"wrote {dest}: {count(stored[0], 'episode')}, {count(stored[1], 'step')}")
