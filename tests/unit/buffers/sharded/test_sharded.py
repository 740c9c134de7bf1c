"""Many rings read as one, compared with a plain model: a dict of episodes for each ring."""

import pickle
import shutil
import threading

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap import Marks, ReplayBuffer, TransitionReplayBuffer, Zarr
from ringmap.buffers import sampled
from ringmap.buffers.rings import apart
from ringmap.data import Index, NStep, Sequences, ShardedReplayBuffer, Window
from ringmap.errors import (
    ClipIndexError,
    InputError,
    NoClipsError,
    ReadOnlyError,
)
from ringmap.samplers import (
    BaseSampler,
    EpisodeSampler,
    EpochSampler,
    MixtureSampler,
    PrioritizedSampler,
    RecencySampler,
    UniformSampler,
)
from tests.unit.buffers.steps import clip, prove, same


def open_all(fleet, **options):
    return ShardedReplayBuffer(fleet.folder, **{"history_len": 3, "seed": 0, "wait_s": 0, **options})


# -- what is stored --------------------------------------------------------------------------------


@pytest.mark.usefixtures("copies")
def test_ids_name_the_clips_of_all_rings_in_the_order_asked_for(three):
    buf = open_all(three)
    expected = list(buf.clip_indices)
    rng = np.random.default_rng(1)
    ids = rng.permutation(len(buf))
    batch = buf[ids]
    assert prove(batch, three.lengths, 3) == [expected[i] for i in ids.tolist()]
    for one, i in zip(buf.__getitems__(ids[:5].tolist()), ids[:5].tolist(), strict=True):
        same(one, clip(*expected[i], 3))
    same(buf[-1], clip(*expected[-1], 3))
    with pytest.raises(ClipIndexError):
        buf[len(buf)]


def test_ids_of_a_batch_find_the_same_clips_again(three):
    buf = open_all(three)
    batch = buf.sample(40)
    numbers, positions = apart(batch.ids)
    assert set(numbers.tolist()) == {0, 1, 2}
    for which in range(40):
        ring = ReplayBuffer.open(three.folder / "abc"[numbers[which]], history_len=3)
        start = int(positions[which])
        assert ring.engine.read(np.array([start]), ring.cut)["step"][0, 0] == batch["step"][which, 0]


@pytest.mark.slow
def test_a_draw_is_uniform_over_all_clips(three):
    buf = open_all(three)
    found = prove(buf.sample(20_000), three.lengths, 3)
    seen, counts = np.unique(np.array(found), axis=0, return_counts=True)
    assert {tuple(pair) for pair in seen.tolist()} == three.clips(3)
    expected = 20_000 / len(three.clips(3))
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi < len(counts) + 6 * np.sqrt(2 * len(counts))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [("equal", [1, 1, 1]), ({"a": 3, "c": 1}, [3, 0, 1])],
)
def test_weights(three, weights, shares):
    buf = open_all(three, weights=weights)
    batch = buf.sample(6000)
    prove(batch, three.lengths, 3)
    counts = np.bincount(apart(batch.ids)[0], minlength=3)
    np.testing.assert_allclose(counts / 6000, np.array(shares) / sum(shares), atol=0.03)
    assert len(buf) == len(three.clips(3))  # ids know no weights


def test_ids_of_evicted_clips_are_redrawn(three):
    buf = open_all(three)
    ids = np.arange(len(buf))
    for _ in range(12):
        three.write("a", 40)
    batch = buf[ids]
    found = prove(batch, three.lengths, 3)
    assert len(found) == len(ids)
    assert buf.num_redraws == 10 - 2 + 11 - 2  # all clips of ring a


@pytest.mark.usefixtures("copies")
def test_out_is_filled(three):
    buf = open_all(three)
    out = dict(buf.sample(16))
    batch = buf.sample(16, out=out)
    assert all(batch[name] is out[name] for name in out)
    prove(batch, three.lengths, 3)
    with pytest.raises(InputError, match="C-contiguous"):
        buf.sample(8, out=out)


