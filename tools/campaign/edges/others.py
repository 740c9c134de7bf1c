"""The other buffers: one thread adds while others sample; signals meanwhile, in some rounds.

A transition says what it must lead to, a label of which row it is and from which round, a row of which half.
"""

import os
import time
import traceback

import numpy as np

from ringmap import (
    DistillationBuffer,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    TransitionReplayBuffer,
)
from ringmap.errors import InputError, LappedError, NoClipsError, RoleError
from tools.campaign.edges.actor import Caller, Ended, Raised
from tools.campaign.edges.ledger import CLEAR, DONE, OPEN, REFUSED, WRITE
from tools.campaign.edges.signals import Handler

KINDS = "transitions", "distillation", "online"


def play(actor):
    kind = actor.pick(KINDS, [3, 1, 1])
    other = {"transitions": Transitions, "distillation": Labels, "online": Halves}[kind](actor)
    actor.homes.append(other)
    rng = actor.rng
    actor.keep()
    for _ in range(int(rng.integers(1, 12))):
        other.write(rng)
    actor.strangers.turn(8)
    actor.begin()
    if actor.told.signals:
        handler = Handler(actor, other, ["close", "flush", "write", "look", "raise"][: int(rng.integers(1, 6))])
        handler.install()
        actor.start("sampler", lambda rng: other.look(rng) and None)
        while not actor.over and not handler.may_be_closed:
            handler.during(other.write, rng)
            actor.strangers.turn()
        handler.remove()
    else:
        for i in range(2):
            actor.start(f"sampler {i}", lambda rng: other.look(rng) and None)
        if actor.chance(0.3):
            actor.start("flush", lambda rng: other.flush(rng) or time.sleep(0.003))
        while not actor.over:
            other.write(rng)
            if rng.random() < 0.3:
                other.extra(rng)
            if rng.random() < 0.05:
                time.sleep(0.002)
    if actor.chance(0.5):
        other.close()  # under the hands of those that sample
    actor.stop.set()
    actor.join()
    other.close()


class Other(Caller):
    """What they have in common."""

    kind = ""
    world = 0

    def __init__(self, actor):
        self.actor, self.ledger = actor, actor.ledger
        self.path = os.path.join(actor.folder, "buf")
        self.in_ram = actor.chance(0.5)
        self.capacity = int(actor.rng.integers(64, 300))
        self.lanes = int(actor.rng.integers(1, 9))
        self.calls = 0
        self.buffer = self.made({} if self.in_ram else {"path": self.path})
        self.max_steps = self.ring.max_steps
        self.slack = self.ring.engine.owned.manifest.spare
        self.lies_at = None if self.in_ram else str(self.ring.path)

    def write(self, rng):
        """Add one call; refused or interrupted, the number is not used again."""
        call, self.calls = self.calls, self.calls + 1
        entry = self.ledger.begin(WRITE, call, self.lanes)
        how = OPEN
        try:
            self.add(call)
            how = DONE
        except RoleError as error:
            how = REFUSED
            return error
        except (Raised, Ended):
            raise
        except Exception as error:
            self.ledger.violation("error", f"add: {traceback.format_exc(limit=-10)}")
            return error
        finally:
            self.ledger.end(entry, how)
            self.ledger.tally("adds")
        return None

    def flush(self, rng=None):
        return self.plain("flush", self.buffer.flush)

    def close(self):
        error = self.plain("close", self.buffer.close)
        self.ledger.tally("closes" if error is None else "closes refused")
        return error

    def extra(self, rng):
        """Do what else one does with such a buffer."""

    def look(self, rng, buffer=None, allowed=(), threads=True):
        def read():
            batch = self.sample(int(rng.integers(1, 64)))
            self.ledger.tally("reads")
            if batch is not None and (fault := self.wrong(batch)):
                self.ledger.violation(*fault)

        return self.plain("sample", read, (RoleError, NoClipsError, LappedError))

    def refused_for_size(self, error):
        """Tell whether more was asked for than there is."""
        return "are stored" in str(error)


def key(call, lane):
    return (call * 2654435761 + lane * 40503) % 1_000_003


def observed(call, lanes, final):
    """Return the observations of a call: `[call, lane, whether it is the last of an episode, key]`."""
    lane = np.arange(lanes)
    return np.stack([np.full(lanes, call), lane, final * np.ones(lanes), key(call, lane) + 0.5 * final], 1).astype(
        np.float64
    )


class Transitions(Other):
    kind = "transitions"

    def made(self, place):
        rng = self.actor.rng
        self.n_step = int(self.actor.pick([1, 1, 3]))
        buffer = TransitionReplayBuffer(
            self.capacity,
            (4,),
            (),
            device=None,
            obs_dtype=np.float64,
            n_step=self.n_step,
            gamma=0.5,
            seed=int(rng.integers(1 << 30)),
            sync_every_s=float(self.actor.pick([0, 0.01])),
            storage=self.actor.pick(["memmap", "memmap", "zarr"]),
            durability=self.actor.pick(["process", "power"], [3, 1]),
            **place,
        )
        self.ring = buffer._ring.buffer
        return buffer

    def add(self, call):
        lane = np.arange(self.lanes)
        done, cut = (call + 3 * lane) % 11 == 0, (call + 5 * lane) % 13 == 0
        final = (done | cut).astype(np.float64)
        self.buffer.add(
            observed(call, self.lanes, 0.0),
            lane,
            np.full(self.lanes, call, np.float32),
            observed(call + 1, self.lanes, final),
            done,
            truncated=cut,
        )

    def sample(self, size):
        try:
            return self.buffer.sample(size)
        except InputError as error:
            if self.refused_for_size(error):
                return None
            raise

    def wrong(self, batch):
        return wrong_transitions(batch, self.n_step)

    def extra(self, rng):
        if rng.random() < 0.1:
            entry = self.ledger.begin(CLEAR)
            self.ledger.end(entry, DONE if self.plain("clear", self.buffer.clear) is None else OPEN)


