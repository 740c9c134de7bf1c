"""The code changes the disk in the order of the model, with the same words; and opens what a kill leaves as the model
does. So the model can't drift from the code.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.commit.commit import Commit, NewRecord
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.commit.open_episode import finish_open
from ringmap.storage.commit.store import Settings, Store
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.reader import Reader
from ringmap.storage.records import manifest
from ringmap.storage.records.blobs import Segments
from ringmap.storage.records.table import RECORD, PartOf
from ringmap.storage.sidecars import values as module_of_values
from ringmap.storage.sidecars.base import Home
from ringmap.storage.sidecars.values import MutableValues
from tests.disks import Cut, ram_folder
from tests.faults.crash.model import ring, values
from tests.faults.crash.model.check import SCRIPTS
from tests.faults.crash.recording import Machine
from tests.tiers import few

SCHEMA = Schema(tuple(ColumnSpec(name, (), np.dtype("<i8")) for name in "AB"))
OURS = {name: script for name, script in SCRIPTS.items() if script.protocol is ring}


class Log(Disk):
    """Keeps the changes that the model has, as the model names them; `at(number)` is called before each."""

    def __init__(self, at=lambda number: None):
        super().__init__()
        self.changes, self.at, self.fails = [], at, False

    def before(self, change, path, *details):
        found = seen(change, path, *details)
        if self.fails and path.endswith("state.bin") and change == "write":
            self.fails = False
            raise OSError(5, "the disk refuses it")
        if found is not None:
            self.at(len(self.changes))
            self.changes.append(found)


def seen(change, path, *details):
    """Return a change of the disk in the words of the model, None if the model does not have it."""
    name, folder = os.path.basename(path), os.path.basename(os.path.dirname(path))
    if change == "sync" and name == "episodes.npy":
        return "sync", "table"
    if change == "unlink" and folder == "data":
        return "remove", "blob", int(name[:12])
    if change != "write":
        return None
    offset, data = details[0], bytes(details[1])
    if folder == "columns":
        place = (offset - 4096) // 8
        return "write", "AB"[int(name[:3])], place, tuple(np.frombuffer(data, "<i8").tolist())
    if name == "episodes.npy":
        return "write", "record", (offset - 4096) // 128, record_in(data)
    if name == "state.bin":
        generation, seq, first, tail, head, mark, era = np.frombuffer(data, "<u8", 7, 8).tolist()
        boot = any(data[64:80])
        return "write", "state", offset // 4096, (generation, seq, first, tail, head, mark, era, boot)
    if folder == "data":
        return "write", "blob", int(name[:12])
    return ("write", "frame") if name == "steps.bin" else None


def record_in(data):
    one = np.frombuffer(data, RECORD)[0]
    if not one["seq"]:
        return None
    names = "seq start length tail first blob_segment kind chain step previous number part"
    return tuple(int(one[name]) for name in names.split())


def modelled(change):
    """Return a change of the model as `seen` returns one."""
    _, name, kind, place, words = change
    if name == "sync":
        return ("sync", "table") if kind in ("table", "all") else None
    if name == "remove":
        return ("remove", "blob", place) if kind == "blob" else None
    if kind == "record":
        record = words[2]
        return name, kind, place, record and (*record[:2], len(record.values), *record[3:])
    if kind == "state":
        return name, kind, place, tuple(words[2])
    return {"blob": (name, kind, place), "frame": (name, kind)}.get(kind, (name, kind, place, words))


def changes_of(writer, begin=0):
    """Return `(number of effects, change)` of those that the code has, too."""
    found = [(change[0], modelled(change)) for change in writer.changes[begin:] if change[1] != "make"]
    return [one for one in found if one[1] is not None]


def arrays(values):
    return [np.array(values, np.int64)] * 2


class Calls:
    """The calls of a script, of a store."""

    def __init__(self, store, disk):
        self.store, self.disk, self.chains = store, disk, {}

    def run(self, script):
        for name, *args in script:
            getattr(self, name)(*args)

    def _commit(self, *episodes, part=None):
        records = [NewRecord(len(values), part=part) for values in episodes]
        self.store.commit(Commit(records, "here", SCHEMA, arrays(sum(episodes, ()))))

    def write_episode(self, *values):
        self._commit(values)

    def joined(self, *episodes):
        self._commit(*episodes)

    def part(self, chain, *values):
        part = self.chains.get(chain, PartOf())
        start = self.store.head
        self._commit(values, part=part)
        self.chains[chain] = PartOf(
            part.place(start)[0],
            part.step + len(values),
            previous=start,
            number=part.number + 1,
            ordinal=self.store.newest_record().ordinal,
        )

    def end_chain(self, chain):
        self.store.commit(Commit.of_end(self.chains[chain], 0, "here"))

    def append(self, *values):
        self.store.append(arrays(values), len(values), self.store.ring.spare, "here")

    def clear(self):
        self.store.clear()

    def flush(self):
        self.store.flush()

    def state_fails(self):
        self.disk.fails = True


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """A segment for each blob, as in the model."""
    monkeypatch.setattr(Segments.__init__, "__defaults__", (1,))


def settings_of(script):
    return Settings(script.power, sync_every_s=0, group_s=0)


def played(folder, script, monkeypatch, at=lambda number: None):
    """Do the calls of a script; return what was changed. A `Cut` ends them."""
    shape = script.shape
    monkeypatch.setattr(manifest, "SPARE_SLOTS", shape.slots - shape.rows)
    disk = Log()
    store = Store.create(disk, folder, shape.max_steps, shape.spare, settings_of(script), SCHEMA)
    disk.changes, disk.at = [], at
    with contextlib.suppress(Cut):
        Calls(store, disk).run(script.calls)
    changes, disk.at = disk.changes, lambda number: None
    disk.changes = []
    store.abandon()
    return changes


@pytest.mark.parametrize("name", OURS)
def test_the_code_changes_the_disk_as_the_model_does_and_readers_see_the_same(name, monkeypatch):
    script = OURS[name]
    run = ring.Writer(script.shape, power=script.power)
    run.run(script.calls)
    expected = changes_of(run)
    shown = dict(ring.birth(script.shape))
    effects = iter(enumerate(run.effects))
    done = 0

    def look(number):
        nonlocal done
        while done < expected[number][0]:
            address, word = next(effects)[1]
            shown[address] = word
            done += 1
        reader = Reader(Disk(), folder)
        live = [(int(a), int(n)) for a, n in zip(reader.live.starts, reader.live.lengths, strict=True)]
        first, tail, head, places = run.states[shown[ring.SHOWN].seq]
        assert (reader.first, reader.tail, reader.head) == (first, tail, head), number
        assert live == [place[:2] for place in places], number
        reader.close()

    # Readers are of another thread: a call in the middle of a call is refused.
    with ram_folder() as made, ThreadPoolExecutor(1) as pool:
        folder = str(made / "buf")
        found = played(folder, script, monkeypatch, lambda number: pool.submit(look, number).result())
    assert found == [change for _, change in expected]


def test_control_a_sync_that_is_left_out_is_seen(monkeypatch):
    monkeypatch.setattr(CommitFiles, "protect", lambda *args: None)
    with pytest.raises((AssertionError, IndexError)):
        test_the_code_changes_the_disk_as_the_model_does_and_readers_see_the_same("eviction", monkeypatch)


@pytest.mark.parametrize("name", few(OURS, 3))
def test_an_opening_after_a_kill_changes_the_disk_as_that_of_the_model(name, monkeypatch):
    script = OURS[name]
    run = ring.Writer(script.shape, power=script.power)
    start = dict(run.memory)
    run.run(script.calls)
    for number, (count, _) in enumerate(changes_of(run)):

        def kill(change, number=number):
            if change >= number:
                raise Cut

        with ram_folder() as made:
            folder = str(made / "buf")
            played(folder, script, monkeypatch, kill)
            disk = Log()
            store = Store.open(disk, folder, settings_of(script))
            finish_open(store, keep=False)
            changes, disk.changes = disk.changes, []
            store.abandon()
        memory = start | dict(run.effects[:count])
        new = ring.Writer(script.shape, "", memory, run, power=script.power)
        assert changes == [change for _, change in changes_of(new)], (number, changes_of(run)[number])


# -- newer values ----------------------------------------------------------------------------------


class ValuesLog(Disk):
    """Keeps what is written to mutable.bin, and its syncs."""

    def __init__(self):
        super().__init__(Machine())
        self.changes = []

    def before(self, change, path, *details):
        if change == "sync":
            self.changes.append(("sync",))
        if change != "write":
            return
        offset, data = details[0], bytes(details[1])
        if offset < 8192:
            fields = np.frombuffer(data, "<u8", 3, 8).tolist()
            self.changes.append(("header", offset // 4096, (*fields, 1)))
        elif offset < 12288:
            self.changes += [("mark", offset - 8192 + at) for at in range(len(data))]
        else:
            place = (offset - 12288) // 32
            self.changes.append(("copy", divmod(place, values.ROWS), tuple(np.frombuffer(data, "<i8")[1:].tolist())))


def values_changed(run, begin):
    """Return the changes of the model's writer, from so many effects on, as `ValuesLog` keeps them."""
    last = {"header": 2, "copy": 3, "mark": 0}
    found = []
    for at, ((kind, place, word), value) in enumerate([*run.effects, (("end", 0, 0), 0)]):
        found += [("sync",)] * (run.syncs.count(at) * (at >= begin))
        if at < begin or word != last.get(kind):
            continue
        if kind == "copy":
            value = tuple(run.effects[at - 3][1])
        found.append((kind, place) if kind == "mark" else (kind, place, value))
    return found


@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if script.protocol is values])
def test_newer_values_are_written_as_in_the_model(name, monkeypatch, tmp_path):
    monkeypatch.setattr(module_of_values, "_SESSION", values.SESSION)
    script, schema = SCRIPTS[name], Schema((ColumnSpec("v", (), np.dtype("<i8"), True),))
    disk = ValuesLog()
    home = Home(disk, str(tmp_path), b"u" * 16, values.ROWS, schema)
    MutableValues.create(home)
    disk.changes, head = [], 0
    file = MutableValues(home, write=True)
    file.begin(head)
    for call, *args in script.calls:
        if call == "store":
            head += 1
        elif call == "update":
            file.update(np.array([head - 1]), {"v": np.array(args)})
            if script.power:
                file.sync(note=False)
        else:
            file.sync()
        if call == "reopen":
            file.note_closed()
            file.close()
            file = MutableValues(home, write=True)
            file.begin(head)
    file.close()
    assert disk.changes == values_changed(values.Writer(power=script.power).run(script.calls), 0)
