"""The cases: a sound buffer or dataset, and what a stranger did to it.

`at` is the path of what is opened, `out` a folder beside it which nothing may read, write or remove. It
holds `victim/`, with files whose names are those of a dataset, and `secret`. What the harm puts there counts as well.
"""

import contextlib
import functools
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import xxhash

SECRET = b"SECRET-THAT-NOBODY-READS"

FORMATS = (
    "folder",
    "hdf5",
    "hdf5 in a folder",
    "zarr",
    "lance",
    "video",
    "lerobot",
    "minari",
    "robomimic",
    "parquet",
    "rlds",
)


@dataclass(frozen=True)
class Case:
    """Something hostile.

    `name`: what it is; `kind`: what it was when it was sound; `harm`: does it; `opens`: whether it may be
    opened all the same, what is hostile in it being left alone; `says`: what an error, or a finding, names;
    `named`: what leads outside is the path itself, which is the user's own word: it may be read.
    """

    name: str
    kind: str
    harm: Callable[[str, str], None]
    says: str = ""
    opens: bool = False
    named: bool = False


CASES: dict[str, Case] = {}


def case(kind, name, says="", opens=False, named=False):
    def keep(harm):
        full = f"{kind}: {name}"
        assert full not in CASES
        CASES[full] = Case(name, kind, harm, says, opens, named)
        return harm

    return keep


class Payload:
    """Unpickled, it makes a file in the folder outside."""

    def __init__(self, out):
        self.out = out

    def __reduce__(self):
        return os.mkdir, (os.path.join(self.out, "pwned"),)


def join(*parts):
    return os.path.join(*parts)


def only(folder, start="", end=""):
    """Return the path of the first file of a folder."""
    names = [n for n in sorted(os.listdir(folder)) if n.startswith(start) and n.endswith(end)]
    return join(folder, names[0])


def move_out(path, out):
    """Put what is at a path outside, whole, and a link to it in its place."""
    target = join(out, "moved")
    shutil.move(path, target)
    os.symlink(target, path)


def pipe(path):
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    os.mkfifo(path)


