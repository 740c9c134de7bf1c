"""What every buffer is asked: its answer is a method or an attribute here, which its class overrides.

    Buffer        what the rows are, whether a mix draws from it, and what records into it
    Unindexed     a buffer whose rows have no ids
    RingBuffer    one over the open files of an engine: its life, its sampling state, its card and page

Not here: what a process may do with the files (engine.py), the mix (offline_to_online.py), recorders (recording/), the
page (viewer/).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from ringmap.errors import ClosedError, InputError, SubscriptError

if TYPE_CHECKING:
    from ringmap.buffers.engine import Engine

__all__ = ["Buffer", "RingBuffer", "Unindexed", "episode_ring_of"]


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
        """Return what draws rows of this buffer for a mix (sources.py).

        Args:
            items: `window`, `columns`, `anchors`: what an item of episodes holds.

        Raises:
            InputError: the buffer can't be a half of one.
        """
        raise InputError(f"OfflineToOnlineReplayBuffer: a {type(self).__name__} can't be a half of a mix; give a ring")

    def recorded_by(self, sinks: Any, mix: Any = None) -> Any:
        """Return the sink of `sinks` (recording/adapters.py) that fills this buffer.

        Args:
            sinks: what makes a sink for each way to be filled.
            mix: the one that holds this buffer, if the user passed one.

        Raises:
            InputError: an environment does not say what the buffer stores.
        """
        return sinks.refuse(self, self.not_recorded)


def episode_ring_of(owner: Any) -> Any:
    """Return the `ReplayBuffer` that holds the rows of a buffer; None where a user's object has none."""
    return owner.episode_ring if isinstance(owner, Buffer) else None


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


class RingBuffer(Buffer, ABC):
    """A buffer over the open files of an engine."""

    engine: Engine
    """The engine of the buffer, for classes that build their own buffer."""

    # -- life --------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """The directory, or the glob of many rings; None for a buffer in RAM, or a list of rings."""
        return self.engine.path

    @property
    def mode(self) -> str:
        """ "r+" for the writer, "r" for a reader."""
        return "r+" if self.engine.is_writer else "r"

    @property
    def num_redraws(self) -> int:
        """Clips that this process redrew so far, because they were evicted before they could be read. A DataLoader's
        workers mark theirs in `batch.redrawn`."""
        return self.engine.num_redraws

    def refresh(self) -> bool:
        """Move a reader to the newest state; tell whether anything changed. A writer is always up to date."""
        return self.engine.refresh()

    @abstractmethod
    def flush(self) -> None:
        """Force all that is stored, and the sampling state, to the disk."""

    def close(self) -> None:
        """Flush (of many rings: what `state` keeps), and release files and lock. A closed buffer raises ClosedError on
        use; closing twice is allowed.

        Files and lock are released even if the flush raises. A signal handler may close it in the middle of another
        call of the same thread: that call does it when it ends.

        Raises:
            ReplacedError: the directory was removed, renamed or replaced since it was opened. Files and lock are still
                released, nothing was written at the path, and the committed data are in the directory, wherever it is
                now.
            SyncFailedError, EnvironmentFault: the disk refused; see `flush`.
        """
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Flush; the buffer stays open (unless the block closed it)."""
        if not self.engine.is_closed:
            self.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the sampling state (counter, generator, sampler state), to store with a checkpoint."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue sampling from the state that `state_dict` returned.

        Raises:
            InputError: the state is not valid, or comes from a buffer with another sampler. Nothing was changed.
        """
        self.engine.load_state_dict(state)

    # -- in a notebook -----------------------------------------------------------------------

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
        return import_module("ringmap.viewer.serve").show(self, height)

    @abstractmethod
    def _card(self) -> dict[str, str]:
        """Return the lines of the card, name -> text."""

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
