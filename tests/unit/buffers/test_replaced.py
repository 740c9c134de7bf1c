"""The directory of an open buffer is removed, renamed, or replaced by another one at the same path.

No handle of the first buffer changes a byte of the second, or serves a row of it; each says what happened.
"""

import contextlib
import hashlib
import os
import pickle
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.data import DataLoader

import ringmap
from ringmap import DistillationBuffer, ReplayBuffer, TransitionReplayBuffer
from ringmap.buffers.steps import StepRing
from ringmap.data import load_dataset
from ringmap.errors import CorruptError, NotFoundError, ReplacedError, RingmapError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.commit import store
from ringmap.storage.disk.calls import lifted
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from ringmap.storage.read import reader as live_reader
from tests.disks import Through
from tests.unit.buffers.processes import in_child
from tests.unit.buffers.sharded.striking import always_look
from tests.unit.buffers.steps import episode

STORAGES = {
    "memmap": "memmap",
    "zarr": "zarr",
}
ERROR = r"directory .* was {} since it was opened; .*open the buffer where it is now"


@pytest.fixture(autouse=True)
def every_look(monkeypatch):
    """Let readers look at the path with each call, not once in 100 ms."""
    always_look(monkeypatch)


def make(path, storage="memmap", first=0, **options):
    buf = ReplayBuffer(
        20,
        2,
        path=path,
        storage=STORAGES.get(storage, storage),
        sync_every_s=0,
        seed=0,
        **options,
    )
    for number in range(first, first + 3):
        buf.write_episode(episode(number, 5))
    return buf


def removed(path):
    shutil.rmtree(path)
    return None


def renamed(path):
    os.rename(path, f"{path}.old")
    return None


def replaced(path, **options):
    os.rename(path, f"{path}.old")
    return make(path, first=70, **options)


def other_schema(path):
    os.rename(path, f"{path}.old")
    buf = ReplayBuffer(9, path=path, sync_every_s=0)
    buf.write_episode({"other": np.arange(4)})
    return buf


def remade(path):
    """The new one may get the inode number of the old one, where nobody holds that."""
    shutil.rmtree(path)
    return make(path, first=70)


WAYS = {
    removed: "removed",
    renamed: "renamed",
    replaced: "replaced by another one",
    other_schema: "replaced by another one",
    remade: "replaced by another one",
}


def tree(path):
    """Return all that lies below a path, and a checksum of each file."""
    found = sorted(Path(path).rglob("*"))
    return {at: hashlib.sha256(at.read_bytes()).digest() if at.is_file() else None for at in found}


def refuses(work, way):
    with pytest.raises(ReplacedError, match=ERROR.format(WAYS[way])):
        work()


def writes(buf, stream, home):
    """Return each call of a writer that changes something."""
    return {
        "write": lambda: buf.write_episode(episode(3, 5)),
        "begin": buf.begin_episode,
        "append": lambda: stream.append({k: v[0] for k, v in episode(9, 1).items()}),
        "finish": stream.finish,
        "flush": buf.flush,
        "clear": buf.clear,
        "snapshot": lambda: buf.snapshot(home / "copy"),
        "priorities": lambda: buf.update_priorities([0, 1], [2.0, 3.0]),
    }


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_writer_refuses_and_leaves_the_other_buffer_alone(tmp_path, home, way, storage):
    home = tmp_path if way is remade else home  # ext4 uses an inode number again, tmpfs does not
    path = home / "buf"
    buf = make(path, storage, sampler=PrioritizedSampler())
    stream = buf.begin_episode()
    stream.append({name: values[0] for name, values in episode(8, 1).items()})
    buf.sample(4)
    other = way(path)
    before = tree(path)
    for work in writes(buf, stream, home).values():
        refuses(work, way)
        assert tree(path) == before
    stream.abandon()
    refuses(buf.close, way)
    buf.close()  # all is given back by now
    assert tree(path) == before
    if way is renamed:  # all that was committed is there, and nobody keeps the next writer out
        with contextlib.closing(ReplayBuffer.open(f"{path}.old", "r+")) as moved:
            assert moved.lengths.tolist() == [5, 5, 5]
    if other is not None:
        other.write_episode({name: values[-4:] for name, values in next(other.episodes()).items()})
        assert ringmap.check(path) == []
        other.close()


@pytest.mark.parametrize("way", [removed, renamed, replaced], ids=lambda way: way.__name__)
def test_the_background_sync_touches_nothing_at_the_path(home, way, caplog):
    buf = make(home / "buf", "zarr")
    way(home / "buf")
    before = tree(home / "buf")
    buf.engine.source.sync_behind()
    assert tree(home / "buf") == before
    assert not caplog.records
    with pytest.raises(ReplacedError):
        buf.close()


