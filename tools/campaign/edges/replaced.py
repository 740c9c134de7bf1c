"""The directory is removed, renamed, or another buffer put in its place, in mid-run."""

import contextlib
import functools
import hashlib
import os
import pickle
import shutil
import signal
import sys
import time
import traceback

from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    NotFoundError,
    ReplacedError,
    RoleError,
    UnknownFormatError,
)
from ringmap.storage.read import reader as live_reader
from tools.campaign.edges.actor import MAY_RAISE, Home, leave

HOWS = "removed", "renamed", "removed, made anew", "renamed, made anew"
LOOKS = 60
DURING = (*MAY_RAISE, ReplacedError, EnvironmentFault, CorruptError, OSError)
AFTER = (*MAY_RAISE, ReplacedError)


class Swap:
    """Whether the directory has been replaced: until then anything clear may be raised, from then on one thing only."""

    def __init__(self):
        self.begun = self.done = False

    def allowed(self):
        """Return what a read that begins now may raise."""
        return AFTER if self.done or not self.begun else DURING


def play(actor):
    live_reader.HELD_S = 0.0  # a reader may show what was there for as long
    rng = actor.rng
    home = Home(actor)
    for _ in range(25):
        home.write(rng)
    swap, how = Swap(), actor.pick(HOWS, [1, 1, 3, 3])
    readers = [home.reader() for _ in range(2)]
    copies = [pickle.dumps(one) for one in (home.buffer, readers[0])]
    actor.strangers.turn(8)
    child = child_that_reads(actor, home, readers[0] if actor.chance(0.5) else home.buffer)

    def reading(buffer):
        def turn(rng):
            # Ten errors for one: what began before the swap may end after it.
            with contextlib.suppress(*DURING if swap.begun else ()):
                return isinstance(home.look(rng, buffer, DURING), ReplacedError)

        return turn

    def writing(rng):
        if swap.begun:
            return True
        with_patience(home, lambda: home.write(rng))
        return False

    actor.begin()
    actor.latest += 60.0
    actor.start("writer", writing)
    for number, reader in enumerate(readers):
        actor.start(f"reader {number}", reading(reader))
    time.sleep(float(rng.uniform(0.0, 0.08)))
    while actor.ledger.done - actor.done_before < 20 and time.monotonic() < actor.latest:
        time.sleep(0.001)  # on a busy machine the others may not have had their turn
    swap.begun = True
    if actor.chance(0.5):
        actor.threads[0].join()  # else the writer may be in the middle of a call
    target = os.path.join(actor.folder, "moved")
    if how.startswith("removed"):
        home.gone()
        shutil.rmtree(home.path, ignore_errors=True)
    else:
        os.rename(home.path, target)
        home.moved_to(target)
    other, before = None, None
    actor.threads[0].join()
    if how.startswith("removed"):  # a call in flight may have put files into what was being removed
        shutil.rmtree(home.path, ignore_errors=True)
    if how.endswith("anew"):
        alike = {name: home.settings[name] for name in ("storage", "spare_rows", "history_len")}
        other = Home(actor, world=1, like=home, **alike)
        for _ in range(12):
            other.write(rng)
        other.buffer.close()
        before = tree(home.path)
    swap.done = True
    actor.ledger.tally("replaced")
    renamed = how == "renamed"
    go_on(actor, home, rng, renamed)
    time.sleep(0.02)
    actor.stop.set()
    actor.join()
    for number, reader in enumerate(readers):
        ids_of_a_reader(actor, home, reader, number, renamed)
        home.plain("close of a reader", reader.close)
    for number, copy in enumerate(copies):
        wakes(actor, home, copy, number)
    os.kill(child, signal.SIGUSR1)
    _, status = os.waitpid(child, 0)
    if status:
        actor.ledger.violation("child", f"a reading child ended with {os.waitstatus_to_exitcode(status)}; see the log")
    home.plain("close of the writer", home.buffer.close)
    if before is not None:
        after = tree(home.path)
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        if changed:
            actor.ledger.violation("replaced", f"{how}: in the new buffer these files were changed: {changed}")


def with_patience(home, call):
    """Make a call that the swap may hit in the middle."""
    home.patient = True
    call()
    home.patient = False


def go_on(actor, home, rng, renamed):
    """Let the old writer do what a program would that noticed nothing."""
    told = []
    for _ in range(10):
        told.append(home.write(rng))
    calls = [home.flush, home.stream, home.snapshot, home.clear, home.look]
    for at in rng.permutation(len(calls)):
        call = calls[at]
        told.append(call(rng, None, AFTER) if call == home.look else call(rng))
    told.append(home.flush(rng))
    if any(isinstance(error, ReplacedError) for error in told):
        actor.ledger.tally("told so")
    elif not renamed:
        actor.ledger.violation("went on", f"ten writes, flush, clear and others: no ReplacedError, but {told}")
    for error in told:
        if isinstance(error, RoleError) and not isinstance(error, ReplacedError):
            actor.ledger.violation("error", f"after the swap: {error!r}")


def ids_of_a_reader(actor, home, reader, number, renamed):
    """By id, a reader must notice in the end."""
    errors = [
        actor.read("buffer[i]", functools.partial(reader.__getitem__, i), home.world, 1, AFTER) for i in range(LOOKS)
    ]
    if not renamed and not any(isinstance(error, ReplacedError) for error in errors):
        actor.ledger.violation(
            "stale",
            f"reader {number} never raised ReplacedError in {LOOKS} reads by id: {errors[-1]!r}",
        )


def wakes(actor, home, copy, number):
    """Unpickle what was pickled before: it is a reader of the old buffer, or nothing."""
    try:
        buffer = pickle.loads(copy)
    except (ReplacedError, NotFoundError, UnknownFormatError):
        return
    except Exception:
        actor.ledger.violation("error", f"unpickling copy {number}: {traceback.format_exc(limit=-6)}")
        return
    for _ in range(4):
        home.look(actor.rng, buffer, AFTER)
    buffer.close()


def child_that_reads(actor, home, buffer):
    """Fork a process that reads until it is told to end, and never anything but the old buffer."""
    actor.ledger.tally("forks")
    pid = os.fork()
    if pid:
        return pid
    try:
        ended = []
        signal.signal(signal.SIGUSR1, lambda *_: ended.append(1))
        rng = actor.fork("child")
        deadline = time.monotonic() + 60
        while not ended and time.monotonic() < deadline:
            home.look(rng, buffer, DURING)
        for _ in range(5):
            home.look(rng, buffer, DURING)
        leave(0 if ended else 4)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    leave(1)
    raise AssertionError


def tree(path):
    """Return name -> digest of all files."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            inner = os.path.join(folder, name)
            with open(inner, "rb") as file:
                found[os.path.relpath(inner, path)] = hashlib.blake2b(file.read()).hexdigest()
    return found
