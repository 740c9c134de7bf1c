"""Sessions on a buffer of transitions: each one stored proves itself, next observation included.

Call number n has some lanes; what lane i led to says (n, i). The next call goes on from there in most
lanes, if it has as many, and begins afresh in the others. So whatever is drawn says by its reward which
transition it is, and from that follows what its next observation must be.
"""

import os
from functools import partial

import numpy as np

from ringmap import TransitionReplayBuffer
from ringmap.errors import EnvironmentFault, InputError, LappedError, SyncFailedError
from tests.disks import Through
from tests.faults.crash.cases import STORAGES, Expect, Session, draw_step

STEPS = ("write", "sample", "clear", "flush", "sync", "sync_write", "reopen")


def draw_step_of(kinds):
    """Return what draws a step of one of these kinds."""

    def draw(rng, max_steps, spare):
        while True:
            step = draw_step(rng, max_steps, spare)
            if step[0] in kinds:
                return (step[0], min(step[1], spare), *step[2:]) if "write" in step[0] else step

    return draw


def led_to(number, lanes):
    """Return what the lanes of a call led to."""
    lane = np.arange(lanes)
    return np.stack([np.full(lanes, number), lane, lane * 0 + 1, number * 31 + lane], 1).astype(np.int32)


def began_afresh(number, lanes):
    lane = np.arange(lanes)
    return np.stack([np.full(lanes, number), lane, lane * 0, number * 17 + lane], 1).astype(np.int32)


def call_of(number, lanes, before):
    """Return the arguments of a call, after the call `before` (number, lanes), or None."""
    obs = began_afresh(number, lanes)
    if before is not None and before[1] == lanes:
        goes_on = (number + np.arange(lanes)) % 4 != 0
        obs = np.where(goes_on[:, None], led_to(*before), obs)
    lane = np.arange(lanes)
    after = led_to(number, lanes)
    return (
        obs,
        lane + number,
        (number * 64 + lane).astype(np.float32),
        after,
        (number + lane) % 5 == 0,
    )


def in_order(step, buffer, size, history_len):
    return np.arange(size)


def prove(batch, is_named=False):
    """Check what was drawn byte by byte, and return which (call, lane) it is; `is_named`: an environment may be another
    row of a call."""
    found = []
    for obs, action, reward, after, done in zip(
        batch["observations"],
        batch["actions"],
        batch["rewards"],
        batch["next_observations"],
        batch["dones"],
        strict=True,
    ):
        number, lane = divmod(int(reward), 64)
        assert action == number + lane, f"action {action} of lane {lane} of call {number}"
        assert done == ((number + lane) % 5 == 0)
        at = f"lane {lane} of call {number}"
        assert after.tolist() == led_to(number, lane + 1)[lane].tolist(), f"{at} led to {after}"
        if obs[2]:
            assert obs[0] < number, f"{at} goes on from {obs}"
            was = int(obs[1]) if is_named else lane
            assert obs.tolist() == led_to(int(obs[0]), was + 1)[was].tolist(), f"{at}: {obs}"
        else:
            assert obs.tolist() == began_afresh(number, lane + 1)[lane].tolist(), f"{at}: {obs}"
        found.append((number, lane))
    return found


def by_record(buf, name):
    """Return the rows of a column of transitions, record by record."""
    lengths = buf.engine.rings[0].reader.source.live.lengths
    return np.split(buf._ring.buffer.get_col_data(name), np.cumsum(lengths)[:-1]) if len(lengths) else []


