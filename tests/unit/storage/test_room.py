"""Files mapped side by side."""

import os

import numpy as np
import pytest

from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.disk.system import System

PAGE = 4096


def a_room(nbytes=8 * PAGE):
    made = System().room(nbytes)
    if made is None:
        pytest.skip("this system maps each file by itself")
    return made


@pytest.fixture
def room():
    return a_room()


@pytest.fixture
def file(tmp_path):
    disk = Disk()
    made = disk.create(str(tmp_path / "file"), 3 * PAGE)
    made.write(b"\1" * PAGE, PAGE)
    made.write(b"\2" * PAGE, 2 * PAGE)
    return made


def test_a_range_is_mapped_and_the_rest_reads_as_zeros(room, file):
    assert file.map_into(room, 2 * PAGE, PAGE, 2 * PAGE, random=True)
    assert room.bytes[::PAGE].tolist() == [0, 0, 1, 2, 0, 0, 0, 0]
    file.write(b"\7", PAGE)  # later writes show
    assert room.bytes[2 * PAGE] == 7
    assert not room.bytes.flags.writeable


def test_maps_outlive_the_file_and_the_room(file, tmp_path):
    room = a_room()
    assert file.map_into(room, 0, PAGE, PAGE)
    file.close()
    os.unlink(tmp_path / "file")
    whole = room.bytes
    del room
    assert whole[:PAGE].tolist() == [1] * PAGE


@pytest.mark.parametrize("random", [True, False])
def test_readahead_of_a_range(room, file, random):
    assert file.map_into(room, PAGE, 0, PAGE, random)
    with open("/proc/self/smaps") as lines:
        told = lines.read().partition(f"{room.bytes.ctypes.data + PAGE:x}-")[2]
    flags = told.partition("VmFlags: ")[2].partition("\n")[0].split()
    assert ("rr" in flags) is random


def test_what_does_not_fit_is_refused(room, file):
    for at, nbytes in ((8 * PAGE, 1), (7 * PAGE, 2 * PAGE), (-PAGE, PAGE)):
        with pytest.raises(ValueError, match="outside a room"):
            file.map_into(room, at, 0, nbytes)
    assert not file.map_into(room, 1, 0, PAGE)
    assert not file.map_into(room, 0, 1, PAGE)
    assert not file.map_into(room, 0, 0, 0)
    assert not file.map_into(room, 0, 2 * PAGE, 2 * PAGE)  # beyond the end of the file
    assert not room.bytes.any()


def test_a_room_in_which_a_map_failed_is_not_given_back(file):
    """Another thread's memory may be in its place by now."""
    room = a_room()
    fd = os.dup(file.fd)
    os.close(fd)
    assert not room.put(fd, 0, 0, PAGE, False)
    address = room.bytes.ctypes.data
    del room
    assert _is_mapped(address)


def _is_mapped(address):
    with open("/proc/self/maps") as lines:
        return any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in lines)


def test_a_room_is_given_back(file):
    room = a_room()
    assert file.map_into(room, 0, PAGE, PAGE)
    with open("/proc/self/maps") as lines:
        assert file.path in lines.read()
    del room
    with open("/proc/self/maps") as lines:
        assert file.path not in lines.read()


def test_systems_and_disks_without(file):
    assert System(portable=True).room(PAGE) is None
    assert System().room(0) is None
    assert System().room(1 << 62) is None
    made = System().room(PAGE)
    ram = MemoryDisk().create("x", PAGE)
    assert made is None or not ram.map_into(made, 0, 0, PAGE)


def test_address_space_takes_no_memory():
    made = a_room(1 << 42)
    assert made.bytes[np.array([0, 1 << 40, (1 << 42) - 1])].tolist() == [0, 0, 0]
