"""Episodes that end together are stored together: killed, cut or refused at any change, each counts whole or not at
all, in order.

Random scripts of such calls are part of test_power, by `JoinedSession`.
"""

import errno
import os

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import CorruptError, InputError
from ringmap.storage.commit import commit
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.disk.paths import TABLE
from ringmap.storage.read import recovery
from ringmap.storage.records.table import TERMINATED
from tests.disks import FullDisk, Through, undisturbed
from tests.faults.crash.cases import episode, look
from tests.faults.crash.joined import joined, states_on_the_way, store_joined
from tests.faults.crash.recording import Always, RecordingDisk, materialise
from tests.tiers import few

MAX_STEPS, SPARE = 20, 8
BEFORE = tuple((number, 3) for number in range(1, 7))
SEVERAL = ((7, 2), (8, 3), (9, 1))
STATES = states_on_the_way(BEFORE, SEVERAL, MAX_STEPS)
LEVELS = pytest.mark.parametrize("level", few(["process", "power"]))


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch):
    undisturbed(monkeypatch.setattr, peeks=2)


def filled(root, level="process"):
    """Return a disk, and a buffer on it whose next episodes evict others."""
    os.mkdir(root)
    disk = RecordingDisk(str(root))
    buf = Through(ReplayBuffer, disk)(
        MAX_STEPS, path=f"{root}/buf", spare_rows=SPARE, durability=level, sync_every_s=0, seed=0
    )
    for one in BEFORE:
        buf.write_episode(episode(*one))
    buf.flush()
    return disk, buf


def together(buf):
    """Store them together; return how many were."""
    data = [{"number": number} for number, _ in SEVERAL]
    return buf.write_joined(joined(SEVERAL), [length for _, length in SEVERAL], data)


def step_of(seen):
    """Return how many of the episodes are there; fail if this is no state between two of them."""
    found = [k for k, states in enumerate(STATES) if seen in states]
    assert found, f"{seen} is no state on the way"
    return found[0]


def changes(tmp_path, level):
    """Return how many changes the call makes."""
    disk, buf = filled(tmp_path / "count", level)
    before = len(disk.log)
    assert together(buf) == len(SEVERAL)
    count = len(disk.log) - before
    assert step_of(look(buf)) == len(SEVERAL)
    buf.close()
    return count


@pytest.mark.parametrize("error", few([errno.ENOSPC, errno.EIO]))
@LEVELS
def test_a_write_that_fails_loses_nothing(tmp_path, level, error):
    for at in range(1, changes(tmp_path, level) + 1):
        disk, buf = filled(tmp_path / f"{error}{at}", level)
        disk.fail(at, OSError(error, os.strerror(error), disk.root), only=None, sticky=True)
        stored = together(buf)
        disk.lift()
        if buf.engine.owned.is_poisoned:  # a sync that failed: the fate of one is open
            buf.close()
            with Through(ReplayBuffer, disk).open(f"{disk.root}/buf") as reader:
                shown = step_of(look(reader))
            with Through(ReplayBuffer, disk)(MAX_STEPS, path=f"{disk.root}/buf", spare_rows=SPARE) as again:
                found = step_of(look(again))
            assert found in (stored, stored + 1, len(SEVERAL))
            assert shown in (found, found - 1), "a record that is not shown yet"
            continue
        assert step_of(look(buf)) == stored
        for one in SEVERAL[stored:]:
            buf.write_episode(episode(*one))
        assert look(buf) in STATES[-1]
        buf.close()
        assert ringmap.check(f"{disk.root}/buf") == []


def left_after_a_cut(tmp_path):
    """Return how many of the episodes a power cut leaves that loses all that no sync covers."""
    disk, buf = filled(tmp_path / "power", "power")
    assert together(buf) == len(SEVERAL)
    materialise(disk.model.crash(Always(0)), str(tmp_path / "cut"))
    with ReplayBuffer(MAX_STEPS, path=tmp_path / "cut" / "buf", spare_rows=SPARE) as left:
        return sum(one in look(left) for one in SEVERAL)


