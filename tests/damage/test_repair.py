import contextlib
import itertools
import json
import os
import shutil

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    ExistsError,
    InputError,
    LockedError,
    NewerVersionError,
    RoleError,
)
from ringmap.storage.directory import opening
from ringmap.storage.directory.entries import Paths
from ringmap.storage.disk.canonical import json_checksum
from ringmap.storage.disk.files import Disk, FileHandle
from ringmap.storage.inspect.repair import Action, copy_repaired, repair_folder
from ringmap.storage.inspect.salvage import Salvage
from tests.damage.buffers import episode_of, make, served
from tests.damage.fuzz import DyingDisk, Killed, bytes_in, faults_after_kill
from tests.damage.test_check import (
    LAST,
    OBS,
    PIXELS,
    STREAM,
    VANDALS,
    Vandal,
    a_frame,
    damaged_newest_blob,
    row_of,
)
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("no_waiting")


def kept(folder, truth, left=()):
    """Return the record numbers of the episodes that a buffer holds, having compared every byte and clips."""
    with ReplayBuffer.open(folder, "r+") as buf:
        numbers = []
        for number, columns, data in served(buf):
            assert truth.fault(number, columns, data) is None
            numbers.append(number)
        for _ in range(bool(numbers) * 3):
            clips = buf.sample(32, history_len=1)
            for i in range(32):
                assert truth.clip_fault({name: v[i, 0] for name, v in clips.items()}) is None
        assert {finding.file for finding in buf.check()} <= set(left)
    buf.close()
    seqs = {number: seq for seq, number in truth.episodes.items()}
    return [seqs[number] for number in numbers]


def mended(v, left=()):
    """Repair, and return which episodes are left; a dry run before it says the same and changes nothing."""
    before = bytes_in(v.folder)
    planned = ringmap.repair(v.folder)
    assert bytes_in(v.folder) == before
    done = ringmap.repair(v.folder, dry_run=False)
    assert list(map(str, planned)) == list(map(str, done))
    assert {finding.file for finding in ringmap.check(v.folder)} == set(left)
    assert ringmap.repair(v.folder) == []
    return kept(v.folder, v.truth, left)


# What each vandal costs: records of the episodes that are lost; "all"; or nothing.
COSTS = {
    "a record": [10],
    "two records": [10, 11],
    "the newest record": [14],
    "all records": "all",
    "table missing": "all",
    "table cut": [8, 9, 10, 11, 12, 13, 14],
    "a row": [10],
    "the last byte of the ring": [10],
    "a blob": [9],
    "segment missing": [9],
    "segment cut": [9],
    "data missing": "all",
    "column missing": "all",
    "no column at all": "all",
    "a link to a column": "all",
    "a link to a segment": [9],
    "a pipe for a segment": [9],
    "a gap in positions": [10],
    "too many steps": [14],
}
MARKED = [
    "a tail that goes back",
    "a tail beyond the head",
    "an earlier time",
    "an ordinal given before",
    "a wrong count of ordinals",
    "a chain of no part",
]
NOT_OURS = {"a file", "a folder", "a file in columns", "a file in data", "a file in open", "a pipe"}


@pytest.mark.parametrize("vandal", few(sorted(VANDALS.keys() - NOT_OURS), 20))
def test_vandal_is_mended(place, vandal):
    v = Vandal(place / "a")
    VANDALS[vandal][0](v)
    cost = COSTS.get(vandal, [])
    aside = {
        "no column at all": [PIXELS + ".aside"],
        "manifest of another buffer": ["manifest.json.aside"],
        "manifest a folder": ["manifest.json.aside"],
        "a link to a segment": ["data/000000000009.bin.aside"],
        "a pipe for a segment": ["data/000000000009.bin.aside"],
    }
    left = aside.get(vandal, [])
    if vandal == "table cut":
        cost = [seq for seq in v.truth.episodes if 4096 + 128 * seq + 128 > 5000]
    if vandal == "column cut":
        cost = [s for s in v.truth.episodes if row_of(v, "pixels", s) + 16 * v.records[s].length > 4200]
    if vandal in MARKED:
        cost = mended(v)
        cost = [s for s in v.truth.episodes if s not in cost]
        assert len(cost) <= 2
        return
    expected = [] if cost == "all" else [seq for seq in v.truth.episodes if seq not in cost]
    assert mended(v, left) == expected


