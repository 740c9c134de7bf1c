"""Stacks while rows come and go: other threads, readers, kills; and as a DataLoader takes them.

Frame (step, begin, lane) of a lane says which step it is, and at which step its episode began: so a stack proves
itself.
"""

import contextlib

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ringmap
from ringmap import TransitionReplayBuffer
from ringmap.buffers.engine import Engine
from ringmap.buffers.transitions.columns import FrameStack
from ringmap.buffers.transitions.nstep import TransitionReader
from ringmap.errors import ClipIndexError, InputError, SubscriptError
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.calls import thread
from tests.tiers import few
from tests.unit.buffers.processes import Child
from tests.unit.buffers.transitions.reference import Reference, StackedLife, in_order

SIZE, LENGTH = 4, 9


class Proof:
    """A writer of lanes whose episodes have LENGTH steps; lane i began i steps earlier."""

    def __init__(self, path=None, lanes=4, capacity=64, **options):
        self.lanes, self.step, self.path = np.arange(lanes), 0, path
        options = {"device": None, "seed": 0, "sync_every_s": 0, **options}
        self.buf = TransitionReplayBuffer(
            capacity,
            (SIZE, 3),
            obs_dtype=np.int32,
            frame_stack=SIZE,
            path=path,
            extra={"number": ((), "i8")},
            **options,
        )

    def call(self):
        """Return the arguments of the next call."""
        step, begin = self.step, np.maximum(0, self.step - (self.step + self.lanes) % LENGTH)
        done = (step + 1 + self.lanes) % LENGTH == 0
        self.step += 1
        count = len(self.lanes)
        extra = {"number": step * count + self.lanes}
        return (
            stacks(np.full(count, step), begin, self.lanes),
            np.full(count, step),
            np.ones(count),
            stacks(np.full(count, step + 1), begin, self.lanes),
            done,
        ), extra

    def add(self, calls=1):
        for _ in range(calls):
            call, extra = self.call()
            self.buf.add(*call, extra=extra)

    def held(self):
        """Return the numbers of what counts."""
        stop = self.step * len(self.lanes)
        return list(range(max(0, stop - self.buf.capacity), stop))


def stacks(step, begin, lane):
    """Return stacks `(N, SIZE, 3)`."""
    back = np.maximum(step[:, None] - np.arange(SIZE)[::-1], begin[:, None])
    wide = [np.broadcast_to(v[:, None], back.shape) for v in (begin, lane)]
    return np.stack([back, *wide], -1).astype(np.int32)


def num_wrong(batch):
    """Return how many transitions have a frame of another time or lane."""
    obs, after = np.asarray(batch["observations"]), np.asarray(batch["next_observations"])
    _, begin, lane = obs[:, -1].T
    step, summed = np.asarray(batch["actions"]), 1
    if "discounts" in batch:
        summed = np.round(np.log(batch["discounts"]) / np.log(0.99)).astype(int)
    wrong = (obs != stacks(step, begin, lane)).any((1, 2))
    wrong |= (after != stacks(step + summed, begin, lane)).any((1, 2))
    return int(wrong.sum())


def test_the_proof_finds_what_is_wrong():
    proof = Proof()
    proof.add(40)
    batch = proof.buf.sample(64)
    assert num_wrong(batch) == 0
    for name in ("observations", "next_observations"):
        for frame in range(SIZE):
            for value in range(3):
                batch[name][5, frame, value] += 1
                assert num_wrong(batch) == 1
                batch[name][5, frame, value] -= 1


# -- rows that go while they are read ---------------------------------------------------------------


def struck(monkeypatch, proof, buf, at, calls):
    """Return how many of a batch are wrong if calls come before its copy number `at`, and whether it was reached."""
    takes, kept = [0], MemmapColumn.take

    def take(column, slots, out=None, head=0):
        takes[0] += 1
        if takes[0] == at:
            for _ in range(calls):
                proof.add()
                proof.buf.engine.commit_pending("a test")
        return kept(column, slots, out, head)

    with monkeypatch.context() as patched:
        patched.setattr(MemmapColumn, "take", take)
        batch = buf.sample(64)
    return num_wrong(batch), takes[0] >= at


