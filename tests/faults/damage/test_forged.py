"""What is forged, its checksum right, is refused or reported by name, and repaired: the fuzz, and cases by name.

`python -m pytest -m campaign tests/faults/damage/test_forged.py` runs the fuzz at length.
"""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.buffers import engine
from ringmap.cli.app import app
from ringmap.errors import CorruptError, NewerVersionError
from ringmap.storage.disk.checksums import json_checksum
from ringmap.storage.disk.files import Disk
from ringmap.storage.inspect import check as survey
from ringmap.storage.read import recovery
from ringmap.storage.records.table import EpisodeTable
from tests import ROOT
from tests.faults.damage import forge
from tests.faults.damage.forge import Bench, Forger, Plan, judge, packed, parts_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and peaks of memory are Linux's")

BATCH = 100


def run(place, seed, start, stop):
    """Judge cases `[start, stop)` in a process; return what is wrong with each that has anything wrong."""
    folder = place / f"{seed}-{start}"
    folder.mkdir()
    words = [sys.executable, "-m", "tests.faults.damage.forge", folder, seed, start, stop]
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True)
    shutil.rmtree(folder)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [f"seed {seed} case {r['number']} ({r['case']}): {w}" for r in results for w in r["wrong"]]
    if done.returncode:
        wrong.append(f"crashed at case {start + len(results)}: {done.returncode}: {done.stderr[-2000:]}")
    return len(results), sum(bool(r["findings"]) for r in results), wrong


@pytest.mark.slow
def test_20_forgeries(place):
    cases, found, wrong = run(place, 0, 0, 20)
    assert wrong == []
    assert cases == 20
    assert found > 10


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1, 12))
def test_campaign(place, seed):
    """1,000 forgeries each. LASTS_S: until then."""
    lasts_s = float(os.environ.get("LASTS_S", "inf"))
    began, cases, found, wrong = time.monotonic(), 0, 0, []
    for start in range(0, 1_000, BATCH):
        if time.monotonic() - began > min(lasts_s, math.inf):
            break
        more = run(place, seed, start, start + BATCH)
        cases, found, wrong = cases + more[0], found + more[1], wrong + more[2]
    print(f"\nseed {seed}: forged {cases:,}, found {found:,}, wrong {len(wrong):,}", *wrong, sep="\n")
    assert wrong == []


# -- by name ---------------------------------------------------------------------------------------


@pytest.fixture
def bench(place, no_waiting):
    logging.getLogger("ringmap").setLevel(logging.CRITICAL)
    old = signal.signal(signal.SIGPROF, forge._hang)
    yield Bench(place, ["wrapped"])
    signal.signal(signal.SIGPROF, old)
    logging.getLogger("ringmap").setLevel(logging.NOTSET)
    engine.DISK = Disk()


@pytest.fixture
def forger(bench):
    folder = bench.folder / "case"
    shutil.copytree(bench.folder / "wrapped", folder)
    return Forger(folder, np.random.default_rng(0))


def judged(bench, seq=None, newest=False):
    return judge(bench, Plan("wrapped", "by name", "", "", False, seq, newest), bench.folder / "case")


def give_blob(forger, seq, change):
    """Give a record another blob, made of the parts of its own."""

    def forged(blob, segment):
        *parts, words = parts_of(blob, segment)
        return "", "", change(partial(packed, len(segment), words=words), *parts)

    forger.forged = forged
    forger.forge_blob(seq)


NO_NAME = b'[[7, "json", null, 0]]'
BAD_BLOBS = {
    "parts that do not add up": lambda packed, sums, carried, data: packed(sums, carried, data) + b"?",
    "nothing in it": lambda packed, sums, carried, data: b"",
    "a cut head": lambda packed, sums, carried, data: b"1234567",
    "data that do not decode": lambda packed, sums, carried, data: packed(sums, carried, b"\xff" * 9),
    "words that make no sense": lambda packed, sums, carried, data: packed(sums, carried, data, words=b"\1"),
    "codes beyond the words": lambda packed, sums, carried, data: packed(sums, carried, data, words=b""),
    "a name that is none": lambda packed, sums, carried, data: packed(
        sums, carried, len(NO_NAME).to_bytes(4, "little") + NO_NAME
    ),
}


@pytest.mark.parametrize("what", BAD_BLOBS)
def test_a_bad_blob_is_found_and_costs_its_episode_alone(bench, forger, what):
    number = forger.numbers()[2]
    give_blob(forger, number, BAD_BLOBS[what])
    result = judged(bench, number)
    assert result["wrong"] == []
    assert f"record {number}" in result["findings"][0]


