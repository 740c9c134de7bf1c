"""A buffer or dataset of this process in a notebook: the same page, in a frame.

    show(buf) -> Server in a thread, on 127.0.0.1, frames allowed -> <iframe src="http://127.0.0.1:PORT/t/TOKEN/#/p/KEY">

Invariants: one server for each object that is shown, which ends with the process or with `close`; the page reads the object itself, so
a buffer in RAM is shown too.
Not here: the page.
"""

from __future__ import annotations

import html
from typing import Any

from ringmap.buffers.replay import ReplayBuffer
from ringmap.datasets.base import Dataset
from ringmap.errors import InputError
from ringmap.extras import require
from ringmap.viewer.library import Library
from ringmap.viewer.serve import Server
from ringmap.viewer.sources import DatasetSource, RingSource, Source

__all__ = ["Shown", "show"]


class Shown:
    """What is shown: a notebook draws it as a frame; elsewhere `address` opens it in a browser.

    Args:
        server: it, started.
        key: of the place.
        height: of the frame, in pixels.
    """

    def __init__(self, server: Server, key: str, height: int) -> None:
        self._server, self._key, self._height = server, key, height

    @property
    def address(self) -> str:
        """The address for a browser, with its token."""
        return f"{self._server.address}#/p/{self._key}"

    def close(self) -> None:
        """End the server."""
        self._server.stop()
        self._server.library.close()

    def _repr_html_(self) -> str:
        where = html.escape(f"{self._server.frame_address}#/p/{self._key}", quote=True)
        return f'<iframe src="{where}" width="100%" height="{self._height}" title="ringmap view" style="border:0"></iframe>'

    def __repr__(self) -> str:
        return f"Shown({self.address!r})"


def show(buffer: Any, height: int = 640) -> Shown:
    """Show a buffer or dataset of this process as a page in a notebook, while it is written.

    Args:
        buffer: a `ReplayBuffer`, in RAM or not, writer or reader; or a dataset.
        height: of the frame, in pixels.

    Returns:
        What a notebook draws as a frame. `address` is for a browser; `close` ends the server.

    Raises:
        InputError: it is neither.
        MissingExtraError: the extra `view` is not installed.

    Processes and threads: a thread of this process serves it, on 127.0.0.1, and reads beside the writer.
    """
    require("view", "show")
    source: Source
    if isinstance(buffer, ReplayBuffer):
        source = RingSource(buffer)
        name = "RAM" if buffer.path is None else str(buffer.path)
    elif isinstance(buffer, Dataset):
        source, name = DatasetSource(buffer), str(getattr(buffer, "path", type(buffer).__name__))
    else:
        raise InputError(f"show: a ReplayBuffer or a dataset is shown, got {type(buffer).__name__}")
    library = Library([], {name: source})
    server = Server(library, port=0, frames=True)
    server.start()
    return Shown(server, library.places()[0].key, height)
