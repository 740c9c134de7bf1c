"""Marks: what a kill, two writers, damage, an eviction and another episode at the same position do to them, and who
uses them."""

import contextlib
import json
import os
import shutil
import signal
import threading

import numpy as np
import pytest

import ringmap
from ringmap import Marks, ReplayBuffer
from ringmap.clips import marks as sidecar
from ringmap.clips.marks import MarkFile
from ringmap.data import Sequences, convert, load_dataset
from ringmap.errors import (
    ClipIndexError,
    CorruptError,
    EnvironmentFault,
    InputError,
    LockedError,
    NewerVersionError,
    NoClipsError,
    NotFoundError,
    ReplacedError,
)
from ringmap.samplers import EpisodeSampler
from ringmap.storage.disk.checksums import encode_signed
from ringmap.storage.disk.files import Disk
from ringmap.storage.sidecars.base import Copied


def fill(path, numbers, max_steps=100, **options):
    buf = ReplayBuffer(max_steps, path=path, **options)
    write(buf, numbers)
    return buf


def write(buf, numbers):
    for number in numbers:
        buf.write_episode(
            {"x": np.full(10, number), "reward": np.full(10, float(number)), "_episode_data": {"seed": number}}
        )


def drawn(buf, count=400):
    return sorted(np.unique(np.asarray(buf.sample(count)["x"])).tolist())


def numbers_in(dataset):
    return [int(dataset.load_episode(i)["x"][0]) for i in range(len(dataset.lengths))]


# -- the file --------------------------------------------------------------------------------------


def kill_at(path, change):
    """Mark an episode in a child that is killed right before a change of the disk."""

    class Killed(Disk):
        def before(self, name, *details):
            if name == change:
                os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            buf = ReplayBuffer.open(path)
            MarkFile(Killed(), str(path / "marks.json"), buf.marked_ring()[0].manifest.uuid.hex()).change(
                lambda mine: mine.clear()
            )
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("change", ["lock", "create", "write", "sync", "rename"])
def test_a_kill_leaves_the_marks_before_it(tmp_path, change):
    with fill(tmp_path / "b", range(4)) as buf:
        Marks(buf).set(10, flags="bad")
        assert kill_at(tmp_path / "b", change) == signal.SIGKILL
        assert list(Marks(buf).all()) == [10]
        assert ringmap.check(tmp_path / "b") == []
        Marks(buf).set(20, note="after it")
        assert list(Marks(buf).all()) == [10, 20]
        assert kill_at(tmp_path / "b", "sync_folder") == signal.SIGKILL  # it was renamed
        assert Marks(buf).all() == {}
        assert set(os.listdir(tmp_path / "b")) <= ringmap.storage.disk.paths.NAMES


def two_at_once(folder):
    """Return the marks after a second writer came in the middle of the first one's change."""
    buf = fill(folder / "b", range(4))
    other = threading.Thread(target=lambda: Marks(buf).set(20, flags="second"))

    class Interrupted(Disk):
        def before(self, name, *details):
            if name == "rename":
                other.start()
                other.join(0.4)

    first = MarkFile(Interrupted(), Marks(buf).path, buf.marked_ring()[0].manifest.uuid.hex())
    key = sidecar.record_key(buf.marked_ring()[0], 10)
    first.change(lambda mine: mine.update({10: sidecar.Mark(10, key, ("first",))}))
    other.join()
    return list(Marks(buf).all())


def test_two_writers_lose_nothing(tmp_path):
    assert two_at_once(tmp_path) == [10, 20]


def test_control_without_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(MarkFile, "_locked", lambda self: contextlib.nullcontext())
    with pytest.raises((EnvironmentFault, AssertionError)):
        test_two_writers_lose_nothing(tmp_path)


def test_a_lock_that_is_held_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sidecar, "_WAIT_S", 0.05)
    with fill(tmp_path / "b", range(2)) as buf:
        marks = Marks(buf)
        with (
            MarkFile(Disk(), marks.path, "x")._locked(),
            pytest.raises(LockedError, match="try again"),
        ):
            marks.set(10, flags="bad")


