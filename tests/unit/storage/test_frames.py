"""A run of frames: whatever is cut, flipped or forged in it, the frames before are read, no other, and why it ends."""

import os
import tracemalloc
from contextlib import closing

import pytest

from ringmap.storage.disk import checksums
from ringmap.storage.disk.checksums import CUT, DAMAGED, END, FINISH, FINISHED, HEADER, FrameReader, framed
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryDisk

PAYLOADS = [b"a", b"bc" * 20, b"\0\0\0", bytes(range(200)), b"e"]
SEED, AT = 1 << 62, 100


def written(path, seed=SEED, at=AT):
    """Write the payloads, and return the bytes up to the end, and where each frame ends."""
    ends = [at]
    with closing(Disk().create(str(path))) as file:
        for number, payload in enumerate(PAYLOADS):
            file.write(framed(payload, number, seed), ends[-1])
            ends.append(ends[-1] + HEADER.size + len(payload))
    return path.read_bytes(), ends


def read(path, seed=SEED, at=AT, most=200, **options):
    """Return the payloads, and why there are no more."""
    with closing(Disk().open(str(path))) as file:
        reader, found = FrameReader(file, seed, at, **options), []
        while (payload := reader.next(most)) is not None:
            found.append(payload)
        assert reader.number == len(found)
        assert reader.next(most) is None, "it goes on behind its end"
        return found, reader.ending


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def test_what_was_written_is_read(path):
    raw, ends = written(path)
    for chunk in (1, 13, 1 << 16):
        assert read(path, chunk=chunk) == (PAYLOADS, END)
    assert raw[AT:] == b"".join(framed(payload, number, SEED) for number, payload in enumerate(PAYLOADS))
    assert read(path, stop=ends[2]) == (PAYLOADS[:2], END)
    assert read(path, stop=ends[2] - 1) == (PAYLOADS[:1], CUT)
    with closing(Disk().open(str(path))) as file:
        reader = FrameReader(file, SEED, ends[3], 3)
        assert (reader.next(200), reader.at, reader.number) == (PAYLOADS[3], ends[4], 4)


def test_in_ram():
    disk = MemoryDisk()
    disk.make_folder("/ring")
    file = disk.create("/ring/run")
    file.write(framed(b"abc", 0), 0)
    reader = FrameReader(file)
    assert (reader.next(3), reader.next(3), reader.ending) == (b"abc", None, END)


def test_a_cut_is_told(path):
    raw, ends = written(path)
    for size in range(AT, len(raw)):
        path.write_bytes(raw[:size])
        count = sum(end <= size for end in ends[1:])
        assert read(path) == (PAYLOADS[:count], END if size == ends[count] else CUT), size


def test_zeros_behind_are_an_end(path):
    raw, ends = written(path)
    for count in (1, 11, 12, 13, 1000):
        path.write_bytes(raw + bytes(count))
        assert read(path) == (PAYLOADS, END)
    path.write_bytes(raw[: ends[2]] + bytes(len(raw) - ends[2]))
    assert read(path) == (PAYLOADS[:2], END)


def run_damages(path):
    raw, ends = written(path)
    for at in range(AT, len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        count = sum(end <= at for end in ends[1:])
        found, ending = read(path)
        assert found == PAYLOADS[:count], at
        of_size = at - ends[count] < 4  # a greater size looks like a cut, unless it is more than there may be
        assert ending == DAMAGED or (of_size and ending == CUT), at


def test_damage_is_told_and_never_returned(path):
    run_damages(path)


def test_control_frames_without_a_checksum(path, monkeypatch):
    monkeypatch.setattr(checksums.xxhash, "xxh3_64_intdigest", lambda *_: 0)
    with pytest.raises(AssertionError):
        run_damages(path)


def test_a_frame_of_another_run_or_place_is_damaged(path):
    raw, ends = written(path)
    assert read(path, seed=SEED - 1) == ([], DAMAGED)
    path.write_bytes(raw[: ends[1]] + raw[ends[2] :])
    assert read(path) == (PAYLOADS[:1], DAMAGED)


def test_a_run_over_an_earlier_one(path):
    """Bytes of the earlier one that lie behind are damaged frames, but for an end that was written behind."""
    for end, ending in ((b"", DAMAGED), (bytes(HEADER.size), END), (FINISH, FINISHED)):
        path.unlink(missing_ok=True)
        written(path)
        with closing(Disk().open(str(path), write=True)) as file:
            file.write(framed(b"x", 0, 7) + framed(b"yz", 1, 7) + end, AT)
        assert read(path, seed=7) == ([b"x", b"yz"], ending)


@pytest.mark.parametrize("size", [201, 1 << 20, (1 << 32) - 1])
@pytest.mark.parametrize("most", [200, 1 << 32])
def test_a_forged_size_takes_no_memory(path, size, most):
    raw, _ = written(path)
    path.write_bytes(raw + HEADER.pack(size, 1))
    tracemalloc.start()
    assert read(path, most=most) == (PAYLOADS, DAMAGED if most < size else CUT)
    os.truncate(path, 1 << 40)  # sparse
    assert read(path, most=200) == (PAYLOADS, DAMAGED)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
