"""Episodes that are still being recorded: begin, append, finish, abandon, and what a kill leaves."""

import os

import numpy as np
import pytest
import torch

from ringmap import ReplayBuffer
from ringmap.buffers.replay import EPISODE_DATA_KEY
from ringmap.errors import (
    ClosedError,
    CorruptError,
    InputError,
    ReadOnlyError,
    RoleError,
)
from ringmap.storage.records.table import INTERRUPTED, TERMINATED, TRUNCATED
from tests.unit.buffers.processes import Child, error_of, in_child
from tests.unit.buffers.steps import columns, episode, same, snapshot, stored


def step(number, t):
    """Return step `t` of episode `number`, as `append` takes it: no time axis."""
    return {name: values[0] for name, values in columns(number, t, t + 1).items()}


def record(recording, number, count, first=0):
    for t in range(first, first + count):
        recording.append(step(number, t))


def flags(buf):
    """Return what the table says of each stored episode."""
    return [buf.engine.owned.record_of(o).flags for o in range(buf.engine.owned.live.first, buf.engine.owned.live.last)]


def streams(buffer):
    return [name for name in buffer.files() if name.startswith("buf/open/")]


# -- one ---------------------------------------------------------------------------------------


def test_a_recorded_episode_is_one_like_any_other(buffer):
    buf = buffer(max_steps=20)
    buf.write_episode(episode(0, 5))
    recording = buf.begin_episode()
    record(recording, 1, 7)
    assert recording.num_steps == 7
    assert stored(buf) == [0], "not before it is finished"
    recording.finish(terminated=True, episode_data={"seed": 3})
    assert stored(buf) == [0, 1]
    assert buf.get_episode_data() == {"seed": [None, 3]}
    assert flags(buf) == [0, TERMINATED]
    assert streams(buffer) == []


@pytest.mark.parametrize(
    ("ending", "flag"),
    [
        ({}, 0),
        ({"terminated": True}, TERMINATED),
        ({"truncated": True}, TRUNCATED),
        ({"terminated": np.True_, "truncated": 1}, TERMINATED | TRUNCATED),
    ],
)
def test_two_endings_two_names(buffer, ending, flag):
    buf = buffer(max_steps=20)
    recording = buf.begin_episode()
    record(recording, 0, 2)
    recording.finish(**ending)
    assert flags(buf) == [flag]


def test_flags_of_whole_episodes_come_from_their_columns(buffer):
    buf = buffer(max_steps=20)
    for terminated, truncated in (
        ([0, 1], [0, 0]),
        ([0, 0], [0, 1]),
        ([0, 0], [0, 0]),
        ([1, 0], [0, 0]),
    ):
        buf.write_episode({"terminated": np.array(terminated, bool), "truncated": np.array(truncated, bool)})
    assert flags(buf) == [TERMINATED, TRUNCATED, 0, 0]


def test_steps_are_arrays_scalars_or_tensors(buffer):
    buf = buffer(max_steps=20, schema={"x": ((2,), "f4"), "n": ((), "i8"), "s": ((), "U3")})
    recording = buf.begin_episode()
    recording.append({"x": [1, 2], "n": 3, "s": "abc"})
    recording.append({"s": np.str_("d"), "n": np.int8(4), "x": torch.ones(2, requires_grad=True)})
    recording.append({"x": (1.5, 0), "n": torch.tensor(5), "s": ""})
    recording.finish()
    got = buf.load_episode(0)
    assert {name: v.tolist() for name, v in got.items()} == {
        "x": [[1, 2], [1, 1], [1.5, 0]],
        "n": [3, 4, 5],
        "s": ["abc", "d", ""],
    }


def test_the_first_step_may_lock_the_schema_but_only_when_it_is_finished(buffer):
    buf = buffer(max_steps=20)
    recording = buf.begin_episode()
    record(recording, 0, 2)
    assert buf.column_names == []
    buf.write_episode({"other": [1]})
    with pytest.raises(InputError, match="schema mismatch"):
        recording.finish()
    assert buf.column_names == ["other"]
    recording.abandon()
    buf.write_episode({"other": [2]})
    assert buf.num_episodes == 2