def test_a_cut_after_the_call_loses_none(tmp_path):
    assert left_after_a_cut(tmp_path) == len(SEVERAL)


def test_a_cut_after_a_write_that_fails_loses_none_that_were_stored(tmp_path):
    some = set()
    for at in range(1, changes(tmp_path, "power") + 1):
        disk, buf = filled(tmp_path / f"fails{at}", "power")
        disk.fail(at, OSError(errno.EIO, "planted", disk.root))
        stored = together(buf)
        if buf.engine.owned.is_poisoned:  # each further call says so
            continue
        some.add(stored)
        materialise(disk.model.crash(Always(0)), str(tmp_path / f"cut{at}"))
        path = tmp_path / f"cut{at}" / "buf"
        with ReplayBuffer(MAX_STEPS, path=path, spare_rows=SPARE) as left:
            assert step_of(look(left)) == stored
    assert some == {0, 1, 2, 3}


def test_the_rest_is_stored_alone_after_an_error(tmp_path):
    disk, buf = filled(tmp_path / "once")
    disk.fail(8, OSError(errno.EIO, "planted", disk.root))
    assert store_joined(buf, SEVERAL) < len(SEVERAL)
    assert disk.struck
    assert look(buf) in STATES[-1]
    buf.close()


def after_unwritable_states(path):
    """Store them together while state.bin can't be written, and end as a kill does; return how many were, and what a
    reader shows."""
    disk = FullDisk("write", where="state.bin")
    buf = Through(ReplayBuffer, disk)(MAX_STEPS, path=path, spare_rows=SPARE, sync_every_s=0)
    for one in BEFORE:
        buf.write_episode(episode(*one))
    disk.full = True
    stored = together(buf)
    buf.engine.owned.abandon()
    with ReplayBuffer.open(path) as reader:
        return stored, step_of(look(reader))


def test_a_state_that_cannot_be_written_lags_by_one_record(tmp_path):
    assert after_unwritable_states(tmp_path / "buf") == (1, 0)
    assert ringmap.check(tmp_path / "buf") == []


def test_each_is_refused_or_left_that_does_not_fit():
    buf = ReplayBuffer(MAX_STEPS, spare_rows=SPARE)
    rows = joined(SEVERAL)
    assert buf.write_joined(rows, [2, 3, 1]) == 0, "nothing fixed the columns yet"
    buf.write_episode(rows)
    assert buf.write_joined(rows, [2, 3, 1]) == 3
    assert buf.lengths.tolist() == [6, 2, 3, 1]
    for wrong, lengths in (
        (rows, [2, 3]),
        (rows, [2, 4, 0]),
        (rows, []),
        ({"obs": rows["obs"]}, [2, 3, 1]),
        ({**rows, "obs": rows["obs"] + 0.5}, [2, 3, 1]),
        (joined([(1, 5), (2, 4)]), [5, 4]),
    ):
        assert buf.write_joined(wrong, lengths) == 0
    assert buf.lengths.tolist() == [6, 2, 3, 1]
    wide = {**rows, "obs": rows["obs"].astype(np.int64)}
    assert buf.write_joined(wide, [2, 3, 1]) == 3, "other dtypes fit, as for one"
    plain = {name: values.tolist() for name, values in rows.items()}
    assert buf.write_joined(plain, [2, 3, 1]) == 3, "so do lists"


def test_episodes_that_are_changed_on_their_way_are_stored_alone():
    class Doubled(ReplayBuffer):
        def write_episode(self, ep_data, **options):
            super().write_episode({"x": ep_data["x"] * 2}, **options)

    filtered = ReplayBuffer(MAX_STEPS, spare_rows=SPARE, key_filter=lambda episode: {"x": episode["x"] * 2})
    for buf in (filtered, Doubled(MAX_STEPS, spare_rows=SPARE)):
        buf.write_episodes([{"x": np.full(2, number)} for number in range(4)])
        assert [list(episode["x"]) for episode in buf.episodes()] == [[2 * n] * 2 for n in range(4)]
        assert buf.write_joined({"x": np.arange(2)}, [1, 1]) == 0


