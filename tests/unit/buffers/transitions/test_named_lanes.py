"""Environments that are named, and added one by one, some at a time or out of turn: against a plain model, and what a
call costs."""

import itertools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmap import TransitionReplayBuffer
from ringmap.buffers.transitions import buffer as buffer_module
from ringmap.buffers.transitions import lanes
from ringmap.buffers.transitions import nstep as nstep_module
from ringmap.buffers.transitions.lanes import LaneEnds
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import InputError
from ringmap.storage.commit import group as group_module
from ringmap.storage.commit import store as store_module
from tests.faults.concurrency.test_interrupts import Interrupt
from tests.unit.buffers.transitions.reference import Reference, in_order, same
from tests.unit.buffers.transitions.test_episodes import expected, loaded
from tests.unit.buffers.transitions.test_episodes import same as same_episodes


class Named(Reference):
    """A list of transitions of environments with names."""

    def __init__(self, *args):
        super().__init__(*args)
        self.newest = {}

    def add_named(self, names, step):
        for number, (name, obs) in enumerate(zip(names, step[0], strict=True), len(self.steps)):
            before = self.newest.get(name)
            self.newest[name] = number
            if before is not None and self.steps[before]["next"].tobytes() == obs.tobytes():
                self.steps[before]["following"] = number
        self.append_each(*step)


class Envs:
    """Environments whose observations are numbers of their own; `size`: they are stacks."""

    def __init__(self, seed, count, size=None):
        self.rng, self.number, self.size = np.random.default_rng(seed), 0, size
        self.now = {name: self.start() for name in range(count)}

    def _frame(self):
        self.number += 1
        return np.full(2, self.number, np.float32)

    def start(self):
        frame = self._frame()
        return frame if self.size is None else np.stack([frame] * self.size)

    def step(self, names):
        obs = np.stack([self.now[name] for name in names])
        frames = np.stack([self._frame() for _ in names])
        after = frames if self.size is None else np.concatenate([obs[:, 1:], frames[:, None]], 1)
        rng, count = self.rng, len(names)
        dones, truncated = rng.random(count) < 0.1, rng.random(count) < 0.1
        for i, name in enumerate(names):
            reset = dones[i] or truncated[i] or rng.random() < 0.05
            self.now[name] = self.start() if reset else after[i]
        rewards = rng.normal(size=count).astype(np.float32)
        return obs, rng.integers(0, 5, count), rewards, after, dones, truncated


def add(buf, reference, step, names, named=True, single=False):
    obs, actions, rewards, after, dones, truncated = step
    if single:
        buf.add(
            obs[0], actions[0], float(rewards[0]), after[0], bool(dones[0]), truncated=bool(truncated[0]), lane=names[0]
        )
    else:
        options = {"lane": names} if named else {}
        buf.add(obs, actions, rewards, after, dones, truncated=truncated, **options)
    reference.add_named(names, step)


def compare(buf, reference):
    expected_batch = reference.batch()
    buf.refresh()
    assert len(buf) == len(expected_batch["rewards"])
    same(buf.sample(len(buf)), {n: v for n, v in expected_batch.items()})


