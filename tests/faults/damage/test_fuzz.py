"""The fuzz, in processes: `python -m pytest -m campaign tests/faults/damage/test_fuzz.py` runs it at length."""

import collections
import json
import logging
import math
import os
import subprocess
import sys
import time

import pytest

from ringmap.buffers import engine
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.disk.files import Disk
from ringmap.storage.inspect.check import Scan
from ringmap.storage.read import handle
from tests import ROOT
from tests.disks import undisturbed
from tests.faults.damage.fuzz import HOWS, Bench, Plan, judge

BATCH = 250


def run(place, seed, start, stop):
    """Judge cases `[start, stop)` in a process; return their results, and how it ended."""
    folder = place / f"{seed}-{start}"
    folder.mkdir()
    words = [sys.executable, "-W", "error", "-m", "tests.faults.damage.fuzz", folder, seed, start, stop]
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=3000)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return results, done.returncode, done.stderr[-2000:]


def campaign(place, seed, count, lasts_s=math.inf):
    """Judge cases, and return how many came out how: by what is told of each, and by (damage, what is told).

    `count` of them, or as many as there is time for.
    """
    counts = collections.Counter()
    wrong = []
    began = time.monotonic()
    for start in range(0, count, BATCH):
        if time.monotonic() - began > lasts_s:
            break
        results, code, error = run(place, seed, start, min(count, start + BATCH))
        counts["crashed"] += code != 0
        if code:
            wrong.append(f"crashed at case {start + len(results)}: {code}: {error}")
        for result in results:
            where = f"seed {seed} case {result['number']} ({result['kind']}: {result['case']})"
            wrong += [f"{where}: {what}" for what in result["wrong"]]
            counts["episodes kept"] += result["kept"] or 0
            counts["episodes whole by their bytes"] += result["whole"] or 0
            for what in told_of(result):
                counts[what] += 1
                counts[result["how"], what] += 1
    return counts, wrong


def told_of(result):
    """Return what holds of a case, in words."""
    holds = {
        "cases": True,
        "harmless": not result["hurt"],
        "harmful": result["hurt"],
        "reported": result["findings"],
        "refused": result["seen"].get("r+", "").startswith("refused"),
        "repaired, every episode kept": _all_kept(result["seen"].get("repair", "")),
        "opened after a reboot": result["rebooted"],
        "killed in a repair": result["seen"].get("killed", 0),
        "served wrong": any("served wrong" in what for what in result["wrong"]),
    }
    return [what for what, so in holds.items() if so]


def _all_kept(told):
    words = told.split()
    return words[:1] == ["kept"] and words[1] == words[3]


@pytest.mark.slow
def test_30_damages(place):
    counts, wrong = campaign(place, 0, 30)
    assert wrong == []
    assert (counts["cases"], counts["crashed"], counts["served wrong"]) == (30, 0, 0)
    assert min(counts[what] for what in ("harmless", "harmful", "reported", "refused")) > 4
    assert counts["episodes kept"] == counts["episodes whole by their bytes"] > 50


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1, 12))
def test_campaign(place, seed):
    """2,000 damages each: `-k campaign[1]` is the short campaign, all of them are 22,000. LASTS_S: until then."""
    counts, wrong = campaign(place, seed, 2_000, float(os.environ.get("LASTS_S", "inf")))
    print(f"\nseed {seed}:", ", ".join(f"{what} {counts[what]:,}" for what in TOLD))
    for how in HOWS:
        print(f"| {how} |", " | ".join(f"{counts[how, what]:,}" for what in COLUMNS), "|")
    assert wrong == []


COLUMNS = ["cases", "harmful", "reported", "refused", "served wrong"]
TOLD = [
    *COLUMNS,
    "crashed",
    "repaired, every episode kept",
    "opened after a reboot",
    "killed in a repair",
    "episodes kept",
    "episodes whole by their bytes",
]


# -- controls: the fuzz notices a guard that is missing --------------------------------------------


@pytest.fixture
def bench(place, monkeypatch):
    logging.getLogger("ringmap").setLevel(logging.CRITICAL)
    undisturbed(monkeypatch.setattr)
    yield Bench(place)
    logging.getLogger("ringmap").setLevel(logging.NOTSET)
    engine.DISK = Disk()


LEFT, RIGHT, OBS = "columns/004-left.npy", "columns/005-right.npy", "columns/000-obs-x.npy"
FLIPPED_HEADER = Plan("wrapped", "flip", OBS, at=20)
SWAPPED = Plan("retiring", "swapped", LEFT, RIGHT)


def flipped_row(bench):
    span = next(span for span in bench.truths["wrapped"].spans[OBS] if span.seq is not None)
    return Plan("wrapped", "flip", OBS, at=span.start)


def take_labels_out(monkeypatch):
    """Compare sizes alone."""
    faults = MemmapColumn.faults

    def size_only(column):
        return [fault for fault in faults(column) if "bytes" in fault or "missing" in fault]

    monkeypatch.setattr(MemmapColumn, "faults", size_only)
    opened = Scan._open_column

    def by_name(self, index):
        file = self.fixed.files[index]
        self.labels[file] = self.fixed.label(index)
        column = opened(self, index)
        self.faults.pop(file, None)
        return column

    monkeypatch.setattr(Scan, "_open_column", by_name)


def take_checksums_out(monkeypatch):
    monkeypatch.setattr(handle, "bad_rows", lambda *args: None)
    monkeypatch.setattr(Scan, "_of_rows", lambda self, *_: iter(()))


def test_sound_before_the_controls(bench):
    for plan in (FLIPPED_HEADER, SWAPPED, flipped_row(bench)):
        assert judge(bench, plan)["wrong"] == []


def test_a_few_damages_keep_all_that_is_whole_by_its_bytes_though_repairs_are_killed(bench):
    results = [judge(bench, bench.draw(7, number)) for number in range(8)]
    assert [result["wrong"] for result in results] == [[]] * 8
    assert sum(result["seen"].get("killed", 0) for result in results) > 4
    kept, whole = (sum(result[name] or 0 for result in results) for name in ("kept", "whole"))
    assert kept == whole > 20


def test_control_without_headers_and_labels(bench, monkeypatch):
    take_labels_out(monkeypatch)
    assert f"unreported: ['{OBS}']" in judge(bench, FLIPPED_HEADER)["wrong"]


def test_control_without_checksums(bench, monkeypatch):
    take_checksums_out(monkeypatch)
    wrong = judge(bench, flipped_row(bench))["wrong"]
    assert any(what.startswith("served wrong (r)") for what in wrong)
    assert any(what.startswith("unreported") for what in wrong)


def test_control_without_either_swapped_columns_go_unnoticed(bench, monkeypatch):
    take_labels_out(monkeypatch)
    take_checksums_out(monkeypatch)
    wrong = judge(bench, SWAPPED)["wrong"]
    assert f"unreported: ['{LEFT}', '{RIGHT}']" in wrong
    assert any("served wrong (r+)" in what and "column left differs" in what for what in wrong)


@pytest.mark.slow
def test_control_a_crash_is_seen(place):
    _, code, error = run(place, "crash", 0, 1)
    assert code != 0
    assert "Error" in error