@pytest.mark.parametrize("vandal", sorted(NOT_OURS))
def test_what_is_not_ours_is_left_alone(place, vandal):
    v = Vandal(place / "a")
    VANDALS[vandal][0](v)
    before = bytes_in(v.folder)
    assert ringmap.repair(v.folder, dry_run=False) == []
    assert bytes_in(v.folder).keys() == before.keys()
    assert {finding.file for finding in ringmap.check(v.folder)} == {VANDALS[vandal][1]}


def test_sound_buffer_is_left_alone(place):
    v = Vandal(place / "a")
    before = bytes_in(v.folder)
    assert ringmap.repair(v.folder, dry_run=False) == []
    after = bytes_in(v.folder)
    assert {name for name in before if before[name] != after[name]} <= {"lock"}


def test_swapped_columns_are_put_back(place):
    v = Vandal(place / "a", "retiring")
    before = bytes_in(v.folder)
    v.swap(v.name("left"), v.name("right"))
    assert mended(v) == list(v.truth.episodes)
    after = bytes_in(v.folder)
    assert all(before[name] == after[name] for name in v.manifest.files)


def test_a_ring_of_swapped_files_is_put_back(place):
    v = Vandal(place / "a")
    names = ["episodes.npy", OBS, "state.bin", "data/000000000010.bin", LAST]
    os.rename(v.folder / names[0], v.folder / "beside")
    for one, other in itertools.pairwise(names):
        os.rename(v.folder / other, v.folder / one)
    os.rename(v.folder / "beside", v.folder / names[-1])
    assert mended(v) == list(v.truth.episodes)


def test_a_file_that_was_misplaced_is_found(place):
    v = Vandal(place / "a")
    odd = "columns/pixels.npy" if os.name == "nt" else "columns/C:\\pixels \udc80\n.npy"
    os.rename(v.folder / PIXELS, v.folder / odd)
    os.rename(v.folder / "manifest.json", v.folder / "manifest.json.bak")
    os.rename(v.folder / "episodes.npy", v.folder / "data/table")
    assert mended(v) == list(v.truth.episodes)
    assert ReplayBuffer.open(v.folder).history_len == 2  # the manifest's settings are there again


def test_lost_manifest_costs_the_settings_alone(place):
    v = Vandal(place / "a")
    (v.folder / "manifest.json").unlink()
    (action, _) = ringmap.repair(v.folder)
    assert action == Action(
        "manifest.json",
        "make it again from the other files: 7 episodes; settings (history_len ...) are lost",
    )
    assert mended(v) == list(v.truth.episodes)
    again = opening.read_manifest(Disk(), str(v.folder))
    assert again.label(3) == v.manifest.label(3)
    assert (again.sizes, again.table_slots) == (v.manifest.sizes, v.manifest.table_slots)


def test_lost_manifest_and_lost_column_can_not_be_mended(place):
    v = Vandal(place / "a")
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


def test_damaged_manifest_of_an_empty_buffer(place):
    ReplayBuffer(10, path=place / "a").close()
    path = place / "a/manifest.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"process"', b'"Process"'))
    ringmap.repair(place / "a", dry_run=False)
    assert ringmap.check(place / "a") == []
    with ReplayBuffer(10, path=place / "a") as buf:
        buf.write_episode({"x": np.zeros(3)})
    buf.close()
    (place / "a/manifest.json").write_bytes(b"{}")
    assert [a.file for a in ringmap.repair(place / "a", dry_run=False)] == [
        "manifest.json",
        "state.bin",
    ]
    ReplayBuffer(10, path=place / "b").close()
    (place / "b/manifest.json").write_bytes(b"{}")
    with pytest.raises(CorruptError, match="if nothing was stored, remove the directory"):
        ringmap.repair(place / "b")


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


def test_everything_at_once(place):
    v = Vandal(place / "a")
    (v.folder / "manifest.json").write_text("{")
    v.edit("state.bin", 0, os.urandom(8192))
    v.flip(OBS, 3)
    v.edit(PIXELS, -4000, b"x")
    v.flip(LAST, row_of(v, "name", 12))
    v.flip("episodes.npy", 4096 + 128 * 10)
    v.flip("data/000000000009.bin", 3)
    os.remove(v.folder / "data/000000000008.bin")
    with pytest.raises(CorruptError):  # without the label, and the manifest, nothing tells what column 1 was
        ringmap.repair(v.folder)
    (v.folder / "manifest.json").write_bytes(v.manifest.encode())
    assert mended(v) == [11, 13, 14]


