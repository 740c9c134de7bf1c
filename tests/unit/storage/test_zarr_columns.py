"""The Zarr column: the conformance suite, and what is its own: codecs, chunks, the cache, what lies in its folder."""

import json
import os
import shutil
import sys
import threading
from typing import ClassVar

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmap.errors import CorruptError, InputError
from ringmap.storage.columns.backends import Zarr, check_storage, choose
from ringmap.storage.columns.base import Undecodable
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.columns.zarr import NAMED, ChunkCache, Codec, ZarrColumn, chunk_steps, read_zarr_label
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.testing.columns import SPECS, ColumnTests, rows_of
from tests.zarr_chunks import ByZarr

FEW = [
    ColumnSpec("obs", shape, np.dtype(dtype))
    for shape, dtype in (((), "?"), ((3,), "f4"), ((2, 2), "i8"), ((4, 3), "u1"))
]
SUITED = [spec for spec in SPECS if ZarrColumn.suits(spec)]
PIXELS = ColumnSpec("obs", (4, 3), np.dtype("u1"))


def label_of(spec, steps, codecs="zstd"):
    return {"uuid": "00" * 16, "column": 0, "name": spec.name, "codecs": codecs, "chunk_steps": steps}


class TestZarrOnDisk(ColumnTests):
    backend, options = ZarrColumn, {"codecs": "zstd", "chunk_steps": 8}


class TestZarrInRam(TestZarrOnDisk):
    specs = FEW

    @pytest.fixture
    def disk(self):
        return MemoryDisk()


class TestZarrOfOddChunks(TestZarrOnDisk):
    """Chunks that divide nothing, and another codec."""

    specs, options = FEW, {"codecs": "lz4", "chunk_steps": 5}


class TestZarrOfSingleSteps(TestZarrOnDisk):
    specs, options = FEW, {"codecs": "none", "chunk_steps": 1}


@pytest.mark.campaign
class TestZarrOfSingleStepsForLonger(TestZarrOfSingleSteps):
    num_writes = 200


class TestZarrOfOneChunk(TestZarrOnDisk):
    specs, options = FEW, {"codecs": "zstd", "chunk_steps": 100}


class Zarrs:
    """Makes Zarr columns on one disk, and opens them again."""

    def __init__(self, disk, folder, steps=8, codecs="zstd"):
        self.disk, self.folder = disk, folder
        self.steps, self.codecs = steps, codecs
        self.made = 0

    def make(self, spec, rows):
        self.made += 1
        path = os.path.join(self.folder, f"{self.made:03d}.zarr")
        column = ZarrColumn(self.disk, path, spec, rows, label_of(spec, self.steps, self.codecs))
        column.create()
        return column.open(write=True)

    def reopen(self, column, write=False):
        return ZarrColumn(self.disk, column.path, column.spec, column.rows, column.label).open(write)


# -- codecs ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(NAMED)),
    st.sampled_from(SUITED),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_the_direct_way_is_zarrs_own(name, spec, steps, seed):
    direct, through = Codec(name, spec, steps), ByZarr(name, spec, steps)
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 2, (steps, spec.row_nbytes), np.uint8)
    if spec.dtype.kind != "b":
        rows *= rng.integers(0, 256, rows.shape, np.uint8)
    for one, other in ((direct, through), (through, direct), (direct, direct)):
        out = np.full_like(rows, 3)
        other.decode(one.encode(rows), out)
        assert (out == rows).all()


@pytest.mark.parametrize("bad", ["brotli", 5, [], [zarr.codecs.GzipCodec()], ["zstd"]])
def test_what_names_no_chain_is_refused(bad):
    words = r"unknown codecs .*; expected one of \['lz4', 'none', 'zstd'\]"
    with pytest.raises(InputError, match=words):
        check_storage({"obs": Zarr(bad)}, "test")


@pytest.mark.parametrize("name", NAMED)
def test_a_changed_byte_is_never_decoded(name):
    codec = Codec(name, PIXELS, 4)
    rows = rows_of(PIXELS, 4).reshape(4, -1)
    data = codec.encode(rows)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        with pytest.raises(Undecodable):
            codec.decode(bytes(flipped), np.empty_like(rows))
    for cut in range(len(data)):
        with pytest.raises(Undecodable):
            codec.decode(data[:cut], np.empty_like(rows))


