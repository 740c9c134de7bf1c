import contextlib
import itertools
import os
import shutil

import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    ExistsError,
    InputError,
    LockedError,
    RingmapError,
    RoleError,
)
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.inspect.repair import Action, Plan, copy_repaired, repair_folder
from ringmap.storage.records.blobs import segment_name
from ringmap.storage.records.manifest import read_manifest
from tests.faults.damage.buffers import episode_of, make, served
from tests.faults.damage.fuzz import DyingDisk, Killed, bytes_in, faults_after_kill
from tests.faults.damage.test_check import a_frame
from tests.faults.damage.test_damages import kept, mended
from tests.faults.damage.vandals import LAST, OBS, PIXELS, SEGMENT, STREAM, Vandal, an_old_state

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_what_a_folder_lies_in_the_place_of_is_left_to_people(place):
    v = Vandal(place / "a")
    (v.folder / PIXELS).unlink()
    (v.folder / PIXELS).mkdir()
    (v.folder / PIXELS / "mine").write_text("mine")
    with pytest.raises(CorruptError, match="is a folder, expected a file.*move this one away"):
        ringmap.repair(v.folder, dry_run=False)
    (v.folder / PIXELS / "mine").unlink()
    assert mended(v) == []


def test_lost_manifest_costs_the_settings_alone(place):
    v = Vandal(place / "a")
    (v.folder / "manifest.json").unlink()
    (action, _) = ringmap.repair(v.folder)
    assert action == Action(
        "manifest.json",
        "make it again from the other files: 7 episodes; settings (history_len ...) are lost",
    )
    assert mended(v) == list(v.truth.episodes)
    again = read_manifest(Disk(), str(v.folder))
    assert again.label(3) == v.manifest.label(3)
    assert again.table_slots == v.manifest.table_slots


@pytest.mark.parametrize("is_torn", [False, True])
def test_lost_manifest_and_lost_column_can_not_be_mended(place, is_torn):
    """Any whole blob tells how many columns there were."""
    v = Vandal(place / "a")
    if is_torn:
        newest = v.records[v.seq]
        v.edit(f"data/{segment_name(newest.blob_segment)}", newest.blob_offset, b"\xee" * newest.blob_size)
    (v.folder / "manifest.json").unlink()
    os.remove(v.folder / LAST)
    before = bytes_in(v.folder)
    with pytest.raises(CorruptError, match="4 columns were stored, and the files of 3 are there"):
        ringmap.repair(v.folder, dry_run=False)
    os.remove(v.folder / OBS)
    with pytest.raises(CorruptError, match="the other files do not say enough"):
        ringmap.repair(v.folder, dry_run=False)
    after = bytes_in(v.folder)
    assert all(after[name] == before[name] for name in after.keys() - {"lock"})


@pytest.mark.parametrize("data", [b"{}", b""])
def test_a_damaged_manifest_of_an_empty_buffer_says_that_nothing_is_lost(place, data):
    ReplayBuffer(10, path=place / "a").close()
    (place / "a/manifest.json").write_bytes(data)
    with pytest.raises(CorruptError, match="if nothing was stored, remove the directory"):
        ringmap.repair(place / "a")
    assert [finding.file for finding in ringmap.check(place / "a")] == ["manifest.json"] * 2


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.campaign)])
def test_whole_episodes_stay_on_both_sides_of_every_gap(place, every):
    v = Vandal(place / "a")
    seqs = list(v.truth.episodes)
    for first, last in [*itertools.combinations_with_replacement(seqs, 2)][::every]:
        shutil.rmtree(v.folder)
        v.truth = make("wrapped", v.folder)
        v.edit("episodes.npy", 4096 + 128 * first, bytes(128 * (last + 1 - first)))
        left = [seq for seq in seqs if not first <= seq <= last]
        assert mended(v) == left, (first, last)


def test_a_table_from_a_backup(place):
    v = Vandal(place / "a")
    make(
        "wrapped",
        v.folder.with_suffix(".b"),
        pause=lambda: shutil.copy(v.folder.with_suffix(".b") / "episodes.npy", place / "old"),
    )
    shutil.copytree(v.folder.with_suffix(".b"), place / "c")
    shutil.copy(place / "old", place / "c/episodes.npy")
    v.folder = place / "c"
    assert mended(v) == [seq for seq in v.truth.episodes if seq <= 11]


