"""What differs between operating systems: each service, and a whole life on the fallbacks alone."""

import errno
import fcntl
import glob
import io
import os
import shutil
import sys
from unittest import mock

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault, LockedError
from ringmap.storage.disk import system as module
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import NotAFileError, System
from tests.disks import FullDisk, Through
from tests.unit.buffers.steps import episode, prove, stored


@pytest.fixture(params=[False, True], ids=["native", "portable"])
def system(request):
    return System(portable=request.param)


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_nothing_but_a_regular_file_is_opened(system, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    os.symlink("file", tmp_path / "link")
    os.symlink("nowhere", tmp_path / "dangling")
    os.mkfifo(tmp_path / "pipe")
    kinds = {
        "link": "a symbolic link",
        "dangling": "a symbolic link",
        "folder": "a folder",
        "pipe": "a pipe",
    }
    for flags in (os.O_RDONLY, os.O_RDWR):
        for name, kind in kinds.items():
            with pytest.raises(NotAFileError, match=f"{name}: is {kind}, expected a regular file"):
                system.open_file(str(tmp_path / name), flags)
        fd, found = system.open_file(str(tmp_path / "file"), flags)
        assert found.st_size == 1
        assert not os.get_inheritable(fd)
        os.close(fd)
        with pytest.raises(FileNotFoundError):
            system.open_file(str(tmp_path / "none"), flags)


def test_the_fallback_sees_what_is_swapped_in_between(tmp_path, monkeypatch):
    for name in ("file", "other"):
        (tmp_path / name).write_bytes(b"x")
    looked = os.stat(tmp_path / "other")
    monkeypatch.setattr(os, "stat", lambda path, follow_symlinks=True: looked)
    with pytest.raises(NotAFileError, match="another file than a moment ago"):
        System(portable=True).open_file(str(tmp_path / "file"), os.O_RDONLY)


def test_a_link_is_removed_and_not_what_it_leads_to(system, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").touch()
    os.symlink("folder", tmp_path / "link")
    Disk(system).discard(str(tmp_path / "link"))
    assert (tmp_path / "folder/file").exists()
    assert not os.path.lexists(tmp_path / "link")


def test_bytes_go_where_they_are_told(system, fd):
    system.pwrite(fd, b"hello", 3)
    system.pwrite(fd, memoryview(np.array([33], np.uint8)), 8)
    assert system.pread(fd, 100, 2) == b"\0hello!"
    assert system.pread(fd, 2, 4) == b"el"
    assert system.pread(fd, 5, 100) == b""
    system.sync(fd)


def test_a_call_that_does_less_than_asked_goes_on(system, fd, monkeypatch):
    """As a disk that fills up, or a kernel that takes 2 GiB at most."""
    for name in ("pwrite", "write", "pread", "read"):
        real = getattr(os, name)
        short = (lambda fd, data, *at, real=real: real(fd, data[:3], *at)) if "write" in name else None
        short = short or (lambda fd, size, *at, real=real: real(fd, min(size, 3), *at))
        monkeypatch.setattr(os, name, short)
    vectored = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, rooms, offset: vectored(fd, (rooms[0][:3],), offset))
    system.pwrite(fd, b"0123456789", 2)
    system.pwrite(fd, memoryview(np.arange(3, dtype="<u4")), 12)
    system.pwrite_each(fd, [b"abcdefg", b"h"], [30, 24])
    expected = bytes(2) + b"0123456789" + np.arange(3, dtype="<u4").tobytes() + b"h" + bytes(5) + b"abcdefg"
    assert system.pread(fd, 100, 0) == expected
    assert system.pread(fd, 5, 30) == b"abcde"
    room = bytearray(40)
    assert system.pread_into(fd, memoryview(room), 0) == 37
    assert room == expected + bytes(3)


def test_reserving_does_not_write(system, fd):
    system.pwrite(fd, b"hello", 0)
    size = os.fstat(fd).st_size
    system.reserve(fd, 0, size)
    assert system.pread(fd, 9, 0) == b"hello"


def test_a_file_system_that_reserves_nothing_is_fine(monkeypatch, fd):
    for code in (
        errno.EOPNOTSUPP,
        errno.EINVAL,
        errno.ENOSYS,
        errno.ENODEV,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
    ):

        def refuse(*_, code=code):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            with pytest.raises(OSError, match=os.strerror(code)):
                System().reserve(fd, 0, 10)
        else:
            System().reserve(fd, 0, 10)


FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, *FAULTS])
def test_files_that_the_kernel_can_t_copy_or_share(monkeypatch, tmp_path, fd, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    os.pwrite(fd, b"hello", 0)
    with open(tmp_path / "other", "wb") as other:
        for call in (
            lambda: System().copy_range(fd, other.fileno(), 0, 5),
            lambda: System().share(fd, other.fileno()),
        ):
            if code in FAULTS:
                with pytest.raises(OSError, match=os.strerror(code)):
                    call()
            else:
                assert not call()


@pytest.mark.parametrize("way", ["kernel", "nothing at all", "refused", "portable"])
def test_a_range_is_copied_in_every_way(monkeypatch, tmp_path, way):
    disk = Disk(System(portable=way == "portable"))
    if way == "nothing at all":
        monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    if way == "refused":
        refused = mock.Mock(side_effect=OSError(errno.EXDEV, os.strerror(errno.EXDEV)))
        monkeypatch.setattr(os, "copy_file_range", refused)
    (tmp_path / "source").write_bytes(bytes(range(256)) * 4096)
    source, target = (
        disk.open(str(tmp_path / "source")),
        disk.create(str(tmp_path / "target"), 1 << 20),
    )
    assert target.copy_from(source, 1000, 700_000) == 700_000
    assert target.copy_from(source, 900_000, 1 << 20) == (1 << 20) - 900_000, "as far as it goes"
    found, whole = (tmp_path / "target").read_bytes(), (tmp_path / "source").read_bytes()
    assert found == bytes(1000) + whole[1000:701_000] + bytes(199_000) + whole[900_000:]
    source.close()
    target.close()


def test_a_file_that_shares_nothing_is_not_there(tmp_path):
    disk = Disk(System(portable=True))
    (tmp_path / "source").write_bytes(b"hello")
    source = disk.open(str(tmp_path / "source"))
    assert disk.share(source, str(tmp_path / "target")) is None
    source.close()
    assert os.listdir(tmp_path) == ["source"]


def test_reading_into_an_array(system, fd):
    system.pwrite(fd, b"hello", 3)
    room = np.full(9, 33, np.uint8)
    assert system.pread_into(fd, room.data, 2) == 6
    assert room.tobytes() == b"\0hello!!!"
    assert system.pread_into(fd, room.data, 100) == 0


def test_folders_are_synced_where_that_is_possible(monkeypatch, system, tmp_path):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    system.sync_folder(str(tmp_path))
    assert synced == ([] if system.portable else [str(tmp_path)])


def test_the_fallback_syncs_with_fsync(monkeypatch, system, fd):
    called = []
    monkeypatch.setattr(os, "fsync", lambda _: called.append("fsync"))
    monkeypatch.setattr(os, "fdatasync", lambda _: called.append("fdatasync"))
    system.sync(fd)
    assert called == ["fsync" if system.portable else "fdatasync"]


def test_on_a_mac_the_drive_s_cache_is_flushed_too(monkeypatch, fd):
    called = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, command: called.append(command))
    System().sync(fd)
    assert called == [51], "F_FULLFSYNC"