def test_a_header_that_names_another_size_is_not_believed():
    """The checksum holds: whoever wrote this wanted it so."""
    codec = Codec("zstd", PIXELS, 4)
    rows = rows_of(PIXELS, 4).reshape(4, -1)
    other = Codec("zstd", PIXELS, 5).encode(rows_of(PIXELS, 5).reshape(5, -1))
    with pytest.raises(Undecodable, match="holds 60 bytes, expected 48"):
        codec.decode(other, np.empty_like(rows))


# -- how columns are stored ----------------------------------------------------------------------------


def test_strings_dates_and_empty_rows_stay_memmaps():
    specs = [ColumnSpec(str(i), spec.shape, spec.dtype) for i, spec in enumerate(SPECS)]
    chosen = choose("zarr", Schema(tuple(specs)), "test")
    for spec, choice in zip(specs, chosen, strict=True):
        wanted = "zarr" if spec.dtype.kind in "biufc" and spec.row_nbytes else "memmap"
        assert choice.backend == wanted


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        (Zarr(chunk_steps=0), "chunk_steps must be positive"),
        (Zarr(chunk_steps=2.5), "chunk_steps must be positive"),
        (7, "storage must be one of"),
        ({"obs": ["zarr"]}, r"unknown storage \['zarr'\]"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(storage, words):
    with pytest.raises(InputError, match=words):
        check_storage(storage, "test")


def test_chunks_beyond_all_measure_are_refused():
    with pytest.raises(InputError, match="make chunks of .* bytes, expected at most"):
        choose(Zarr(chunk_steps=1 << 40), Schema((PIXELS,)), "test")


def test_chunks_suit_their_rows():
    for shape, steps in (
        ((), 16384),
        ((4,), 4096),
        ((64, 64, 3), 8),
        ((96, 96, 3), 8),
        ((640, 480, 3), 1),
    ):
        assert chunk_steps(ColumnSpec("obs", shape, np.dtype("u1"))) == steps


# -- the folder ------------------------------------------------------------------------------------------


@pytest.fixture
def column(tmp_path):
    made = Zarrs(Disk(), str(tmp_path)).make(PIXELS, 37)
    made.write(0, rows_of(PIXELS, 37))
    return made


@pytest.mark.parametrize("spec", SUITED, ids=lambda spec: f"{spec.shape}-{spec.dtype.str}")
def test_plain_zarr_reads_every_dtype(tmp_path, spec):
    column, rows = Zarrs(Disk(), str(tmp_path)).make(spec, 20), rows_of(spec, 11)
    column.write(4, rows)
    array = zarr.open_array(column.path, mode="r")
    assert (array.dtype, array.shape, array.chunks) == (spec.dtype, (20, *spec.shape), (8, *spec.shape))
    assert array.attrs["ringmap"] == column.label
    assert array[4:15].tobytes() == rows.tobytes()
    assert (array[:4] == 0).all()  # never written: the fill value
    assert (column.read(0, 4) == 0).all()


def test_zarr_json_is_as_zarr_would_write_it(column, tmp_path):
    theirs = zarr.create_array(
        tmp_path / "theirs",
        shape=(37, 4, 3),
        chunks=(8, 4, 3),
        dtype="u1",
        fill_value=0,
        compressors=[zarr.codecs.BloscCodec(cname="zstd", clevel=3, shuffle="shuffle"), zarr.codecs.Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    with open(tmp_path / "theirs" / "zarr.json") as file:
        expected = json.load(file)
    with open(os.path.join(column.path, "zarr.json")) as file:
        ours = json.load(file)
    del expected["attributes"], ours["attributes"], expected["storage_transformers"]
    assert ours == expected
    assert theirs.shape == (37, 4, 3)


def test_faults_of_the_folder_are_named(column):
    faults = column.faults
    path = os.path.join(column.path, "zarr.json")
    with open(path, "rb") as file:
        whole = file.read()
    assert faults() == []
    with open(path, "wb") as file:
        file.write(whole.replace(b"37", b"38", 1))
    assert faults() == ["zarr.json is not that of 37 rows of 'obs' (4, 3) uint8: damaged"]
    foreign = {**column.label, "column": 1}
    ZarrColumn(Disk(), column.path, PIXELS, 37, foreign).repair()
    assert faults() == ["zarr.json is not that of this column: swapped or foreign folder"]
    os.unlink(path)
    assert faults() == ["zarr.json is missing"]
    column.repair()
    assert faults() == []
    with open(path, "rb") as file:
        assert file.read() == whole
    for name in ("c.5.0.0", "c.00.0.0", "c.1.0", "notes.txt", "c.-1.0.0"):
        shutil.copy(path, os.path.join(column.path, name))
    for name in ("next.tmp",):
        shutil.copy(path, os.path.join(column.path, name))
    strays = column.strays()
    assert strays == ["c.-1.0.0", "c.00.0.0", "c.1.0", "c.5.0.0", "notes.txt"]
    shutil.rmtree(column.path)
    assert faults() == ["column folder is missing"]


def chunk_file(column, chunk):
    return os.path.join(column.path, f"c.{chunk}.0.0")


def damage(column, chunk):
    with open(chunk_file(column, chunk), "r+b") as file:
        file.seek(20)
        file.write(b"????")


def remove(column, chunk):
    os.unlink(chunk_file(column, chunk))


HURTS = {damage: "does not match its checksum", remove: "is missing"}
hurts = pytest.mark.parametrize("hurt", HURTS, ids=lambda hurt: hurt.__name__)


@hurts
def test_a_damaged_chunk_is_named_and_not_served(column, hurt):
    hurt(column, 2)
    with pytest.raises(CorruptError, match=rf"c\.2\.0\.0: {HURTS[hurt]}; run ringmap.check"):
        column.take(np.arange(10, 20))
    with pytest.raises(CorruptError, match=r"c\.2\.0\.0"):
        column.read(23, 1)
    assert (column.read(0, 16) == rows_of(PIXELS, 37)[:16]).all()
    whole, damaged, after = column.pieces(8, 20)
    assert len(whole) == 8 * 12
    assert damaged == f"c.2.0.0 {HURTS[hurt]}"
    assert len(after) == 4 * 12


@hurts
def test_a_damaged_chunk_does_not_stop_the_ring(column, hurt, caplog):
    """Its rows were lost to a power cut, and their episodes dropped: nothing live is in it."""
    hurt(column, 2)
    fresh = rows_of(PIXELS, 4, 900)
    again, asked = Zarrs(Disk(), "").reopen(column, write=True), []
    again.write(18, fresh, lambda slot, count: asked.append((slot, count)))
    assert asked == [(16, 2), (22, 2)]
    assert ("written anew" in caplog.text) == (hurt is damage)
    assert (again.read(18, 4) == fresh).all()
    assert (again.read(16, 2) == 0).all()


@hurts
@pytest.mark.parametrize("live", [(16, 18), (22, 24)])
def test_live_rows_of_a_damaged_chunk_are_never_replaced_by_zeros(column, hurt, live):
    hurt(column, 2)
    again = Zarrs(Disk(), "").reopen(column, write=True)
    before = sorted(os.listdir(column.path))

    def is_live(slot, count):
        return slot < live[1] and slot + count > live[0]

    with pytest.raises(CorruptError, match=r"c\.2\.0\.0: .*, and it holds rows of stored episodes"):
        again.write(18, rows_of(PIXELS, 4, 900), is_live)
    assert sorted(os.listdir(column.path)) == before
    with pytest.raises(CorruptError):
        again.read(16, 2)


def test_a_sync_that_is_interrupted_is_begun_anew(tmp_path):
    disk = Notes()
    column = Zarrs(disk, str(tmp_path)).make(PIXELS, 37)
    whole = ["c.0.0.0", "c.1.0.0", "c.2.0.0", "001.zarr"]
    for at in range(1, 5):
        column.write(0, rows_of(PIXELS, 24))
        disk.interrupt = at
        with pytest.raises(KeyboardInterrupt):
            column.sync()
        assert [name for _, name in changes(disk, column.sync)] == whole
        assert changes(disk, column.sync) == []


# -- what a write does to the disk ---------------------------------------------------------------------------


class Notes(Disk):
    """A disk that notes its changes."""

    def __init__(self):
        super().__init__()
        self.done = []
        self.interrupt = 0

    def before(self, change, path, *details):
        self.interrupt -= change.startswith("sync")
        if self.interrupt == 0 and change.startswith("sync"):
            raise KeyboardInterrupt
        self.done.append((change, os.path.basename(path)))


def changes(disk, what):
    disk.done.clear()
    what()
    return disk.done


def test_a_chunk_of_vouched_rows_is_replaced_by_a_synced_file_and_name(tmp_path):
    disk = Notes()
    column = Zarrs(disk, str(tmp_path)).make(PIXELS, 37)
    rows = rows_of(PIXELS, 37)
    replaced = [("create", "next.tmp"), ("write", "next.tmp"), ("rename", "next.tmp")]
    synced = [*replaced[:2], ("sync", "next.tmp"), replaced[2], ("sync_folder", "001.zarr")]
    # Nothing there, then rows that no sync has vouched for yet: what they risk is allowed.
    assert changes(disk, lambda: column.write(0, rows[:5])) == replaced
    assert changes(disk, lambda: column.write(5, rows[5:7])) == replaced
    assert changes(disk, column.sync) == [("sync", "c.0.0.0"), ("sync_folder", "001.zarr")]
    assert changes(disk, column.sync) == []
    # Now they are vouched for.
    assert changes(disk, lambda: column.write(7, rows[7:8])) == synced
    # Covered altogether: nothing in it can be live.
    assert changes(disk, lambda: column.write(0, rows[:8])) == replaced
    assert changes(disk, lambda: column.write(32, rows[32:])) == replaced
    column.sync()
    # Nobody knows who wrote them, and when.
    again = Zarrs(disk, "").reopen(column, write=True)
    assert changes(disk, lambda: again.write(3, rows[3:4])) == synced
    again.touched(0, 37)
    assert changes(disk, lambda: again.write(4, rows[4:5])) == synced
    assert [name for change, name in changes(disk, again.sync) if change == "sync"] == [
        "c.0.0.0",
        "c.4.0.0",
    ]
    assert (again.read(0, 8) == rows[:8]).all()


def test_a_sync_from_another_thread_never_vouches_for_a_chunk_that_is_being_replaced(tmp_path):
    class Meets(Notes):
        syncing = None

        def before(self, change, path, *details):
            if change == "rename" and self.syncing is None:
                self.syncing = threading.Thread(target=column.sync)
                self.syncing.start()
                self.syncing.join(0.5)  # without the lock it is done by then
            super().before(change, path, *details)

    disk = Notes()
    column = Zarrs(disk, str(tmp_path)).make(PIXELS, 37)
    column.write(0, rows_of(PIXELS, 5))
    column.disk = disk = Meets()
    column.write(5, rows_of(PIXELS, 1))
    disk.syncing.join()
    column.sync()
    names = [change for change in disk.done if change[0] in ("rename", "sync")]
    assert names[-1] == ("sync", "c.0.0.0")


def test_a_write_that_fails_leaves_every_chunk_whole(tmp_path):
    rows, fresh = rows_of(PIXELS, 37), rows_of(PIXELS, 20, 700)
    for at in range(1, 40):

        class Fails(Notes):
            left = at

            def before(self, change, path, *details):
                self.left -= 1
                if self.left == 0:
                    raise OSError(28, "No space left on device", path)

        maker = Zarrs(Disk(), str(tmp_path / str(at)))
        os.mkdir(maker.folder)
        column = maker.make(PIXELS, 37)
        column.write(0, rows)
        column.sync()
        column.disk = Fails()
        try:
            column.write(10, fresh)
        except OSError:
            failed = True
        else:
            failed = False
        column.disk = Disk()
        for whole in (column, maker.reopen(column)):
            got = whole.read(0, 37)
            assert (got[:10] == rows[:10]).all()
            assert (got[30:] == rows[30:]).all()
            for chunk in range(5):
                part = slice(chunk * 8, min(chunk * 8 + 8, 37))
                both = rows.copy()
                both[10:30] = fresh
                assert (got[part] == rows[part]).all() or (got[part] == both[part]).all()
        column.write(10, fresh)
        assert (column.read(10, 20) == fresh).all()
        if not failed:
            return
    raise AssertionError("more changes than expected")


# -- the cache -------------------------------------------------------------------------------------------


def test_a_chunk_that_was_decoded_serves_until_a_later_position_is_asked_for(column, monkeypatch):
    loads = []
    load = ZarrColumn._load
    monkeypatch.setattr(
        ZarrColumn,
        "_load",
        lambda self, chunk, *args: loads.append(chunk) or load(self, chunk, *args),
    )
    reader = Zarrs(Disk(), "").reopen(column)
    rows = rows_of(PIXELS, 37)
    head = 37 + 5  # slots 0 to 4 hold positions 37 to 41
    assert (reader.take(np.array([3, 4]), None, head) == rows[[3, 4]]).all()
    assert (reader.take(np.array([2, 4, 6]), None, head) == rows[[2, 4, 6]]).all()
    assert loads == [0]
    fresh = rows_of(PIXELS, 2, 800)
    column.write(5, fresh)
    assert (reader.take(np.array([3, 4]), None, head + 2) == rows[[3, 4]]).all()
    assert loads == [0]
    assert (reader.take(np.array([4, 5, 6]), None, head + 2)[1:] == fresh).all()
    assert loads == [0, 0]
    assert (reader.take(np.array([5]))[0] == fresh[0]).all()  # without a head nothing that was kept serves
    assert loads == [0, 0, 0]


@pytest.mark.parametrize("wrong", [300, -300])
def test_the_cache_forgives_a_count_that_an_interrupt_left_wrong(wrong):
    cache = ChunkCache(160)
    cache._nbytes = wrong
    for chunk in range(40):
        cache.put(chunk, np.zeros((1, 30), np.uint8), 1)
    assert [chunk for chunk in range(40) if cache.get(chunk, 0) is not None][-3:] == [37, 38, 39]
    assert sum(rows.nbytes for rows, _ in cache._chunks.values()) <= 160


def test_the_cache_keeps_within_its_limit():
    cache = ChunkCache(100)
    for chunk in range(10):
        cache.put(chunk, np.full((1, 30), chunk, np.uint8), 1)
    assert [chunk for chunk in range(10) if cache.get(chunk, 0) is not None] == [8, 9]
    cache.get(8, 0)
    cache.put(10, np.zeros((1, 30), np.uint8), 1)
    cache.get(8, 0)
    cache.put(11, np.zeros((1, 30), np.uint8), 1)
    assert cache.get(9, 0) is None
    assert cache.get(8, 0) is not None
    cache.put(12, np.zeros((1, 101), np.uint8), 1)
    assert cache.get(12, 0) is None
    older = np.ones((1, 30), np.uint8)
    cache.put(8, older, 0)  # read earlier by another thread
    assert cache.get(8, 0) is not older
    cache.clear()
    assert cache.get(8, 0) is None
    cache = ChunkCache(1000)
    for chunk in range(10):
        cache.put(chunk, bytes(30), 1)
    assert [chunk for chunk in range(10) if cache.get(chunk, 0) is not None] == [7, 8, 9]


def share(cache, chunks):
    """Let threads put chunks that say what they are, and get them; return what went wrong."""
    wrong, before, start = [], sys.getswitchinterval(), threading.Barrier(4)

    def use(seed):
        work = np.random.default_rng(seed).integers(0, (chunks, 20, 20), (8000, 3)).tolist()
        start.wait()
        try:
            for chunk, head, at in work:
                cache.put(chunk, np.array([[chunk, head]], np.uint8), head)
                found = cache.get(chunk, at)
                if found is not None and (found[0, 0] != chunk or found[0, 1] <= at):
                    wrong.append(found)
        except Exception as error:
            wrong.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    return wrong


@pytest.mark.parametrize("chunks", [2, 20])
def test_threads_share_the_cache(chunks):
    cache = ChunkCache(20)
    assert share(cache, chunks) == []
    for chunk in range(20, 30):  # whatever the count of bytes is by now
        cache.put(chunk, np.zeros((1, 2), np.uint8), 1)
    assert sum(rows.nbytes for rows, _ in cache._chunks.values()) <= 40


def test_control_heads_apart_from_their_rows_are_caught():
    class Apart(ChunkCache):
        heads: ClassVar = {}

        def put(self, chunk, content, head):
            self.heads[chunk] = head
            os.sched_yield()  # another thread may have its turn between any two calls
            self._chunks[chunk] = content, head

        def get(self, chunk, position):
            return self._chunks[chunk][0] if position < self.heads[chunk] else None

    assert share(Apart(20), 2)


WIDE = ColumnSpec("pixels", (64, 64), np.dtype("u1"))


@pytest.fixture
def wide():
    """A writer and a reader of 20 chunks that shrink to a hundredth; the reader's cache holds none of them decoded."""
    disk = MemoryDisk()
    writer = Zarrs(disk, "RAM", 8, "lz4").make(WIDE, 160)
    reader = ZarrColumn(disk, writer.path, WIDE, 160, writer.label).open()
    reader._cache = ChunkCache(3000)
    return writer, reader


def plain(first, count):
    """Rows of one shade each."""
    shades = np.arange(first, first + count) % 251
    return np.broadcast_to(shades[:, None, None], (count, 64, 64)).astype(np.uint8)


def test_files_of_a_large_batch_are_read_once(wide, monkeypatch):
    writer, reader = wide
    writer.write(0, plain(0, 160))
    reads, read = [], reader._read
    monkeypatch.setattr(reader, "_read", lambda chunk: reads.append(chunk) or read(chunk))
    slots = np.array([1, 2, 9, 17, 10])
    for _ in range(3):
        assert (reader.take(slots, None, 160) == plain(0, 160)[slots]).all()
    assert reads == [0, 1, 2]
    assert (reader.take(np.arange(8, 16), None, 163) == plain(8, 8)).all()  # a whole chunk
    assert reads == [0, 1, 2]
    writer.write(0, plain(160, 3))
    assert (reader.take(np.array([2, 1]), None, 163) == plain(161, 2)[::-1]).all()
    assert reads == [0, 1, 2, 0]
    assert (reader.take(np.array([2, 9])) == plain(0, 163)[[162, 9]]).all()  # nothing is known
    assert reads == [0, 1, 2, 0, 0, 1]
    reader.forget()
    reader.take(slots, None, 163)
    assert reads == [0, 1, 2, 0, 0, 1, 0, 1, 2]


def test_a_column_that_nearly_fits_is_kept_decoded(wide):
    _, reader = wide
    for limit, kept in ((160 << 12, True), (40 << 12, True), (39 << 12, False)):
        reader._cache = ChunkCache(limit)
        assert reader._keeps(20) == kept
        assert reader._keeps(1)


def test_files_that_hardly_shrink_are_not_kept(column):
    reader = Zarrs(Disk(), "").reopen(column)
    reader._cache = ChunkCache(3000)
    for limit in (3000, 100):
        reader._cache.limit = limit
        reader.take(np.array([0, 9, 17]), None, 37)
        assert len(reader._cache._chunks) == (3 if limit == 3000 else 0)
        reader.forget()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_reads_equal_a_plain_ring(data, is_tight):
    """Rows by way of chunks and cache while writes go on; `is_tight`: files are kept as they are, and go often."""
    spec, made = (WIDE, plain) if is_tight else (PIXELS, lambda first, count: rows_of(PIXELS, count, 50 * first))
    rows = data.draw(st.integers(120, 160) if is_tight else st.integers(1, 40))
    steps = 8 if is_tight else data.draw(st.integers(1, 12))
    disk = MemoryDisk()
    column = Zarrs(disk, "RAM", steps, "lz4").make(spec, rows)
    reader = ZarrColumn(disk, column.path, spec, rows, column.label).open()
    if is_tight:
        reader._cache = ChunkCache(3000)
    model, head = np.zeros((rows, *spec.shape), np.uint8), 0
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(1, min(rows, 40)))
        fresh = made(head, count)
        model[(head + np.arange(count)) % rows] = fresh
        first = min(count, rows - head % rows)
        column.write(head % rows, fresh[:first])
        column.write(0, fresh[first:])
        head += count
        asked = data.draw(st.lists(st.integers(head - min(head, rows), head - 1), max_size=12))
        slots = np.array(asked, np.int64) % rows
        assert (reader.take(slots, None, head) == model[slots]).all()
        assert (reader.take(slots) == model[slots]).all()
        if is_tight:
            assert sum(256 + len(kept) for kept, _ in reader._cache._chunks.values()) <= 3000


@pytest.mark.parametrize("inside", [True, False], ids=["of the label", "beside it"])
def test_a_label_that_was_changed_says_nothing(inside):
    """Whatever value was changed, though the text is still JSON."""
    disk, spec, label = MemoryDisk(), FEW[0], label_of(FEW[0], 4)
    ZarrColumn(disk, "/column", spec, 10, label).create()
    text = disk.read_file("/column/zarr.json", 1 << 20)
    assert read_zarr_label(text) == label

    def part_of(body):
        return body["attributes"]["ringmap"] if inside else body

    for name in part_of(json.loads(text)).keys() - {"attributes"}:
        body = json.loads(text)
        part_of(body)[name] = "another"
        assert read_zarr_label(json.dumps(body).encode()) is None
