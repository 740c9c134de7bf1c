"""The fraction of offline rows in a batch: the number of rows, annealing, and the remainder of rounding.

    0.25 of 10 rows: round -> 2, 2, 2, 2, ...      carry -> 2, 3, 2, 3, ...

Invariants: 0 <= fraction <= base < 1; with "carry" the fraction is exact on average.
Not here: which rows (sources.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ringmap.errors import InputError

__all__ = ["Share"]


class Share:
    """A fraction of each batch, initially `base`.

    Raises:
        InputError: `base` is not between 0 and 1, or the `rounding` is unknown.
    """

    def __init__(self, base: float, rounding: str, where: str) -> None:
        if not _inside(base):
            raise InputError(f"{where}: offline_fraction must lie between 0 and 1, both excluded, got {base!r}")
        if rounding not in ("round", "carry"):
            raise InputError(f"{where}: rounding must be one of ('round', 'carry'), got {rounding!r}")
        self.rounding = rounding
        self.base = self.fraction = float(base)
        self._carry = 0.0

    def anneal(self, step: float, total_steps: float, where: str) -> None:
        """Set the fraction to `base * max(0, 1 - step / total_steps)`, at most `base`."""
        try:
            left = 1 - step / total_steps if total_steps > 0 else math.nan
        except TypeError:
            left = math.nan
        if math.isnan(left):
            raise InputError(
                f"{where}: step must be a number, and total_steps must be positive, got {step!r} and {total_steps!r}"
            )
        self.fraction = min(self.base, self.base * max(0.0, left))

    def split(self, size: int) -> tuple[int, int]:
        """Return the number of offline and online rows in a batch of this size."""
        exact = self.fraction * size
        if self.rounding == "carry" and self.fraction:
            exact += self._carry
        offline = min(size, max(0, round(exact)))
        return offline, size - offline

    def drew(self, offline: int, size: int) -> None:
        """Record that a batch was returned."""
        if self.rounding == "carry" and self.fraction:
            self._carry += self.fraction * size - offline

    @property
    def state(self) -> dict[str, Any]:
        """Base, fraction and the carried remainder, as JSON values."""
        return {"base": self.base, "fraction": self.fraction, "carry": self._carry}

    def resume(self, state: Mapping[str, Any], whatever_base: bool) -> None:
        """Continue from a `state`; restore the fraction only for the same base, or with `whatever_base`.

        Raises:
            InputError: the state is not valid. Nothing was changed.
        """
        try:
            base, fraction, carry = (float(state[name]) for name in ("base", "fraction", "carry"))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the state of the mix is none ({error!r}); nothing was changed") from None
        if not _inside(base) or not 0 <= fraction <= base or not math.isfinite(carry):
            raise InputError(
                f"the state of the mix has base {base}, fraction {fraction}, carry {carry}: expected 0 <= fraction <= "
                "base < 1; nothing was changed"
            )
        if whatever_base:
            self.base = base
        if base == self.base:  # else this call asks for another mix
            self.fraction = fraction
        self._carry = carry


def _inside(fraction: Any) -> bool:
    try:
        return math.isfinite(fraction) and 0 < fraction < 1
    except TypeError:
        return False
