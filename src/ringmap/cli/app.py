"""The commands by name, each loaded when it is called, and their exit codes.

    0    done; `check`: sound; `watch`, `view`: Ctrl-C
    1    it went wrong; `check`: findings; `repair` without `--apply`: there is something to do
    2    the call is wrong, or nothing is there; `check` and `repair`: no answer
    130  Ctrl-C

Invariants: an error of ringmap, or of the system, is one line on stderr, without a traceback unless it is
requested; `--help` imports no command.
Not here: what a command does.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ringmap import __version__
from ringmap.cli.console import say
from ringmap.errors import (
    ExistsError,
    InputError,
    MissingExtraError,
    NotFoundError,
    RingmapError,
    UnknownFormatError,
)

__all__ = ["COMMANDS", "HOMES", "app"]

TRACEBACK_VARIABLE = "RINGMAP_TRACEBACK"

COMMANDS = {
    "info": "Say what a buffer or a dataset holds.",
    "view": "Show buffers and datasets as a web page, while they are written.",
    "watch": "Show how a buffer fills while a collector writes it.",
    "collect": "Collect with several processes, each into a ring of its own.",
    "episodes": "List episodes: length, return, ending and data of each.",
    "plot": "Draw lengths, returns, fill and eviction as a PNG.",
    "preview": "Show pictures of episodes: a contact sheet, or a video.",
    "check": "Find what is wrong with a buffer or a dataset, file by file.",
    "repair": "Mend a buffer: whole episodes stay, the others are dropped.",
    "snapshot": "Copy a buffer as it is now, while its writer goes on.",
    "dump": "Write the episodes of a buffer as a dataset.",
    "convert": "Write a dataset or a buffer in another format.",
    "merge": "Write the episodes of several datasets into one.",
    "formats": "List the formats of datasets, and what each can do.",
}
"""All commands, and the first line of the help of each: `--help` shows it without loading them."""

HOMES = {
    "dump": "copies",
    "convert": "copies",
    "merge": "copies",
    "snapshot": "copies",
    "formats": "info",
    "plot": "pictures",
    "preview": "pictures",
    "repair": "check",
}
"""The modules of commands that have none of their own name."""

_FIX_THE_CALL = (ExistsError, InputError, MissingExtraError, NotFoundError, UnknownFormatError)
_ANSWERS_1 = ("check", "repair")
"""Commands whose exit code 1 is an answer: with these, no answer is 2."""


class Commands(TyperGroup):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, line in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=line)  # for the list; a call imports the real one

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name, loaded."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, None if stand_in is None else _load(str(stand_in.name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error becomes a line and an exit code."""
        with _plainly():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                if _wants_traceback(ctx):
                    raise
                raise typer.Exit(130) from None
            except BrokenPipeError:
                raise  # the reader of our output has closed it
            except (RingmapError, OSError) as error:
                if _wants_traceback(ctx):
                    raise
                say(f"ringmap: error: {error}")
                wrong_call = isinstance(error, _FIX_THE_CALL)
                code = 2 if wrong_call or ctx.invoked_subcommand in _ANSWERS_1 else 1
                raise typer.Exit(code) from None

    def main(self, *args: Any, **options: Any) -> Any:
        """Run, and exit; a wrong call is one line, like any other error."""
        if not options.pop("standalone_mode", True):
            return super().main(*args, **{**options, "standalone_mode": False})
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except typer.Abort:
            sys.exit(130)
        except Exception as error:
            if not hasattr(error, "format_message"):  # of Typer, for a wrong call
                raise
            say(f"ringmap: error: {error.format_message()}")
            context = getattr(error, "ctx", None)
            if context is not None:
                say(f"Try '{context.command_path} --help'.")
            sys.exit(getattr(error, "exit_code", 2))
        sys.exit(code if isinstance(code, int) else 0)


def _load(name: str) -> Any:
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=_SETTINGS)
    alone.command(name)(getattr(import_module(f"ringmap.cli.{HOMES.get(name, name)}"), name))
    return typer.main.get_command(alone)


def _wants_traceback(ctx: Any) -> bool:
    return bool(ctx.params.get("traceback")) or os.environ.get(TRACEBACK_VARIABLE, "0") not in "0"


@contextmanager
def _plainly() -> Iterator[None]:
    """Let warnings and the log be lines on stderr, with nothing in them that a terminal obeys."""
    logger, handler, show = logging.getLogger("ringmap"), _Lines(), warnings.showwarning

    def line(message: Warning | str, *_: Any, **__: Any) -> None:
        say(f"ringmap: warning: {message}")

    warnings.showwarning = line
    handler.setLevel(logging.WARNING)
    passed_on, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        warnings.showwarning = show
        logger.removeHandler(handler)
        logger.propagate = passed_on


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"ringmap: {record.levelname.lower()}: {record.getMessage()}")


_SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="ringmap",
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ringmap {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _group(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version, and exit."),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", help=f"Show the traceback of an error; as {TRACEBACK_VARIABLE}=1 does."),
    ] = False,
) -> None:
    """Look into replay buffers and datasets, and mend, copy and convert them."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(2)
