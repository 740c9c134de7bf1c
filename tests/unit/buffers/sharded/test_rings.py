"""Rings that join, leave, or fail while they are read; the others go on."""

import errno
import gc
import os
import pickle
import resource
import shutil
import tempfile
import threading
from fractions import Fraction
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.buffers.rings import apart
from ringmap.buffers.sharded import reader as reader_module
from ringmap.buffers.sharded import rings as ring_module
from ringmap.clips import gather, rings
from ringmap.clips.facts import Facts
from ringmap.clips.rings import AdjacentRings, States
from ringmap.collection.rings import finished_below
from ringmap.data import ShardedReplayBuffer, Window, load_dataset
from ringmap.errors import (
    BadRingsError,
    EnvironmentFault,
    InputError,
    LappedError,
    NoClipsError,
)
from ringmap.storage.columns.memmap import AdjacentColumn, MemmapColumn
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from ringmap.storage.read.read_live import retry
from ringmap.storage.read.reader import Reader
from tests.unit.buffers.sharded.striking import Striking, always_look
from tests.unit.buffers.steps import episode, prove


def open_all(fleet, **options):
    return ShardedReplayBuffer(fleet.folder, **{"history_len": 3, "seed": 0, "wait_s": 0, **options})


def skipping(fleet, match, **options):
    """Open without the rings that can't be read, after opening all raised; both name them."""
    with pytest.raises(BadRingsError, match=match) as raised:
        open_all(fleet, **options)
    assert raised.value.__cause__ is next(iter(raised.value.rings.values()))
    with pytest.warns(RuntimeWarning, match=f"goes on without .*{match}"):
        return open_all(fleet, on_bad="skip", **options)


def problems(buf):
    return {shard.name: shard.problem for shard in buf.shards if shard.problem is not None}


def rings_of(batch):
    return set(apart(batch.ids)[0].tolist())


