"""Small real buffers that were written, wrapped and left in different ways, and the truth about them.

Every episode carries its number, and its bytes follow from it.
"""

import contextlib
import json
import math
import struct
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import google_crc32c
import numpy as np
from numcodecs import blosc

from ringmap import ReplayBuffer, Zarr
from ringmap.buffers import engine
from ringmap.storage.disk import system
from ringmap.storage.disk.files import Disk

RECORD_NBYTES, HEADER_NBYTES, STATE_NBYTES, FLAGS = 128, 4096, 88, 113


def rows_of(number, length, twins=False):
    """Return the columns of episode `number`."""
    rng = np.random.default_rng(number)
    columns = {
        "obs/x": rng.normal(size=(length, 3)).astype(np.float32),
        "pixels": rng.integers(0, 256, (length, 4, 4), dtype=np.uint8),
        "action": rng.integers(-9, 9, length),
        "name": np.array([f"{number}:{t}" for t in range(length)], "U8"),
    }
    if twins:
        columns["left"], columns["right"] = rng.random((2, length, 2))
    return columns


def data_of(number):
    """Return the episode data of episode `number`."""
    return {"number": number, "goal": np.arange(number % 5 + 1) * 1.5, "text": "x" * (number % 40)}


def episode_of(number, length, twins=False):
    """Return episode `number` as it is written."""
    return {**rows_of(number, length, twins), "_episode_data": data_of(number)}


@dataclass
class Span:
    """Bytes `[start, stop)` of a file that hold something; `seq`: what the bits in `mask` hold is this record's
    alone."""

    start: int
    stop: int
    seq: int | None = None
    mask: int = 0xFF


@dataclass
class Chunk:
    """A file of `steps` rows, `nbytes` in all, compressed by Blosc or not; `live`: row -> its record."""

    steps: int
    nbytes: int
    packed: bool
    live: dict[int, int] = field(default_factory=dict)

    def rows_in(self, data):
        """Return the rows in the bytes of a file, without ringmap; None if they are damaged."""
        body, check = data[:-4], data[-4:]
        if google_crc32c.value(body).to_bytes(4, "little") != check:
            return None
        if self.packed:
            try:
                body = blosc.decompress(body)
            except RuntimeError:  # whole, but the chunk of a column that is not compressed
                return None
        if len(body) != self.nbytes:
            return None
        size = self.nbytes // self.steps
        return [body[row * size : (row + 1) * size] for row in range(self.steps)]


@dataclass
class Truth:
    """What a buffer holds.

    `written`: number -> length of every episode ever written; `episodes`: record -> number of those
    stored, oldest first; `spans`: file -> the bytes in it that hold something; `chunks`: file -> what
    of it holds something; `mark`: every record up to it is known to be synced.
    """

    written: dict[int, int]
    twins: bool = False
    episodes: dict[int, int] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    mark: int = 0

    def rows(self, number):
        return rows_of(number, self.written[number], self.twins)

    def fault(self, number, columns, data):
        """Return what is wrong with an episode that was read, or None."""
        if number not in self.written:
            return f"episode {number} was never written"
        for name, expected in self.rows(number).items():
            if not np.array_equal(expected, columns[name]):
                return f"episode {number}: column {name} differs"
        told = data_of(number)
        if data.keys() != told.keys() or not all(np.array_equal(data[k], told[k]) for k in told):
            return f"episode {number}: its data differ"
        return None

    def clip_fault(self, columns):
        """Return what is wrong with a clip of one step, or None."""
        told = str(np.ravel(columns["name"])[0])
        number, _, t = told.partition(":")
        if not (number.isdigit() and t.isdigit() and int(number) in self.written):
            return f"clip says it is {told!r}"
        for name, rows in self.rows(int(number)).items():
            if not np.array_equal(np.ravel(rows[int(t)]), np.ravel(columns[name])):
                return f"clip of episode {number}, step {t}: column {name} differs"
        return None


