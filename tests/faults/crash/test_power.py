"""Power cuts: every disk that a cut may leave reopens to a committed state.

Recorded scripts of calls are cut after every change, with what was not synced lost, kept or torn,
and opened by the real code; the recovery is cut in its turn. A control per guard of
the protocol takes the guard out, and must be caught.
"""

import itertools
import logging
import os
import random
import time

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.columns.rows import Rows
from ringmap.storage.columns.zarr import ZarrColumn
from ringmap.storage.commit import store
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk
from ringmap.storage.read import reader
from ringmap.storage.records.table import EpisodeTable
from ringmap.storage.sidecars.priorities import PriorityFile
from ringmap.storage.sidecars.successors import Successors
from tests.disks import Through, ram_folder
from tests.faults.crash.cases import Case, Session
from tests.faults.crash.harness import LEVELS, Origins, Violation, crash
from tests.faults.crash.joined import JoinedSession
from tests.faults.crash.kill.planted import labels_and_rounds_apart, successors_after_the_commit
from tests.faults.crash.labels import LabelSession
from tests.faults.crash.priorities import PrioritySession
from tests.faults.crash.recording import Always, Model, RecordingDisk, RecordingHandle
from tests.faults.crash.transitions import NamedSession, StackSession, TransitionSession
from tests.tiers import few

__all__ = ["crash"]


def campaign_unless(chosen):
    """Return the marks of a case that runs by default only if it is one of those that were chosen."""
    return () if chosen else pytest.mark.campaign


@pytest.fixture
def base():
    """A folder in RAM, where a sync costs nothing."""
    with ram_folder() as folder:
        yield str(folder)


@pytest.fixture(autouse=True)
def _quiet():
    """Drop what is logged: a kept record holds the error, its frames, and the files open in them."""
    log, nothing = logging.getLogger("ringmap"), lambda record: False
    log.addFilter(nothing)
    yield
    log.removeFilter(nothing)


# -- the protocol ------------------------------------------------------------------------------------


SCRIPTS = [(0, "memmap"), (1, "memmap"), (2, "zarr"), (3, "mixed")]
BY_DEFAULT = {(0, False), (1, True), (2, True), (3, False)}


@pytest.mark.parametrize(
    ("seed", "storage", "power"),
    few(
        [
            pytest.param(*script, power, marks=campaign_unless((script[0], power) in BY_DEFAULT))
            for script, power in itertools.product(SCRIPTS, (False, True))
        ],
        2,
    ),
)
def test_a_cut_shows_a_committed_state(crash, seed, storage, power):
    campaign = crash(Session, Case.draw(seed, power, storage), seed, samples=1, every=2, share=0.02)
    assert campaign.states > 50


SESSIONS = {
    "transitions": TransitionSession,
    "stacks": StackSession,
    "priorities": PrioritySession,
    "labels": LabelSession,
    "joined": JoinedSession,
    "named": NamedSession,
}


OTHERS = [
    ("transitions", 3),
    ("stacks", 5),
    ("priorities", 4),
    ("labels", 2),
    ("joined", 3),
    ("named", 3),
]


@pytest.mark.parametrize(
    ("name", "seed", "power"),
    few(
        [
            pytest.param(*other, power, marks=campaign_unless(power != (other[0] == "priorities")))
            for other, power in itertools.product(OTHERS, (False, True))
        ],
        2,
    ),
)
def test_a_cut_shows_what_other_buffers_keep(crash, name, seed, power):
    kind = SESSIONS[name]
    case = Case.draw(seed, power, count=5, step=kind.draw_step)
    campaign = crash(kind, Case(**{**vars_of(case), "warm": 5}), seed, samples=0, share=0.01)
    assert campaign.states > 20


