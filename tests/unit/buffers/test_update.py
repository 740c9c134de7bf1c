"""`buf.update`: values of stored steps change, for every reader, and for nothing else."""

import contextlib
import errno
import os
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ringmap
from ringmap import Column, ReplayBuffer
from ringmap.data import Sequences, load_dataset
from ringmap.errors import (
    ClosedError,
    CorruptError,
    EnvironmentFault,
    InputError,
    ReadOnlyError,
    RoleError,
    UnknownColumnError,
)
from ringmap.storage.disk.memory import MemoryFile
from tests.disks import FaultyDisk
from tests.tiers import few
from tests.unit.buffers.steps import MUTABLE


def make(path=None, max_steps=40, **options):
    options = {"sync_every_s": 0, "seed": 0, "history_len": 3, "reward_at": "same", **options}
    return ReplayBuffer(max_steps, path=path, schema=MUTABLE, **options)


def write(buf, number, length=10, values=False):
    steps = np.arange(length)
    episode = {"obs": np.stack([np.full(length, number), steps], 1)}
    if values:
        episode["latent"] = np.repeat(steps[:, None] + 0.5, 3, 1)
        episode["label"] = steps
    buf.write_episode(episode)


def latent(values):
    return np.repeat(np.asarray(values, np.float32)[..., None], 3, -1)


@pytest.fixture(params=["ram", "memmap", "zarr", "pread"])
def buf(request, tmp_path):
    options = {"ram": {}, "memmap": {}, "zarr": {"storage": "zarr"}, "pread": {"reads": "pread"}}
    path = None if request.param == "ram" else tmp_path / "buf"
    with contextlib.closing(make(path, **options[request.param])) as made:
        write(made, 1)
        write(made, 2, values=True)
        yield made


# -- reads -----------------------------------------------------------------------------------------


def test_an_episode_has_the_values_that_it_was_written_with_and_zeros_without(buf):
    assert not buf.load_episode(0)["latent"].any()
    assert buf.load_episode(1)["latent"].tolist() == latent(np.arange(10) + 0.5).tolist()
    assert buf.load_episode(1)["label"].tolist() == list(range(10))


def test_every_copy_has_the_newest_values(buf, tmp_path):
    """Every way to read them is in `tests/contract/test_reads.py`."""
    assert buf.update([3, 12, 19], {"latent": latent([7, 8, 9])}) == 3
    assert buf.update(np.array([12]), {"label": [5]}) == 1
    expected = np.concatenate([np.zeros(10), np.arange(10) + 0.5]).astype(np.float32)
    expected[[3, 12, 19]] = [7, 8, 9]
    labels = np.concatenate([np.zeros(10), np.arange(10)]).astype(int)
    labels[12] = 5

    def by_step(batch, ids):
        assert (batch["latent"][..., 0] == expected[ids]).all()
        assert (batch["label"] == labels[ids]).all()

    batch = buf.sample(64)
    by_step(batch, batch.ids[:, None] + np.arange(3))
    copies = [pickle.loads(pickle.dumps(buf))]
    buf.snapshot(tmp_path / "copy")
    copies.append(ReplayBuffer.open(tmp_path / "copy"))
    assert ringmap.check(tmp_path / "copy") == []
    buf.dump(tmp_path / "set.h5", progress=False)
    copies.append(load_dataset(tmp_path / "set.h5", num_steps=3))
    copies.append(load_dataset(tmp_path / "copy", num_steps=3))
    for copy in copies:
        by_step({n: np.asarray(v) for n, v in copy.load_episode(1).items()}, np.arange(10, 20))
        assert max(float(copy[i]["latent"].max()) for i in range(len(copy))) == 9
    assert buf.check() == []


def test_ids_may_have_the_shape_of_a_batch_of_clips(buf):
    batch = buf.sample(6)
    ids = batch.ids[:, None] + np.arange(3)
    assert buf.update(ids, {"latent": latent(ids), "label": ids}) == 18
    again = buf[[int(i) for i in range(len(buf))]]
    kept = np.isin(again.ids[:, None] + np.arange(3), ids)
    assert (again["latent"][..., 0] == again.ids[:, None] + np.arange(3))[kept].all()
    torch = pytest.importorskip("torch")
    assert buf.update(torch.tensor([4]), {"latent": torch.full((1, 3), 2.0)}) == 1
    assert buf.load_episode(0)["latent"][4].tolist() == [2, 2, 2]


