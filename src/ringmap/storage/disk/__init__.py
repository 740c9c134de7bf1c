"""The disk package: everything that calls the operating system.

    files      the door: every change to a file or folder goes through a `Disk`
    system     what differs between operating systems, chosen at run time, and their errors in words
    memory     the same interface to a disk in RAM, for a buffer without a path
    lock       one writer for each directory, enforced by the kernel
    process    what a fork, the end of a process and a missing thread mean
    calls      a call inside a call of one thread is refused
    checksums  what a checksum makes whole: JSON objects, runs of frames, a small value in two slots
    paths      the path that a caller gives, and the names in a buffer's directory

Since there is one door, a test can make any change fail, or kill the process after it, without a private name of the
code above. A `Disk` that holds a folder opens everything below it through a descriptor, so that a replaced directory
is detected and never changed.

Imports nothing from the other packages of the storage.
"""