def test_the_table_is_trusted_where_the_state_is_lost_too(place):
    v = Vandal(place / "a")
    v.edit("state.bin", 0, bytes(8192))
    v.flip("episodes.npy", 4096 + 128 * 10)
    assert mended(v) == [seq for seq in v.truth.episodes if seq != 10]


def test_records_beyond_a_lost_one_are_kept_where_the_state_is_an_old_copy_too(place):
    v = Vandal(place / "a")
    an_old_state(v)  # shows record 10
    v.flip("episodes.npy", 4096 + 128 * 11)
    assert mended(v) == [seq for seq in v.truth.episodes if seq != 11]


def test_everything_at_once(place):
    v = Vandal(place / "a")
    (v.folder / "manifest.json").write_text("{")
    v.edit("state.bin", 0, os.urandom(8192))
    v.flip(OBS, 3)
    v.edit(PIXELS, -4000, b"x")
    v.flip(LAST, v.row_of("name", 12))
    v.flip("episodes.npy", 4096 + 128 * 10)
    v.flip("data/000000000009.bin", 3)
    os.remove(v.folder / "data/000000000008.bin")
    with pytest.raises(CorruptError):  # without the label, and the manifest, nothing tells what column 1 was
        ringmap.repair(v.folder)
    (v.folder / "manifest.json").write_bytes(v.manifest.encode())
    assert mended(v) == [11, 13, 14]


def test_the_small_state_goes_back_with_the_blob_of_a_clear(place):
    v = Vandal(place / "a", "cleared")
    v.flip_newest_blob()
    actions = ringmap.repair(v.folder)
    assert actions[0].seq == v.seq
    assert f"go back to the small state before record {v.seq}" in actions[0].what
    assert mended(v) == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_damaged_stream_is_cut(place, keep):
    v = Vandal(place / "a", "killed")
    path, name = a_frame(v)
    row = sum(spec.row_nbytes for spec in v.manifest.schema.columns)
    v.flip(name, path.stat().st_size - 12 - row - 60)  # in step 2 of 0 to 3
    actions = ringmap.repair(v.folder, dry_run=False)
    assert actions[0] == Action(name, "cut it after its 2 whole steps")
    assert ringmap.check(v.folder) == []
    buf = ReplayBuffer.open(v.folder, "r+", interrupted="keep" if keep else "drop")
    assert (buf.lengths[-1] == 2) == keep
    buf.close()


def test_a_stream_without_columns_is_removed(place):
    v = Vandal(place / "a", "killed")
    path, _ = a_frame(v)
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    assert mended(v) == list(v.truth.episodes)
    assert not list(v.folder.glob(STREAM))


def test_refuses_beside_a_writer(place):
    v = Vandal(place / "a")
    buf = ReplayBuffer.open(v.folder, "r+")
    v.flip(PIXELS, v.row_of("pixels", 10))
    with pytest.raises(LockedError, match="is being written by process") as caught:
        ringmap.repair(v.folder, dry_run=False)
    assert isinstance(caught.value, RoleError)
    assert [action.seq for action in ringmap.repair(v.folder)] == [
        10,
        None,
        None,
    ]  # looking is fine
    buf.close()
    assert mended(v) == [seq for seq in v.truth.episodes if seq != 10]


def test_a_live_reader_follows_a_repair(place):
    v = Vandal(place / "a")
    reader = ReplayBuffer.open(v.folder)
    before = reader.num_episodes
    v.flip(PIXELS, v.row_of("pixels", 10))
    ringmap.repair(v.folder, dry_run=False)
    assert reader.refresh()
    assert reader.num_episodes == before - 1
    assert all(v.truth.fault(*episode) is None for episode in served(reader))


def test_a_dropped_episode_stays_so_when_its_flag_is_damaged(place):
    v = Vandal(place / "a")
    v.flip(PIXELS, v.row_of("pixels", 10))
    expected = mended(v)
    v.flip("episodes.npy", 4096 + 128 * 10 + 113, 64)
    assert {f.what for f in ringmap.check(v.folder) if f.file == "episodes.npy"} == {"record 10 has a damaged flag"}
    assert mended(v) == expected


