"""What a notebook shows of a buffer: a small card, or its page in a frame.

Not here: the page (viewer/).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from ringmap.errors import ClosedError

__all__ = ["InNotebook"]


class InNotebook(ABC):
    """A buffer that a notebook shows."""

    def show(self, height: int = 640) -> Any:
        """Show this buffer as a page in a notebook, while it is written: what `ringmap view` shows. It needs the extra
        `view`.

        Args:
            height: of the frame, in pixels.

        Returns:
            What a notebook draws as a frame: its `address` opens in a browser, and its `close` ends the server.

        Raises:
            MissingExtraError: Starlette or uvicorn is not installed.
        """
        # By name: the viewer is an upper floor, and is loaded only here (decision 159).
        return import_module("ringmap.viewer.notebook").show(self, height)

    @abstractmethod
    def _card(self) -> dict[str, str]:
        """Return the lines of the card, name -> text.

        Raises:
            ClosedError: (RuntimeError) the buffer is closed.
        """

    def _repr_html_(self) -> str:
        """Return a small card, which a notebook draws. It needs no network and no extra."""
        from html import escape  # here: it imports all names of characters

        try:
            rows = self._card()
        except ClosedError:
            return f"<code>{escape(repr(self))}</code>"
        body = "".join(
            f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in rows.items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{body}</table>"
