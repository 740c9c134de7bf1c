import dataclasses
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import NewerVersionError, UnknownFormatError, UnreleasedVersionError
from ringmap.storage.disk import system
from ringmap.storage.disk.checksums import json_checksum
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import Paths
from ringmap.storage.inspect import check as checking
from ringmap.storage.inspect.check import Finding, check_folder
from ringmap.storage.inspect.describe import facts_of
from ringmap.storage.inspect.repair import repair_folder
from ringmap.storage.records.manifest import VERSION, read_manifest
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.table import CLEAR, EpisodeTable, Record
from tests.faults.damage.buffers import KINDS, episode_of, make
from tests.tiers import few

# -- sound buffers ---------------------------------------------------------------------------------


def small(path, **options):
    buf = ReplayBuffer(60, path=path, seed=0, **options)
    if path is not None:
        buf.engine.owned.segments._limit = 300
    return buf


def test_sound_at_every_step_of_a_life(place):
    buf = small(place / "a")
    assert ringmap.check(place / "a") == buf.check() == []
    for number in range(14):
        buf.write_episode(episode_of(number, 5 + number))
        assert ringmap.check(place / "a") == buf.check() == []
    buf.clear()
    assert ringmap.check(place / "a") == buf.check() == []
    with buf.begin_episode() as episode:
        episode.append({name: v[0] for name, v in episode_of(20, 1).items() if name != "_episode_data"})
        assert ringmap.check(place / "a") == buf.check() == []
    reader = ReplayBuffer.open(place / "a")
    buf.write_episode(episode_of(21, 9))
    assert reader.check() == []  # which has not seen it yet
    reader.refresh()
    reader.sample(2)
    assert reader.check() == []
    buf.close()
    assert ringmap.check(str(place / "a")) == reader.check() == []


def test_sound_in_ram():
    buf = ReplayBuffer(60)
    assert buf.check() == []
    for number in range(14):
        buf.write_episode(episode_of(number, 5 + number))
        buf.sample(2)
        assert buf.check() == []
    buf.clear()
    assert buf.check() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rebooted", [False, True])
def test_sound_kinds(place, kind, rebooted, monkeypatch):
    make(kind, place / "a")
    if rebooted:
        monkeypatch.setattr(system, "_read_boot_id", lambda: b"another boot id.")
    assert ringmap.check(place / "a") == []


def test_sound_with_a_schema_and_with_files_that_any_system_may_leave(place):
    ReplayBuffer(10, path=place / "a", schema={"obs": ((2,), "f4")}).close()
    (place / "a/lost+found").mkdir()
    (place / "a/.DS_Store").touch()
    (place / "a/data/.nfs0000a1").touch()
    assert ringmap.check(place / "a") == []


class NudgingDisk(Disk):
    """Calls something at the n-th read: a writer that comes in between, at a known moment."""

    def __init__(self, nudge, at):
        super().__init__()
        self.nudge, self.left = nudge, at

    def open(self, path, write=False):
        file = super().open(path, write)
        disk = self

        class Nudging:
            def __getattr__(self, name):
                return getattr(file, name)

            def read(self, size, offset):
                disk.count()
                return file.read(size, offset)

        return Nudging()

    def count(self):
        self.left -= 1
        if self.left == 0:
            self.nudge()


def nudged(place, at):
    """Check a buffer whose whole content is replaced at the n-th read."""
    buf = small(place, spare_rows=8)
    for number in range(9):
        buf.write_episode(episode_of(number, 9))

    def lap():
        for number in range(9, 49):
            buf.write_episode(episode_of(number, 3))
        buf.clear()
        for number in range(49, 54):
            buf.write_episode(episode_of(number, 7))

    disk = NudgingDisk(lap, at)
    findings = check_folder(disk, str(place))
    buf.close()
    return findings, disk.left > 0


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_writer_that_laps_in_the_middle_is_no_finding(place, every):
    for at in itertools.count(1, every):
        findings, over = nudged(place / str(at), at)
        assert findings == [], at
        if over:
            break
    assert at > 30