def test_positions_never_move_and_writing_goes_on(place):
    v = Vandal(place / "a")
    v.flip("episodes.npy", 4096 + 128 * v.seq)
    v.flip(PIXELS, v.row_of("pixels", 10))
    ringmap.repair(v.folder, dry_run=False)
    with ReplayBuffer.open(v.folder, "r+") as buf:
        assert buf.engine.owned.head == v.records[v.seq].head
        for number in range(100, 130):
            v.truth.written[number] = 1 + number % 9
            buf.write_episode(episode_of(number, v.truth.written[number]))
            assert buf.check() == []
            assert all(v.truth.fault(*episode) is None for episode in served(buf))
    buf.close()
    assert ringmap.check(v.folder) == []


def test_after_a_reboot(place, monkeypatch):
    v = Vandal(place / "a", "killed")
    monkeypatch.setattr("ringmap.buffers.engine.DISK", Disk())
    monkeypatch.setattr(ringmap.storage.disk.system, "_read_boot_id", lambda: b"another boot id.")
    v.flip(PIXELS, v.row_of("pixels", 12))
    v.flip("episodes.npy", 4096 + 128 * 11)
    assert mended(v) == [seq for seq in v.truth.episodes if seq not in (11, 12)]


def test_after_a_reboot_a_state_whose_mark_is_beyond_the_table_counts(place, monkeypatch):
    """Evicted episodes were live again: the newest record that was left had called them so."""
    v = Vandal(place / "a", "killed")
    monkeypatch.setattr("ringmap.buffers.engine.DISK", Disk())
    monkeypatch.setattr(ringmap.storage.disk.system, "_read_boot_id", lambda: b"another boot id.")
    live = sorted(v.truth.episodes)
    v.edit("episodes.npy", 4096 + 128 * live[0], bytes(128 * len(live)))
    assert any(f"records {live[0]} to {live[-1]} " in finding.what for finding in ringmap.check(v.folder))
    assert mended(v) == []


# -- a repair that is interrupted ------------------------------------------------------------------


def nothing_left(v):
    os.remove(v.folder / PIXELS)
    os.remove(v.paths.table)
    v.cut("state.bin", 4096)


def gaps(v):
    for seq in (9, 10, v.seq):
        v.flip("episodes.npy", 4096 + 128 * seq)
    v.flip("episodes.npy", 99)
    v.cut(LAST, 3000)
    shutil.rmtree(v.paths.open)


def torn(v):
    v.flip("episodes.npy", 4096 + 128 * 12)
    v.flip("state.bin", 30)
    v.edit(LAST, 4096 + 32 * 60, bytes(32 * 50))
    v.edit("manifest.json", 0, b"[")


DAMAGES = {"torn": torn, "nothing left": nothing_left, "gaps": gaps}
EVERY = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["every 7th", "every"])
"""Of the changes that a repair makes, those at which it is stopped."""


def killed_repairs(place, damage, torn, every):
    """Yield `(at, v, expected)` for each `every`-th change of a repair: killed there, and the episodes that it must
    keep."""
    v = Vandal(place / "whole")
    DAMAGES[damage](v)
    v.folder = shutil.copytree(place / "whole", place / "straight")
    expected = mended(v)
    for at in itertools.count(torn(0) % every, every):
        v.folder = shutil.copytree(place / "whole", place / str(at))
        try:
            repair_folder(DyingDisk(at, torn(at)), str(v.folder), dry_run=False)
        except Killed:
            yield at, v, expected
        else:
            break
        shutil.rmtree(v.folder)
    assert at > 12


@EVERY
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("torn", [False, True])
def test_killed_at_every_change(place, damage, torn, every):
    """The user's own script, met by what is left, is refused or served what is true; the next repair finishes."""
    for at, v, expected in killed_repairs(place, damage, lambda at: torn, every):
        opened = shutil.copytree(v.folder, place / "opened")
        assert faults_after_kill(opened, v.truth) == []
        shutil.rmtree(opened)
        shutil.copytree(v.folder, opened)
        with contextlib.suppress(CorruptError), ReplayBuffer(60, path=opened) as buf:
            assert buf.num_episodes >= len(expected), "an empty buffer was begun"
            buf.close()
        shutil.rmtree(opened)
        ringmap.repair(v.folder, dry_run=False)
        assert ringmap.check(v.folder) == []
        assert kept(v.folder, v.truth) == expected, at