def test_steps_fit_what_was_locked_meanwhile(buffer):
    buf = buffer(max_steps=20)
    recording = buf.begin_episode()
    for t in range(3):
        recording.append({"x": t, "y": float(t)})
    buf.write_episode({"y": np.zeros(2, "f4"), "x": np.zeros(2, "i2")})
    recording.finish()
    got = buf.load_episode(1)
    assert [(name, v.dtype.str, v.tolist()) for name, v in got.items()] == [
        ("y", "<f4", [0, 1, 2]),
        ("x", "<i2", [0, 1, 2]),
    ]


WRONG = {
    "no columns": ({}, "the step has no columns"),
    "a missing column": ({"step": 1}, "schema mismatch: missing columns"),
    "another shape": ({**step(0, 0), "action": np.zeros(3)}, "per-step shape"),
    "a value that does not fit": ({**step(0, 0), "step": 0.5}, "step 0 of dtype float64 does not fit"),
    "an object": ({**step(0, 0), "step": object()}, "Python objects"),
    "a name that is no string": ({3: 1}, "column names are strings"),
    "episode data": ({**step(0, 0), EPISODE_DATA_KEY: {"seed": 1}}, "_episode_data|schema mismatch|Python objects"),
    "a tensor without a NumPy dtype": ({**step(0, 0), "step": torch.zeros((), dtype=torch.bfloat16)}, "column 'step'"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_step_that_does_not_fit_is_refused_and_the_others_stay(buffer, wrong, first):
    buf = buffer(max_steps=20)
    buf.write_episode(episode(5, 3))
    recording = buf.begin_episode()
    if not first:
        record(recording, 0, 2)
    files = buffer.files()
    with pytest.raises(InputError, match=f"^OpenEpisode.append: .*({WRONG[wrong][1]})"):
        recording.append(WRONG[wrong][0])
    assert recording.num_steps == (0 if first else 2)
    assert buffer.files() == files
    record(recording, 0, 3, first=recording.num_steps)
    recording.finish()
    assert stored(buf) == [5, 0]


def test_no_longer_than_max_steps(buffer):
    buf = buffer(max_steps=20)
    recording = buf.begin_episode()
    record(recording, 0, 20)
    for _ in range(2):
        with pytest.raises(InputError, match=r"exceeds max_steps=20; raise max_steps, or finish it"):
            recording.append(step(0, 20))
    recording.finish()
    assert stored(buf) == [0]


def test_without_steps_nothing_is_stored(buffer):
    buf = buffer(max_steps=20)
    files = buffer.files()
    buf.begin_episode().finish(terminated=True)
    buf.begin_episode().abandon()
    assert (buf.num_episodes, buf.column_names) == (0, [])
    assert buffer.files() == files


def test_abandoned_is_gone(buffer):
    buf = buffer(max_steps=20)
    buf.write_episode(episode(0, 5))
    before, files = snapshot(buf), buffer.files()
    recording = buf.begin_episode()
    record(recording, 1, 3)
    recording.abandon()
    recording.abandon()
    assert snapshot(buf) == before
    assert buffer.files() == files


def test_an_ended_one_takes_no_more(buffer):
    buf = buffer(max_steps=20)
    finished, abandoned = buf.begin_episode(), buf.begin_episode()
    record(finished, 0, 2)
    finished.finish()
    abandoned.abandon()
    for ended in (finished, abandoned):
        for work in (lambda e=ended: e.append(step(0, 2)), ended.finish):
            with pytest.raises(RoleError, match="this episode has ended; call begin_episode for the next one"):
                work()
    assert stored(buf) == [0]


def test_as_a_context(buffer):
    buf = buffer(max_steps=20)
    with buf.begin_episode() as recording:
        record(recording, 0, 3)
    with pytest.raises(ZeroDivisionError), buf.begin_episode() as recording:
        record(recording, 1, 3)
        raise ZeroDivisionError
    with buf.begin_episode() as recording:
        record(recording, 2, 3)
        recording.finish(truncated=True)
    assert stored(buf) == [0, 2]
    assert flags(buf) == [0, TRUNCATED]
    assert streams(buffer) == []


def test_the_key_filter_is_applied_to_steps(buffer):
    buf = buffer(max_steps=20, key_filter=lambda given: {"step": given["step"]})
    with buf.begin_episode() as recording:
        record(recording, 0, 3)
    same(buf.load_episode(0), {"step": columns(0, 0, 3)["step"]})


def test_casting_is_the_buffer_s(buffer):
    buf = buffer(max_steps=20, casting="unsafe", schema={"x": ((), "u1")})
    with buf.begin_episode() as recording:
        recording.append({"x": 300.7})
    assert buf.load_episode(0)["x"].tolist() == [44]


def test_what_was_appended_can_be_changed_afterwards(buffer):
    buf = buffer(max_steps=20)
    frame = np.zeros(3)
    with buf.begin_episode() as recording:
        for t in range(4):
            frame[:] = t
            recording.append({"x": frame})
    np.testing.assert_array_equal(buf.load_episode(0)["x"], np.arange(4.0)[:, None] * np.ones(3))


# -- several -----------------------------------------------------------------------------------


def test_several_are_open_at_once(buffer):
    buf = buffer(max_steps=40)
    recordings = [buf.begin_episode() for _ in range(4)]
    assert len({r.id for r in recordings}) == 4
    for t in range(6):
        for number, recording in enumerate(recordings):
            recording.append(step(number, t))
        if t == 3:
            buf.write_episode(episode(9, 5))
    assert len([name for name in streams(buffer) if name.endswith("steps.bin")]) == (4 if buffer.on_disk else 0)
    for number in (2, 0, 3):
        recordings[number].finish()
    recordings[1].abandon()
    assert stored(buf) == [9, 2, 0, 3]


# -- roles -------------------------------------------------------------------------------------


def test_a_reader_begins_nothing(disk_buffer, home):
    disk_buffer(max_steps=20).write_episode(episode(0, 3))
    reader = ReplayBuffer.open(home / "buf")
    with pytest.raises(ReadOnlyError, match=f"process {os.getpid()}"):
        reader.begin_episode()
    reader.close()


@pytest.mark.parametrize("way", ["append", "finish", "abandon"])
def test_after_the_buffer_was_closed(buffer, way):
    buf = buffer(max_steps=20)
    recording = buf.begin_episode()
    record(recording, 0, 3)
    buf.close()
    files = buffer.files()
    with pytest.raises(ClosedError, match="is closed"):
        getattr(recording, way)(*([step(0, 3)] if way == "append" else []))
    assert buffer.files() == files


@pytest.mark.parametrize("way", ["append", "finish", "abandon"])
def test_a_forked_child_touches_nothing(buffer, way):
    buf = buffer(max_steps=20)
    recording = buf.begin_episode()
    record(recording, 0, 3)
    files = buffer.files()
    kind, words = in_child(error_of, getattr(recording, way), *([step(0, 3)] if way == "append" else []))
    assert kind == "ReadOnlyError"
    if buffer.on_disk:
        assert f"process {os.getpid()}" in words
    assert buffer.files() == files
    record(recording, 0, 3, first=3)
    recording.finish()
    assert stored(buf) == [0]


@pytest.mark.parametrize("error", [SystemExit, ZeroDivisionError])
def test_a_child_that_leaves_the_block_by_an_exception_does_not_abandon_its_parent_s(buffer, error):
    buf = buffer(max_steps=20)

    def leave():
        with pytest.raises(error), recording:
            raise error

    with buf.begin_episode() as recording:
        record(recording, 0, 3)
        in_child(leave)
        record(recording, 0, 2, first=3)
    assert stored(buf) == [0]


# -- a kill ------------------------------------------------------------------------------------


def killed(home, work, **options):
    """Run `work(buf)` in a process that is killed when it is through; return what it returned."""

    def run(child):
        buf = ReplayBuffer(max_steps=20, path=home / "buf", sync_every_s=0, **options)
        child.say(work(buf))
        child.hear()

    child = Child(run)
    said = child.hear()
    assert not isinstance(said, tuple), said
    child.kill()
    return said


def two_open(buf):
    buf.write_episode(episode(0, 5))
    one, two = buf.begin_episode(), buf.begin_episode()
    buf.kept = one, two  # not collected: a collected one is no kill
    record(one, 1, 3)
    record(two, 2, 4)
    finished = buf.begin_episode()
    record(finished, 3, 2)
    finished.finish()
    return [one.id, two.id]


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("interrupted", ["drop", "keep", None])
def test_interrupted_by_a_kill(disk_buffer, home, interrupted, durability):
    ids = killed(home, two_open, durability=durability)
    assert len(streams(disk_buffer)) == 4
    options = {} if interrupted is None else {"interrupted": interrupted}
    buf = disk_buffer(max_steps=20, **options)
    if interrupted == "keep":
        order = [1, 2] if ids == sorted(ids) else [2, 1]
        assert stored(buf) == [0, 3, *order]
        assert buf.lengths.tolist() == [5, 2, *(order[0] + 2, order[1] + 2)]
        assert flags(buf) == [0, 0, INTERRUPTED, INTERRUPTED], "neither terminated nor truncated"
        assert buf.get_episode_data() == {}
    else:
        assert stored(buf) == [0, 3]
    assert streams(disk_buffer) == []
    buf.close()
    again = disk_buffer(max_steps=20, interrupted="keep")
    assert again.num_episodes == (4 if interrupted == "keep" else 2), "never twice"


def test_open_remembers_whether_to_keep(home):
    killed(home, two_open, interrupted="keep")
    again = ReplayBuffer.open(home / "buf", mode="r+")
    assert again.num_episodes == 4
    again.close()


def test_a_reader_leaves_them_alone(disk_buffer, home):
    killed(home, two_open)
    files = disk_buffer.files()
    reader = ReplayBuffer.open(home / "buf")
    assert stored(reader) == [0, 3]
    reader.close()
    assert disk_buffer.files() == files


@pytest.mark.parametrize(
    "size",
    [pytest.param(n, marks=pytest.mark.campaign if n % 3 else ()) for n in range(0, 400, 7)],
)
def test_a_stream_that_was_cut_keeps_its_whole_steps(disk_buffer, home, size):
    def work(buf):
        buf.write_episode(episode(0, 5))
        buf.kept = buf.begin_episode()
        record(buf.kept, 1, 4)
        return buf.kept.id

    path = home / "buf/open" / killed(home, work) / "steps.bin"
    whole = path.stat().st_size
    frame = 12 + sum(values.nbytes for values in step(1, 0).values())
    size = min(size, whole)
    os.truncate(path, size)
    steps = max(0, (size - (whole - 12 - 4 * frame)) // frame)
    buf = disk_buffer(max_steps=20, interrupted="keep")
    assert stored(buf) == ([0, 1] if steps else [0])
    assert buf.lengths.tolist()[1:] == ([steps] if steps else [])
    assert streams(disk_buffer) == []


def test_a_stream_that_is_damaged_under_its_writer_is_not_stored(disk_buffer, home):
    buf = disk_buffer(max_steps=20)
    recording = buf.begin_episode()
    record(recording, 1, 4)
    path = home / "buf/open" / recording.id / "steps.bin"
    data = bytearray(path.read_bytes())
    data[-15] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"3 whole steps, but 4 were appended"):
        recording.finish()
    recording.abandon()
    assert buf.num_episodes == 0


def test_what_no_longer_fits_the_schema_is_dropped_not_guessed(disk_buffer, home):
    def work(buf):
        buf.kept = buf.begin_episode()
        buf.kept.append({"x": 1})
        buf.write_episode({"y": [1, 2]})
        return buf.kept.id

    killed(home, work)
    buf = disk_buffer(max_steps=20, interrupted="keep")
    assert (buf.num_episodes, buf.column_names) == (1, ["y"])
    assert streams(disk_buffer) == []


def test_what_lies_in_open_and_is_not_ours_does_no_harm(disk_buffer, home):
    disk_buffer(max_steps=20).close()
    (home / "buf/open/strange").mkdir()
    (home / "buf/open/strange/steps.bin").write_bytes(b"\xff" * 1000)
    (home / "buf/open/empty").mkdir()
    buf = disk_buffer(max_steps=20, interrupted="keep")
    assert buf.num_episodes == 0


def test_a_clean_close_leaves_them_as_a_kill_does(disk_buffer):
    buf = disk_buffer(max_steps=20)
    recording = buf.begin_episode()
    record(recording, 1, 3)
    buf.close()
    assert stored(disk_buffer(max_steps=20, interrupted="keep")) == [1]