def vast(path, size=1 << 40):
    """Make a file as large as a disk, which takes no room."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with open(path, "xb"):
        pass
    os.truncate(path, size)


def write(path, data):
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else json.dumps(data).encode())


def edit(path, change):
    with open(path, "rb") as file:
        body = json.load(file)
    change(body)
    write(path, body)


# -- buffers: what lies elsewhere, or never ends ---------------------------------------------------

for _name in (
    "manifest.json",
    "state.bin",
    "episodes.npy",
    "columns/000-pixels.npy",
    "data/000000000001.bin",
):
    case("buffer", f"{_name} is a link out of it", _name.rpartition("/")[2])(
        lambda at, out, name=_name: move_out(join(at, name), out)
    )
    case("buffer", f"{_name} is a pipe", _name.rpartition("/")[2])(lambda at, out, name=_name: pipe(join(at, name)))
for _name in ("columns", "data", "open"):
    case("buffer", f"{_name}/ is a link out of it", _name)(lambda at, out, name=_name: move_out(join(at, name), out))


@case("buffer", "open/ is a link to a folder whose files would be removed", "open")
def _(at, out):
    os.rmdir(join(at, "open"))
    os.symlink(join(out, "victim"), join(at, "open"))


case("buffer", "an open episode is a link to a folder whose files would be removed", opens=True)(
    lambda at, out: os.symlink(join(out, "victim"), join(at, "open", "0" * 32))
)
case("buffer", "columns.tmp is a link to a folder whose files would be removed", "columns.tmp")(
    lambda at, out: os.symlink(join(out, "victim"), join(at, "columns.tmp"))
)
case("streaming", "the steps of an open episode are a link out of it", opens=True)(
    lambda at, out: move_out(join(only(join(at, "open")), "steps.bin"), out)
)
case("streaming", "the steps of an open episode are a pipe", opens=True)(
    lambda at, out: pipe(join(only(join(at, "open")), "steps.bin"))
)


@case("buffer", "its lock is a link to a file that would be written to", opens=True)
def _(at, out):
    os.unlink(join(at, "lock"))
    os.symlink(join(out, "secret"), join(at, "lock"))


case("buffer", "its lock is a pipe", opens=True)(lambda at, out: pipe(join(at, "lock")))
case("plain", "a compressed column is a link out of it", "000-pixels.zarr")(
    lambda at, out: move_out(join(at, "columns/000-pixels.zarr"), out)
)
case("plain", "a chunk is a link out of it", "c.0.0.0.0")(
    lambda at, out: move_out(join(at, "columns/000-pixels.zarr/c.0.0.0.0"), out)
)
case("plain", "a chunk is a pipe", "c.0.0.0.0")(lambda at, out: pipe(join(at, "columns/000-pixels.zarr/c.0.0.0.0")))


for _name in ("priorities.bin", "successors.bin"):
    case("transitions", f"{_name} is a link out of it", opens=True)(
        lambda at, out, name=_name: move_out(join(at, name), out)
    )
    case("transitions", f"{_name} is a pipe", opens=True)(lambda at, out, name=_name: pipe(join(at, name)))


# -- buffers: numbers and names that are forged ----------------------------------------------------


def sign(at, change):
    """Change the manifest, and give it a checksum that holds."""
    from ringmap.storage.disk.checksums import json_checksum

    with open(join(at, "manifest.json"), "rb") as file:
        body = json.load(file)
    del body["checksum"]
    change(body)
    write(join(at, "manifest.json"), {**body, "checksum": json_checksum(body)})


def uuid_of(at):
    with open(join(at, "manifest.json"), "rb") as file:
        return bytes.fromhex(json.load(file)["uuid"].replace("-", ""))


def forge_record(at, **changes):
    """Change the newest record and the state that shows it, with checksums that hold."""
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.records.state import StateFile
    from ringmap.storage.records.table import EpisodeTable

    disk, uuid = Disk(), uuid_of(at)
    with open(join(at, "manifest.json"), "rb") as file:
        slots = json.load(file)["table_slots"]
    states = StateFile.open(disk, join(at, "state.bin"), uuid, True)
    table = EpisodeTable.open(disk, join(at, "episodes.npy"), slots, uuid, True)
    shown = states.newest()
    record = table.read(shown.seq)._replace(**changes)
    table.write(record)
    states.write_both(shown._replace(tail=record.tail, head=record.head, first=record.first))
    table.close(), states.close()


case("buffer", "the manifest names a file of another folder", "does not make sense")(
    lambda at, out: sign(at, lambda body: body["columns"][0].update(file="columns/../../out/moved"))
)
case("buffer", "the manifest names a file by its whole path", "does not make sense")(
    lambda at, out: sign(at, lambda body: body["columns"][0].update(file=join(out, "secret")))
)
case("buffer", "the manifest is as large as a disk", "manifest.json")(lambda at, out: vast(join(at, "manifest.json")))
case("buffer", "the manifest is nested without end", "manifest.json")(
    lambda at, out: write(join(at, "manifest.json"), b'{"a":' * 1_000_000)
)
case("buffer", "max_steps is not a number", "does not make sense")(
    lambda at, out: sign(at, lambda body: body.update(max_steps=float("nan")))
)
case("buffer", "the manifest is not text", "manifest.json")(
    lambda at, out: write(join(at, "manifest.json"), b'{"format": "\xff\xfe\xed\xa0\x80"}')
)
case("buffer", "an episode has 2**32 - 1 steps", "record")(lambda at, out: forge_record(at, length=(1 << 32) - 1))


@case("buffer", "an older episode has 2**32 - 1 steps", "record")
def _(at, out):
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.records.table import EpisodeTable

    with open(join(at, "manifest.json"), "rb") as file:
        slots = json.load(file)["table_slots"]
    table = EpisodeTable.open(Disk(), join(at, "episodes.npy"), slots, uuid_of(at), True)
    table.write(table.read(2)._replace(length=(1 << 32) - 1))
    table.close()


case("buffer", "an episode starts ahead of the beginning", "record")(
    lambda at, out: forge_record(at, start=-100, length=7)
)
case("buffer", "the ring was written beyond what a number holds", "record")(
    lambda at, out: forge_record(at, start=(1 << 63) - 8, length=7, tail=(1 << 63) - 8)
)


@case("buffer", "the ring and its files are as large as a disk", opens=True)
def _(at, out):
    from ringmap.storage.columns.memmap import MemmapColumn
    from ringmap.storage.disk.files import Disk
    from ringmap.storage.records.manifest import Manifest
    from ringmap.storage.records.state import StateFile
    from ringmap.storage.records.table import SPARE_SLOTS, EpisodeTable

    with open(join(at, "manifest.json"), "rb") as file:
        manifest = Manifest.decode(file.read(), "")
    rows = 1 << 33
    manifest = replace(manifest, max_steps=rows - 40, spare=40)
    for i, spec in enumerate(manifest.schema.columns):
        path = join(at, manifest.files[i])
        os.unlink(path)
        column = MemmapColumn(Disk(), path, spec, rows, manifest.label(i))
        column.create()
    for name in ("episodes.npy", "state.bin"):
        os.unlink(join(at, name))
    EpisodeTable.create(Disk(), join(at, "episodes.npy"), rows + SPARE_SLOTS)
    StateFile.create(Disk(), join(at, "state.bin"), manifest.uuid)
    write(join(at, "manifest.json"), manifest.encode())


def forge_blob(at, carried, data):
    """Give the newest record another blob."""
    from ringmap.storage.records.blobs import HEAD, decode_blob, encode_blob

    name = only(join(at, "data"))
    with open(name, "r+b") as file:
        at_byte = file.seek(0, os.SEEK_END)
        place = at_byte + HEAD.size + 16, len(carried), xxhash.xxh3_64_intdigest(carried)
        blob = encode_blob([0, 0], place, data, carried)
        assert decode_blob(blob)
        file.write(blob)
    forge_record(
        at,
        blob_segment=int(os.path.basename(name)[:-4]),
        blob_offset=at_byte,
        blob_size=len(blob),
        blob_sum=xxhash.xxh3_64_intdigest(blob),
    )


def data_of(heads, payload):
    text = json.dumps(heads).encode()
    return len(text).to_bytes(4, "little") + text + payload


@case("buffer", "episode data is a pickle", "record 3")
def _(at, out):
    payload = pickle.dumps(Payload(out))
    forge_blob(at, b"{}", data_of([["x", "array", ["|O", [1]], len(payload)]], payload))


case("buffer", "episode data is of a vast shape", "record 3")(
    lambda at, out: forge_blob(at, b"{}", data_of([["x", "array", ["<f8", [1 << 40]], 8]], bytes(8)))
)
case("buffer", "episode data is a number beyond all numbers", "record 3")(
    lambda at, out: forge_blob(at, b"{}", data_of([["x", "float", "0x1p99999", 0]], b""))
)
case("buffer", "the state of sampling is of another generator", opens=True)(
    lambda at, out: forge_blob(
        at,
        json.dumps({"sampling": {"step": 1, "rng": {"bit_generator": "os.system"}}}).encode(),
        b"",
    )
)
case("buffer", "its small state is nested without end", opens=True)(
    lambda at, out: forge_blob(at, b"[" * 1_000_000, b"")
)


@case("buffer", "a record's blob is as large as a disk", "record")
def _(at, out):
    os.truncate(join(at, "data/000000000001.bin"), 1 << 40)
    forge_record(at, blob_segment=1, blob_offset=0, blob_size=(1 << 32) - 1)


@case("transitions", "successors claim to be as large as a disk", opens=True)
def _(at, out):
    vast(join(at, "successors.bin"))
    with open(join(at, "successors.bin"), "r+b") as file:
        for slot in (0, 1):
            head = struct.pack("<8sQqQqqQ", b"RINGMAPN", slot, 20, 0, 8192, 1 << 39, 0)
            check = xxhash.xxh3_64_intdigest(uuid_of(at) + head).to_bytes(8, "little")
            file.seek(slot * 4096)
            file.write(head + check)


case("transitions", "priorities are as large as a disk", opens=True)(
    lambda at, out: os.truncate(join(at, "priorities.bin"), 1 << 40)
)


# -- buffers: chunks that explode ------------------------------------------------------------------

BOMB = 1 << 30


def chunk(at, data):
    write(join(at, "columns/000-pixels.zarr/c.0.0.0.0"), data)


@functools.cache
def gzip_of_zeros(mib):
    """Return a gzip stream of so many MiB: one of them packed, and repeated."""
    zeros, packer, checksum = bytes(1 << 20), zlib.compressobj(9, zlib.DEFLATED, -15), 0
    piece = packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH)
    for _ in range(mib):
        checksum = zlib.crc32(zeros, checksum)
    tail = packer.flush() + struct.pack("<II", checksum, mib << 20)
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + piece * mib + tail


def with_crc(data):
    import google_crc32c

    return data + google_crc32c.value(data).to_bytes(4, "little")


@case("packed", "a chunk becomes 1 GiB", "c.0.0.0.0")
def _(at, out):
    import numcodecs

    body = bytearray(numcodecs.Blosc("zstd", 1).encode(bytes(1 << 20)))
    body[4:8] = BOMB.to_bytes(4, "little")
    chunk(at, with_crc(bytes(body)))


@case("packed", "a chunk becomes a hundred times a chunk", "c.0.0.0.0")
def _(at, out):
    import numcodecs

    chunk(at, with_crc(numcodecs.Blosc("zstd", 9).encode(bytes(768 * 100))))


case("packed", "a chunk says its size, and is of nothing else", "c.0.0.0.0")(
    lambda at, out: chunk(at, with_crc(bytes(4) + (768).to_bytes(4, "little") + bytes(8)))
)
case("plain", "a chunk is as large as a disk", "c.0.0.0.0")(
    lambda at, out: vast(join(at, "columns/000-pixels.zarr/c.0.0.0.0"))
)


@case("plain", "its codec unpickles", "pickle")
def _(at, out):
    def change(body):
        body["columns"][0]["codecs"] = "pickle"

    sign(at, change)
    chunk(at, pickle.dumps(Payload(out)))


# -- datasets: what lies elsewhere, or never ends --------------------------------------------------


def link_to_victim(path, out, name="secret"):
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    os.symlink(join(out, name), path)


case("folder", "its log is a link to a file that would be cut to nothing", "ep_len.log")(
    lambda at, out: link_to_victim(join(at, "ep_len.log"), out)
)
case("folder", "its log is a pipe", "ep_len.log")(lambda at, out: pipe(join(at, "ep_len.log")))


@case("folder", "its log is as large as a disk", opens=True)
def _(at, out):
    vast(join(at, "ep_len.log"))
    with open(join(at, "ep_len.log"), "r+b") as file:
        file.write(struct.pack("<8sQQQ", b"RINGMAPL", 1 << 33, 1 << 39, 0))


def log_record(files, schema, number=3, row=15, columns=None, length=2):
    """Return a record of a log, as a killed writer leaves it."""
    from ringmap.formats.common.log import _HEAD, _MAGIC

    columns, body = columns or [], b""
    for name, dtype, shape in schema:
        part = bytes(2 * int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize)
        part += bytes(-len(part) % 16)
        columns.append([name, dtype, shape, "rows"])
        body += part
    head = {
        "number": number,
        "row": row,
        "length": length,
        "columns": columns,
        "data": 0,
        "notes": {"columns": files},
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 16)
    return _HEAD.pack(_MAGIC, len(text), len(body), xxhash.xxh3_64_intdigest(text + body)) + text + body


@case("folder", "its log has a column that would be written elsewhere", opens=True)
def _(at, out):
    shutil.rmtree(at)
    from ringmap.data import get_format

    with get_format("folder").open_writer(at):
        pass
    add_to_log(at, log_record([["../out/new", "npz"]], [["x", "<f4", [2]]], 0, 0))


def add_to_log(at, record):
    """Add bytes to a log that a writer has begun."""
    from ringmap.formats.common.log import Log, base_of

    log, sizes = Log(join(at, "ep_len.log")), join(at, "ep_len.npz")
    log.start(base_of(np.load(sizes)["arr_0"] if os.path.exists(sizes) else np.empty(0, np.int32)))
    log.close()
    with open(log.path, "ab") as file:
        file.write(record)


@case("folder", "its log tells of a thousand million pictures and holds none", "ep_len.log")
def _(at, out):
    pictures = [["pixels", "|u1", [64, 64, 3], "png"]]
    add_to_log(at, log_record([], [], 3, 15, columns=pictures, length=10**9))


@case(
    "folder",
    "what a killed writer would rename is a link to a file that would be overwritten",
    opens=True,
)
def _(at, out):
    os.symlink(join(out, "secret"), join(at, "action.npz.new"))
    os.symlink(join(out, "secret"), join(at, "ep_len.npz.new"))
    write(join(at, "ep_len.log"), log_record([["pixels", "png"], ["action", "npz"]], [["action", "<f4", [2]]]))


@case("folder", "a folder of images is a link to one whose files would be removed", "pixels")
def _(at, out):
    link_to_victim(join(at, "pixels"), out, "victim")
    write(join(at, "ep_len.log"), b"")


case("folder", "images are a link out of it", "pixels")(lambda at, out: move_out(join(at, "pixels"), out))
case("folder", "an image is a link out of it", "ep_0_step_0.png")(
    lambda at, out: move_out(join(at, "pixels/ep_0_step_0.png"), out)
)
case("folder", "an image is a pipe", "ep_0_step_0.png")(lambda at, out: pipe(join(at, "pixels/ep_0_step_0.png")))
case("folder", "a column is a link out of it", "action.npz")(lambda at, out: move_out(join(at, "action.npz"), out))
case("folder", "a column is a pipe", "action.npz")(lambda at, out: pipe(join(at, "action.npz")))


def columns(at, change):
    edit(join(at, "ep_len.json"), lambda body: [change(c) for c in body["columns"]])


@case("folder", "a column's file is named in another folder", "../out/moved")
def _(at, out):
    shutil.copy(join(at, "action.npz"), join(out, "moved.npz"))
    columns(at, lambda c: c.__setitem__(1, "../out/moved") if c[0] == "action" else None)


@case("folder", "a column's file is named by its whole path", "out/moved")
def _(at, out):
    shutil.copy(join(at, "action.npz"), join(out, "moved.npz"))
    columns(at, lambda c: c.__setitem__(1, join(out, "moved")) if c[0] == "action" else None)


case("folder", "a column's file has a NUL in its name", "as a file of the dataset")(
    lambda at, out: columns(at, lambda c: c.__setitem__(1, "act\0ion") if c[0] == "action" else None)
)
case("folder", "images end in the name of another folder", "stored as")(
    lambda at, out: columns(at, lambda c: c.__setitem__(2, "png/../../out/secret") if c[0] == "pixels" else None)
)


def plan(at, items):
    """Leave what a swap leaves that was cut short."""
    folder = join(os.path.dirname(at), f".{os.path.basename(at)}.new")
    os.mkdir(folder)
    for item in items:
        source = os.path.normpath(join(folder, item))
        os.makedirs(os.path.dirname(source), exist_ok=True)
        write(source, b"from a stranger")
    inodes = {i: [None, list(os.stat(join(folder, i))[2:0:-1])] for i in items}
    write(join(folder, "plan"), inodes)


@case("folder", "a plan would put a file into another folder", "plan")
def _(at, out):
    folder = join(os.path.dirname(at), f".{os.path.basename(at)}.new")
    os.makedirs(join(folder, "x"))
    write(join(folder, "bashrc"), b"from a stranger")
    # <parent>/x/../out/.bashrc lies outside, <folder>/x/../out/.bashrc in the stranger's
    os.makedirs(join(folder, "out"))
    write(join(folder, "out/.bashrc"), b"from a stranger")
    found = os.stat(join(folder, "out/.bashrc"))
    write(join(folder, "plan"), {"out/.bashrc": [None, [found.st_dev, found.st_ino]]})


@case("folder", "a plan would put a file at a path of its choice", "plan")
def _(at, out):
    folder = join(os.path.dirname(at), f".{os.path.basename(at)}.new")
    os.makedirs(folder)
    write(join(folder, "plan"), {join(out, "secret"): [None, [1, 2]]})


@case("folder", "a plan is a pipe", opens=True)
def _(at, out):
    folder = join(os.path.dirname(at), f".{os.path.basename(at)}.new")
    os.makedirs(folder)
    pipe(join(folder, "plan"))


@case("folder", "the folder of a plan is a link to one that would be cleared", opens=True)
def _(at, out):
    write(join(out, "victim/plan"), {})
    os.symlink(join(out, "victim"), join(os.path.dirname(at), f".{os.path.basename(at)}.new"))


# -- datasets: numbers and bytes that are forged ---------------------------------------------------


case("folder", "its description is nested without end", "ep_len.json")(
    lambda at, out: write(join(at, "ep_len.json"), b'{"columns":' * 1_000_000)
)
case("folder", "its description is as large as a disk", "ep_len.json")(lambda at, out: vast(join(at, "ep_len.json")))


def npz(path, header, body=b"", method=zipfile.ZIP_STORED, name="arr_0.npy"):
    """Write an archive of one array with a header of our choice."""
    text = repr(header).encode()
    head = b"\x93NUMPY\x01\0" + (len(text) + 1).to_bytes(2, "little") + text + b"\n"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, head + body)


def header(shape, descr="<f4"):
    return {"descr": descr, "fortran_order": False, "shape": shape}


case("folder", "a column is a pickle", "action.npz")(
    lambda at, out: npz(join(at, "action.npz"), header((15,), "|O"), pickle.dumps([Payload(out)] * 15))
)
case("folder", "a column declares 2**50 rows", "action.npz")(
    lambda at, out: npz(join(at, "action.npz"), header((1 << 50, 2)), bytes(120), zipfile.ZIP_DEFLATED)
)
case("folder", "a column's size wraps around to a small one", "action.npz")(
    lambda at, out: npz(join(at, "action.npz"), header((1 << 62, 2)), bytes(120))
)


@functools.cache
def packed_column():
    """Return 1 GiB of zeros in an archive of 800 bytes: packed with bzip2."""
    whole = io.BytesIO()
    with (
        zipfile.ZipFile(whole, "w", zipfile.ZIP_BZIP2) as archive,
        archive.open("arr_0.npy", "w") as file,
    ):
        text = repr(header((1 << 27, 2))).encode() + b"\n"
        file.write(b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text)
        for _ in range(16):
            file.write(bytes(1 << 20))
    return whole.getvalue()


case("folder", "a packed column becomes 1 GiB", "action.npz")(
    lambda at, out: write(join(at, "action.npz"), packed_column())
)


@case("folder", "an episode has 2**31 - 1 steps of images", "can't hold so many images")
def _(at, out):
    np.savez(join(at, "ep_len.npz"), np.array([(1 << 31) - 1], np.int32))
    np.savez(join(at, "ep_offset.npz"), np.array([0]))
    os.unlink(join(at, "action.npz"))
    edit(
        join(at, "ep_len.json"),
        lambda body: body.update(columns=[c for c in body["columns"] if c[0] == "pixels"]),
    )


case("folder", "an episode starts ahead of the beginning", "do not describe episodes")(
    lambda at, out: np.savez(join(at, "ep_offset.npz"), np.array([-9, 5, 8]))
)


def png(width, height):
    """Return a PNG that says it is so large."""

    def part(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(bytes(100))) + part(b"IEND", b"")


case("folder", "an image has 2**32 pixels", "ep_0_step_0.png")(
    lambda at, out: write(join(at, "pixels/ep_0_step_0.png"), png(1 << 16, 1 << 16))
)


@case("folder", "another program's image has 2**32 pixels", "pixels")
def _(at, out):
    os.unlink(join(at, "ep_len.json"))
    write(join(at, "pixels/ep_0_step_0.png"), png(1 << 16, 1 << 16))


case("folder", "images are declared 2**40 bytes each", "pixels")(
    lambda at, out: columns(at, lambda c: c.__setitem__(4, [1 << 19, 1 << 19, 3]) if c[0] == "pixels" else None)
)


@case("folder", "an image is of a format that no dataset has", "ep_0_step_0.png")
def _(at, out):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(join(at, "pixels/ep_0_step_0.png"), "BMP")


case("folder", "an image is PostScript, which pillow has Ghostscript run", "ep_0_step_0.png")(
    lambda at, out: write(
        join(at, "pixels/ep_0_step_0.png"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n" + SECRET,
    )
)


@case("folder", "episode data is a pickle", "data of episode")
def _(at, out):
    payload = data_of([["x", "array", ["|O", [1]], 9]], pickle.dumps(Payload(out)))
    np.savez(
        join(at, "x.npz"),
        ends=np.array([len(payload)] * 3),
        bytes=np.frombuffer(payload, np.uint8),
        names=np.frombuffer(b'["x"]', np.uint8),
    )
    os.rename(join(at, "x.npz"), join(at, "ep_len.data"))


@case("folder", "a pipe lies where datasets are looked for", "No format detected")
def _(at, out):
    shutil.rmtree(at)
    os.mkdir(at)
    os.mkfifo(join(at, "data.npz"))


@case(
    "folder",
    "a dataset lies where datasets are looked for, as a link out of it",
    "No format detected",
)
def _(at, out):
    shutil.move(at, join(out, "moved"))
    os.mkdir(at)
    os.symlink(join(out, "moved"), join(at, "data"))


# -- HDF5 ------------------------------------------------------------------------------------------


def hdf5(change):
    def harm(at, out):
        import h5py

        with h5py.File(at, "r+") as file:
            change(h5py, file, out)

    return harm


def secret_file(h5py, out):
    with h5py.File(join(out, "moved.h5"), "w") as file:
        file["x"] = np.frombuffer(SECRET.ljust(32), np.uint8)[:15]
    return join(out, "moved.h5")


case("hdf5", "a column is a link into another file", "link to elsewhere")(
    hdf5(lambda h5py, file, out: file.__setitem__("x", h5py.ExternalLink(secret_file(h5py, out), "x")))
)
case("hdf5", "a column is a soft link", "link to elsewhere")(
    hdf5(lambda h5py, file, out: file.__setitem__("x", h5py.SoftLink("/action")))
)
case("hdf5", "a column keeps its rows in another file", "other files")(
    hdf5(lambda h5py, file, out: file.create_dataset("x", (15,), "u1", external=[(join(out, "secret"), 0, 15)]))
)


@case("hdf5", "a column is made of another file's rows", "other files")
@hdf5
def _(h5py, file, out):
    layout = h5py.VirtualLayout((15,), "u1")
    layout[:] = h5py.VirtualSource(secret_file(h5py, out), "x", (15,))
    file.create_virtual_dataset("x", layout)


@case("hdf5", "it has 2**50 episodes", "ep_len")
@hdf5
def _(h5py, file, out):
    for name in ("ep_len", "ep_offset"):
        file[name].resize((1 << 50,))


@case("hdf5", "a step of a column takes 2**40 bytes", "'x'")
@hdf5
def _(h5py, file, out):
    file.create_dataset("x", (15, 1 << 40), "u1", chunks=(1, 1 << 10))


@case("hdf5", "a column declares 2**50 rows", "'action'")
@hdf5
def _(h5py, file, out):
    file["action"].resize((1 << 50, 2))


@case("hdf5", "a column has chunks of 4 GB", "chunks")
@hdf5
def _(h5py, file, out):
    file.create_dataset("x", (1 << 31, 1), "u1", chunks=((1 << 32) - 1, 1), maxshape=(None, 1), compression="gzip")


@case("hdf5", "a column holds references", "HDF5 type")
@hdf5
def _(h5py, file, out):
    file.create_dataset("x", (15,), h5py.ref_dtype)


@case("hdf5", "a column holds arrays of any length", "HDF5 type")
@hdf5
def _(h5py, file, out):
    file.create_dataset("x", (15,), h5py.vlen_dtype(np.uint8))


case("hdf5", "its journal is a pipe", ".journal")(lambda at, out: pipe(at + ".journal"))


@case("hdf5", "its journal is as large as a disk", opens=True)
def _(at, out):
    vast(at + ".journal")
    with open(at + ".journal", "r+b") as file:
        file.write(struct.pack("<8sQQQ", b"RINGMAPJ", 1, 1 << 27, 0))


case("hdf5", "its journal is a link out of it", ".journal")(
    lambda at, out: os.symlink(join(out, "secret"), at + ".journal")
)


def journal(path, page, before, after, size):
    from ringmap.formats.hdf5 import journal as module

    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    module.write(fd, size, [(page, before, after)])
    os.close(fd)


@case(
    "hdf5 in a folder",
    "it is a link to a file that its journal would write to",
    "No format detected",
)
def _(at, out):
    os.unlink(join(at, "data.h5"))
    os.symlink(join(out, "secret"), join(at, "data.h5"))
    journal(join(at, "data.h5.journal"), 7, bytes(4096), b"from a stranger".ljust(4096), 8 * 4096)


@case("hdf5", "it is a link to a file that its journal would write to", "not an HDF5 file", named=True)
def _(at, out):
    os.unlink(at)
    os.symlink(join(out, "secret"), at)
    journal(at + ".journal", 7, bytes(4096), b"from a stranger".ljust(4096), 8 * 4096)


case("hdf5 in a folder", "it is a link out of it", "No format detected")(
    lambda at, out: move_out(join(at, "data.h5"), out)
)
case("hdf5 in a folder", "it is a pipe", "is a pipe")(lambda at, out: pipe(join(at, "data.h5")))


# -- Zarr ------------------------------------------------------------------------------------------


@case("zarr", "chunks are unpickled by a filter", "pickle")
def _(at, out):
    edit(
        join(at, "data/action/.zarray"),
        lambda body: body.update(filters=[{"id": "pickle"}], compressor=None),
    )
    write(join(at, "data/action/0.0"), pickle.dumps(Payload(out)))


@case("zarr", "the episode table is unpickled", "pickle")
def _(at, out):
    edit(
        join(at, "meta/episode_ends/.zarray"),
        lambda body: body.update(filters=[{"id": "pickle"}], compressor=None),
    )
    write(join(at, "meta/episode_ends/0"), pickle.dumps(Payload(out)))


@case("zarr", "chunks are packed by a codec that nothing is known of", "base64")
def _(at, out):
    import numcodecs

    edit(join(at, "data/action/.zarray"), lambda body: body.update(compressor={"id": "base64"}))
    write(join(at, "data/action/0.0"), numcodecs.Base64().encode(bytes(16384 * 8)))


case("zarr", "a column holds Python objects", "action")(
    lambda at, out: edit(
        join(at, "data/action/.zarray"),
        lambda body: body.update(dtype="|O", filters=[{"id": "pickle"}]),
    )
)
case("zarr", "a chunk is a link out of it", "0.0.0.0")(lambda at, out: move_out(join(at, "data/pixels/0.0.0.0"), out))
case("zarr", "a chunk is a pipe", "0.0.0.0")(lambda at, out: pipe(join(at, "data/pixels/0.0.0.0")))
case("zarr", "an array is a link out of it", "pixels")(lambda at, out: move_out(join(at, "data/pixels"), out))


@case("zarr", "a column's array is named in another folder", "out/moved")
def _(at, out):
    shutil.copytree(join(at, "data/action"), join(out, "moved"))

    def change(body):
        next(c for c in body["ringmap"] if c[0] == "action")[1] = "../../out/moved"

    edit(join(at, "data/.zattrs"), change)


case("zarr", "chunks have 2**40 bytes", "chunks")(
    lambda at, out: edit(
        join(at, "data/action/.zarray"),
        lambda body: body.update(chunks=[1 << 38, 2], shape=[1 << 38, 2]),
    )
)


case("zarr", "metadata is nested without end", ".zarray")(
    lambda at, out: write(join(at, "meta/episode_ends/.zarray"), b"[" * 1_000_000)
)


# -- Lance -----------------------------------------------------------------------------------------


case("lance", "a file of rows is a link out of it", "data")(lambda at, out: move_out(only(join(at, "data")), out))
case("lance", "its files of rows are a link out of it", "data")(lambda at, out: move_out(join(at, "data"), out))
case("lance", "a file of rows is a pipe", "data")(lambda at, out: pipe(only(join(at, "data"))))
case("lance", "its log is a link to a file that would be cut to nothing", "ep_len.log")(
    lambda at, out: link_to_victim(join(at, "ep_len.log"), out)
)


@case("lance", "its rows lie under another base", "elsewhere")
def _(at, out):
    import lance

    table = lance.dataset(at).to_table()
    shutil.rmtree(at)
    shutil.rmtree(at.replace(".lance", "_episodes.lance"))
    os.mkdir(join(out, "base"))
    base = lance.DatasetBasePath(path="file://" + join(out, "base"), name="base", is_dataset_root=True)
    lance.write_dataset(table, at, mode="create", initial_bases=[base], target_bases=["base"])


def lance_table(at, change):
    import lance

    table = lance.dataset(at).to_table()
    described = json.loads(table.schema.metadata[b"ringmap"])
    change(described)
    shutil.rmtree(at)
    lance.write_dataset(table.replace_schema_metadata({b"ringmap": json.dumps(described)}), at)


case("lance", "its images are declared 2**40 bytes each", "pixels")(
    lambda at, out: lance_table(at, lambda columns: columns[0].__setitem__(4, [1 << 19, 1 << 19, 3]))
)
case("lance", "a column of no bytes is declared 2**39", "lies")(
    lambda at, out: lance_table(at, lambda columns: columns.append(["lies", "lies", "none", "|u1", [1 << 39]]))
)


# -- video -----------------------------------------------------------------------------------------


case("video", "a video is a link out of it", "ep_0.mp4")(lambda at, out: move_out(join(at, "pixels/ep_0.mp4"), out))
case("video", "a video is a pipe", "ep_0.mp4")(lambda at, out: pipe(join(at, "pixels/ep_0.mp4")))


@case("video", "a video is a list of other files", "ep_0.mp4")
def _(at, out):
    shutil.copy(join(at, "pixels/ep_0.mp4"), join(out, "moved.mp4"))
    write(join(at, "pixels/ep_0.mp4"), f"ffconcat version 1.0\nfile '{out}/moved.mp4'\n".encode())


@case("video", "a video is a list that asks a server", "ep_0.mp4")
def _(at, out):
    text = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/secret.ts\n#EXT-X-ENDLIST\n"
    write(join(at, "pixels/ep_0.mp4"), text.encode())


@case("video", "a video is a playlist of other files", "ep_0.mp4")
def _(at, out):
    import av

    # In the container that playlists are made of; its frames are those of the column.
    with (
        av.open(join(at, "pixels/ep_0.mp4")) as source,
        av.open(join(out, "moved.ts"), "w", format="mpegts") as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    text = f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\n{out}/moved.ts\n#EXT-X-ENDLIST\n"
    write(join(at, "pixels/ep_0.mp4"), text.encode())


@case("video", "a video says that its frames have 2**32 pixels", "ep_0.mp4")
def _(at, out):
    path = join(at, "pixels/ep_0.mp4")
    with open(path, "rb") as file:
        data = bytearray(file.read())
    at_byte = (
        data.index(b"avc1", data.index(b"stsd")) + 4 + 24
    )  # width and height of the sample entry (ISO/IEC 14496-12)
    assert data[at_byte : at_byte + 4] == struct.pack(">HH", 16, 16)
    data[at_byte : at_byte + 4] = struct.pack(">HH", 65535, 65535)
    # The stream's own header is what is decoded; it is cut, so that this one counts.
    where = data.index(b"avcC")
    data[where : where + 4] = b"free"
    write(path, bytes(data))


@case("video", "an episode has 2**31 - 1 frames", "can't hold so many images")
def _(at, out):
    np.savez(join(at, "ep_len.npz"), np.array([(1 << 31) - 1], np.int32))
    np.savez(join(at, "ep_offset.npz"), np.array([0]))
    edit(
        join(at, "ep_len.json"),
        lambda body: body.update(columns=[c for c in body["columns"] if c[0] == "pixels"]),
    )


# -- LeRobot, Minari, rollouts ---------------------------------------------------------------------


def info(at, **changes):
    edit(join(at, "meta/info.json"), lambda body: body.update(changes))


@case("lerobot", "rows are named in another folder", "does not lie in it")
def _(at, out):
    shutil.copytree(join(at, "data"), join(out, "moved"))
    info(at, data_path="../out/moved/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet")


@case("lerobot", "rows are named by their whole path", "does not lie in it")
def _(at, out):
    shutil.copytree(join(at, "data"), join(out, "moved"))
    info(at, data_path=out + "/moved/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet")


case("lerobot", "a path is padded to 2**40 characters", "expected fields as in")(
    lambda at, out: info(at, data_path="data/{chunk_index:>1099511627776}")
)
case("lerobot", "a path looks into Python's objects", "expected fields as in")(
    lambda at, out: info(at, data_path="data/{chunk_index.__class__.__mro__}")
)
case("lerobot", "rows are a link out of it", "file-000.parquet")(
    lambda at, out: move_out(join(at, "data/chunk-000/file-000.parquet"), out)
)
case("lerobot", "its description is a pipe", "No format detected")(lambda at, out: pipe(join(at, "meta/info.json")))
case("lerobot", "its description is nested without end", "No format detected")(
    lambda at, out: write(join(at, "meta/info.json"), b"[" * 1_000_000)
)


@case("lerobot", "an episode has 2**31 - 1 steps", "rows of all episodes")
def _(at, out):
    import pyarrow.parquet as pq

    path = join(at, "meta/episodes/chunk-000/file-000.parquet")
    rows = pq.read_table(path).to_pylist()
    rows[0]["length"] = (1 << 31) - 1
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(rows), path)


case("lerobot", "a step of a column takes 2**40 bytes", "action")(
    lambda at, out: edit(join(at, "meta/info.json"), lambda body: body["features"]["action"].update(shape=[1 << 38]))
)


@case("minari", "its environment is a command", "runs code of its choice")
def _(at, out):
    spec = {
        "id": "x-v0",
        "entry_point": "os:mkdir",
        "kwargs": {"path": join(out, "pwned")},
        "reward_threshold": None,
        "nondeterministic": False,
        "max_episode_steps": None,
        "disable_env_checker": True,
        "order_enforce": False,
        "additional_wrappers": [],
        "vector_entry_point": None,
    }

    def change(body):
        del body["observation_space"]
        body["env_spec"] = json.dumps(spec)

    edit(join(at, "data/metadata.json"), change)


def link_out(group, name, out):
    """Move a group of an HDF5 file to another file, and leave a link to it."""
    import h5py

    with h5py.File(join(out, "moved.h5"), "w") as other:
        group.copy(name, other)
    del group[name]
    group[name] = h5py.ExternalLink(join(out, "moved.h5"), name)


@case("minari", "an episode is a link into another file", "link to elsewhere")
def _(at, out):
    import h5py

    with h5py.File(join(at, "data/main_data.hdf5"), "r+") as file:
        link_out(file, "episode_0", out)


@case("minari", "observations are kept in another file", "other files")
def _(at, out):
    import h5py

    with h5py.File(join(at, "data/main_data.hdf5"), "r+") as file:
        group = file["episode_1"]
        del group["observations"]
        group.create_dataset("observations", (4, 2), "f4", external=[(join(out, "secret"), 0, 32)])


case("minari", "it has 2**50 episodes", "total_episodes")(
    lambda at, out: edit(join(at, "data/metadata.json"), lambda body: body.update(total_episodes=1 << 50))
)
case("minari", "its file is a link out of it", "main_data.hdf5")(
    lambda at, out: move_out(join(at, "data/main_data.hdf5"), out)
)


@case("minari", "a space has 2**40 values", "observation_space")
def _(at, out):
    box = {"type": "Box", "dtype": "float32", "shape": [1 << 40], "low": -1.0, "high": 1.0}
    edit(join(at, "data/metadata.json"), lambda body: body.update(observation_space=json.dumps(box)))


@contextlib.contextmanager
def demos(at):
    """Open robomimic's file for a change."""
    import h5py

    with h5py.File(at, "r+") as file:
        yield file["data"]


