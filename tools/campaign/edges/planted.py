"""Bugs, planted in an actor, one at a time: each must be caught.

Planted at seams that stay: a method is replaced, what it replaces is called. One that finds nothing to replace says so.
"""

import gc
import itertools

from ringmap.buffers.distillation.buffer import DistillationBuffer
from ringmap.buffers.offline_to_online import sources as halves
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.transitions.lanes import NextObservations
from ringmap.errors import RoleError
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.reader import Reader
from tests.faults.concurrency.handlers import without_the_gate
from tools.campaign.edges import others


def close_abandons():
    """`close` raises that it was refused, and gives everything back all the same."""
    close = ReplayBuffer.close

    def careless(buffer):
        try:
            close(buffer)
        except RoleError:
            buffer.engine.owned._closed = True
            buffer.engine.owned.close_files()
            raise

    ReplayBuffer.close = careless


def descriptors_closed():
    """`close` gives descriptors back while other threads read by them."""

    def giving_back(method):
        def careless(source):
            inside = source.folder + "/"
            held = [o for o in gc.get_objects() if type(o) is File and getattr(o, "path", "").startswith(inside)]
            method(source)
            for handle in held:
                handle.close()

        return careless

    for kind, name in ((Store, "close_files"), (Reader, "close")):
        setattr(kind, name, giving_back(getattr(kind, name)))


def any_head():
    """What the newest call led to is handed out for whatever head the rows were read under."""

    def careless(beside, source, head):
        return beside.newest(source)._replace(stop=head)

    NextObservations._of_newest = careless


def generators_kept():
    """A forked child draws with the parent's generators, whose locks a thread may have held."""
    from ringmap.storage.disk.process import Forkable

    Forkable.reset_after_fork = lambda made, renewed: None


def no_identity():
    """Nobody looks whether the directory is still the one that was opened."""
    if hasattr(Disk, "hold"):
        Disk.hold = lambda disk, folder: disk
        Disk.let_go = lambda disk: None
        Disk.check_held = lambda disk, where: None
        begin = Reader.__init__
        Reader.__init__ = lambda reader, *args, uuid=None, **options: begin(reader, *args, **options)
    else:
        Disk.identity = lambda disk, path: (0, 0)


def _now_and_then(every):
    count = itertools.count(1)
    return lambda: next(count) % every == 0


def error_after_commit():
    """Now and then an episode is stored, and the call says that it was refused."""
    commit, strikes = Store.commit, _now_and_then(11)

    def careless(store, *args, **options):
        commit(store, *args, **options)
        if strikes():
            raise RoleError("planted")

    Store.commit = careless


def forgets():
    """Now and then a call returns, and nothing was stored."""
    commit, strikes = Store.commit, _now_and_then(13)
    Store.commit = lambda store, *args, **options: None if strikes() else commit(store, *args, **options)


def one_look():
    """Rows are handed out without a second look at what was evicted meanwhile."""
    for kind in (Handle, Store, Reader):
        kind.shown_tail = lambda source: 0


def other_label():
    """Labels are read a little later than the round that they are of."""
    read = DistillationBuffer._read

    def careless(buffer, ids):
        columns, held = read(buffer, ids)
        if len(columns.get("label_round", ())) > 1:
            columns["label_round"] = columns["label_round"][::-1].copy()
        return columns, held

    DistillationBuffer._read = careless


def other_half():
    """The online half now and then gives a row less than it is asked for, and the offline half one more."""
    draw, strikes = halves.RingSource.draw, _now_and_then(7)

    def careless(half, count, rng):
        batch = draw(half, count, rng)
        if strikes() and "who" in batch:
            batch["who"][:1] = -1.0, 0.0, others.key(-1, 0)
        return batch

    halves.RingSource.draw = careless


PLANTS = {
    "close-abandons": (close_abandons, "signals", "closed"),
    "descriptors-closed": (descriptors_closed, "threads", "error"),
    "no-refusal": (without_the_gate, "signals", "hang"),
    "any-head": (any_head, "others", "successor"),
    "no-identity": (no_identity, "replaced", "replaced"),
    "generators-kept": (generators_kept, "forks", "hang"),
    "error-after-commit": (error_after_commit, "signals", "refused"),
    "forgets": (forgets, "threads", "lost"),
    "one-look": (one_look, "threads", "torn"),
    "other-label": (other_label, "others", "label"),
    "other-half": (other_half, "others", "half"),
}
"""Name -> how it is planted, the scenario that is to notice, and the judge."""

NO_PLACE = "nothing is there to plant this in; adapt it:"


def plant(name):
    """Plant a bug in this process."""
    if name is None:
        return
    try:
        PLANTS[name][0]()
    except (AttributeError, ImportError) as error:
        raise LookupError(f"{NO_PLACE} {name}") from error