def test_the_small_state_goes_back_with_the_blob_of_a_clear(place):
    v = Vandal(place / "a", "cleared")
    damaged_newest_blob(v)
    actions = ringmap.repair(v.folder)
    assert actions[0].seq == v.seq
    assert f"go back to the small state before record {v.seq}" in actions[0].what
    assert mended(v) == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_damaged_stream_is_cut(place, keep):
    v = Vandal(place / "a", "killed")
    path, name = a_frame(v)
    row = sum(spec.row_nbytes for spec in v.manifest.schema.columns)
    v.flip(name, path.stat().st_size - row - 12 - 1)  # in step 2 of 0 to 3
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


def test_somebody_elses_column_is_set_aside_not_overwritten(place):
    v = Vandal(place / "a")
    make("wrapped", place / "b", base=50)
    theirs = (place / "b" / PIXELS).read_bytes()
    (v.folder / PIXELS).write_bytes(theirs)
    actions = ringmap.repair(v.folder)
    assert f"set aside what lies there, as {PIXELS}.aside" in {action.what for action in actions}
    assert mended(v, [PIXELS + ".aside"]) == []
    assert (v.folder / (PIXELS + ".aside")).read_bytes() == theirs


def test_a_lock_file_that_is_something_else_is_not_overwritten(place):
    v = Vandal(place / "a")
    v.swap("lock", "data/000000000010.bin")
    assert mended(v, ["data/000000000010.bin.aside"]) == list(v.truth.episodes)


def test_refuses_beside_a_writer(place):
    v = Vandal(place / "a")
    buf = ReplayBuffer.open(v.folder, "r+")
    v.flip(PIXELS, row_of(v, "pixels", 10))
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
    v.flip(PIXELS, row_of(v, "pixels", 10))
    ringmap.repair(v.folder, dry_run=False)
    assert reader.refresh()
    assert reader.num_episodes == before - 1
    assert all(v.truth.fault(*episode) is None for episode in served(reader))


def test_a_dropped_episode_stays_so_when_its_flag_is_damaged(place):
    v = Vandal(place / "a")
    v.flip(PIXELS, row_of(v, "pixels", 10))
    expected = mended(v)
    v.flip("episodes.npy", 4096 + 128 * 10 + 113, 64)
    assert {f.what for f in ringmap.check(v.folder) if f.file == "episodes.npy"} == {"record 10 has a damaged flag"}
    assert mended(v) == expected


def test_positions_never_move_and_writing_goes_on(place):
    v = Vandal(place / "a")
    v.flip("episodes.npy", 4096 + 128 * v.seq)
    v.flip(PIXELS, row_of(v, "pixels", 10))
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
    v.flip(PIXELS, row_of(v, "pixels", 12))
    v.flip("episodes.npy", 4096 + 128 * 11)
    assert mended(v) == [seq for seq in v.truth.episodes if seq not in (11, 12)]


# -- a repair that is interrupted ------------------------------------------------------------------


def torn_and_swapped(v):
    v.swap(PIXELS, "episodes.npy")
    v.flip("state.bin", 30)
    v.edit(LAST, 4096 + 32 * 60, bytes(32 * 50))
    v.edit("manifest.json", 0, b"[")


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


DAMAGES = {"torn and swapped": torn_and_swapped, "nothing left": nothing_left, "gaps": gaps}
EVERY = pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.campaign)], ids=["every 19th", "every"])
"""Of the changes that a repair makes, those at which it is stopped."""


def killed_repairs(place, damage, torn, every):
    """Yield `(at, v, expected)` for each `every`-th change of a repair: killed there, and the episodes that it must
    keep."""
    v = Vandal(place / "whole")
    DAMAGES[damage](v)
    v.folder = shutil.copytree(place / "whole", place / "straight")
    expected = mended(v, left_after(v.folder))
    for at in itertools.count(torn(0) % every, every):
        v.folder = shutil.copytree(place / "whole", place / str(at))
        try:
            repair_folder(DyingDisk(at, torn(at)), str(v.folder), dry_run=False)
        except Killed:
            yield at, v, expected
        else:
            break
        shutil.rmtree(v.folder)
    assert at > 8


