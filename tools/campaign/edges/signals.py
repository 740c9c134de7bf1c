"""Signal handlers at random moments of whatever the main thread does."""

import contextlib
import signal

from ringmap.errors import ClosedError, RoleError
from tools.campaign.edges.actor import MAY_RAISE, Ended, Home, Raised

CALLS = ("close", "flush", "write", "look", "clear", "snapshot", "stream")


class Handler:
    """Makes a call, or raises, whenever SIGALRM or SIGTERM comes; and asks for the next SIGALRM.

    Args:
        actor: of the round.
        home: the buffer that its calls are of.
        kinds: what it does, each as likely.
    """

    def __init__(self, actor, home, kinds):
        self.actor, self.home, self.kinds = actor, home, kinds
        self.rng = actor.fork("handler")
        self.armed = False
        """Whether a call of the buffer is under way, which may be interrupted."""
        self.may_be_closed = False
        self.depth = 0
        self.share = float(self.rng.uniform(0.1, 1.0))
        """Of the signals that it does something at: else a round of closes would be one of openings."""

    def install(self):
        signal.signal(signal.SIGALRM, self)
        signal.signal(signal.SIGTERM, self)
        self.again()

    def again(self):
        signal.setitimer(signal.ITIMER_REAL, 10 ** self.rng.uniform(-4.3, -2.3))

    def remove(self):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def __call__(self, signum, frame):
        if not self.armed or self.depth or self.rng.random() > self.share:
            self.again()
            return
        self.actor.ledger.tally("signals")
        kind = self.kinds[int(self.rng.integers(len(self.kinds)))]
        if kind in ("raise", "exit"):
            self.armed = False
            self.actor.ledger.tally("raised")
            self.again()
            raise Raised if kind == "raise" else Ended
        self.depth += 1
        try:
            self.call(kind)
            self.actor.strangers.turn(2)  # take the descriptors that it gave back, if any
        finally:
            self.depth -= 1
            self.again()

    def call(self, kind):
        if kind == "close":
            if self.home.close() is None:
                self.may_be_closed = True
        elif kind == "look":
            self.home.look(self.rng, None, (*MAY_RAISE, RoleError), threads=False)
        else:
            getattr(self.home, kind)(self.rng)

    def during(self, call, *args):
        """Make a call under signals; tell whether it was left by an exception of the handler's. Return that and its
        error."""
        try:
            self.armed = True
            error = call(*args)
            self.armed = False
        except (Raised, Ended):
            return True, None
        finally:
            self.armed = False
        return False, error


def play(actor):
    """Write, flush, clear, snapshot, close and open again, while handlers strike."""
    raises = actor.told.raises
    kinds = ["raise", "exit"] if raises else []
    if not raises or actor.chance(0.3):
        kinds += [str(kind) for kind in actor.rng.choice(CALLS, int(actor.rng.integers(1, 4)), replace=False)]
    home = Home(actor, in_ram=actor.chance(0.15), prioritized=actor.chance(0.2))
    handler = Handler(actor, home, kinds)
    rng = actor.rng
    reader = None if home.in_ram else home.reader()
    actor.strangers.turn(12)
    handler.install()
    actor.begin()
    while not actor.over:
        what = actor.pick(
            ["write", "stream", "flush", "look", "clear", "snapshot", "update", "close"],
            [14, 2, 4, 3, 1, 0.5, 1, 1],
        )
        call = (
            home.close if what == "close" and not home.in_ram else getattr(home, "write" if what == "close" else what)
        )
        interrupted, error = handler.during(call, *(() if call == home.close else (rng,)))
        if call == home.close and (error is None or interrupted):
            handler.may_be_closed = True
        if isinstance(error, ClosedError) and not handler.may_be_closed:
            actor.ledger.violation("closed", f"{what}: {error}; but no close() had returned: one was refused")
            handler.may_be_closed = True
        elif isinstance(error, RoleError) and not isinstance(error, ClosedError) and not handler.depth:
            actor.ledger.violation("refused", f"{what}, in the middle of no other call: {error}")
        if handler.may_be_closed:
            if home.in_ram:
                break
            with contextlib.suppress(RoleError):
                home.buffer.close()
            home.buffer = home.opened()
            handler.may_be_closed = False
        actor.strangers.turn()
        if reader is not None and rng.random() < 0.2:
            home.look(rng, reader)
    handler.remove()
    if reader is not None:
        reader.close()
    if home.close() is not None:
        actor.ledger.violation("refused", "close() at the end was refused")