def test_a_dry_run_of_a_repair_beside_a_writer_that_laps_says_nothing(place):
    for at in range(1, 50, 9):
        buf = small(place / str(at), spare_rows=8)
        for number in range(9):
            buf.write_episode(episode_of(number, 9))

        def lap(buf=buf):
            for number in range(9, 49):
                buf.write_episode(episode_of(number, 3))

        assert repair_folder(NudgingDisk(lap, at), str(place / str(at)), dry_run=True) == [], at
        buf.close()


def test_control_without_the_second_look_a_writer_makes_findings(place, monkeypatch):
    monkeypatch.setattr(checking, "_MORE", 0)
    assert any(nudged(place / str(at), at)[0] for at in range(1, 60, 2))


WRITER = """
import itertools, sys
sys.path.insert(0, {root!r})
from tests.faults.damage.buffers import episode_of
from tests.faults.damage.test_check import small
buf = small({path!r})
for number in itertools.count():
    buf.write_episode(episode_of(number % 50, 1 + number % 17))
    if number == 20:
        print("go", flush=True)
"""


@pytest.mark.slow
def test_sound_beside_a_flat_out_writer_process(place):
    script = WRITER.format(root=os.getcwd(), path=str(place / "a"))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout.readline() == b"go\n"
            findings = [ringmap.check(place / "a") for _ in range(30)]
        finally:
            writer.kill()
    assert findings == [[]] * 30
    assert ringmap.check(place / "a") == []


# -- vandals: each breaks one invariant --------------------------------------------------------------


class Vandal:
    """A buffer to be broken, and the tools for it."""

    def __init__(self, folder, kind="wrapped"):
        self.folder, self.paths = folder, Paths(str(folder))
        self.truth = make(kind, folder)
        self.manifest = read_manifest(Disk(), str(folder))
        self.records = {}
        table = EpisodeTable.open(Disk(), self.paths.table, self.manifest.table_slots, self.manifest.uuid, write=True)
        records, valid, _ = table.scan()
        self.records = {int(r["seq"]): Record.of(r) for r in records[valid]}
        self.seq = max(self.records)
        table.close()

    def name(self, column):
        return self.manifest.files[self.manifest.schema.names.index(column)]

    def edit(self, name, at, data):
        with open(self.folder / name, "r+b") as file:
            file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
            file.write(data)

    def flip(self, name, at, bit=4):
        data = bytearray((self.folder / name).read_bytes())
        data[at] ^= bit
        (self.folder / name).write_bytes(data)

    def cut(self, name, to):
        os.truncate(self.folder / name, to)

    def write_manifest(self, **changes):
        (self.folder / "manifest.json").write_bytes(dataclasses.replace(self.manifest, **changes).encode())

    def write_record(self, seq, **changes):
        table = EpisodeTable.open(Disk(), self.paths.table, self.manifest.table_slots, self.manifest.uuid, write=True)
        table.write(self.records[seq]._replace(**changes))
        table.close()

    def write_states(self, *changes):
        file = Disk().open(self.paths.state, write=True)
        states = StateFile(file, self.manifest.uuid)
        newest = states.newest()
        for change in changes:
            states.write(newest._replace(**change))
        file.close()
        return newest

    def swap(self, one, other):
        one, other, beside = self.folder / one, self.folder / other, self.folder / "beside"
        os.rename(one, beside)
        os.rename(other, one)
        os.rename(beside, other)


def newest_state(v):
    file = Disk().open(v.paths.state)
    newest = StateFile(file, v.manifest.uuid).newest()
    file.close()
    return newest


def with_too_many_steps(v):
    oldest = min(s for s in v.records if v.records[s].live)
    record = v.records[v.seq]
    v.write_record(v.seq, tail=v.records[oldest].start, first=oldest)
    newest = newest_state(v)
    changed = {"tail": v.records[oldest].start, "first": oldest}
    v.write_states(
        {**changed, "generation": newest.generation + 1},
        {**changed, "generation": newest.generation + 2},
    )
    assert record.head - v.records[oldest].start > v.manifest.max_steps