def test_what_is_damaged_is_said_and_left(tmp_path):
    path = tmp_path / "b"
    with fill(path, range(4), sampler=EpisodeSampler(0, where="not flags contains bad")) as buf:
        marks = Marks(buf)
        marks.set(10, flags="bad", note="slips")
        file = path / "marks.json"
        whole = file.read_bytes()
        for data in (whole[:-30], b"", b"[]", b"[" * 100_000, whole.replace(b"slips", b"slipz"), b"\xff" * 50):
            file.write_bytes(data)
            for call in (marks.all, lambda: marks.set(20, flags="bad"), lambda: buf.sample(4)):
                with pytest.raises(CorruptError, match="marks.json"):
                    call()
            assert file.read_bytes() == data
            assert [f.file for f in ringmap.check(path)] == ["marks.json"]
        body = json.loads(whole)
        body["version"] = 2
        file.write_text(json.dumps(body))
        with pytest.raises(NewerVersionError):
            marks.all()
        os.truncate(file, (64 << 20) + 1)
        with pytest.raises(CorruptError, match="more than 67,108,864 bytes"):
            marks.all()
        file.unlink()
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CorruptError, match="symbolic link"):
            marks.all()
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CorruptError, match="marks.json"):
            marks.all()
    assert not (tmp_path / "elsewhere").exists()


def test_edited_by_hand_counts_after_a_repair(tmp_path):
    path = tmp_path / "b"
    fill(path, range(4)).close()
    with ReplayBuffer.open(path) as buf:
        Marks(buf).set(10, note="slips")
    file = path / "marks.json"
    file.write_text(file.read_text().replace("slips", "slides"))
    assert "edited" in str(ringmap.check(path)[0])
    ringmap.repair(path, dry_run=False)
    assert ringmap.check(path) == []
    with ReplayBuffer.open(path) as buf:
        assert Marks(buf).get(10).note == "slides"


def forged(path, **change):
    body = json.loads(path.read_text())
    body.pop("checksum")
    (mine,) = body["marks"].values()
    mine[0] |= change
    path.write_bytes(encode_signed(body))


@pytest.mark.parametrize(
    "change",
    [
        {"position": -1},
        {"position": 1 << 70},
        {"position": True},
        {"record": "x"},
        {"flags": ["<b>"]},
        {"flags": 3},
        {"note": "x" * 5000},
        {"note": None},
    ],
)
def test_forged_marks_are_refused(tmp_path, change):
    with fill(tmp_path / "b", range(2)) as buf:
        Marks(buf).set(10, flags="bad")
        forged(tmp_path / "b/marks.json", **change)
        with pytest.raises(CorruptError):
            Marks(buf).all()


def test_another_episode_at_the_position_is_not_marked(tmp_path, monkeypatch):
    with fill(tmp_path / "b", range(4)) as buf:
        Marks(buf).set(10, flags="bad")
        forged(tmp_path / "b/marks.json", record="0123456789abcdef")
        assert Marks(buf).all() == {}
        Marks(buf).set(20, flags="bad")  # which drops what belongs to no episode
        assert len(json.loads((tmp_path / "b/marks.json").read_text())["marks"].popitem()[1]) == 1
        forged(tmp_path / "b/marks.json", record="0123456789abcdef")
        monkeypatch.setattr(sidecar, "marked", lambda source, found: found)
        monkeypatch.setattr("ringmap.datasets.marks.marked", lambda source, found: found)
        assert list(Marks(buf).all()) == [20]  # control: without the record it would be


def test_marks_of_evicted_episodes_go(tmp_path):
    with fill(tmp_path / "b", range(10)) as buf:
        for at in (0, 50, 90):
            Marks(buf).set(at, note="x")
        write(buf, range(3))  # evicts the first three
        assert list(Marks(buf).all()) == [50, 90]
        Marks(buf).set(60, flags="good")
        told = json.loads((tmp_path / "b/marks.json").read_text())["marks"].popitem()[1]
        assert [mark["position"] for mark in told] == [50, 60, 90]
        with pytest.raises(ClipIndexError, match="episode_spans"):
            Marks(buf).set(0, flags="bad")


