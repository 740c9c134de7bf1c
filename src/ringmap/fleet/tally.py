"""A learner's counter: how many steps it drew, in a small file that is replaced whole.

Invariants: one process writes it; what is read has its checksum.
Not here: when it is written (pace.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringmap.errors import CorruptError
from ringmap.storage.disk.checksums import decode_signed, encode_signed

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """What a learner says.

    Args:
        drawn: steps, ever.
        marks: of the rings, as it saw them: uuid -> steps.
        fleet: which it counts for; "": an earlier release wrote none.
    """

    drawn: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    fleet: str = ""

    def encode(self) -> bytes:
        """Return its file.

        Example:
            >>> Tally.decode(Tally(8, {"a": 2}).encode(), "learner-0.json")
            Tally(drawn=8, marks={'a': 2}, fleet='')
        """
        body = {"drawn": self.drawn, "marks": self.marks, "fleet": self.fleet}
        return encode_signed(body)

    @classmethod
    def decode(cls, data: bytes, path: str) -> Tally:
        """Return what a file says.

        Raises:
            CorruptError: it is not what was written.
        """
        body, fault = decode_signed(data)
        try:
            if body is None or fault:
                raise ValueError(fault)
            numbers = body["drawn"], *body["marks"].values()
            if any(type(n) is not int or n < 0 for n in numbers) or type(body.get("fleet", "")) is not str:
                raise ValueError("its numbers are none")
            return cls(**body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptError(
                f"{path}: is not what was written ({error}); remove it, and this learner counts from 0"
            ) from error