W = ("write", 2)
U = ("update", 0.4, None)
R = ("relabel", 0.0, None)
ABANDONED = {"keep": True}
SMALL_SEGMENTS = {"segment": 1, "warm": 12}
FOUND = {
    # A retirement whose sync failed was not written again: the table ended before the mark.
    "failed sync of a retirement": (
        *(Session, [True]),
        *((W, ("write", 6, ("sync", 4)), W, ("write", 1)), {"warm": 5}),
    ),
    # No fault of the ring: the ordinal that a finish gave behind its recovery was taken for one that a cut before had.
    "ordinal of a finish that recovered": (
        *(Session, [False]),
        (("write", 3), ("append",), ("sync",), ("write", 6), ("clear",), ("finish", ("partial", 2)), ("sync",)),
        {"spare": 6, "slots": 1, "keep": True, "warm": 5},
    ),
    # A recovery whose own sync failed left the trust in the page cache standing.
    "failed sync in a recovery": (
        *(Session, [False]),
        *((("write", 1), ("reopen", "kill", False, ("sync", 1)), ("write", 3), ("flush",)), {"warm": 5}),
    ),
    # The newest blobs were lost, and with them the sampling state that an older one had.
    "small state behind the live records": (
        *(Session, [False]),
        *((("sample",), ("flush",), ("sample",), W, ("sync",), ("clear",), W, ("clear",)), {}),
    ),
    # An abandoned stream came back with its folder's old name, and was kept.
    "abandoned stream": (Session, [True], (("append",), ("append",), ("abandon",), W), ABANDONED),
    # The same after an opening that did not see its folder, whose removal no sync had made durable.
    "abandoned stream, opened again": (
        *(Session, [False, True]),
        *((("append",), ("abandon", ("EIO", 3)), ("reopen", "kill"), W), ABANDONED),
    ),
    # A retired segment could not be deleted: a commit that stood raised, or a bare OSError did.
    "segment not deleted": (
        *(Session, [False, True]),
        *((W, W, ("sync", ("EIO", 8)), ("write", 3, ("EIO", 9)), W), SMALL_SEGMENTS),
    ),
    # A commit that readers were not shown had its predecessors' segments deleted.
    "unpublished commit": (
        *(Session, [True]),
        *((("clear", ("EIO", 7)), W, W, ("clear", ("EIO", 5)), W), SMALL_SEGMENTS),
    ),
    # A background sync met a file that a commit had closed meanwhile.
    "segment closed under a sync": (
        *(Session, [False]),
        *(tuple(("sync_write", 3, at) for at in (1, 2, 3, 1, 2)), SMALL_SEGMENTS),
    ),
    # A flush that was interrupted forgot which chunks it had not synced yet; the next one vouched for them.
    "interrupted sync of chunks": (
        *(Session, [False]),
        *((W, ("write", 3), ("flush", ("interrupt", 2)), ("flush",), W), {"storage": "zarr"}),
    ),
    # The name of the first file of successors was not synced.
    "successors without a name": (TransitionSession, [True], (W, W), {"warm": 0}),
    # Successors counted for their head alone: those of a call that a cut took were served for another's.
    "successors of another call": (TransitionSession, [False], (W, W, ("sync",), W), {"warm": 5}),
    # The rows of a dropped newest call were served as next observations, and drawn by priority.
    "a spoiled call behind the newest": (TransitionSession, [False], (("write", 3), W, ("write", 3)), {}),
    # The state of sampling was carried by the commit after the one that it counted as stored with.
    "sampling of a group that is settled": (
        TransitionSession,
        [True],
        (("write", 3), ("sample",), ("write", 3), ("write", 2)),
        {},
    ),
    "a spoiled episode behind the newest": (PrioritySession, [False], (U, W, ("sample",), W), {}),
    # A fold overwrote the log that the disk still needed; a fall-back left the log of its generation out.
    "log overwritten before its leaves were synced": (
        PrioritySession,
        [False, True],
        (U, ("flush",), *[U] * 8, W, U, U),
        {},
    ),
    # What a close had stored was never synced.
    "priorities closed": (PrioritySession, [False, True], (U, ("reopen", "close"), U, U), {}),
    # The capacity rode with the first rows: a cut that took them left a buffer that could not be opened.
    "first rows of a ring lost": (LabelSession, [False], (W, W, R), {"warm": 0}),
    # A failed sync of labels kept the buffer from being closed.
    "close after a failed sync of labels": (
        LabelSession,
        [True],
        (W, ("relabel", 0.0, ("sync", 1)), W, R),
        {},
    ),
}
"""Name -> session, levels, steps and sizes; `warm` is 4 for other buffers."""


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", few([*FOUND][::8] + [name for i, name in enumerate(FOUND) if i % 8], 3))
def test_what_the_campaign_found(crash, name, every):
    kind, levels, steps, sizes = FOUND[name]
    for power in levels:
        case = Case(power, steps, **({} if kind is Session else {"warm": 4}) | sizes)
        goes_on = kind is not Session and not power
        crash(kind, case, samples=3 if kind is Session else 1, every=every, share=0.01 * goes_on)