@EVERY
@pytest.mark.parametrize("damage", few(DAMAGES))
@pytest.mark.parametrize("torn", [False, True])
def test_killed_at_every_change(place, damage, torn, every):
    for at, v, expected in killed_repairs(place, damage, lambda at: torn, every):
        opened = shutil.copytree(v.folder, place / "opened")
        assert faults_after_kill(opened, v.truth) == []
        shutil.rmtree(opened)
        ringmap.repair(v.folder, dry_run=False)
        assert {finding.file for finding in ringmap.check(v.folder)} <= set(left_after(place / "straight"))
        assert kept(v.folder, v.truth) == expected, at


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.campaign)])
def test_killed_while_the_file_of_the_lock_is_a_column(place, every):
    """The next repair locks the buffer by a new file, which was then moved over the column."""
    v = Vandal(place / "whole")
    v.swap(PIXELS, "lock")
    for at in itertools.count(0, every):
        v.folder = shutil.copytree(place / "whole", place / str(at))
        try:
            repair_folder(DyingDisk(at, False), str(v.folder), dry_run=False)
        except Killed:
            ringmap.repair(v.folder, dry_run=False)
            assert kept(v.folder, v.truth, left_after(v.folder)) == list(v.truth.episodes), at
        else:
            break
        shutil.rmtree(v.folder)
    assert at > 8


def left_after(folder):
    return [name for name in bytes_in(folder) if name.endswith(".aside")]


@pytest.mark.slow
def test_control_an_opening_that_looks_past_an_unfinished_repair_is_caught(place, monkeypatch):
    """A kill between the columns and the table makes a buffer that opens and serves zeros."""

    class Blind(Paths):
        def __init__(self, folder):
            super().__init__(folder)
            self.swap = os.path.join(folder, "nothing")

    monkeypatch.setattr(opening, "Paths", Blind)
    monkeypatch.setitem(DAMAGES, "gaps", lambda v: v.cut(LAST, 4500))
    with pytest.raises((AssertionError, CorruptError)):
        test_killed_at_every_change(place, "gaps", False, 1)


@EVERY
@pytest.mark.parametrize("damage", DAMAGES)
def test_killed_again_while_it_is_finished(place, damage, every):
    for at, v, expected in killed_repairs(place, damage, lambda at: at % 2, every):
        if at % 3:
            with contextlib.suppress(Killed):
                repair_folder(DyingDisk(at * 7 % 13, at % 2), str(v.folder), dry_run=False)
        told = [str(action) for action in ringmap.repair(v.folder)]
        assert list(map(str, ringmap.repair(v.folder, dry_run=False)))[: len(told)] == told
        assert kept(v.folder, v.truth) == expected, at
        assert not (v.folder / ".salvage").exists()


def interrupted(v):
    """Leave a repair that was killed when it had begun to replace files."""
    gaps(v)

    class Dying(Disk):
        def before(self, change, path, *details):
            if change in ("write", "extend") and os.path.exists(v.paths.swap) and ".salvage" not in path:
                raise Killed

    with pytest.raises(Killed):
        repair_folder(Dying(), str(v.folder), dry_run=False)


def test_an_unfinished_repair_is_named_and_refused(place):
    v = Vandal(place / "a")
    interrupted(v)
    for mode in ("r", "r+"):
        with pytest.raises(CorruptError, match="a repair was interrupted.* run ringmap.repair again"):
            ReplayBuffer.open(v.folder, mode)
    with pytest.raises(CorruptError, match="run ringmap.repair again"):
        ReplayBuffer(60, path=v.folder)
    (finding,) = ringmap.check(v.folder)
    assert (finding.file, "run ringmap.repair again" in finding.what) == (".salvage", True)
    mended(v)


@EVERY
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_journal_costs_nothing_else(place, damage, every):
    for at, v, expected in killed_repairs(place, damage, lambda at: False, every):
        if (v.folder / ".salvage/journal").exists():
            v.flip(".salvage/journal", 40)
            ringmap.repair(v.folder, dry_run=False)
            found = {finding.file for finding in ringmap.check(v.folder)}
            assert found == set(left_after(v.folder))
            assert kept(v.folder, v.truth, found) == expected, at