@EVERY
@pytest.mark.parametrize("damage", DAMAGES)
def test_killed_again_while_it_is_finished(place, damage, every):
    for at, v, expected in killed_repairs(place, damage, lambda at: at % 2, every):
        with contextlib.suppress(Killed):
            repair_folder(DyingDisk(at * 7 % 13, at % 2), str(v.folder), dry_run=False)
        told = [str(action) for action in ringmap.repair(v.folder)]
        assert list(map(str, ringmap.repair(v.folder, dry_run=False))) == told
        assert kept(v.folder, v.truth) == expected, at


def late(monkeypatch):
    """Write the records at the end, as one might who follows the order of the list of actions."""
    write, show = Plan._write_records, Plan._show
    monkeypatch.setattr(Plan, "_write_records", lambda self: None)
    monkeypatch.setattr(Plan, "_show", lambda self, *args: (write(self), show(self, *args)))


@pytest.mark.parametrize("damage", ["torn", "cut"])
def test_control_a_column_that_has_its_size_back_before_its_episodes_are_dropped_is_caught(place, damage, monkeypatch):
    """A kill between the two makes a buffer that opens and serves zeros."""
    monkeypatch.setitem(DAMAGES, "cut", lambda v: v.cut(LAST, 4500))
    if damage == "torn":  # the lost record refuses it, too
        test_killed_at_every_change(place, "torn", False, 1)
        return
    late(monkeypatch)
    with pytest.raises((AssertionError, CorruptError)):
        test_killed_at_every_change(place, "cut", False, 1)


class OrderlyDisk(Disk):
    """Fails if a column is changed before the records that drop its episodes are on the disk itself."""

    def __init__(self):
        super().__init__()
        self.unsynced, self.seen = False, 0

    def before(self, change, path, *details):
        if os.path.basename(path) == "episodes.npy":
            self.unsynced = change != "sync" and (self.unsynced or change == "write")
        if f"{os.sep}columns{os.sep}" in path and change in ("write", "extend", "create"):
            self.seen += 1
            assert not self.unsynced, f"{path} is changed before the records are synced"


def test_records_are_durable_before_a_column_is_changed(place):
    v = Vandal(place / "a")
    gaps(v)
    disk = OrderlyDisk()
    repair_folder(disk, str(v.folder), dry_run=False)
    assert disk.seen > 1
    assert ringmap.check(v.folder) == []


# -- beside readers --------------------------------------------------------------------------------


def lose(name):
    return lambda v: (v.folder / name).unlink()


BESIDE = {
    "a row": (lambda v: v.flip(PIXELS, v.row_of("pixels", 10)), True),
    "a record": (lambda v: v.flip("episodes.npy", 4096 + 128 * 10), True),
    "a blob": (lambda v: v.flip(SEGMENT, 3), True),
    "a column cut": (lambda v: v.cut(LAST, 4500), True),
    "a column lost": (lose(LAST), False),
    "the table lost": (lose("episodes.npy"), False),
    "the state lost": (lose("state.bin"), False),
    "the manifest lost": (lose("manifest.json"), True),
}


@pytest.mark.parametrize("what", BESIDE)
@pytest.mark.parametrize("reads", ["map", "pread"])
def test_open_readers_go_on_or_stop_and_are_served_no_foreign_row(place, what, reads):
    """They were open before the damage; a writer laps the ring after the repair."""
    v = Vandal(place / "a")
    reader = ReplayBuffer.open(v.folder, reads=reads, history_len=1)
    reader.sample(4)
    breaks, goes_on = BESIDE[what]
    breaks(v)
    ringmap.repair(v.folder, dry_run=False)
    with ReplayBuffer.open(v.folder, "r+") as buf:
        for number in range(100, 120):
            v.truth.written[number] = 1 + number % 9
            buf.write_episode(episode_of(number, v.truth.written[number]))
            try:
                clips = reader.sample(8)
            except RingmapError:
                assert not goes_on
                continue
            for i in range(8):
                assert v.truth.clip_fault({name: values[i, 0] for name, values in clips.items()}) is None
            assert goes_on, "a reader of a file that is gone went on"
    reader.close()
    assert ringmap.check(v.folder) == []


