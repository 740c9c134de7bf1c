"""Live views, moments, and passes over views: what moves when, what comes once, what resumes, on how many ranks."""

import json
import os
import pickle

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap import Marks, ReplayBuffer, TransitionReplayBuffer
from ringmap.buffers import view as view_module
from ringmap.buffers.rings import pack, unpack
from ringmap.buffers.view import BufferView
from ringmap.data import (
    ConcatDataset,
    GoalDataset,
    Index,
    MergeDataset,
    Sequences,
    ShardedReplayBuffer,
    Window,
)
from ringmap.errors import InputError, RoleError, StaleCopyError
from ringmap.formats.base import EPISODE_DATA_KEY
from tests.tiers import few
from tests.unit.buffers.loading.conftest import end


def episode(number, length):
    """Each step says which it is."""
    return {"step": number * 1000 + np.arange(length), "reward": np.ones(length, np.float32)}


def fill(buf, count, first):
    for number in range(first, first + count):
        data = {EPISODE_DATA_KEY: {"task": "ab"[number % 2]}}
        buf.write_episode({**episode(number, 9 + number % 5), **data})


def fill_in_parts(buf, count, first):
    """Episodes of one lane each, two at a time, their parts in turn."""
    for number in range(first, first + count, 2):
        both = [buf.begin_episode(commit_every=4, lane=lane) for lane in range(2)]
        for at in range(11):
            for lane, one in enumerate(both):
                one.append({name: v[at] for name, v in episode(number + lane, 11).items()})
        for lane, one in enumerate(both):
            one.finish(episode_data={"task": "ab"[lane]})


class Writer:
    """A ring, or some, that evict: `go_on` writes as many episodes as are stored, or fewer."""

    def __init__(self, folder, kind):
        self.next, self.kind = 0, kind
        self.rings = [
            ReplayBuffer(230, path=folder / str(number), seed=0) for number in range(3 if kind == "fleet" else 1)
        ]
        self.go_on(60)
        self.data = self.rings[0]
        if kind == "fleet":
            self.data = ShardedReplayBuffer(folder, seed=0)

    def go_on(self, count):
        for ring in self.rings:
            write = fill_in_parts if self.kind == "parts" else fill
            write(ring, count, self.next)
            self.next += count

    def opened(self):
        """Return another handle, as of another process."""
        if self.kind == "fleet":
            return ShardedReplayBuffer(os.path.dirname(self.rings[0].path))
        return ReplayBuffer.open(self.rings[0].path)

    def close(self):
        if self.kind == "fleet":
            self.data.close()
        for ring in self.rings:
            ring.close()


KINDS = "plain", "parts", "fleet"


@pytest.fixture(params=KINDS)
def writer(request, tmp_path):
    made = Writer(tmp_path, request.param)
    yield made
    made.close()


def options(how):
    """The arguments of a view."""
    return {
        "clips": {},
        "window": {"window": {"step": Window([-1, 0, 1], pad="edge")}},
        "anchors": {"anchors": slice(2, -1)},
        "across": {"window": Sequences(5, across=True)},
        "where": {"where": "task = a"},
        "function": {"where": is_a, "window": {"step": Window([0, 1])}},
    }[how]


def is_a(data):
    return data["task"] == "a"


HOWS = "clips", "window", "anchors", "across", "where", "function"


def is_refused(writer, how):
    """A view over many rings has no sequences across episodes."""
    return writer.kind == "fleet" and how == "across"


def steps(view, ids):
    """Return the steps that the items hold, as one comparable value each."""
    return [tuple(np.ravel(item).tolist()) for item in view[list(ids)]["step"]]