@pytest.mark.parametrize("of", ["no columns", "one more", "others"])
def test_sums_that_readers_do_not_need_cost_nothing(bench, forger, of):
    """The rows are whole by the record. Repair dropped the episode."""
    wrong = {
        "no columns": lambda sums: b"",
        "one more": lambda sums: sums + bytes(8),
        "others": lambda sums: sums[::-1],
    }
    give_blob(
        forger,
        forger.numbers()[2],
        lambda packed, sums, carried, data: packed(wrong[of](sums), carried, data),
    )
    result = judged(bench)  # of which every episode must be there
    assert (result["wrong"], result["findings"]) == ([], [])


def test_the_command_line_says_what_is_wrong_with_a_blob(bench, forger, capsys):
    give_blob(forger, forger.numbers()[2], BAD_BLOBS["a cut head"])
    for words in (["check"], ["repair"]):
        with pytest.raises(SystemExit) as ended:
            app([*words, str(forger.folder)])
        assert ended.value.code == 1
        assert "blob parts do not add up" in capsys.readouterr().out


@pytest.mark.parametrize("carried", [b"[]", b'{"finished": 3}', b'{"sampling": {"step": 1}}'])
def test_a_small_state_that_makes_no_sense_costs_no_episode(bench, forger, carried):
    newest = forger.numbers()[-1]
    give_blob(forger, newest, lambda packed, sums, _, data: packed(sums, carried, data))
    forger.body["carried"] = {}
    sign(forger)
    result = judged(bench)  # of which every episode must be there
    assert result["wrong"] == []
    assert "does not make sense" in result["findings"][0]
    assert "CorruptError" in result["seen"]["open r+"]


def sign(forger):
    del forger.body["checksum"]
    forger.body["checksum"] = json_checksum(forger.body)
    (forger.folder / "manifest.json").write_text(json.dumps(forger.body))


@pytest.mark.parametrize("seq", [1000, 1 << 30, (1 << 62) - 1, 1 << 62, (1 << 64) - 1])
def test_a_state_far_ahead_is_found_and_asks_for_no_memory(bench, forger, seq):
    for slot in (0, 1):
        fields = forger.state(slot)
        fields[2] = seq
        forger.write_state(slot, fields)
    result = judged(bench)
    assert result["wrong"] == []
    assert result["findings"]


def test_counts_and_small_state_of_the_manifest_far_ahead_are_found(bench, forger):
    for change in (
        {"table": {**forger.body["table"], "seq": 1 << 40}},
        {"carried": {**forger.body["carried"], "seq": 1 << 40}},
        {"carried": {"seq": 14, "state": {"finished": 3}}},
        {"table_slots": 1},
    ):
        forger.body = {
            **json.loads((bench.folder / "wrapped/manifest.json").read_bytes()),
            **change,
        }
        sign(forger)
        result = judged(bench)
        assert result["wrong"] == [], change
        assert any("manifest.json" in finding for finding in result["findings"]), change


def test_a_segment_number_that_is_forged_costs_its_episode_and_no_later_one(bench, forger):
    """The number of the next segment followed from it, and no opening took the record that named that."""
    number = forger.numbers()[2]
    for seq, plan in ((number, number), (forger.numbers()[-1], None)):
        shutil.rmtree(forger.folder)
        shutil.copytree(bench.folder / "wrapped", forger.folder)
        fields = forger.record(seq)
        fields["blob_segment"] = (1 << 32) - 1
        forger.write_record(seq, fields)
        result = judged(bench, plan or seq, newest=plan is None)
        assert result["wrong"] == []
        assert f"data of record {seq}: damaged" in result["seen"]["open r"]


def test_a_newest_record_that_calls_a_later_one_the_oldest_is_refused(bench, forger):
    """An opening took it, as a buffer of no records, and so did repair."""
    newest = forger.numbers()[-1]
    before, fields = forger.record(newest - 1), forger.record(newest)
    for slot in (0, 1):  # which is not shown yet
        shown = forger.state(slot)
        head = before["start"] + before["length"]
        shown[2:7] = newest - 1, before["first"], before["tail"], head, newest - 1
        forger.write_state(slot, shown)
    fields["first"] = 1 << 31
    forger.write_record(newest, fields)
    forger.body.update(table={}, carried={})
    sign(forger)
    result = judged(bench, newest, newest=True)
    assert result["wrong"] == []
    assert result["findings"]