def test_lists_of_flags_count_as_arrays_do():
    buf = ReplayBuffer(MAX_STEPS, spare_rows=SPARE)
    buf.write_episode({"terminated": [False]})
    assert buf.write_joined({"terminated": [False, True, False]}, [2, 1]) == 2
    records = [buf.engine.owned.table.read(seq) for seq in (1, 2, 3)]
    assert [record.flags for record in records] == [0, TERMINATED, 0]


def test_those_before_data_that_are_refused_are_stored():
    buf = ReplayBuffer(MAX_STEPS, spare_rows=SPARE)
    several = [episode(number, 2) for number in range(1, 5)]
    several[2]["_episode_data"] = 3
    with pytest.raises(InputError, match="must be a mapping"):
        buf.write_episodes(several)
    assert look(buf) == ((1, 2), (2, 2))


def synced_before_its_slot(tmp_path):
    """Store several where the slot of the newest durable record comes next; return whether the table is synced before
    that."""
    os.mkdir(tmp_path / "slots")
    disk = RecordingDisk(str(tmp_path / "slots"))
    path = f"{disk.root}/buf"
    buf = Through(ReplayBuffer, disk)(5 * MAX_STEPS, path=path, spare_rows=SPARE, sync_every_s=0)
    buf.write_episode(episode(1, 1))
    buf.flush()
    store = buf.engine.owned
    while store.seq < store.table.slots:  # sequence numbers begin at 1
        if store.seq % 2:
            buf.clear()
        else:
            buf.write_episode(episode(2, 1))
    before, table = len(disk.log), disk.model.find(["buf", TABLE])
    assert together(buf) == len(SEVERAL)
    changes = [entry[0] for entry in disk.log[before:] if entry[1] == table]
    buf.close()
    assert changes.count("write") == len(SEVERAL)
    return changes[0] == "sync"


def test_the_newest_durable_record_is_replaced_after_a_sync(tmp_path):
    assert synced_before_its_slot(tmp_path)


# -- controls ------------------------------------------------------------------------------------------


def test_control_a_slot_that_is_used_again_without_a_sync(tmp_path, monkeypatch):
    real = CommitFiles.protect
    monkeypatch.setattr(CommitFiles, "protect", lambda self, need, seq, now: real(self, need, 0, now))
    assert not synced_before_its_slot(tmp_path)


def test_control_states_that_lag_further(tmp_path, monkeypatch):
    monkeypatch.setattr(CommitFiles, "publish_again", lambda files: None)
    with pytest.raises(CorruptError, match="an old copy"):
        after_unwritable_states(tmp_path / "buf")


@pytest.mark.parametrize("name", ["sync_written", "append"])
def test_control_without_a_sync(tmp_path, monkeypatch, name):
    real = getattr(CommitFiles, name)
    wrong = {
        "sync_written": lambda files, rows: None,
        "append": lambda files, record, durable: real(files, record, False),
    }
    monkeypatch.setattr(CommitFiles, name, wrong[name])
    assert left_after_a_cut(tmp_path) < len(SEVERAL)


def test_data_that_would_lie_too_far_in_a_segment_are_stored_alone(tmp_path, monkeypatch):
    """An opening refuses a blob beyond `LAST_OFFSET`, of which the data of one episode are half at most."""
    monkeypatch.setattr(recovery, "LAST_OFFSET", 2 << 22)
    monkeypatch.setattr(commit, "_MOST_DATA", 1 << 22)
    data = bytes(3 << 20)
    with ReplayBuffer(MAX_STEPS, path=tmp_path / "buf", spare_rows=SPARE, sync_every_s=0) as buf:
        buf.write_episodes([{**episode(number, 1), "_episode_data": {"video": data}} for number in range(1, 8)])
    with ReplayBuffer.open(tmp_path / "buf") as buf:
        assert buf.num_episodes == 7
        assert all(buf.episode_data(number)["video"] == data for number in range(7))
    assert ringmap.check(tmp_path / "buf") == []
