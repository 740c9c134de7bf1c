"""Forks at random moments, while threads sample and write; workers of a loader."""

import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings

from ringmap.errors import NoClipsError, ReadOnlyError
from tools.campaign.edges.actor import Home, leave
from tools.campaign.edges.proof import made, wrong

HANGS_S = 20.0


def play(actor):
    warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later: a fork of a process with threads
    rng = actor.rng
    loader = actor.told.loader
    home = Home(actor, in_ram=not loader and actor.chance(0.4), prioritized=actor.chance(0.5))
    for _ in range(20):
        home.write(rng)
    reader = home.reader() if not home.in_ram and actor.chance(0.5) else None
    forked = home.buffer if reader is None else reader
    actor.begin()
    actor.start("writer", lambda rng: home.write(rng) and None)
    for i in range(2):
        actor.start(f"sampler {i}", lambda rng: home.look(rng, forked) and None)
    if actor.chance(0.4):
        actor.start("flush", lambda rng: home.flush(rng) or time.sleep(0.002))
    if loader:
        workers(actor, home, forked)
    else:
        while not actor.over:
            children = [child(actor, home, forked) for _ in range(int(rng.integers(1, 4)))]
            for pid in children:
                wait(actor, pid)
            actor.strangers.turn(2)
            time.sleep(float(rng.uniform(0, 0.005)))
    actor.stop.set()
    actor.join()
    if reader is not None:
        reader.close()
    home.close()


def child(actor, home, buffer):
    """Fork a process that samples five batches, is refused to write, and ends."""
    actor.ledger.tally("forks")
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for sig in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(sig, signal.SIG_DFL)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        done = 0
        for _ in range(200):
            try:
                batch = buffer.sample(16)
            except NoClipsError:
                continue
            if fault := wrong(batch, home.world):
                print(f"in a forked child: {fault}", file=sys.stderr)
                leave(3)
            done += 1
            if done == 5:
                break
        try:
            buffer.write_episode(made(999_999, 3, home.words))
        except ReadOnlyError:
            code = 0
        else:
            print("a forked child could write", file=sys.stderr)
        buffer.close()
        faulthandler.cancel_dump_traceback_later()
    except BaseException:
        traceback.print_exc()
    leave(code)
    raise AssertionError


def wait(actor, pid):
    _, status = os.waitpid(pid, 0)
    if status:
        actor.ledger.violation(
            "child",
            f"a forked child that sampled ended with {os.waitstatus_to_exitcode(status)}; see the log",
        )


def workers(actor, home, buffer):
    """Go through a DataLoader, over the writer's handle or a reader's, while it is written."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    for method in ["fork", "fork"] if actor.chance(0.9) else ["spawn"]:
        sampler = buffer.pass_sampler() if actor.chance(0.3) else torch.utils.data.RandomSampler(range(30))
        loading = DataLoader(
            buffer,
            batch_size=8,
            sampler=sampler,
            num_workers=2,
            multiprocessing_context=method,
            timeout=60,
        )
        for number, batch in enumerate(loading):
            actor.ledger.tally("forks", 2 if number == 0 else 0)
            actor.proved("DataLoader", batch, home.world, 2)
            if number == 12:
                break
        del loading