def damaged_newest_blob(v):
    record = v.records[v.seq]
    assert record.kind == CLEAR
    v.flip(f"data/{record.blob_segment:012d}.bin", record.blob_offset + 20)


def a_live(v):
    return sorted(v.truth.episodes)[2]


def row_of(v, column, seq):
    spec = v.manifest.schema.columns[v.manifest.schema.names.index(column)]
    return 4096 + v.records[seq].start % v.manifest.rows * spec.row_nbytes


def foreign_manifest(v):
    make("wrapped", v.folder.with_suffix(".b"), base=50)
    shutil.copy(v.folder.with_suffix(".b") / "manifest.json", v.folder / "manifest.json")


STREAM = "open/*/steps.bin"
OBS, PIXELS, LAST = "columns/000-obs-x.npy", "columns/001-pixels.npy", "columns/003-name.npy"
SEGMENT = "data/000000000009.bin"

VANDALS = {
    # manifest
    "manifest missing": (lambda v: os.remove(v.paths.manifest), "manifest.json", "missing"),
    "manifest a folder": (
        lambda v: (os.remove(v.paths.manifest), os.mkdir(v.paths.manifest)),
        "manifest.json",
        "missing",
    ),
    "manifest not JSON": (lambda v: v.cut("manifest.json", 100), "manifest.json", "not valid JSON"),
    "manifest edited": (
        lambda v: v.edit(
            "manifest.json",
            0,
            (v.folder / "manifest.json").read_bytes().replace(b'"max_steps": 60', b'"max_steps": 61'),
        ),
        "manifest.json",
        "edited or damaged",
    ),
    "manifest's version edited": (
        lambda v: v.edit(
            "manifest.json", 0, (v.folder / "manifest.json").read_bytes().replace(b'"version": 3', b'"version": 7')
        ),
        "manifest.json",
        "edited or damaged",
    ),
    "manifest's version made an old one": (
        lambda v: v.edit(
            "manifest.json", 0, (v.folder / "manifest.json").read_bytes().replace(b'"version": 3', b'"version": 2')
        ),
        "manifest.json",
        "edited or damaged",
    ),
    "manifest of another buffer": (foreign_manifest, "manifest.json", "another buffer"),
    "manifest without columns": (
        lambda v: (v.folder / "manifest.json").write_bytes(v.manifest.without_columns().encode()),
        "manifest.json",
        "old copy",
    ),
    # episode table
    "table missing": (lambda v: os.remove(v.paths.table), "episodes.npy", "missing"),
    "table cut": (lambda v: v.cut("episodes.npy", 5000), "episodes.npy", "has 5000 bytes, expected"),
    "table grown": (
        lambda v: v.edit("episodes.npy", os.path.getsize(v.paths.table), bytes(99999)),
        "episodes.npy",
        "expected",
    ),
    "table's header": (lambda v: v.flip("episodes.npy", 20), "episodes.npy", "header"),
    "a record": (lambda v: v.flip("episodes.npy", 4096 + 128 * a_live(v)), "episodes.npy", "record 10 is damaged"),
    "a flag": (
        lambda v: v.flip("episodes.npy", 4096 + 128 * 10 + 113, 64),
        "episodes.npy",
        "record 10 has a damaged flag",
    ),
    "two records": (
        lambda v: v.edit("episodes.npy", 4096 + 128 * a_live(v), bytes(256)),
        "episodes.npy",
        "records 10 to 11",
    ),
    "the newest record": (
        lambda v: v.flip("episodes.npy", 4096 + 128 * v.seq + 70),
        "episodes.npy",
        "record 14 is damaged or missing",
    ),
    "all records": (lambda v: v.edit("episodes.npy", 4096, bytes(128 * 184)), "episodes.npy", "records"),
    "a gap in positions": (
        lambda v: v.write_record(
            a_live(v), start=v.records[a_live(v)].start + 1, length=v.records[a_live(v)].length - 1
        ),
        "episodes.npy",
        "starts before the head",
    ),
    "a tail that goes back": (
        lambda v: v.write_record(a_live(v), tail=v.records[a_live(v) + 1].tail + 1),
        "episodes.npy",
        "smaller tail",
    ),
    "a tail beyond the head": (lambda v: v.write_record(a_live(v), tail=9999), "episodes.npy", "can't be right"),
    "an earlier time": (lambda v: v.write_record(a_live(v), time=3), "episodes.npy", "earlier time"),
    "an ordinal given before": (lambda v: v.write_record(a_live(v), ordinal=1), "episodes.npy", "given before"),
    "a wrong count of ordinals": (lambda v: v.write_record(a_live(v), behind=3), "episodes.npy", "given before"),
    "a chain of no part": (lambda v: v.write_record(a_live(v), chain=3), "episodes.npy", "but names one"),
    "too many steps": (with_too_many_steps, "episodes.npy", "14"),
    # state
    "state missing": (lambda v: os.remove(v.paths.state), "state.bin", "missing"),
    "state cut": (lambda v: v.cut("state.bin", 4100), "state.bin", "4100 bytes, expected 8192"),
    "state zeroed": (lambda v: v.edit("state.bin", 0, bytes(8192)), "state.bin", "neither state in it is valid"),
    "slot 0 torn": (lambda v: v.flip("state.bin", 30), "state.bin", "slot 0 is torn or damaged"),
    "slot 1 torn": (lambda v: v.flip("state.bin", 4096 + 87), "state.bin", "slot 1 is torn or damaged"),
    "slots exchanged": (
        lambda v: v.edit("state.bin", 0, (d := (v.folder / "state.bin").read_bytes())[4096:] + d[:4096]),
        "state.bin",
        "neither",
    ),
    "state disagrees": (
        lambda v: v.write_states({"tail": newest_state(v).tail - 1}),
        "state.bin",
        "disagrees with record 14",
    ),
    "state is old": (
        lambda v: v.write_states(
            *(
                {
                    "generation": newest_state(v).generation + i,
                    "seq": 10,
                    "first": v.records[10].first,
                    "tail": v.records[10].tail,
                    "head": v.records[10].head,
                }
                for i in (1, 2)
            )
        ),
        "state.bin",
        "shows record 10, but 14 is stored",
    ),
    # columns
    "column missing": (lambda v: os.remove(v.folder / PIXELS), PIXELS, "missing"),
    "column cut": (lambda v: v.cut(PIXELS, 4200), PIXELS, "has 4200 bytes, expected"),
    "column grown": (lambda v: v.edit(PIXELS, os.path.getsize(v.folder / PIXELS), b"x"), PIXELS, "expected"),
    "column's header": (lambda v: v.flip(PIXELS, 8), PIXELS, "header is not that"),
    "column's label": (lambda v: v.edit(PIXELS, -4000, b"x"), PIXELS, "label after the rows"),
    "a row": (lambda v: v.flip(PIXELS, row_of(v, "pixels", a_live(v)) + 3), PIXELS, "rows of record 10"),
    "the last byte of the ring": (lambda v: v.flip(OBS, row_of(v, "obs/x", a_live(v))), OBS, "rows of record 10"),
    "no column at all": (lambda v: (v.folder / PIXELS).write_bytes(bytes(5000)), PIXELS, "has 5000 bytes, expected"),
    # segments
    "a blob": (
        lambda v: v.flip(f"data/{v.records[9].blob_segment:012d}.bin", v.records[9].blob_offset + 3),
        "data/000000000009.bin",
        "blob of record 9",
    ),
    "segment missing": (
        lambda v: os.remove(v.folder / "data/000000000009.bin"),
        "data/000000000009.bin",
        "gone with its segment",
    ),
    "segment cut": (lambda v: v.cut("data/000000000009.bin", 20), "data/000000000009.bin", "blob of record 9"),
    "data missing": (lambda v: shutil.rmtree(v.paths.data), "data", "folder is missing"),
    "open missing": (lambda v: shutil.rmtree(v.paths.open), "open", "folder is missing"),
    # what is not ours
    "a file": (lambda v: (v.folder / "notes.txt").write_text("mine"), "notes.txt", "not part of a buffer"),
    "a folder": (lambda v: (v.folder / "backup").mkdir(), "backup", "not part of a buffer"),
    "a file in columns": (lambda v: (v.folder / "columns/x.npy").touch(), "columns/x.npy", "not part of a buffer"),
    "a file in data": (lambda v: (v.folder / "data/x").touch(), "data/x", "not part of a buffer"),
    "a file in open": (lambda v: (v.folder / "open/x").touch(), "open/x", "not part of a buffer"),
    "a pipe": (lambda v: os.mkfifo(v.folder / "pipe"), "pipe", "not part of a buffer"),
    "a link to a segment": (
        lambda v: (
            os.rename(v.folder / SEGMENT, v.folder.with_suffix(".x")),
            os.symlink(v.folder.with_suffix(".x"), v.folder / SEGMENT),
        ),
        SEGMENT,
        "is a symbolic link, expected a regular file",
    ),
    "a pipe for a segment": (
        lambda v: (os.remove(v.folder / SEGMENT), os.mkfifo(v.folder / SEGMENT)),
        SEGMENT,
        "is a pipe, expected a regular file",
    ),
    "a link to a column": (
        lambda v: (
            os.rename(v.folder / PIXELS, v.folder.with_suffix(".x")),
            os.symlink(v.folder.with_suffix(".x"), v.folder / PIXELS),
        ),
        PIXELS,
        "is a symbolic link",
    ),
}