def test_a_copy_leaves_out_the_marks_of_what_came_later(tmp_path):
    with fill(tmp_path / "b", range(3)) as buf:
        for position in (0, 20):
            Marks(buf).set(position, flags="bad")
        owner = next(iter(json.loads((tmp_path / "b/marks.json").read_text())["marks"]))
        state = Copied(tail=0, head=20, newest=None, uuid=bytes.fromhex(owner))
        (tmp_path / "c").mkdir()
        (tmp_path / "c/marks.json").write_bytes(sidecar.marks_of_copy(buf.engine.source, state))
        copied = MarkFile(Disk(), str(tmp_path / "c/marks.json"), owner)
        assert sorted(copied.read()) == [0]


@pytest.mark.parametrize("when", ["before", "at the lock"])
def test_a_directory_that_was_replaced_is_not_marked(tmp_path, monkeypatch, when):
    buf = fill(tmp_path / "b", range(3))
    marks = Marks(buf)
    marks.set(0, flags="bad")
    before = (tmp_path / "b/marks.json").read_bytes()

    def replace(*_):
        (tmp_path / "b").rename(tmp_path / "old")
        shutil.copytree(tmp_path / "old", tmp_path / "b")
        for path in (tmp_path / "b").glob("marks*"):
            path.unlink()

    if when == "before":
        replace()
    else:
        monkeypatch.setattr(Disk, "before", replace)
    with pytest.raises(ReplacedError, match=r"Marks.set: .* was replaced by another one"):
        marks.set(10, flags="bad")
    assert (tmp_path / "old/marks.json").read_bytes() == before
    made = {path.name for path in (tmp_path / "b").glob("marks*")}
    assert made <= ({"marks.json.lock"} if when == "at the lock" else set())
    monkeypatch.undo()
    with pytest.raises(ReplacedError):
        buf.close()


def test_a_signal_handler_may_mark(tmp_path, monkeypatch):
    """In the middle of another change it is refused, and both files and marks stay whole."""
    monkeypatch.setattr(sidecar, "_WAIT_S", 0.05)
    with fill(tmp_path / "b", range(3)) as buf:
        marks, told = Marks(buf), []

        def handler(*_):
            try:
                marks.set(20, flags="bad")
            except LockedError:
                told.append("locked")

        def replace(disk, path, data, *args, real=Disk.replace_file, **options):
            if not told:
                told.append("struck")
                signal.raise_signal(signal.SIGUSR1)
            return real(disk, path, data, *args, **options)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            monkeypatch.setattr(Disk, "replace_file", replace)
            marks.set(10, flags="bad")
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert told == ["struck", "locked"]
        marks.set(20, flags="bad")
        assert sorted(marks.all()) == [10, 20]


def test_a_reader_keeps_what_it_does_not_know_yet(tmp_path):
    """A reader that has not looked since does not drop the mark of an episode that is newer."""
    buf = fill(tmp_path / "b", range(4))
    reader = ReplayBuffer.open(tmp_path / "b", "r")
    source = reader.marked_ring()[0]
    write(buf, [4])
    Marks(buf).set(40, flags="new")
    mine = Marks(buf)._file.read()
    old = Marks(reader)
    source.refresh = lambda: False
    old._prune(mine)
    assert list(mine) == [40]
    reader.close()
    buf.close()


def test_an_episode_in_parts(tmp_path):
    with ReplayBuffer(60, path=tmp_path / "b") as buf:
        with buf.begin_episode(commit_every=10) as episode:
            for t in range(20):
                episode.append({"x": 7, "t": t})
            Marks(buf).set(0, flags="long")
            for t in range(20, 70):
                episode.append({"x": 7, "t": t})
            assert list(Marks(buf).all()) == [0]  # its first part was evicted
        Marks(buf).set(0, note="cut")
        assert Marks(buf).get(0).flags == ("long",)
        buf.write_episode({"x": np.full(60, 8), "t": np.arange(60)})
        assert Marks(buf).all() == {}