def test_evicted_steps_are_left_out_and_a_new_step_begins_with_its_own_value(buf):
    buf.update(np.arange(20), {"label": np.arange(20) + 100})
    for number in range(3, 7):
        write(buf, number, values=number % 2 == 0)
    assert buf.num_steps_stored == 40
    assert buf.update(np.arange(15, 25), {"label": np.arange(10)}) == 5
    assert buf.update([2, 3], {"label": [0, 0]}) == 0
    values = np.concatenate([buf.load_episode(i)["label"] for i in range(4)])
    expected = [*range(5, 10), *[0] * 5, *range(10), *[0] * 10, *range(10)]
    assert values.tolist() == expected
    for number in range(20):  # round the ring
        write(buf, number)
        write(buf, number, values=True)
    values = [buf.load_episode(i)["label"].tolist() for i in range(4)]
    assert values == [[0] * 10, list(range(10))] * 2
    buf.clear()
    assert buf.update([0], {"label": [1]}) == 0
    write(buf, 1)
    assert not buf.load_episode(0)["label"].any()
    assert buf.check() == []


def test_steps_of_a_dropped_episode_are_left_out(tmp_path):
    with contextlib.closing(make(tmp_path / "buf", 100, spare_rows=20)) as buf:
        with buf.begin_episode(commit_every=5) as episode:
            for step in range(10):
                episode.append({"obs": [0, step]})
        write(buf, 1)
        buf.engine.owned.drop_chains([0], "test")
        assert buf.update([3, 9, 12], {"label": [1, 2, 3]}) == 1


def test_a_flush_after_an_interrupted_one_is_whole(tmp_path):
    disk, synced = FaultyDisk(), []
    with contextlib.closing(make(tmp_path / "buf", disk=disk)) as buf:
        write(buf, 1)
        buf.flush()
        buf.update([0], {"label": [1]})
        disk.fail(1, KeyboardInterrupt(), only="sync")
        with pytest.raises(KeyboardInterrupt):
            buf.flush()
        disk.before = lambda change, path, *_: synced.append(os.path.basename(path)) if change == "sync" else None
        buf.flush()
        assert "mutable.bin" in synced


def test_an_update_takes_no_value_from_one_that_the_disk_refused(tmp_path):
    """Nor could be undone, then: a column that is left out keeps the value that it had before both."""
    disk = FaultyDisk()
    with contextlib.closing(make(tmp_path / "buf", disk=disk)) as buf:
        write(buf, 1, values=True)
        ids = np.arange(10)
        buf.update(ids, {"latent": latent(ids), "label": ids})
        disk.fail(2, OSError(errno.EIO, "planted"), sticky=True, only="write")
        with pytest.raises(EnvironmentFault):
            buf.update(ids[::2], {"latent": latent(ids[::2] + 100), "label": ids[::2] + 100})
        disk.lift()
        buf.update(ids, {"label": ids + 200})
        assert buf.get_col_data("label").tolist() == (ids + 200).tolist()
        np.testing.assert_array_equal(buf.get_col_data("latent"), latent(ids))


# -- what bad input gets ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "values", "error", "message"),
    [
        ([0], {"obs": [[1, 2]]}, InputError, "column 'obs' is not mutable"),
        ([0], {"state": [1]}, UnknownColumnError, "no column 'state'"),
        ([0], {"latent": np.zeros((1, 4))}, InputError, r"shape \(1, 4\), expected \(1, 3\)"),
        ([0, 1], {"label": [1]}, InputError, r"shape \(1,\), expected \(2,\)"),
        ([0], {"label": [1.5]}, InputError, "column 'label'.*does not fit"),
        ([0], {"label": ["a"]}, InputError, "column 'label'.*another kind"),
        ([0], {"label": [[1], [2, 3]]}, InputError, "ragged"),
        ([0], {}, InputError, "expected column -> values"),
        ([0], [1], InputError, "expected column -> values"),
        ([20], {"label": [1]}, InputError, "id 20 is of another buffer"),
        ([5, 1 << 40], {"label": [1, 2]}, InputError, "of another buffer"),
        ([-1, 3], {"label": [1, 2]}, InputError, "id -1 is of another buffer"),
        ([0.5], {"label": [1]}, InputError, "array of integers"),
        (3, {"label": [1]}, InputError, "array of integers"),
        ([0, 1], {"label": [1, 2], "latent": np.zeros((2, 2))}, InputError, "latent"),
    ],
)
def test_bad_input_changes_nothing(buf, ids, values, error, message):
    buf.update(np.arange(20), {"label": np.arange(20)})
    before = [buf.load_episode(i) for i in range(2)]
    with pytest.raises(error, match=message):
        buf.update(ids, values)
    for i, episode in enumerate(before):
        for name, column in buf.load_episode(i).items():
            assert (column == episode[name]).all()


