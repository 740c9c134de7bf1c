"""Compressed columns that were damaged by hand: what check says of each, and what a repair keeps."""

import os
import shutil

import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import CorruptError
from tests.faults.damage.buffers import make
from tests.faults.damage.fuzz import bytes_in
from tests.faults.damage.test_check import Vandal
from tests.faults.damage.test_repair import mended
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("no_waiting")

OBS, PIXELS = "columns/000-obs-x.zarr", "columns/001-pixels.zarr"
LEFT, RIGHT = "columns/004-left.zarr", "columns/005-right.zarr"


def chunk_of(v, name, which=-1):
    """Return the file of a chunk that holds live rows, of one episode alone."""
    own = [f for f, c in v.truth.chunks.items() if f.startswith(name) and len({*c.live.values()}) == 1]
    return sorted(own)[which]


def lost_with(v, *files):
    return {seq for file in files for seq in v.truth.chunks[file].live.values()}


def remove_chunk(v):
    os.remove(v.folder / chunk_of(v, PIXELS))
    return lost_with(v, chunk_of(v, PIXELS))


def cut_chunk(v):
    v.cut(chunk_of(v, PIXELS), 11)
    return lost_with(v, chunk_of(v, PIXELS))


def flip_chunk(v):
    v.flip(chunk_of(v, PIXELS), 30)
    return lost_with(v, chunk_of(v, PIXELS))


def swap_chunks(v):
    one, other = chunk_of(v, PIXELS, 0), chunk_of(v, PIXELS, -1)
    v.swap(one, other)
    return lost_with(v, one, other)


def chunk_of_another_column(v):
    shutil.copy(v.folder / chunk_of(v, OBS), v.folder / chunk_of(v, PIXELS))
    return lost_with(v, chunk_of(v, PIXELS))


def chunk_of_another_buffer(v):
    other = v.folder.with_suffix(".other")
    make("wrapped zarr", other, base=500)
    shutil.copy(other / chunk_of(v, PIXELS), v.folder / chunk_of(v, PIXELS))
    return lost_with(v, chunk_of(v, PIXELS))


def chunk_a_folder(v):
    path = v.folder / chunk_of(v, PIXELS)
    path.unlink()
    path.mkdir()
    return lost_with(v, chunk_of(v, PIXELS))


def link_to_another_chunk(v):
    path, other = v.folder / chunk_of(v, PIXELS, 0), v.folder / chunk_of(v, PIXELS, -1)
    path.unlink()
    os.symlink(other, path)
    return lost_with(v, chunk_of(v, PIXELS, 0))


def no_chunks(v):
    for path in (v.folder / PIXELS).glob("c.*"):
        path.unlink()
    return "all"


def no_folder(v):
    shutil.rmtree(v.folder / PIXELS)
    return "all"


def folder_a_link(v):
    os.rename(v.folder / PIXELS, v.folder.with_suffix(".x"))
    os.symlink(v.folder.with_suffix(".x"), v.folder / PIXELS)
    return "all"


def folder_a_file(v):
    shutil.rmtree(v.folder / PIXELS)
    (v.folder / PIXELS).write_bytes(b"mine")
    return "all"


def folder_of_another_buffer(v):
    other = v.folder.with_suffix(".other")
    make("wrapped zarr", other, base=500)
    shutil.rmtree(v.folder / PIXELS)
    shutil.copytree(other / PIXELS, v.folder / PIXELS)
    return "all"


def json_edit(change):
    def vandal(v):
        path = v.folder / PIXELS / "zarr.json"
        path.write_bytes(change(path.read_bytes()))
        return set()

    return vandal


def json_missing(v):
    os.remove(v.folder / PIXELS / "zarr.json")
    return set()


def json_of_another_column(v):
    v.swap(f"{OBS}/zarr.json", f"{PIXELS}/zarr.json")
    return set()


def json_of_another_buffer(v):
    other = v.folder.with_suffix(".other")
    make("wrapped zarr", other, base=500)
    shutil.copy(other / PIXELS / "zarr.json", v.folder / PIXELS / "zarr.json")
    return set()


def folders_swapped(v):
    v.swap(OBS, PIXELS)
    return set()


def folder_misplaced(v):
    os.rename(v.folder / PIXELS, v.folder / "pixels")
    return set()