@pytest.mark.usefixtures("copies")
def test_frameskip(three):
    buf = open_all(three, history_len=2, frameskip=3)
    prove(buf.sample(200), three.lengths, 2, 3)
    with pytest.raises(NoClipsError, match="longest stored episode"):
        buf.sample(2, history_len=20)


@pytest.mark.parametrize("window", [None, {"step": Window((-1, 0), pad=True)}, {"sum": NStep(3, of="step")}])
def test_a_batch_without_clips_has_the_columns_of_a_single_ring(fleet, window):
    fleet.ring("a", reward_at="same")  # it has no columns yet
    fleet.ring("b", reward_at="same")
    buf = open_all(fleet)
    assert buf[[]] == {}
    fleet.write("b", 20)
    buf.refresh()
    one = ReplayBuffer.open(fleet.folder / "b", history_len=3)
    if window:
        buf, one = buf.view(window), one.view(window)
    assert one[[]]
    same(buf[[]], one[[]])


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("storage", ["memmap", Zarr("lz4", 4)])
def test_rows_of_any_size_come_to_their_places(fleet, storage):
    """From all rings at once, or small rows twice and large ones clip by clip, very large batches by several threads:
    the same clips."""
    rng = np.random.default_rng(0)
    for number in range(3):
        ring = fleet.ring(f"{number}", 100 + number, storage=storage)
        for ep in range(3):
            where = np.stack([np.full(20, number), np.full(20, ep), np.arange(20)], axis=1)
            big = np.repeat(where[:, None], 4000, axis=1).astype(np.int32)
            ring.write_episode({"where": where, "big": big, "noise": rng.normal(size=(20, 4))})
    for threads in (1, 3):
        buf = open_all(fleet, threads=threads)
        batch = buf[rng.integers(0, len(buf), 60)]
        assert (batch["big"] == batch["where"][:, :, None]).all()
        numbers, positions = apart(batch.ids)
        np.testing.assert_array_equal(batch["where"][:, 0, 0], numbers)
        np.testing.assert_array_equal(batch["where"][:, 0, 1] * 20 + batch["where"][:, 0, 2], positions)


# -- windows ---------------------------------------------------------------------------------------


def test_windows(three):
    buf = open_all(three)
    window = {"step": Window(range(-2, 3), pad="edge"), "i": Index()}
    batch = buf.sample(300, window=window)
    steps, numbers = batch["i_step"], batch["episode"]
    lengths = np.array([three.lengths[e] for e in numbers.tolist()])
    wanted = steps[:, None] + np.arange(-2, 3)
    np.testing.assert_array_equal(batch["step"], np.clip(wanted, 0, lengths[:, None] - 1))
    np.testing.assert_array_equal(batch["i_episode"], numbers)  # over all rings
    assert set(numbers.tolist()) == set(three.lengths)
    doubled = buf.sample(50, window={"twice": lambda b: 2 * b["step"]})
    np.testing.assert_array_equal(doubled["twice"], 2 * doubled["step"])
    out = dict(buf.sample(30, window=window))
    again = buf.sample(30, window=window, out=out)
    assert all(again[name] is out[name] for name in out)


# -- samplers --------------------------------------------------------------------------------------


def in_any_order(sampler):
    sampler.any_order = True
    return sampler


@in_any_order
def beyond(step, buffer, size, history):
    return np.full(size, buffer.num_valid_ends(history))


def test_samplers(three):
    buf = open_all(three, sampler=UniformSampler(0))
    found = prove(buf.sample(3000), three.lengths, 3)
    assert {e for e, _ in found} == set(three.lengths)
    buf.sampler = in_any_order(lambda step, buffer, size, history: np.zeros(size, int))
    assert set(prove(buf.sample(5), three.lengths, 3)) == {(0, 0)}
    buf.sampler = beyond
    with pytest.raises(ClipIndexError, match="out of range"):
        buf.sample(5)
    buf.sampler = MixtureSampler([(PrioritizedSampler(), 1)])
    with pytest.raises(InputError, match="single ring"):
        buf.sample(5)


