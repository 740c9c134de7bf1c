"""The table of README, from the results of a run.

python -m benchmarks.summary benchmarks/results
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

__all__ = ["main", "summary_of"]

_ROWS, _HEAD = 256, "| what | ringmap | beside, in the same run |\n| --- | --- | --- |"
_MB = _ROWS * 4 * 64 * 64 * 3 / 1e6
"""Of a batch of 256 clips of 4 frames."""
_CALLED = {"np.memmap": "any plain np.memmap", "draw and takes": "bare NumPy"}


class _Times:
    """Medians of one table, found by the beginnings of names: versions are part of them."""

    def __init__(self, results: Path, name: str, number: int = 0) -> None:
        kept = json.loads((results / f"{name}.json").read_text())
        table = kept["tables"][number]
        self.cores: int = kept["machine"]["cores"]
        self.title: str = table["title"]
        self.median = {row: times["median"] for row, times in table["times"].items()}

    def of(self, start: str) -> float:
        return next(median for name, median in self.median.items() if name.startswith(start))

    def beside(self, ours: str, *others: str) -> str:
        """Return how many times as long the others take, those that were installed."""
        found = []
        for start in others:
            if any(name.startswith(start) for name in self.median):
                times = self.of(start) / self.of(ours)
                said = f"{times:.0f}" if times >= 10 else f"{times:.1f}"
                found.append(f"{_CALLED.get(start, start)} {said}")
        return "times as long: " + " · ".join(found) if found else ""


def summary_of(results: Path) -> str:
    """Return README's table."""
    rows = [_cold(results), _warm(results), *_loaded(results)]
    rows += [_states(results), _commits(results), _openings(results)]
    return "\n".join([_HEAD, *("| " + " | ".join(row) + " |" for row in rows)])


def _cold(results: Path) -> list[str]:
    times = _Times(results, "cold")
    disk = f"the disk's own parallel random reads {_rate(times.of('O_DIRECT'))} MB/s"
    said = [
        f"{_CALLED.get(start, start)} {_rate(times.of(start))}"
        for start in ("Lance", "a Dataset over h5py", "sheeprl", "np.memmap", "TorchRL")
        if any(name.startswith(start) for name in times.median)
    ]
    others = f"{disk}; without workers and prefetch: {' · '.join(said)}" if said else disk
    what = "a ring 8 times as large as memory may be: `batches(256)`, clips of 4 frames of 64x64x3"
    return [what, f"{_rate(times.of('batches()'))} MB/s", others]


def _warm(results: Path) -> list[str]:
    times = _Times(results, "sampling")
    others = times.beside("ringmap", "cpprb", "sheeprl", "stable-worldmodel", "TorchRL")
    what = f"the same in memory, `sample(256)` on {times.cores} threads"
    return [what, _clips(times.of("ringmap")), others]


def _loaded(results: Path) -> list[list[str]]:
    rows = []
    for number, workers in enumerate(("0 workers", "2 workers")):
        times = _Times(results, "loading", number)
        others = times.beside("ringmap", "stable-worldmodel", "TorchRL", "a Dataset over h5py")
        what = f"`DataLoader(buf, batch_size=256, shuffle=True)`, {workers}"
        rows.append([what, _clips(times.of("ringmap")), others])
    return rows


def _states(results: Path) -> list[str]:
    times = _Times(results, "sampling", 1)
    others = times.beside("ringmap", "draw and takes", "cpprb", "Stable-Baselines3", "sheeprl", "TorchRL")  # fmt: skip
    what = "`sample(256)` of state vectors"
    return [what, _us(times.of("ringmap")), others]


def _commits(results: Path) -> list[str]:
    (few, short), (many, long) = _Times(results, "commit").median.items()
    return [f"one commit, an eviction included, {many}", _us(long), f"{few}: {_us(short)}"]


def _openings(results: Path) -> list[str]:
    times = _Times(results, "opening")
    checked = times.of("writer after a reboot")
    said = f"to write, after a reboot, everything checked: {checked:.2f} s"
    return [times.title.partition(" of ")[0], f"{times.of('reader'):.2f} s", said]


def _rate(seconds: float) -> str:
    return f"{_MB / seconds:,.0f}"


def _clips(seconds: float) -> str:
    return f"{round(_ROWS / seconds, -3):,.0f} clips/s"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("results", type=Path)
    print(summary_of(parser.parse_args().results))


if __name__ == "__main__":
    main()
