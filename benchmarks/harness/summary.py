"""The table of README, from the results of a run: what we lose first.

python -m benchmarks.harness.summary benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from benchmarks.harness.table import compared

__all__ = ["main", "put_in", "summary_of"]

_ROWS = 256
_HEAD = "| what | ringmap | times as long as ringmap takes, in the same run |\n| --- | --- | --- |"
_MB = _ROWS * 4 * 64 * 64 * 3 / 1e6
"""Of a batch of 256 clips of 4 frames."""
_CALLED = {
    "NumPy, an hour's work: WILLNEED": "20 lines of NumPy with WILLNEED",
    "NumPy, an hour's work: ": "20 lines of NumPy with 32 threads",
    "NumPy, one fancy index": "NumPy's fancy index",
    "NumPy, draw and takes": "NumPy's take",
    "O_DIRECT": "the disk's own parallel reads",
    "a Dataset over h5py": "h5py",
    "DreamerV3's replay": "DreamerV3's replay",
    "array_record": "array_record and grain",
    **{
        name: name
        for name in (
            "cpprb",
            "Hugging Face datasets",
            "Lance",
            "litdata",
            "Reverb",
            "rlox",
            "sheeprl",
            "stable-worldmodel",
            "Stable-Baselines3",
            "tensorstore",
            "TorchRL",
            "webdataset",
        )
    },
}
"""How a row begins -> its name in the table; a library with two rows is there with its faster one."""
_STREAMS = ("litdata", "webdataset")
_NEXT = 3
"""How many slower ones a row names: the pages have all."""


class _Times:
    """Medians of one table, found by the beginnings of names: versions are part of them."""

    def __init__(self, results: Path, name: str, title: str) -> None:
        kept = json.loads((results / f"{name}.json").read_text())
        table = next(table for table in kept["tables"] if re.match(title, table["title"]))
        self.title: str = table["title"]
        self.median = {row: times["median"] for row, times in table["times"].items()}
        self.ratio = {r["what"]: r["value"] for r in table["ratios"]}

    def of(self, start: str) -> float:
        return next(median for name, median in self.median.items() if name.startswith(start))

    def beside(self, ours: str) -> str:
        """Return how many times as long the others take, the fastest first: all that we lose to, and the next three."""
        times = {n: m / self.of(ours) for n, m in self.median.items() if not n.startswith("ringmap")}
        for what, value in self.ratio.items():  # of turns beside each other, where there are such
            mine, name = compared(what)
            if name in times and mine == ours:
                times[name] = value
        found: dict[str, float] = {}
        for name, value in sorted(times.items(), key=lambda one: one[1]):
            called = next((c for start, c in _CALLED.items() if name.startswith(start)), None)
            if called is not None:
                found.setdefault(called + " (a stream)" * (called in _STREAMS), value)
        lost = sum(value < 1 for value in found.values())
        told = list(found.items())[: lost + _NEXT]
        return " · ".join(f"{called} {_times(value)}" for called, value in told)


def summary_of(results: Path) -> str:
    """Return README's table, each row that we lose before those that we win."""
    rows = [*_transitions(results), *_sampled(results), _cold(results), *_loaded(results)]
    rows.sort(key=lambda row: _least(row[2]))
    rows += [_commits(results), _openings(results)]
    return "\n".join([_HEAD, *("| " + " | ".join(row) + " |" for row in rows)])


def put_in(readme: str, table: str) -> str:
    """Return a README with this table in the place of the one that it has."""
    found: str = re.sub(r"\| what \| ringmap \|.*\n(\|.*\n)+", lambda _: table + "\n", readme)
    return found


def _least(others: str) -> float:
    """Return what the fastest other one takes: the rows are sorted by it."""
    found = re.search(r" ([\d.]+)(?: ·|$)", others)
    return float(found[1]) if found else float("inf")


def _transitions(results: Path) -> list[list[str]]:
    rows = []
    for title, what, ours in (
        ("prioritized", "prioritised draw of 256 and update of the priorities", "ringmap, in RAM: sample"),
        ("add a step of 1 lane", "`add` of a transition", "ringmap, in RAM"),
        (r"sample\(32\)", "`sample(32)` of transitions", "ringmap, in RAM"),
    ):
        times = _Times(results, "transitions", title)
        rows.append([what, _us(times.of(ours)), times.beside(ours)])
    return rows


def _sampled(results: Path) -> list[list[str]]:
    rows = []
    for what, title, told in (
        ("`sample(256)` of state vectors, one thread", "one thread:.*state vectors", _us),
        (
            "`sample(256)` of clips of 4 frames of 64x64x3, one thread",
            "one thread:.*pixels",
            _clips,
        ),
        ("`sample(256)` of these clips, all cores", "all .*pixels", _clips),
    ):
        times = _Times(results, "sampling", title)
        rows.append([what, told(times.of("ringmap")), times.beside("ringmap")])
    return rows


def _cold(results: Path) -> list[str]:
    times, ours = _Times(results, "cold", "cold"), "ringmap, batches()"
    what = "clips from a disk, ring 8 times as large as memory, `batches(256)`"
    return [what, f"{_rate(times.of(ours))} MB/s", times.beside(ours)]


def _loaded(results: Path) -> list[list[str]]:
    rows = []
    for workers in (0, 2):
        times = _Times(results, "loading", rf".*batch_size=256, shuffle=True, num_workers={workers}\)")
        what = f"`DataLoader`, batches of 256 clips, {workers} workers"
        rows.append([what, _clips(times.of("ringmap")), times.beside("ringmap")])
    return rows


def _commits(results: Path) -> list[str]:
    (few, short), (many, long) = _Times(results, "commit", ".*disk").median.items()
    return [f"one commit, an eviction included, {many}", _us(long), f"{few}: {_us(short)}"]


def _openings(results: Path) -> list[str]:
    times = _Times(results, "opening", "opening")
    checked = times.of("writer after a reboot")
    said = f"to write, after a reboot, everything checked: {checked:.2f} s"
    return [times.title.partition(" of ")[0], f"{times.of('reader'):.2f} s", said]


def _times(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def _rate(seconds: float) -> str:
    return f"{_MB / seconds:,.0f}"


def _clips(seconds: float) -> str:
    return f"{round(_ROWS / seconds, -3):,.0f} clips/s"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.summary", description=__doc__)
    parser.add_argument("results", type=Path)
    print(summary_of(parser.parse_args().results))


if __name__ == "__main__":
    main()