# -- what moves --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
def test_a_live_view_moves_at_a_refresh_and_where_a_pass_begins(writer, how):
    if is_refused(writer, how):
        return
    data, asked = writer.data, options(how)
    view, frozen = data.view(**asked, live=True), data.view(**asked)
    assert view.is_live
    assert not frozen.is_live
    same = range(len(frozen))
    assert steps(view, same) == steps(frozen, same)
    writer.go_on(4)
    data.refresh()
    before = view.moment
    view.sample(4)
    assert len(view) == len(frozen)
    assert view.moment == before == frozen.moment
    assert view.refresh()
    assert not view.refresh()
    newest = data.view(**asked)
    assert view.moment == newest.moment != before
    assert steps(view, range(len(view))) == steps(newest, range(len(newest)))
    sampler = view.pass_sampler(shuffle=False)
    first = steps(newest, range(len(newest)))
    assert steps(view, sampler) == first
    writer.go_on(4)
    assert view.moment == newest.moment
    passing = iter(sampler)
    next(passing)
    assert view.moment == data.view(**asked).moment != newest.moment
    with pytest.raises(InputError, match="live=True"):
        frozen.refresh()
    with pytest.raises(InputError, match="live=True"):
        view.pinned().refresh()


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_moves_a_live_view_in_the_middle_of_a_call_leaves_nothing_behind(tmp_path, kind, monkeypatch):
    writer = Writer(tmp_path, kind)
    live = writer.data.view(where="task = a", live=True)
    writer.go_on(10)
    writer.data.refresh()
    now, real = writer.data.view(where="task = a"), view_module._among
    assert not np.array_equal(now.starts, live.starts)

    def among(*args):
        monkeypatch.undo()
        live.move_to(now)  # as another thread does
        return real(*args)

    monkeypatch.setattr(view_module, "_among", among)
    live.sample(1)
    assert live.num_valid_ends() == len(live) == len(now)
    wanted = set(now[list(range(len(now)))]["step"].ravel().tolist())
    assert set(live.sample(20 * len(now))["step"].ravel().tolist()) == wanted
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_is_of_one_moment_wherever_another_thread_moves_the_view(tmp_path, kind, monkeypatch):
    writer = Writer(tmp_path, kind)
    live = writer.data.view(where="task = a", live=True)
    ids = list(range(7 * len(live) // 8, len(live)))
    before, real = live[ids]["step"], BufferView._locate
    writer.go_on(2)
    writer.data.refresh()
    now = writer.data.view(where="task = a")

    def locate(self, asked):
        found = real(self, asked)
        monkeypatch.undo()
        live.move_to(now)  # as another thread does
        return found

    monkeypatch.setattr(BufferView, "_locate", locate)
    assert np.array_equal(live[ids]["step"], before)
    assert not np.array_equal(live[ids]["step"], before)
    writer.close()


def test_persistent_workers_follow_a_live_view(tmp_path):
    """Over a frozen one they drew the first minute's episodes until these were evicted, and then anything."""
    writer = Writer(tmp_path, "plain")
    view = writer.data.view(window=Sequences(5, across=True), columns=["step"], live=True)
    loader = DataLoader(view, 16, sampler=view.pass_sampler(seed=1), num_workers=2, persistent_workers=True)
    for _ in range(3):
        found = [tuple(item.tolist()) for batch in loader for item in batch["step"]]
        assert sorted(found) == sorted(steps(view, range(len(view))))
        assert max(found)[-1] // 1000 == writer.next - 1
        writer.go_on(12)  # more than half of the ring
    assert view.num_redraws == 0
    end(loader)
    writer.close()


@pytest.mark.parametrize("kind", few(["plain", "parts", "fleet"], 2))
def test_a_worker_redraws_from_what_a_live_view_selects_now(tmp_path, kind):
    """Its own copy is of the moment at which it began, of which nothing may be left."""
    writer = Writer(tmp_path, kind)
    view = writer.data.view(where="task = a", window={"step": Window([0, 1])}, live=True)
    loader = DataLoader(view, 8, sampler=view.pass_sampler(seed=1), num_workers=1, persistent_workers=True)
    assert sum(len(batch["step"]) for batch in loader) == len(view)
    writer.go_on(60)
    count = 0
    for number, batch in enumerate(loader):
        if number == 0:
            writer.go_on(60)
        found = batch["step"].numpy()
        assert (found // 1000 % 2 == 0).all()
        assert (np.diff(found, axis=1) == 1).all()
        count += len(found)
        if number > 8:
            assert found.min() // 1000 >= 120
    assert count == len(view)
    end(loader)
    writer.close()


@pytest.mark.parametrize("join", [lambda view: view, lambda view: ConcatDataset([view])], ids=["view", "concat"])
@pytest.mark.parametrize("kind", ["plain", "fleet"])
def test_ids_mean_the_same_in_a_worker_that_redrew(tmp_path, kind, join):
    """Half of the view is gone: what comes in place of one item is newer, the others stay what they were."""
    writer = Writer(tmp_path, kind)
    view = writer.data.view(live=True)
    ids = [len(view) - 1]
    loader = DataLoader(join(view), 1, sampler=ids, num_workers=1, persistent_workers=True)
    (last,) = [batch["step"].tolist() for batch in loader]
    before = writer.next
    writer.go_on(16)
    ids[:] = [0, len(view) - 1, 1, len(view) - 1]
    found = [batch["step"].tolist() for batch in loader]
    assert found[1] == found[3] == last
    assert max(np.ravel(found)) // 1000 >= before or kind == "fleet"
    end(loader)
    writer.close()


JOINS = {
    "view": lambda view: view,
    "concat": lambda view: ConcatDataset([view]),
    "merge": lambda view: MergeDataset([view]),
    "goals": lambda view: GoalDataset(view, goal_keys={"step": "goal"}, seed=0),
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("kind", few(["plain", "parts", "fleet"], 2))
def test_a_persistent_worker_refuses_ids_of_a_view_that_moved(tmp_path, kind, join):
    """Its copy is of the moment at which it began: the ids named other items there, in silence."""
    writer = Writer(tmp_path, kind)
    view = writer.data.view(live=True)
    joined, ids = JOINS[join](view), [150, 151, 170]
    want = [joined[one]["step"].tolist() for one in ids]
    asked = {"sampler": ids, "num_workers": 1}
    lasting = DataLoader(joined, 1, **asked, persistent_workers=True)
    assert [batch["step"][0].tolist() for batch in lasting] == want
    writer.go_on(2)
    assert [batch["step"][0].tolist() for batch in lasting] == want  # it did not move
    own = iter(DataLoader(joined, 1, **asked, prefetch_factor=1))
    found = [next(own)]
    assert view.refresh()
    found += list(own)  # of workers that end with the pass, of whose moment the ids are
    assert [batch["step"][0].tolist() for batch in found] == want
    with pytest.raises(StaleCopyError, match="pass_sampler"):
        list(lasting)
    end(lasting)
    writer.close()


class Asked:
    """What a worker says of a view."""

    def __init__(self, view, ask):
        self.view, self.ask = view, ask

    def __len__(self):
        return 1

    def __getitem__(self, _):
        return self.ask(self.view)


ASKED = {
    "numbers": lambda view: view.locate(view.positions(np.arange(3)))[0].tolist(),
    "endings": lambda view: view.ended.tolist(),
    "moment": lambda view: view.moment["rings"],
}


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize("kind", few(["plain", "fleet", "parts"], 2))
def test_a_persistent_worker_says_nothing_of_a_moment_that_is_over(tmp_path, kind, ask):
    writer = Writer(tmp_path, kind)
    view = writer.data.view(live=True)
    lasting = DataLoader(Asked(view, ASKED[ask]), None, num_workers=1, persistent_workers=True)
    assert list(lasting) == [ASKED[ask](view)]
    writer.go_on(2)
    assert view.refresh()
    with pytest.raises(StaleCopyError, match="pass_sampler"):
        list(lasting)
    end(lasting)
    writer.close()


def test_a_selection_may_begin_before_the_first_episode_and_see_the_ring_cleared(tmp_path):
    buf = ReplayBuffer(100, path=tmp_path / "ring")
    view = buf.view(where="task = a", live=True)
    assert len(view.lengths) == 0
    assert list(view.pass_sampler()) == []
    for again in range(2):
        fill(buf, 4, again)
        assert view.refresh()
        assert len(view.lengths) == 2
        buf.clear()
        assert view.refresh()
        assert len(view.lengths) == 0
    with pytest.raises(InputError, match="character 7"):
        buf.view(where="task >")
    buf.close()


def test_a_live_view_has_passes_with_functions_that_do_not_travel(tmp_path):
    writer = Writer(tmp_path, "plain")
    window = {"step": Window([0]), "half": lambda batch: batch["step"] / 2}
    view = writer.data.view(where=lambda data: data["task"] == "a", window=window, live=True)
    loader = DataLoader(view, 16, sampler=view.pass_sampler(), num_workers=1, multiprocessing_context="fork")
    for _ in range(2):
        batches = list(loader)
        assert sum(len(batch["half"]) for batch in batches) == len(view)
        writer.go_on(4)
    assert len(view.pinned()) == len(view)
    writer.close()


def test_an_open_episode_joins_a_selection_when_it_ends(tmp_path):
    buf = ReplayBuffer(400, path=tmp_path / "ring")
    fill(buf, 4, 0)
    recording = buf.begin_episode(commit_every=4)
    for at in range(9):
        recording.append({name: v[at] for name, v in episode(7, 9).items()})
    every, long = buf.view(live=True), buf.view(where="length > 3", live=True)
    chosen = buf.view(where=lambda data: data["task"] in (None, "b"), live=True)
    for view, count in ((every, 5), (long, 4), (chosen, 2)):
        assert len(view.lengths) == count
    recording.finish(episode_data={"task": "b"})
    for view, count in ((every, 5), (long, 5), (chosen, 3)):
        view.refresh()
        assert len(view.lengths) == count
    buf.close()


def test_marks_are_read_where_a_pass_begins(tmp_path):
    buf = ReplayBuffer(400, path=tmp_path / "ring")
    fill(buf, 4, 0)
    view = buf.view(where="not flags contains bad", live=True)
    frozen = buf.view(where="not flags contains bad")
    sampler = view.pass_sampler()
    assert {step[0] // 1000 for step in steps(view, sampler)} == {0, 1, 2, 3}
    Marks(buf).set(int(view.starts[2]), flags=["bad"])
    assert len(view.lengths) == 4
    assert {step[0] // 1000 for step in steps(view, sampler)} == {0, 1, 3}
    assert len(frozen.lengths) == 4
    buf.close()


def test_an_index_of_a_live_view_is_refused_in_a_worker(tmp_path):
    """The numbers of its episodes are those of the process that owns the loader."""
    writer = Writer(tmp_path, "plain")
    view = writer.data.view(window={"at": Index(), "step": Window([0])}, live=True)
    view.refresh()
    assert view[0]["at_episode"] == 0
    writer.go_on(4)
    batches = list(DataLoader(view, 16, sampler=view.pass_sampler()))
    numbers = np.concatenate([batch["at_episode"] for batch in batches])
    assert set(numbers.tolist()) == set(range(len(view.lengths)))
    with pytest.raises(InputError, match="num_workers=0"):
        list(DataLoader(view, 16, sampler=view.pass_sampler(), num_workers=1))
    writer.close()


def test_a_live_view_in_a_spawned_process_needs_a_condition_that_travels(tmp_path):
    writer = Writer(tmp_path, "plain")
    for where in ("task = a", is_a):
        view = writer.data.view(where=where, live=True)
        other = pickle.loads(pickle.dumps(view))
        writer.go_on(2)
        assert other.refresh()
        assert view.refresh()
        assert other.moment == view.moment
        other.engine.close()
    with pytest.raises(InputError, match="where"):
        pickle.dumps(writer.data.view(where=lambda data: True, live=True))
    writer.close()


# -- moments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("gone", few(["some", "nothing", "all"]))
def test_a_moment_has_the_length_and_ids_in_any_process(writer, how, gone):
    if is_refused(writer, how):
        return
    asked = options(how)
    view = writer.data.view(**asked)
    view = view.take([3, 0, 5]) if how == "clips" else view
    every = np.arange(len(view))
    positions, moment = view.positions(every), json.dumps(view.moment)
    writer.go_on({"nothing": 0, "some": 6, "all": 60}[gone])
    own = {name: value for name, value in asked.items() if name != "where"}
    with writer.opened() as other:
        again = other.view(**own, at=json.loads(moment))
        assert len(again) == len(every)
        assert np.array_equal(again.positions(every), positions)
        assert np.array_equal(again.lengths, view.lengths)
        assert json.dumps(again.moment) == moment
        if gone == "nothing":
            assert steps(again, every) == steps(view, every)
    other.close()


def test_a_moment_is_small(tmp_path):
    buf = ReplayBuffer(200_000, path=tmp_path / "ring")
    buf.write_episodes({"step": np.zeros(8 + number % 90)} for number in range(3000))
    assert len(json.dumps(buf.view().moment)) < 3 * 3000
    buf.close()


def test_wrong_moments_are_refused(tmp_path):
    writer, other = Writer(tmp_path / "a", "parts"), ReplayBuffer(100, path=tmp_path / "b")
    fill(other, 2, 0)
    buf = writer.data
    moment = buf.view().moment
    with pytest.raises(InputError, match="another buffer"):
        other.view(at=moment)
    with pytest.raises(InputError, match=r"at=.*where="):
        buf.view(at=moment, where="task = a")
    with pytest.raises(InputError, match=r"at=.*live="):
        buf.view(at=moment, live=True)
    (ring,) = moment["rings"]
    wrong = [{**ring, "starts": "b:%%"}, {**ring, "lengths": ring["starts"]}]
    wrong += [{name: value for name, value in ring.items() if name != gone} for gone in ring]
    wrong += [{**ring, name: "b:eJwDAAAAAAE="} for name in ring if name not in ("uuid", "is_part")]
    wrong += [{**ring, "starts": ring["starts"][:-8] + "AAAA"}, {**ring, "uuid": "x"}]
    wrong = [{"rings": [one]} for one in wrong]
    wrong += [3, {}, ring, {"rings": []}, {"rings": [ring, ring]}, {**moment, "home": "b:%%"}]
    for one in wrong:
        with pytest.raises(InputError):
            buf.view(at=one)
    other.close()
    writer.close()


def test_wrong_moments_of_many_rings_are_refused(tmp_path):
    writer = Writer(tmp_path, "fleet")
    selected = writer.data.view(where="task = a")
    for view in (writer.data.view(), selected.take(range(len(selected.lengths) - 1, 0, -2))):
        moment, rings = view.moment, view.moment["rings"]
        home, local = unpack(moment, ("home", "local"), "test").values()
        again = writer.data.view(at=moment)
        assert np.array_equal(again.starts, view.starts)
        assert again.num_valid_ends() == view.num_valid_ends() == len(view)
        wrong = [{**moment, **pack({"home": at})} for at in (home - 1, home + 1, home[:-1], home * 0)]
        wrong += [{**moment, **pack({"local": at})} for at in (local - 1, local + 1, local[:-1], local * 0)]
        wrong += [{**moment, **pack({"home": home[:-1], "local": local[:-1]})}]
        wrong += [{**moment, "rings": [rings[0], *rings[:2]]}, {**moment, "rings": rings[:2]}]
        for one in wrong:
            with pytest.raises(InputError, match="do not fit"):
                writer.data.view(at=one)
    (one,) = (ring := writer.rings[0]).view().moment["rings"]
    count = len(ring.lengths)
    twice = pack({"home": np.repeat([0, 1], count), "local": np.tile(np.arange(count), 2)})
    with pytest.raises(InputError, match="do not fit"):
        ring.view(at={"rings": [one, one], **twice})
    writer.close()


# -- passes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_a_pass_over_a_view_is_resumed_in_another_process(writer, how, live):
    """It could not: a view had no sampler, and windows come from views alone."""
    if is_refused(writer, how):
        return
    view = writer.data.view(**options(how), live=live)
    sampler = view.pass_sampler(seed=5)
    whole = list(sampler)
    assert steps(view, whole) != steps(view, range(len(view)))
    assert sorted(steps(view, whole)) == sorted(steps(view, range(len(view))))
    sampler = view.pass_sampler(seed=5)
    passing = iter(sampler)
    had = [next(passing) for _ in range(20)]
    state = json.loads(json.dumps(sampler.state_dict(taken=16)))
    writer.go_on(2)
    with writer.opened() as other:
        own = options(how)
        if live:
            again = other.view(**own, live=True)
        else:
            own.pop("where", None)
            again = other.view(**own, at=state["moment"])
        resumed = again.pass_sampler()
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert had[:16] + rest == whole
        assert again.moment == state["moment"]
        assert list(resumed) != whole
        assert (again.moment != state["moment"]) == live
    other.close()


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_divide_a_pass_and_another_number_of_them_goes_on(tmp_path, drop_last):
    writer = Writer(tmp_path, "plain")
    every = writer.data.view(window={"step": Window([0, 1])})
    views = (every.take(range(number)) for number in range(15, 0, -1))
    view = next(view for view in views if len(view) % 3 and len(view) % 4)
    count = len(view)

    def ranks(number, state=None):
        made = [view.pass_sampler(True, 3, rank, number, drop_last) for rank in range(number)]
        for one in made if state else ():
            one.load_state_dict(state)
        return made

    whole = list(view.pass_sampler(seed=3))
    three = ranks(3)
    assert len({len(one) for one in three}) == 1
    parts = [list(one) for one in three]
    share = count // 3 if drop_last else -(-count // 3)
    assert [len(part) for part in parts] == [share] * 3 == [len(one) for one in three]
    merged = [place for places in zip(*parts, strict=True) for place in places]
    padded = whole + whole[: 3 * share - count] if not drop_last else whole[: 3 * share]
    assert merged == padded
    states = [one.state_dict(taken=16) for one in three]
    assert states[0] == states[1] == states[2]
    assert states[0]["place"] == 48
    four = ranks(4, states[1])
    sizes = [len(one) for one in four]
    rest = [list(one) for one in four]
    assert [len(part) for part in rest] == sizes == sizes[:1] * 4
    merged = [place for places in zip(*rest, strict=True) for place in places]
    left = whole[48:]
    expected = left[: len(merged)] + whole[: max(0, len(merged) - len(left))]
    assert merged == expected
    assert abs(len(merged) - len(left)) < 4
    (one,) = ranks(1, four[2].state_dict(taken=4))
    assert list(one) == whole[64:]
    (one,) = ranks(1, three[0].state_dict())
    assert len(list(one)) == count
    assert one.state_dict()["pass"] == 1, "it had ended"
    writer.close()


def test_a_buffer_in_ram_and_rows_that_were_not_committed():
    """Positions mean the same in all copies of a buffer in RAM, which have names of their own."""
    buf = ReplayBuffer(230)
    fill(buf, 30, 0)
    view = buf.view(window={"step": Window([0, 1])}, live=True)
    sampler = view.pass_sampler(seed=1)
    passing = iter(sampler)
    had, state = [next(passing) for _ in range(8)], sampler.state_dict()
    copy = pickle.loads(pickle.dumps(buf))
    again = copy.view(window={"step": Window([0, 1])}, live=True)
    resumed = again.pass_sampler()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert had + rest == list(buf.view(window={"step": Window([0, 1])}).pass_sampler(seed=1))
    assert steps(again, rest) == steps(view, rest)
    fill(buf, 2, 30)
    assert max(steps(view, list(sampler)))[0] // 1000 == 31


def test_passes_over_transitions_are_divided_and_resumed(tmp_path):
    ring = TransitionReplayBuffer(100, (1,), device=None, path=tmp_path / "fleet" / "0")
    for t in range(130):
        ring.add(np.full(1, t), 0, 0.0, np.full(1, t + 1), t % 10 == 9)
    ring.flush()
    fleet = ShardedReplayBuffer(tmp_path / "fleet")
    for data in (ring, fleet):
        whole = list(data.pass_sampler(seed=2))
        assert sorted(data[whole]["observations"].ravel().tolist()) == list(range(30, 130))
        ranks = [data.pass_sampler(rank=rank, num_ranks=3, drop_last=True) for rank in range(3)]
        first = data.pass_sampler(seed=2, num_ranks=3, drop_last=True)
        state = first.next_pass()
        for one in ranks:
            one.load_state_dict(json.loads(json.dumps(state)))
        passes = [list(one) for one in ranks]
        merged = [place for places in zip(*passes, strict=True) for place in places]
        assert merged == whole[:99]
        (one,) = [data.pass_sampler()]
        one.load_state_dict(json.loads(json.dumps(ranks[0].state_dict(taken=20))))
        assert list(one) == whole[60:]
    fleet.close()
    ring.close()


def test_ranks_take_the_moment_of_one(tmp_path):
    """Each would count at its own moment, and one of them wait for ever."""
    writer = Writer(tmp_path, "plain")
    handles = [writer.data, writer.opened()]
    views = [handle.view(where="task = a", live=True) for handle in handles]
    samplers = [view.pass_sampler(True, 1, rank, 2) for rank, view in enumerate(views)]
    for data in (views[0], writer.data):
        with pytest.raises(RoleError, match="next_pass"):
            next(iter(data.pass_sampler(num_ranks=2)))
    orders = []
    for _ in range(3):
        state = samplers[0].next_pass()
        writer.go_on(3)
        views[1].refresh()
        for one in samplers:
            one.load_state_dict(json.loads(json.dumps(state)))
        passes = [list(one) for one in samplers]
        assert len(passes[0]) == len(passes[1]) == len(samplers[1])
        assert views[0].moment == views[1].moment == state["moment"]
        assert len({*passes[0], *passes[1]}) == state["count"] == len(views[0])
        orders.append(passes)
    assert [one.state_dict()["pass"] for one in samplers] == [2, 2]
    handles[1].close()
    writer.close()


def test_a_wrong_state_is_refused_and_nothing_changes(tmp_path):
    writer, other = Writer(tmp_path / "a", "plain"), Writer(tmp_path / "b", "plain")
    view = writer.data.view(live=True)
    sampler = view.pass_sampler(seed=2)
    passing = iter(sampler)
    had = [next(passing) for _ in range(5)]
    state, before = sampler.state_dict(), view.moment
    foreign = other.data.view().pass_sampler()
    next(iter(foreign))
    wrong = [None, {}, foreign.state_dict(), {**state, "count": 3}, {**state, "place": 10_000}]
    wrong += [{**state, name: "x"} for name in ("seed", "pass", "count", "place", "moment")]
    for one in wrong:
        with pytest.raises(InputError):
            sampler.load_state_dict(one)
    other_window = writer.data.view(anchors=slice(1, None), live=True).pass_sampler()
    with pytest.raises(InputError, match="same window"):
        other_window.load_state_dict(state)
    frozen = writer.data.view()
    writer.go_on(2)
    frozen_later = writer.data.view().pass_sampler()
    with pytest.raises(InputError, match=r"at=.*live=True"):
        frozen_later.load_state_dict(state)
    frozen.pass_sampler().load_state_dict(state)
    assert view.moment == before
    assert sampler.state_dict() == state
    assert had + list(passing) == list(frozen.pass_sampler(seed=2))
    for arguments in (
        {"rank": 2},
        {"num_ranks": 0},
        {"rank": -1},
        {"seed": 1.5},
        {"rank": 2, "num_ranks": 2},
    ):
        with pytest.raises(InputError, match="rank|seed"):
            view.pass_sampler(**arguments)
    other.close()
    writer.close()


def test_a_pass_goes_on_with_its_own_side_of_a_split(tmp_path):
    writer = Writer(tmp_path, "plain")
    train, validation = writer.data.view(live=True).split(0.5)
    sampler, other = train.pass_sampler(), validation.pass_sampler()
    next(iter(sampler))
    other.next_pass()
    for state in (other.state_dict(), writer.data.pass_sampler().next_pass()):
        with pytest.raises(InputError, match="side of a split"):
            sampler.load_state_dict(state)
    train.pass_sampler().load_state_dict(sampler.state_dict())
    writer.close()


def test_a_source_of_grain_keeps_its_length(tmp_path):
    from ringmap.exits.grain_source import source

    rings = [ReplayBuffer(2000, path=tmp_path / str(number)) for number in range(2)]
    for ring in rings:
        fill(ring, 4, 0)
    fleet = ShardedReplayBuffer(tmp_path)
    for data in (fleet, rings[0], fleet.view(live=True), rings[0].view(live=True)):
        clips = source(data)
        count, last = len(clips), clips[len(clips) - 1]["step"].tolist()
        fill(rings[0], 2, 4)
        data.refresh()
        assert len(clips) == count < len(data) == len(source(data))
        assert clips[count - 1]["step"].tolist() == last
    for data in (fleet, *rings):
        data.close()