def test_only_the_writer_updates(buf, tmp_path):
    if buf.path is None:
        pytest.skip("no other handle of a buffer in RAM exists")
    with (
        ReplayBuffer.open(buf.path) as reader,
        pytest.raises(ReadOnlyError, match="only reads"),
    ):
        reader.update([0], {"label": [1]})
    buf.close()
    with pytest.raises(ClosedError):
        buf.update([0], {"label": [1]})


def test_a_buffer_without_columns_or_without_mutable_ones_says_so():
    with pytest.raises(UnknownColumnError, match="no column"):
        ReplayBuffer(10).update([0], {"x": [1]})
    buf = ReplayBuffer(10)
    buf.write_episode({"x": np.arange(3)})
    with pytest.raises(InputError, match=r"make a new buffer with schema=.*Column\(shape"):
        buf.update([0], {"x": [1]})


@pytest.mark.parametrize("wrong", [Column((3,), object, True), Column("x", "f4"), Column(3, "f4", 1)])
def test_a_column_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InputError, match="'latent'"):
        ReplayBuffer(10, schema={"latent": wrong})


# -- the directory ---------------------------------------------------------------------------------


def test_whether_a_column_is_mutable_is_fixed(tmp_path):
    make(tmp_path / "buf").close()
    make(tmp_path / "buf").close()
    plain = {"obs": ((2,), "<i8"), "latent": ((3,), "<f4"), "label": ((), "<i4")}
    with pytest.raises(InputError, match="'latent'.*mutable"):
        ReplayBuffer(40, path=tmp_path / "buf", schema=plain)
    sizes = ReplayBuffer.estimate(MUTABLE, 40)
    assert sizes["mutable.bin"] == os.path.getsize(tmp_path / "buf/mutable.bin")


@pytest.mark.parametrize("spoil", ["missing", "cut", "of another", "damaged"])
def test_a_spoiled_file_is_refused_reported_and_mended(tmp_path, spoil):
    path = tmp_path / "buf"
    for place in (path, tmp_path / "other"):
        buf = make(place)
        write(buf, 1, values=True)
        buf.update(np.arange(10), {"label": np.arange(10) + 50})
        buf.update([4], {"label": [99]})
        buf.close()
    file = path / "mutable.bin"
    if spoil == "missing":
        file.unlink()
    elif spoil == "cut":
        os.truncate(file, 9000)
    elif spoil == "of another":
        shutil.copy(tmp_path / "other/mutable.bin", file)
    else:
        data = bytearray(file.read_bytes())
        data[8192 + 4096 + 4 * 40 + 30] ^= 1  # the second copy of row 4 is in the first plane
        file.write_bytes(data)
    findings = ringmap.check(path)
    assert [f.file for f in findings] == ["mutable.bin"], findings
    for mode in ("r", "r+"):
        with (
            pytest.raises(CorruptError, match=r"mutable\.bin"),
            contextlib.closing(ReplayBuffer.open(path, mode)) as opened,
        ):
            opened.load_episode(0)
    ringmap.repair(path, dry_run=False)
    assert ringmap.check(path) == []
    with contextlib.closing(ReplayBuffer.open(path, "r+")) as buf:
        first = 50 if spoil == "damaged" else 0
        assert buf.load_episode(0)["label"].tolist() == list(range(first, first + 10))
        assert buf.update([4], {"label": [3]}) == 1
        assert buf.load_episode(0)["label"][4] == 3


def test_a_manifest_that_is_made_again_knows_which_columns_are_mutable(tmp_path):
    path = tmp_path / "buf"
    buf = make(path)
    write(buf, 1)
    buf.update([4], {"label": [99]})
    buf.close()
    (path / "manifest.json").unlink()
    ringmap.repair(path, dry_run=False)
    assert ringmap.check(path) == []
    with ReplayBuffer.open(path) as again:
        assert again.load_episode(0)["label"][4] == 99
        assert again.schema.mutable.names == ["latent", "label"]


def test_a_streamed_episode_may_leave_the_column_out(tmp_path):
    buf = make(tmp_path / "buf")
    with buf.begin_episode() as episode:
        for step in range(5):
            episode.append({"obs": np.array([1, step])})
    assert not buf.load_episode(0)["latent"].any()
    other = make(tmp_path / "other")
    buf.update([2], {"label": [7]})
    other.extend_from(buf)
    assert other.load_episode(0)["label"].tolist() == [0, 0, 7, 0, 0]
    buf.close(), other.close()