def vars_of(case):
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


# -- controls: each guard taken out is caught ---------------------------------------------------------

SCRIPT = (
    W,
    ("sample",),
    ("sync",),
    ("write", 3),
    ("write", 1),
    ("flush",),
    W,
    ("clear",),
    ("write", 3),
    ("write", 8),
    ("sync_write", 2, 2),
    ("write", 3),
    W,
    ("reopen", "kill"),
    ("write", 3),
    W,
)
SLOTS = (("write", 1), ("flush",), *[("write", 1), ("clear",)] * 7)
LONG = (W, W, ("flush",), ("write", 8), W)
STREAMS = (
    ("append",),
    ("append",),
    W,
    ("finish",),
    W,
    ("append",),
    ("sync",),
    ("finish",),
    ("write", 8),
    W,
)


FAILING = (W, ("flush", ("sync", 1)), ("write", 1))


CHUNKS = (
    ("write", 1),
    ("sync",),
    ("write", 1),
    W,
    ("flush",),
    ("write", 1),
    ("write", 1),
    ("sync",),
    W,
    W,
    W,
)


def unsynced(put):
    """A chunk is replaced by a file that is not synced; other files are."""

    def wrong(self, path, beside, data, synced):
        put(self, path, beside, data, synced and not beside.endswith("next.tmp"))

    return wrong


def chunks_folder_synced(change, path, details):
    return change == "sync_folder" and path.endswith(".zarr")


def forgetful(self):
    """A sync that holds chunks for not synced until all are."""
    chunks = sorted(self._dirty)
    for chunk in chunks:
        file = self.disk.open(self._file(chunk), write=True)
        file.sync()
        file.close()
    if chunks:
        self.disk.sync_folder(self.path)
    self._dirty = set()


def synced(part):
    return lambda change, path, details: change == "sync" and part in path


def folder_synced(change, path, details):
    return change == "sync_folder" and path.endswith("/buf")


def mark_after_the_sync(self):
    files = self.files
    segments = files.segments.unsynced()
    files.sync_all(self.rows, segments)
    files.mark_synced(files.state, segments)
    files.state_file.sync()


def delete_early(append):
    def wrong(self, record, durable):
        append(self, record, durable)
        self.segments.delete_before(record.first, record.seq)

    return wrong


def without_rows(commit_now):
    def wrong(self, files, new, stored=None):
        rows = self.rows
        if new.schema is None:
            self.rows = None
        try:
            commit_now(self, files, new, stored)
        finally:
            self.rows = self.rows or rows

    return wrong


def retry(sync):
    def wrong(self):
        try:
            sync(self)
        except OSError:
            sync(self)

    return wrong


def trusting(poisoned):
    def wrong(self, error):
        self.state_file.write = lambda state: None
        poisoned(self, error)

    return wrong


