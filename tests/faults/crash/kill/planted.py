"""Wrong orders, planted on purpose: the campaign of kills must catch each of them.

Most hold some changes of a recorded call back until others were made: a kill sees nothing but their order. The rest
replace a method.
"""

import os

import numpy as np

from ringmap.buffers.steps import StepRing
from ringmap.storage.commit import commit, store
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.disk.files import File
from ringmap.storage.disk.lock import WriterLock
from ringmap.storage.records import blobs
from ringmap.storage.records.table import EPISODE, RECORD, RETIRE
from ringmap.storage.ring.live import LiveEpisodes
from ringmap.storage.ring.ring import Ring
from ringmap.storage.sidecars import priorities
from ringmap.storage.sidecars import values as mutable
from ringmap.storage.sidecars.priorities import PriorityFile
from ringmap.storage.sidecars.successors import Successors
from tests.faults.crash.recording import RecordingDisk

_KIND_AT = RECORD.fields["kind"][1]
_KINDS = {0: "wipe", EPISODE: "record", RETIRE: "retire"}


def kind_of(entry, path):
    """Return what a change is to the protocol."""
    change, (folder, name) = entry[0], os.path.split(path)
    inside = os.path.basename(folder)
    if change == "rename":
        name = entry[3]
    if name == "episodes.npy" and change == "write" and entry[2]:
        return _KINDS.get(entry[3][_KIND_AT], "mark")
    if inside.endswith(".zarr") and name.startswith("c."):
        return "rows"
    names = {"state.bin": "state", "steps.bin": f"stream {change}", "columns": "columns", "manifest.json": "manifest"}
    return names.get(name) or {"columns": "rows", "data": f"blob {change}"}.get(inside, change)


def hold_back(disk, ends, kinds, until, with_them=()):
    """Put changes of some kinds into the log of a disk only after one of another kind, or at the end of their call.

    Args:
        disk: a `RecordingDisk`.
        ends: of the calls, in its log.
        kinds: held back.
        until: the kind that lets them go, after it.
        with_them: kinds held back only behind one that is.
    """
    changes, held = [], []

    def let_go():
        changes.extend(held)
        held.clear()

    for at, change in enumerate(zip(disk.log, disk.paths, strict=True)):
        if at in ends:
            let_go()
        kind = kind_of(*change)
        if kind in kinds or (held and kind in with_them):
            held.append(change)
            continue
        changes.append(change)
        if kind == until:
            let_go()
    let_go()
    disk.log[:], disk.paths[:] = map(list, zip(*changes, strict=True))


HELD_BACK = {
    "record before rows": (["rows"], "record", (), "laps"),
    "record before rows, compressed": (["rows"], "record", (), "compressed"),
    "record before blob": (["blob write"], "record", (), "laps"),
    "state.bin before record": (["record"], "state", (), "laps"),
    "rows overwritten before their retire record": (["retire"], "blob write", ["state"], "long episodes"),
    "rows overwritten before their retire record, compressed": (
        ["retire"],
        "blob write",
        ["state"],
        "long episodes, compressed",
    ),
    "segment deleted before its retirement": (["record"], "blob unlink", ["state"], "a segment each"),
    "stream removed before its commit": (["record"], "stream unlink", ["state"], "streams, kept"),
    "columns renamed after the manifest": (["columns"], "manifest", (), "birth with columns"),
}
"""Name -> what is held back, until when, what with it, and the script that shows it."""


def table_after_the_manifest(patch):
    create, reopen, rename = RecordingDisk.create, RecordingDisk.open, RecordingDisk.rename
    late = {}

    def create_elsewhere(self, path, size=0):
        if os.path.basename(path) == "episodes.npy":
            path = late.setdefault(path, f"{path}.late")
        return create(self, path, size)

    def renamed(self, source, target):
        rename(self, source, target)
        for path in [*late]:
            rename(self, late.pop(path), path)

    patch.setattr(RecordingDisk, "create", create_elsewhere)
    patch.setattr(RecordingDisk, "open", lambda self, path, write=False: reopen(self, late.get(path, path), write))
    patch.setattr(RecordingDisk, "rename", renamed)


def manifest_in_place(patch):
    def replace_file(self, path, data):
        old = self.size(path) if self.exists(path) else 0
        file = self.open(path, write=True) if old else self.create(path)
        data = data.ljust(old)
        for at in range(0, len(data), 128):
            file.write(data[at : at + 128], at)
        file.sync()
        file.close()

    patch.setattr(RecordingDisk, "replace_file", replace_file, raising=False)


def of_chunks(wrong):
    """Return what puts something wrong in place of how a chunk is replaced: `wrong(put, disk, path, beside, data)`."""

    def plant(patch):
        put = RecordingDisk.put

        def replace(self, path, beside, data, synced):
            if not (beside.endswith("next.tmp") and wrong(self, path, beside, data)):
                put(self, path, beside, data, synced)

        patch.setattr(RecordingDisk, "put", replace, raising=False)

    return plant


def in_place(disk, path, beside, data):
    if disk.exists(path):
        file = disk.open(path, write=True)
        file.empty()
        for at in range(0, len(data), 16):
            file.write(data[at : at + 16], at)
        file.close()
        return True


def removed_first(disk, path, beside, data):
    if disk.exists(path):
        disk.remove(path)


