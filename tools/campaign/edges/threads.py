"""Threads that write, sample, close, clear, take snapshots on one handle; and on a reader's."""

import time

from ringmap.errors import ClosedError
from tools.campaign.edges.actor import Home


def play(actor):
    """Let them all loose; close at a random moment, under their hands, and open again."""
    home = Home(actor, in_ram=actor.chance(0.15), prioritized=actor.chance(0.3))
    rng = actor.rng
    for _ in range(int(rng.integers(0, 30))):
        home.write(rng)
    shared = home.reader() if not home.in_ram and actor.chance(0.5) else None
    actor.strangers.turn(12)

    actor.begin()

    def turns(call, pause=0.0):
        """Call until the handle is closed; then it is another thread's to open one, or the end."""

        def turn(rng):
            buffer = home.buffer
            error = call(rng, buffer)
            if isinstance(error, ClosedError) or pause:
                time.sleep(pause or 0.001)
            return isinstance(error, ClosedError) and home.in_ram

        return turn

    actor.start("writer", turns(home.write))
    for i in range(int(rng.integers(1, 4))):
        actor.start(f"sampler {i}", turns(home.look))
    if shared is not None:
        readers = [shared]
        for i in range(2):
            actor.start(f"reader {i}", lambda rng: home.look(rng, readers[0]) and None)
    others = {
        "clear": home.clear,
        "snapshot": home.snapshot,
        "flush": home.flush,
        "update": home.update,
    }
    for name in rng.permutation(sorted(others))[: int(rng.integers(0, 3))]:
        actor.start(str(name), turns(others[name], float(rng.uniform(0.001, 0.03))))
    actor.start("strangers", lambda rng: actor.strangers.turn(2) or time.sleep(0.0002))

    while not actor.over:  # the closer: this thread
        time.sleep(float(rng.uniform(0.005, 0.08)))
        if shared is not None and rng.random() < 0.5:
            readers[0].close()
            readers[0] = home.reader()
        if not home.in_ram and rng.random() < 0.7:
            if home.close() is not None:
                actor.ledger.violation("refused", "close() by a thread that writes nothing was refused")
            home.buffer = home.opened()
    if actor.chance(0.5):  # under the hands of those that go on for one more turn
        home.close()
    actor.join()
    home.close()
    if shared is not None:
        readers[0].close()
