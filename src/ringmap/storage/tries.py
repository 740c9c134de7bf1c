"""How often a reader looks again: as long as each look leaves less to read.

    look -> gather -> look again: 9 unsure -> gather these -> look again: 3 unsure -> ... -> none

Invariants: a reader gives up after `MOST` looks in a row of which none left less to read than the first, never earlier.
Not here: what is read.
"""

from __future__ import annotations

from ringmap.errors import LappedError

__all__ = ["Tries"]

MOST = 10


class Tries:
    """Counts the looks in a row that brought a reader no further.

    Args:
        where: what is read, for the error.
        advice: what to do about it.
    """

    __slots__ = ("_advice", "_in_vain", "_left", "_where")

    def __init__(self, where: str, advice: str) -> None:
        self._where, self._advice = where, advice
        self._left: int | None = None
        self._in_vain = 0

    def failed(self, left: int = 1) -> None:
        """Take note that a look left this much to read.

        Raises:
            LappedError: it is the tenth in a row, and none left less than the first of them.
        """
        fewer = self._left is None or left < self._left
        self._in_vain = 1 if fewer else self._in_vain + 1
        self._left = left
        if self._in_vain >= MOST:
            raise LappedError(
                f"{self._where}: the writer overtook this reader {MOST} times in a row; {self._advice}"
            )
