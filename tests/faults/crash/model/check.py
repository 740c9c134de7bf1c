"""Scripts, and wrong variants of the protocol; runs them in all interleavings, with a kill between any two effects."""

from dataclasses import dataclass, field
from types import ModuleType

from tests.faults.crash.model import ring, values
from tests.faults.crash.model.explore import Explorer
from tests.faults.crash.model.ring import Shape

SMALL = Shape(2, 1, 4)


@dataclass
class Script:
    """What a writer does; what the one does that opens the buffer after a kill; what a reader does beside them."""

    calls: list
    after: list
    shape: Shape = SMALL
    plan: tuple = ("read", "refresh", "read")
    power: bool = False
    hashed: bool = True
    protocol: ModuleType = ring


@dataclass
class Result:
    """`states`: pairs of a point of a writer's list and a state of a reader; `kills`, `cuts`: how many were tried."""

    states: int = 0
    kills: int = 0
    cuts: int = 0
    violations: list = field(default_factory=list)


class Violation(Exception):
    pass


def explore(script, variant="", kills=1, readers=("reader",), cuts=False):
    """Return what all interleavings of a script come to; it ends with the first violation.

    Args:
        script: the calls.
        variant: a fault that is planted.
        kills: how often a writer is killed, one after the other.
        readers: "reader", "thread"; none: only what the next writer finds is judged.
        cuts: whether the power is cut, too.
    """
    result, protocol = Result(), script.protocol
    plan = script.plan[:1] if kills else script.plan  # beside a kill a reader reads once: a third of the states
    start = protocol.birth(script.shape)
    run = protocol.Writer(script.shape, variant, power=script.power).run(script.calls)
    try:
        for kind in readers or (None,):
            first = None
            if kind is not None:
                first = (
                    protocol.Thread(script.shape, variant)
                    if kind == "thread"
                    else protocol.Reader(script.shape, plan, variant, script.hashed)
                )
            explorer = Explorer(first and first.start)
            try:
                _follow(explorer, None, run, dict(start), script, variant, kills * (kind != "thread"), result)
            finally:
                result.states += explorer.visited
        for at, disk in protocol.cuts(run, start) if cuts else ():
            result.cuts += 1
            if why := protocol.after_a_cut(run, at, disk, script.after, variant):
                raise Violation(f"cut before effect {at}: {why}")
    except Violation as error:
        result.violations.append(str(error))
    return result


def _follow(explorer, readers, run, memory, script, variant, kills, result, path=""):
    """Let a writer put its words, with the reader beside it, and kill it between any two."""
    seen, at = set(), 0

    def judge(report):
        if report not in seen:
            seen.add(report)
            if why := script.protocol.verdict(report, run):
                raise Violation(f"{path}{why}, {at} effects in")

    readers = readers or explorer.begin(memory, judge)
    for at, (address, word) in enumerate([*run.effects, (None, 0)]):
        if kills:
            result.kills += 1
            killed = f"{path}killed before effect {at}: "
            new = _after(run, memory, at, script, variant, killed)
            _follow(explorer, readers.copy(), new, dict(memory), script, variant, kills - 1, result, killed)
        if address is not None:
            memory[address] = word
            explorer.put(readers, address, word, judge)


def _after(run, memory, at, script, variant, killed):
    """Open the buffer after a kill; return the new writer, which did the calls that come then."""
    try:
        new = script.protocol.Writer(script.shape, variant, memory, run, at, script.power)
    except AssertionError as error:
        raise Violation(f"{killed}it can't be opened: {error}") from None
    if why := script.protocol.after_a_kill(new, run, at):
        raise Violation(f"{killed}{why}")
    return new.run([(name, *(1000 * killed.count("killed") + v for v in args)) for name, *args in script.after])