def strikes(monkeypatch, folder, n_step, reads, times=(1, 9)):
    """Strike calls of 32 lanes, whose stacks reach over 96 rows, further than the spare rows."""
    wrong = 0
    for calls in times:
        at, reached = 0, True
        while reached:
            at += 1
            proof = Proof(folder / f"{calls}-{at}", 32, n_step=n_step)
            for _ in range(30):
                proof.add()
                proof.buf.engine.commit_pending("a test")
            buf = proof.buf
            if reads:
                buf = TransitionReplayBuffer.open(proof.path, device=None, n_step=n_step, seed=1)
            found, reached = struck(monkeypatch, proof, buf, at, calls)
            wrong += found
            buf.close()
            proof.buf.close()
    return wrong


@pytest.mark.parametrize("reads", [False, True], ids=["writer", "reader"])
@pytest.mark.parametrize("n_step", few([3, 1]))
def test_calls_before_any_copy(fast, monkeypatch, n_step, reads):
    assert strikes(monkeypatch, fast, n_step, reads) == 0


@pytest.mark.campaign
@pytest.mark.parametrize("reads", [False, True], ids=["writer", "reader"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_more_calls_before_any_copy(fast, monkeypatch, n_step, reads):
    assert strikes(monkeypatch, fast, n_step, reads, (7, 10, 12)) == 0


@pytest.mark.slow
def test_the_strikes_find_frames_that_were_overwritten(fast, monkeypatch):
    """The control: only the newest row of a stack is looked at again."""
    gather = TransitionReader._transitions

    def newest_alone(self, source, positions, *args):
        return gather(self, source, positions, *args)._replace(oldest=positions)

    monkeypatch.setattr(TransitionReader, "_transitions", newest_alone)
    assert strikes(monkeypatch, fast, 1, True) > 0


def filled(lanes, settles):
    """Yield a buffer after each of many calls. Every `settles`-th call is committed at once, 0: none; others 256 rows
    at a time.

    A group is evicted as a whole: after groups of 256 and 32 rows, hardly more than the capacity stays stored.
    """
    proof = Proof(lanes=lanes, capacity=256, sampler=in_order)
    for _ in range(1500 // lanes):
        proof.add()
        if settles and proof.step % settles == 0:
            proof.buf.engine.commit_pending("a test")
        yield proof


@pytest.mark.parametrize(
    ("lanes", "settles"),
    [
        *few([(3, 9), (32, 1), (200, 0), (1, 0), (3, 0), (3, 1), (32, 9), (200, 9)], 3),
        *[pytest.param(*p, marks=pytest.mark.campaign) for p in [(1, 1), (1, 9), (32, 0), (200, 1)]],
    ],
)
def test_all_that_counts_is_drawn_and_nothing_else(lanes, settles):
    """Also the oldest: the rows that hold their older frames stay stored."""
    for proof in filled(lanes, settles):
        batch = proof.buf.sample(len(proof.buf))
        assert batch["number"].tolist() == proof.held()
        assert num_wrong(batch) == 0
        assert proof.buf.num_redraws == 0


def test_without_rows_before_the_window_the_oldest_would_be_redrawn(monkeypatch):
    """The control."""
    monkeypatch.setattr(FrameStack, "older", lambda self, capacity: 0)
    redraws = 0
    for proof in filled(32, 9):
        assert num_wrong(proof.buf.sample(len(proof.buf))) == 0
        redraws = proof.buf.num_redraws
    assert redraws > 0


def test_more_lanes_than_all_frames_are_kept_for():
    """Of 312 lanes the oldest transitions lack frames: others are drawn in their place."""
    proof = Proof(lanes=312, capacity=20_000, sampler=in_order)
    proof.add(90)
    proof.buf.engine.commit_pending("a test")
    batch = proof.buf.sample(20_000)
    assert num_wrong(batch) == 0
    assert 0 < proof.buf.num_redraws < 3 * 312


# -- kills, forks, copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("durability", few(["process", "power"]))
@pytest.mark.parametrize(("times", "lanes"), [(3, 2), (90, 4)])
def test_kill_9_and_go_on(tmp_path, times, lanes, durability):
    """Everything whose `add` returned is there, and each lane goes on from the stack that it had."""
    from tests.unit.buffers.transitions.test_transitions import add, compare, made_for

    def write(child):
        life = StackedLife(5)
        buf = made_for(life, 50, tmp_path / "buf", durability=durability)
        for _ in range(times):
            add(buf, Reference(1), life.step(lanes))
        child.say("here")
        child.hear()

    child = Child(write)
    assert child.hear() == "here"
    child.kill()
    life, reference = StackedLife(5), Reference(50)
    for _ in range(times):
        reference.add(*life.step(lanes))
    assert ringmap.check(tmp_path / "buf") == []
    buf = made_for(life, 50, tmp_path / "buf", durability=durability)
    compare(buf, reference)
    for _ in range(5):
        add(buf, reference, life.step(lanes))
        compare(buf, reference)
    buf.close()


def test_a_fork_in_the_middle_of_a_call_goes_on(tmp_path, monkeypatch):
    """It can't commit; the child shows the rows once they are."""
    proof = Proof(tmp_path / "buf")
    proof.add(3)
    store = proof.buf.engine.owned
    with thread.searching, store.lock:
        proof.buf.engine.before_fork()
    assert store.pending.count == 12
    proof.buf.engine.before_fork()
    assert store.committed_head == 12
    proof.buf.close()


# -- by id, ahead, in a DataLoader --------------------------------------------------------------------


def test_ids_that_are_none():
    proof = Proof()
    proof.add(29)
    for wrong in (64, -65):
        with pytest.raises(ClipIndexError, match=f"transition {wrong} is out of range for 64"):
            proof.buf[wrong]
        with pytest.raises(ClipIndexError, match="out of range"):
            proof.buf[[0, wrong]]
    with pytest.raises(SubscriptError):
        proof.buf["observations"]
    assert len(list(proof.buf)) == 64


def test_batches_go_to_the_device_of_the_buffer():
    proof = Proof(device="cpu")
    proof.add(10)
    with proof.buf.batches(8, steps=1) as batches:
        assert isinstance(next(batches)["observations"], torch.Tensor)
    with pytest.raises(ValueError, match=r"TransitionReplayBuffer.batches: batch_size must be positive"):
        proof.buf.batches(0)


def passed(loader):
    """Return the numbers of a pass over a loader, each proven."""
    found = []
    for batch in loader:
        assert num_wrong(batch) == 0
        found += batch["number"].tolist()
    return sorted(found)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["memory", "disk", "reader"])
def test_a_plain_loader_shows_all_that_was_added_before(tmp_path, where, workers):
    proof = Proof(None if where == "memory" else tmp_path / "buf")
    proof.add(7)
    buf = proof.buf
    if where == "reader":
        buf.flush()
        buf = TransitionReplayBuffer.open(tmp_path / "buf", device=None)
    loader = DataLoader(buf, batch_size=8, shuffle=True, num_workers=workers)
    assert passed(loader) == proof.held()
    proof.add(30)  # the newest of these are pending
    if where == "reader":
        proof.buf.flush()
        buf.refresh()
    assert passed(loader) == proof.held()
    assert buf.num_redraws == 0
    proof.buf.close()


def test_without_the_commit_before_a_fork_workers_miss_rows(tmp_path, monkeypatch, workers_end_soon):
    """The control."""
    monkeypatch.setattr(Engine, "before_fork", lambda self: None)
    monkeypatch.setattr(Store, "commit_behind", lambda self: None)  # nor by the thread, after a second
    proof = Proof(tmp_path / "buf")
    proof.add(7)
    with contextlib.suppress(RuntimeError):  # of a worker that finds nothing at all
        assert passed(DataLoader(proof.buf, batch_size=8, num_workers=2)) != proof.held()
    proof.buf.close()


def test_evicted_ids_are_redrawn_from_what_counts(tmp_path):
    proof = Proof(tmp_path / "buf", capacity=64)
    proof.add(30)
    order = list(proof.buf.pass_sampler(shuffle=False))
    proof.add(20)  # rows of which some are stored, but don't count
    batch = proof.buf[order]
    assert set(batch["number"].tolist()) <= set(proof.held())
    assert num_wrong(batch) == 0
    proof.buf.close()


# -- recorded ---------------------------------------------------------------------------------------


class Counting(gym.Env):
    """Observation n of episode e is full of 16 e + n; its episodes have `length` steps."""

    observation_space = gym.spaces.Box(0, 255, (2, 2), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=9):
        self.length, self.episode, self.number = length, -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.number = self.episode + 1, 0
        return self._seen(), {}

    def step(self, action):
        self.number += 1
        return self._seen(), float(self.number), self.number == self.length, False, {}

    def _seen(self):
        return np.full((2, 2), 16 * self.episode + self.number, np.uint8)


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("mode", [None, "SAME_STEP"])
def test_a_recorded_environment_with_stacks(padding, mode):
    """Gymnasium's own wrapper makes the stacks; the wrapper of ours adds them."""

    def made(length=9):
        return gym.wrappers.FrameStackObservation(Counting(length), 3, padding_type=padding)

    buf = TransitionReplayBuffer(
        100,
        (3, 2, 2),
        obs_dtype=np.uint8,
        frame_stack=3,
        padding_type=padding,
        device=None,
        sampler=in_order,
    )
    if mode is None:
        env = ringmap.ReplayBufferCollectionWrapper(made(), buf)
    else:
        env = gym.vector.SyncVectorEnv(
            [made, lambda: made(7), lambda: made(4)], autoreset_mode=gym.vector.AutoresetMode[mode]
        )
        env = ringmap.ReplayBufferCollectionWrapper(env, buf)
    env.reset(seed=0)
    for _ in range(40):
        ended = env.step(0 if mode is None else np.zeros(3, int))[2]
        if mode is None and ended:
            env.reset()
    batch = buf.sample(len(buf))
    assert len(buf) >= 36
    newest, after = batch["observations"][:, -1, 0, 0], batch["next_observations"][..., 0, 0]
    back = np.arange(2, -1, -1)
    for stacks_of, now in ((batch["observations"][..., 0, 0], newest), (after, newest + 1)):
        numbers = (now % 16)[:, None].astype(int) - back
        expected = np.where(numbers < 0, 0, numbers) + (now // 16 * 16)[:, None]
        if padding == "zero":
            expected[numbers < 0] = 0
        assert stacks_of.tolist() == expected.tolist()
    env.close()


def test_a_recording_that_has_not_the_further_columns():
    buf = TransitionReplayBuffer(100, (2, 2), obs_dtype=np.uint8, extra={"log_prob": ((), "f4")})
    with pytest.raises(ValueError, match="log_prob"):
        ringmap.ReplayBufferCollectionWrapper(Counting(), buf)


def test_a_vector_environment_that_leaves_lanes_out_is_told(tmp_path):
    """In NEXT_STEP mode a lane that is reset has no transition in that step, so calls differ in their lanes."""
    buf = TransitionReplayBuffer(100, (3, 2, 2), obs_dtype=np.uint8, frame_stack=3)

    def made(length):
        return lambda: gym.wrappers.FrameStackObservation(Counting(length), 3)

    env = gym.vector.SyncVectorEnv([made(4), made(9)], autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
    env = ringmap.ReplayBufferCollectionWrapper(env, buf)
    env.reset(seed=0)
    said = "environment 1 comes 1 rows after its last step, and 2 before: .*SAME_STEP"
    with pytest.raises(InputError, match=said):
        for _ in range(9):
            env.step(np.zeros(2, int))
    assert len(buf) == 8