def scheduled(draw, count, is_in_turn):
    """Return the names of each call of a round."""
    names = list(range(count))
    how = draw(st.sampled_from(["one by one", "all", "some"]))
    if not is_in_turn:
        names = draw(st.permutations(names))
    if how == "one by one":
        return [[name] for name in names]
    if how == "all":
        return [names]
    cut = draw(st.integers(1, count))
    left = draw(st.integers(0, 1)) if not is_in_turn else 0
    return [part for part in (names[:cut], names[cut + left :]) if part]


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_equal_a_plain_model(data):
    draw = data.draw
    n_step, capacity, count = draw(st.sampled_from([1, 2, 5])), draw(st.integers(8, 60)), draw(st.integers(1, 5))
    size = draw(st.sampled_from([None, None, 3]))
    is_in_turn = size is not None or draw(st.booleans())
    shape = (2,) if size is None else (size, 2)
    buf = TransitionReplayBuffer(
        capacity, shape, device=None, sampler=in_order, n_step=n_step, gamma=0.9, frame_stack=size
    )
    reference, envs = Named(capacity, n_step, 0.9), Envs(draw(st.integers(0, 99)), count, size)
    for _ in range(draw(st.integers(1, 4))):
        what = draw(st.sampled_from(["named", "named", "settle", "clear", "calls of all"]))
        if what == "settle":
            buf.flush()
        elif what == "clear":
            buf.clear()
            reference.clear()
            reference.newest.clear()
            envs.now = {name: envs.start() for name in envs.now}
        for _ in range(draw(st.integers(1, 12))):
            for names in [range(count)] if what == "calls of all" else scheduled(draw, count, is_in_turn):
                names = list(names)
                single = len(names) == 1 and draw(st.booleans())
                add(buf, reference, envs.step(names), names, what != "calls of all", single)
        if buf.n_step == 1:
            batch = reference.batch()
            batch.pop("discounts")
        compare(buf, reference)
        same_episodes(loaded(buf.episode_dataset()), expected(reference))


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("is_in_turn", [True, False])
def test_in_a_directory(is_in_turn, size, tmp_path):
    """A reader at every moment, groups of any size, and a writer that is opened again without names: the same."""
    if size and not is_in_turn:
        return
    rng, path = np.random.default_rng(0), tmp_path / "ring"
    shape = (2,) if size is None else (size, 2)
    options = {"device": None, "sampler": in_order, "n_step": 3, "gamma": 0.9}
    buf = TransitionReplayBuffer(100, shape, path=path, sync_every_s=0, frame_stack=size, **options)
    reader = TransitionReplayBuffer.open(path, **options)
    reference, envs = Named(100, 3, 0.9), Envs(0, 5, size)
    for turn in range(60):
        names = list(range(5)) if is_in_turn else rng.permutation(5)[: rng.integers(3, 6)].tolist()
        for name in names:
            add(buf, reference, envs.step([name]), [name], single=bool(rng.random() < 0.5))
            if rng.random() < 0.15:
                buf.flush()
                compare(reader, reference)
                compare(buf, reference)
        if turn in (20, 40):
            buf.close()
            buf = TransitionReplayBuffer.open(path, "r+", sync_every_s=0, **options)
    buf.flush()
    compare(reader, reference)
    same_episodes(loaded(reader.episode_dataset()), expected(reference))
    buf.save(tmp_path / "copy")
    with TransitionReplayBuffer.open(tmp_path / "copy", **options) as copy:
        compare(copy, reference)
    reader.close()
    buf.close()


@pytest.mark.parametrize("reads", ["map", "pread"])
def test_in_a_fleet(reads, tmp_path):
    """Rings side by side, and ring by ring: each transition is that of its own ring's model."""
    rng, expected_of = np.random.default_rng(0), {}
    for number in range(3):
        ring = TransitionReplayBuffer(100, (2,), path=tmp_path / f"rings/{number}", sync_every_s=0, device=None)
        reference, envs = Named(100, 3, 0.9), Envs(number, 4)
        envs.number = number * 10_000
        envs.now = {name: envs.start() for name in envs.now}
        for _ in range(50):
            names = rng.permutation(4)[: rng.integers(1, 5)].tolist()
            add(ring, reference, envs.step(names), names)
        ring.close()
        batch = reference.batch()
        for i, obs in enumerate(batch["observations"]):
            expected_of[float(obs[0])] = {name: values[i] for name, values in batch.items()}
    with ShardedReplayBuffer(tmp_path / "rings", n_step=3, gamma=0.9, seed=0, reads=reads) as fleet:
        for _ in range(5):
            batch = fleet.sample(64)
            mine = [expected_of[float(obs[0])] for obs in batch["observations"]]
            same(batch, {name: np.array([one[name] for one in mine]) for name in mine[0]})
    fleet.close()


def test_the_test_finds_rows_that_are_looked_for_nowhere(monkeypatch, tmp_path):
    """The control: a row that comes out of turn is not looked for, so that sums end before it."""
    monkeypatch.setattr(
        nstep_module.TransitionReader,
        "_further",
        lambda self, rows, at, stop, which: np.full(len(which), -1),
    )
    with pytest.raises(AssertionError):
        test_in_a_directory(False, None, tmp_path)


def test_the_test_finds_what_a_group_did_not_take_along(monkeypatch, tmp_path):
    """The control: a group does not know what the rows of earlier groups led to."""
    monkeypatch.setattr(LaneEnds, "earlier", lambda *_: {})
    with pytest.raises(AssertionError):  # rows are redrawn
        test_in_a_directory(True, None, tmp_path)


@pytest.mark.parametrize(
    ("lane", "words"),
    [
        ([0], "lane names 1 environments, but there are 2 rows"),
        ([0, 0], "names an environment twice"),
        ([0.5, 1], "named by an integer or text, got 0.5"),
        ([True, 1], "named by an integer or text"),
    ],
)
def test_wrong_names(lane, words):
    buf = TransitionReplayBuffer(50, (2,), device=None)
    with pytest.raises(InputError, match=words):
        buf.add(np.zeros((2, 2)), [0, 0], [0, 0], np.zeros((2, 2)), [0, 0], lane=lane)
    assert len(buf) == 0


