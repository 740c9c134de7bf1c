"""Threads, forks, replaced directories at random moments: a sample of the campaign, its judges, and bugs planted in it.

The whole of it: `python -m tools.campaign --only signals-threads-forks`.
"""

import collections
import gc
import itertools
import os
import sys

import numpy as np
import pytest

from ringmap.buffers import sources
from ringmap.buffers.distillation import DistillationBuffer
from ringmap.buffers.transitions.lanes import NextObservations
from ringmap.errors import RoleError
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.process import Forkable
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.reader import Reader
from tests.disks import ram_folder
from tools.campaign import rounds
from tools.campaign.rounds import CLEAR, DONE, KINDS, OPEN, REFUSED, WRITE, Calls, Strangers, faults

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, /proc")


def play(count, seed, kinds=tuple(KINDS), plant=None, judge=None):
    """Play rounds, until one is violated; return the tallies, and what was wrong with that."""
    tallies = collections.Counter()
    with ram_folder() as folder:
        for number in range(count):
            made = rounds.run(seed, number, str(folder), kinds, plant)
            tallies.update(made.tallies)
            tallies[made.kind] += 1
            wrong = [text for name, text in made.violations if judge in (None, name)]
            if wrong:
                return tallies, wrong
    return tallies, []


@pytest.mark.slow
def test_a_sample():
    tallies, wrong = play(8, 20)
    assert wrong == []
    assert min(tallies[name] for name in ("calls", "reads", "episodes", "transitions")) > 0, tallies


@pytest.mark.campaign
def test_two_thousand_rounds():
    tallies, wrong = play(2000, int(os.environ.get("SEED", "1")))
    assert wrong == []
    assert min(tallies[name] for name in ("refused", "forks", "replaced", *KINDS)) > 0, tallies


# -- bugs, each planted in a round's process, and caught ---------------------------------------------------


def now_and_then(every):
    count = itertools.count(1)
    return lambda: next(count) % every == 0


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
    assert hasattr(NextObservations, "_of_newest")
    NextObservations._of_newest = lambda beside, source, head: beside.newest(source)._replace(stop=head)


def generators_kept():
    """A forked child draws with the parent's generators, whose locks a thread may have held."""
    assert hasattr(Forkable, "reset_after_fork")
    Forkable.reset_after_fork = lambda made, renewed: None


def no_identity():
    """Nobody looks whether the directory is still the one that was opened."""
    assert hasattr(Disk, "hold")
    Disk.hold = lambda disk, folder: disk
    Disk.let_go = lambda disk: None
    Disk.check_held = lambda disk, where: None
    begin = Reader.__init__
    Reader.__init__ = lambda reader, *args, uuid=None, **options: begin(reader, *args, **options)


def error_after_commit():
    """Now and then an episode is stored, and the call says that it was refused."""
    commit, strikes = Store.commit, now_and_then(11)

    def careless(store, *args, **options):
        commit(store, *args, **options)
        if strikes():
            raise RoleError("planted")

    Store.commit = careless


def forgets():
    """Now and then a call returns, and nothing was stored."""
    commit, strikes = Store.commit, now_and_then(13)
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
    draw, strikes = sources.RingSource.draw, now_and_then(7)

    def careless(half, count, rng):
        batch = draw(half, count, rng)
        if strikes() and "who" in batch:
            batch["who"][:1] = -1.0, 0.0, rounds.key(-1, 0)
        return batch

    sources.RingSource.draw = careless


PLANTED = {
    descriptors_closed: ("episodes", "error"),
    any_head: ("transitions", "successor"),
    no_identity: ("episodes", "replaced"),
    generators_kept: ("episodes", "hang"),
    error_after_commit: ("episodes", "refused"),
    forgets: ("episodes", "lost"),
    one_look: ("episodes", "torn"),
    other_label: ("distillation", "label"),
    other_half: ("online", "half"),
}
"""What is planted -> the kind of buffer, and the judge that is to notice."""


@pytest.mark.campaign
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_control(plant):
    kind, judge = PLANTED[plant]
    tallies, wrong = play(150, 3, (kind,), plant, judge)
    print(f"{plant.__name__}: after {tallies[kind]} rounds")
    assert wrong


@pytest.mark.slow
def test_control_of_the_sample_an_episode_that_is_not_stored():
    assert play(8, 3, ("episodes",), forgets, "lost")[1]


# -- the judges --------------------------------------------------------------------------------------------