PROTECT = CommitFiles.protect
PLANTED = {
    "rows are not synced before the record": (True, SCRIPT, {"patch": (Rows, "sync", lambda self: None)}),
    "blobs are not synced before the record": (True, SCRIPT, {"cheats": synced("/data/")}),
    "the table is not synced, power": (True, SCRIPT, {"patch": (EpisodeTable, "sync", lambda self: None)}),
    "the table is not synced, process": (False, SCRIPT, {"patch": (EpisodeTable, "sync", lambda self: None)}),
    "columns are not synced before their rename": (False, SCRIPT, {"cheats": synced("/columns.tmp/")}),
    "the folder is not synced after a rename": (True, SCRIPT, {"cheats": folder_synced}),
    "no table sync before retired rows are overwritten": (
        False,
        SCRIPT,
        {"patch": (CommitFiles, "protect", lambda self, need, seq, now: PROTECT(self, 0, seq, now))},
    ),
    "no table sync before a slot is used again": (
        False,
        SLOTS,
        {"patch": (CommitFiles, "protect", lambda self, need, seq, now: PROTECT(self, need, 0, now))},
    ),
    "a long episode retires nothing first, power": (
        True,
        LONG,
        {"patch": (Store, "_retire", lambda self, files, need: None)},
    ),
    "a long episode retires nothing first, process": (
        False,
        LONG,
        {"patch": (Store, "_retire", lambda self, files, need: None)},
    ),
    "the mark is taken after the sync": (
        False,
        SCRIPT,
        {"patch": (Store, "sync_behind", mark_after_the_sync)},
    ),
    "state.bin is trusted after a reboot": (False, SCRIPT, {"boots": False}),
    "newer records are not zeroed": (
        False,
        (W, W),
        {"patch": (EpisodeTable, "zero", lambda self, slot: None), "share": 0.5},
    ),
    "segments go before the retirement is durable": (
        False,
        SCRIPT,
        {"patch": (CommitFiles, "append", delete_early(CommitFiles.append)), "segment": 1},
    ),
    "a record without rows is synced before the rows of commits that were not": (
        True,
        (("write", 3), ("unsynced", 3), ("write", 8)),
        {"patch": (Store, "commit_now", without_rows(Store.commit_now))},
    ),
    "a failed sync is tried again": (
        False,
        FAILING,
        {"patch": (RecordingHandle, "sync", retry(RecordingHandle.sync))},
    ),
    "after a failed sync the page cache is trusted": (
        False,
        FAILING,
        {"patch": (CommitFiles, "poisoned", trusting(CommitFiles.poisoned))},
    ),
    "after a failed sync nothing is written again": (
        False,
        FAILING,
        {"patch": (CommitFiles, "_write_again", lambda self, found, rows, bad: None)},
    ),
    "episodes behind the mark are not verified": (
        False,
        SCRIPT,
        {"patch": (store, "bad_episodes", lambda *_: {}), "too": (reader, "bad_episodes", lambda *_: {})},
    ),
    "the blob is not synced with the table": (
        False,
        (("sample",), W, ("sync",), W, W, ("write", 3), W, ("write", 3), W),
        {"patch": (CommitFiles, "_sync_blobs", lambda self: None), "segment": 1},
    ),
    "a chunk of vouched rows is replaced unsynced, process": (
        False,
        CHUNKS,
        {"patch": (Disk, "put", unsynced(Disk.put)), "storage": "zarr"},
    ),
    "a chunk of vouched rows is replaced unsynced, power": (
        True,
        CHUNKS,
        {"patch": (Disk, "put", unsynced(Disk.put)), "storage": "mixed"},
    ),
    "the name of a chunk is not synced": (True, CHUNKS, {"cheats": chunks_folder_synced, "storage": "zarr"}),
    "the chunks that a killed writer left are not synced": (
        False,
        (W, W, ("reopen", "kill"), W),
        {"patch": (ZarrColumn, "touched", lambda self, slot, count: None), "storage": "zarr"},
    ),
    "a sync lets go of chunks that are replaced meanwhile": (
        False,
        tuple(("sync_write", 1, at) for at in (1, 2, 1, 2, 1)),
        {"patch": (ZarrColumn, "sync", forgetful), "storage": "zarr"},
    ),
    "a finished stream is not remembered": (
        False,
        STREAMS,
        {"patch": (CommitFiles, "carry_finished", lambda self, stream: None), "keep": True},
    ),
}


RARE = [
    "columns are not synced before their rename",
    "no table sync before a slot is used again",
    "a finished stream is not remembered",
    "a flush writes no words of priorities",
    "priorities of rows that a cut took stay",
]


def samples(name):
    """Return how a fault is looked for: on every third disk, and where that does not show it on every one."""
    return (1,) if name in RARE else (3, 1)


@pytest.mark.parametrize("name", few(PLANTED, 5))
def test_control(crash, monkeypatch, name):
    power, steps, wrong = PLANTED[name]
    for key in ("patch", "too"):
        if key in wrong:
            monkeypatch.setattr(*wrong[key])
    options = {key: wrong[key] for key in ("cheats", "boots", "share") if key in wrong}
    tried = 0
    warms = (7, 0) if steps in (SCRIPT, CHUNKS) else (6,)
    for every, warm, seed in itertools.product(samples(name), warms, range(3)):
        case = Case(
            power,
            steps,
            segment=wrong.get("segment", 700),
            keep="keep" in wrong,
            warm=warm,
            storage=wrong.get("storage", "memmap"),
        )
        try:
            crash(Session, case, seed, **{"samples": 4, "every": every, "share": 0, **options})
        except Violation as violation:
            assert "prefix" in str(violation), "wrong even without a crash"
            print(f"{name}: caught after {tried + crash.last.states} disks: {violation.__cause__}")
            return
        tried += crash.last.states
    pytest.fail(f"{name}: {tried} disks, and nothing was noticed")