@case("robomimic", "a demonstration is a link into another file", "link to elsewhere")
def _(at, out):
    with demos(at) as data:
        link_out(data, "demo_0", out)


@case("robomimic", "actions are kept in another file", "other files")
def _(at, out):
    with demos(at) as data:
        del data["demo_1/actions"]
        data["demo_1"].create_dataset("actions", (4, 2), "f4", external=[(join(out, "secret"), 0, 32)])


@case("robomimic", "it has 2**50 steps in a few bytes", "demo_0")
def _(at, out):
    with demos(at) as data:
        for name in ("actions", "rewards", "dones", "obs/flat", "next_obs/flat"):
            values = data["demo_0"][name]
            shape, kind = (1 << 50, *values.shape[1:]), values.dtype
            del data["demo_0"][name]
            data["demo_0"].create_dataset(name, shape, kind, chunks=(1, *shape[1:]))
        data["demo_0"].attrs["num_samples"] = 1 << 50


@case("robomimic", "num_samples is 2**50", "samples")
def _(at, out):
    with demos(at) as data:
        data["demo_0"].attrs["num_samples"] = 1 << 50


case("robomimic", "it is cut in the middle", "can't be")(lambda at, out: os.truncate(at, os.path.getsize(at) // 2))
case("robomimic", "it is a link out of it", opens=True, named=True)(lambda at, out: move_out(at, out))
case("robomimic", "it is a pipe", "is a pipe")(lambda at, out: pipe(at))


def table_of(at):
    return only(at, "data-", ".parquet")


case("parquet", "its table is a link out of it", "data-00000.parquet")(lambda at, out: move_out(table_of(at), out))
case("parquet", "its table is a pipe", "data-00000.parquet")(lambda at, out: pipe(table_of(at)))
case("parquet", "its footer is cut", "can't be read")(
    lambda at, out: os.truncate(table_of(at), os.path.getsize(table_of(at)) - 20)
)


@case("parquet", "its footer claims 2 GiB", "can't be read")
def _(at, out):
    with open(table_of(at), "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write((0x7FFFFFF0).to_bytes(4, "little"))


case("parquet", "its table is 1 TiB of nothing", "can't be read")(lambda at, out: vast(table_of(at)))


# -- RLDS ------------------------------------------------------------------------------------------


def records_of(at):
    return only(at, "robot-test", "00000-of-00002")


def frame(record):
    """Return a record as TFRecord has it, with checksums that hold."""
    from ringmap.formats.rlds import _masked

    head = struct.pack("<Q", len(record))
    return b"".join((head, struct.pack("<I", _masked(head)), record, struct.pack("<I", _masked(record))))


def one_record(at, features, **values):
    """Put a data set of one record in the place of what is there: name -> a description, and a Feature."""
    from tests.unit.formats.test_rlds import example

    shutil.rmtree(at)
    os.mkdir(at)
    steps = {"sequence": {"feature": {"featuresDict": {"features": features}}}}
    write(join(at, "features.json"), {"featuresDict": {"features": {"steps": steps}}})
    split = {"name": "train", "shardLengths": ["1"]}
    write(join(at, "dataset_info.json"), {"name": "robot", "splits": [split]})
    made = example(**{f"steps/{name}": value for name, value in values.items()})
    write(join(at, "robot-train.tfrecord-00000-of-00001"), frame(made))


FLAG = {"tensor": {"dtype": "bool", "shape": {}, "encoding": "none"}}


case("rlds", "its records are a link out of it", "robot-test")(lambda at, out: move_out(records_of(at), out))
case("rlds", "its records are a pipe", "robot-test")(lambda at, out: pipe(records_of(at)))


@case("rlds", "its records are named in another folder", "expected the name of one")
def _(at, out):
    for name in os.listdir(at):
        shutil.copy(join(at, name), join(out, name))
    edit(join(at, "dataset_info.json"), lambda body: body.update(name="../out/robot"))


case("rlds", "its description is a pipe", "No format detected")(lambda at, out: pipe(join(at, "features.json")))
case("rlds", "its description is nested without end", "No format detected")(
    lambda at, out: write(join(at, "features.json"), b"[" * 1_000_000)
)


@case("rlds", "its features are nested in each other", "expected a description")
def _(at, out):
    inner = FLAG
    for _ in range(200):
        inner = {"featuresDict": {"features": {"a": inner}}}
    one_record(at, {"deep": inner})


case("rlds", "its records are 1 TiB of nothing", "another checksum")(lambda at, out: vast(records_of(at)))


@case("rlds", "a record has 2**60 bytes", "ends beyond the file")
def _(at, out):
    from ringmap.formats.rlds import _masked

    head = struct.pack("<Q", 1 << 60)
    write(records_of(at), head + struct.pack("<I", _masked(head)))


case("rlds", "a feature reaches beyond its record", "beyond")(
    lambda at, out: write(records_of(at), frame(b"\x0a\xff\xff\xff\xff\xff\xff\x7f"))
)


@case("rlds", "a step of a column takes 2**40 bytes", "action")
def _(at, out):
    large = {"tensor": {"dtype": "int8", "shape": {"dimensions": [str(1 << 40)]}}}
    one_record(at, {"is_first": FLAG, "action": large}, is_first=b"\x1a\x03\x0a\x01\x01")


@case("rlds", "a packed value is 1 GB of zeros", "has more than")
def _(at, out):
    from tests.unit.formats.test_rlds import sized

    packed = {"tensor": {"dtype": "uint8", "shape": {"dimensions": ["4"]}, "encoding": "zlib"}}
    pack = zlib.compressobj(9)
    bomb = b"".join(pack.compress(bytes(1 << 20)) for _ in range(1024)) + pack.flush()
    one_record(
        at, {"is_first": FLAG, "packed": packed}, is_first=b"\x1a\x03\x0a\x01\x01", packed=sized(1, sized(1, bomb))
    )


@case("rlds", "a picture is 60000 by 60000", "60000")
def _(at, out):
    from tests.unit.formats.test_rlds import sized

    picture = {"image": {"dtype": "uint8", "shape": {"dimensions": ["-1", "-1", "3"]}}}
    one_record(
        at,
        {"is_first": FLAG, "picture": picture},
        is_first=b"\x1a\x03\x0a\x01\x01",
        picture=sized(1, sized(1, png(60000, 60000))),
    )


@case("rollout", "it is a pickle that runs a command", "no file of a RolloutBuffer")
def _(at, out):
    import torch

    torch.save(Payload(out), at)


case("rollout", "it is a pickle of the old kind", "no file of a RolloutBuffer")(
    lambda at, out: write(at, pickle.dumps(Payload(out)))
)
case("rollout", "it is a pipe", "no regular file")(lambda at, out: pipe(at))


@case("rollout", "it has more steps than the buffer", "")
def _(at, out):
    import torch

    state = torch.load(at, weights_only=True)
    state["step"] = 1000
    state["tensors"] = {n: torch.zeros(1, *t.shape[1:]).expand(1000, *t.shape[1:]) for n, t in state["tensors"].items()}
    torch.save(state, at)