def test_boot_id(system):
    boot = system.boot_id()
    if system.portable:
        assert boot is None
    else:
        assert len(boot) == 16
        assert boot == System().boot_id()


def test_no_boot_id_where_nothing_tells(monkeypatch):
    def missing(*_args, **_more):
        raise OSError(errno.ENOENT, "no /proc")

    monkeypatch.setattr(module, "open", missing, raising=False)
    assert System().boot_id() is None


@pytest.mark.parametrize("kind", ["nfs4", "ceph", "fuse.sshfs", "ext4", "fuse.other", ""])
def test_network_file_systems_are_known_by_their_device(monkeypatch, tmp_path, kind):
    device = os.stat(tmp_path).st_dev
    mounts = "22 1 1000:1 / / rw,relatime shared:1 - nfs4 /dev/sda1 rw\n23 22 1000:2 / /a\\040b\r rw - nfs4 x rw\n"
    if kind:
        mounts += f"24 22 {os.major(device)}:{os.minor(device)} /in /some/where rw shared:2 - {kind} server:/ rw\n"
    monkeypatch.setattr(module, "open", lambda *_: io.BytesIO(mounts.encode()), raising=False)
    network = kind in ("nfs4", "ceph", "fuse.sshfs")
    assert System().is_network(str(tmp_path)) == network
    assert not System().is_network(str(tmp_path / "missing"))
    assert not System(portable=True).is_network(str(tmp_path))


# -- a whole life ------------------------------------------------------------------------------


