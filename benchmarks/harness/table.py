"""A table of times, and of ratios against their bars: printed for people, kept as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.harness.timing import QUANTILES, quantiles

__all__ = ["Table", "compared"]


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

    def add(self, name: str, times: Any) -> None:
        """Add a row: median, p90 and p99 of these seconds."""
        self.times[name] = {**quantiles(times), "calls": len(times)}

    def add_all(self, times: dict[str, Any]) -> None:
        """Add a row for each name."""
        for name, values in times.items():
            self.add(name, values)

    def fact(self, name: str, value: Any) -> None:
        """Add a line that is no time."""
        self.facts[name] = value

    def row(self, *cells: str) -> None:
        """Add a row under the heads."""
        self.cells.append([*cells])

    def ratio(self, name: str, other: str, at_most: float | None = None, by: str = "median") -> None:
        """Compare two rows: how many times as long the first takes as the second."""
        self.bar(f"{name} / {other}, {by}", self.times[name][by] / self.times[other][by], at_most=at_most)

    def faster(self, name: str, other: str, at_least: float | None = None) -> None:
        """Compare two rows: how many times as fast the first is as the second; medians are judged."""
        by = {q: self.times[other][q] / self.times[name][q] for q in QUANTILES}
        median, *tails = by.items()
        also = ", ".join(f"{q} {_number(value)}" for q, value in tails)
        self.bar(f"{name}: times as fast as {other} ({also}), median", median[1], at_least=at_least)

    def rank(self, ours: str, at_least: Mapping[str, float] | None = None) -> None:
        """Sort the rows, fastest first, and compare each with ours: those that we lose come first.

        Args:
            ours: the row of ours, among the times.
            at_least: how a row begins -> the bar for it.
        """
        self.times = dict(sorted(self.times.items(), key=lambda row: row[1]["median"]))
        for name in self.times:
            if name != ours:
                bars = [bar for start, bar in (at_least or {}).items() if name.startswith(start)]
                self.faster(ours, name, *bars[:1])

    def bar(self, what: str, value: float, at_most: float | None = None, at_least: float | None = None) -> None:
        """Hold a number against its bar; without one it is only shown."""
        met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        self.ratios.append({"what": what, "value": value, "at_most": at_most, "at_least": at_least, "met": met})

    def __str__(self) -> str:
        lines = [self.title]
        if self.times:
            width = max(map(len, self.times))
            lines.append(f"  {'':{width}}  {'median':>10}{'p90':>10}{'p99':>10}{'calls':>9}")
            for name, row in self.times.items():
                cells = "".join(f"{_time(row[q]):>10}" for q in ("median", "p90", "p99"))
                lines.append(f"  {name:{width}}  {cells}{row['calls']:>9,}")
        if self.cells:
            grid = [self.heads, *self.cells]
            widths = [max(len(row[i]) for row in grid) for i in range(len(self.heads))]
            for first, *rest in grid:
                told = (f"{cell:>{n}}" for cell, n in zip(rest, widths[1:], strict=True))
                lines.append("  ".join([f"  {first:{widths[0]}}", *told]))
        lines += [f"  {name}: {_fact(value)}" for name, value in self.facts.items()]
        for ratio in self.ratios:
            verdict = self._verdict(ratio)
            told = f"  [{verdict}]" if verdict else ""
            lines.append(f"  {ratio['what']}: {_number(ratio['value'])}{told}")
        return "\n".join([*lines, *(f"  ({note})" for note in self.notes)])

    def markdown(self) -> str:
        """Return the same for a page: rows with one row of ours beside them say how many times as fast ours is."""
        parts = [f"**{self.title}**"]
        ours, beside, bars = self._beside()
        cells = {first: rest for first, *rest in self.cells}
        joined = cells if cells.keys() <= self.times.keys() else {}
        if self.times:
            heads = ["", *QUANTILES, *([f"{ours}: times as fast"] if beside else [])]
            heads += self.heads[1:] if joined else []
            rows = [
                [
                    name,
                    *(_time(row[q]) for q in QUANTILES),
                    *([beside.get(name, "")] if beside else []),
                    *(joined.get(name, [""] * len(self.heads[1:])) if joined else []),
                ]
                for name, row in self.times.items()
            ]
            parts.append(_grid(heads, rows))
        if self.cells and not joined:
            parts.append(_grid(self.heads, self.cells))
        told = [f"- {name}: {_fact(value)}" for name, value in self.facts.items()]
        for ratio in bars:
            verdict = self._verdict(ratio)
            told.append(f"- {ratio['what']}: {_number(ratio['value'])}" + f" ({verdict})" * bool(verdict))
        parts += ["\n".join(told)] if told else []
        return "\n\n".join([*parts, *(f"*{note[0].upper()}{note[1:]}.*" for note in self.notes)])

    def _beside(self) -> tuple[str, dict[str, str], list[dict[str, Any]]]:
        """Return the row of ours, what a column can say of the others, and the other ratios.

        It can where one row is compared with others; where several are, each comparison has a line.
        """
        found, others = {}, []
        parted = [(ratio, *compared(ratio["what"])) for ratio in self.ratios]
        ours = next((mine for _, mine, name in parted if name in self.times), "")
        for ratio, mine, name in parted:
            if mine == ours and name in self.times:
                verdict = self._verdict(ratio)
                found[name] = _number(ratio["value"]) + f" ({verdict})" * bool(verdict)
            else:
                others.append(ratio)
        return ours, found, others

    def _verdict(self, ratio: dict[str, Any]) -> str:
        for key, words in (("at_most", "at most"), ("at_least", "at least")):
            if ratio[key] is not None:
                met = ("met" if ratio["met"] else "MISSED") if self.judged else "too small to judge"
                return f"{words} {_number(ratio[key])}: {met}"
        return ""


def compared(what: str) -> tuple[str, str]:
    """Return the row of ours and the other one that a ratio of `faster` is of; "" for any other ratio."""
    ours, found, rest = what.partition(": times as fast as ")
    other = re.sub(r"( \(p90 [^)]*\))?, median.*$", "", rest)
    return (ours, other) if found else ("", "")


def _grid(heads: list[str], rows: list[list[str]]) -> str:
    line = "| --- |" + " ---: |" * (len(heads) - 1)
    told = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in [heads, *rows]]
    return "\n".join([told[0], line, *told[1:]])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _fact(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | np.integer) else str(value)


def _time(value: float) -> str:
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if value < 1000 * scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.2f} s"