@pytest.mark.parametrize("vandal", few(VANDALS, 25))
def test_vandal_is_found(place, vandal):
    v = Vandal(place / "a")
    breaks, file, what = VANDALS[vandal]
    assert ringmap.check(v.folder) == []
    breaks(v)
    findings = ringmap.check(v.folder)
    assert any(f.file == file and what in f.what for f in findings), findings
    assert str(findings[0]) == f"{findings[0].file}: {findings[0].what}"


def test_swapped_columns_are_found_and_named(place):
    v = Vandal(place / "a", "retiring")
    left, right = v.name("left"), v.name("right")
    v.swap(left, right)
    assert ringmap.check(v.folder) == [
        Finding(left, "swapped: it is column 'right' of this buffer"),
        Finding(right, "swapped: it is column 'left' of this buffer"),
    ]


def test_swapped_segments_are_damaged_blobs(place):
    """Nothing in a segment says which it is."""
    v = Vandal(place / "a")
    v.swap("data/000000000009.bin", "data/000000000011.bin")
    assert {finding.seq for finding in ringmap.check(v.folder)} == {9, 11}


def test_the_blob_of_a_clear_carries_the_sampling_state(place):
    v = Vandal(place / "a", "cleared")
    damaged_newest_blob(v)
    (finding,) = ringmap.check(v.folder)
    assert finding.file == f"data/{v.records[v.seq].blob_segment:012d}.bin"
    assert "small state" in finding.what