HOSTILE = {
    "remove above": ([], [["remove", "../victim"]]),
    "remove by its path": ([], [["remove", "{victim}"]]),
    "overwrite through a link": ([], [["overwrite", "manifest.json", "link/victim"]]),
    "rename through a link": ([], [["rename", "link/victim", "stolen"]]),
    "move above": ([["state.bin", "../victim"]], []),
    "a column that there is not": ([], [["column", 99]]),
    "a verb that there is not": ([], [["run", "x"]]),
    "no list": ([], [7]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_journal_that_a_stranger_made_leads_nowhere(place, name):
    v = Vandal(place / "a")
    (place / "victim").write_text("mine")
    os.symlink(place, v.folder / "link")
    moves, steps = HOSTILE[name]
    steps = json.loads(json.dumps(steps).replace("{victim}", str(place / "victim")))
    body = {"version": 1, "moves": moves, "steps": steps}
    (v.folder / ".salvage").mkdir()
    for file in ("journal", "rest"):
        (v.folder / ".salvage" / file).write_text(json.dumps({**body, "checksum": json_checksum(body)}))
    ringmap.repair(v.folder, dry_run=False)
    assert (place / "victim").read_text() == "mine"
    assert sorted(os.listdir(place)) == ["a", "victim"]
    assert {finding.file for finding in ringmap.check(v.folder)} == {"link"}
    assert kept(v.folder, v.truth, ["link"]) == list(v.truth.episodes)


def test_a_journal_of_a_newer_version_is_refused(place):
    v = Vandal(place / "a")
    body = {"version": 2, "moves": [], "steps": []}
    (v.folder / ".salvage").mkdir()
    (v.folder / ".salvage/journal").write_text(json.dumps({**body, "checksum": json_checksum(body)}))
    before = bytes_in(v.folder)
    with pytest.raises(NewerVersionError, match="upgrade ringmap"):
        ringmap.repair(v.folder, dry_run=False)
    assert {k for k, d in bytes_in(v.folder).items() if d != before[k]} <= {"lock"}


class RottenDisk(Disk):
    """Writes one bit wrong in files of a name in the folder of the repair."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def create(self, path, size=0):
        return self._rotten(super().create(path, size), path)

    def open(self, path, write=False):
        return self._rotten(super().open(path, write), path)

    def _rotten(self, file, path):
        if path.endswith(f".salvage/{self.name}"):
            file.__class__ = RottenHandle
        return file


class RottenHandle(FileHandle):
    __slots__ = ()

    def write(self, data, offset):
        rotten = bytearray(data)
        rotten[128 * 9 + 2 if "episodes" in self.path else 30] ^= 4
        super().write(bytes(rotten), offset)


@pytest.mark.parametrize("name", ["episodes.npy", "state.bin", "manifest.json"])
def test_what_was_written_is_read_back_before_anything_is_replaced(place, name):
    v = Vandal(place / "a")
    gaps(v)
    before = bytes_in(v.folder)
    with pytest.raises(EnvironmentFault, match="does not keep what is written"):
        repair_folder(RottenDisk(name), str(v.folder), dry_run=False)
    assert bytes_in(v.folder).keys() - {"lock"} == before.keys() - {"lock"}
    assert all(data == before[name] for name, data in bytes_in(v.folder).items() if name != "lock")
    mended(v)


def test_control_a_swap_before_the_look_is_caught(place, monkeypatch):
    monkeypatch.setattr(Salvage, "verify", lambda self: None)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_what_was_written_is_read_back_before_anything_is_replaced(place, "episodes.npy")


class OrderlyDisk(Disk):
    """Fails if anything of the buffer changes before all that the journal needs is on the disk itself."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.dirty, self.seen = folder, set(), 0

    def before(self, change, path, *details):
        inside = f"{os.sep}.salvage" in path
        if change in ("write", "create", "extend") and inside:
            self.dirty.add(path)
        if change in ("create", "mkdir", "rename", "unlink"):
            self.dirty.add(os.path.dirname(path))
        if change == "rename" and inside and path in self.dirty and path.endswith(".tmp"):
            raise AssertionError(f"{path} is named before it is synced")
        if change in ("sync", "sync_folder"):
            self.dirty.discard(path)
        if not inside and change in ("write", "extend") and not path.endswith("lock"):
            self.seen += 1
            room = os.path.join(self.folder, ".salvage/room")
            unsynced = {p for p in self.dirty if ".salvage" in p} - {room, os.path.dirname(room)}
            assert unsynced == set(), f"{path} is changed before {unsynced} are synced"


def test_the_journal_is_synced_before_anything_is_replaced(place):
    v = Vandal(place / "a")
    gaps(v)
    disk = OrderlyDisk(str(v.folder))
    repair_folder(disk, str(v.folder), dry_run=False)
    assert disk.seen > 3
    assert ringmap.check(v.folder) == []


def test_control_a_journal_that_is_not_synced_is_caught(place, monkeypatch):
    put = Disk.put
    monkeypatch.setattr(Disk, "put", lambda self, *a, **_: put(self, *a[:3], synced=False))
    with pytest.raises(AssertionError, match="before it is synced"):
        test_the_journal_is_synced_before_anything_is_replaced(place)


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


class TightDisk(Disk):
    """Has room for what a repair writes beside, and for nothing else: blocks that are there can be written."""

    def __init__(self, folder):
        super().__init__()
        self.inside = os.path.join(str(folder), ".salvage")

    def before(self, change, path, *details):
        if change in ("create", "reserve", "mkdir", "copy") and not path.startswith(self.inside):
            raise OSError(28, "No space left on device", path)
        assert path.startswith(os.path.dirname(self.inside)), "outside of the directory"


def test_on_a_disk_that_is_full_but_for_the_metadata(place):
    """Which is so on a mount point, too: all is done inside the directory."""
    v = Vandal(place / "a")
    v.cut(LAST, 4500)
    v.swap(OBS, PIXELS)
    v.flip("episodes.npy", 4096 + 128 * 10)
    v.flip("state.bin", 30)
    shutil.copytree(v.folder, place / "b")
    repair_folder(TightDisk(v.folder), str(v.folder), dry_run=False)
    assert ringmap.check(v.folder) == []
    found = kept(v.folder, v.truth)
    v.folder = place / "b"
    assert mended(v) == found


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_full_disk_changes_nothing_until_all_is_written(place, every):
    v = Vandal(place / "whole")
    gaps(v)
    seen = set()
    for at in itertools.count(1, every):
        v.folder = shutil.copytree(place / "whole", place / str(at))
        before = bytes_in(v.folder)
        try:
            repair_folder(FullDisk(at), str(v.folder), dry_run=False)
        except EnvironmentFault as error:
            told = str(error)
        else:
            break
        begun = (v.folder / ".salvage/journal").exists()
        seen.add(begun)
        if (v.folder / ".salvage.done").exists():
            assert "all is mended" in told
        elif not begun:
            assert "no file of the buffer was replaced" in told
            after = bytes_in(v.folder)
            assert all(data == before[name] for name, data in after.items() if name != "lock")
        shutil.rmtree(v.folder)
    assert seen == {False, True}


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


class BadSector(FileHandle):
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
    at = row_of(v, "pixels", 10)
    disk = ReadOnlyDisk(v.folder, PIXELS, at)
    copy_repaired(disk, str(v.folder), str(place / "b"), dry_run=False)
    page = range(at // 4096 * 4096, at // 4096 * 4096 + 4096)
    lost = [
        s
        for s in v.truth.episodes
        if row_of(v, "pixels", s) in page or row_of(v, "pixels", s) + 16 * v.records[s].length - 1 in page
    ]
    assert 10 in lost
    assert kept(place / "b", v.truth) == [s for s in v.truth.episodes if s not in lost]


def test_an_unfinished_repair_is_finished_in_a_copy(place):
    v = Vandal(place / "a")
    interrupted(v)
    done = copy_repaired(ReadOnlyDisk(v.folder), str(v.folder), str(place / "b"), dry_run=False)
    assert str(done[1]) == ".salvage: finish the repair that was interrupted"
    assert kept(place / "b", v.truth) == mended(v)


def test_a_copy_of_a_sound_buffer_and_where_none_can_go(place):
    v = Vandal(place / "a")
    assert [action.file for action in ringmap.repair(v.folder, False, to=place / "b")] == ["."]
    assert kept(place / "b", v.truth) == list(v.truth.episodes)
    for dry_run in (True, False):
        with pytest.raises(ExistsError, match="something is at"):
            ringmap.repair(v.folder, dry_run, to=place / "b")
        with pytest.raises(InputError, match="inside the buffer itself"):
            ringmap.repair(v.folder, dry_run, to=v.folder / "b")