@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("of_view", [False, True])
def test_episodes_of_all_rings_are_equally_likely(three, has_parts, of_view):
    three.write("a", 2)  # too short
    if has_parts:
        three.write_in_parts("b", 45)
    buf = open_all(three, sampler=EpisodeSampler(0))
    found = prove((buf.view() if of_view else buf).sample(6000), three.lengths, 3)
    counts = np.array([sum(e == number for e, _ in found) for number, n in three.lengths.items() if n >= 3])
    assert len(counts) == len(three.lengths) - 1
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < len(counts) + 6 * np.sqrt(2 * len(counts))


@pytest.mark.parametrize("of_view", [False, True])
def test_an_epoch_is_that_of_all_rings(three, of_view):
    buf = open_all(three, sampler=EpochSampler(3))
    made, clips = buf.view() if of_view else buf, three.clips(3)
    first = prove(made.sample(len(clips) - 20), three.lengths, 3)
    state = pickle.loads(pickle.dumps(buf.state_dict()))
    three.write("a", 20)  # of the next epoch
    again = open_all(three, sampler=EpochSampler(3))
    again.load_state_dict(state)
    for each in (made, again.view().take(np.flatnonzero(again.view().lengths != 20)) if of_view else again):
        assert sorted([*first, *prove(each.sample(20), three.lengths, 3)]) == sorted(clips)
    assert buf.sampler.left == 0
    if not of_view:
        assert sorted(prove(buf.sample(len(three.clips(3))), three.lengths, 3)) == sorted(three.clips(3))


def test_an_epoch_goes_on_without_a_ring_that_left(three):
    buf = open_all(three, sampler=EpochSampler(3))
    first = prove(buf.sample(10), three.lengths, 3)
    three.writers.pop("b").close()
    shutil.rmtree(three.folder / "b")
    del three.model["b"]
    buf.refresh()
    left = {clip for clip in three.clips(3) if clip not in set(first)}
    found = []
    while buf.sampler.epoch == 0 and buf.sampler.left:
        found += prove(buf.sample(1), three.lengths, 3)
    assert set(found) >= left


@pytest.mark.parametrize("has_parts", [False, True])
def test_ids_that_are_of_no_clip_are_redrawn(three, has_parts):
    """A process that knows more may have drawn them."""
    if has_parts:
        three.write_in_parts("b", 45)
    buf = open_all(three)
    count = len(buf)
    batch = buf[[count + 7, 0, -count - 3, count - 1]]
    prove(batch, three.lengths, 3)
    assert batch.redrawn.tolist() == [True, False, True, False]
    assert len(buf.__getitems__([count, 1])) == 2


def test_no_lock_is_held_while_a_sampler_draws(three):
    """Other threads look, count and draw meanwhile; the draw is of the moment at which it began."""
    counts = []

    @in_any_order
    def sampler(step, buffer, size, history):
        count = buffer.num_valid_ends(history)
        three.write("a", 30)
        thread = threading.Thread(target=lambda: counts.append((buf.refresh(), len(buf))))
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        assert buffer.num_valid_ends(history) == count
        assert len(three.clips(3)) == counts[-1][1] != count
        buf.load_episode(0)
        return np.random.default_rng(step).integers(0, count, size)

    buf = open_all(three, sampler=sampler)
    for made in (buf, buf.view()):
        before = three.clips(3)
        assert set(prove(made.sample(200), three.lengths, 3)) <= before