@pytest.mark.parametrize("at", [0, 2, -3])
def test_a_forged_tail_costs_no_episode(bench, forger, at):
    """The records after it were dropped, until their tails were as large."""
    numbers = forger.numbers()
    fields = forger.record(numbers[at])
    fields["tail"] = forger.record(numbers[-1])["tail"]
    forger.write_record(fields["seq"], fields)
    result = judged(bench)  # of which every episode must be there
    assert result["wrong"] == []
    assert "has a smaller tail than the record before it" in result["findings"][0]


def test_the_judge_is_not_misled_by_a_legal_setting(bench, forger):
    forger.body["settings"]["frameskip"] = 3
    sign(forger)
    result = judged(bench)
    assert (result["findings"], result["wrong"]) == ([], [])


def test_options_that_make_no_sense_are_left_out(bench, forger):
    forger.body["settings"].update(history_len=-1, durability=[], casting=1e300, sync_every_s="x")
    sign(forger)
    assert judged(bench)["wrong"] == []
    with ReplayBuffer.open(forger.folder) as buf:
        assert (buf.options.history_len, buf.options.durability) == (1, "process")


@pytest.mark.parametrize("at", [2, -1])
def test_a_record_of_unknown_kind_is_from_the_future(bench, forger, at):
    number = forger.numbers()[at]
    fields = forger.record(number)
    fields["kind"] = 9
    forger.write_record(number, fields)
    before = {p: p.read_bytes() for p in forger.folder.rglob("*") if p.is_file() and p.name != "lock"}
    told = rf"record {number} is of kind 9, this ringmap reads kinds 1 \(episode\)"
    for mode in ("r", "r+"):
        with pytest.raises(NewerVersionError, match=told):
            ReplayBuffer.open(forger.folder, mode)
    assert f"record {number} is of kind 9" in str(ringmap.check(forger.folder)[0])
    for dry_run in (True, False):
        with pytest.raises(NewerVersionError, match=told):
            ringmap.repair(forger.folder, dry_run=dry_run)
    assert {p: p.read_bytes() for p in before} == before
    assert judged(bench)["wrong"] == []


def test_a_live_reader_refuses_a_record_of_unknown_kind(place):
    with ReplayBuffer(max_steps=20, path=place / "a") as buf:
        buf.write_episode({"x": np.arange(5)})
        reader = ReplayBuffer.open(place / "a")
        buf.write_episode({"x": np.arange(5)})
        forger = Forger(place / "a", np.random.default_rng(0))
        fields = forger.record(2)
        fields["kind"] = 4
        forger.write_record(2, fields)
        with pytest.raises(NewerVersionError, match="record 2 is of kind 4"):
            reader.refresh()
        reader.close()


# -- controls: without the guard, the judge complains ----------------------------------------------


def test_control_data_that_check_does_not_decode(bench, forger, monkeypatch):
    monkeypatch.setattr(survey, "decode_data", lambda data: {})
    number = forger.numbers()[2]
    give_blob(forger, number, BAD_BLOBS["data that do not decode"])
    assert any(what.startswith("sound, but open r:") for what in judged(bench, number)["wrong"])


def test_control_codes_that_check_does_not_look_up(bench, forger, monkeypatch):
    monkeypatch.setattr(survey.Scan, "_strange_codes", lambda *_: {})
    number = forger.numbers()[2]
    give_blob(forger, number, BAD_BLOBS["codes beyond the words"])
    assert any(what.startswith("sound, but open r:") for what in judged(bench, number)["wrong"])


def test_control_kinds_that_nobody_looks_at(bench, forger, monkeypatch):
    monkeypatch.setattr(recovery, "refuse_unknown", lambda records, path: None)
    fields = forger.record(forger.numbers()[2])
    fields.update(kind=9, length=0)
    forger.write_record(fields["seq"], fields)
    assert not any("kind" in finding for finding in judged(bench)["findings"])


def test_control_a_range_that_is_not_bounded(bench, forger, monkeypatch):
    monkeypatch.setattr(EpisodeTable, "count", lambda self, first, last: last + 1 - first)
    for slot in (0, 1):
        fields = forger.state(slot)
        fields[2] = (1 << 62) - 1
        forger.write_state(slot, fields)
    assert any("open r: " in what and "Error" in what for what in judged(bench)["wrong"])


def test_control_an_opening_that_check_does_not_ask(bench, forger, monkeypatch):
    def never(*_):
        raise CorruptError("planted")

    monkeypatch.setattr(survey, "find", never)
    assert judged(bench)["findings"] == ["episodes.npy: planted"]