def a_frame(v):
    (path,) = v.folder.glob(STREAM)
    return path, str(path.relative_to(v.folder))


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (0, "frame 0"),  # the size of frame 0: now it seems to be cut
        (3, "frame 0"),
        (20, "frame 0"),
        (-13, "frame 4 is damaged"),
        (-200, "frame 2 is damaged"),
    ],
)
def test_damaged_stream_is_found(place, at, what):
    v = Vandal(place / "a", "killed")
    path, name = a_frame(v)
    data = bytearray(path.read_bytes())
    data[at] ^= 64
    path.write_bytes(data)
    (finding,) = ringmap.check(v.folder)
    assert finding.file == name
    assert what in finding.what


def test_size_of_a_step_is_checked(place):
    v = Vandal(place / "a", "killed")
    path, name = a_frame(v)
    data = path.read_bytes()
    at, size = 0, 0
    for _ in range(5):  # to frame 4
        at += size
        size = 12 + int.from_bytes(data[at : at + 4], "little")
    path.write_bytes(data[:at] + struct.pack("<I", size + 256) + data[at + 4 :])
    (finding,) = ringmap.check(v.folder)
    assert finding == Finding(name, "frame 4 is damaged; the 3 steps before it are whole")


@pytest.mark.parametrize("to", [0, 7, 40, -1, -50])
def test_a_stream_that_a_kill_cut_is_sound(place, to):
    v = Vandal(place / "a", "killed")
    path, _ = a_frame(v)
    os.truncate(path, to % path.stat().st_size if to else 0)
    assert ringmap.check(v.folder) == []