def test_a_sampler_by_order_draws_from_one_ring_until_another_joins(fleet):
    fleet.ring("a")
    fleet.write("a", 20)
    buf = open_all(fleet, sampler=Newest())
    assert set(prove(buf.sample(5), fleet.lengths, 3)) == {(0, 17)}
    fleet.ring("b")
    fleet.write("b", 20)
    buf.refresh()
    with pytest.raises(InputError, match="ids ring by ring.* set any_order = True"):
        buf.sample(5)


class Newest(BaseSampler):
    def __call__(self, step, buffer, size, history):
        return np.full(size, buffer.num_valid_ends(history) - 1)


def test_samplers_that_go_by_the_order_of_ids_are_refused(three):
    """Ids run ring by ring: the highest are those of the ring that joined last."""
    buf = open_all(three)
    plain = [Newest(), lambda *_: np.zeros(1, int)]
    for sampler in [*plain, MixtureSampler([(UniformSampler(), 1), (plain[1], 1)])]:
        with pytest.raises(InputError, match="ids ring by ring.* set any_order = True"):
            buf.sampler = sampler
        with pytest.raises(InputError, match="ids ring by ring.* set any_order = True"):
            open_all(three, sampler=sampler)
    assert set(prove(buf.sample(2000), three.lengths, 3)) == three.clips(3)


@pytest.mark.parametrize("kind", [UniformSampler, PrioritizedSampler])
def test_weights_and_a_sampler_are_refused(three, kind):
    weights = {"a": 1.0}
    with pytest.raises(InputError, match=f"weights={weights} contradict a {kind.__name__}"):
        open_all(three, weights=weights, sampler=kind())
    buf = open_all(three, weights=weights)
    with pytest.raises(InputError, match="leave one of them out"):
        buf.sampler = kind()
    assert {e for e, _ in prove(buf.sample(300), three.lengths, 3)} == set(three.model["a"])


# Time goes on from episode to episode, over the rings in turn; each has episodes of other lengths.
TURNS = "abcabcbcaacb" * 4


@pytest.fixture
def turns(fleet):
    """Rings that were written in turn: the highest numbers of episodes are the newest. One has an episode in parts."""
    for name in "abc":
        fleet.ring(name, 1000)
    for at, name in enumerate(TURNS):
        fleet.write(name, 4 + at % 3)
    fleet.write_in_parts("b", 25)
    fleet.write("a", 9)
    return fleet


@pytest.mark.parametrize("of", ["buffer", "view", "windows", "mixture"])
def test_recency_goes_by_the_time_of_commits(turns, of):
    clips = sorted(turns.clips(3))  # by time
    sampler = RecencySampler(window=60, rng=0)
    if of == "mixture":
        sampler = MixtureSampler([(UniformSampler(0), 1), (sampler, 1)], rng=0)
    buf = open_all(turns, sampler=sampler)
    window = {"episode": Window((0, 1, 2)), "step": Window((0, 1, 2))}
    drawn = buf.view(window) if of == "view" else buf
    batch = drawn.sample(4000, **({"window": window} if of == "windows" else {}))
    found = [(int(e), int(s)) for e, s in zip(batch["episode"][:, 0], batch["step"][:, 0], strict=True)]
    if of != "mixture":
        assert set(found) == set(clips[-60:])
        return
    newest = sum(clip in set(clips[-60:]) for clip in found) / 4000
    assert set(found) == set(clips)
    assert abs(newest - (0.5 + 0.5 * 60 / len(clips))) < 0.05


def test_recency_by_a_half_life(turns):
    """Each clip is drawn as often as the formula says of its age among all rings."""
    clips = sorted(turns.clips(3))
    buf = open_all(turns, sampler=RecencySampler(half_life=30, rng=0))
    age = {clip: len(clips) - 1 - at for at, clip in enumerate(clips)}
    ages = np.array([age[clip] for clip in prove(buf.sample(20_000), turns.lengths, 3)])
    for most in (10, 30, 60, 150):
        expected = (1 - 0.5 ** (most / 30)) / (1 - 0.5 ** (len(clips) / 30))
        assert abs((ages < most).mean() - expected) < 0.02
    turns.write("c", 50)  # a draw after a commit goes by it
    newest = buf.sample(2000)["episode"][:, 0] == turns.next - 1
    assert abs(newest.mean() - (1 - 0.5 ** (48 / 30))) < 0.04


