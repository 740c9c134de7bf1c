"""What breaks a sound buffer, by name: what `check` says of it, and what a repair costs.

A row of `DAMAGES` is a whole test: see test_damages.py.
"""

import contextlib
import dataclasses
import os
import shutil

from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import Paths
from ringmap.storage.records.manifest import read_manifest
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.table import EpisodeTable, Record
from tests.faults.damage.buffers import make

OBS, PIXELS, LAST = "columns/000-obs-x.npy", "columns/001-pixels.npy", "columns/003-name.npy"
SEGMENT, STREAM = "data/000000000009.bin", "open/*/steps.bin"
ZARR_OBS, ZARR = "columns/000-obs-x.zarr", "columns/001-pixels.zarr"


class Vandal:
    """A buffer to be broken, and the tools for it."""

    def __init__(self, folder, kind="wrapped"):
        self.folder, self.paths = folder, Paths(str(folder))
        self.truth = make(kind, folder)
        self.manifest = read_manifest(Disk(), str(folder))
        with self.table() as table:
            records, valid, _ = table.scan()
            self.records = {int(r["seq"]): Record.of(r) for r in records[valid]}
        self.seq = max(self.records)

    @property
    def a_live(self):
        return sorted(self.truth.episodes)[2]  # record 10 of a wrapped one

    def table(self):
        sizes = self.manifest.table_slots, self.manifest.uuid
        return contextlib.closing(EpisodeTable.open(Disk(), self.paths.table, *sizes, write=True))

    def name(self, column):
        return self.manifest.files[self.manifest.schema.names.index(column)]

    def row_of(self, column, seq):
        """Return where the first row of a record lies in the file of a column."""
        spec = self.manifest.schema.columns[self.manifest.schema.names.index(column)]
        return 4096 + self.records[seq].start % self.manifest.rows * spec.row_nbytes

    def edit(self, name, at, data):
        with open(self.folder / name, "r+b") as file:
            file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
            file.write(data)

    def flip(self, name, at, bit=4):
        data = bytearray((self.folder / name).read_bytes())
        data[at] ^= bit
        (self.folder / name).write_bytes(data)

    def flip_newest_blob(self):
        newest = self.records[self.seq]
        self.flip(f"data/{newest.blob_segment:012d}.bin", newest.blob_offset + 20)

    def cut(self, name, to):
        os.truncate(self.folder / name, to)

    def write_record(self, seq, **changes):
        with self.table() as table:
            table.write(self.records[seq]._replace(**changes))

    def newest_state(self):
        with contextlib.closing(Disk().open(self.paths.state)) as file:
            return StateFile(file, self.manifest.uuid).newest()

    def write_states(self, *changes):
        newest = self.newest_state()
        with contextlib.closing(Disk().open(self.paths.state, write=True)) as file:
            for change in changes:
                StateFile(file, self.manifest.uuid).write(newest._replace(**change))

    def swap(self, one, other):
        one, other, beside = self.folder / one, self.folder / other, self.folder / "beside"
        os.rename(one, beside)
        os.rename(other, one)
        os.rename(beside, other)

    def remove(self, name):
        path = self.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    # -- of compressed columns --

    def chunk_of(self, name, which=-1):
        """Return the file of a chunk that holds live rows, of one episode alone."""
        own = [f for f, c in self.truth.chunks.items() if f.startswith(name) and len({*c.live.values()}) == 1]
        return sorted(own)[which]

    @property
    def chunk(self):
        return self.chunk_of(ZARR)

    def rows_in(self, *chunks):
        return [seq for file in chunks for seq in self.truth.chunks[file].live.values()]


# -- ways to break something: `name` may be a function of the buffer, as `at` may --------------------------


def of(v, what):
    return what(v) if callable(what) else what


def removed(name):
    return lambda v: v.remove(of(v, name))


def cut(name, to):
    return lambda v: v.cut(of(v, name), to)


def grown(name, more=b"x"):
    return lambda v: v.edit(name, os.path.getsize(v.folder / name), more)