def entries(*calls):
    """Return entries of calls `(kind, number, length, how)`, one after the other; `+` ends after all others."""
    made, late = Calls(), []
    for kind, number, length, how, *beside in calls:
        entry = made.begin(kind, number, length)
        if beside:
            late.append((entry, how))
        else:
            made.end(entry, how)
    for entry, how in late:
        made.end(entry, how)
    return made.entries


THREE = [(WRITE, n, 10, DONE) for n in range(3)]


@pytest.mark.parametrize(
    ("calls", "stored", "max_steps", "expected"),
    [
        (THREE, [0, 1, 2], 100, []),
        (THREE, [1, 2], 25, []),
        (THREE, [1, 2], 30, ["lost"]),
        (THREE, [0, 2], 100, ["lost"]),
        (THREE, [0, 1], 100, ["lost"]),
        (THREE, [], 100, ["lost"]),
        (THREE, [0, 2, 1], 100, ["order"]),
        (THREE, [0, 1, 1, 2], 100, ["twice"]),
        (THREE, [0, 1, 2, 7], 100, ["extra"]),
        (THREE, [0, 1, 2], 25, ["capacity"]),
        ([*THREE, (WRITE, 3, 9, DONE)], [0, 1, 2, 3], 100, ["torn"]),
        ([*THREE, (WRITE, 3, 10, REFUSED)], [0, 1, 2], 100, []),
        ([*THREE, (WRITE, 3, 10, REFUSED)], [0, 1, 2, 3], 100, ["refused"]),
        ([*THREE, (WRITE, 3, 10, OPEN)], [0, 1, 2], 100, []),
        ([*THREE, (WRITE, 3, 10, OPEN)], [0, 1, 2, 3], 100, []),
        ([*THREE, (CLEAR, 0, 0, DONE)], [], 100, []),
        ([*THREE, (CLEAR, 0, 0, DONE)], [2], 100, ["clear", "lost"]),
        ([*THREE, (CLEAR, 0, 0, OPEN)], [], 100, []),
        ([*THREE, (CLEAR, 0, 0, OPEN)], [0, 1, 2], 100, []),
        ([*THREE, (CLEAR, 0, 0, OPEN)], [1, 2], 100, ["lost"]),
        ([*THREE, (CLEAR, 0, 0, REFUSED)], [], 100, ["lost"]),
        ([(WRITE, 9, 10, DONE, "+"), *THREE], [0, 9, 1, 2], 100, []),
        ([(CLEAR, 0, 0, DONE, "+"), *THREE], [2], 100, []),
        ([(CLEAR, 0, 0, DONE, "+"), *THREE], [], 100, []),
        ([(CLEAR, 0, 0, DONE, "+"), *THREE], [1], 100, ["lost"]),
    ],
)
def test_what_may_be_stored(calls, stored, max_steps, expected):
    wrong = faults(entries(*calls), [(n, 10) for n in stored], max_steps)
    assert sorted({judge for judge, _ in wrong}) == expected


def test_rows_prove_themselves(tmp_path):
    """Sound ones of each kind pass, and each damage of them does not."""
    for kind, damage, judge in (
        ("episodes", lambda batch: batch["row"].__iadd__(1), "torn"),
        ("transitions", lambda batch: batch["observations"].__iadd__(1), "torn"),
        ("transitions", lambda batch: batch["next_observations"].__iadd__(1), "successor"),
        ("distillation", lambda batch: batch["student_observations"].__iadd__(1), "torn"),
        ("distillation", lambda batch: batch["label_round"].__iadd__(1), "label"),
        ("online", lambda batch: batch["who"].__iadd__(1), "torn"),
        ("online", lambda batch: batch["is_offline"].__ixor__(True), "half"),
    ):
        home = KINDS[kind][0](rounds.Round(0, 0, str(tmp_path)), in_ram=True)
        for _ in range(9):
            assert home.write(home.round.rng) is None
        batch = {name: np.array(values) for name, values in home.sample(home.buffer, 8).items()}
        assert home.wrong(batch) is None
        damage(batch)
        assert home.wrong(batch)[0] == judge, (kind, judge)


def test_a_stranger_notices(tmp_path):
    wrong = []
    strangers = Strangers(str(tmp_path), lambda *violation: wrong.append(violation))
    strangers.turn(20)
    assert wrong == []
    os.pwrite(strangers._open[0][0], b"rows", 100)
    os.close(strangers._open[3][0])
    strangers.close()
    assert [judge for judge, _ in wrong] == ["stranger"] * 2
