"""Calls inside calls, counted: each public call, at each place where code of a user runs in the middle of ours.

    python -m tools.campaign.inside --every 41
    python -m tools.campaign.inside --only handler,fork --calls sample,flush --under-way write_episode

    callable, loop      it is made by a sampler, a condition ..., in the body of a loop
    handler, finalizer  at each line of what is under way
    fork                there too, in a child

A row says how often the call worked, and what refused it. What is under way goes on, and afterwards the buffer and its
copies hold what the calls that worked had stored, in one order or the other: anything else is `wrong`, and what takes a
minute `hangs`. Each pair of a call and a place has a process of its own.

Lines are those before which CPython may run a handler; `--blow calls` strikes after each call within them, too.
"""

import argparse
import gc
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from ringmap import Column, ReplayBuffer, TransitionReplayBuffer
from ringmap.buffers import engine as engines
from ringmap.data import Window
from ringmap.errors import ClipIndexError, ClosedError, InputError, NoClipsError, RoleError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.commit import store as commits
from ringmap.storage.commit.store import Store
from ringmap.storage.disk import calls
from tests.disks import ram_folder
from tests.faults.crash.kill.blows import PACKAGE, AfterCall, AtLine
from tests.unit.buffers.processes import Child

HANGS_S = 60
SCHEMA = {"x": ((), "i8"), "value": Column((), "f4", mutable=True)}


def episode(number, steps=10):
    return {"x": np.arange(steps) + 1000 * number, "value": np.zeros(steps, np.float32)}


class World:
    """A buffer with episodes and a stream, what reads it, and other buffers."""

    def __init__(self, root, durability="process", storage="memmap"):
        shutil.rmtree(root, ignore_errors=True)
        os.makedirs(root)
        self.root, self.path, self.made = root, os.path.join(root, "buf"), 0
        options = {"spare_rows": 40, "sync_every_s": 0, "seed": 0, "schema": SCHEMA, "durability": durability}
        options["storage"] = {"x": storage}
        self.buf = ReplayBuffer(200, 2, path=self.path, sampler=PrioritizedSampler(rng=0), **options)
        self.buf.write_episodes(map(episode, range(5)))
        self.stream = self.buf.begin_episode()
        self.append()
        self.reader = ReplayBuffer.open(self.path, seed=0)
        self.buf.write_episode(episode(5))
        self.view, self.live = self.buf.view(), self.buf.view(live=True)
        self.drawn, self.ids, self.state = self.buf.sample(4).ids, np.arange(4), self.buf.state_dict()
        self.other = ReplayBuffer(99, seed=0)
        self.other.write_episode(episode(7))
        self.done = []  # what worked, by name
        self.steps = TransitionReplayBuffer(64, (1,), device=None, seed=0)
        self.add()

    def call(self, name):
        """Make a call of the table, and note that it worked."""
        CALLS[name](self)
        self.done.append(name)

    def append(self):
        self.stream.append({"x": 9000, "value": 0.0})

    def add(self):
        self.steps.add(np.zeros(1), 0, 0.0, np.ones(1), False)

    def new(self, name):
        """Return a path where nothing is yet."""
        self.made += 1
        return os.path.join(self.root, f"{name}-{os.getpid()}-{self.made}")

    def end(self):
        """Go on, close everything, and look at what is there."""
        with suppress(ClosedError):  # a close in the middle of a search is done by the next call
            self.buf.write_episode(episode(8))
        if not self.reader.engine.is_closed:
            self.reader.refresh()
            assert self.reader.engine.reader.index.check() == []
        for one in (self.buf, self.reader, self.other, self.steps):
            one.close()
        allowed = [stored_after(self.done), stored_after(self.done[::-1])]
        with ReplayBuffer.open(self.path, "r+") as again:
            assert again.check() == []
            found = numbers_in(again)
            assert found - Counter([8]) in allowed, f"{found} after {self.done}"
            again.write_episode(episode(8))
        before = [*allowed, stored_after([]), *(stored_after([name]) for name in self.done)]
        for copy in Path(self.root).glob("copy-*"):
            with ReplayBuffer.open(copy) as copied:
                assert numbers_in(copied) in before, f"a copy has {numbers_in(copied)} after {self.done}"