@pytest.fixture
def clock(monkeypatch):
    """Let `clock.now` be the time that rings are looked at again by."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    made = Clock()
    for module in (ring_module,):
        monkeypatch.setattr(module, "time", made)
    return made


def test_rings_join_at_a_draw(three, clock):
    buf = open_all(three)
    three.ring("0-new")
    three.write("0-new", 40)
    buf.sample(10)
    assert len(buf.shards) == 3
    clock.now += 1.1
    assert rings_of(buf.sample(500)) == {0, 1, 2, 3}  # its name sorts first, its number is the next
    prove(buf.sample(500), three.lengths, 3)
    assert [shard.name for shard in buf.shards] == ["0-new", "a", "b", "c"]


def test_a_commit_in_the_middle_of_a_look_is_seen_at_the_next(three, monkeypatch):
    buf = open_all(three)
    buf.sample(3)
    real, left = Reader.refresh, ["a"]

    def refresh(reader):
        found = real(reader)
        while left:
            three.write(left.pop(), 20)
        return found

    monkeypatch.setattr(Reader, "refresh", refresh)
    three.write("a", 20)
    buf.sample(3)
    assert not left
    assert len(buf) < len(three.clips(3))
    buf.sample(3)
    assert len(buf) == len(three.clips(3))


def test_a_new_ring_is_followed_while_the_others_are_idle(three):
    """Also where the states of the rings that are read now look as those of the rings before them did."""

    def states():
        return States([ring.source for ring in buf.engine.members.open]).generations()

    buf = open_all(three)
    buf.sample(3)
    before = states()
    shutil.rmtree(three.folder / "c")
    three.ring("d", 300)
    for _ in list(three.model.pop("c"))[1:]:  # one commit less
        three.write("d", 20)
    buf.refresh()
    three.write("d", 20)
    assert [ring.name for ring in buf.engine.members.open] == ["a", "b", "d"]
    assert states() == before
    for _ in range(2):
        buf.sample(3)
        assert len(buf) == len(three.clips(3))
        three.write("d", 20)


def test_other_children_are_passed_over(three):
    (three.folder / "policy").mkdir()
    (three.folder / "policy" / "weights").write_text("x")
    (three.folder / "log.txt").write_text("x")
    assert [shard.name for shard in open_all(three).shards] == ["a", "b", "c"]


@pytest.mark.parametrize("on_bad", ["skip", "raise"])
@pytest.mark.parametrize("how", ["removed", "renamed", "made anew"])
def test_a_removed_ring_is_evicted(three, on_bad, how):
    """That is no fault, so nothing is said of it."""
    buf = open_all(three, on_bad=on_bad)
    if how == "renamed":
        os.rename(three.folder / "b", three.folder.parent / "z")
    else:
        shutil.rmtree(three.folder / "b")
    three.model.pop("b")
    numbers = {0, 2}
    if how == "made anew":
        three.ring("b")
        three.write("b", 20)
        numbers.add(3)
    buf.refresh()
    buf.refresh()
    assert problems(buf) == {}
    assert rings_of(buf.sample(300)) == numbers
    prove(buf.sample(300), three.lengths, 3)
    assert len(buf) == len(three.clips(3))


@pytest.mark.parametrize("paths", ["", "*", "*/*"])
@pytest.mark.parametrize("on_bad", ["skip", "raise"])
def test_a_listing_that_fails_removes_no_ring(three, monkeypatch, paths, on_bad):
    """As where the process has too many open files; the next look takes what joined meanwhile."""
    folder = three.folder.parent if paths == "*/*" else three.folder
    buf = ShardedReplayBuffer(folder / paths, 3, wait_s=0, on_bad=on_bad, seed=0)
    real = os.listdir

    def fails(path):
        if os.fspath(path) == str(three.folder):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path)

    three.ring("d")
    three.write("d", 20)
    said = "can't be listed: Too many open files .*ulimit -n"
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fails)
        if on_bad == "raise":
            for look in (buf.refresh, buf.refresh, lambda: buf.sample(3)):
                with pytest.raises(BadRingsError, match=said):
                    look()
        else:
            with pytest.warns(RuntimeWarning, match=said):
                buf.refresh()
            buf.refresh()
            assert rings_of(buf.sample(300)) == {0, 1, 2}
    buf.refresh()
    assert rings_of(buf.sample(300)) == {0, 1, 2, 3}
    assert not problems(buf)
    buf.close()


def test_a_ring_that_comes_back_has_its_number(three):
    buf = open_all(three)
    os.rename(three.folder / "b", three.folder / "z")
    buf.refresh()
    buf.refresh()
    assert [shard.name for shard in buf.shards] == ["a", "c", "z"]
    assert rings_of(buf.sample(300)) == {0, 1, 2}


def test_a_damaged_ring_is_looked_at_again_with_backoff(three, clock, monkeypatch):
    manifest = three.folder / "b" / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_bytes(good[:40])
    opened = []
    real = ring_module.read_manifest
    monkeypatch.setattr(
        ring_module,
        "read_manifest",
        lambda disk, folder: opened.append(folder) or real(disk, folder),
    )
    buf = skipping(three, "manifest.json")
    assert "manifest.json" in problems(buf)["b"]
    assert rings_of(buf.sample(300)) == {0, 1}
    opened.clear()
    start, times = clock.now, []
    for _ in range(4000):
        clock.now += 0.1
        buf.refresh()
        times += [clock.now - start] * len(opened)
        opened.clear()
    np.testing.assert_allclose(times[:7], [1, 3, 7, 15, 31, 63, 123], atol=0.8)
    assert max(np.diff(times[6:])) < 61
    manifest.write_bytes(good)
    clock.now += 61
    with pytest.warns(RuntimeWarning, match="reads .*/b again"):
        buf.refresh()
    assert problems(buf) == {}
    assert rings_of(buf.sample(300)) == {0, 1, 2}


def test_a_ring_of_other_columns(three):
    with ReplayBuffer(100, path=three.folder / "d") as other:
        other.write_episode({"step": np.arange(9)})
    said = "other columns than the rings before it"
    assert said in problems(skipping(three, said))["d"]


def test_columns_are_compared_once_there_are_some(three):
    late = ReplayBuffer(100, path=three.folder / "d")
    buf, strict = open_all(three, on_bad="skip"), open_all(three)
    assert problems(buf) == {}
    late.write_episode({"step": np.arange(9)})
    for _ in range(2):  # a draw from a part of the fleet is never the answer
        with pytest.raises(BadRingsError, match=r"1 of 4 rings.*/d: .*other columns"):
            strict.sample(4)
    assert "other columns" in problems(strict)["d"]
    with pytest.warns(RuntimeWarning, match="other columns"):
        buf.sample(4)
    assert "other columns" in problems(buf)["d"]
    prove(buf.sample(100), three.lengths, 3)
    late.close()


def test_rings_of_rewards_elsewhere(three):
    three.ring("d", reward_at="next")
    three.write("d", 20)
    assert "reward_at='next'" in problems(skipping(three, "reward_at='next'"))["d"]


def test_rings_of_another_rate_are_left_out_unless_one_rate_is_named(fleet, tmp_path):
    for name, rate in (("a", None), ("b", 29.97), ("c", Fraction(30000, 1001)), ("d", 10)):
        fleet.ring(name, fps=rate)
        fleet.write(name, 20)
    buf = skipping(fleet, "10/1; name the rate")
    assert buf.fps == pickle.loads(pickle.dumps(buf)).fps == Fraction(2997, 100)
    assert "2997/100 steps per second, and" in problems(buf)["d"] and len(problems(buf)) == 1
    named = open_all(fleet, fps=np.float32(12.5))
    assert named.fps == pickle.loads(pickle.dumps(named)).fps == 12.5
    window = {"step": Window(seconds=[0.08])}
    assert named.sample(4, window=window)["step"].shape == (4, 1)
    for source, rate, options in ((buf, buf.fps, {}), (named, 12.5, {}), (named, 5, {"fps": 5})):
        source.dump(tmp_path / "out.h5", **options)
        assert load_dataset(tmp_path / "out.h5").fps == rate


def test_where_rewards_stand_is_known_with_the_first_episode(fleet, caplog):
    """A learner may open a ring before its collector has said where it writes them."""
    fleet.ring("a")
    buf = open_all(fleet)
    assert buf.reward_at is None
    fleet.writers["a"].expect_facts(Facts("next"), "a test")
    fleet.write("a", 20)
    fleet.ring("b", reward_at="next")
    fleet.write("b", 20)
    buf.refresh()
    assert buf.reward_at == "next"
    assert problems(buf) == {}
    assert rings_of(buf.sample(100)) == {0, 1}
    assert caplog.text == ""


def test_a_learner_with_a_pace_waits_for_the_first_episode(fleet):
    from ringmap import Pace
    from ringmap.data import NStep

    fleet.ring("a", reward_at="next")
    pace = Pace(fleet.folder, samples_per_insert=10, min_steps=30, slack=5, timeout_s=60)
    buf = open_all(fleet)
    writing = threading.Timer(0.2, lambda: [fleet.write("a", 20) for _ in range(2)])
    writing.start()
    window = {"sum": NStep(3, of="step")}
    assert len(buf.sample(16, window=window, pace=pace)["sum"]) == 16
    writing.join()
    drawn = pace.drawn
    buf.sample(16, window=window, pace=pace)
    assert pace.drawn == 2 * drawn
    pace.close()


def test_rings_on_a_network_file_system(three, tmp_path, monkeypatch):
    """Of this host: they are read. With a writer on another one: left out, since the page cache is not ours."""
    monkeypatch.setattr(System, "is_network", lambda self, path: True)
    assert problems(open_all(three)) == {}
    monkeypatch.setattr("ringmap.storage.read.reader.holder_of", lambda path: {"host": "far"})
    said = "network file system and was last written by host far"
    with pytest.raises(BadRingsError, match=f"3 of 3 rings.*{said}.*{said}.*{said}"):
        open_all(three)
    with pytest.warns(RuntimeWarning, match=said), pytest.raises(NoClipsError, match=said):
        open_all(three, on_bad="skip")
    with pytest.raises(EnvironmentFault, match=r"state=.*learner lies on a network file system"):
        open_all(three, state=tmp_path / "learner")
    with pytest.raises(EnvironmentFault, match=r"ringmap.collect: .*lies on a network file"):
        ringmap.collect(ringmap.World, tmp_path / "fleet", 1, 1, max_steps=10)


def test_the_same_ring_twice(three):
    (three.folder / "link").symlink_to(three.folder / "a")
    with pytest.raises(InputError, match=r"fleet/link and .*fleet/a are the same ring"):
        open_all(three)
    with pytest.raises(InputError, match="the same ring"):
        ShardedReplayBuffer([three.folder / "a", three.folder / "link"], wait_s=0)
    (three.folder / "link").unlink()
    buf = open_all(three, on_bad="skip")
    shutil.copytree(three.folder / "a", three.folder / "copy")
    with pytest.warns(RuntimeWarning, match="the same ring"):
        buf.refresh()
    assert "the same ring" in problems(buf)["copy"]
    assert len(buf) == len(three.clips(3))


# -- in the middle of a gather -------------------------------------------------------------------


def at(copies, part):
    """Return the number of a copy: there are four columns, and three rings if each is copied alone."""
    return 1 + round(part * (3 if copies is AdjacentColumn else 11))


@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_a_ring_removed_in_the_middle_of_a_gather(three, monkeypatch, copies, part):
    always_look(monkeypatch)
    buf = open_all(three)
    buf.sample(3)

    def strike():
        shutil.rmtree(three.folder / "b")
        three.model.pop("b", None)

    Striking(monkeypatch, copies, strike, at(copies, part))
    batch = buf.sample(300)
    assert rings_of(batch) == {0, 2}
    prove(batch, three.lengths, 3)
    assert buf.num_redraws > 50
    assert problems(buf) == {}


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_clips_evicted_in_the_middle_of_a_gather(three, monkeypatch, copies, part):
    buf = open_all(three)
    buf.sample(3)

    def strike():
        for name in "abc":
            for _ in range(12):
                three.write(name, 40)

    Striking(monkeypatch, copies, strike, at(copies, part))
    batch = buf.sample(300)
    prove(batch, three.lengths, 3)
    assert buf.num_redraws > 100


def overtaken(fleet, monkeypatch, most):
    """Return how many copies a batch took beside writers that replace nearly all of their rings meanwhile."""
    monkeypatch.setattr(reader_module, "MOST_CHOICES", most)
    monkeypatch.setattr(reader_module, "retry", partial(retry, retry_s=0.0))
    for name in "ab":
        if name not in fleet.writers:
            fleet.ring(name, 300, spare_rows=300)
        for _ in range(60):
            fleet.write(name, 5)
    buf, real, taken = open_all(fleet), MemmapColumn.take, 0

    def take(column, *given):
        nonlocal taken
        found = real(column, *given)
        if column.spec.name == "step":
            taken += 1
            name = column.path.split("/")[-3]  # of the ring
            for _ in range(59):
                fleet.write(name, 5)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(System, "room", lambda self, nbytes: None)  # ring by ring, as each redraw is read
        patch.setattr(MemmapColumn, "take", take)
        batch = buf.sample(32)
    prove(batch, _Any(dict.fromkeys(range(fleet.next), 5)), 3)
    buf.close()
    return taken


def test_each_next_redraw_is_nearer_to_the_newest_clip(fleet, monkeypatch):
    assert overtaken(fleet, monkeypatch, 1024) < 20
    with pytest.raises(LappedError):  # a control: uniform redraws
        overtaken(fleet, monkeypatch, 1)


def test_the_control_of_the_look(three, monkeypatch, copies):
    """Without the look after the copy, clips that were overwritten come out."""
    buf = open_all(three)
    buf.sample(3)

    def strike():
        for name in "abc":
            for _ in range(12):
                three.write(name, 40)

    for module in (gather, rings):
        monkeypatch.setattr(module, "lost", lambda source, positions, good=None: None)
    monkeypatch.setattr(AdjacentRings, "lost", lambda *_: None)
    Striking(monkeypatch, copies, strike, 2)
    with pytest.raises(AssertionError):
        prove(buf.sample(300), three.lengths, 3)


def test_all_rings_that_turned_bad_are_in_one_error(three, clock, monkeypatch):
    """At each draw, until they can be read again, or are gone: a loop that passes over errors gets no batch from the
    others."""
    buf, free = open_all(three), open_all(three, on_bad="skip")
    real = Reader.refresh

    def refresh(reader):
        if os.path.basename(reader.folder) in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), reader.folder)
        return real(reader)

    monkeypatch.setattr(Reader, "refresh", refresh)
    bad = ["b", "c"]
    for name in bad:
        three.write(name, 20)
    with monkeypatch.context() as patch:
        refuse(patch, f"{three.folder}/b", errno.EIO, looks=False)
        refuse(patch, f"{three.folder}/c", errno.EIO, looks=False)
        for _ in range(2):
            with pytest.raises(BadRingsError, match=r"2 of 3 rings .*/b: .*Input.*/c: .*Input"):
                buf.sample(3)
        assert list(problems(buf)) == bad
        assert "rings=1" in repr(buf)
        answers = {
            "len": lambda: len(buf),
            "lengths": lambda: buf.lengths,
            "episodes": lambda: list(buf.episodes()),
            "view": buf.view,
            "split": buf.split,
            "dump": lambda: buf.dump(three.folder.parent / "out.h5"),
            "snapshot": lambda: buf.snapshot(three.folder.parent / "copy"),
            "data": buf.get_episode_data,
            "load_episode": lambda: buf.load_episode(0),
            "num_episodes": lambda: buf.num_episodes,
        }
        for call in answers.values():
            with pytest.raises(BadRingsError, match="2 of 3 rings"):
                call()
        assert os.listdir(three.folder.parent) == ["fleet"]
        assert [finding.file for finding in buf.check()] == bad
        with pytest.warns(RuntimeWarning, match=r"goes on without .*/b: .*goes on without .*/c: "):
            assert rings_of(free.sample(300)) == {0}
        free.sample(3)  # said once
    bad.clear()
    shutil.rmtree(three.folder / "c")
    assert rings_of(buf.sample(300)) == {0, 1}
    assert problems(buf) == {}


def refuse(monkeypatch, path, error, looks):
    """Let opens, and looks where `looks`, at a path and below it fail."""
    real_stat, real_open = Disk._stat, System.open_file

    def fail(at):
        if f"{at}/".startswith(f"{path}/"):
            raise OSError(error, os.strerror(error), at)

    def stat(disk, at):
        if looks:
            fail(at)
        return real_stat(disk, at)

    def open_file(system, at, flags, *, dir_fd=None, name=None):
        fail(name or at)
        return real_open(system, at, flags, dir_fd=dir_fd, name=name)

    monkeypatch.setattr(Disk, "_stat", stat)
    monkeypatch.setattr(System, "open_file", open_file)


@pytest.mark.parametrize(
    ("looks", "error"),
    [(True, errno.EACCES), (False, errno.EACCES), (True, errno.EIO), (False, errno.EMFILE)],
)
def test_a_ring_that_may_not_be_read_is_no_missing_one(three, monkeypatch, clock, looks, error):
    said = os.strerror(error)
    with monkeypatch.context() as patch:
        refuse(patch, f"{three.folder}/b/manifest.json", error, looks)
        buf = skipping(three, f"/b: .*{said}")
        assert said in problems(buf)["b"]
        assert rings_of(buf.sample(300)) == {0, 1}
        assert [finding.file for finding in buf.check()] == ["b"]
        with pytest.raises(BadRingsError, match=f"1 of 3 rings .*/b: .*{said}"):
            ShardedReplayBuffer(three.folder / "*", wait_s=0)
        with pytest.raises(BadRingsError, match=f"1 of 3 rings .*/b: .*{said}"):
            ShardedReplayBuffer([three.folder / name for name in "abc"], wait_s=0)
        if looks:
            found = {finding.file: finding.what for finding in ringmap.check(three.folder)}
            assert list(found) == ["b"]
            assert said in found["b"]
    clock.now += 2
    with pytest.warns(RuntimeWarning, match="reads .*/b again"):
        buf.refresh()
    assert rings_of(buf.sample(300)) == {0, 1, 2}


@pytest.mark.parametrize("reads", ["map", "pread"])
def test_a_ring_holds_few_descriptors(three, reads):
    """Thirteen, before maps held none; by reads one for each column."""
    gc.collect()
    used = System().descriptors()[0]
    with open_all(three, reads=reads) as buf:
        buf.sample(50)
        buf.get_episode_data()
        list(buf.episodes())
        each = (System().descriptors()[0] - used) / 3
        assert each == (4 if reads == "map" else 8)  # the columns are four
        assert each <= buf.engine.members._descriptors_of(str(three.folder / "a"))


def test_descriptors_are_counted_first(three):
    """The limit is the user's: it is said, and stays."""
    gc.collect()
    used, most, hard = System().descriptors()
    needed = used + 32 + 5 * 3
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed - 1, hard))
        said = f"3 rings need 5 open files each.*it may have {needed - 1}: run 'ulimit -n {needed}'"
        with pytest.raises(BadRingsError, match=f"1 of 3 rings .*/c: .*{said}"):
            open_all(three)
        with pytest.warns(RuntimeWarning, match=said):
            buf = open_all(three, on_bad="skip")
        assert rings_of(buf.sample(300)) == {0, 1}
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (needed - 1, hard)
        buf.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        open_all(three).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _as_nobody(folder, found):
    os.umask(0o077)
    with ReplayBuffer(100, path=folder / "b", seed=0) as ring:
        ring.write_episode(episode(0, 20))
    if os.geteuid() == 0:
        os.seteuid(65534)
    else:
        os.chmod(folder / "b", 0)
    for call in (
        lambda: ShardedReplayBuffer(folder, wait_s=0),
        lambda: ShardedReplayBuffer(folder / "*", wait_s=0),
        lambda: ShardedReplayBuffer(f"{folder}/../*/*", wait_s=0),
        lambda: ringmap.check(folder),
        lambda: finished_below(str(folder), None, 0, "collect"),  # it would play seeds twice
    ):
        try:
            found.put(str(call()))
        except Exception as error:
            found.put(f"{type(error).__name__}: {error}")