def reads(reader, view, order):
    """Return each call of a reader that hands out what is stored."""
    return {
        "id": lambda: reader[3],
        "ids": lambda: reader.__getitems__([1, 2]),
        "sample": lambda: reader.sample(2),
        "batches": lambda: next(reader.batches(2, prefetch=0)),
        "episodes": lambda: list(reader.episodes()),
        "load_episode": lambda: reader.load_episode(0),
        "rows": lambda: reader.get_row_data([0, 1]),
        "column": lambda: reader.get_col_data("step"),
        "episode data": lambda: reader.get_episode_data(0),
        "view": lambda: view[3],
        "pass": lambda: reader[next(order)],
        "refresh": reader.refresh,
        "snapshot": lambda: reader.snapshot(f"{reader.path}.copy"),
    }


@pytest.mark.parametrize("storage", ["memmap", "zarr"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_reader_serves_neither_old_rows_nor_new_ones(tmp_path, home, way, storage):
    path = (tmp_path if way is remade else home) / "buf"
    make(path, storage).close()
    reader = ReplayBuffer.open(path)
    view, order = reader.view(), iter(reader.pass_sampler())
    next(order)
    assert int(reader[3]["step"][0]) == 3
    other = way(path)
    before = tree(path)
    for work in reads(reader, view, order).values():
        refuses(work, way)
    reader.close()
    assert tree(path) == before
    if other is not None:
        other.close()


def test_a_reader_looks_at_the_path_after_100_ms(home, monkeypatch):
    monkeypatch.undo()
    now = [0.0]
    monkeypatch.setattr(live_reader.time, "monotonic", lambda: now[0])
    make(home / "buf").close()
    with ReplayBuffer.open(home / "buf") as reader:
        reader.sample(2)
        removed(home / "buf")
        if System().loads_are_ordered:
            reader.sample(2)
        now[0] += 0.11
        refuses(lambda: reader.sample(2), removed)
        refuses(lambda: reader.sample(2), removed)
        reader.close()


@pytest.mark.parametrize("way", [removed, renamed, replaced, remade], ids=lambda way: way.__name__)
def test_copies_in_other_processes_are_of_the_same_buffer(tmp_path, way):
    path = tmp_path / "buf"
    writer = make(path)
    reader = ReplayBuffer.open(path)
    pickled = [pickle.dumps(buf) for buf in (writer, reader, reader.view())]
    data = load_dataset(str(path))
    sent = pickle.dumps(data)
    other = way(path)
    before = tree(path)

    def look(buf):
        with pytest.raises(RingmapError) as raised:
            buf.sample(2)
        return type(raised.value)

    assert in_child(lambda: [look(buf) for buf in (writer, reader)]) == [ReplacedError] * 2
    lost = NotFoundError if other is None else ReplacedError
    for copy in pickled:
        with pytest.raises(lost):
            pickle.loads(copy)
    with pytest.raises(RingmapError):
        data[0]
    with pytest.raises(RingmapError):
        pickle.loads(sent)[0]

    def load(workers):
        with pytest.raises(ReplacedError):
            list(DataLoader(reader, batch_size=4, num_workers=workers))
        return workers

    load(0)
    # PyTorch waits 10 s when an iterator whose worker raised is collected as garbage: not in a child, which just ends.
    assert in_child(load, 2) == 2
    assert tree(path) == before
    for buf in (writer, reader, other):
        with contextlib.suppress(AttributeError, ReplacedError):
            buf.close()


def test_a_copy_of_the_directory_is_followed_by_a_pickled_handle(home):
    """The uuid tells, not the place: a directory that was put back from a copy is the same buffer."""
    make(home / "buf").close()
    reader = ReplayBuffer.open(home / "buf")
    copy = pickle.dumps(reader)
    shutil.copytree(home / "buf", home / "copy")
    shutil.rmtree(home / "buf")
    os.rename(home / "copy", home / "buf")
    with pytest.raises(ReplacedError):
        reader.sample(2)
    with contextlib.closing(pickle.loads(copy)) as again:
        assert again.lengths.tolist() == [5, 5, 5]
    reader.close()


def transitions(path, value):
    buf = TransitionReplayBuffer(50, (3,), path=path, device=None, sync_every_s=0, seed=0)
    for step in range(4):
        row = np.full((2, 3), value + step, np.float32)
        buf.add(row, np.zeros((2, 1)), np.zeros(2), row + 1, np.zeros(2))
    return buf


def test_transitions_and_what_follows_them(home):
    path = home / "buf"
    buf = transitions(path, 0)
    buf.flush()
    reader = TransitionReplayBuffer.open(path)
    reader.sample(4)
    os.rename(path, home / "old")
    other = transitions(path, 90)
    before = tree(path)
    row = np.zeros((2, 3), np.float32)
    for work in (
        lambda: buf.add(row, np.zeros((2, 1)), np.zeros(2), row + 1, np.zeros(2)),
        buf.flush,
        buf.clear,
        lambda: buf.save(home / "copy"),
        buf.close,
        lambda: reader.sample(4),
    ):
        refuses(work, replaced)
        assert tree(path) == before
    assert other.sample(8)["observations"].min() >= 90
    reader.close()
    other.close()


def distilled(path, value):
    buf = DistillationBuffer(40, path=path, seed=0, sync_every_s=0)
    buf.start_round()
    ids = buf.add(np.full((6, 3), value, np.float32), np.zeros((6, 1), np.float32))
    return buf, ids


def test_labels_are_not_begun_in_the_other_buffer(home):
    path = home / "buf"
    buf, ids = distilled(path, 0)
    os.rename(path, home / "old")
    other, _ = distilled(path, 90)
    before = tree(path)
    with pytest.raises(ReplacedError):
        buf.relabel(
            ids,
            lambda rows: {"teacher_actions": np.ones((len(next(iter(rows.values()))), 1), np.float32)},
        )
    with pytest.raises(ReplacedError):
        buf.close()
    assert tree(path) == before
    other.close()


@pytest.mark.parametrize("storage", ["memmap", "zarr"])
def test_where_nothing_opens_below_a_descriptor_each_use_of_a_path_is_checked(home, storage):
    """As on Windows: a writer that is in the middle of a call when the directory goes changes nothing either."""

    class Moving(Disk):
        """Replaces the directory ahead of one change by path, which comes too late then."""

        at = None

        def before(self, change, path, *details):
            if self.at is None or change not in (
                "create",
                "rename",
                "unlink",
                "mkdir",
                "sync_folder",
            ):
                return
            self.at -= 1
            if self.at == 0:
                self.at = None
                self.seen = lifted(self.act)

    for portable in (False, True):
        for changes in (1, 3, 8):
            disk, path = Moving(System(portable)), home / f"{storage}{portable}{changes}"

            Buffer = Through(ReplayBuffer, disk)
            buf = Buffer(20, 2, path=path, storage=storage, sync_every_s=0, spare_rows=1)
            for number in range(3):
                buf.write_episode(episode(number, 5))
            disk.act = lambda path=path: (replaced(path, storage=storage), tree(path))
            disk.at = changes
            with contextlib.suppress(ReplacedError):
                buf.write_episode(episode(3, 17))
                buf.flush()
            assert disk.at is None or changes > 3
            if disk.at is not None:  # fewer changes than that
                disk.at = None
                buf.close()
                continue
            with contextlib.suppress(ReplacedError):
                buf.close()
            assert tree(path) == disk.seen[1]
            disk.seen[0].close()


def test_a_file_that_is_missing_is_damage_while_the_directory_stands(home):
    make(home / "buf", "zarr").close()
    reader = ReplayBuffer.open(home / "buf")
    os.unlink(next((home / "buf/columns").glob("*step.zarr/c.0")))
    with pytest.raises(CorruptError, match="is missing"):
        reader[0]
    reader.close()


def test_a_closed_handle_gives_its_directory_back(home):
    def open_folders():
        links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return [os.readlink(one) for one in links if os.path.lexists(one)].count(str(home / "buf"))

    buf = make(home / "buf")
    reader = ReplayBuffer.open(home / "buf")
    assert open_folders() == 2
    reader.close()
    buf.close()
    assert open_folders() == 0


def test_a_row_that_joins_a_group_is_refused_again_and_again(home, monkeypatch):
    """A look at the directory that failed is not taken for one that passed."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns)
    monkeypatch.setattr(store, "time", clock)
    buf = TransitionReplayBuffer(50, (2,), path=home / "buf", device=None, sync_every_s=0)
    rows = StepRing(50, path=home / "rows", sync_every_s=0)
    adds = {
        "buf": lambda: buf.add(np.zeros(2), 0, 0.0, np.zeros(2), False),
        "rows": lambda: rows.append({"x": [1]}),
    }
    for name, add in adds.items():
        for _ in range(3):
            add()
        shutil.rmtree(home / name)
        now[0] += 0.15
        for _ in range(4):
            with pytest.raises(ReplacedError):
                add()
        with pytest.raises(ReplacedError):
            {"buf": buf, "rows": rows}[name].close()