@pytest.mark.parametrize("how", ["view", "split", "windows"])
def test_a_view_is_drawn_from_through_the_sampler(three, how):
    """Its sampler counts the clips of the view alone, ring by ring, as they are numbered there, while they are
    stored."""
    newest = []

    @in_any_order
    def last(step, buffer, size, history):
        newest.append(buffer.num_valid_ends(history))
        return np.full(size, newest[-1] - 1)

    buf = open_all(three, sampler=last)
    view = buf.view({"step": Window((0, 1, 2))}) if how == "windows" else buf.view()
    view = buf.split(0.6, seed=1)[1] if how == "split" else view.take([1, 2, 6, 0])
    model = three.lengths
    ids = [number for number in model if number in view[list(range(len(view)))]["episode"]]
    for _ in range(2):
        drawn = view.sample(5)
        of = max(ids) if how == "split" else 6
        assert (drawn["episode"] == of).all()
        assert (drawn["step"][:, -1] == model[of] - 1).all()
        assert newest[-1] == sum(model[number] - 2 for number in ids)
        three.write("a", 190)  # evicts the first two
        buf.refresh()
        ids = [number for number in ids if number not in (0, 1)]
        assert view.num_valid_ends() == sum(model[number] - 2 for number in ids)
    buf.sampler = beyond
    with pytest.raises(ClipIndexError, match="out of range"):
        view.sample(5)
    buf.sampler = EpisodeSampler()
    assert set(view.sample(500)["episode"].ravel().tolist()) == set(ids)


# -- what is not for many rings ---------------------------------------------------------------------

