"""Wrong orders, planted on purpose: the campaign must catch each of them.

Most are a disk that holds some changes back until others were made, so that no private name of
the store is needed; the rest replace one method.
"""

import functools
import os

import numpy as np

from ringmap.buffers import engine
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.steps import StepRing
from ringmap.storage.commit import commit, files, store
from ringmap.storage.commit.open_episode import OpenEpisode
from ringmap.storage.disk import lock
from ringmap.storage.disk.files import File
from ringmap.storage.records import blobs
from ringmap.storage.records.table import EPISODE, RECORD, RETIRE, EpisodeTable
from ringmap.storage.ring import live
from ringmap.storage.sidecars import priorities
from ringmap.storage.sidecars import values as mutable
from ringmap.storage.sidecars.priorities import PriorityFile
from ringmap.storage.sidecars.successors import Successors
from tests.crash.kill import victim
from tests.crash.kill.blows import CrashDisk
from tests.disks import descriptor_of

_KIND_AT = RECORD.fields["kind"][1]
_KINDS = {0: "wipe", EPISODE: "record", RETIRE: "retire"}


def kind_of(change, path, offset=0, data=b""):
    """Return what a change is to the protocol."""
    folder, name = os.path.split(path)
    inside = os.path.basename(folder)
    if name == "episodes.npy" and change == "write" and offset:
        return _KINDS.get(memoryview(data).cast("B")[_KIND_AT], "mark")
    if name == "state.bin":
        return "state"
    if name == "steps.bin":
        return f"stream {change}"
    if name == "columns":
        return "columns"
    if inside.endswith(".zarr") and name.startswith("c."):
        return "rows"
    if name == "manifest.json":
        return "manifest"
    return {"columns": "rows", "data": f"blob {change}"}.get(inside, change)


class HoldBack(CrashDisk):
    """Makes changes of some kinds only once one of another kind was made.

    Args:
        hold: kinds held back.
        until: the kind that lets them go, after it; the end of a call does so too.
        with_them: kinds held back only behind one that is.
    """

    def __init__(self, hold, until, with_them=()):
        super().__init__()
        self.kept, self.until, self.with_them = hold, until, with_them
        self.held = []

    def make(self, kind, change):
        if kind in self.kept or (self.held and kind in self.with_them):
            self.held.append(change)
            return
        change()
        if kind == self.until:
            self.let_go()

    def let_go(self):
        held, self.held = self.held, []
        for change in held:
            change()

    def create(self, path, size=0):
        file = super().create(path, size)
        return HeldFile(self, descriptor_of(file), path)

    def open(self, path, write=False):
        file = super().open(path, write)
        return HeldFile(self, descriptor_of(file), path)

    def put(self, path, beside, data, synced):
        self.make(kind_of("put", path), lambda: super(HoldBack, self).put(path, beside, data, synced))

    def rename(self, source, target):
        if source.endswith("next.tmp"):  # of a chunk that is put now
            super().rename(source, target)
            return
        self.make(kind_of("rename", target), lambda: super(HoldBack, self).rename(source, target))

    def remove(self, path):
        self.make(kind_of("unlink", path), lambda: super(HoldBack, self).remove(path))


class HeldFile(File):
    def write(self, data, offset):
        copied = bytes(memoryview(data).cast("B"))
        file = File(self.disk, os.dup(self.fd), self.path)  # ours may be closed by then

        def change():
            file.write(copied, offset)
            file.close()

        self.disk.make(kind_of("write", self.path, offset, copied), change)


def hold(*kinds, until, with_them=()):
    def plant():
        disk = engine.DISK = HoldBack(kinds, until, with_them)
        for owner, name in (
            (ReplayBuffer, "__init__"),
            (ReplayBuffer, "write_episode"),
            (OpenEpisode, "finish"),
        ):
            setattr(owner, name, then_let_go(getattr(owner, name), disk))

    return plant


def then_let_go(method, disk):
    @functools.wraps(method)
    def call(*args, **words):
        try:
            return method(*args, **words)
        finally:
            disk.let_go()

    return call


def manifest_in_place():
    class InPlace(CrashDisk):
        def replace_file(self, path, data):
            old = self.size(path) if self.exists(path) else 0
            file = self.open(path, write=True) if old else self.create(path)
            data = data.ljust(old)
            for at in range(0, len(data), 128):
                file.write(data[at : at + 128], at)
            file.sync()
            file.close()

    engine.DISK = InPlace()


def table_after_the_manifest():
    class Late(CrashDisk):
        late = None

        def create(self, path, size=0):
            if os.path.basename(path) != "episodes.npy":
                return super().create(path, size)
            self.late = os.path.join(os.path.dirname(path), "data", "late"), path
            return super().create(self.late[0], size)

        def open(self, path, write=False):
            return super().open(self.late[0] if self.late is not None and path == self.late[1] else path, write)

        def rename(self, source, target):
            super().rename(source, target)
            if self.late is not None:
                super().rename(*self.late)
                self.late = None

    engine.DISK = Late()