def numbers_in(buffer):
    """Return how often each number is stored, each episode proven."""
    found = Counter()
    for one in buffer.episodes():
        x = np.stack(one["x"])
        assert (np.diff(x) == (x[0] // 1000 != 9)).all(), f"an episode mixes rows: {x}"
        found[int(x[0]) // 1000] += 1
    return found


STORES = {
    "write_episode": [20],
    "write_episode(sync=False)": [20],
    "write_episodes": [20, 21],
    "write_joined": [20, 20],
    "extend_from": [7],
    "finish": [9],
    "30": [30],
    "31": [31],
}
"""Name of a call -> numbers of the episodes that it stores."""


def stored_after(done):
    """Return how often each number is stored once these calls had their effect."""
    stored = Counter(range(6))
    for name in done:
        stored = Counter() if name == "clear" else stored + Counter(STORES.get(name, []))
    return stored


def whole(batch):
    """Raise unless each clip has rows of one episode, in order."""
    x = batch["x"]
    assert (np.diff(x) == (x[:, :1] // 1000 != 9)).all(), f"a clip mixes rows: {x}"


def join(w):
    if not w.buf.write_joined(episode(20), [4, 6]):
        raise RoleError("none of them was stored: the caller stores them one by one")


CALLS = {
    "write_episode": lambda w: w.buf.write_episode(episode(20)),
    "write_episode(sync=False)": lambda w: w.buf.write_episode(episode(20), sync=False),
    "write_episodes": lambda w: w.buf.write_episodes([episode(20), episode(21)]),
    "write_joined": join,
    "extend_from": lambda w: w.buf.extend_from(w.other),
    "begin_episode": lambda w: w.buf.begin_episode(),
    "append": World.append,
    "finish": lambda w: w.stream.finish(),
    "abandon": lambda w: w.stream.abandon(),
    "update": lambda w: w.buf.update(w.ids, {"value": np.ones(4)}),
    "update_priorities": lambda w: w.buf.update_priorities(w.drawn, np.ones(4)),
    "clear": lambda w: w.buf.clear(),
    "flush": lambda w: w.buf.flush(),
    "close": lambda w: w.buf.close(),
    "snapshot": lambda w: w.buf.snapshot(w.new("copy")),
    "dump": lambda w: w.buf.dump(w.new("dump") + ".h5", progress=False),
    "check": lambda w: w.buf.check(),
    "state_dict": lambda w: w.buf.state_dict(),
    "load_state_dict": lambda w: w.buf.load_state_dict(w.state),
    "sync_behind": lambda w: w.buf.engine.owned.sync_behind(),
    "sample": lambda w: whole(w.buf.sample(4)),
    "sample(window=)": lambda w: w.buf.sample(4, window={"x": Window([0, 1])}),
    "batches": lambda w: next(iter(w.buf.batches(4, prefetch=0))),
    "batches ahead": lambda w: next(iter(w.buf.batches(4))),
    "episodes": lambda w: list(w.buf.episodes()),
    "buf[0]": lambda w: w.buf[0],
    "__getitems__": lambda w: w.buf.__getitems__([0, 1]),
    "len": lambda w: len(w.buf),
    "num_episodes": lambda w: w.buf.num_episodes,
    "num_steps_stored": lambda w: w.buf.num_steps_stored,
    "num_valid_ends": lambda w: w.buf.num_valid_ends(),
    "lengths": lambda w: w.buf.lengths,
    "clip_indices": lambda w: w.buf.clip_indices,
    "locate": lambda w: w.buf.locate(w.ids),
    "notes": lambda w: w.buf.notes,
    "load_episode": lambda w: w.buf.load_episode(0),
    "load_steps": lambda w: w.buf.load_steps(0, 0, 4),
    "get_col_data": lambda w: w.buf.get_col_data("x"),
    "get_row_data": lambda w: w.buf.get_row_data(0),
    "get_episode_data": lambda w: w.buf.get_episode_data(0),
    "view": lambda w: w.buf.view(),
    "view(where=)": lambda w: w.buf.view(where="length >= 0"),
    "take": lambda w: w.buf.take([0]),
    "split": lambda w: w.buf.split(0.5),
    "pass_sampler": lambda w: list(w.buf.pass_sampler()),
    "view.sample": lambda w: w.view.sample(4),
    "view[0]": lambda w: w.view[0],
    "live.refresh": lambda w: w.live.refresh(),
    "reader.sample": lambda w: whole(w.reader.sample(4)),
    "reader.refresh": lambda w: w.reader.refresh(),
    "reader.close": lambda w: w.reader.close(),
    "reader, pickled": lambda w: pickle.loads(pickle.dumps(w.reader)),
    "open": lambda w: ReplayBuffer.open(w.path).close(),
    "a new one": lambda w: ReplayBuffer(99, path=w.new("new")).close(),
    "other.write_episode": lambda w: w.other.write_episode(episode(20)),
    "other.sample": lambda w: w.other.sample(4),
    "transitions.add": World.add,
    "transitions.sample": lambda w: w.steps.sample(1),
    "transitions.close": lambda w: w.steps.close(),
}
UNDER_WAY = [
    "write_episode",
    "append",
    "finish",
    "abandon",
    "update",
    "update_priorities",
    "clear",
    "flush",
    "close",
    "snapshot",
    "sync_behind",
    "sample",
    "load_episode",
    "reader.sample",
    "reader.refresh",
    "transitions.add",
]

# -- places: each takes the world and what is called there ------------------------------------------------------------


def once(call, value):
    """Return a callable that calls the first time: one that draws with itself, ahead, would do so for ever."""
    left = [call]
    return lambda *_: (left.pop()() if left else None, value)[1]


class Calling(PrioritizedSampler):
    """Calls, then draws."""

    def __init__(self, act):
        super().__init__(rng=0)
        self.act = act

    def __call__(self, *args):
        self.act()
        return super().__call__(*args)


def sampled(make):
    def place(w, call):
        left = []
        w.buf.sampler = make(lambda: left.pop()() if left else None)
        w.drawn, w.state = w.buf.sample(4).ids, w.buf.state_dict()
        left.append(call)
        w.buf.sample(3)

    return place


def transform(w, call):
    act = once(call, None)
    w.buf.transform = lambda clip: (act(), clip)[1]
    w.buf[0]


def generator(w, call):
    def episodes():
        yield episode(30)
        w.done.append("30")  # it is stored when the next one is asked for
        call()
        yield episode(31)

    w.buf.write_episodes(episodes())
    w.done.append("31")


def loop(make, last=3):
    def place(w, call):
        rest = iter(make(w))
        for number, _ in zip(range(last), rest, strict=False):
            if number == 1:
                call()
        getattr(rest, "close", list)()

    return place


PLACES = {
    "callable: sampler": sampled(Calling),
    "callable: schedule": sampled(lambda act: PrioritizedSampler(beta=lambda step: (act(), 0.4)[1], rng=0)),
    "callable: transform": transform,
    "callable: window": lambda w, call: w.buf.sample(3, window={"x": Window([0]), "n": once(call, np.zeros(3))}),
    "callable: where": lambda w, call: w.buf.view(where=once(call, True)),
    "loop: generator of write_episodes": generator,
    "loop: episodes()": loop(lambda w: w.buf.episodes(), 99),
    "loop: episodes(), left": loop(lambda w: w.buf.episodes()),
    "loop: batches()": loop(lambda w: w.buf.batches(4, prefetch=0)),
    "loop: batches() ahead": loop(lambda w: w.buf.batches(4)),
    "loop: batches() of a view": loop(lambda w: w.view.batches(4, prefetch=0)),
}


OURS = tuple(str(PACKAGE / part) + os.sep for part in ("storage", "buffers", "clips"))


class AtOurLine(AtLine):
    paths = OURS


class AfterOurCall(AfterCall):
    paths = OURS
    forgiving = False


BLOWS = {"lines": AtOurLine, "calls": AfterOurCall}


def at_line(kind, under, at, blows, how="lines"):
    """Return a place: a line of what is under way. `blows` takes what struck there."""

    def place(w, call):
        blow = BLOWS[how](at, lambda _: STRIKES[kind](call))
        blows.append(blow)
        blow.arm()
        try:
            w.call(under)
        finally:
            blow.disarm()

    return place


class Twice:
    """A lock that a thread takes twice."""

    def __init__(self):
        self._lock = threading.RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def locked(self):
        return False

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


def without_the_gate():
    """Let calls into one another, as once."""
    begin = Store.__init__

    def careless(store, *args, **options):
        begin(store, *args, **options)
        store._mutex, store._syncing, store.lock = Twice(), Twice(), Twice()

    Store.__init__ = careless
    for module in (commits, engines, calls):
        module.refuse_nested = lambda where: None
    for module in (commits, engines):
        module.note_nested = lambda call: False
    calls._Thread.is_marked = property(lambda thread: False)
    calls.thread.searching = Twice()


class Owner:
    def __init__(self, call):
        self.__del__, self.call = None, call

    def __del__(self):
        self.call()


def finalizer(call):
    owner = [Owner(call)]
    owner.clear()
    gc.collect(0)


def fork(call):
    """Call in a child, which tells us how that ended."""

    def child(_):
        sys.settrace(None)
        signal.alarm(HANGS_S)
        COUNTS.clear()
        call()
        return COUNTS

    COUNTS.update(in_a_child(child))


STRIKES = {"handler": lambda call: call(), "finalizer": finalizer, "fork": fork}

# -- what comes of it -------------------------------------------------------------------------------------------------

COUNTS = Counter()
# InputError: a sampler that was closed meanwhile has drawn nothing.
REFUSALS = {
    "": (RoleError, NoClipsError, ClipIndexError),
    "under way: ": (RoleError, NoClipsError, ClipIndexError, InputError),
    "interrupted: ": (),
    "at the end: ": (),
}


def tell(who, do, *args):
    """Do it, and count how it ended."""
    try:
        do(*args)
    except REFUSALS[who] as error:
        COUNTS[f"{who}{type(error).__name__}"] += 1
    except BaseException as error:
        COUNTS[f"wrong: {who}{type(error).__name__}: {error}"[:200]] += 1
    else:
        COUNTS[who + "works"] += not who


ENDS = {"close", "reader.close", "transitions.close"}
"""Calls after which what they interrupted may be refused; after any other one it goes on."""


def play(sizes, name, places, is_interrupted, _child):
    COUNTS.clear()
    under_way = "interrupted: " if is_interrupted and name not in ENDS else "under way: "
    for place in places:
        signal.alarm(HANGS_S)
        w = World(*sizes)
        tell(under_way, place, w, partial(tell, "", w.call, name))
        tell("at the end: ", w.end)
    signal.alarm(0)
    return +COUNTS


def in_a_child(work):
    """Return what it counts in a child, whose own alarm kills it where it hangs."""
    try:
        return Child(work).result()
    except EOFError:
        return Counter(hangs=1)


def lines_of(sizes, under, how):
    """Return the numbers of the lines of a call at which a handler may run."""
    blows = []
    at_line("handler", under, 0, blows, how)(World(*sizes), None)
    return [number for number, (_, can) in enumerate(blows[0].places, 1) if can]


def main(words=None):
    parser = argparse.ArgumentParser(prog="python -m tools.campaign.inside", description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="of the lines; each call has others")
    parser.add_argument("--durability", default="process")
    parser.add_argument("--storage", default="memmap")
    parser.add_argument("--blow", choices=BLOWS, default="lines")
    parser.add_argument("--only", default="callable,loop,handler,finalizer,fork")
    parser.add_argument("--calls", default=";".join(CALLS), help="A;B")
    parser.add_argument("--under-way", default=",".join(UNDER_WAY))
    parser.add_argument("--without-the-gate", action="store_true", help="a control: it must be wrong")
    options = parser.parse_args(words)
    warnings.simplefilter("ignore")
    names, kinds, total, began = options.calls.split(";"), options.only.split(","), Counter(), time.monotonic()
    if options.without_the_gate:
        without_the_gate()
    with ram_folder() as folder:
        sizes = os.path.join(folder, "w"), options.durability, options.storage
        for name in {*names, *options.under_way.split(",")}:  # what the first call imports is no line of it
            w = World(*sizes)
            w.call(name)
            w.end()

        def row(what, places_of, is_interrupted=False):
            counts = Counter()
            for number, name in enumerate(names):
                found = in_a_child(partial(play, sizes, name, places_of(number), is_interrupted))
                for how in [how for how in found if how.startswith(("wrong", "hangs"))]:
                    print(f"{name}, {what}: {how} ({found[how]})", flush=True)
                counts.update(
                    {how.partition(":")[0] if how.startswith("wrong") else how: n for how, n in found.items()}
                )
            total.update(counts)
            print(f"| {what} |", ", ".join(f"{how} {n:,}" for how, n in counts.most_common()), "|", flush=True)

        for what, place in PLACES.items():
            if what.partition(":")[0] in kinds:
                row(what, lambda _, place=place: [place])
        for kind in [kind for kind in STRIKES if kind in kinds]:
            for under in options.under_way.split(","):
                lines = in_a_child(lambda _, under=under: lines_of(sizes, under, options.blow))
                places = [at_line(kind, under, at, [], options.blow) for at in lines]
                first = min(options.every, len(lines)) / len(names)
                row(
                    f"{kind} in {under}, {len(lines)} lines",
                    lambda n, p=places, f=first: p[int(n * f) :: options.every],
                    is_interrupted=True,
                )
    print(f"| all of {len(names)} calls |", ", ".join(f"{how} {n:,}" for how, n in total.most_common()), "|")
    print(f"hangs {total['hangs']}, wrong {total['wrong']}; {time.monotonic() - began:.0f} s")
    return int(bool(total["hangs"] or total["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