def test_check_goes_on_after_the_first_damage(place):
    v = Vandal(place / "a")
    os.remove(v.paths.manifest)
    v.flip(PIXELS, row_of(v, "pixels", a_live(v)))
    v.flip(OBS, 7)
    v.flip("episodes.npy", 4096 + 128 * 12)
    v.flip("state.bin", 9)
    named = {finding.file for finding in ringmap.check(v.folder)}
    assert named >= {"manifest.json", PIXELS, OBS, "episodes.npy", "state.bin"}


def test_a_column_without_label_is_named_when_the_manifest_is_lost_too(place):
    v = Vandal(place / "a")
    os.remove(v.paths.manifest)
    v.cut(PIXELS, 4500)
    assert {finding.file for finding in ringmap.check(v.folder)} == {"manifest.json", PIXELS}


def test_nothing_can_be_checked_without_any_manifest(place):
    ReplayBuffer(10, path=place / "a").close()
    (place / "a/manifest.json").write_text("{}")
    files = {finding.file for finding in ringmap.check(place / "a")}
    assert files == {"manifest.json"}


def test_newer_version_is_one_finding(place):
    v = Vandal(place / "a")
    body = json.loads((v.folder / "manifest.json").read_bytes())
    body["version"] = VERSION + 1
    body["surprise"] = True
    del body["checksum"]
    (v.folder / "manifest.json").write_text(json.dumps({**body, "checksum": json_checksum(body)}))
    (finding,) = ringmap.check(v.folder)
    assert (finding.file, "upgrade" in finding.what) == ("manifest.json", True)
    with pytest.raises(NewerVersionError):
        ringmap.repair(v.folder)


@pytest.mark.parametrize("change", [{"version": 1}, {"version": 2}, {"layout": "0" * 16}], ids=str)
def test_what_was_never_released_is_refused_by_name_before_a_lock_is_made(place, change):
    folder = Vandal(place / "a").folder
    body = json.loads((folder / "manifest.json").read_bytes()) | change
    del body["checksum"]
    (folder / "manifest.json").write_text(json.dumps({**body, "checksum": json_checksum(body)}))
    (folder / "lock").unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    words = "was made by an unreleased version of ringmap.*: record again"
    for call in (
        lambda: ringmap.ReplayBuffer(60, path=folder),
        lambda: ringmap.ReplayBuffer.open(folder),
        lambda: ringmap.ReplayBuffer.open(folder, "r+"),
        lambda: ringmap.TransitionReplayBuffer.open(folder),
        lambda: ringmap.repair(folder),
        lambda: ringmap.repair(folder, dry_run=False),
        lambda: ringmap.repair(folder, dry_run=False, to=place / "b"),
        lambda: facts_of(folder),
        lambda: ringmap.data.load_dataset(folder),
    ):
        with pytest.raises(UnreleasedVersionError, match=words):
            call()
    (finding,) = ringmap.check(folder)
    assert finding.file == "manifest.json"
    assert re.search(words, finding.what)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in place.iterdir()] == ["a"]


