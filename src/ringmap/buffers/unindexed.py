"""What a buffer says that hands out rows by the batch, when it is indexed or given to a DataLoader.

Not here: buffers and datasets of clips, which have ids (sampled.py, view.py).
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from ringmap.errors import SubscriptError

__all__ = ["Unindexed"]


class Unindexed:
    """A buffer without ids. A subclass says what to call."""

    _instead: ClassVar[str]

    def __getitem__(self, idx: Any) -> NoReturn:
        """Raise: there are no ids.

        Raises:
            SubscriptError: always; the message says what to call.
        """
        raise SubscriptError(
            f"{type(self).__name__}: has no ids, so that neither brackets nor a DataLoader can read it; {self._instead}"
        )
