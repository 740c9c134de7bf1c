"""Where a benchmark runs: at which size, and in which folders."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

__all__ = ["Place"]

Value = TypeVar("Value")


@dataclass(frozen=True)
class Place:
    """Size and folders of one suite; what it opens is closed when the suite ends.

    `tiny`: seconds in all, to keep the code alive; its figures mean nothing. `quick`: the headlines, in minutes.
    `scratch`: for buffers, on the disk that is to be measured.
    """

    tiny: bool
    scratch: Path
    quick: bool = False
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def size(self, full: Value, tiny: Value, quick: Value | None = None) -> Value:
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

    def new_folder(self, ram: bool = False) -> Path:
        """Return a folder that stands until the suite ends."""
        return self.stack.enter_context(self.folder(ram))

    def closing(self, opened: Value) -> Value:
        """Return this, and close it when the suite ends."""
        self.stack.callback(opened.close)  # type: ignore[attr-defined]
        return opened

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