def test_what_can_not_be_written_is_kept_elsewhere(tmp_path, monkeypatch):
    path = tmp_path / "b"
    fill(path, range(4)).close()
    other = tmp_path / "mine/marks.json"
    other.parent.mkdir()
    with ReplayBuffer.open(path, "r", sampler=EpisodeSampler(0, where="not flags contains bad", marks=other)) as buf:
        with pytest.raises(NotFoundError, match="mark an episode first"):
            buf.sample(4)
        Marks(buf, path=other).set(10, flags="bad")
        assert drawn(buf) == [0, 2, 3]
        with fill(tmp_path / "second", range(2)) as second:  # one file, two buffers
            Marks(second, path=other).set(10, flags="bad")
            assert drawn(buf) == [0, 2, 3]
        assert not (path / "marks.json").exists()
    refused = OSError(30, "Read-only file system")

    class ReadOnly(Disk):
        def before(self, *change):
            raise refused

    with pytest.raises(EnvironmentFault, match="path=FILE"):
        MarkFile(ReadOnly(), str(path / "marks.json"), "x").change(lambda mine: None)


def test_in_ram(tmp_path):
    with fill(None, range(3), sampler=EpisodeSampler(0, where="not flags contains bad")) as buf:
        with pytest.raises(InputError, match="path=FILE"):
            Marks(buf)
        with pytest.raises(InputError, match="marks=FILE"):
            buf.sample(3)
        Marks(buf, path=tmp_path / "m.json").set(10, flags="bad")
        assert list(Marks(buf, path=tmp_path / "m.json").all()) == [10]


@pytest.mark.parametrize("flags", ["two words", "", ["<b>"], [3], 7, ["x" * 65], [f"f{i}" for i in range(17)]])
def test_what_is_no_flag(tmp_path, flags):
    with fill(tmp_path / "b", range(2)) as buf:
        with pytest.raises(InputError):
            Marks(buf).set(10, flags=flags)
        with pytest.raises(InputError, match="4,000"):
            Marks(buf).set(10, note="x" * 4001)
        assert not (tmp_path / "b/marks.json").exists()


def test_a_dataset_is_marked_beside(tmp_path):
    with fill(tmp_path / "b", range(4)) as buf:
        buf.dump(tmp_path / "set.h5", progress=False)
    dataset = load_dataset(tmp_path / "set.h5")
    Marks(dataset).set(2, flags="bad")
    assert (tmp_path / "set.h5.marks.json").exists()
    assert list(Marks(load_dataset(tmp_path / "set.h5")).all()) == [2]
    with pytest.raises(ClipIndexError):
        Marks(dataset).set(4, flags="bad")
    dataset.close()
    with fill(tmp_path / "other", [5, 6, 7]) as buf:  # another dataset of that name
        buf.dump(tmp_path / "set.h5", progress=False, mode="overwrite")
    assert Marks(load_dataset(tmp_path / "set.h5")).all() == {}
    as_dataset = load_dataset(tmp_path / "b", format="ringmap")
    Marks(as_dataset).set(20, flags="bad")
    assert (tmp_path / "b/marks.json").exists()


# -- who uses them ---------------------------------------------------------------------------------


def test_flagged_episodes_are_not_drawn(tmp_path):
    with fill(
        tmp_path / "b",
        range(6),
        sampler=EpisodeSampler(0, where="not (flags contains bad or flags contains slow)"),
    ) as buf:
        assert drawn(buf) == [0, 1, 2, 3, 4, 5]
        marks = Marks(buf)
        marks.set(10, flags="bad")
        marks.set(20, flags=["slow", "nice"])
        marks.set(30, flags="nice", note="bad")
        assert drawn(buf) == [0, 3, 4, 5]
        with pytest.raises(InputError, match="runs on into the next episode.*use across=False"):
            buf.sample(4, window=Sequences(4, across=True))
        marks.remove(10)
        assert drawn(buf) == [0, 1, 3, 4, 5]
        for at in range(0, 50, 10):
            marks.set(at, flags="bad")
        assert drawn(buf) == [5]  # found by a look at all
        marks.set(50, flags="bad")
        with pytest.raises(NoClipsError, match="ask for less"):
            buf.sample(4)
        write(buf, [9])
        assert drawn(buf) == [9]


