"""What the victims do, and what must be there afterwards.

A script is a list of calls on one buffer. `Model` says in plain Python what each makes true; `allowed`
what a kill in the middle of one may leave. Every step carries its own episode and step number.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from ringmap import Zarr

TERMINATED, INTERRUPTED, DROPPED = 1, 4, 8
MAX_STEPS, SPARE = 24, 6
STORAGES = {"memmap": "memmap", "zarr": Zarr("lz4", 4), "mixed": {"obs": Zarr("none", 3)}}
"""Ways to store columns: chunks are small, so that episodes share them and the ring ends in mid-chunk."""
PROBE = 900
"""The episode that is written once a buffer was recovered, to see that it goes on."""


def episode(k, steps):
    """Return an episode as it is written: every value follows from its number and the step's."""
    t = np.arange(steps)
    return {
        "obs": np.stack([np.full(steps, k), t], axis=1).astype(np.int32),
        "action": ((7 * k + t) % 251).astype(np.uint8),
        "_episode_data": {"k": k, "name": f"episode {k}", "grid": np.arange(k % 5, dtype=np.int16)},
    }


@dataclass(frozen=True)
class Model:
    """A buffer in words: `episodes` of (number, steps, flags), oldest first, dropped ones included, whose
    positions stay; `streams` of (number, steps so far); `saved`, the call that stored the sampling state last."""

    episodes: tuple = ()
    streams: tuple = ()
    saved: int = -1
    also: tuple = ()
    """What was given besides, newest last: (number, value), of the family's own kind."""
    before: tuple | None = None
    """What was given before a call that may have reached some rows only; None: no such call is under way."""

    def given(self):
        """Return number -> the value that counts, of the episodes that are stored."""
        newest = dict(self.also)
        return {k: newest.get(k, 0) for k, _, flags in self.episodes if not flags & DROPPED}

    def seen(self):
        """Return what a look at a buffer must see: an interrupted episode has no data."""
        stored = [e for e in self.episodes if not e[2] & DROPPED]
        return tuple((k, n, not flags & INTERRUPTED) for k, n, flags in stored)

    def is_in(self, table):
        """Tell whether a table's live records, of (steps, flags), are of this model."""
        return table == [(n, flags) for _, n, flags in self.episodes if not flags & DROPPED]

    def stored(self, k, steps, flags=0):
        """Return the model with one more episode; the oldest whole ones make room."""
        kept = list(self.episodes)
        while sum(n for _, n, _ in kept) + steps > MAX_STEPS:
            kept.pop(0)
        return replace(self, episodes=(*kept, (k, steps, flags)))

    def without(self, k):
        return replace(self, streams=tuple(s for s in self.streams if s[0] != k))

    def on_the_way(self, to):
        """Return what a call from here `to` there may leave besides: the oldest episodes gone.

        Only an episode longer than the spare rows may; `done` asks no more of it than the contract.
        """
        gone = len(set(self.episodes) - set(to.episodes))
        return [replace(self, episodes=self.episodes[n:]) for n in range(1, gone + 1)]

    def settled(self, keep):
        """Return the states that an opening goes through as it deals with each open stream, in turn."""
        states, at = [], self
        for k, steps in self.streams:
            after = at.without(k)
            if keep and steps:
                after = after.stored(k, steps, INTERRUPTED)
                if steps > SPARE:
                    states += at.on_the_way(after)
            states.append(after)
            at = after
        return states

    def after(self, op, index, keep=False):
        """Return the model once call number `index` has returned."""
        kind, *args = op
        if kind == "write":
            return replace(self.stored(*args), saved=index)
        if kind == "clear":
            return replace(self, episodes=(), saved=index if self.episodes else self.saved)
        if kind in ("flush", "close"):
            return replace(self, saved=index)
        if kind in ("update", "relabel", "put"):
            reached = self.reached(args, MAX_STEPS // 2 if kind == "relabel" else MAX_STEPS)
            return replace(self, also=(*self.also, *((k, index + 1) for k in reached)))
        if kind == "round":
            return replace(self, saved=index)
        if kind == "open":
            return ([self, *self.settled(keep)])[-1]
        if kind == "begin":
            return replace(self, streams=(*self.streams, (args[0], 0)))
        if kind == "append":
            grown = tuple((k, n + (k == args[0])) for k, n in self.streams)
            return replace(self, streams=grown)
        if kind == "abandon":
            return self.without(args[0])
        if kind == "finish":
            steps = dict(self.streams)[args[0]]
            rest = self.without(args[0])
            return replace(rest.stored(args[0], steps, TERMINATED), saved=index) if steps else rest
        return self

    def reached(self, numbers, steps):
        """Return which of these episodes (all, if none is named) have any of the newest so many steps."""
        newer = [sum(n for _, n, _ in self.episodes[i + 1 :]) for i in range(len(self.episodes))]
        stored = [k for (k, _, _), later in zip(self.episodes, newer, strict=True) if later < steps]
        return [k for k in stored if k in numbers or not numbers]

    def allowed(self, op, index, keep=False):
        """Return every model that a kill in the middle of the call may leave."""
        after = self.after(op, index, keep)
        if op[0] == "relabel":  # row by row
            return [replace(after, before=self.also)]
        if op[0] == "put":  # an episode after the other
            new = after.also[len(self.also) :]
            return [replace(self, also=(*self.also, *new[:n])) for n in range(len(new) + 1)]
        if op[0] == "open":
            return [self, *self.settled(keep)]
        length = {"write": lambda: op[2], "finish": lambda: dict(self.streams)[op[1]]}
        long = op[0] in length and length[op[0]]() > SPARE
        return [self, *(self.on_the_way(after) if long else []), after]


@dataclass(frozen=True)
class Scenario:
    """Calls in three parts: `given`, done once, in a process that then dies; `first`, done by
    each victim; `act`, in the middle of which the blow falls."""

    name: str
    act: list
    given: list = field(default_factory=list)
    first: list = field(default_factory=list)
    options: dict = field(default_factory=dict)
    spoil: str = ""
    segment_nbytes: int = 0
    dropped: tuple = ()
    levels: tuple = ("process", "power")
    storage: str = "memmap"
    family: str = "episodes"
    model: type = Model

    def stored_as(self, storage):
        """Return the same scenario with its columns stored in this way."""
        name = self.name if storage == "memmap" else f"{self.name}, {storage}"
        return replace(self, name=name, storage=storage)

    @property
    def keep(self):
        return self.options.get("interrupted") == "keep"

    @property
    def ops(self):
        return [*self.given, *self.first, *self.act]

    def models(self):
        """Return the model before each call, and after the last."""
        models = [self.model()]
        for index, op in enumerate(self.ops):
            models.append(models[-1].after(op, index, self.keep))
            if self.dropped and index + 1 == len(self.given):
                flagged = ((k, n, DROPPED if k in self.dropped else f) for k, n, f in models[-1].episodes)
                models[-1] = replace(models[-1], episodes=tuple(flagged))
        return models


def writes(*lengths, first=1):
    return [("write", first + i, n) for i, n in enumerate(lengths)]


def stream(k, steps, end="finish"):
    return [("begin", k), *[("append", k)] * steps, (end, k)]


OPEN = ("open",)
SAMPLE = ("sample",)
FULL = [OPEN, *writes(5, 5, 5, 5)]
SCHEMA = {"obs": ((2,), "int32"), "action": ((), "uint8")}

SCENARIOS = {
    s.name: s
    for s in (
        Scenario("birth", [OPEN]),
        Scenario("birth with schema", [OPEN], options={"schema": SCHEMA}),
        Scenario("birth in a mounted volume", [OPEN], spoil="volume"),
        Scenario("first episode", [SAMPLE, *writes(4)], first=[OPEN]),
        Scenario("commit", writes(3, first=9), [OPEN, *writes(5, 5)], [OPEN, *writes(5, first=8)]),
        Scenario("commit after sampling", [SAMPLE, *writes(3, first=9)], FULL, [OPEN]),
        Scenario(
            "commit that wraps",
            writes(6, first=9),
            [*FULL, *writes(6, first=5), ("clear",)],
            [OPEN],
        ),
        Scenario("commit that evicts", writes(5, first=9), FULL, [OPEN, *writes(3, first=8)]),
        Scenario(
            "commit that evicts many",
            writes(6, first=19),
            [OPEN, *writes(*[2] * 12)],
            [OPEN],
        ),
        Scenario("commits, a turn of the ring", writes(*[5] * 4, first=9), FULL, [OPEN]),
        Scenario("commit of a long episode", writes(15, first=9), FULL, [OPEN, *writes(3, first=8)]),
        Scenario("commit of the longest episode", writes(24, first=9), FULL, [OPEN]),
        Scenario(
            "commits, a turn of the table",
            writes(1, 1, 2, first=901),
            [OPEN, *writes(*[1] * 92)],
            [OPEN],
        ),
        Scenario(
            "commits, a segment each",
            writes(*[5] * 4, first=9),
            FULL,
            [OPEN],
            segment_nbytes=200,
        ),
        Scenario("clear", [("clear",)], FULL, [OPEN, *writes(2, first=8), SAMPLE]),
        Scenario(
            "clear, and go on",
            [("clear",), *writes(5, 6, 6, first=9), ("clear",), ("clear",)],
            FULL,
            [OPEN],
        ),
        Scenario("flush", [("flush",)], FULL, [OPEN, *writes(5, first=8), SAMPLE]),
        Scenario("background sync", [("sync",)], FULL, [OPEN, *writes(5, first=8)]),
        Scenario("close", [("close",)], FULL, [OPEN, *writes(5, first=8), SAMPLE]),
        Scenario("close and open", [SAMPLE, ("close",), OPEN, ("close",)], FULL, [OPEN]),
        Scenario("open", [OPEN], FULL),
        Scenario("open what has no columns", [OPEN], [OPEN]),
        Scenario("open what was being written", [OPEN], FULL, spoil="torn record"),
        Scenario("open with a state torn", [OPEN], FULL, spoil="torn state"),
        Scenario("open after a reboot", [OPEN], [*FULL, ("flush",), *writes(4, 3, first=5)], spoil="reboot"),
        Scenario(
            "open after a reboot that lost rows",
            [OPEN],
            [*FULL, *writes(4, 3, first=5)],
            spoil="reboot, rows lost",
            dropped=(5,),
            levels=("process",),
        ),
        Scenario(
            "stream, keep",
            stream(9, 4),
            FULL,
            [OPEN, *writes(3, first=8)],
            {"interrupted": "keep"},
        ),
        Scenario("stream, drop", stream(9, 4), FULL, [OPEN]),
        Scenario("stream first", stream(9, 3), first=[OPEN], options={"interrupted": "keep"}),
        Scenario("stream of a long episode", stream(9, 9), FULL, [OPEN], {"interrupted": "keep"}),
        Scenario(
            "streams, two at once",
            [
                ("begin", 9),
                ("append", 9),
                ("begin", 10),
                ("append", 10),
                ("append", 9),
                ("write", 11, 2),
                ("finish", 10),
                ("append", 9),
                ("abandon", 9),
            ],
            FULL,
            [OPEN],
            {"interrupted": "keep"},
        ),
        Scenario(
            "open with streams, keep",
            [OPEN],
            [*FULL, ("begin", 9), ("append", 9), *[("begin", 10), ("append", 10)], ("append", 9)],
            options={"interrupted": "keep"},
        ),
        Scenario(
            "open with streams, drop",
            [OPEN],
            [*FULL, ("begin", 9), ("append", 9), ("append", 9)],
        ),
    )
}


UPDATES = [("update", 2, 3), ("update",)]
SCENARIOS_OF_OTHERS = {
    s.name: s
    for s in (
        Scenario("transitions: birth", [OPEN], family="transitions"),
        Scenario("transitions: first calls", [*writes(4, 4)], first=[OPEN], family="transitions"),
        Scenario(
            "transitions: calls, a turn of the ring",
            [*writes(5, 5, 3, 3, 3, 5, first=9)],
            [*FULL, SAMPLE],
            [OPEN],
            family="transitions",
        ),
        Scenario(
            "transitions: clear, flush, close",
            [("clear",), *writes(4, 4, first=9), ("flush",), *writes(4, first=11), ("close",), OPEN],
            FULL,
            [OPEN],
            family="transitions",
        ),
        Scenario("transitions: open", [OPEN], [*FULL, ("sync",), *writes(5, first=9)], family="transitions"),
        Scenario("priorities: first draw", [SAMPLE, *UPDATES], [OPEN], [OPEN, *writes(4, 4, 4)], family="priorities"),
        Scenario(
            "priorities: a log that is full",
            [*UPDATES * 3, *writes(5, first=9), *UPDATES, *[("update", 9)] * 14, ("flush",), ("update", 9)],
            [*FULL, SAMPLE, *UPDATES],
            [OPEN],
            family="priorities",
        ),
        Scenario("priorities: open", [OPEN], [*FULL, SAMPLE, *UPDATES * 4], family="priorities"),
        Scenario("values: birth", [OPEN, *writes(3), ("put",)], family="values"),
        Scenario(
            "values: updates",
            [("put", 2, 3), ("put",), *writes(5, first=9), ("put",), ("flush",), *[("put", 9), ("put",)] * 2],
            [*FULL, ("put",)],
            [OPEN],
            family="values",
        ),
        Scenario("values: open", [OPEN], [*FULL, ("put",), ("put", 2)], family="values"),
        Scenario(
            "values: clear, close, open",
            [("clear",), *writes(4, 4, first=9), ("put",), ("close",), OPEN, ("put",)],
            [*FULL, ("put",)],
            [OPEN],
            family="values",
        ),
        Scenario("labels: birth", [OPEN, *writes(3)], family="labels"),
        Scenario(
            "labels: first relabelling", [("round",), ("relabel",)], [OPEN, *writes(4, 3)], [OPEN], family="labels"
        ),
        Scenario(
            "labels: again and again",
            [("round",), ("relabel", 4, 3), *writes(5, first=9), ("relabel",), ("flush",)],
            [*FULL, *[("relabel",)] * 5],
            [OPEN],
            family="labels",
        ),
        Scenario("labels: close and open", [("close",), OPEN], [*FULL, ("relabel",)], [OPEN], family="labels"),
    )
}
"""Scenarios of other buffers: what they keep besides episodes is in families.py."""


def random_scenario(seed):
    """Return a script of 14 random calls, all of which the blow may hit."""
    rng = np.random.default_rng([seed, 1])
    ops, streams, k = [OPEN], [], 0
    while len(ops) < 14:
        kind = rng.choice(
            ["write", "write", "write", "clear", "flush", "sync", "sample", "close", "begin", "append", "append", "end"]
        )
        if kind == "write":
            k += 1
            ops.append(("write", k, int(rng.choice([1, 3, 5, 6, 9, 24]))))
        elif kind == "close" and not streams:
            ops += [("close",), OPEN]
        elif kind == "begin" and len(streams) < 2:
            k += 1
            streams.append(k)
            ops += [("begin", k), ("append", k)]
        elif kind == "append" and streams:
            ops.append(("append", int(rng.choice(streams))))
        elif kind == "end" and streams:
            ops.append((str(rng.choice(["finish", "abandon"])), streams.pop(0)))
        elif kind in ("clear", "flush", "sync", "sample"):
            ops.append((str(kind),))
    options = {"interrupted": str(rng.choice(["keep", "drop"]))}
    segment = int(rng.choice([0, 200]))
    return Scenario(f"random script {seed}", ops, options=options, segment_nbytes=segment)