# -- processes, threads, signals -------------------------------------------------------------------


def test_a_forked_child_reads_and_may_not_update(buf):
    buf.update([3], {"label": [9]})
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            assert buf.load_episode(0)["label"][3] == 9
            with pytest.raises(ReadOnlyError):
                buf.update([3], {"label": [4]})
            code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    buf.update([3], {"label": [8]})
    assert buf.load_episode(0)["label"][3] == 8


def test_a_signal_handler_in_the_middle_of_an_update_is_refused(tmp_path):
    from tests.disks import FaultyDisk

    disk = FaultyDisk()
    buf = make(tmp_path / "buf", disk=disk)
    write(buf, 1)
    seen = []

    def handler():
        disk.lift()
        with pytest.raises(RoleError, match="in the middle of another call"):
            buf.update([1], {"label": [5]})
        with pytest.raises(RoleError, match="in the middle of another call"):
            buf.load_episode(0)
        seen.append("refused")
        raise KeyboardInterrupt

    buf.update([1, 3, 5], {"label": [0, 0, 0]})
    disk.fail(2, handler, only="write")
    with pytest.raises(KeyboardInterrupt):
        buf.update([1, 3, 5], {"label": [1, 2, 3]})
    assert seen == ["refused"]
    buf.update([3, 5], {"label": [2, 3]})
    assert buf.load_episode(0)["label"].tolist() == [0, 0, 0, 2, 0, 3, 0, 0, 0, 0]
    buf.close()


@pytest.mark.parametrize("is_live", [True, False])
def test_a_value_whose_row_is_gone_may_be_written_over(tmp_path, is_live):
    """A reader that looked up its rows before they were evicted looks again after it has read: no value of theirs is
    damage."""
    schema = {"obs": ((), "<i8"), "big": Column((200,), "<i8", mutable=True)}
    buf = ReplayBuffer(40, path=tmp_path / "b", schema=schema, spare_rows=20)
    buf.write_episode({"obs": np.arange(40)})
    buf.update([3], {"big": np.full((1, 200), 7)})
    buf.flush()
    with ReplayBuffer.open(tmp_path / "b") as reader:
        values = reader.engine.owned.values
        value = np.zeros((1, 200), np.int64)
        values.put_into({"big": value}, np.array([3]))
        assert (value == 7).all()
        if not is_live:
            buf.write_episode({"obs": np.arange(40)})
        path = tmp_path / "b" / "mutable.bin"
        raw = path.read_bytes()
        at = raw.index(np.full(200, 7, "<i8").tobytes())
        with open(path, "r+b") as file:  # the writer is in the middle of a copy of the next row
            file.seek(at + 800)
            file.write(b"\1" * 800)
        if is_live:
            with pytest.raises(CorruptError, match="the value of position 3 .generation 1. is damaged"):
                values.put_into({"big": value}, np.array([3]))
        else:
            values.put_into({"big": value}, np.array([3]))
        assert bool(ringmap.check(tmp_path / "b")) == is_live
    buf.close()


def test_in_ram_a_value_is_read_whole_while_its_next_one_is_half_written(monkeypatch):
    schema = {"obs": ((), "<i8"), "big": Column((200,), "<i8", mutable=True)}
    buf = ReplayBuffer(64, schema=schema)
    buf.write_episode({"obs": np.arange(64)})
    for number in (1, 2):
        buf.update([5], {"big": np.full((1, 200), number)})
    seen = []

    def half(self, pieces, offsets, _real=MemoryFile.write_each):
        _real(self, [piece[:800] for piece in pieces], offsets)
        with ThreadPoolExecutor(1) as other:
            seen.extend(other.submit(lambda: buf[[5]]["big"][0, 0].tolist()).result())
        _real(self, pieces, offsets)

    monkeypatch.setattr(MemoryFile, "write_each", half)
    buf.update([5], {"big": np.full((1, 200), 3)})
    assert seen == [2] * 200
    assert buf[[5]]["big"][0, 0].tolist() == [3] * 200