W = "write_episode"
SCRIPTS = {
    "eviction": Script([(W, 1), (W, 2), (W, 3), (W, 4), (W, 5)], [(W, 1)]),
    "eviction, loaded": Script([(W, 1), (W, 2), (W, 3), (W, 4)], [(W, 1)], plan=("load", "refresh", "load")),
    "eviction, not hashed": Script([(W, 1), (W, 2), (W, 3), (W, 4), (W, 5)], [(W, 1)], Shape(2, 1, 3), hashed=False),
    "retired first": Script([(W, 1), (W, 2), (W, 3, 4), (W, 5)], [(W, 1)]),
    "clear": Script([(W, 1), (W, 2), ("clear",), (W, 3), (W, 4)], [(W, 1)]),
    "parts": Script(
        [("part", "a", 1), (W, 2), ("part", "a", 3), ("end_chain", "a"), (W, 4), (W, 5)], [(W, 1)], Shape(3, 1, 6)
    ),
    "an open group": Script(
        [("append", 1), ("append", 2), (W, 3), ("append", 4), (W, 5)], [("append", 1), (W, 2)], Shape(2, 2, 5)
    ),
    "a full table": Script([(W, 1), (W, 2), (W, 3), (W, 4)], [(W, 1)], Shape(4, 1, 3)),
    "joined": Script([("joined", (1,), (2,)), ("joined", (3,), (4,)), (W, 5)], [(W, 1)], Shape(2, 2, 5)),
    "marks": Script([(W, 1), ("flush",), (W, 2), (W, 3), ("flush",), (W, 4)], [(W, 1), ("flush",)]),
    "a state that is late": Script([(W, 1), (W, 2), ("state_fails",), (W, 3), (W, 4)], [(W, 1)]),
    "power": Script([(W, 1), (W, 2), (W, 3), (W, 4)], [(W, 1)], power=True),
    "values": Script(
        [
            ("store", 1),
            ("update", 2),
            ("update", 3),
            ("sync",),
            ("update", 4),
            ("store", 5),
            ("update", 6),
            ("sync",),
        ],
        [("update", 1), ("store", 2), ("update", 3)],
        protocol=values,
    ),
    "values, evicted": Script(
        [("store", 1), ("update", 2), ("store", 3), ("store", 4), ("update", 5), ("update", 6)],
        [("update", 1), ("store", 2), ("update", 3)],
        protocol=values,
    ),
    "values, closed": Script(
        [("store", 1), ("update", 2), ("update", 3), ("reopen",), ("update", 4), ("store", 5), ("update", 6)],
        [("update", 1), ("store", 2), ("update", 3)],
        protocol=values,
    ),
    "values at power": Script(
        [("store", 1), ("update", 2), ("update", 3), ("sync",), ("update", 4), ("store", 5), ("update", 6)],
        [("update", 1), ("store", 2), ("update", 3)],
        power=True,
        protocol=values,
    ),
}


def ways_of(script, full=True):
    """Return the ways to try a script, `explore`'s options by name. `full`: with readers beside each kill, too."""
    ways = {"a reader": {"kills": 0}, "two kills": {"kills": 2, "readers": ()}}
    if script.protocol is ring:
        ways["a thread"] = {"kills": 0, "readers": ("thread",)}
    else:
        ways["power cuts"] = {"kills": 0, "readers": (), "cuts": True}
    if full:
        ways["a reader beside each kill"] = {"kills": 1}
    return ways


BY_KILLS = {"kills": 2, "readers": ()}
BY_READER = {"kills": 0}
BY_THREAD = {"kills": 0, "readers": ("thread",)}
BY_BOTH = {"kills": 1}
BY_CUTS = {"kills": 0, "readers": (), "cuts": True}

VARIANTS = [
    # what a reader leaves out
    ("no validation", "eviction", BY_READER),
    ("no validation", "retired first", BY_THREAD),
    ("no validation", "values, evicted", BY_READER),
    ("a tail that is one too low", "eviction", BY_READER),
    ("only the newest row is compared", "parts", BY_READER),
    ("one slot is enough", "eviction", BY_READER),
    ("generations loaded after the peek", "eviction", BY_READER),
    ("loads reordered", "eviction", BY_READER),
    ("no check of a record", "a full table", BY_READER),
    ("no check of a state", "eviction", BY_READER),
    ("what is read over is damage", "a full table", BY_READER),
    # what a commit does in another order, or not at all
    ("state before rows", "eviction", BY_KILLS),
    ("record before rows", "eviction", BY_KILLS),
    ("one slot", "a full table", BY_KILLS),
    ("spare rows ignored", "retired first", BY_READER),
    ("rows over before a retirement is shown", "retired first", BY_READER),
    ("rows before a state that is late", "a state that is late", BY_READER),
    ("a slot that the state still names", "a full table", BY_READER),
    ("states of joined episodes left out", "joined", BY_READER),
    ("segments deleted before the state", "eviction, loaded", BY_READER),
    # what an opening does not do
    ("the state alone counts", "eviction", BY_KILLS),
    ("generations given again", "eviction", BY_BOTH),
    ("open chains stay open", "parts", BY_KILLS),
    ("a group removed before its commit", "an open group", BY_KILLS),
    ("a group that follows anything", "an open group", BY_KILLS),
    ("frames without a check", "an open group", BY_KILLS),
    # newer values
    ("one copy", "values", BY_READER),
    ("the newest copy is written over", "values", BY_READER),
    ("no check of a copy", "values", BY_READER),
    ("copies taken once", "values", BY_READER),
    ("the header is read once", "values, closed", BY_READER),
    ("heads read once", "values at power", BY_BOTH),
    ("the position before the generation", "values at power", BY_KILLS),
    ("torn copies stay", "values", BY_KILLS),
    ("generations given again", "values, closed", BY_KILLS),
    ("values of lost rows stay", "values", BY_CUTS),
    ("a header over the synced one", "values, closed", BY_CUTS),
    ("power without a sync", "values at power", BY_CUTS),
]
"""Each wrong variant, with a script and a way to try it that finds it."""
