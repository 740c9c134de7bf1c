"""`ringmap view`: a page over buffers and datasets."""

from __future__ import annotations

import sys
import threading
import webbrowser
from typing import Annotated

import typer

from ringmap.cli.console import count, say, show
from ringmap.extras import require

Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATH]...",
        help="Buffers, datasets, or folders with some below them; by default this folder.",
    ),
]
Port = Annotated[int, typer.Option("--port", metavar="N", help="If it is taken, the next one; 0: any.")]
Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")]
NoOpen = Annotated[bool, typer.Option("--no-open", help="Don't open a browser.")]

ReadOnly = Annotated[bool, typer.Option("--read-only", help="Show marks, but don't let them be changed.")]
MarksFile = Annotated[
    str | None,
    typer.Option("--marks", metavar="FILE", help="Where marks are kept; by default beside the data."),
]

_SLOW_S = 2.0
"""Seconds after which a search says that it goes on."""
_SAID = 5
"""Number of places that can't be read to print; the page names all."""


def view(
    paths: Paths = None,
    port: Port = 7777,
    host: Host = "127.0.0.1",
    no_open: NoOpen = False,
    read_only: ReadOnly = False,
    marks: MarksFile = None,
) -> None:
    """Show buffers and datasets as a web page, while they are written.

    Prints the address, and opens it. The page needs no network, and changes no data: it writes flags and notes of
    episodes beside them. Only who has the address can see it.
    Ends on Ctrl-C, with exit code 0.
    """
    require("view", "ringmap view")
    from ringmap.viewer.library import Library
    from ringmap.viewer.places import PROBLEM
    from ringmap.viewer.serve import Server, tunnel_line

    given = paths or ["."]
    slow = threading.Timer(
        _SLOW_S,
        say,
        [f"ringmap: looking for buffers and datasets below {', '.join(given)}; a folder closer to the data is quicker"],
    )
    slow.daemon = True
    slow.start()
    try:
        library = Library(given, marks=marks, read_only=read_only)
    finally:
        slow.cancel()
    library.prepare()
    places = library.places()
    found = [place for place in places if place.kind != PROBLEM]
    wrong = [place for place in places if place.kind == PROBLEM]
    for place in wrong[:_SAID]:
        say(f"ringmap: warning: {place.name}: {place.problem}")
    if len(wrong) > _SAID:
        say(f"ringmap: warning: {count(len(wrong) - _SAID, 'place')} more can't be read; the page says why")
    if not found:
        say(f"ringmap: warning: no buffers or datasets below {', '.join(given)} yet; the page shows those that come")
    server = Server(library, host, port)
    if server.port != port and port:
        say(f"ringmap: warning: port {port} is taken; using {server.port}")
    if server.address_outside is not None:
        say(
            f"ringmap: warning: --host {host}: other machines can connect, without encryption; only the token keeps "
            "them out"
        )

    def ready() -> None:
        show(f"{count(len(found), 'place')} at {server.address}")
        if server.address_outside is not None:
            show(f"from other machines: {server.address_outside}")
        tunnel = tunnel_line(server.port, host)
        if tunnel is not None:
            show(f"from your own machine: {tunnel}")
        show("Ctrl-C ends it")
        sys.stdout.flush()  # it may be a log
        if not no_open and tunnel is None:
            # In a thread: a browser that runs in the terminal returns when it is closed.
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()

    server.run(ready)
