"""Torn clips: a flat-out writer against readers, with the second look and without."""

from __future__ import annotations

from time import perf_counter

from benchmarks.harness.place import Place
from benchmarks.harness.race import Ring, Tally, between_processes, between_threads
from benchmarks.harness.table import Table

RINGS = {
    "one record publishes and retires": Ring(),
    "episodes longer than the spare rows": Ring(spare=1),
}


def run(place: Place) -> list[Table]:
    """Race processes, then threads of one process, on both ways to commit."""
    rings = dict(list(RINGS.items())[: place.size(len(RINGS), 1)])
    clips = {
        True: place.size(1_000_000, 200) // len(rings),
        False: place.size(200_000, 200) // len(rings),
    }
    tables = []
    for way, race in (
        ("1 writer process, 2 reader processes", between_processes),
        ("1 writer thread, 2 reader threads of one process", between_threads),
    ):
        table = Table(f"{way}: clips of {Ring().history} steps of {Ring().row_nbytes // 1024} KiB")
        total = {True: Tally(), False: Tally()}
        for kind, ring in rings.items():
            for looks in (True, False):
                start = perf_counter()
                with place.folder(ram=True) as folder:
                    tally = race(str(folder / "buffer"), ring, clips[looks], look_twice=looks)
                total[looks] += tally
                table.fact(
                    f"{kind}, {'two looks' if looks else 'ONE LOOK (control)'}",
                    f"{tally.torn:,} torn of {tally.clips:,} clips; {tally.redraws:,} redrawn, "
                    f"{tally.laps:,} batches given up, {tally.episodes:,} episodes written, "
                    f"{perf_counter() - start:.0f} s",
                )
        table.bar("torn", total[True].torn, at_most=0)
        table.bar("torn without the second look", total[False].torn, at_least=None if place.tiny else 1)
        tables.append(table)
    return tables