def test_the_draws_without_marks_are_as_before(tmp_path):
    """The same seed gives the same clips, whether something may be dropped or not."""
    with fill(tmp_path / "b", range(6)) as buf:
        one, two = EpisodeSampler(0), EpisodeSampler(0, where="not flags contains bad")
        np.testing.assert_array_equal(one(0, buf, 50, 1), two(0, buf, 50, 1))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("", "give where"),
        ("return > 3", r"view\(where='return > 3'\)"),
        ("flags contains", "expected a value"),
        (lambda data: True, "a function"),
        ("flags", "expected one of"),
    ],
)
def test_what_is_no_condition_on_marks(where, message):
    with pytest.raises(InputError, match=message):
        EpisodeSampler(where=where, marks="somewhere")


def test_only_flagged_episodes_are_drawn(tmp_path):
    """A condition that an episode without a mark does not meet; a flag is meant as a whole."""
    with fill(tmp_path / "b", range(6), sampler=EpisodeSampler(0, where="flags contains good")) as buf:
        with pytest.raises(NoClipsError, match="ask for less"):
            buf.sample(4)
        for at, flags in ((10, "good"), (20, ["good", "bad"]), (30, "goodish")):
            Marks(buf).set(at, flags=flags)
        assert drawn(buf) == [1, 2]
        buf.sampler = EpisodeSampler(0, where="note contains slip or flags contains bad")
        Marks(buf).set(40, note="it slips")
        assert drawn(buf) == [2, 4]


@pytest.mark.parametrize("how", ["path", "reader"])
def test_convert_writes_what_was_chosen(tmp_path, how):
    path = tmp_path / "b"
    with fill(path, range(12)) as buf:  # 2 to 11 are stored
        Marks(buf).set(30, flags="bad", note="it slips")
        Marks(buf).set(40, flags="good")
    source = str(path) if how == "path" else ReplayBuffer.open(path, "r")
    wanted = {
        "not flags contains bad and return > 70": [8, 9, 10, 11],
        "flags = good": [4],
        "note contains SLIPS or seed = 2": [2, 3],
        "episode < 2": [2, 3],
        "length > 10": [],
    }
    for number, (where, found) in enumerate(wanted.items()):
        out = tmp_path / f"{number}.h5"
        convert(source, out, where=where, progress=False)
        if found:
            assert numbers_in(load_dataset(out)) == found, where
    with pytest.raises(InputError, match="character 1"):
        convert(source, tmp_path / "no.h5", where="nope = 1", progress=False)
    with pytest.raises(InputError, match="where"):
        convert(source, tmp_path / "no.h5", marks=tmp_path / "m", progress=False)
    assert not (tmp_path / "no.h5").exists()


def test_convert_leaves_out_what_is_evicted_meanwhile(tmp_path):
    """Of a live buffer; a view that the caller made has lost an episode, and says so."""
    with fill(tmp_path / "b", range(10)) as buf:

        def wanted(data):
            if data["seed"] == 9:
                write(buf, range(20, 23))  # evicts 0, 1 and 2, which are chosen already; all numbers fall by three
            return data["seed"] < 5

        convert(buf, tmp_path / "a.h5", where=wanted, progress=False)
        assert numbers_in(load_dataset(tmp_path / "a.h5")) == [3, 4]
        view = buf.view(where="seed < 5")
        write(buf, [23])
        with pytest.raises(ClipIndexError, match="evicted"):
            convert(view, tmp_path / "b.h5", progress=False)


def test_a_copy_of_the_directory_keeps_its_marks(tmp_path):
    with fill(tmp_path / "b", range(4)) as buf:
        Marks(buf).set(10, flags="bad")
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    with ReplayBuffer.open(tmp_path / "c") as buf:
        assert list(Marks(buf).all()) == [10]
