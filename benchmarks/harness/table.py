"""A table of times, and of ratios against their bars: printed for people, kept as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.harness.timing import QUANTILES, in_turn, quantiles

__all__ = ["Table"]

UNITS = {"us": 1e6, "ms": 1e3, "s": 1}


@dataclass
class Table:
    """What one benchmark found.

    `title` says what was timed, on what data; `cells` what is no time, in rows under `heads`; `notes`
    what the numbers do not show; `judged` whether the sizes are those that the bars are for.
    """

    title: str
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    cells: list[list[str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    ratios: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    judged: bool = True

    def time(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, burst: int = 1, **options: Any
    ) -> dict[str, Any]:
        """Time calls in turn, as `in_turn` does, and add a row for each; return the seconds."""
        return self.add_all(in_turn(calls, rounds, burst, **options))

    def add(self, name: str, times: Any) -> None:
        """Add a row: median, p90 and p99 of these seconds."""
        self.times[name] = {**quantiles(times), "calls": len(times)}

    def add_all(self, times: dict[str, Any]) -> dict[str, Any]:
        """Add a row for each name; return them."""
        for name, values in times.items():
            self.add(name, values)
        return times

    def median(self, name: str) -> float:
        """Return the median seconds of a row."""
        return self.times[name]["median"]

    def fact(self, name: str, value: Any) -> None:
        """Add a line that is no time."""
        self.facts[name] = value

    def row(self, *cells: str) -> None:
        """Add a row under the heads."""
        self.cells.append([*cells])

    def ratio(self, name: str, other: str, at_most: float | None = None) -> None:
        """Compare two rows: how many times as long the first takes as the second, by their medians."""
        self.bar(f"{name} / {other}, median", self.median(name) / self.median(other), at_most=at_most)

    def limit(self, name: str, unit: str, at_most: float | None = None) -> None:
        """Compare the median of a row with its bar, in "us", "ms" or "s"."""
        self.bar(f"{name}, median {unit}", self.median(name) * UNITS[unit], at_most=at_most)

    def faster(self, name: str, other: str, at_least: float | None = None) -> None:
        """Compare two rows: how many times as fast the first is as the second; medians are judged."""
        by = {q: self.times[other][q] / self.times[name][q] for q in QUANTILES}
        also = f"p90 {_number(by['p90'])}, p99 {_number(by['p99'])}"
        what = f"{name}: times as fast as {other} ({also}), median"
        self.bar(what, by["median"], at_least=at_least, ours=name, other=other)

    def rank(self, ours: str, at_least: Mapping[str, float] | None = None) -> None:
        """Sort the rows, fastest first, and compare each with ours: those that we lose come first.

        Args:
            ours: the row of ours, among the times.
            at_least: how a row begins -> the bar for it.
        """
        self.times = dict(sorted(self.times.items(), key=lambda row: row[1]["median"]))
        for name in self.times:
            if name != ours:
                self.faster(
                    ours, name, next((b for start, b in (at_least or {}).items() if name.startswith(start)), None)
                )

    def bar(
        self, what: str, value: float, at_most: float | None = None, at_least: float | None = None, **compared: str
    ) -> None:
        """Compare a number with its bar; without one it is only shown. `ours`, `other`: of which rows it is a ratio."""
        met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        self.ratios.append(
            {"what": what, "value": value, "at_most": at_most, "at_least": at_least, "met": met, **compared}
        )

    def __str__(self) -> str:
        lines = [self.title]
        if self.times:
            rows = [
                [name, *(_time(row[q]) for q in QUANTILES), f"{row['calls']:,}"] for name, row in self.times.items()
            ]
            lines += _aligned([["", *QUANTILES, "calls"], *rows])
        lines += _aligned([self.heads, *self.cells]) if self.cells else []
        lines += [f"  {name}: {_fact(value)}" for name, value in self.facts.items()]
        for ratio in self.ratios:
            lines.append(f"  {ratio['what']}: {_number(ratio['value'])}" + _bracketed(self._verdict(ratio), "  [{}]"))
        return "\n".join([*lines, *(f"  ({note})" for note in self.notes)])

    def markdown(self) -> str:
        """Return the same for a page: rows compared with one row of ours say how many times as fast ours is."""
        parts = [f"**{self.title}**"]
        ours = next((r["ours"] for r in self.ratios if r.get("other") in self.times), "")
        beside = {r["other"]: r for r in self.ratios if r.get("ours") == ours and r.get("other") in self.times}
        cells = {first: rest for first, *rest in self.cells}
        joined = bool(cells) and cells.keys() <= self.times.keys()
        if self.times:
            heads = [
                "",
                *QUANTILES,
                *([f"{ours}: times as fast"] if beside else []),
                *(self.heads[1:] if joined else []),
            ]
            rows = []
            for name, times in self.times.items():
                ratio = beside.get(name)
                told = [self._told(ratio) if ratio else ""] if beside else []
                more = cells.get(name, [""] * len(self.heads[1:])) if joined else []
                rows.append([name, *(_time(times[q]) for q in QUANTILES), *told, *more])
            parts.append(_grid(heads, rows))
        if self.cells and not joined:
            parts.append(_grid(self.heads, self.cells))
        others = [[r["what"], self._told(r)] for r in self.ratios if r not in beside.values()]
        if others or self.facts:
            parts.append(_grid(["", "also"], [*([n, _fact(v)] for n, v in self.facts.items()), *others]))
        return "\n\n".join([*parts, *(f"*{note[0].upper()}{note[1:]}.*" for note in self.notes)])

    def _told(self, ratio: dict[str, Any]) -> str:
        return _number(ratio["value"]) + _bracketed(self._verdict(ratio), " ({})")

    def _verdict(self, ratio: dict[str, Any]) -> str:
        for key, words in (("at_most", "at most"), ("at_least", "at least")):
            if ratio[key] is not None:
                met = ("met" if ratio["met"] else "MISSED") if self.judged else "too small to judge"
                return f"{words} {_number(ratio[key])}: {met}"
        return ""


def _bracketed(text: str, form: str) -> str:
    return form.format(text) if text else ""


def _aligned(grid: list[list[str]]) -> list[str]:
    """Return the lines of a grid, the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return ["  ".join([f"  {row[0]:{widths[0]}}", *map(str.rjust, row[1:], widths[1:])]) for row in grid]


def _grid(heads: list[str], rows: list[list[str]]) -> str:
    told = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [heads, *rows]]
    return "\n".join([told[0], "| --- |" + " ---: |" * (len(heads) - 1), *told[1:]])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _fact(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | np.integer) else str(value)


def _time(value: float) -> str:
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if value < 1000 * scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.2f} s"