def flipped(name, at, bit=4):
    return lambda v: v.flip(of(v, name), of(v, at), bit)


def edited(name, at, data):
    return lambda v: v.edit(name, of(v, at), data)


def rewritten(name, change):
    return lambda v: (v.folder / name).write_bytes(change((v.folder / name).read_bytes()))


def record(**changes):
    """Write a live record again, its checksum right, with other values: numbers, or functions of record and next."""

    def breaks(v):
        one, after = v.records[v.a_live], v.records[v.a_live + 1]
        v.write_record(v.a_live, **{n: c(one, after) if callable(c) else c for n, c in changes.items()})

    return breaks


def linked(name):
    """Put a symbolic link in the place of a file or folder, which leads to it."""

    def breaks(v):
        os.rename(v.folder / name, v.folder.with_suffix(".x"))
        os.symlink(v.folder.with_suffix(".x"), v.folder / name)

    return breaks


def replaced(name, make):
    """Put something else in the place of a file or a folder: `make` takes the path."""

    def breaks(v):
        v.remove(of(v, name))
        make(v.folder / of(v, name))

    return breaks


def swapped(one, other):
    return lambda v: v.swap(of(v, one), of(v, other))


def of_another_buffer(name, kind="wrapped"):
    """Put the file or folder of another buffer in the place of ours."""

    def breaks(v):
        other, path = v.folder.with_suffix(".other"), of(v, name)
        make(kind, other, base=50)
        v.remove(path)
        (shutil.copytree if (other / path).is_dir() else shutil.copy)(other / path, v.folder / path)

    return breaks


def stray(name, data=b"mine"):
    return lambda v: (v.folder / name).write_bytes(data)


def misplaced(v):
    os.rename(v.folder / PIXELS, v.folder / "columns/pixels.npy")
    os.rename(v.folder / "manifest.json", v.folder / "manifest.json.bak")


def with_too_many_steps(v):
    oldest = min(s for s in v.records if v.records[s].live)
    changed = {"tail": v.records[oldest].start, "first": oldest}
    v.write_record(v.seq, **changed)
    generation = v.newest_state().generation
    v.write_states({**changed, "generation": generation + 1}, {**changed, "generation": generation + 2})
    assert v.records[v.seq].head - v.records[oldest].start > v.manifest.max_steps


def an_old_state(v):
    """Show record 10 in both slots."""
    shown, generation = v.records[10], v.newest_state().generation
    known = {"seq": 10, "first": shown.first, "tail": shown.tail, "head": shown.head}
    v.write_states({**known, "generation": generation + 1}, {**known, "generation": generation + 2})


def linked_to_another_chunk(v):
    path, other = v.folder / v.chunk_of(ZARR, 0), v.folder / v.chunk
    path.unlink()
    os.symlink(other, path)


def a_chunk_of_another_column(v):
    shutil.copy(v.folder / v.chunk_of(ZARR_OBS), v.folder / v.chunk)


def without_columns(v):
    (v.folder / "manifest.json").write_bytes(v.manifest.without_columns().encode())


def beyond(nbytes, column, width):
    """Return the records whose rows reach beyond so many bytes."""
    return lambda v: [s for s in v.truth.episodes if v.row_of(column, s) + width * v.records[s].length > nbytes]


def in_a_chunk(v):
    return v.rows_in(v.chunk)


@dataclasses.dataclass(frozen=True)
class Refused:
    """A repair refuses with these words, and changes nothing."""

    words: str


ALL = "all"
LEFT = "left alone"
FORGED = Refused("no accident does this, and nothing was changed")
"""Records whose checksums hold contradict each other."""
MANIFEST, TABLE, STATE = "manifest.json", "episodes.npy", "state.bin"
ROWS_OF_10 = "rows of record 10"
SLOT_10 = 4096 + 128 * 10
STRAY = "not part of a buffer"
VERSION = b'"version": 3'

