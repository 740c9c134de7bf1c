"""Passes that pin one state, views and splits: ids that stand still, whatever is written meanwhile."""

import itertools
import os
import pickle
import sys
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from ringmap import ReplayBuffer
from ringmap.clips.gather import PINNED
from ringmap.errors import ClipIndexError, InputError, NoClipsError, StaleCopyError
from tests.tiers import few
from tests.unit.buffers.loading.conftest import HISTORY, SKIP, end, episode, everything, fill, prove

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def clips_of(loader):
    return [clip for batch in loader for clip in prove(batch)]


# -- passes ------------------------------------------------------------------------------------


@WORKERS
def test_a_pass_is_what_there_was_when_it_began(disk, workers):
    sampler = disk.pass_sampler(seed=3)
    loader = DataLoader(disk, 16, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    first, number = [], 20
    for batch in loader:
        first += prove(batch)
        fill(disk, 1, number)
        number += 1
    assert sorted(first) == everything(disk)
    second = clips_of(loader)
    assert len(second) == len(disk) > len(first)
    assert len(set(second)) == len(second)
    assert disk.num_redraws == 0
    end(loader)


def test_the_same_seed_gives_the_same_orders(disk):
    one, other = disk.pass_sampler(seed=3), disk.sampler(shuffle=True, seed=3)
    first = list(one)
    assert first == list(other)
    second = list(one)
    assert second == list(other)
    assert first != second
    assert sorted(first) == sorted(second)
    assert list(disk.pass_sampler(shuffle=False)) == sorted(first)
    assert list(disk.pass_sampler(seed=4)) != first


def test_in_a_worker_with_a_pickled_copy_of_a_buffer_in_ram():
    """Positions mean the same in a copy: what the ring held before it is not in it."""
    buf = ReplayBuffer(150, HISTORY, SKIP)
    fill(buf, 40)
    assert buf.num_episodes < 20
    loader = DataLoader(buf, 16, sampler=buf.pass_sampler(), num_workers=1, multiprocessing_context="forkserver")
    found = clips_of(loader)
    assert len(set(found)) == len(found) == len(buf)


@pytest.mark.parametrize(("workers", "persistent"), few([(2, True), (0, False), (2, False)]))
def test_a_pass_that_is_resumed_is_the_uninterrupted_one(disk, workers, persistent):
    options = {"batch_size": 16, "num_workers": workers, "persistent_workers": persistent}
    whole = disk.pass_sampler(seed=5)
    loader = DataLoader(disk, sampler=whole, **options)
    expected = [[prove(batch) for batch in loader] for _ in range(2)]
    end(loader)
    for stop in (0, 1, 5, len(expected[0])):
        sampler = disk.pass_sampler(seed=5)
        loader = DataLoader(disk, sampler=sampler, **options)
        passing = iter(loader)
        had = [prove(next(passing)) for _ in range(stop)]
        state = sampler.state_dict(taken=min(stop * 16, len(disk)))
        del passing
        end(loader)
        with ReplayBuffer.open(disk.path) as again:
            resumed = again.pass_sampler()
            resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
            loader = DataLoader(again, sampler=resumed, **options)
            size = len(loader)  # by which a progress bar, or a scheduler of the learning rate, counts
            rest = [prove(batch) for batch in loader]
            assert size == len(rest)
            assert len(loader) == len(expected[1])
            if stop == len(expected[0]):
                assert rest == expected[1], "the pass had ended: the next one"
            else:
                assert had + rest == expected[0]
                assert [prove(batch) for batch in loader] == expected[1]
            end(loader)
        again.close()


def test_resumed_after_evictions_the_rest_is_drawn_anew(tmp_path):
    buf = ReplayBuffer(220, HISTORY, SKIP, path=tmp_path / "buf", seed=0)
    fill(buf, 20)
    sampler = buf.pass_sampler(seed=5)
    passing = iter(sampler)
    had = [next(passing) for _ in range(10)]
    state = sampler.state_dict()
    assert state["place"] == len(had)
    fill(buf, 5, 20)
    sampler = buf.pass_sampler()
    sampler.load_state_dict(state)
    ids = list(sampler)
    assert len(ids) == state["count"] - 10
    found = prove({n: torch.from_numpy(v) for n, v in buf[ids].items()})
    assert len(found) == len(ids)
    assert buf.num_redraws > 0
    buf.close()


def test_wrong_arguments(disk):
    with pytest.raises(InputError, match="seed"):
        disk.pass_sampler(seed=-1)
    sampler = disk.pass_sampler()
    next(iter(sampler))
    with pytest.raises(InputError, match="taken"):
        sampler.state_dict(taken=10_000)


@pytest.mark.parametrize("wrong", [{"shuffle": 1}, {"shuffle": None}, {"place": 10_000}, {"count": 1}])
def test_a_wrong_state_changes_nothing(disk, wrong):
    sampler = disk.pass_sampler(seed=4)
    next(iter(sampler))
    before = sampler.state_dict()
    with pytest.raises(InputError, match="shuffle must be True or False|the state is at item"):
        sampler.load_state_dict({**before, **wrong})
    assert sampler.state_dict() == before


# -- readers and their workers -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_count_as_the_reader_that_owns_the_loader(disk, method):
    """A reader's ids stand still until it is refreshed, in its workers too: a plain pass is exact."""
    with ReplayBuffer.open(disk.path, seed=0) as reader:
        size = len(reader)
        loader = DataLoader(
            reader,
            16,
            shuffle=True,
            num_workers=2,
            multiprocessing_context=method,
            persistent_workers=True,
        )
        fill(disk, 10, 20)
        assert sorted(clips_of(loader)) == everything(disk)
        fill(disk, 1, 30)
        assert sorted(clips_of(loader)) == everything(disk)
        reader.refresh()
        assert len(reader) == len(disk) > size
        assert len(set(clips_of(loader))) == len(disk)
        end(loader)
    reader.close()


@WORKERS
def test_a_writer_that_is_opened_again_changes_no_clip_of_a_pass(disk, workers):
    """Another writer numbers anew; the clips are where they were, and none is drawn in place of another."""
    reader = ReplayBuffer.open(disk.path, seed=0)
    loader = DataLoader(reader, 16, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    passing = iter(loader)
    found = prove(next(passing))
    path = disk.path
    disk.close()
    with ReplayBuffer.open(path, mode="r+") as again:
        fill(again, 2, 20)
        reader.engine.source.refresh()  # as a clip that was evicted makes it, in its pass
        found += [clip for batch in passing for clip in prove(batch)]
        assert sorted(found) == everything(again)
        assert sorted(clips_of(loader)) == everything(again)
    again.close()
    assert reader.num_redraws == 0
    reader.close()
    end(loader)


def test_a_process_that_is_no_worker_counts_for_itself(disk):
    with ReplayBuffer.open(disk.path) as reader:
        size = len(reader)
        fill(disk, 3, 20)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            reader.refresh()
            os.write(write, str(len(reader)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert int(os.read(read, 99)) == len(disk) > size == len(reader)
        os.close(read)
        os.close(write)
    reader.close()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_persistent_workers_with_an_old_copy_say_so(method, workers_end_soon):
    buf = ReplayBuffer(2000, HISTORY, SKIP, seed=0)
    fill(buf, 20)
    loader = DataLoader(
        buf,
        16,
        shuffle=True,
        num_workers=1,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    first = []
    for batch in loader:
        first += prove(batch)
        fill(buf, 1, 50)  # in mid-pass: the copy is what it was
    assert set(first) <= {*everything(buf)}
    with pytest.raises(StaleCopyError, match=r"persistent_workers=False, or give the buffer a path="):
        list(loader)
    loader = DataLoader(buf, 16, num_workers=2, multiprocessing_context=method)
    assert len(clips_of(loader)) == len(clips_of(loader)) == len(buf)


# -- views -------------------------------------------------------------------------------------


def test_a_view_stands_still(buffer):
    view = buffer.view()
    clips = everything(buffer)
    fill(buffer, 5, 20)
    assert len(view) == len(clips) < len(buffer)
    assert [tuple(view[i]["place"][0].tolist()) for i in range(len(view))] == clips
    assert tuple(view[-1]["place"][0].tolist()) == clips[-1]
    assert view.column_names == buffer.column_names
    assert view.lengths.tolist() == [9 + number % 5 for number in range(20)]
    assert np.array_equal(view.load_episode(3)["pixels"], episode(3, 12)["pixels"])
    assert list(view.clip_indices)[:2] == [(0, 0), (0, 1)]
    assert view.get_col_data("place").shape == (int(view.lengths.sum()), 2)
    with pytest.raises(ClipIndexError, match="out of range"):
        view[len(view)]


def test_views_keep_to_their_transform(buffer):
    buffer.transform = lambda clip: {"n": clip["place"][0, 0]}
    assert buffer.view()[0] == {"n": 0}
    with pytest.raises(InputError, match="transform"):
        buffer.view().transform = dict


@pytest.mark.parametrize("train", [0.25, 0.5, 0.9])
def test_a_split_shares_no_episode(buffer, train):
    one, other = buffer.split(train, seed=1)
    first = {clip[0] for clip in clips_of(DataLoader(one, 16))} if len(one) else set()
    second = {clip[0] for clip in clips_of(DataLoader(other, 16))} if len(other) else set()
    assert not first & second
    assert first | second == set(range(20))
    assert abs(len(one.lengths) - 20 * train) < 3
    again, _ = buffer.split(train, seed=1)
    assert again.lengths.tolist() == one.lengths.tolist()


def test_a_distributed_sampler_of_one_process(buffer):
    view = buffer.view()
    halves = [
        clips_of(DataLoader(view, 16, sampler=DistributedSampler(view, 2, rank, shuffle=False, drop_last=True)))
        for rank in range(2)
    ]
    assert not {*halves[0]} & {*halves[1]}


# -- clips of another length -------------------------------------------------------------------


def whole(batch):
    """Tell whether each clip is of one episode, and its steps SKIP apart."""
    places = np.asarray(batch["place"])
    return (places[..., 0] == places[..., :1, 0]).all() and (np.diff(places[..., 1]) == SKIP).all()


def test_a_view_keeps_the_length_of_its_clips(buffer):
    view = buffer.view()
    expected = [view[i] for i in range(len(view))]
    buffer.num_steps = 4
    assert len(view) == len(expected)
    for number, clip in enumerate(expected):
        assert np.array_equal(view[number]["place"], clip["place"])
        assert np.array_equal(view[[number]]["action"][0], clip["action"])
    assert sorted(clips_of(DataLoader(view, 16, num_workers=1))) == everything(buffer)
    longer = buffer.view()
    assert longer[len(longer) - 1]["place"].shape == (4, 2)
    assert whole(longer[range(len(longer))])
    assert buffer.num_redraws == 0


@WORKERS
def test_a_place_where_no_clip_starts_is_drawn_anew(buffer, workers):
    """Ids of a pass that was begun with shorter clips: none reaches into the next episode."""
    sampler = buffer.pass_sampler()
    ids = list(sampler)
    buffer.num_steps = 4
    loader = DataLoader(buffer, 16, sampler=ids, num_workers=workers)
    batches = list(loader)
    assert sum(len(batch["place"]) for batch in batches) == len(ids)
    assert all(whole(batch) for batch in batches)
    assert any(batch.redrawn.any() for batch in batches)


def test_ids_must_be_integers(buffer):
    view = buffer.view()
    for data in (buffer, view):
        for wrong in ([0.0, 1.0], np.array([True, False]), np.array([[0, 1]]), ["a"]):
            with pytest.raises(InputError, match="integers"):
                data[wrong]
            with pytest.raises(InputError, match="integers"):
                data.__getitems__(wrong)
        for right in (
            torch.tensor([1, 2]),
            [torch.tensor(1), 2],
            np.array([1, 2], np.uint8),
            range(1, 3),
        ):
            assert data[right]["place"].tolist() == data[[1, 2]]["place"].tolist()
        assert data[[]]["place"].shape == (0, HISTORY, 2)


def test_an_empty_buffer_says_so(tmp_path):
    for path in (None, tmp_path / "buf"):
        buf = ReplayBuffer(100, path=path)
        view = buf.view()
        assert buf[[]] == {} == view[[]]
        for ids in ([0], [PINNED]):
            with pytest.raises(NoClipsError, match="no clips"):
                buf[ids]
        assert list(DataLoader(buf)) == list(DataLoader(buf, sampler=buf.pass_sampler())) == []
        buf.close()


def test_a_copy_that_is_made_while_the_ring_is_written_has_its_clips_in_place(monkeypatch):
    """A buffer in RAM is pickled, for spawned workers, while another thread evicts what was not yet copied."""
    buf = ReplayBuffer(200, HISTORY, SKIP)
    fill(buf, 40)
    source, read, calls = buf.engine.owned, buf.engine.owned.read_record, []

    def writing(record):
        found = read(record)
        calls.append(record)
        if len(calls) == 2:
            fill(buf, 6, 40)
        return found

    monkeypatch.setattr(source, "read_record", writing)
    copy = pickle.loads(pickle.dumps(buf))
    assert copy.num_episodes > 5
    ids = list(copy.pass_sampler())
    for name, values in copy[ids].items():
        assert np.array_equal(values, buf[ids][name])
    assert buf.num_redraws == 0


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, buffer, batches=4):
        self.buffer, self.batches = buffer, batches

    def __iter__(self):
        for _ in range(self.batches):
            yield self.buffer.sample(8)


def test_a_worker_goes_on_where_its_init_function_says(buffer):
    state = buffer.state_dict()

    def begin(number):
        torch.utils.data.get_worker_info().dataset.buffer.load_state_dict(state)

    loader = DataLoader(Stream(buffer), None, num_workers=1, worker_init_fn=begin)
    for batch in loader:
        assert np.array_equal(batch["place"], buffer.sample(8)["place"])


def test_clips_are_listed_while_another_thread_draws():
    """Two threads that brought the index up to date at once left it broken for good."""
    buf = ReplayBuffer(400, HISTORY, SKIP, seed=0)
    fill(buf, 30)
    stop, broken = threading.Event(), []

    def run(work):
        try:
            while not stop.is_set():
                work()
        except Exception as error:
            broken.append(error)

    numbers = itertools.count(100)
    works = [
        lambda: fill(buf, 1, next(numbers)),
        lambda: buf.sample(8),
        buf.check,
        lambda: buf.clip_indices[len(buf.clip_indices) // 2],
        lambda: buf.clip_indices[:5],
    ]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        stop.wait(1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not broken
    assert buf.check() == []
    pairs = pickle.loads(pickle.dumps(buf.clip_indices))
    assert list(pairs) == list(buf.clip_indices)