def successors_by_head_alone(patch):
    write, find = Successors.write, Successors.find
    patch.setattr(Successors, "write", lambda self, head, _, arrays: write(self, head, 0, arrays))
    patch.setattr(Successors, "find", lambda self, head, _: find(self, head, 0))


def priorities_by_slot(patch):
    update = PrioritizedSampler.update_priorities

    def wrong(self, ids, values):
        rows = len(self._leaves.values)
        return update(self, np.where(ids < self._low, ids + rows, ids), values)

    patch.setattr(PrioritizedSampler, "update_priorities", wrong)


def synced_alone(self, leaves):
    self._file.sync()


def while_joined(owner, name, wrong):
    """Return what puts something wrong in place of a method while episodes are stored together."""

    def plant(patch):
        real, commit_now = getattr(owner, name), Store.commit_now

        def joined(self, files, new, stored=None):
            if len(new.records) > 1:
                patch.setattr(owner, name, wrong(real))
            try:
                commit_now(self, files, new, stored)
            finally:
                patch.setattr(owner, name, real)

        patch.setattr(Store, "commit_now", joined)

    return plant


def set_to(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value, raising=False)


NAMED = property(lambda self: True, lambda self, value: None)
CALLS = (W, ("write", 3), W, W, ("sync",), W)
UPDATES = (U, W, U, U, ("flush",), U, U, ("write", 3), U, U, U)
RELABELS = (("write", 3), ("round", None), R, ("write", 2), ("round", None), R)
JOINED = (W, ("flush",), *[("several", (1, 2), None), ("several", (1, 1, 1), None)] * 3)
PLANTED_ELSEWHERE = {
    "successors are written after the commit": (TransitionSession, True, CALLS, successors_after_the_commit, None),
    "successors are not synced before the commit": (TransitionSession, True, CALLS, None, synced("successors")),
    "the name of successors is not synced": (
        TransitionSession,
        True,
        CALLS,
        set_to(Successors, "_named", NAMED),
        None,
    ),
    "successors count for their head alone": (TransitionSession, False, CALLS, successors_by_head_alone, None),
    "an update goes to a slot, not to an id": (PrioritySession, False, UPDATES, priorities_by_slot, None),
    "a flush writes no words of priorities": (
        PrioritySession,
        False,
        UPDATES,
        set_to(PriorityFile, "sync", synced_alone),
        None,
    ),
    "a flush does not sync priorities": (
        PrioritySession,
        True,
        UPDATES,
        set_to(PriorityFile, "sync", lambda self, leaves: None),
        None,
    ),
    "priorities of rows that a cut took stay": (
        PrioritySession,
        False,
        (U, W, U, W, U),
        set_to(PriorityFile, "recover", lambda *_: []),
        None,
    ),
    "labels and their round are two updates": (LabelSession, True, RELABELS, labels_and_rounds_apart, None),
    "labels are not synced": (LabelSession, True, RELABELS, None, synced("mutable.bin")),
    "the capacity rides with the first rows": (
        LabelSession,
        False,
        (W, W),
        set_to(ReplayBuffer, "flush", lambda self, notes=None: None),
        None,
    ),
    "rows of several overwrite live ones": (
        JoinedSession,
        False,
        JOINED,
        while_joined(CommitFiles, "protect", lambda _: lambda *_: None),
        None,
    ),
    "rows of several are not synced before their records": (
        JoinedSession,
        True,
        JOINED,
        while_joined(CommitFiles, "sync_written", lambda _: lambda *_: None),
        None,
    ),
}


FIRST_SEED = {
    "successors count for their head alone": 2,
    "leaves are not synced before their log is overwritten": 10,
}
"""A seed whose disks show the fault soon; the others do with any."""