def test_a_ring_of_another_users_umask():
    """The folders of pytest may not be looked into by that user."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        folder = Path(made) / "fleet"
        folder.mkdir()
        os.chmod(folder, 0o777)
        with ReplayBuffer(100, path=folder / "a", seed=0) as ring:
            ring.write_episode(episode(0, 20))
        context = get_context("fork")
        found = context.SimpleQueue()
        child = context.Process(target=_as_nobody, args=(folder, found))
        child.start()
        said = [found.get() for _ in range(5)]
        child.join()
        os.chmod(folder / "b", 0o755)
    for one in said[:3]:
        assert one.startswith("BadRingsError: ShardedReplayBuffer: 1 of 2 rings ")
    for one in said:
        assert "Permission denied" in one
        assert "/fleet/b" in one or "'b'" in one
        assert "give this process the permission" in one


# -- other processes -------------------------------------------------------------------------------


def test_threads_read_while_rings_come_and_go(three):
    buf = open_all(three)
    faults, lengths = [], _Any(three.lengths)

    def read():
        try:
            for _ in range(60):
                prove(buf.sample(32), lengths, 3)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(6):
        name = f"n{turn}"
        three.ring(name)
        three.write(name, 30)
        buf.refresh()
        shutil.rmtree(three.folder / name)
        buf.refresh()
    for thread in threads:
        thread.join()
    assert faults == []
    assert [shard.name for shard in buf.shards if shard.problem is None] == ["a", "b", "c"]


class _Any(dict):
    """The lengths that were there at first, and 30 of any other episode."""

    def __contains__(self, number):
        return True

    def __missing__(self, number):
        return 30


def test_shards(three):
    shards = open_all(three).shards
    assert [(s.name, s.episodes, s.steps) for s in shards] == [
        (name, len(ring), sum(ring.values())) for name, ring in three.model.items()
    ]
    assert [s.clips for s in shards] == [sum(n - 2 for n in ring.values()) for ring in three.model.values()]
    assert all(s.writer.alive and s.writer.pid == os.getpid() for s in shards)
    assert all(0 <= s.idle_s < 600 and s.redraws == 0 for s in shards)