def test_stacks_that_come_out_of_turn_are_refused():
    buf, envs = TransitionReplayBuffer(50, (3, 2), device=None, frame_stack=3), Envs(1, 2, 3)
    envs.rng = np.random.default_rng(5)
    for names in ([0], [1], [0], [1], [0]):
        obs, actions, rewards, after, *_ = envs.step(names)
        buf.add(obs, actions, rewards, after, [False], lane=names)
        envs.now[names[0]] = after[0]
    obs, actions, rewards, after, *_ = envs.step([0])
    with pytest.raises(InputError, match="environment 0 comes 1 rows after its last step, and 2 before"):
        buf.add(obs, actions, rewards, after, [False], lane=0)
    assert len(buf) == 5


def test_names_of_text_and_many_that_come_and_go():
    """Environments that are never seen again are forgotten, and cost nothing."""
    buf = TransitionReplayBuffer(10_000, (), device=None)
    for number in range(3000):
        buf.add(np.float32(number), 0, 0.0, np.float32(-number), False, lane=f"episode {number}")
    assert len(buf) == 3000
    batch = buf.sample(64)
    np.testing.assert_array_equal(batch["next_observations"], -batch["observations"])


def frames(work):
    """Return how many Python functions a piece of work calls: what it costs, whatever else the machine does."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
def test_eight_environments_one_by_one_cost_what_one_call_of_eight_does(tmp_path):
    def made(name):
        path = tmp_path / name
        return TransitionReplayBuffer(20_000, (8,), device=None, path=path, sync_every_s=0, seed=0)

    now = np.random.default_rng(0).normal(size=(2001, 8, 8)).astype(np.float32)
    one, eight, plain = made("one"), made("eight"), made("plain")

    def steps(buf, lanes):
        for t in range(2000):
            if lanes is None:
                buf.add(now[t], np.zeros(8, int), np.zeros(8), now[t + 1], np.zeros(8, bool))
            else:
                for lane in lanes:
                    buf.add(now[t, lane], 0, 0.0, now[t + 1, lane], False, lane=lane)

    def alone():
        flat = now.reshape(-1, 8)
        for t in range(16_000):
            plain.add(flat[t], 0, 0.0, flat[t + 1], False)

    named, single = frames(lambda: steps(one, range(8))), frames(alone)
    steps(eight, None)
    assert named < 1.25 * single, (named, single)  # 1.1 by the clock of a quiet machine
    one.flush()
    eight.flush()
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).rglob("*") if f.is_file()) for n in ("one", "eight")]
    assert sizes[0] < 1.02 * sizes[1] + 65_536
    draws = [frames(lambda buf=buf: [buf.sample(256) for _ in range(50)]) for buf in (one, eight)]
    assert draws[0] < 1.25 * draws[1], draws  # 1.03 by the clock of a quiet machine
    assert lanes.FURTHEST == 1024
    for buf in (one, eight, plain):
        buf.close()


STEPS = (np.zeros((3, 1)), np.zeros(3), np.zeros(3), np.zeros((3, 1)), np.zeros(3, np.bool_))
OTHERS = {
    "ragged": [[1], [1, 2], [3]],
    "bfloat16": torch.zeros(3, dtype=torch.bfloat16),
    "tensors": [torch.zeros(3, dtype=torch.bfloat16)] * 3,
    "structured": np.zeros(3, [("a", "i4")]),
    "void": np.zeros(3, "V1"),
    "texts": np.array(["False", "", "a"]),
    "fractions": [0.5, 1, 0],
    "missing": [None, True, False],
    "masked": np.ma.masked_equal([0, 1, 1], 1),
}
if hasattr(np.dtypes, "StringDType"):  # NumPy 2
    OTHERS["other strings"] = np.array(["0", "1", "0"]).astype("T")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("argument", ["lane", "fresh", "dones", "truncated"])
def test_what_names_or_flags_can_not_be(argument, name):
    buf = TransitionReplayBuffer(20, (1,), device=None)
    given = dict(zip(("observations", "actions", "rewards", "next_observations", "dones"), STEPS, strict=True))
    if argument == "lane" and name == "texts":
        buf.add(**given, lane=OTHERS[name])
        return
    with pytest.raises(InputError, match=argument.rstrip("s")):
        buf.add(**given | {argument: OTHERS[name]})
    assert len(buf) == 0
    buf.add(**given)


def test_names_and_flags_may_be_tensors():
    buf = TransitionReplayBuffer(20, (1,), device=None)
    buf.add(*STEPS, lane=torch.arange(3), fresh=torch.ones(3, requires_grad=True))
    buf.add(*STEPS, lane=np.arange(3), fresh=torch.tensor(True))
    assert len(buf) == 6


# -- interrupts --------------------------------------------------------------------------------

INTERRUPTED = [module.__file__ for module in (lanes, buffer_module, store_module, group_module)]


def wrong_after_interrupts(path, named, every=1):
    """Interrupt an `add` at every so many lines of it in turn; return after which a step leads to another one."""
    buf = TransitionReplayBuffer(60, (2,), device=None, obs_dtype=np.int64, path=path, seed=0, n_step=2, sync_every_s=0)
    times, wrong = np.zeros(3, np.int64), []

    def add(lanes):
        obs, after = (np.stack([lanes, times[lanes] + ahead], 1) for ahead in (0, 1))
        names = {"lane": lanes.tolist()} if named else {}
        buf.add(obs, np.zeros(len(lanes)), np.ones(len(lanes)), after, np.zeros(len(lanes), bool), **names)

    def go_on(turn):
        """Add a step of each environment; those that are named come one after the other, in another order each time."""
        for lanes in np.split(np.roll(np.arange(3), turn), 3) if named else [np.arange(3)]:
            add(lanes)
            times[lanes] += 1

    for at in itertools.count(1, every):
        go_on(at)
        lanes = np.arange(3)[::-1] if named else np.arange(3)
        is_struck = Interrupt(at, INTERRUPTED).strikes_in(lambda lanes=lanes: add(lanes))
        times += 1  # the environments went on, whether the call was stored or not
        go_on(at + 1)
        go_on(at + 2)
        buf.refresh()
        batch = buf[list(range(len(buf)))]
        stored, led = batch["observations"], batch["next_observations"] - batch["observations"]
        has_next = (stored[:, None] + [0, 1] == stored[None]).all(2).any(1)
        if (led[:, 0] != 0).any() or (led[:, 1] != 1 + has_next).any():
            wrong.append(at)
        if not is_struck:
            break
    assert at > 30 * every
    assert buf.check() == []
    buf.close()
    return wrong


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_step_goes_on_where_it_did_after_an_interrupted_call(tmp_path, where, named):
    assert wrong_after_interrupts(None if where == "memory" else tmp_path / "buf", named) == []


def led(buf):
    """Prove that each transition leads to the next number, in sums too; return the numbers, and steps of the sums."""
    for n_step in (1, 3):
        if n_step > 1:
            buf.flush()
            buf = TransitionReplayBuffer.open(buf.path, device=None, n_step=n_step, gamma=1.0)
        batch = buf[list(range(len(buf)))]
        now, after = batch["observations"][:, 0], batch["next_observations"][:, 0]
        steps = np.ones(len(now)) if n_step == 1 else batch["rewards"]
        np.testing.assert_array_equal(after, now + steps)
    buf.close()
    return now.tolist(), steps.tolist()


def one(buf, now, **options):
    buf.add(np.array([now]), 0, 1.0, np.array([now + 1.0]), False, **options)


def test_newest_rows_out_of_turn_are_no_call_of_all_environments(tmp_path):
    """One of them goes on from another: rows without names do not go on from what is left, in order."""
    path, options = tmp_path / "ring", {"device": None}
    buf = TransitionReplayBuffer(40, (1,), path=path, **options)
    for name, now in [("a", 10), ("b", 20), ("c", 30), ("a", 11), ("a", 12), ("b", 21)]:
        one(buf, float(now), lane=name)
    buf.close()
    buf = TransitionReplayBuffer(40, (1,), path=path, **options)
    now = np.array([[31.0], [13.0], [22.0]])  # what c, a and b led to
    buf.add(now, np.zeros(3, int), np.ones(3), now + 1, np.zeros(3, bool))
    assert led(buf)[0] == [10, 20, 30, 11, 12, 21, 31, 13, 22]


def test_environments_without_names_yet_are_found_after_others_were_forgotten(tmp_path, monkeypatch):
    for module in (lanes, nstep_module, buffer_module):
        monkeypatch.setattr(module, "FURTHEST", 4)
    path, options = tmp_path / "ring", {"device": None}
    buf = TransitionReplayBuffer(40, (1,), path=path, **options)
    now = np.arange(10.0)[:, None] * 10
    buf.add(now, np.zeros(10, int), np.ones(10), now + 1, np.zeros(10, bool))
    buf.close()
    buf = TransitionReplayBuffer(40, (1,), path=path, **options)
    for name in (9, 8, 7):
        one(buf, name * 10.0 + 1, lane=name)
    # 9 and 8 go on, so that sums over two steps reach their next rows; 7 is too far back by then.
    assert led(buf)[1] == [1.0] * 8 + [2.0, 2.0] + [1.0] * 3