PortableBuffer = Through(ReplayBuffer, Disk(System(portable=True)))


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_whole_life_on_the_fallbacks(tmp_path, durability):
    path = tmp_path / "buf"
    options = {"max_steps": 40, "history_len": 2, "path": path, "durability": durability, "seed": 0}
    buf = PortableBuffer(**options)
    lengths = {number: 3 + number % 9 for number in range(30)}
    lengths[29] = 40
    for number in range(29):
        buf.write_episode(episode(number, lengths[number], {"number": number}))
    kept = stored(buf)
    assert kept[-1] == 28
    assert sum(lengths[n] for n in kept) <= 40
    prove(buf.sample(64), {n: lengths[n] for n in kept}, 2)

    reader = PortableBuffer.open(path)
    assert stored(reader) == kept
    with pytest.raises(LockedError):
        PortableBuffer(**options)
    recording = buf.begin_episode()
    recording.append({name: values[0] for name, values in episode(77, 1).items()})

    shutil.copytree(path, tmp_path / "killed")  # as a kill at this moment would leave it
    killed = PortableBuffer(**{**options, "path": tmp_path / "killed"}, interrupted="keep")
    left = [*kept, 77] if sum(lengths[n] for n in kept) < 40 else [*kept[1:], 77]
    assert stored(killed) == left
    assert killed.get_episode_data()["number"] == [*left[:-1], None]
    killed.close()

    recording.abandon()
    buf.write_episode(episode(29, 40))
    assert stored(buf) == [29]
    reader.refresh()
    assert stored(reader) == [29]
    buf.clear()
    assert len(buf) == 0
    buf.close()
    reader.close()
    again = PortableBuffer.open(path, mode="r+")
    assert (again.num_episodes, again.column_names) == (0, list(episode(0, 1)))
    again.close()


def test_what_no_sync_vouches_for_is_verified_at_each_opening(tmp_path):
    """Without a boot id nobody can tell a kill from a power cut, so damaged rows are found at once."""
    path = tmp_path / "buf"
    buf = PortableBuffer(max_steps=40, path=path, sync_every_s=0)
    buf.write_episode(episode(0, 5))
    buf.flush()
    buf.write_episode(episode(1, 5))
    shutil.copytree(path, tmp_path / "cut")
    buf.close()
    column = tmp_path / "cut/columns/003-action.npy"
    with open(column, "r+b") as file:
        file.seek(4096 + 16 * 7)
        file.write(b"\xff")
    cut = PortableBuffer.open(tmp_path / "cut", mode="r+")
    assert stored(cut) == [0]
    cut.close()


def test_a_full_disk_shows_when_it_is_written_to(tmp_path):
    Buffer = Through(ReplayBuffer, FullDisk("write", where="columns", system=System(portable=True)))

    buf = Buffer(max_steps=40, path=tmp_path / "buf")
    buf.write_episode(episode(0, 5))
    buf.engine.disk.full = True
    with pytest.raises(EnvironmentFault, match="No space left"):
        buf.write_episode(episode(1, 5))
    buf.engine.disk.full = False
    assert stored(buf) == [0]
    buf.write_episode(episode(2, 5))
    assert stored(buf) == [0, 2]
    buf.close()


@pytest.mark.parametrize(
    ("looks", "found", "asked"),
    [
        ([["other", "mine"]], True, 1),
        ([["other"]], False, 1),  # in one piece: nothing is missing
        ([["other", "other"], ["other", "mine"]], True, 2),
        ([["other", "other"]] * 8, False, 8),
    ],
)
def test_a_lock_that_the_kernel_leaves_out(tmp_path, monkeypatch, looks, found, asked):
    """The list of locks comes in pieces, and between two of them other locks come and go."""
    lock = tmp_path / "lock"
    lock.touch()
    numbers = {"mine": lock.stat().st_ino, "other": 1}
    lines = [[f"1: FLOCK  ADVISORY  WRITE 7 00:1b:{numbers[who]} 0 EOF\n".encode() for who in look] for look in looks]
    given = []

    def read():
        given.append(lines[len(given)])
        return given[-1]

    monkeypatch.setattr("ringmap.storage.disk.system._read_locks", read)
    assert System().is_locked(str(lock)) is found
    assert len(given) == asked


@pytest.mark.parametrize(
    "pattern", ["*", "a*", ".*", "*/x", "a?/*", "[a]1/*", "*/*/y", "none/*", "a1", "*/none", "file/*"]
)
def test_what_matches_a_glob(tmp_path, pattern):
    for name in ("a1/x/y", "a2/x", "b/x/y", ".hidden/x", "a1/.x"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "file").touch()
    where = os.path.join(tmp_path, pattern)
    assert Disk().matching(where) == sorted(glob.glob(where))


def test_a_folder_that_can_not_be_listed_is_not_empty(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()

    def fails(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "listdir", fails)
    for pattern in ("*", "*/*"):
        with pytest.raises(OSError, match="Too many"):
            Disk().matching(os.path.join(tmp_path, pattern))