@pytest.mark.parametrize("name", few(PLANTED_ELSEWHERE, 3))
def test_control_of_other_buffers(crash, monkeypatch, name):
    kind, power, steps, plant, cheats = PLANTED_ELSEWHERE[name]
    if plant is not None:
        plant(monkeypatch)
    tried = 0
    first = FIRST_SEED.get(name, 9)
    for every, seed in itertools.product(samples(name), range(first, first + 6)):
        share = 0.3 if not power else 0
        case = Case(
            power,
            steps,
            warm={TransitionSession: 6, PrioritySession: 12, JoinedSession: 8}.get(kind, 0),
        )
        try:
            crash(kind, case, seed, samples=4, every=every, share=share, cheats=cheats)
        except Violation as violation:
            print(f"{name}: caught after {tried + crash.last.states} disks: {violation.__cause__}")
            return
        tried += crash.last.states
    pytest.fail(f"{name}: {tried} disks, and nothing was noticed")


# -- the door and the model themselves -----------------------------------------------------------------


def test_a_rename_is_followed_by_a_sync_of_its_folder(base):
    """Asserted on the log: ext4, xfs and btrfs hide a missing sync behind the next one."""
    disk = RecordingDisk(base)
    kind = Through(ReplayBuffer, disk)
    with kind(8, path=os.path.join(base, "buf"), durability="power") as buf:
        buf.write_episode({"obs": [1, 2]})
    buf.close()
    model, kinds = Model({}), []
    for entry in disk.log:
        kinds.append((entry[0], entry[1]))
        model.apply(entry)
    renames = [i for i, (change, _) in enumerate(kinds) if change == "rename"]
    assert len(renames) >= 4  # two births, columns, two flushes
    assert all(kinds[i + 1] == ("sync_folder", kinds[i][1]) for i in renames)
    made = [i for i, (change, _) in enumerate(kinds) if change in ("create", "mkdir")]
    for i in made:
        assert ("sync_folder", kinds[i][1]) in kinds[i:], f"name of {disk.log[i]} was never synced"


@pytest.fixture
def file(base):
    """A recording disk with one durable file of 128 bytes, open."""
    disk = RecordingDisk(base)
    file = disk.create(os.path.join(base, "file"), 128)
    file.write(b"a" * 128, 0)
    file.sync()
    disk.sync_folder(base)
    return file


def crashes(disk, tries=400):
    """Return what 400 cuts leave of the file."""
    model, rng = Model(disk.tree), random.Random(0)
    for entry in disk.log:
        model.apply(entry)
    found = {model.crash(rng).get("file") for _ in range(tries)}
    return found | {model.crash(Always(k)).get("file") for k in (0, 1)}


def test_model_keeps_what_was_synced(file):
    assert crashes(file.disk) == {b"a" * 128}


def test_model_loses_keeps_and_tears_what_was_not(file):
    file.write(b"b" * 100, 14)
    found = crashes(file.disk)
    assert b"a" * 128 in found
    assert b"a" * 14 + b"b" * 100 + b"a" * 14 in found
    assert b"a" * 14 + b"b" * 50 + b"a" * 64 in found  # the first 64 bytes kept
    assert b"a" * 14 + b"b" * 25 + b"a" * 89 in found  # half of them
    assert len(found) > 8


def test_model_loses_for_good_what_a_failed_sync_had(file):
    file.write(b"b" * 64, 0)
    file.disk.fail(1, OSError(5, "planted"))
    with pytest.raises(OSError, match="planted"):
        file.sync()
    file.disk.lift()
    file.write(b"c" * 64, 64)
    file.sync()
    assert b"a" * 64 + b"c" * 64 in crashes(file.disk)
    file.write(b"b" * 64, 0)  # written again, it reaches the disk
    file.sync()
    assert crashes(file.disk) == {b"b" * 64 + b"c" * 64}


def test_model_of_names_and_sizes(base):
    disk = RecordingDisk(base)
    path = os.path.join(base, "file")
    file = disk.create(path + ".tmp")
    file.write(b"x" * 10, 0)
    assert crashes(disk) == {None}  # the name that is looked for
    disk.rename(path + ".tmp", path)
    found = crashes(disk)
    assert {None, b"", b"x" * 10} <= found
    disk.sync_folder(base)
    assert None not in crashes(disk)
    file.sync()
    assert crashes(disk) == {b"x" * 10}


