"""A buffer or dataset of this process in a notebook: the same page, in a frame.

    show(buf) -> Server in a thread, on 127.0.0.1, frames allowed -> <iframe
    src="http://127.0.0.1:PORT/t/TOKEN/#/p/KEY">

Invariants: one server for each object that is shown, which ends with the process or with `close`; the page reads the
object itself, so a buffer in RAM is shown too; of a fleet it reads the rings.
Not here: the page.
"""

from __future__ import annotations

import html
from typing import Any

from ringmap.buffers.base import Buffer
from ringmap.datasets.base import Dataset
from ringmap.errors import InputError
from ringmap.extras import require
from ringmap.viewer.find import FLEET
from ringmap.viewer.library import SOURCES, Library
from ringmap.viewer.serve import Server
from ringmap.viewer.sources import DatasetSource, Source

__all__ = ["Shown", "show"]


class Shown:
    """What is shown: a notebook draws it as a frame; elsewhere `address` opens it in a browser.

    Args:
        server: it, started.
        page: which, as the end of the address.
        height: of the frame, in pixels.
    """

    def __init__(self, server: Server, page: str, height: int) -> None:
        self._server, self._page, self._height = server, page, height

    @property
    def address(self) -> str:
        """The address for a browser, with its token."""
        return f"{self._server.address}{self._page}"

    def close(self) -> None:
        """End the server."""
        self._server.stop()
        self._server.library.close()

    def _repr_html_(self) -> str:
        where = html.escape(f"{self._server.frame_address}{self._page}", quote=True)
        return (
            f'<iframe src="{where}" width="100%" height="{self._height}" title="ringmap view" '
            f'style="border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Shown({self.address!r})"


def show(buffer: Any, height: int = 640) -> Shown:
    """Show a buffer or dataset of this process as a page in a notebook, while it is written.

    Args:
        buffer: a `ReplayBuffer` or `TransitionReplayBuffer`, in RAM or not, writer or reader; a `ShardedReplayBuffer`;
            or a dataset.
        height: of the frame, in pixels.

    Returns:
        What a notebook draws as a frame. `address` is for a browser; `close` ends the server.

    Raises:
        InputError: it is neither.
        MissingExtraError: the extra `view` is not installed.

    Processes and threads: a thread of this process serves it, on 127.0.0.1, and reads beside the writer.
    """
    require("view", "show")
    rings = buffer.ring_paths if isinstance(buffer, Buffer) else None
    library = Library([], _sources(buffer)) if rings is None else Library(rings)
    server = Server(library, port=0, frames=True)
    server.start()
    places = library.places()
    if rings is not None:
        places = [place for place in places if place.kind == FLEET]
    return Shown(server, f"#/p/{places[0].key}" if places else "#/", height)


def _sources(buffer: Any) -> dict[str, Source]:
    """Return what reads a ring or a dataset, by its name on the page.

    Raises:
        InputError: it is neither, or has nothing to show.
    """
    if (kind := buffer.kind if isinstance(buffer, Buffer) else None) in SOURCES:
        return {"RAM" if buffer.path is None else str(buffer.path): SOURCES[kind](buffer)}
    if kind is None and isinstance(buffer, Dataset):
        return {str(getattr(buffer, "path", type(buffer).__name__)): DatasetSource(buffer)}
    raise InputError(f"show: a buffer of episodes or transitions, or a dataset, is shown, got {type(buffer).__name__}")
