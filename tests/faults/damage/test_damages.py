"""Each damage by name: `check` finds it, no opening serves anything wrong, and a repair costs what it must."""

import contextlib
import os
import shutil

import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import CorruptError, RingmapError
from tests.faults.damage.buffers import served
from tests.faults.damage.fuzz import bytes_in, readable
from tests.faults.damage.vandals import ALL, DAMAGES, IN_CHUNKS, LEFT, ZARR, Refused, Vandal
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


def changed(folder, before):
    """Return the files that are not as before, but for the lock."""
    after = bytes_in(folder)
    return {name for name in {*before, *after} if before.get(name) != after.get(name)} - {"lock"}


def serves_nothing_wrong(v, mode):
    copy = v.folder.with_suffix(".copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(v.folder, copy, symlinks=True)
    with contextlib.suppress(RingmapError), contextlib.closing(ReplayBuffer.open(copy, mode)) as buf:
        for number, columns, data in readable(buf):
            assert v.truth.fault(number, columns, data) is None
    shutil.rmtree(copy)


EVERY = [(name, "wrapped") for name in DAMAGES] + [(name, "wrapped zarr") for name in IN_CHUNKS]


@pytest.mark.parametrize(("name", "kind"), few([*EVERY[::3], *EVERY[1::3], *EVERY[2::3]], len(EVERY) // 3))
def test_what_is_damaged_is_found_never_served_and_mended(place, name, kind):
    v = Vandal(place / "a", kind)
    assert ringmap.check(v.folder) == []
    sound = bytes_in(v.folder)
    breaks, file, what, cost = (DAMAGES if kind == "wrapped" else IN_CHUNKS)[name]
    lost = cost(v) if callable(cost) else cost
    breaks(v)
    findings = ringmap.check(v.folder)
    assert any(f.file == file and what in f.what for f in findings), findings
    assert str(findings[0]) == f"{findings[0].file}: {findings[0].what}"
    if not any(path.is_fifo() for path in v.folder.rglob("*")):  # which can't be copied
        for mode in ("r", "r+"):
            serves_nothing_wrong(v, mode)
    if lost == LEFT:
        before = bytes_in(v.folder)
        assert ringmap.repair(v.folder, dry_run=False) == []
        assert changed(v.folder, before) == set()
        assert {finding.file for finding in ringmap.check(v.folder)} == {file}
    elif isinstance(lost, Refused):
        before = bytes_in(v.folder)
        for dry_run in (True, False):
            with pytest.raises(CorruptError, match=lost.words):
                ringmap.repair(v.folder, dry_run)
        assert changed(v.folder, before) == set()
        put_back(v.folder, sound)  # all is there
        assert ringmap.check(v.folder) == []
        assert kept(v.folder, v.truth) == list(v.truth.episodes)
    else:
        expected = [] if lost == ALL else [seq for seq in v.truth.episodes if seq not in lost]
        assert mended(v, [f.file for f in findings if "not part" in f.what]) == expected


def put_back(folder, files):
    shutil.rmtree(folder)
    for name in ("columns", "data", "open"):
        (folder / name).mkdir(parents=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def test_what_is_not_ours_is_named_and_left_alone_in_a_folder_of_chunks(place):
    v = Vandal(place / "a", "wrapped zarr")
    names = ["notes.txt", "c.1.0", "c.9999.0.0", "c.01.0.0"]
    for name in names:
        (v.folder / ZARR / name).write_bytes(b"mine")
    (v.folder / ZARR / "folder").mkdir()
    os.symlink(v.folder / "lock", v.folder / ZARR / "link")
    findings = ringmap.check(v.folder)
    assert {f.file for f in findings} == {f"{ZARR}/{n}" for n in [*names, "folder", "link"]}
    assert {f.what for f in findings} == {"is not part of a buffer"}
    os.remove(v.folder / ZARR / "link")  # into the lock, which a repair writes
    before = bytes_in(v.folder)
    assert ringmap.repair(v.folder, dry_run=False) == []
    assert changed(v.folder, before) == set()


def test_sound_buffer_is_left_alone(place):
    v = Vandal(place / "a")
    before = bytes_in(v.folder)
    assert ringmap.repair(v.folder, dry_run=False) == []
    assert changed(v.folder, before) == set()
