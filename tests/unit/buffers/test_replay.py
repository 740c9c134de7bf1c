"""The buffer itself: its constructor, what it shows of itself, opening again, closing."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import ringmap
import ringmap.data
from ringmap import ReplayBuffer
from ringmap.errors import (
    ClosedError,
    CorruptError,
    EnvironmentFault,
    InputError,
    LockedError,
    NewerVersionError,
    UnknownFormatError,
)
from ringmap.storage.disk.checksums import decode_signed, encode_signed
from tests.unit.buffers.steps import COLUMNS, episode, prove, same, snapshot, stored

# -- constructor -------------------------------------------------------------------------------


def test_the_first_six_are_usable_by_position(buffer):
    def sampler(step, buf, batch_size, history_len):
        return np.zeros(batch_size, np.int64)

    def transform(clip):
        return {**clip, "seen": True}

    def key_filter(columns):
        return {name: values for name, values in columns.items() if name != "obs/x"}

    buf = buffer(100, 2, 3, sampler, transform, key_filter)
    buf.write_episode(episode(0, 10))
    assert (buf.max_steps, buf.history_len, buf.num_steps, buf.frameskip, buf.span) == (
        100,
        2,
        2,
        3,
        6,
    )
    assert (buf.sampler, buf.transform, buf.key_filter) == (sampler, transform, key_filter)
    assert buf.column_names == ["episode", "step", "action"]
    assert buf[0]["seen"] is True
    assert buf.sample(3)["step"][:, 0].tolist() == [0, 0, 0]


def test_the_others_are_not():
    with pytest.raises(TypeError, match="positional"):
        ReplayBuffer(100, 1, 1, None, None, None, None)


@pytest.mark.parametrize("name", ["max_steps", "history_len", "frameskip"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "3", None])
def test_sizes_must_be_positive(buffer, name, value):
    with pytest.raises(InputError, match=f"^ReplayBuffer: {name} must be positive"):
        buffer(**{"max_steps": 10, name: value})
    assert buffer.files() == {}


@pytest.mark.parametrize("name", ["max_steps", "history_len", "frameskip", "seed", "spare_rows"])
def test_numpy_s_integers_are_integers(buffer, name):
    buf = buffer(**{"max_steps": 10, "history_len": 2, "frameskip": 2, name: np.int64(3)})
    buf.write_episode(episode(0, 3))
    buf.flush()
    assert stored(buf) == [0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"durability": "paper"}, "durability must be one of"),
        ({"casting": "same_kind"}, "casting must be one of"),
        ({"interrupted": "maybe"}, "interrupted must be one of"),
        ({"sync_every_s": -1}, "sync_every_s must be seconds"),
        ({"sync_every_s": float("nan")}, "sync_every_s must be seconds"),
        ({"sync_every_s": float("inf")}, "sync_every_s must be seconds"),
        ({"sync_every_s": "soon"}, "sync_every_s must be seconds"),
        ({"spare_rows": -1}, "spare_rows must be positive"),
        ({"spare_rows": 0}, "spare_rows must be positive"),
        ({"spare_rows": 2.5}, "spare_rows must be positive"),
        ({"storage": "punch cards"}, "unknown storage 'punch cards'; known: .*memmap"),
        ({"storage": {"obs": "tape"}}, "unknown storage 'tape'"),
        ({"schema": 3}, "schema: expected column"),
        ({"schema": {"x": ((), object)}}, "schema: column 'x' holds Python objects"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(buffer, options, words):
    with pytest.raises(InputError, match=words):
        buffer(max_steps=10, **options)
    assert buffer.files() == {}, "nothing was begun"


def test_a_span_beyond_max_steps_is_allowed_and_never_sampleable(buffer):
    buf = buffer(max_steps=10, history_len=4, frameskip=3)
    assert buf.span == 12
    for number in range(5):
        buf.write_episode(episode(number, 10))
        assert (len(buf), buf.num_episodes) == (0, 1)
    with pytest.raises(
        ringmap.errors.NoClipsError,
        match="no clip of 12 steps .* has 10 steps; choose history_len=3",
    ):
        buf.sample(1)
    with pytest.raises(IndexError, match="no clip of 12 steps"):
        buf[0]


@pytest.mark.parametrize("spare", [None, 1, 7, 50])
@pytest.mark.parametrize("length", [1, 3, 11, 20])
def test_whatever_the_spare_rows_the_oldest_whole_episodes_go(buffer, spare, length):
    buf = buffer(max_steps=20, spare_rows=spare)
    for number in range(60):
        buf.write_episode(episode(number, length))
        kept = min(number + 1, 20 // length)
        assert buf.lengths.tolist() == [length] * kept
    assert stored(buf) == list(range(60 - kept, 60))


def test_many_episodes_of_one_step_fill_a_ring_with_one_spare_row(buffer):
    """As many records as rows: the table must have room for all."""
    buf = buffer(max_steps=200, spare_rows=1)
    for number in range(500):
        buf.write_episode({"x": [number]})
        assert buf.num_steps_stored == min(number + 1, 200)
    assert buf.get_col_data("x").tolist() == list(range(300, 500))


def test_it_is_a_dataset_and_a_writer(buffer):
    from ringmap.data import Dataset, Writer

    buf = buffer(max_steps=10)
    assert isinstance(buf, Dataset)
    assert isinstance(buf, Writer)
    assert ringmap.ReplayBuffer is ringmap.data.ReplayBuffer is type(buf)


def test_three_attributes_may_be_reassigned(buffer):
    buf = buffer(max_steps=50)
    buf.key_filter = lambda columns: {"step": columns["step"]}
    buf.write_episode(episode(0, 5))
    buf.transform = lambda clip: clip["step"].tolist()
    buf.sampler = lambda step, b, batch_size, history: np.full(batch_size, 4)
    assert buf.column_names == ["step"]
    assert buf[2] == [2]
    assert buf.sample(2)["step"].tolist() == [[4], [4]]


def test_nothing_of_a_dataset_of_torch_is_imported():
    homes = {kind.__module__.partition(".")[0] for kind in ReplayBuffer.__mro__}
    assert homes == {"ringmap", "abc", "builtins"}


# -- what it shows -----------------------------------------------------------------------------


def test_an_empty_buffer(buffer):
    buf = buffer(max_steps=10)
    assert (buf.column_names, buf.num_episodes, buf.num_steps_stored, len(buf)) == ([], 0, 0, 0)
    assert (buf.lengths.tolist(), buf.lengths.dtype) == ([], np.int32)
    assert (buf.offsets.tolist(), buf.offsets.dtype) == ([], np.int64)
    assert list(buf.episodes()) == list(buf.clip_indices) == []
    assert (buf.episode_column_names, buf.get_episode_data()) == ([], {})
    assert not buf.refresh()


def test_properties(buffer):
    buf = buffer(max_steps=20, history_len=2)
    lengths, numbers = [], []
    for number, length in enumerate([7, 1, 5, 6, 9, 3]):
        buf.write_episode(episode(number, length))
        lengths, numbers = [*lengths, length], [*numbers, number]
        while sum(lengths) > 20:
            lengths.pop(0)
            numbers.pop(0)
        assert stored(buf) == numbers
        assert buf.lengths.tolist() == lengths
        assert buf.offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths))], "logical, not on the ring"
        assert (type(buf.num_episodes), type(buf.num_steps_stored)) == (int, int)
        assert (buf.num_episodes, buf.num_steps_stored) == (len(lengths), sum(lengths))
        assert buf.column_names == COLUMNS
    assert (buf.lengths.dtype, buf.offsets.dtype) == (np.int32, np.int64)
    assert type(buf.column_names) is list


def test_what_it_shows_are_copies(buffer):
    buf = buffer(max_steps=20)
    buf.write_episode(episode(0, 5, {"seed": 1}))
    before = snapshot(buf)
    buf.lengths[:] = 99
    buf.offsets[:] = 99
    buf.column_names.clear()
    buf.episode_column_names.clear()
    buf.get_episode_data()["seed"].clear()
    assert snapshot(buf) == before


def test_repr(buffer):
    buf = buffer(max_steps=20, history_len=2, frameskip=3)
    buf.write_episode({"obs": np.zeros((7, 2)), "action": np.zeros(7)})
    shown = repr(buf)
    for part in (
        "episodes=1",
        "steps=7/20",
        "history_len=2",
        "frameskip=3",
        "columns=['obs', 'action']",
    ):
        assert part in shown
    assert (str(buf.path) in shown) == buffer.on_disk
    buf.close()
    assert "closed" in repr(buf)


def test_paths_are_strings_or_paths_and_need_not_be_absolute(disk_buffer, home, monkeypatch):
    monkeypatch.chdir(home)
    for i, path in enumerate([str(home / "0"), home / "1", "2", Path("3"), "deep/er/4"]):
        buf = disk_buffer(max_steps=9, path=path)
        assert buf.path.is_absolute()
        assert buf.path.name == str(i)
        monkeypatch.chdir("/")
        buf.write_episode(episode(i, 2))
        assert stored(buf) == [i]
        monkeypatch.chdir(home)


# -- clear -------------------------------------------------------------------------------------


def test_clear(buffer):
    buf = buffer(max_steps=20, seed=0)
    for number in range(4):
        buf.write_episode(episode(number, 6, {"number": number}))
    buf.sample(2)
    buf.clear()
    assert (buf.num_episodes, buf.num_steps_stored, len(buf), buf.lengths.tolist()) == (0, 0, 0, [])
    assert (list(buf.episodes()), buf.episode_column_names, buf.get_episode_data()) == ([], [], {})
    assert buf.column_names == COLUMNS, "columns and schema stay"
    assert buf.state_dict()["step"] == 1, "so does the counter"
    with pytest.raises(InputError, match="schema mismatch"):
        buf.write_episode({"other": [1]})
    buf.write_episode(episode(9, 20))
    assert stored(buf) == [9]


def test_clear_is_one_commit_and_nothing_when_nothing_is_there(buffer):
    buf = buffer(max_steps=20)
    files = buffer.files()
    buf.clear()
    assert buffer.files() == files
    buf.write_episode(episode(0, 3))
    seq = buf.engine.owned.seq
    buf.clear()
    assert buf.engine.owned.seq == seq + 1
    buf.clear()
    assert buf.engine.owned.seq == seq + 1


# -- context manager, closing ------------------------------------------------------------------


def test_enter_returns_self_and_exit_flushes_but_never_closes(buffer):
    with buffer(max_steps=20) as buf:
        assert isinstance(buf, ReplayBuffer)
        buf.write_episode(episode(0, 3))
        buf.sample(2)
    buf.write_episode(episode(1, 3))
    assert stored(buf) == [0, 1]
    if buffer.on_disk:
        manifest = json.loads((buf.path / "manifest.json").read_bytes())
        assert (manifest["table"]["seq"], manifest["table"]["count"]) == (1, 1), "as of the flush"
        assert manifest["carried"]["state"]["sampling"]["step"] == 1


USES = {
    "len": len,
    "num_episodes": lambda b: b.num_episodes,
    "num_steps_stored": lambda b: b.num_steps_stored,
    "lengths": lambda b: b.lengths,
    "offsets": lambda b: b.offsets,
    "column_names": lambda b: b.column_names,
    "episodes": lambda b: list(b.episodes()),
    "load_episode": lambda b: b.load_episode(0),
    "load_slice": lambda b: b._load_slice(0, 0, 1),
    "load_chunk": lambda b: b.load_chunk([0], [0], [1]),
    "getitem": lambda b: b[0],
    "getitems": lambda b: b.__getitems__([0]),
    "sample": lambda b: b.sample(1),
    "clip_indices": lambda b: b.clip_indices,
    "num_valid_ends": lambda b: b.num_valid_ends(),
    "get_col_data": lambda b: b.get_col_data("step"),
    "get_row_data": lambda b: b.get_row_data(0),
    "get_dim": lambda b: b.get_dim("step"),
    "episode_column_names": lambda b: b.episode_column_names,
    "get_episode_data": lambda b: b.get_episode_data(),
    "refresh": lambda b: b.refresh(),
}
WRITES = {
    "write_episode": lambda b: b.write_episode(episode(1, 3)),
    "write_episodes": lambda b: b.write_episodes([episode(1, 3)]),
    "extend_from": lambda b: b.extend_from(_Other()),
    "clear": lambda b: b.clear(),
    "begin_episode": lambda b: b.begin_episode().append({"x": 1}),
}


class _Other:
    lengths = np.array([3])

    def load_episode(self, _):
        return episode(5, 3)


def test_lengths_and_load_episode_are_enough_for_a_source(buffer):
    buf = buffer(max_steps=20)
    buf.extend_from(_Other())
    assert buf.lengths.tolist() == [3]
    same(buf.load_episode(0), episode(5, 3))


@pytest.mark.parametrize("use", [*USES, *WRITES, "flush"])
def test_a_closed_buffer_raises_a_clear_error(buffer, use):
    buf = buffer(max_steps=20)
    buf.write_episode(episode(0, 3))
    said = (
        "buffer in RAM is closed, and its rows are gone" if buf.path is None else r"buffer .* is closed; open it again"
    )
    buf.close()
    files = buffer.files()
    with pytest.raises(ClosedError, match=said):
        {**USES, **WRITES, "flush": lambda b: b.flush()}[use](buf)
    assert buffer.files() == files


@pytest.mark.parametrize("use", USES)
def test_a_closed_reader_raises_a_clear_error(disk_buffer, home, use):
    disk_buffer(max_steps=20).write_episode(episode(0, 3))
    reader = ReplayBuffer.open(home / "buf")
    reader.close()
    reader.close()
    with pytest.raises(ClosedError, match="closed"):
        USES[use](reader)


def test_a_buffer_that_goes_out_of_use_gives_its_lock_back(home):
    import gc

    buf = ReplayBuffer(max_steps=20, path=home / "buf")
    buf.write_episode(episode(0, 3))
    del buf
    gc.collect()
    with ReplayBuffer.open(home / "buf", mode="r+") as again:
        assert stored(again) == [0]
    again.close()


# -- opening again -----------------------------------------------------------------------------


def test_from_this_call_come_the_settings_of_reading(disk_buffer):
    buf = disk_buffer(max_steps=30, history_len=2, frameskip=2, durability="power", casting="unsafe")
    buf.write_episode(episode(0, 9))
    buf.close()

    def sampler(*_):
        return np.zeros(1, np.int64)

    again = disk_buffer(
        30,
        3,
        1,
        sampler,
        transform=lambda c: c,
        key_filter=lambda c: c,
        durability="process",
        casting="safe",
    )
    assert (again.history_len, again.frameskip, len(again)) == (3, 1, 7)
    assert again.sampler is sampler
    with pytest.raises(InputError, match="step 0"):
        again.write_episode({**episode(1, 2), "step": [0.5, 1]})


@pytest.mark.parametrize("wrong", [{"max_steps": 31}, {"spare_rows": 3}, {"schema": {"x": ((), "f4")}}])
def test_what_is_fixed_on_disk_and_disagrees_is_refused_and_nothing_is_touched(disk_buffer, wrong):
    buf = disk_buffer(max_steps=30)
    buf.write_episode(episode(0, 9))
    buf.close()
    files = disk_buffer.files()
    with pytest.raises(InputError, match="on disk") as raised:
        disk_buffer(**{"max_steps": 30, **wrong})
    assert "extend_from" in str(raised.value)
    if "schema" not in wrong:
        assert "there is no resize" in str(raised.value)
    assert disk_buffer.files() == files
    assert stored(disk_buffer(max_steps=30)) == [0]


def test_a_disagreement_while_another_writes_is_named_first_or_the_lock(disk_buffer):
    disk_buffer(max_steps=30).write_episode(episode(0, 9))
    with pytest.raises(InputError, match="max_steps=31"):
        disk_buffer(max_steps=31)
    with pytest.raises(LockedError):
        disk_buffer(max_steps=30)


def test_a_schema_that_agrees_is_welcome(disk_buffer):
    buf = disk_buffer(max_steps=30)
    buf.write_episode(episode(0, 9))
    buf.close()
    assert stored(disk_buffer(max_steps=30, schema=episode(1, 2), spare_rows=30)) == [0]


def test_a_schema_locks_the_columns_up_front(buffer):
    buf = buffer(max_steps=30, schema={"x": ((2,), "f4"), "n": ((), "U3")})
    assert buf.column_names == ["x", "n"]
    assert (buf.get_dim("x"), buf.get_col_data("x").shape, buf.get_col_data("n").dtype) == (
        2,
        (0, 2),
        "<U3",
    )
    with pytest.raises(InputError, match=r"schema mismatch: missing columns \['n'\]"):
        buf.write_episode({"x": np.zeros((3, 2))})
    buf.write_episode({"n": ["a", "bc", ""], "x": np.zeros((3, 2))})
    assert buf.column_names == ["x", "n"], "its order too"
    assert buf.load_episode(0)["x"].dtype == np.float32


def test_a_schema_given_at_birth_survives_and_is_shown_by_readers(disk_buffer, home):
    buf = disk_buffer(max_steps=30, schema={"x": ((2,), "f4")})
    reader = ReplayBuffer.open(home / "buf")
    assert reader.column_names == ["x"]
    assert reader.get_dim("x") == 2
    assert reader.get_col_data("x").shape == (0, 2)
    reader.close()
    buf.close()
    again = disk_buffer(max_steps=30)
    assert again.column_names == ["x"]
    again.close()
    with pytest.raises(InputError, match="schema"):
        disk_buffer(max_steps=30, schema={"y": ((), "f4")})


def test_a_schema_may_still_be_given_when_nothing_was_stored(disk_buffer):
    disk_buffer(max_steps=30).close()
    buf = disk_buffer(max_steps=30, schema={"x": ((), "f4")})
    assert buf.column_names == ["x"]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_open_takes_what_the_manifest_remembers(disk_buffer, home, mode):
    buf = disk_buffer(
        max_steps=30,
        history_len=3,
        frameskip=2,
        casting="unsafe",
        interrupted="keep",
        durability="power",
    )
    buf.write_episode(episode(0, 9))
    buf.close()
    again = ReplayBuffer.open(home / "buf", mode)
    assert (again.max_steps, again.history_len, again.frameskip, again.mode) == (30, 3, 2, mode)
    assert (again.options.casting, again.options.interrupted, again.options.durability) == (
        "unsafe",
        "keep",
        "power",
    )
    again.close()
    other = ReplayBuffer.open(home / "buf", mode, history_len=1, transform=lambda clip: 7)
    assert (other.history_len, other.frameskip, other[0]) == (1, 2, 7)
    other.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "w"}, "mode must be 'r' .* or 'r\\+'"),
        ({"mode": "a"}, "mode must be"),
        ({"colour": "red"}, "unknown option 'colour'; known: "),
        ({"max_steps": 7}, "unknown option 'max_steps'"),
        ({"history_len": 0}, "history_len must be positive"),
        ({"casting": "no"}, "casting must be one of"),
    ],
)
def test_open_refuses_what_it_does_not_know(disk_buffer, home, options, words):
    disk_buffer(max_steps=30).close()
    with pytest.raises(InputError, match=f"^ReplayBuffer.open: {words}"):
        ReplayBuffer.open(home / "buf", **options)


def test_opening_to_read_writes_nothing(disk_buffer, home):
    buf = disk_buffer(max_steps=30)
    buf.write_episode(episode(0, 9))
    buf.close()
    files = disk_buffer.files()
    times = {path: os.stat(path).st_mtime_ns for path in home.rglob("*")}
    reader = ReplayBuffer.open(home / "buf")
    prove(reader.sample(5), {0: 9}, 1)
    reader.flush()
    reader.close()
    assert disk_buffer.files() == files
    assert {path: os.stat(path).st_mtime_ns for path in home.rglob("*")} == times


# -- paths that hold something else ------------------------------------------------------------


def a_file(path):
    path.write_text("mine")


def a_foreign_folder(path):
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


def a_foreign_manifest(path):
    path.mkdir()
    (path / "manifest.json").write_text('{"format": "zarr"}')


def a_folder_of_folders(path):
    (path / "photos/2020").mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (a_file, "is a file, expected a directory of a buffer; choose another path"),
        (a_foreign_folder, r"holds something else \(thesis.tex\)"),
        (a_foreign_manifest, "buf"),
        (a_folder_of_folders, "holds something else"),
    ],
)
def test_a_path_that_holds_something_else_is_refused_and_left_alone(home, disk_buffer, make, words):
    path = home / "buf"
    make(path)
    files = disk_buffer.files()
    for attempt in (
        lambda: disk_buffer(max_steps=9),
        lambda: ReplayBuffer.open(path),
        lambda: ReplayBuffer.open(path, mode="r+"),
    ):
        with pytest.raises(UnknownFormatError, match=words) as raised:
            attempt()
        assert str(path) in str(raised.value)
        assert disk_buffer.files() == files


def test_nothing_to_open(home):
    for mode in ("r", "r+"):
        with pytest.raises(FileNotFoundError, match="no buffer is there"):
            ReplayBuffer.open(home / "buf", mode)
        assert not (home / "buf").exists()


def test_an_empty_mounted_volume_is_a_fine_home(home, disk_buffer):
    (home / "buf/lost+found").mkdir(parents=True)
    inode = os.stat(home / "buf").st_ino
    buf = disk_buffer(max_steps=9)
    buf.write_episode(episode(0, 5))
    buf.close()
    assert os.stat(home / "buf").st_ino == inode, "parts are built inside"
    assert (home / "buf/lost+found").is_dir()
    assert stored(disk_buffer(max_steps=9)) == [0]


def test_a_link_to_a_folder_is_that_folder(home, disk_buffer):
    (home / "real").mkdir()
    (home / "buf").symlink_to(home / "real")
    disk_buffer(max_steps=9).write_episode(episode(0, 5))
    assert (home / "real/manifest.json").exists()


def test_a_newer_format_is_refused_and_left_alone(home, disk_buffer):
    buf = disk_buffer(max_steps=9)
    buf.write_episode(episode(0, 5))
    buf.close()
    manifest = home / "buf/manifest.json"
    body, _ = decode_signed(manifest.read_bytes())
    manifest.write_bytes(encode_signed({**body, "version": 7}))
    files = disk_buffer.files()
    for attempt in (
        lambda: disk_buffer(max_steps=9),
        lambda: ReplayBuffer.open(home / "buf"),
        lambda: ReplayBuffer.open(home / "buf", "r+"),
    ):
        with pytest.raises(NewerVersionError, match="format version 7.*upgrade ringmap"):
            attempt()
        assert disk_buffer.files() == files


def test_a_manifest_edited_by_hand_is_refused(home, disk_buffer):
    disk_buffer(max_steps=9).close()
    manifest = home / "buf/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"max_steps": 9', b'"max_steps": 99'))
    with pytest.raises(CorruptError, match="edited or damaged"):
        disk_buffer(max_steps=99)


@pytest.mark.parametrize("name", ["episodes.npy", "state.bin", "columns/001-step.npy", "manifest.json", "columns"])
@pytest.mark.parametrize("how", ["missing", "cut", "grown"])
def test_a_part_that_is_missing_cut_or_grown_is_refused_by_name(home, disk_buffer, name, how):
    buf = disk_buffer(max_steps=9)
    buf.write_episode(episode(0, 5))
    buf.close()
    part = home / "buf" / name
    if how == "missing":
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    elif part.is_dir():
        return
    else:
        os.truncate(part, part.stat().st_size // 2 if how == "cut" else part.stat().st_size + 5000)
    files = disk_buffer.files()
    for attempt in (
        lambda: disk_buffer(max_steps=9),
        lambda: ReplayBuffer.open(home / "buf"),
        lambda: ReplayBuffer.open(home / "buf", "r+"),
    ):
        with pytest.raises(CorruptError, match=name.rpartition("/")[2]):
            attempt()
        assert {k: v for k, v in disk_buffer.files().items() if k != "buf/lock"} == {
            k: v for k, v in files.items() if k != "buf/lock"
        }


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a place where no folder can be made")
def test_a_path_that_is_not_writable():
    with pytest.raises(EnvironmentFault, match="/proc/ringmap.*choose a path that you may write to"):
        ReplayBuffer(max_steps=9, path="/proc/ringmap/buf")


# -- the clock ---------------------------------------------------------------------------------


def test_a_clock_that_runs_backwards_changes_nothing(buffer, monkeypatch):
    import time

    now = [2e9]

    def back(*_):
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", back)
    monkeypatch.setattr(time, "time_ns", lambda: int(back() * 1e9))
    monkeypatch.setattr(time, "strftime", lambda *_: "1999-12-31 23:59:59 +0000")
    buf = buffer(max_steps=20, seed=0)
    for number in range(9):
        buf.write_episode(episode(number, 4, {"number": number}))
        prove(buf.sample(4), dict.fromkeys(range(9), 4), 1)
    recording = buf.begin_episode()
    recording.append({name: values[0] for name, values in episode(9, 1).items()})
    recording.finish()
    buf.flush()
    assert stored(buf) == [5, 6, 7, 8, 9]
    if buffer.on_disk:
        reader = ReplayBuffer.open(buf.path)
        buf.write_episode(episode(10, 4))
        assert reader.refresh()
        assert stored(reader) == stored(buf)
        reader.close()
        buf.close()
        again = buffer(max_steps=20)
        assert stored(again)[-1] == 10
        again.write_episode(episode(11, 4))
        source = again.engine.owned
        times = source.table.read_range(source.first, source.seq)[0]["time"]
        assert len(times) > 1
        assert set(times.tolist()) == {times[0]}, "that of the first commit"
