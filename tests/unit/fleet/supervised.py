"""Supervisors and learners as processes, and what kills them and counts what they leave."""

import contextlib
import multiprocessing
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np

import ringmap
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import RingmapError
from ringmap.storage.disk.system import System
from tests.unit.fleet import worlds
from tests.unit.world.test_rows import by_seed

SEED = 100
PATIENCE_S = 60.0


def call(path, episodes, collectors, make_world=worlds.make_world, **options):
    """Collect, with processes that need no imports of their own."""
    given = {"max_steps": 5000, "seed": SEED, "progress": False, "context": "forkserver", **options}
    ringmap.collect(make_world, path, episodes, collectors, **given)


def started(*args, **options):
    """Start a process that collects."""
    return _started(call, *args, **options)


def _started(target, *args, **options):
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=target, args=args, kwargs=options)
    process.start()
    return process


def stored(path):
    """Return what all rings below a directory hold, by seed; no seed may be there twice."""
    buf = ShardedReplayBuffer(path, wait_s=0)
    found = by_seed(buf)
    assert [shard.problem for shard in buf.shards] == [None] * len(buf.shards)
    buf.close()
    return found


def uninterrupted(episodes):
    """Return what one process gives that nobody kills, by seed."""
    world = worlds.make_world(0)
    buf = ringmap.ReplayBuffer(100 * episodes)
    world.collect(writer=buf, episodes=episodes, seed=SEED, progress=False)
    world.close()
    return by_seed(buf)


def pids(path):
    """Return number -> process of each collector that was ever started, the last one of each."""
    found = {}
    for log in Path(path, "collect").glob("collector-*.log"):
        heads = re.findall(r"^-- collector (\d+), process (\d+),", log.read_text(), re.MULTILINE)
        found |= {int(number): int(pid) for number, pid in heads}
    return found


def said(path, word):
    """Tell whether a collector printed a word."""
    return any(word in log.read_text() for log in Path(path, "collect").glob("*.log"))


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(what, *args):
    """Wait until something is true; fail if it never is."""
    end = time.monotonic() + PATIENCE_S
    while not (found := what(*args)):
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)
    return found


def all_gone(path):
    return not any(map(is_alive, pids(path).values()))


def committed(path):
    """Return how many episodes were ever committed to all rings: their tables count them, evicted or not."""
    born = Path(path).glob("*/manifest.json")  # before that, a table may be half made
    tables = [np.load(made.with_name("episodes.npy"), mmap_mode="r") for made in born]
    return sum(int((t["kind"][t["seq"] > 0] == 1).sum()) for t in tables)


def is_written(path):
    return any(System().is_locked(str(lock)) for lock in Path(path).glob("collector-*/lock"))


def learn(path, said):
    """Draw, look at every clip, and count, until killed."""
    buf = ShardedReplayBuffer(path, history_len=2, wait_s=PATIENCE_S, seed=0)
    drawn = 0
    while True:
        try:
            clips = buf.sample(64)["observation"]
        except RingmapError:  # no episode yet that is long enough
            time.sleep(0.01)
            continue
        torn = (clips[:, 0, 0] != clips[:, 1, 0]) | (clips[:, 0, 1] + 1 != clips[:, 1, 1])
        drawn += len(clips)
        said.send((drawn, int(torn.sum())))
        time.sleep(0.002)  # processor time is for the collectors


class Learner:
    """A process that draws, and what it said."""

    def __init__(self, path):
        self.drawn = self.torn = 0
        self.heard, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
        self.process = _started(learn, path, theirs)
        theirs.close()

    def end(self):
        """Kill it, and return how many clips it drew, and how many of them were torn."""
        self.process.kill()
        self.process.join()
        try:
            while self.heard.poll():
                self.drawn, self.torn = self.heard.recv()
        except EOFError:
            pass
        self.heard.close()
        return self.drawn, self.torn


def campaign(path, rng, kills, episodes, **options):
    """Kill collectors, the learner, the supervisor, or all, at random moments, then let the last call finish.

    Args:
        path: of the rings.
        rng: chooses.
        kills: how many. A moment is soon after the last one, or some episodes later.
        episodes: at least 15 for each kill.
        options: for the collection.

    Returns:
        How often each was killed; how many clips the learners drew, and how many of these were torn.
    """
    victims = [("collector", "learner", "supervisor", "all")[n % 4] for n in range(kills)]
    rng.shuffle(victims)
    counts, drawn, torn = dict.fromkeys(victims, 0), 0, 0
    make_world = partial(worlds.make_world, pause_s=0.001)
    old = set()  # of supervisors that were killed
    path.mkdir()

    def begin():
        return started(path, episodes, rng.randint(1, 6) if old else 4, make_world, **options)

    def alive():
        return [pid for pid in pids(path).values() if pid not in old and is_alive(pid)]

    supervisor, learner = begin(), Learner(path)
    for victim in victims:
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.1)
        else:
            enough = committed(path) + rng.randint(0, 25)
            until(lambda enough=enough: committed(path) >= enough)
        if victim == "collector":
            os.kill(rng.choice(until(alive)), signal.SIGKILL)
        if victim in ("learner", "all"):
            more, odd = learner.end()
            drawn, torn = drawn + more, torn + odd
        if victim in ("supervisor", "all"):
            assert supervisor.is_alive(), "it was done too soon"
            supervisor.kill()
            orphans = alive()
            for pid in orphans if victim == "all" else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            supervisor.join()
            old |= {0, *orphans}
            supervisor = begin()  # at once: orphans may still be ending
        if victim in ("learner", "all"):
            learner = Learner(path)
        counts[victim] += 1
    supervisor.join()
    assert supervisor.exitcode == 0
    more, odd = learner.end()
    until(all_gone, path)
    assert not is_written(path)
    return counts, drawn + more, torn + odd