def look(folder, truth):
    """Find out, without ringmap, which bytes of a pristine buffer hold what."""
    folder = Path(folder)
    with open(folder / "state.bin", "rb") as file:
        slots = [struct.unpack_from("<8sQQQqqQ", file.read(4096)) for _ in range(2)]
    table = np.load(folder / "episodes.npy")
    seq = max(slot[2] for slot in slots)
    while table[(seq + 1) % len(table)]["seq"] == seq + 1:  # stored, and not shown
        seq += 1
    newest = table[seq % len(table)]
    spans = truth.spans
    spans["state.bin"] = [Span(0, STATE_NBYTES), Span(4096, 4096 + STATE_NBYTES)]
    spans["manifest.json"] = [Span(0, (folder / "manifest.json").stat().st_size)]
    spans["episodes.npy"] = [Span(0, HEADER_NBYTES)]
    columns = sorted((folder / "columns").glob("*.npy"))
    arrays = {f"columns/{path.name}": np.load(path) for path in columns}
    for path in columns:
        rows = HEADER_NBYTES + arrays[f"columns/{path.name}"].nbytes
        spans[f"columns/{path.name}"] = [Span(0, HEADER_NBYTES), Span(rows, path.stat().st_size)]
    folders = sorted((folder / "columns").glob("*.zarr"))
    chunks = {}
    for path in folders:
        meta = json.loads((path / "zarr.json").read_text())
        shape, (steps, *rest) = meta["shape"], meta["chunk_grid"]["configuration"]["chunk_shape"]
        nbytes = steps * math.prod(rest) * np.dtype(meta["data_type"]).itemsize
        packed = any(codec["name"] == "blosc" for codec in meta["codecs"])
        name = f"columns/{path.name}/c.{{}}{'.0' * len(rest)}"
        chunks[name] = shape[0], partial(Chunk, steps, nbytes, packed)
        spans[f"columns/{path.name}/zarr.json"] = [Span(0, (path / "zarr.json").stat().st_size)]
    for number in range(int(newest["first"]), seq + 1):
        record = table[number % len(table)]
        start, length = int(record["start"]), int(record["length"])
        slot = HEADER_NBYTES + number % len(table) * RECORD_NBYTES
        live = record["kind"] == 1 and not record["flags"] & 8 and start >= newest["tail"]
        owner = number if live else None
        spans["episodes.npy"] += [
            Span(slot, slot + FLAGS, owner),
            Span(slot + FLAGS, slot + FLAGS + 1),
            Span(slot + FLAGS, slot + FLAGS + 1, owner, mask=0x07),  # the others say "dropped", five times over
            Span(slot + FLAGS + 1, slot + RECORD_NBYTES, owner),
        ]
        segment = spans.setdefault(f"data/{record['blob_segment']:012d}.bin", [])
        offset, size = int(record["blob_offset"]), int(record["blob_size"])
        if live or number == seq:
            segment.append(Span(offset, offset + size, number if live else None))
        if live:
            truth.episodes[number] = -1
            for name, rows in arrays.items():
                width = rows.nbytes // len(rows)
                for position in range(start, start + length):
                    at = HEADER_NBYTES + position % len(rows) * width
                    spans[name].append(Span(at, at + width, number))
            for name, (count, make) in chunks.items():
                for slot in (np.arange(start, start + length) % count).tolist():
                    file = name.format(slot // make().steps)
                    chunk = truth.chunks.setdefault(file, make())
                    chunk.live[slot % chunk.steps] = number
    for path in (folder / "open").glob("*/steps.bin"):
        spans[f"open/{path.parent.name}/steps.bin"] = [Span(0, path.stat().st_size)]
    truth.mark = max(slots)[6]


def _buffer(path, max_steps, segment_nbytes, **options):
    buf = ReplayBuffer(max_steps, path=path, **options)
    buf.engine.owned.segments._limit = segment_nbytes
    return buf


def _write(buf, written, numbers, twins=False):
    for number in numbers:
        buf.write_episode(episode_of(number, written[number], twins))


def _lengths(base, count, pattern):
    return {base + i: pattern[i % len(pattern)] for i in range(count)}


def wrapped(path, base=0, pause=lambda: None, **options):
    """Closed; its ring has wrapped; a segment per episode or two."""
    written = _lengths(base, 14, [9, 5, 14, 7, 1])
    buf = _buffer(path, 60, 300, seed=1, history_len=2, **options)
    _write(buf, written, range(base, base + 11))
    pause()
    _write(buf, written, range(base + 11, base + 14))
    buf.close()
    return Truth(written)


def killed(path, base=0, pause=lambda: None, **options):
    """Killed without a flush of the last episodes, while one was being recorded."""
    written = _lengths(base, 13, [8, 13, 6])
    buf = _buffer(path, 60, 300, seed=2, sync_every_s=0, **options)
    _write(buf, written, range(base, base + 9))
    buf.sample(2)
    buf.flush()
    pause()
    _write(buf, written, range(base + 9, base + 13))
    episode = buf.begin_episode()
    for t in range(4):
        episode.append({name: values[t] for name, values in rows_of(99, 4).items()})
    episode._file.close()
    buf.engine.owned.abandon()
    return Truth(written)


def retiring(path, base=0, pause=lambda: None, **options):
    """Two columns of one shape and dtype; few spare rows, so that episodes need retire records."""
    written = _lengths(base, 13, [12, 3, 9])
    buf = _buffer(path, 50, 700, spare_rows=6, seed=3, **options)
    _write(buf, written, range(base, base + 5), twins=True)
    buf.clear()
    _write(buf, written, range(base + 5, base + 10), twins=True)
    pause()
    _write(buf, written, range(base + 10, base + 13), twins=True)
    buf.close()
    return Truth(written, twins=True)


def cleared(path, base=0, pause=lambda: None):
    """Its newest record is that of a clear, which carries the sampling state alone."""
    written = _lengths(base, 3, [8, 13, 6])
    buf = _buffer(path, 40, 300, seed=4)
    _write(buf, written, range(base, base + 3))
    pause()
    buf.sample(2)
    buf.clear()
    buf.close()
    return Truth(written)


KINDS = {"wrapped": wrapped, "killed": killed, "retiring": retiring, "cleared": cleared}
KINDS |= {
    "wrapped zarr": partial(wrapped, storage=Zarr("lz4", 4)),
    "killed zarr": partial(killed, storage={"pixels": "zarr", "action": Zarr("none", 3)}),
    "retiring zarr": partial(retiring, storage=Zarr("zstd", 8)),
}


def make(kind, path, base=0, pause=lambda: None):
    """Make a buffer and return the truth about it."""
    truth = KINDS[kind](path, base, pause)
    look(path, truth)
    reader = ReplayBuffer.open(path)
    found = list(served(reader))
    assert len(found) == len(truth.episodes)
    for seq, (number, columns, data) in zip(truth.episodes, found, strict=True):
        truth.episodes[seq] = number
        assert truth.fault(number, columns, data) is None
    reader.close()
    return truth


def served(buf):
    """Yield `(number, columns, data)` of every episode that a buffer serves."""
    for i, episode in enumerate(buf.episodes()):
        data = episode.pop("_episode_data")
        columns = {name: np.array(values) for name, values in episode.items()}
        assert all(np.array_equal(columns[k], v) for k, v in buf.load_episode(i).items())
        yield data["number"], columns, data


@contextlib.contextmanager
def booted(again):
    """Let buffers be opened as after another boot, if `again`, by a disk that has not seen the boot id yet."""
    boot = system._read_boot_id
    if again:
        system._read_boot_id = lambda: b"another boot id."
    engine.DISK = Disk()
    try:
        yield
    finally:
        system._read_boot_id = boot