DAMAGES = {
    "a pipe for a segment": (replaced(SEGMENT, os.mkfifo), SEGMENT, "is a pipe, expected a regular file", [9]),
    # manifest
    "manifest missing": (removed(MANIFEST), MANIFEST, "missing", []),
    "manifest a folder": (replaced(MANIFEST, os.mkdir), MANIFEST, "missing", []),
    "manifest not JSON": (cut(MANIFEST, 100), MANIFEST, "not valid JSON", []),
    "manifest edited": (
        rewritten(MANIFEST, lambda data: data.replace(b'"max_steps": 60', b'"max_steps": 61')),
        *(MANIFEST, "edited or damaged", []),
    ),
    "manifest's version made a new one": (
        rewritten(MANIFEST, lambda data: data.replace(VERSION, b'"version": 7')),
        *(MANIFEST, "edited or damaged", []),
    ),
    "manifest's version made an old one": (
        rewritten(MANIFEST, lambda data: data.replace(VERSION, b'"version": 2')),
        *(MANIFEST, "edited or damaged", []),
    ),
    "manifest without columns": (without_columns, MANIFEST, "old copy", []),
    # episode table
    "table missing": (removed(TABLE), TABLE, "missing", ALL),
    "table cut": (
        cut(TABLE, 5000),
        *(TABLE, "has 5000 bytes, expected", lambda v: [s for s in v.truth.episodes if 4224 + 128 * s > 5000]),
    ),
    "table grown": (grown(TABLE, bytes(99999)), TABLE, "expected", []),
    "table's header": (flipped(TABLE, 20), TABLE, "header", []),
    "a record": (flipped(TABLE, SLOT_10), TABLE, "record 10 is damaged", [10]),
    "a flag": (flipped(TABLE, SLOT_10 + 113, 64), TABLE, "record 10 has a damaged flag", []),
    "two records": (edited(TABLE, SLOT_10, bytes(256)), TABLE, "records 10 to 11", [10, 11]),
    "the newest record": (flipped(TABLE, 4096 + 128 * 14 + 70), TABLE, "record 14 is damaged or missing", [14]),
    "all records": (edited(TABLE, 4096, bytes(128 * 184)), TABLE, "records", ALL),
    "a gap in positions": (
        record(start=lambda one, _: one.start + 1, length=lambda one, _: one.length - 1),
        *(TABLE, "starts before the head", FORGED),
    ),
    "a tail that goes back": (record(tail=lambda _, after: after.tail + 1), TABLE, "smaller tail", FORGED),
    "a tail beyond the head": (record(tail=9999), TABLE, "can't be right", FORGED),
    "an earlier time": (record(time=3), TABLE, "earlier time", FORGED),
    "an ordinal given before": (record(ordinal=1), TABLE, "given before", FORGED),
    "a wrong count of ordinals": (record(behind=3), TABLE, "given before", FORGED),
    "a chain of no part": (record(chain=3), TABLE, "but names one", FORGED),
    "too many steps": (with_too_many_steps, TABLE, "14", FORGED),
    # state
    "state missing": (removed(STATE), STATE, "missing", []),
    "state cut": (cut(STATE, 4100), STATE, "4100 bytes, expected 8192", []),
    "state zeroed": (edited(STATE, 0, bytes(8192)), STATE, "neither state in it is valid", []),
    "slot 0 torn": (flipped(STATE, 30), STATE, "slot 0 is torn or damaged", []),
    "slot 1 torn": (flipped(STATE, 4096 + 87), STATE, "slot 1 is torn or damaged", []),
    "slots exchanged": (rewritten(STATE, lambda data: data[4096:] + data[:4096]), STATE, "neither", []),
    "a pipe for the state": (replaced(STATE, os.mkfifo), STATE, "is a pipe, expected a regular file", []),
    "a pipe for a column": (replaced(PIXELS, os.mkfifo), PIXELS, "is a pipe, expected a regular file", ALL),
    "state disagrees": (
        lambda v: v.write_states({"tail": v.newest_state().tail - 1}),
        *(STATE, "disagrees with record 14", []),
    ),
    "state is old": (an_old_state, STATE, "shows record 10, but 14 is stored", []),
    # columns
    "column missing": (removed(PIXELS), PIXELS, "missing", ALL),
    "column cut": (cut(PIXELS, 4200), PIXELS, "has 4200 bytes, expected", beyond(4200, "pixels", 16)),
    "column grown": (grown(PIXELS), PIXELS, "expected", []),
    "column's header": (flipped(PIXELS, 8), PIXELS, "header is not that", []),
    "column's label": (edited(PIXELS, -4000, b"x"), PIXELS, "label after the rows", []),
    "a row": (flipped(PIXELS, lambda v: v.row_of("pixels", 10) + 3), PIXELS, ROWS_OF_10, [10]),
    "a row of another column": (flipped(OBS, lambda v: v.row_of("obs/x", 10)), OBS, ROWS_OF_10, [10]),
    "no column at all": (stray(PIXELS, bytes(5000)), PIXELS, "has 5000 bytes, expected", ALL),
    "a link to a column": (linked(PIXELS), PIXELS, "is a symbolic link", ALL),
    # segments
    "a blob": (flipped(SEGMENT, lambda v: v.records[9].blob_offset + 3), SEGMENT, "blob of record 9", [9]),
    "segment missing": (removed(SEGMENT), SEGMENT, "gone with its segment", [9]),
    "segment cut": (cut(SEGMENT, 20), SEGMENT, "blob of record 9", [9]),
    "data missing": (removed("data"), "data", "folder is missing", ALL),
    "open missing": (removed("open"), "open", "folder is missing", []),
    "a link to a segment": (linked(SEGMENT), SEGMENT, "is a symbolic link, expected a regular file", [9]),
    # what is not ours
    "a file": (stray("notes.txt"), "notes.txt", STRAY, LEFT),
    "a folder": (lambda v: (v.folder / "backup").mkdir(), "backup", STRAY, LEFT),
    "a file in columns": (stray("columns/x.npy"), "columns/x.npy", STRAY, LEFT),
    "a file in data": (stray("data/x"), "data/x", STRAY, LEFT),
    "a file in open": (stray("open/x"), "open/x", STRAY, LEFT),
    "a pipe": (lambda v: os.mkfifo(v.folder / "pipe"), "pipe", STRAY, LEFT),
    # what lies elsewhere
    "two columns": (swapped(OBS, PIXELS), OBS, "swapped", Refused("it is column 'pixels' of this buffer")),
    "a column and the table": (
        swapped(OBS, TABLE),
        *(TABLE, "", Refused("it is column 'obs/x'|it is an episode table")),
    ),
    "a column and a segment": (
        swapped(OBS, "data/000000000010.bin"),
        *(OBS, "", Refused("it is column 'obs/x' of this buffer")),
    ),
    "a column and the state": (swapped(OBS, STATE), OBS, "", Refused("it is column 'obs/x'|it is a state file")),
    "a column and the lock": (
        swapped(OBS, "lock"),
        *(OBS, "", Refused("lock: swapped: it is column 'obs/x' of this buffer")),
    ),
    "table and state": (swapped(TABLE, STATE), TABLE, "", Refused("it is an episode table|it is a state file")),
    "table and manifest": (swapped(TABLE, MANIFEST), TABLE, "", Refused("it is a manifest|it is an episode table")),
    "state and a segment": (swapped(STATE, "data/000000000010.bin"), STATE, "", Refused("it is a state file")),
    "a column of another buffer": (
        of_another_buffer(PIXELS),
        *(PIXELS, "another buffer", Refused("it is column 'pixels' of another buffer")),
    ),
    "a table of another buffer": (of_another_buffer(TABLE), TABLE, "", Refused("is of another buffer")),
    "a manifest of another buffer": (
        of_another_buffer(MANIFEST),
        *(MANIFEST, "another buffer", Refused("belongs to another buffer")),
    ),
    "misplaced": (misplaced, MANIFEST, "missing", Refused("can't be made again")),
}
"""Name -> what breaks a wrapped buffer; the file and words of a finding; what a repair does: records that it costs (a
list, ALL, or a function of the buffer), `Refused`, or LEFT."""

