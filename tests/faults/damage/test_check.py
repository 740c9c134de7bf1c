import itertools
import json
import os
import re
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
from ringmap.storage.inspect import check as checking
from ringmap.storage.inspect.check import Finding, check_folder
from ringmap.storage.inspect.describe import facts_of
from ringmap.storage.inspect.repair import repair_folder
from ringmap.storage.records.manifest import VERSION
from tests.faults.damage.buffers import KINDS, episode_of, make
from tests.faults.damage.vandals import OBS, PIXELS, STREAM, Vandal

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


@pytest.mark.parametrize(
    "every", [9, pytest.param(2, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.campaign)]
)
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


# -- damages that more than a name and words tell of; the others: test_damages.py -------------------------


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
    v.flip_newest_blob()
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
    v.flip(PIXELS, v.row_of("pixels", v.a_live))
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
    bad = v.row_of("pixels", v.a_live)

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
