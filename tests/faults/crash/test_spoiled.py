"""A power cut spoiled the rows of the newest call, of which a record is there: nothing of them is served.

And what check and repair make of damaged files of the other buffers.
"""

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer, TransitionReplayBuffer, Zarr
from ringmap.errors import NotFoundError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.disk.files import Disk
from ringmap.storage.inspect.describe import facts_of
from ringmap.storage.records.manifest import Kind
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.priorities import PriorityFile
from tests.disks import Through
from tests.faults.crash.recording import Machine
from tests.faults.crash.transitions import call_of, look, prove

Episodes = Through(ReplayBuffer, Disk(Machine(1)))


Rebooted = Through(ReplayBuffer, Disk(Machine(2)))


Transitions = Through(TransitionReplayBuffer, Disk(Machine(1)))


RebootedTransitions = Through(TransitionReplayBuffer, Disk(Machine(2)))


def spoil(file, offset, nbytes):
    with open(file, "r+b") as column:
        column.seek(4096 + offset)
        column.write(b"\xa5" * nbytes)


def test_a_spoiled_newest_episode_is_never_drawn_by_priority(tmp_path):
    buf = Episodes(20, path=tmp_path / "buf", sync_every_s=0)
    for number in range(3):
        buf.write_episode({"x": np.full(4, number)})
    buf.engine.owned.abandon()
    spoil(tmp_path / "buf/columns/000-x.npy", 8 * 8, 32)
    with Rebooted(20, path=tmp_path / "buf", sampler=PrioritizedSampler(rng=0)) as buf:
        assert buf.num_episodes == 2
        assert set(buf.sample(200)["x"].ravel().tolist()) == {0, 1}
    buf.close()


def add(buf, arguments):
    """Store a call in a commit of its own."""
    buf.add(*arguments)
    buf.engine.commit_pending("a test")


@pytest.fixture
def calls(tmp_path):
    """A buffer of three calls of three lanes, all of which go on, whose writer was killed."""
    options = {"device": None, "obs_dtype": np.int32, "sync_every_s": 0}
    buf = Transitions(20, (4,), path=tmp_path / "buf", **options)
    before = None
    for number in (1, 2, 3):
        add(buf, call_of(number, 3, before))
        before = number, 3
    buf._ring.buffer.engine.owned.abandon()
    return tmp_path / "buf", options


def test_a_spoiled_newest_call_is_no_next_observation(tmp_path):
    """What lies in its rows may be of an earlier lap, and look like the next step of a lane."""
    options = {"device": None, "obs_dtype": np.int32, "sync_every_s": 0, "path": tmp_path / "buf"}
    buf = Transitions(20, (4,), **options)
    for number, lanes in ((1, 2), (2, 1), (3, 2)):
        add(buf, call_of(number, lanes, None))
    buf._ring.buffer.engine.owned.abandon()
    spoil(tmp_path / "buf/columns/000-observations.npy", 3 * 16, 32)
    with open(tmp_path / "buf/columns/005-lanes.npy", "r+b") as column:
        column.seek(4096 + 3 * 4)
        column.write(np.array([2, 2], "<i4").tobytes())
    buf = RebootedTransitions(20, (4,), **options)
    stored, lost = look(buf)
    assert stored == ((1, 2), (2, 1))
    assert lost <= {(2, 0)}
    buf.close()


def test_lanes_do_not_go_on_over_a_call_that_was_dropped(calls):
    """The row so many lanes further is that of another lane, where a call with fewer lay in between."""
    path, options = calls
    buf = Transitions(20, (4,), path=path, **options)
    add(buf, call_of(4, 1, None))
    buf._ring.buffer.engine.owned.abandon()
    spoil(path / "columns/000-observations.npy", 9 * 16, 16)
    buf = RebootedTransitions(20, (4,), path=path, **options)
    assert look(buf)[0][-1] == (3, 3)
    add(buf, call_of(5, 3, (3, 3)))
    add(buf, call_of(6, 3, (5, 3)))
    _, lost = look(buf)
    assert {number for number, _ in lost} <= {3}
    buf.close()