def look(buf, prove=prove):
    """Return the calls stored, and the transitions that can't be drawn as their next observation was lost."""
    buf.engine.commit_pending("a test")
    calls = [(int(rewards[0]) // 64, len(rewards)) for rewards in by_record(buf, "rewards")]
    stored = [(n, lane) for n, lanes in calls for lane in range(lanes)][-buf.capacity :]
    assert len(buf) == len(stored), f"{len(buf)} of {stored}"
    drawn = set()
    if stored:
        sampler, buf.sampler = buf.sampler, in_order
        counter = buf.state_dict()
        for _ in range(4):  # what is lost is drawn anew, and may be again
            try:
                drawn |= set(prove(buf.sample(len(stored), step=0)))
            except LappedError:
                continue
            if len(drawn) == len(stored):
                break
        buf.sampler = sampler
        buf.load_state_dict(counter)
    assert drawn <= set(stored), f"drew {drawn - set(stored)}, which are not among {stored}"
    return tuple(calls), set(stored) - drawn


class TransitionSession(Session):
    """A session on a `TransitionReplayBuffer`. `Expect.also`: the calls that a cut took the next observations of."""

    draw_step = staticmethod(draw_step_of(STEPS))
    has_groups = True
    older = 0
    """Calls before one, of which it holds frames."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.now.also is None:
            self.expects[0] = 0, Expect(**{**vars(self.now), "also": frozenset()})

    @classmethod
    def suited(cls, case):
        return type(case)(**{**vars(case), "max_steps": 2 * case.spare, "keep": False})

    def make(self):
        kind = Through(TransitionReplayBuffer, self.disk)
        return kind(
            self.case.spare,
            (4,),
            device=None,
            obs_dtype=np.int32,
            seed=7,
            path=os.path.join(self.root, "buf"),
            storage=STORAGES[self.case.storage],
            durability="power" if self.power else "process",
            sync_every_s=0,
        )

    @classmethod
    def make_reader(cls, root, disk):
        kind = Through(TransitionReplayBuffer, disk)
        return kind.open(os.path.join(root, "buf"), "r", device=None)

    @staticmethod
    def store_of(buf):
        return buf._ring.buffer.engine.owned

    prove = staticmethod(prove)

    def ordinals(self, seen):
        return {}  # it stores rows, not episodes

    @classmethod
    def look_at(cls, buf):
        return look(buf, cls.prove)[0]

    def sampling(self):
        state = self.buf.state_dict()
        return state["step"], state["rng"]["state"]["state"]

    def put(self, number, length):
        stored = self.look()
        arguments = call_of(number, length, stored[-1] if stored else None)
        self.buf.add(*arguments)
        self.commit()

    def commit(self):
        """Commit the call, so that the oldest go one by one: test_groups.py has calls that are committed together."""
        try:
            self.buf.engine.commit_pending("a test")
        except SyncFailedError:
            raise
        except EnvironmentFault:  # the call was stored; the next look commits it
            pass

    def judge_also(self, before):
        calls, lost = look(self.buf, self.prove)
        gone = {number for number, _ in lost}
        may = set(before.also)
        if self.cut and not before.power:
            may |= {number for number, _ in calls[-1:]}
        live = self.store_now.live  # a call that a cut spoiled was dropped between two others
        starts, ends = live.starts, live.starts + live.lengths
        gaps = np.flatnonzero(starts[1:] != ends[:-1]).tolist()
        may |= {calls[i][0] for i in gaps}
        # What goes on after a gap has lost older frames.
        firsts = [i + 1 for i in gaps] + [0] * bool(len(starts) and starts[0] > self.store_now.tail)
        may |= {calls[i + n][0] for i in firsts for n in range(self.older) if i + n < len(calls)}
        assert gone <= may, f"calls {gone - may} have lost their next observations; {may} may have"
        return frozenset(gone)

    def do_sample(self):
        if len(self.buf) > 1 and not look(self.buf, self.prove)[1]:
            self.buf.sample(2)


class NamedSession(TransitionSession):
    """The same with named environments: some are in one call, and go on in a later one, whatever came in between."""

    def put(self, number, length):
        stored = self.look()
        names = [(number * 3 + i) % 5 for i in range(length)] if length <= 5 else range(length)
        newest = {}
        for call, lanes in stored:
            named = [(call * 3 + i) % 5 for i in range(lanes)] if lanes <= 5 else range(lanes)
            newest |= {name: (call, i) for i, name in enumerate(named)}
        obs, *rest = call_of(number, length, None)
        for i, name in enumerate(names):
            if name in newest and (number + i) % 4:
                call, lane = newest[name]
                obs[i] = led_to(call, lane + 1)[lane]
        self.buf.add(obs, *rest, lane=list(names))
        self.commit()

    prove = staticmethod(partial(prove, is_named=True))


STACK = 3
SENT: dict = {}
"""(call, lane) -> each stack and next stack that was added under these numbers."""


def stacks_of(number, lanes, before):
    """Return a call with stacks of the frames of `call_of`; `before`: the next stacks of the call before, or None."""
    rows = call_of(number, lanes, None if before is None else (int(before[0, -1, 0]), lanes))
    stacks = np.repeat(rows[0][:, None], STACK, 1)
    if before is not None:
        goes_on = (rows[0] == before[:, -1]).all(axis=1)
        stacks = np.where(goes_on[:, None, None], before, stacks)
    after = np.concatenate([stacks[:, 1:], rows[3][:, None]], 1)
    return (stacks, *rows[1:3], after, rows[4])


def prove_stacks(batch):
    """Check each frame of what was drawn, and return which (call, lane) it is."""
    newest = {n: v[:, -1] if v.ndim == 3 else v for n, v in batch.items()}
    found = prove(newest)
    for i, name in enumerate(found):
        drawn = batch["observations"][i].tolist(), batch["next_observations"][i].tolist()
        assert drawn in SENT[name], f"{name}: {drawn}"
    return found


class StackSession(TransitionSession):
    """The same with stacks of three frames, of which the buffer stores one."""

    prove = staticmethod(prove_stacks)
    older = STACK - 1

    @classmethod
    def suited(cls, case):
        stored = (1 + STACK) * case.spare  # older frames stay
        return type(case)(**{**vars(case), "max_steps": stored, "keep": False})

    def make(self):
        kind = Through(TransitionReplayBuffer, self.disk)
        return kind(
            self.case.spare,
            (STACK, 4),
            device=None,
            obs_dtype=np.int32,
            seed=7,
            frame_stack=STACK,
            path=os.path.join(self.root, "buf"),
            storage=STORAGES[self.case.storage],
            durability="power" if self.power else "process",
            sync_every_s=0,
        )

    def put(self, number, length):
        stored, tried = self.look(), [None]
        if stored and stored[-1][1] == length:
            sent = [SENT[stored[-1][0], lane] for lane in range(length)]
            tried += [np.array([n for _, n in lanes], np.int32) for lanes in zip(*sent, strict=False)]
        for before in reversed(tried):
            call = stacks_of(number, length, before)
            for lane in range(length):
                SENT.setdefault((number, lane), []).append((call[0][lane].tolist(), call[3][lane].tolist()))
            try:
                self.buf.add(*call)
            except InputError:  # it is not what is stored, or some of that is lost
                assert before is not None
                continue
            break
        self.commit()
