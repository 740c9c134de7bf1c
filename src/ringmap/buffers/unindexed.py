"""The error of a buffer that returns rows only in batches, when it is indexed or given to a DataLoader.

Not here: buffers and datasets of clips, which have ids (sampled.py, view.py).
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from ringmap.errors import SubscriptError

__all__ = ["Unindexed"]


class Unindexed:
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
