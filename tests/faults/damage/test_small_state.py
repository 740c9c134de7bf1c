"""A small state that is damaged: check names it, and repair goes back to the one before; readers and copies have it."""

import json
import struct

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from tests.faults.damage.forge import Forger, packed, parts_of

MAX_STEPS = 12
NOTES = {"seeds": [3, 4]}


def write(buf):
    for number in range(MAX_STEPS // 3):
        buf.write_episode({"x": np.full(3, number)})


@pytest.fixture
def left(tmp_path):
    """A killed buffer whose newest blobs name the small state of an episode that was evicted, and whose manifest has
    none."""
    path = tmp_path / "left"
    buf = ReplayBuffer(MAX_STEPS, path=path, seed=5)
    buf.write_episode({"x": np.zeros(3)}, notes={"old": 1})
    write(buf)
    buf.sample(2)
    buf.write_episode({"x": np.zeros(3)}, notes=NOTES)
    write(buf)
    write(buf)
    buf.engine.owned.abandon()
    return path


def segment_and_place(path):
    """Return the newest segment, and where it has the small state that counts."""
    record = max(np.load(f"{path}/episodes.npy"), key=lambda record: record["seq"])
    segment = path / f"data/{record['blob_segment']:012d}.bin"
    blob = segment.read_bytes()[record["blob_offset"] :][: record["blob_size"]]
    return segment, struct.unpack_from("<II", blob, 12)


def without_sense(blob, segment):
    sums, _, data, words = parts_of(blob, segment)
    return packed(len(segment), sums, b"[", data, words)


@pytest.mark.parametrize("what", ["damaged", "is no JSON"])
def test_check_finds_a_lost_small_state_and_repair_goes_back_to_the_one_before(left, what):
    segment, (at, size) = segment_and_place(left)
    data = bytearray(segment.read_bytes())
    assert json.loads(data[at : at + size])["notes"] == {"old": 1, **NOTES}
    expected = "is damaged or missing"
    if what == "damaged":
        data[at + 3] ^= 1
        segment.write_bytes(data)
    else:
        expected = "does not make sense"
        forger = Forger(left, None)
        forger.forged = lambda blob, segment: ("", "", without_sense(blob, segment))
        forger.forge_blob(forger.newest())
    (finding,) = ringmap.check(left)
    assert expected in finding.what
    with ReplayBuffer.open(left) as buf:
        before = list(buf.episodes())
    actions = ringmap.repair(left, dry_run=False)
    assert any("go back to the small state of record" in action.what for action in actions)
    assert not any(action.episodes for action in actions)
    assert ringmap.check(left) == []
    with ReplayBuffer.open(left, mode="r+") as buf:
        assert buf.notes == ({"old": 1} if what == "damaged" else {"old": 1, **NOTES})
        assert len(list(buf.episodes())) == len(before)
        buf.write_episode({"x": np.zeros(3)}, notes={"new": 2})
        kept = buf.notes
    with ReplayBuffer.open(left) as buf:
        assert buf.notes == kept


def test_readers_and_snapshots_have_it(left, tmp_path):
    with ReplayBuffer.open(left) as reader:
        assert reader.notes == {"old": 1, **NOTES}
        reader.snapshot(tmp_path / "copy")
    with ReplayBuffer.open(tmp_path / "copy", mode="r+") as copied:
        assert copied.notes == {"old": 1, **NOTES}