def wrong_transitions(batch, n_step):
    """Return what is wrong with transitions, `(judge, text)`."""
    now, then = batch["observations"], batch["next_observations"]
    call, lane = now[:, 0].astype(np.int64), now[:, 1].astype(np.int64)
    good = (now[:, 2] == 0) & (now[:, 3] == key(call, lane)) & (batch["actions"] == lane)
    if not good.all():
        return "torn", f"transitions {now[~good][:4].tolist()}"
    last = then[:, 0].astype(np.int64) - 1
    final = ((last + 3 * lane) % 11 == 0) | ((last + 5 * lane) % 13 == 0)
    right = (then[:, 1] == lane) & (then[:, 2] == final) & (then[:, 3] == key(last + 1, lane) + 0.5 * final)
    right &= (last >= call) & (last < call + n_step) & (batch["dones"] == ((last + 3 * lane) % 11 == 0))
    if n_step == 1:
        right &= batch["rewards"] == call.astype(np.float32)
    if not right.all():
        at = np.flatnonzero(~right)[:4]
        return (
            "successor",
            f"{(~right).sum()} of {len(now)}: {now[at].tolist()} led to {then[at].tolist()}",
        )
    return None


class Labels(Other):
    kind = "distillation"

    def made(self, place):
        buffer = DistillationBuffer(
            self.capacity,
            retention="fifo",
            seed=int(self.actor.rng.integers(1 << 30)),
            obs_shape=(4,),
            sync_every_s=float(self.actor.pick([0, 0.01])),
            **place,
        )
        buffer.start_round()
        self.ring = buffer._ring.buffer
        return buffer

    def add(self, call):
        lane = np.arange(self.lanes)
        rounds = np.full(self.lanes, self.buffer.round)
        self.buffer.add(
            observed(call, self.lanes, 0.0),
            np.stack([key(call, lane), rounds], 1).astype(np.int64),
            dones=(call + 3 * lane) % 5 == 0,
        )

    def sample(self, size):
        return self.buffer.batch(size)

    def wrong(self, batch):
        return wrong_labels(batch)

    def extra(self, rng):
        if rng.random() < 0.2:
            self.plain("start_round", self.buffer.start_round)

        def teach(rows):
            seen = rows["student_observations"]
            call, lane = seen[:, 0].astype(np.int64), seen[:, 1].astype(np.int64)
            return np.stack([key(call, lane), np.full(len(call), self.buffer.round)], 1)

        self.ledger.tally("updates")
        newest = self.ring.engine.owned.head if self.in_ram else 0
        which = np.arange(max(0, newest - 20), newest) if self.in_ram else None
        self.plain("relabel", lambda: self.buffer.relabel(which, teach))


def wrong_labels(batch):
    """Return what is wrong with rows and their labels, `(judge, text)`."""
    seen, label = batch["student_observations"], batch["teacher_actions"]
    call, lane = seen[:, 0].astype(np.int64), seen[:, 1].astype(np.int64)
    if not (seen[:, 3] == key(call, lane)).all():
        return "torn", f"rows {seen[:4].tolist()}"
    right = (label[:, 0] == key(call, lane)) & (label[:, 1] == batch["label_round"])
    if not right.all():
        at = np.flatnonzero(~right)[:4]
        return (
            "label",
            f"{seen[at].tolist()} has {label[at].tolist()}, of round {batch['label_round'][at].tolist()}",
        )
    return None


class Halves(Other):
    kind = "online"

    def made(self, place):
        offline = ReplayBuffer(200)
        lane = np.arange(100)
        offline.write_episode({"who": np.stack([np.full(100, -1), lane, key(-1, lane)], 1).astype(np.float64)})
        self.fraction = float(self.actor.pick([0.25, 0.5]))
        buffer = OfflineToOnlineReplayBuffer(
            offline,
            online_capacity=self.capacity,
            offline_fraction=self.fraction,
            provenance="is_offline",
            seed=int(self.actor.rng.integers(1 << 30)),
            **place,
        )
        self.ring = buffer._ring.buffer
        return buffer

    def add(self, call):
        lane = np.arange(self.lanes)
        who = np.stack([np.full(self.lanes, call), lane, key(call, lane)], 1).astype(np.float64)
        self.buffer.extend({"who": who})

    def sample(self, size):
        return self.buffer.sample(size)

    def wrong(self, batch):
        return wrong_halves(batch, self.fraction)


def wrong_halves(batch, fraction):
    """Return what is wrong with a mixed batch, `(judge, text)`."""
    who, offline = batch["who"].reshape(-1, 3), batch["is_offline"].reshape(-1)
    call, lane = who[:, 0].astype(np.int64), who[:, 1].astype(np.int64)
    if not (who[:, 2] == key(call, lane)).all():
        return "torn", f"rows {who[:4].tolist()}"
    if ((call == -1) != offline).any() or (offline.sum() not in (round(fraction * len(who)), len(who))):
        return "half", f"{offline.sum()} of {len(who)} are called offline, {(call == -1).sum()} are"
    return None