def test_a_call_that_is_added_after_a_call_was_dropped_survives_a_kill(calls):
    """It waits in a group that follows the dropped call; nothing before it is missing."""
    path, options = calls
    spoil(path / "columns/000-observations.npy", 6 * 16, 16)
    buf = RebootedTransitions(20, (4,), path=path, **options)
    assert look(buf)[0][-1] == (2, 3)
    buf.add(*call_of(5, 3, None))
    buf._ring.buffer.engine.owned.abandon()
    assert facts_of(path).pending == 3
    buf = RebootedTransitions(20, (4,), path=path, **options)
    assert look(buf)[0][-1] == (5, 3)
    buf.close()


def test_a_group_that_follows_a_call_that_was_dropped_since_goes_too(calls):
    """The control: its calls would come without the call before them."""
    path, options = calls
    buf = Transitions(20, (4,), path=path, **options)
    add(buf, call_of(4, 3, (3, 3)))
    buf.add(*call_of(5, 3, (4, 3)))
    buf._ring.buffer.engine.owned.abandon()
    spoil(path / "columns/000-observations.npy", 9 * 16, 16)
    buf = RebootedTransitions(20, (4,), path=path, **options)
    assert look(buf)[0][-1] == (3, 3)
    buf.close()


def test_a_call_whose_chunk_a_power_cut_took_keeps_nobody_from_adding(tmp_path):
    options = {"device": None, "obs_dtype": np.int32, "sync_every_s": 0, "path": tmp_path / "buf"}
    options["storage"] = Zarr("lz4", 3)
    buf = Transitions(20, (4,), **options)
    for number in (1, 2, 3):
        add(buf, call_of(number, 3, None))
    buf._ring.buffer.engine.owned.abandon()
    (chunk,) = (tmp_path / "buf/columns").glob("*-lanes.zarr/c.2")
    chunk.unlink()
    buf = RebootedTransitions(20, (4,), **options)
    assert look(buf)[0] == ((1, 3), (2, 3))
    add(buf, call_of(5, 3, None))
    assert look(buf)[0] == ((1, 3), (2, 3), (5, 3))
    assert buf.check() == []
    buf.close()


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({}, {0, 1, 4, 5, 6, 7, 8}),
        ({"n_step": 3}, {4, 5, 6, 7, 8}),
        ({"frame_stack": 4}, {0, 1, 7, 8}),
        ({"frame_stack": 4, "n_step": 2}, {0, 7, 8}),
    ],
)
def test_rows_around_a_call_whose_chunk_a_power_cut_took_read_none_of_it(tmp_path, options, served):
    """What led to it, what sums over it and what has frames of it is not served."""
    options = {"device": None, "sync_every_s": 0, "path": tmp_path / "buf", "storage": Zarr("lz4", 3), **options}
    buf = Transitions(40, (4,), seed=0, **options)
    for number in range(9):
        frames = np.maximum(np.tile(number + np.arange(5, dtype=np.float32), (3, 1)), 3)
        add(buf, (frames[:, :4], np.full(3, number), np.ones(3), frames[:, 1:], np.zeros(3)))
    buf._ring.buffer.engine.owned.abandon()
    for chunk in (tmp_path / "buf/columns").glob("*.zarr/c.3"):
        chunk.unlink()
    buf = RebootedTransitions(40, (4,), seed=0, **options)
    batches = [buf.sample(3) for _ in range(60)]
    actions, newest, later = (
        np.concatenate([batch[name].reshape(3, -1)[:, -1] for batch in batches])
        for name in ("actions", "observations", "next_observations")
    )
    assert set(actions.tolist()) == served
    assert np.array_equal(newest, actions + 3)
    assert (later > newest).all()
    assert buf.check() == []
    buf.close()


def test_successors_of_other_rows_do_not_count(calls):
    """Both files end where the newest rows do, and are of rows that a power cut took."""
    path, options = calls
    other = Transitions(20, (4,), path=path.parent / "other", **options)
    for number in (1, 2, 7):
        add(other, call_of(number, 3, None))
    found = other._next_observations.files.find  # of another buffer: its checksum differs too
    assert found(9, 0) is None
    other.close()
    buf = Transitions(20, (4,), path=path, **options)
    record = buf._ring.buffer.engine.owned.record_of(buf._ring.buffer.engine.owned.live.last - 1)
    assert buf._next_observations.files.find(record.head, record.rows_sum) is not None
    assert buf._next_observations.files.find(record.head, record.rows_sum ^ 1) is None
    buf.close()


