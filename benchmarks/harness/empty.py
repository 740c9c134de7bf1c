"""A dataset that reads nothing: apart, so that a worker that is sent one imports torch alone."""

from __future__ import annotations

import torch

__all__ = ["Nothing"]


class Nothing:
    """Clips of this shape, all alike.

    Args:
        size: how many.
        shape: of a clip.
    """

    def __init__(self, size: int, shape: tuple[int, ...]) -> None:
        self.size, self.shape = size, shape

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=torch.uint8)