REFUSED = {
    "rank priorities": (lambda b: setattr(b, "sampler", PrioritizedSampler(kind="rank")), "can't span rings"),
    "across in a view": (
        lambda b: b.view(window=Sequences(4, across=True)),
        "across=True runs on into the next episode of its ring",
    ),
    "across in a split": (
        lambda b: b.split(window=Sequences(4, across=True)),
        "across=True runs on into the next episode of its ring",
    ),
    "a caller's function": (lambda b: setattr(b, "sampler", Newest()), "set any_order = True"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_many_rings_refuse(three, what):
    call, message = REFUSED[what]
    three.write_in_parts("b", 30)
    with pytest.raises(InputError, match=message):
        call(open_all(three))


def test_an_epoch_of_transitions(tmp_path):
    for number in range(2):
        with TransitionReplayBuffer(20, (), (), None, path=tmp_path / f"{number}") as ring:
            for step in range(30):  # the newest 20 count
                ring.add(np.float32(100 * number + step), 1, 0.5, np.float32(0), True)
    with ShardedReplayBuffer(tmp_path, wait_s=0, sampler=EpochSampler()) as buf:
        for _ in range(2):
            found = np.concatenate([buf.sample(8)["observations"] for _ in range(5)])
            assert sorted(found.tolist()) == [*range(10, 30), *range(110, 130)]


def test_a_dump_names_an_episode_by_its_number_over_all_rings(fleet, monkeypatch):
    for name in "ab":
        fleet.ring(name)
        fleet.write(name, 9)
    fleet.write_in_parts("b", 60)
    buf = open_all(fleet)
    nbytes = sum(spec.row_nbytes for spec in buf.schema.columns)
    monkeypatch.setattr(sampled, "memory_left", lambda: 2 * nbytes * 40.0)
    with pytest.warns(UserWarning, match="episode 2 of 60 steps"):
        buf.dump(fleet.folder / "out.h5", progress=False)


WRITES = (
    "write_episode",
    "write_episodes",
    "write_joined",
    "begin_episode",
    "extend_from",
    "add",
    "extend",
    "clear",
)


@pytest.mark.parametrize("name", WRITES)
def test_what_writes_names_the_rings_to_open(three, name):
    buf = open_all(three)
    with pytest.raises(
        ReadOnlyError,
        match=rf"ShardedReplayBuffer\.{name}: .*ReplayBuffer\.open\(path, mode='r\+'\) of one of: .*/a, .*/c",
    ):
        getattr(buf, name)({})


def test_a_finding_names_its_ring(three):
    buf = open_all(three)
    path = next((three.folder / "b" / "columns").glob("*episode*"))
    with path.open("r+b") as file:
        file.seek(128 + 8)
        file.write(b"??")
    findings = buf.check()
    assert findings
    assert {finding.file for finding in findings} == {f"b/columns/{path.name}"}


# -- views and passes ------------------------------------------------------------------------------


def test_a_pass_yields_each_clip_once_and_can_be_resumed(three):
    buf = open_all(three)
    sampler = buf.pass_sampler(seed=2)
    every = list(sampler)
    assert sorted(prove(buf[every], three.lengths, 3)) == sorted(three.clips(3))
    sampler = buf.pass_sampler(seed=2)
    ids = iter(sampler)
    first = [next(ids) for _ in range(40)]
    state = sampler.state_dict(taken=40)
    fleet_clips = three.clips(3)
    three.write("b", 25)  # not of this pass
    three.ring("0-new")  # joins; sorts before the others after a restart
    three.write("0-new", 25)
    again = open_all(three)
    rest = again.pass_sampler()
    rest.load_state_dict(state)
    assert len(rest) == len(fleet_clips) - 40
    after = list(rest)
    seen = prove(buf[first], three.lengths, 3) + prove(again[after], three.lengths, 3)
    assert sorted(seen) == sorted(fleet_clips)


# -- copies ----------------------------------------------------------------------------------------


def test_a_pickle_holds_paths_and_numbers(three):
    buf = open_all(three)
    three.ring("0-first")  # its name sorts first, its number is the last
    three.write("0-first", 20)
    buf.refresh()
    data = pickle.dumps(buf)
    assert len(data) < 3000
    copy = pickle.loads(data)
    ids = list(range(len(buf)))
    same(copy[ids], buf[ids])
    assert apart(copy[ids].ids)[0].tolist() == apart(buf[ids].ids)[0].tolist()
    with pytest.raises(InputError, match="transform"):
        buf.transform = lambda clip: clip
        pickle.dumps(buf)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_read_the_rings_that_the_loader_knows(three, method):
    data = pytest.importorskip("torch.utils.data")
    buf = open_all(three)
    loader = data.DataLoader(
        buf,
        16,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
    )

    def passed():
        found = []
        for batch in loader:
            found += prove({n: v.numpy() for n, v in batch.items()}, three.lengths, 3)
        return sorted(found)

    assert passed() == sorted(three.clips(3))
    three.ring("0-new")  # joins while the workers live
    three.write("0-new", 33)
    three.write("b", 21)
    buf.refresh()
    assert passed() == sorted(three.clips(3))
    shutil.rmtree(three.folder / "c")
    assert len(passed()) == len(three.clips(3))  # those of c are redrawn once a worker notices


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "rings"}, "weights must be"),
        ({"weights": {"a": -1}}, "weights must be"),
        ({"weights": {}}, "weights must be"),
        ({"on_bad": "ignore"}, "on_bad must be"),
        ({"wait_s": -1}, "wait_s must"),
        ({"history_len": 0}, "history_len must be"),
        ({"reads": "mmap"}, "reads"),
    ],
)
def test_arguments(three, options, message):
    with pytest.raises(InputError, match=message):
        open_all(three, **options)