def leftovers_refused(disk, path, beside, data):
    if disk.exists(beside):
        raise FileExistsError(17, "there already", beside)


def orphans_kept(patch):
    adopt = blobs.Segments.adopt

    def kept(self, last_seq, beyond):
        there = [blobs.segment_number(name) for name in os.listdir(self.folder)]
        adopt(self, dict.fromkeys((number for number in there if number is not None), 0) | dict(last_seq), beyond)

    patch.setattr(blobs.Segments, "adopt", kept)


def finished_stream_forgotten(patch):
    patch.setattr(CommitFiles, "carry_finished", lambda self, stream: None)


def live_rows_overwritten(patch):
    patch.setattr(Ring, "overwritten", lambda self, head: head - self.rows - 3)


def no_lock(patch):
    patch.setattr(WriterLock, "acquire", lambda self: None)


def never_stale(patch):
    assert "_stale" in commit.Committer.__init__.__code__.co_names
    patch.setattr(store.Store, "_stale", property(lambda self: False, lambda self, value: None), raising=False)


def memory_before_the_files(patch):
    class Eager(LiveEpisodes):
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

    patch.setattr(store.Store, "__init__", start_eager)
    patch.setattr(store.Store, "commit", commit_eager)


def successors_after_the_commit(patch):
    write, turn = Successors.write, Successors.turn

    def turned(self):
        arguments = self.__dict__.pop("late", None)
        if arguments is not None:
            write(self, *arguments)
        turn(self)

    patch.setattr(Successors, "write", lambda self, *arguments: setattr(self, "late", arguments))
    patch.setattr(Successors, "turn", turned)


def words_after_the_log(patch):
    write, put = PriorityFile.write, PriorityFile._write_words

    def late(self, leaves):
        patch.setattr(PriorityFile, "_write_words", lambda *_: None)
        log = write(self, leaves)
        patch.setattr(PriorityFile, "_write_words", put)
        for start in range(0, self._rows, priorities._PIECE):
            put(self, leaves, start)
        return log

    patch.setattr(PriorityFile, "write", late)


def labels_and_rounds_apart(patch):
    update = StepRing.update

    def wrong(self, ids, values, where):
        for name, each in values.items():
            update(self, ids, {name: each}, where)

    patch.setattr(StepRing, "update", wrong)


def values_in_place(patch):
    def write_each(self, pieces, offsets):
        for piece, offset in zip(pieces, offsets, strict=True):
            half = len(piece) // 2
            self.write(piece[:half], offset)
            self.write(piece[half:], offset + half)

    patch.setattr(mutable, "_OTHER", np.array([0, 1]))
    patch.setattr(File, "write_each", write_each)


def commits_never_shown(patch):
    patch.setattr(CommitFiles, "_publish", lambda self, state: setattr(self, "state", state))


def states_of_several_shown_at_the_end(patch):
    """Show readers the records of a call once the last one is written."""
    real, publish = store.Store.commit_now, CommitFiles._publish

    def wrong(self, files, *args):
        states = []
        later = lambda files, state: states.append(state) or setattr(files, "state", state)  # noqa: E731
        patch.setattr(CommitFiles, "_publish", later)
        try:
            real(self, files, *args)
        finally:
            patch.setattr(CommitFiles, "_publish", publish)
        publish(files, states[-1])

    patch.setattr(store.Store, "commit_now", wrong)


def memory_of_several_before_the_record(patch):
    append, remember, real = CommitFiles.append, store.Store._remember, store.Store.commit_now

    def early(self, files, *args):
        first = lambda files, record, durable: (remember(self, record), append(files, record, durable))  # noqa: E731
        patch.setattr(store.Store, "_remember", lambda self, record: None)
        patch.setattr(CommitFiles, "append", first)
        try:
            real(self, files, *args)
        finally:
            self._stale = False  # as if no recovery were due
            patch.setattr(store.Store, "_remember", remember)
            patch.setattr(CommitFiles, "append", append)

    patch.setattr(store.Store, "commit_now", early)


PLANTS = {
    "manifest written in place": (manifest_in_place, "ends"),
    "episode table made after the manifest": (table_after_the_manifest, "birth"),
    "rows overwritten while they are live": (live_rows_overwritten, "a long episode over short ones"),
    "finished stream not named in its commit": (finished_stream_forgotten, "streams, kept"),
    "orphaned segments kept": (orphans_kept, "laps"),
    "chunk written in place": (of_chunks(in_place), "compressed"),
    "chunk removed before the new one is there": (of_chunks(removed_first), "compressed"),
    "unfinished chunk never removed": (of_chunks(leftovers_refused), "compressed"),
    "successors written after the commit": (successors_after_the_commit, "transitions"),
    "words of priorities after the log": (words_after_the_log, "priorities"),
    "values written over the newest, in two pieces": (values_in_place, "values"),
    "labels and their round apart": (labels_and_rounds_apart, "labels"),
    "commits that readers are not shown": (commits_never_shown, "laps"),
    "states of several episodes shown at the end": (states_of_several_shown_at_the_end, "joined"),
}
"""Name -> what plants it, and the script that shows it."""

OF_INTERRUPTS = {
    "memory never marked stale": (never_stale, "laps"),
    "memory changed before the files": (memory_before_the_files, "laps"),
    "memory of several changed before the record": (memory_of_several_before_the_record, "joined"),
}
