"""Sidecars: files of a buffer beside its columns, each behind the same few methods."""

from __future__ import annotations

from ringmap.storage.sidecars.base import Copied, Home, Marks, Sidecar
from ringmap.storage.sidecars.priorities import PriorityFile
from ringmap.storage.sidecars.successors import Successors
from ringmap.storage.sidecars.values import MutableValues

__all__ = ["SIDECARS", "Copied", "Home", "Sidecar"]

SIDECARS: tuple[type[Sidecar], ...] = (PriorityFile, Successors, MutableValues, Marks)
"""All sidecars that a buffer's directory may have. A new one is added here, and its name in disk/paths.py."""