@pytest.mark.parametrize("at", [0, 9, 17, 25, 33, 41, 49, 57, 64 + 20])
def test_check_finds_flipped_successors_and_repair_mends_them(calls, at):
    path, options = calls
    assert ringmap.check(path) == []
    data = bytearray((path / "successors.bin").read_bytes())
    for part in (0, 4096) if at < 64 else (8192, 12288):
        data[part + at % 64] ^= 4
    (path / "successors.bin").write_bytes(data)
    findings = ringmap.check(path)
    assert [finding.file for finding in findings] == ["successors.bin"]
    actions = [str(action) for action in ringmap.repair(path)]
    assert actions == [str(action) for action in ringmap.repair(path, dry_run=False)]
    assert any("successors.bin" in action for action in actions)
    assert ringmap.check(path) == []
    buf = Transitions(20, (4,), path=path, **options)
    stored, lost = look(buf)
    assert len(stored) == 3
    assert lost == {(3, lane) for lane in range(3)}
    buf.close()


def test_the_older_header_alone_may_be_damaged(calls):
    path, options = calls
    buf = Transitions(20, (4,), path=path, **options)
    add(buf, call_of(4, 3, (3, 3)))
    older = (buf.engine.owned._successors._needed.generation + 1) % 2
    buf.close()
    with open(path / "successors.bin", "r+b") as file:
        file.seek(older * 4096)
        file.write(b"?")
    assert ringmap.check(path) == []
    buf = Transitions(20, (4,), path=path, **options)
    assert not look(buf)[1]
    buf.close()


def test_repair_drops_a_call_and_makes_successors_agree(calls):
    """The newest call is damaged: what counts then is what the one before it led to, which nobody knows any more."""
    path, options = calls
    spoil(path / "columns/000-observations.npy", 6 * 16, 48)
    assert ringmap.check(path)
    ringmap.repair(path, dry_run=False)
    assert ringmap.check(path) == []
    buf = Transitions(20, (4,), path=path, **options)
    assert look(buf)[0] == ((1, 3), (2, 3))
    prove(buf.sample(2))
    buf.close()


def test_a_birth_without_columns_is_not_found(tmp_path):
    ReplayBuffer(20, path=tmp_path / "buf", kind=Kind("transitions")).close()
    with pytest.raises(NotFoundError, match="no columns yet"):
        TransitionReplayBuffer.open(tmp_path / "buf")


@pytest.mark.parametrize("seed", range(6))
def test_flips_in_priorities_never_give_a_priority_of_another_clip(tmp_path, seed):
    """Each byte that is found damaged costs priorities, and changes none into what no clip was given."""
    path, sampler = tmp_path / "buf", PrioritizedSampler(rng=0)
    buf = Episodes(100, path=path, sampler=sampler, sync_every_s=0)
    buf.write_episode({"x": np.arange(40)})
    buf.sample(1)
    history = {place: {1.0, 50.0} for place in range(40)}
    for turn in range(5):
        given = 50.0 - turn - np.arange(40) / 64
        buf.update_priorities(np.arange(40), given)
        for place in range(40):
            history[place].add(float(np.float32(given[place])))
    buf.engine.owned.abandon()
    rng = np.random.default_rng(seed)
    used = 4096 + 5 * 512
    whole = (path / "priorities.bin").read_bytes()
    for _ in range(12):
        data = bytearray(whole)
        data[int(rng.integers(used))] ^= 1 << int(rng.integers(8))
        (path / "priorities.bin").write_bytes(data)
        manifest = buf.engine.owned.manifest
        file, leaves, faults = PriorityFile.open(Home(Disk(), str(path), manifest.uuid, manifest.rows), 40, write=False)
        if file is not None:
            file.close()
        assert [f.what for f in ringmap.check(path)] == faults
        for place in range(40 if leaves is not None else 0):
            if place < leaves.upto:
                assert float(leaves.values[place]) in history[place]
