"""A fault in the middle of a gather."""


class Striking:
    """Does something once, right before the n-th copy of a column; `column`: the class that copies."""

    def __init__(self, monkeypatch, column, strike, at):
        real, self.left = column.take, at

        def take(column, slots, out=None, head=0):
            self.left -= 1
            if self.left == 0:
                strike()
            return real(column, slots, out, head)

        monkeypatch.setattr(column, "take", take)


def always_look(monkeypatch):
    """Let every look see whether the directory of a ring was replaced: else that is noticed up to 0.1 s later."""
    for module in ("ringmap.storage.read.reader", "ringmap.clips.rings"):
        monkeypatch.setattr(f"{module}.HELD_S", 0.0)
