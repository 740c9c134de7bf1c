"""A fault in the middle of a gather."""

from ringmap.storage.columns.memmap import MemmapColumn


class Striking:
    """Does something once, right before the n-th copy of a column."""

    def __init__(self, monkeypatch, strike, at):
        real, self.left = MemmapColumn.take, at

        def take(column, slots, out=None, head=0):
            self.left -= 1
            if self.left == 0:
                strike()
            return real(column, slots, out, head)

        monkeypatch.setattr(MemmapColumn, "take", take)