class FullDisk(Disk):
    """Has no room at the n-th change, but for that of the lock's holder, which is a courtesy."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def before(self, change, path, *details):
        if not path.endswith("lock"):
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "No space left on device", path)


@EVERY
def test_a_full_disk_is_told_and_the_next_try_goes_on(place, every):
    v = Vandal(place / "whole")
    gaps(v)
    v.folder = shutil.copytree(place / "whole", place / "straight")
    expected = mended(v)
    for at in itertools.count(1, every):
        v.folder = shutil.copytree(place / "whole", place / str(at))
        try:
            repair_folder(FullDisk(at), str(v.folder), dry_run=False)
        except EnvironmentFault as error:
            told = str(error)
        else:
            break
        assert "repair again" in told
        assert mended(v) == expected
        shutil.rmtree(v.folder)
    assert at > 8


def test_a_page_that_can_not_be_read_stops_a_repair_in_place(place):
    """What the disk gives another time may be whole: nothing is dropped."""
    v = Vandal(place / "a")
    before = bytes_in(v.folder)
    for name, at in ((PIXELS, v.row_of("pixels", 10)), ("episodes.npy", 4096 + 128 * 10), (SEGMENT, 3)):
        disk = ReadOnlyDisk(place / "a", name, at)
        disk.before = lambda *_: None
        with pytest.raises(EnvironmentFault, match=r"Input/output error.*ringmap.repair\(path, to=...\)"):
            repair_folder(disk, str(v.folder), dry_run=False)
        assert {n for n, data in bytes_in(v.folder).items() if data != before[n]} <= {"lock"}
    assert kept(v.folder, v.truth) == list(v.truth.episodes)


# -- to another place ------------------------------------------------------------------------------


class ReadOnlyDisk(Disk):
    """Refuses each change below a folder, and can't read some of a file in it."""

    def __init__(self, folder, bad="", at=0):
        super().__init__()
        self.inside, self.bad, self.at = str(folder) + os.sep, bad, at

    def before(self, change, path, *details):
        if path.startswith(self.inside):
            raise OSError(30, "Read-only file system", path)

    def open(self, path, write=False):
        file = super().open(path, write)
        if self.bad and path == self.inside + self.bad:
            file.__class__ = BadSector
        return file


class BadSector(File):
    __slots__ = ()

    def read(self, size, offset):
        if offset <= self.disk.at < offset + size:
            raise OSError(5, "Input/output error", self.path)
        return super().read(size, offset)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_copy_of_what_is_whole_from_a_place_that_can_not_be_written(place, damage):
    v = Vandal(place / "a")
    DAMAGES[damage](v)
    before, disk = bytes_in(v.folder), ReadOnlyDisk(v.folder)
    with pytest.raises(EnvironmentFault, match=r"ringmap.repair\(path, to=...\)"):
        repair_folder(disk, str(v.folder), dry_run=False)
    planned = copy_repaired(disk, str(v.folder), str(place / "b"), dry_run=True)
    assert not (place / "b").exists()
    done = copy_repaired(disk, str(v.folder), str(place / "b"), dry_run=False)
    assert list(map(str, planned)) == list(map(str, done))
    assert bytes_in(v.folder) == before
    assert ringmap.check(place / "b") == []
    expected = mended(v)
    v.folder = place / "b"
    assert kept(v.folder, v.truth) == expected
    assert sorted(os.listdir(place)) == ["a", "b"]


def test_a_page_that_can_not_be_read_costs_its_episode_alone(place):
    v = Vandal(place / "a")
    at = v.row_of("pixels", 10)
    disk = ReadOnlyDisk(v.folder, PIXELS, at)
    copy_repaired(disk, str(v.folder), str(place / "b"), dry_run=False)
    page = range(at // 4096 * 4096, at // 4096 * 4096 + 4096)
    lost = [
        s
        for s in v.truth.episodes
        if v.row_of("pixels", s) in page or v.row_of("pixels", s) + 16 * v.records[s].length - 1 in page
    ]
    assert 10 in lost
    assert kept(place / "b", v.truth) == [s for s in v.truth.episodes if s not in lost]


def test_a_copy_of_a_sound_buffer_and_where_none_can_go(place):
    v = Vandal(place / "a")
    assert [action.file for action in ringmap.repair(v.folder, False, to=place / "b")] == ["."]
    assert kept(place / "b", v.truth) == list(v.truth.episodes)
    for dry_run in (True, False):
        with pytest.raises(ExistsError, match="something is at"):
            ringmap.repair(v.folder, dry_run, to=place / "b")
        with pytest.raises(InputError, match="inside the buffer itself"):
            ringmap.repair(v.folder, dry_run, to=v.folder / "b")
