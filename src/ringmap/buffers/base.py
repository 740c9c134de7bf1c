"""What every buffer is asked: its answer is a method or an attribute here, which its class overrides.

    Buffer        what the rows are, half of a mix, recorded into, episodes in parts
    Unindexed     a buffer whose rows have no ids
    InNotebook    a card, or the page in a frame

Not here: life and state (engine.py), the mix (offline_to_online/), recorders (recording/), the page (viewer/).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, NoReturn

from ringmap.errors import ClosedError, InputError, SubscriptError

__all__ = ["Buffer", "InNotebook", "Unindexed", "episode_ring_of"]


class Buffer:
    """A buffer of ours, of any kind."""

    kind: ClassVar[str] = ""
    """What its rows are, as a manifest says it; "" for one that has no directory."""
    sampler: Any = None
    """What draws its batches; None: the buffer itself, uniformly."""

    not_recorded: ClassVar[str] = ""
    """Why a recorder can't fill it, in a sentence; "" if that goes without saying."""

    @property
    def holds_episodes(self) -> bool:
        """Whether its rows are steps of episodes, which `window` cuts into items."""
        return False

    @property
    def episode_ring(self) -> Any:
        """The `ReplayBuffer` that holds the rows; None where there is none."""
        return None

    @property
    def ring_paths(self) -> list[Any] | None:
        """The directories that are shown in place of this buffer: those of a fleet; None for one ring."""
        return None

    def mix_source(self, items: Mapping[str, Any]) -> Any:
        """Return what draws rows of this buffer for a mix (offline_to_online/sources.py).

        Args:
            items: `window`, `columns`, `anchors`: what an item of episodes holds.

        Raises:
            InputError: the buffer can't be a half of one.
        """
        raise InputError(f"OfflineToOnlineReplayBuffer: a {type(self).__name__} can't be a half of a mix; give a ring")

    def recorded_by(self, sinks: Any, given: Any = None) -> Any:
        """Return the sink of `sinks` (recording/adapters.py) that fills this buffer.

        Args:
            sinks: what makes a sink for each way to be filled.
            given: the mix that holds this buffer, if the user passed one.

        Raises:
            InputError: an environment does not say what the buffer stores.
        """
        return sinks.refuse(self, self.not_recorded)


def episode_ring_of(given: Any) -> Any:
    """Return the `ReplayBuffer` that holds the rows of a buffer; None where a user's object has none."""
    return given.episode_ring if isinstance(given, Buffer) else None


class Unindexed(Buffer):
    """A buffer without ids. A subclass names the method to call instead."""

    _instead: ClassVar[str]

    def __getitem__(self, idx: Any) -> NoReturn:
        """Raise, since the buffer has no ids.

        Raises:
            SubscriptError: always; the message names the method to call.
        """
        raise SubscriptError(
            f"{type(self).__name__}: has no ids, so that neither brackets nor a DataLoader can read it; {self._instead}"
        )


class InNotebook(Buffer, ABC):
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