ZARR_JSON = f"{ZARR}/zarr.json"
OF_ANOTHER = Refused("it is column 'pixels' of another buffer")
OF_BOTH = Refused("it is column 'obs/x' of this buffer|it is column 'pixels' of this buffer")
IN_CHUNKS = {
    "a chunk missing": (removed(lambda v: v.chunk), ZARR, ".0.0 is missing", in_a_chunk),
    "a chunk cut": (cut(lambda v: v.chunk, 11), ZARR, "does not match its checksum", in_a_chunk),
    "a chunk flipped": (flipped(lambda v: v.chunk, 30), ZARR, "does not match its checksum", in_a_chunk),
    "two chunks swapped": (
        swapped(lambda v: v.chunk_of(ZARR, 0), lambda v: v.chunk),
        *(ZARR, "are damaged", lambda v: v.rows_in(v.chunk_of(ZARR, 0), v.chunk)),
    ),
    "a chunk of another column": (a_chunk_of_another_column, ZARR, "are damaged: c.", in_a_chunk),
    "a chunk of another buffer": (
        of_another_buffer(lambda v: v.chunk, "wrapped zarr"),
        *(ZARR, "are damaged", in_a_chunk),
    ),
    "a chunk that is a folder": (
        replaced(lambda v: v.chunk, os.mkdir),
        *(ZARR, "is a folder, expected a file", in_a_chunk),
    ),
    "a chunk that links to another": (
        linked_to_another_chunk,
        *(ZARR, "are damaged", lambda v: v.rows_in(v.chunk_of(ZARR, 0))),
    ),
    "no chunk at all": (lambda v: [p.unlink() for p in (v.folder / ZARR).glob("c.*")], ZARR, "is missing", ALL),
    "no folder": (removed(ZARR), ZARR, "column folder is missing", ALL),
    "a folder that is a link": (linked(ZARR), ZARR, "column folder is a symbolic link, expected a folder", ALL),
    "a folder that is a file": (
        replaced(ZARR, lambda path: path.write_bytes(b"mine")),
        *(ZARR, "column folder is a file, expected a folder", Refused("is a file, expected a folder")),
    ),
    "a folder of another buffer": (of_another_buffer(ZARR, "wrapped zarr"), ZARR, "of another buffer", OF_ANOTHER),
    "zarr.json missing": (removed(ZARR_JSON), ZARR, "zarr.json is missing", []),
    "zarr.json empty": (rewritten(ZARR_JSON, lambda data: b""), ZARR, "zarr.json is not that of", []),
    "zarr.json edited": (rewritten(ZARR_JSON, lambda data: data.replace(b"120", b"121", 1)), ZARR, "damaged", []),
    "zarr.json with another layout": (rewritten(ZARR_JSON, lambda data: data + b" "), ZARR, "damaged", []),
    "zarr.json of another column": (
        swapped(f"{ZARR_OBS}/zarr.json", ZARR_JSON),
        *(ZARR, "it is column 'obs/x' of this buffer", OF_BOTH),
    ),
    "zarr.json of another buffer": (
        of_another_buffer(ZARR_JSON, "wrapped zarr"),
        *(ZARR, "it is column 'pixels' of another buffer", OF_ANOTHER),
    ),
    "two folders swapped": (
        swapped(ZARR_OBS, ZARR),
        *(ZARR, "swapped: it is column 'obs/x' of this buffer", OF_BOTH),
    ),
    "a folder misplaced": (
        lambda v: os.rename(v.folder / ZARR, v.folder / "pixels"),
        *(ZARR, "column folder is missing", Refused("pixels: swapped: it is column 'pixels' of this buffer")),
    ),
}
"""The same of a wrapped buffer of compressed columns."""
