"""Two slots of a file: what a kill, a foreign file, old bytes and a writer under way leave of a small value."""

import struct
import threading
from typing import NamedTuple

import pytest

from ringmap.storage.disk import checksums
from ringmap.storage.disk.checksums import SLOT_NBYTES, TwoSlots
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryFile

SALT = b"s" * 16


class Value(NamedTuple):
    generation: int
    number: int
    text: bytes


class Slots(TwoSlots[Value]):
    magic = b"RINGMAPT"
    form = struct.Struct("<8sQq8s")

    @staticmethod
    def decode(generation, number, text):
        return Value(generation, number, text) if number >= 0 else None


def value(generation):
    return Value(generation, 10 * generation, b"%08d" % generation)


def slots_of(*generations, salt=SALT):
    slots = Slots(MemoryFile("two", 2 * SLOT_NBYTES), salt)
    for generation in generations:
        slots.write(value(generation))
    return slots


def flip(slots, slot, at):
    data = bytearray(slots._file.read(1, slot * SLOT_NBYTES + at))
    data[0] ^= 1
    slots._file.write(bytes(data), slot * SLOT_NBYTES + at)


@pytest.fixture(autouse=True)
def _few_looks(monkeypatch):
    monkeypatch.setattr(checksums, "_PEEKS", 3)


def test_the_greater_generation_is_the_newest():
    for generations in ((0, 1), (1, 2), (4, 3), (6, 7)):
        slots = slots_of(*generations)
        assert slots.newest() == value(max(generations))
        assert slots.peek() == (value(max(generations)), slots.data())


def test_a_file_that_was_never_written_has_no_value():
    slots = slots_of()
    assert slots.slots() == (None, None)
    assert slots.newest() is None
    assert slots.peek()[0] is None


def test_of_one_value_the_newest_is_this_one_and_a_peek_waits_for_the_other():
    slots = slots_of(3)
    assert slots.slots() == (None, value(3))
    assert slots.newest() == value(3)
    assert slots.peek()[0] is None


@pytest.mark.parametrize("at", range(Slots.form.size + 8))
def test_each_byte_of_a_slot_is_covered(at):
    slots = slots_of(4, 5)
    flip(slots, 1, at)
    assert slots.slots() == (value(4), None)
    assert slots.newest() == value(4)
    assert slots.peek()[0] is None


def test_bytes_behind_the_slots_do_not_count():
    slots = slots_of(4, 5)
    flip(slots, 1, Slots.form.size + 8)
    assert slots.peek()[0] == value(5)


def test_two_torn_slots_have_no_value():
    slots = slots_of(4, 5)
    flip(slots, 0, 20)
    flip(slots, 1, 30)
    assert slots.newest() is None
    assert slots.peek()[0] is None


def test_a_write_that_stops_leaves_the_value_before():
    for stop in range(Slots.form.size + 8):
        slots = slots_of(4, 5)
        made = slots_of(6).data()
        slots._file.write(made[:stop], 0)
        assert slots.newest() == value(5)


def test_a_foreign_salt_has_no_value():
    slots = slots_of(4, 5, salt=b"t" * 16)
    assert Slots(slots._file, SALT).newest() is None


def test_another_magic_and_a_slot_at_the_other_place_do_not_count():
    class Others(Slots):
        magic = b"RINGMAPU"

    slots = slots_of(4, 5)
    assert Others(slots._file, SALT).newest() is None
    data = slots.data()
    slots._file.write(data[SLOT_NBYTES:] + data[:SLOT_NBYTES], 0)
    assert slots.newest() is None


def test_a_short_file_has_no_value():
    for size in (0, 8, Slots.form.size + 7, SLOT_NBYTES):
        file = MemoryFile("two", 0)
        file.write(slots_of(4, 5).data()[:size], 0)
        assert Slots(file, SALT).newest() == (value(4) if size == SLOT_NBYTES else None)


def test_what_can_not_be_a_value_does_not_count_though_its_checksum_holds():
    slots = slots_of(4)
    slots.write(Value(5, -1, b"forged"))
    assert slots.newest() == value(4)


def test_a_peek_sees_no_value_two_behind_and_newest_does(monkeypatch):
    """Slot 1 is torn when the bytes are taken; until they are read its writer has written both."""
    slots, whole, seen = slots_of(4, 5), Slots.data, []

    def data(self):
        found = whole(self)
        if not seen:
            found = found[: SLOT_NBYTES + 20] + b"?" + found[SLOT_NBYTES + 21 :]
            slots.write(value(6))
            slots.write(value(7))
        seen.append(found)
        return found

    monkeypatch.setattr(Slots, "data", data)
    assert slots.peek() == (value(7), whole(slots))
    assert len(seen) == 2
    assert slots.newest(seen[0]) == value(4)  # the control


def test_generations_change_with_each_value(tmp_path):
    disk = Disk()
    with_map = Slots(disk.create(str(tmp_path / "two"), 2 * SLOT_NBYTES), SALT, mapped=True)
    assert Slots(with_map._file, SALT).generations() is None
    for generation in range(2, 6):
        with_map.write(value(generation))
        assert max(with_map.generations()) == generation
    with_map.close()
    assert with_map.generations() is None


def test_a_peek_beside_a_writer_never_goes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "_PEEKS", 2000)
    disk, path = Disk(), str(tmp_path / "two")
    writer = Slots(disk.create(path, 2 * SLOT_NBYTES), SALT)
    writer.write(value(0))
    writer.write(value(1))
    reader, shown, ended = Slots(disk.open(path), SALT), [1], threading.Event()

    def write():
        for generation in range(2, 3000):
            writer.write(value(generation))
            shown[0] = generation
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    last = 0
    while not ended.is_set():
        before = shown[0]
        found, _ = reader.peek()
        assert found == value(found.generation)
        assert found.generation >= max(before, last)
        last = found.generation
    thread.join()
    assert reader.peek()[0] == value(2999)