def chunk_in_place():
    class InPlace(CrashDisk):
        def put(self, path, beside, data, synced):
            if beside.endswith("next.tmp") and self.exists(path):
                file = self.open(path, write=True)
                for at in range(0, len(data), 16):
                    file.write(data[at : at + 16], at)
                os.ftruncate(file.fd, len(data))
                file.close()
            else:
                super().put(path, beside, data, synced)

    engine.DISK = InPlace()


def chunk_removed_first():
    class Removes(CrashDisk):
        def put(self, path, beside, data, synced):
            if beside.endswith("next.tmp") and self.exists(path):
                self.remove(path)
            super().put(path, beside, data, synced)

    engine.DISK = Removes()


def leftovers_refused():
    class Strict(CrashDisk):
        def put(self, path, beside, data, synced):
            if self.exists(beside):
                raise FileExistsError(17, "there already", beside)
            super().put(path, beside, data, synced)

    engine.DISK = Strict()


def orphans_kept():
    adopt = blobs.Segments.adopt

    def kept(self, last_seq, beyond):
        there = [blobs.segment_number(name) for name in os.listdir(self.folder)]
        adopt(self, dict.fromkeys((number for number in there if number is not None), 0) | dict(last_seq), beyond)

    blobs.Segments.adopt = kept


def torn_record_left():
    EpisodeTable.zero = lambda self, slot: None


def no_lock():
    lock.WriterLock.acquire = lambda self: None


def finished_stream_forgotten():
    files.CommitFiles.carry_finished = lambda self, stream: None


def unrehearsed():
    victim.rehearse = lambda: None


def never_stale():
    assert "_stale" in commit.Committer.__init__.__code__.co_names
    store.Store._stale = property(lambda self: False, lambda self, value: None)


def memory_before_the_files():
    class Eager(live.LiveEpisodes):
        __slots__ = ()

        def append(self, start, length, *of):
            if not len(self) or int(self.starts[-1]) != start:
                super().append(start, length, *of)

    start, real = store.Store.__init__, store.Store.commit

    def start_eager(self, *args):
        start(self, *args)
        self.live = Eager(self.live.starts, self.live.lengths)

    def commit_eager(self, new, stored=None):
        if len(self.live):
            self.live.append(self.head, len(new.arrays[0]))
        real(self, new, stored)

    store.Store.__init__, store.Store.commit = start_eager, commit_eager


def successors_after_the_commit(put=setattr):
    write, turn = Successors.write, Successors.turn

    def turned(self):
        arguments = self.__dict__.pop("late", None)
        if arguments is not None:
            write(self, *arguments)
        turn(self)

    put(Successors, "write", lambda self, *arguments: setattr(self, "late", arguments))
    put(Successors, "turn", turned)


def words_after_the_log():
    write, put = PriorityFile.write, PriorityFile._write_words

    def late(self, leaves):
        PriorityFile._write_words = lambda *_: None
        log = write(self, leaves)
        PriorityFile._write_words = put
        for start in range(0, self._rows, priorities._PIECE):
            put(self, leaves, start)
        return log

    PriorityFile.write = late


def labels_and_rounds_apart():
    update = StepRing.update

    def wrong(self, ids, values, where):
        for name, each in values.items():
            update(self, ids, {name: each}, where)

    StepRing.update = wrong


def values_in_place():
    mutable._OTHER = np.array([0, 1])

    def write_each(self, pieces, offsets):
        for piece, offset in zip(pieces, offsets, strict=True):
            half = len(piece) // 2
            self.write(piece[:half], offset)
            self.write(piece[half:], offset + half)

    File.write_each = write_each


PLANTS = {
    "record before rows": hold("rows", until="record"),
    "record before blob": hold("blob write", until="record"),
    "state.bin before record": hold("record", until="state"),
    "rows overwritten before their retire record": hold("retire", until="blob write", with_them=("state",)),
    "segment deleted before its retirement": hold("record", until="blob unlink", with_them=("state",)),
    "stream removed before its commit": hold("record", until="stream unlink", with_them=("state",)),
    "columns renamed after the manifest": hold("columns", until="manifest"),
    "manifest written in place": manifest_in_place,
    "episode table made after the manifest": table_after_the_manifest,
    "finished stream not named in its commit": finished_stream_forgotten,
    "orphaned segments kept": orphans_kept,
    "torn record not wiped": torn_record_left,
    "lock not taken": no_lock,
    "places counted in another state": unrehearsed,
    "memory never marked stale": never_stale,
    "memory changed before the files": memory_before_the_files,
    "chunk written in place": chunk_in_place,
    "chunk removed before the new one is there": chunk_removed_first,
    "unfinished chunk never removed": leftovers_refused,
    "successors written after the commit": successors_after_the_commit,
    "words of priorities after the log": words_after_the_log,
    "values written over the newest, in two pieces": values_in_place,
    "labels and their round apart": labels_and_rounds_apart,
}
"""Name -> what plants it in this process."""


def never_synced():
    File.sync = lambda self: None
    CrashDisk.sync_folder = lambda self, path: None


UNSEEN = {"nothing is ever synced": never_synced}
"""What no kill shows, as the page cache outlives the process: a power cut does."""