READER = """
import sys, time
import numpy as np
from ringmap import ReplayBuffer

path, reads, seed, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rng = np.random.default_rng(seed)
done = torn = old = 0
with ReplayBuffer.open(path, reads=how) as buf:
    newest = {}
    while done < reads:
        if rng.random() < 0.01:
            buf.refresh()
        batch = buf.sample(64)
        big, obs = batch["big"][:, 0], batch["obs"][:, 0]
        torn += int((big != big[:, :1]).any(axis=1).sum())
        own = (big[:, 0] == 0) | (big[:, 0] // 10**6 == obs)
        torn += int((~own).sum())
        seen = list(zip(obs.tolist(), big[:, 0].tolist()))
        old += sum(value < newest.get(row, 0) for row, value in seen)
        for row, value in seen:
            newest[row] = max(value, newest.get(row, 0))
        done += len(obs)
print(done, torn, old)
"""


def read_beside_an_updater(path, reads, how="map", until_s=600.0):
    """Let two processes read while this one updates and evicts flat out; return their `(reads, torn, older than
    before)`."""
    schema = {"obs": ((), "<i8"), "big": Column((512,), "<i8", mutable=True)}
    buf = ReplayBuffer(300, path=path, schema=schema, sync_every_s=0.05, spare_rows=100)
    number = 0
    for _ in range(3):
        buf.write_episode({"obs": np.arange(number, number + 100)})
        number += 100
    command = [sys.executable, "-c", READER, str(path), str(reads)]
    readers = [subprocess.Popen([*command, str(seed), how], stdout=subprocess.PIPE, text=True) for seed in (1, 2)]
    rng, count, end = np.random.default_rng(0), 0, time.monotonic() + until_s
    while any(reader.poll() is None for reader in readers) and time.monotonic() < end:
        count += 1
        if count % 200 == 0:
            buf.write_episode({"obs": np.arange(number, number + 100)})
            number += 100
        ids = np.unique(rng.integers(number - 300, number, 16) if count % 2 else [number - 1, number - 50])
        value = ids * 10**6 + count
        assert buf.update(ids, {"big": np.repeat(value[:, None], 512, 1)}) == len(ids)
    found = [tuple(map(int, reader.communicate()[0].split())) for reader in readers]
    buf.close()
    return found


@pytest.mark.parametrize("how", few(["map", "pread"]))
def test_two_processes_read_no_torn_value_beside_a_flat_out_updater(tmp_path, how):
    for done, torn, old in read_beside_an_updater(tmp_path / "buf", 3000, how):
        assert done >= 3000
        assert (torn, old) == (0, 0)


@pytest.mark.campaign
def test_a_million_reads_beside_a_flat_out_updater(tmp_path):
    for done, torn, old in read_beside_an_updater(tmp_path / "buf", 500_000):
        assert done >= 500_000
        assert (torn, old) == (0, 0)


@pytest.mark.slow
def test_control_of_torn_values(tmp_path, monkeypatch):
    """Without the checksum torn values are seen."""
    code = "from ringmap.storage.sidecars import values\nimport numpy\n"
    code += "values.MutableValues._are_whole = lambda self, records: numpy.ones(records.shape, bool)\n"
    monkeypatch.setattr(f"{__name__}.READER", code + READER)
    for _ in range(5):
        shutil.rmtree(tmp_path / "buf", ignore_errors=True)
        found = read_beside_an_updater(tmp_path / "buf", 100_000, until_s=5)
        if any(torn for _, torn, _ in found):
            return
    raise AssertionError("no torn value was seen")


@pytest.mark.parametrize("commit_every", [None, 20])
def test_values_of_sequences_go_to_their_own_steps(commit_every, tmp_path):
    """`step_id` names each step of a sequence, also where it crosses parts that don't stand side by side."""
    schema = {"obs": ((2,), "<i8"), "latent": Column((2,), "<f4", mutable=True)}
    buf = ReplayBuffer(1200, path=tmp_path / "buf", schema=schema, spare_rows=100, seed=0, sync_every_s=0)
    lanes = [buf.begin_episode(commit_every=commit_every) for _ in range(3)]
    for t in range(500):
        for lane, episode in enumerate(lanes):
            episode.append({"obs": [lane, t]})
    for episode in lanes:
        episode.finish()
    for _ in range(5):
        batch = buf.sample(64, window=Sequences(12, burn_in=4))
        assert batch["step_id"].shape == (64, 12)
        assert (batch["step_id"][:, 0] == batch.ids).all()
        assert buf.update(batch["step_id"], {"latent": batch["obs"] + 1}) == 64 * 12
    with contextlib.closing(buf):
        stored = [buf.load_episode(i) for i in range(buf.num_episodes)]
    obs, latent = (np.concatenate([one[name] for one in stored]) for name in ("obs", "latent"))
    known = latent.any(1)
    assert known.sum() > 500
    assert (latent[known] == obs[known] + 1).all()
