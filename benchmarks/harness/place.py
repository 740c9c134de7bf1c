"""Where a benchmark runs: at which size, and in which folders."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

__all__ = ["Place"]

Size = TypeVar("Size")


@dataclass(frozen=True)
class Place:
    """Size and folders.

    `tiny`: seconds in all, to keep the code alive; its figures mean nothing. `out`: for plots;
    `scratch`: for buffers, on the disk that is to be measured. `quick`: the headlines, in minutes.
    """

    tiny: bool
    out: Path
    scratch: Path
    quick: bool = False

    def size(self, full: Size, tiny: Size, quick: Size | None = None) -> Size:
        """Return one of them; a quick run has the full size of what names no other."""
        if self.tiny:
            return tiny
        return quick if self.quick and quick is not None else full

    @property
    def method(self) -> str:
        """How processes are started: a start of Python takes longer than all that a tiny one does."""
        return "fork" if self.tiny else "spawn"

    @contextlib.contextmanager
    def folder(self, ram: bool = False) -> Iterator[Path]:
        """Give a folder of one's own, and remove it; `ram`: on a file system in RAM, where there is one."""
        shm = Path("/dev/shm")
        parent = shm if ram and shm.is_dir() and os.access(shm, os.W_OK) else self.scratch
        with tempfile.TemporaryDirectory(prefix="ringmap-bench-", dir=parent) as folder:
            yield Path(folder)

    def machine(self) -> dict[str, Any]:
        """Return what the numbers depend on."""
        # Here, because what is imported above is imported by every process that a benchmark spawns.
        from ringmap.storage.disk.system import file_system

        return {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "file_system": file_system(str(self.scratch)),
            "python": platform.python_version(),
            "numpy": np.__version__,
        }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