VANDALS = {
    "a chunk missing": (remove_chunk, ".0.0 is missing"),
    "a chunk cut": (cut_chunk, "does not match its checksum"),
    "a chunk flipped": (flip_chunk, "does not match its checksum"),
    "two chunks swapped": (swap_chunks, "are damaged"),
    "a chunk of another column": (chunk_of_another_column, "are damaged: c."),
    "a chunk of another buffer": (chunk_of_another_buffer, "are damaged"),
    "a chunk that is a folder": (chunk_a_folder, "is a folder, expected a file"),
    "a chunk that links to another": (link_to_another_chunk, "are damaged"),
    "no chunk at all": (no_chunks, "is missing"),
    "no folder": (no_folder, "column folder is missing"),
    "a folder that is a link": (
        folder_a_link,
        "column folder is a symbolic link, expected a folder",
    ),
    "a folder that is a file": (folder_a_file, "column folder is a file, expected a folder"),
    "a folder of another buffer": (folder_of_another_buffer, "of another buffer"),
    "zarr.json missing": (json_missing, "zarr.json is missing"),
    "zarr.json empty": (json_edit(lambda data: b""), "zarr.json is not that of"),
    "zarr.json edited": (json_edit(lambda data: data.replace(b"120", b"121", 1)), "damaged"),
    "zarr.json with another layout": (json_edit(lambda data: data + b" "), "damaged"),
    "zarr.json of another column": (json_of_another_column, "it is column 'obs/x' of this buffer"),
    "zarr.json of another buffer": (json_of_another_buffer, "it is column 'pixels' of another buffer"),
    "two folders swapped": (folders_swapped, "swapped: it is column 'obs/x' of this buffer"),
    "a folder misplaced": (folder_misplaced, "column folder is missing"),
}


@pytest.mark.parametrize("vandal", few(VANDALS, 6))
def test_what_is_damaged_is_named_never_served_and_repaired(place, vandal):
    v = Vandal(place / "a", "wrapped zarr")
    assert ringmap.check(v.folder) == []
    breaks, what = VANDALS[vandal]
    lost = breaks(v)
    findings = ringmap.check(v.folder)
    assert any(f.file == PIXELS and what in f.what for f in findings), findings
    for mode in ("r", "r+"):
        serves_nothing_wrong(v, mode)
    if vandal in NAMED:
        before = bytes_in(v.folder)
        for dry_run in (True, False):
            with pytest.raises(CorruptError, match=NAMED[vandal]):
                ringmap.repair(v.folder, dry_run=dry_run)
        assert bytes_in(v.folder) == before
        return
    expected = [] if lost == "all" else [seq for seq in v.truth.episodes if seq not in lost]
    assert mended(v, [f.file for f in findings if "not part" in f.what]) == expected


NAMED = {
    "a folder that is a file": "is a file, expected a folder",
    "a folder of another buffer": "it is column 'pixels' of another buffer",
    "zarr.json of another column": "it is column 'obs/x' of this buffer|it is column 'pixels' of this buffer",
    "zarr.json of another buffer": "it is column 'pixels' of another buffer",
    "two folders swapped": "it is column 'obs/x' of this buffer|it is column 'pixels' of this buffer",
    "a folder misplaced": "pixels: swapped: it is column 'pixels' of this buffer",
}
"""What is something else by its `zarr.json` is named; nothing is changed, so nothing is lost."""


def serves_nothing_wrong(v, mode):
    copy = v.folder.with_suffix(".copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(v.folder, copy, symlinks=True)
    try:
        buf = ReplayBuffer.open(copy, mode)
    except CorruptError as error:
        assert "columns/" in str(error)
        return
    for i in range(buf.num_episodes):
        try:
            columns = buf.load_episode(i)
        except (CorruptError, OSError) as error:
            assert "columns/" in str(error) or "pixels" in str(error)
            continue
        number = int(str(columns["name"][0]).partition(":")[0])
        for name, rows in v.truth.rows(number).items():
            assert (columns[name] == rows).all()
    buf.close()


def test_what_is_not_ours_is_named_and_left_alone(place):
    v = Vandal(place / "a", "wrapped zarr")
    names = ["notes.txt", "c.1.0", "c.9999.0.0", "c.01.0.0"]
    for name in names:
        (v.folder / PIXELS / name).write_bytes(b"mine")
    (v.folder / PIXELS / "folder").mkdir()
    os.symlink(v.folder / "lock", v.folder / PIXELS / "link")
    findings = ringmap.check(v.folder)
    assert {f.file for f in findings} == {f"{PIXELS}/{n}" for n in [*names, "folder", "link"]}
    assert {f.what for f in findings} == {"is not part of a buffer"}
    os.remove(v.folder / PIXELS / "link")
    before = bytes_in(v.folder)
    assert ringmap.repair(v.folder, dry_run=False) == []
    after = bytes_in(v.folder)
    assert {name for name in before if before[name] != after.get(name)} <= {"lock"}