def test_no_buffer(place):
    with pytest.raises(UnknownFormatError, match="no buffer is there"):
        ringmap.check(place / "none")
    with pytest.raises(UnknownFormatError):
        ringmap.check(place)  # empty
    (place / "manifest.json").write_text('{"name": "of a web page"}')
    with pytest.raises(UnknownFormatError, match="no buffer is there"):
        ringmap.check(place)
    (place / "manifest.json").unlink()
    (place / "file").write_text("x")
    with pytest.raises(UnknownFormatError, match="holds something else"):
        ringmap.check(place)
    with pytest.raises(UnknownFormatError, match="is a file"):
        ringmap.check(place / "file")


def test_check_of_an_open_buffer_sees_what_is_in_memory(place):
    buf = ReplayBuffer(60, path=place / "a")
    for number in range(4):
        buf.write_episode(episode_of(number, 5))
    buf.sample(2)
    live = buf.engine.owned.live
    live._lengths._data[1] = 4
    found = [f for f in buf.check() if f.file == "memory"]
    assert any("counted" in f.what for f in found)
    assert any("an episode of 4 steps at position 5 is in memory, but not stored" in f.what for f in found)
    assert any("clip index" in f.what for f in found)
    live._lengths._data[1] = 5
    assert buf.check() == []
    live.evict_before(6)
    assert [f.what for f in buf.check() if "not in memory" in f.what] == [
        "the episode of record 1 is stored, but not in memory",
        "the episode of record 2 is stored, but not in memory",
    ]
    buf.close()


def test_check_of_a_buffer_in_ram_sees_its_rows():
    buf = ReplayBuffer(60)
    for number in range(4):
        buf.write_episode(episode_of(number, 5))
    files = buf.engine.owned.disk._tree
    name = next(name for name in files if name.endswith("pixels.npy"))
    files[name].data[4096 + 16 * 7] ^= 1
    assert [str(f) for f in buf.check()] == [f"{PIXELS}: rows of record 2 (positions 5 to 10) are damaged"]


def test_progress_is_told(place):
    v = Vandal(place / "a")
    told = []
    ringmap.check(v.folder, progress=lambda done, of: told.append((done, of)))
    assert told[-1] == (len(v.truth.episodes),) * 2


def test_a_byte_that_holds_nothing_is_no_finding(place):
    v = Vandal(place / "a")
    free = 4096 + 128 * (v.seq + 30)
    for name, at in [("state.bin", 200), ("state.bin", 8000), ("episodes.npy", free), ("lock", 3)]:
        v.flip(name, at)
    assert ringmap.check(v.folder) == []


def test_unreadable_file_is_a_finding(place):
    v = Vandal(place / "a")
    bad = row_of(v, "pixels", a_live(v))

    class BadSector(Disk):
        def open(self, path, write=False):
            file = super().open(path, write)
            if path.endswith("001-pixels.npy"):
                real = file

                class Bad:
                    path = real.path

                    def __getattr__(self, name):
                        return getattr(real, name)

                    def read(self, size, offset):
                        if offset <= bad < offset + size:
                            raise OSError(5, "Input/output error")
                        return real.read(size, offset)

                return Bad()
            return file

    findings = check_folder(BadSector(), str(v.folder))
    assert {finding.file for finding in findings} == {PIXELS}
    assert all("rows of record" in finding.what for finding in findings)


def test_a_chunk_that_a_writer_renames_meanwhile_is_no_stray(tmp_path):
    """`next.tmp` is there when the folder is listed, and is a chunk by the time it is looked at."""

    class Renaming(Disk):
        def names(self, path):
            found = super().names(path)
            return sorted([*found, "next.tmp"]) if path.endswith(".zarr") else found

    with ReplayBuffer(max_steps=20, path=tmp_path / "buf", storage="zarr", sync_every_s=0) as buf:
        buf.write_episode({"x": np.arange(5)})
    assert check_folder(Renaming(), str(tmp_path / "buf")) == []
    buf.close()
    next((tmp_path / "buf/columns").glob("*.zarr")).joinpath("next.tmp").mkdir()
    assert [one.what for one in ringmap.check(tmp_path / "buf")] == ["is not part of a buffer"]
