"""A file system of one file, served to the kernel by hand: every read and write of it is a call of ours.

    ext4, xfs, btrfs -> loop device -> the file `disk` -> /dev/fuse -> `serve(volume, ...)`

It speaks the kernel's protocol (linux/fuse.h, 7.31) over /dev/fuse, a dozen kinds of request, so no
library is needed. The file is opened for direct I/O: no page cache lies between the loop device and
us, and a flush of the device arrives as FSYNC after the writes that it is to follow.

Not here: what the volume makes of it (volume.py).
"""

import ctypes
import errno
import os
import select
import struct

MOST = 1 << 18
"""Bytes of the largest write."""

_HEADER = struct.Struct("<IIQQIIIHH")
_REPLY = struct.Struct("<IiQ")
_TRANSFER = struct.Struct("<QQIIQII")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_INIT = struct.Struct("<IIIIHHIIHHI28x")

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE = 1, 2, 3, 4, 14, 15, 16
_STATFS, _RELEASE, _FSYNC, _FLUSH, _INIT_CODE, _INTERRUPT = 17, 18, 20, 25, 26, 36
_DESTROY, _FORGET_MANY, _FALLOCATE = 38, 42, 43
_SILENT = {_FORGET, _FORGET_MANY, _INTERRUPT}
_ASYNC_READ, _BIG_WRITES, _ASYNC_DIO, _MAX_PAGES = 1 << 0, 1 << 5, 1 << 15, 1 << 22
_DIRECT_IO = 1
_ROOT, _FILE = 1, 2
_FOREVER = 1 << 30


def mount(folder):
    """Mount a file system with one file, `disk`, and return the descriptor to serve it by."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"ringmap", os.fsencode(folder), b"fuse", 2 | 4, options):  # no setuid, no devices
        os.close(fd)
        raise OSError(ctypes.get_errno(), "can't mount a FUSE file system", str(folder))
    return fd


def serve(fd, volume, control, command):
    """Answer the kernel until it is unmounted, and `command()` whenever `control` can be read, until it says False.

    Args:
        fd: what `mount` returned.
        volume: `size`, `read(offset, size)`, `write(offset, data)` and `flush()`.
        control: a descriptor.
        command: called without arguments.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.register(control, select.POLLIN)
    room = bytearray(MOST + 8192)
    while True:
        ready = dict(poll.poll())
        if fd in ready:
            try:
                size = os.readv(fd, [room])
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                raise
            _answer(fd, volume, memoryview(room)[:size])
        if control in ready and not command():
            poll.unregister(control)


def _answer(fd, volume, request):
    _, code, unique, node, *_ = _HEADER.unpack_from(request)
    if code in _SILENT:
        return
    failed, parts = 0, []
    try:
        parts = _done(volume, code, node, request[_HEADER.size :])
    except OSError as error:
        failed = -error.errno
    size = _REPLY.size + sum(map(len, parts))
    os.writev(fd, [_REPLY.pack(size, failed, unique), *parts])


def _done(volume, code, node, body):
    """Do one request and return the parts of the answer."""
    if code == _WRITE:
        _, offset, size, *_ = _TRANSFER.unpack_from(body)
        volume.write(offset, bytes(body[_TRANSFER.size : _TRANSFER.size + size]))
        return [struct.pack("<II", size, 0)]
    if code == _READ:
        _, offset, size, *_ = _TRANSFER.unpack_from(body)
        return [volume.read(offset, size)]
    if code == _FSYNC:
        volume.flush()
        return []
    if code == _INIT_CODE:
        flags = _ASYNC_READ | _BIG_WRITES | _ASYNC_DIO | _MAX_PAGES
        return [_INIT.pack(7, 31, 1 << 17, flags, 64, 48, MOST, 1, MOST // 4096, 0, 0)]
    if code in (_GETATTR, _SETATTR):
        return [struct.pack("<QII", _FOREVER, 0, 0) + _attr(volume, node)]
    if code == _LOOKUP:
        if bytes(body).rstrip(b"\0") != b"disk":
            raise OSError(errno.ENOENT, "no such file")
        return [struct.pack("<QQQQII", _FILE, 0, _FOREVER, _FOREVER, 0, 0) + _attr(volume, _FILE)]
    if code == _OPEN:
        return [struct.pack("<QII", 0, _DIRECT_IO, 0)]
    if code == _STATFS:
        return [bytes(80)]
    if code in (_RELEASE, _FLUSH, _DESTROY):
        return []
    raise OSError(errno.EOPNOTSUPP if code == _FALLOCATE else errno.ENOSYS, "not served")


def _attr(volume, node):
    size, mode = (volume.size, 0o100600) if node == _FILE else (0, 0o040700)
    return _ATTR.pack(node, size, size // 512, *[0] * 6, mode, 1, 0, 0, 0, 4096, 0)