def test_paths(three):
    with pytest.raises(InputError, match="paths must be"):
        ShardedReplayBuffer(3)
    with pytest.raises(InputError, match="is one ring"):
        ShardedReplayBuffer(three.folder / "a", wait_s=0)
    with pytest.raises(NoClipsError, match=r"no ring below .*nothing after 0 s"):
        ShardedReplayBuffer(three.folder / "nothing", wait_s=0)
    by_glob = ShardedReplayBuffer(str(three.folder / "[ab]"), wait_s=0)
    by_list = ShardedReplayBuffer([three.folder / "a", str(three.folder / "b")], wait_s=0)
    for buf in (by_glob, by_list):
        assert [s.name for s in buf.shards] == [str(three.folder / "a"), str(three.folder / "b")]
        assert buf.num_episodes == 5


def test_rings_without_episodes(fleet):
    fleet.ring("a")
    buf = open_all(fleet)
    assert (len(buf), buf.column_names, buf.lengths.tolist()) == (0, [], [])
    with pytest.raises(NoClipsError, match="0 episodes"):
        buf.sample(2)
    fleet.ring("b")
    fleet.write("b", 20)
    buf.refresh()
    prove(buf.sample(10), fleet.lengths, 3)
    fleet.writers["b"].clear()
    with pytest.raises(NoClipsError):
        buf.sample(2)


def test_episodes_that_another_thread_sees_in_a_draw_bring_no_unwanted_one(fleet):
    """Their clips are no ids of that draw: others that meet the condition come instead."""

    class Meanwhile(EpisodeSampler):
        def __call__(self, step, buffer, batch_size, history_len):
            buffer.clip_windows(history_len)  # this draw sees what there is now
            for name in "ab":
                fleet.write(name, 10)
            thread = threading.Thread(target=buffer.refresh)
            thread.start()
            thread.join()
            return super().__call__(step, buffer, batch_size, history_len)

    for name in "ab":
        fleet.ring(name)
        for _ in range(4):
            fleet.write(name, 10)
        Marks(fleet.writers[name]).set(0, flags=["bad"])
    unwanted = {0, 4}
    sampler = Meanwhile(0, where="not flags contains bad")
    with ShardedReplayBuffer(fleet.folder, sampler=sampler, seed=0, wait_s=0) as buf:
        for _ in range(3):
            assert not unwanted & set(buf.sample(200)["episode"].ravel().tolist())


@pytest.mark.parametrize("has_some", [True, False])
def test_new_episodes_that_come_again_and_again_bring_no_id_that_is_none(three, monkeypatch, has_some):
    """In place of their clips come others of the draw, or any of the ring."""
    with ShardedReplayBuffer(three.folder, 3, sampler=EpisodeSampler(0), seed=0, wait_s=0) as buf:
        drawn = EpisodeSampler._drawn

        def newer(self, window, size):
            ids = np.full(size, window.count)
            ids[: len(ids) // 2 * has_some] = drawn(self, window, len(ids) // 2 * has_some)
            return ids

        monkeypatch.setattr(EpisodeSampler, "_drawn", newer)
        prove(buf.sample(100), three.lengths, 3)


@pytest.mark.usefixtures("workers_end_soon")
def test_a_worker_that_stays_reads_a_ring_that_joined_since(three):
    """Each clip of the next pass comes once, those of the first batch, too."""
    with ShardedReplayBuffer(three.folder, seed=0, wait_s=0) as buf:
        sampler = buf.pass_sampler(shuffle=False)
        loader = DataLoader(buf, 8, sampler=sampler, num_workers=1, persistent_workers=True)
        for name in ("d", "e"):
            found = [tuple(s) for b in loader for s in np.stack([b["episode"][:, 0], b["step"][:, 0]], 1).tolist()]
            assert sorted(found) == sorted(three.clips(1))
            three.ring(name)
            three.write(name, 10)
            buf.refresh()