class Checked(Session):
    """A session that asks `check` after each opening."""

    def open(self, *args):
        seen = super().open(*args)
        assert self.buf.check() == []
        return seen


def test_check_names_nothing_of_a_state_that_an_opening_has_recovered(crash):
    """The newest record has no rows, and its blob is lost; the opening kept what the blob carried."""
    steps = (("write", 3), ("clear",), ("write", 2), ("clear",))
    assert crash(Checked, Case(False, steps, warm=3), samples=2, share=0).states > 40


def test_what_a_recovery_evicts_is_known_when_a_cut_of_it_brings_it_back():
    """A stream that is kept evicts before the session looks; what then comes back has the ordinal that it had."""
    first = Origins()
    first.see({1: 0, 2: 1})
    second = Origins(first.seen_of({1, 2}), 1)
    second.see({2: 1, 3: 40})
    for found in ({1: 0, 2: 1}, {2: 1, 4: 41}):
        Origins(second.seen_of({1, 2, 3}), 1).see(found)
    for wrong in ({1: 2, 2: 1}, {1: 0, 2: 1, 4: 1}, {4: 0}):
        with pytest.raises(AssertionError):
            Origins(second.seen_of({1, 2, 3}), 1).see(wrong)


KEPT_STREAM = Case(
    False,
    (("write", 3), *[("append",)] * 3, ("write", 3), ("flush",)),
    max_steps=6,
    spare=3,
    keep=True,
    warm=2,
)


@pytest.mark.slow
def test_a_cut_of_a_recovery_that_evicted(crash):
    """Most of these disks are left by a cut in or after a recovery, some of which kept a stream."""
    assert crash(Session, KEPT_STREAM, samples=1, share=0.3).again > 300


@pytest.mark.slow
def test_control_a_recovery_gives_ordinals_again(crash, monkeypatch):
    monkeypatch.setattr(Store, "_beyond_lost", lambda self, found: self.manifest.ordinal)
    with pytest.raises(Violation, match="was given before"):
        crash(Session, KEPT_STREAM, samples=1, share=0.3)


# -- the campaign --------------------------------------------------------------------------------------


@pytest.mark.campaign
@LEVELS
@pytest.mark.parametrize("name", SESSIONS)
def test_campaign_of_other_buffers(crash, name, power, capsys):
    """Try scripts that no other run had for so many seconds."""
    lasts_s, kind = float(os.environ.get("LASTS_S", "120")), SESSIONS[name]
    first = int(os.environ.get("SEED", time.time_ns() // 1_000_000_000))
    states = again = sessions = 0
    began = time.monotonic()
    while time.monotonic() - began < lasts_s:
        case = Case.draw(first + sessions, power, step=kind.draw_step)
        campaign = crash(kind, case, first + sessions, samples=2, share=0.03)
        states, again, sessions = states + campaign.states, again + campaign.again, sessions + 1
    with capsys.disabled():
        print(
            f"\n{name}, {'power' if power else 'process'}: {states:,} disks of {sessions} scripts from seed {first}, "
            f"{again:,} of them left by a cut in or after a recovery; violations: 0; {time.monotonic() - began:.0f} s"
        )


@pytest.mark.campaign
@LEVELS
def test_campaign(crash, power, capsys):
    """Try 100,000 disks, each different, from scripts that no other run had, or as many as there is time for. Half an
    hour."""
    want, lasts_s = int(os.environ.get("STATES", "100000")), float(os.environ.get("LASTS_S", "inf"))
    first = int(os.environ.get("SEED", time.time_ns() // 1_000_000_000))
    states = again = sessions = 0
    began = time.monotonic()
    storages = os.environ.get("STORAGE", "memmap,zarr,mixed").split(",")
    while states < want and time.monotonic() - began < lasts_s:
        storage = storages[sessions % len(storages)]
        campaign = crash(Session, Case.draw(first + sessions, power, storage), first + sessions)
        states, again, sessions = states + campaign.states, again + campaign.again, sessions + 1
    with capsys.disabled():
        print(
            f"\n{'power' if power else 'process'}: {states:,} disks of {sessions} scripts from seed {first} "
            f"({', '.join(storages)}), "
            f"{again:,} of them left by a cut in or after a recovery; violations: 0; {time.monotonic() - began:.0f} s"
        )
