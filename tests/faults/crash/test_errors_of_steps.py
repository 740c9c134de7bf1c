"""Errors of the disk at each change of calls that store steps alone, parts of episodes, and values: judged as in their
campaigns."""

import contextlib
import errno
import itertools
import os
import random
import shutil

import pytest

from ringmap.errors import RingmapError
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.commit.group import OpenGroup
from ringmap.storage.sidecars.values import MutableValues
from tests.disks import ram_folder
from tests.faults.crash import test_groups, test_parts, test_updates
from tests.faults.crash.harness import LEVELS, Draw
from tests.faults.crash.recording import same_ids
from tests.tiers import few

ERRORS = [(errno.ENOSPC, False), (errno.EIO, False), (errno.ENOSPC, True), (errno.EIO, True)]
"""An error, and whether all later changes of the call fail, too."""


KINDS = {
    "rows": test_groups.Session,
    "transitions": test_groups.Transitions,
    "parts": test_parts.Session,
    "values": test_updates.Updates,
}


def strike(root, made, power, seed, which, fault, calls=9):
    """Run a script of calls; let a change fail in the `which`-th of those that may. Tell whether there was such a
    change.

    After an error all is as before the call, or the call was done; the calls after it work; an opening finds what had
    returned.
    """
    session = made(Draw(power, keep=bool(seed % 2)), root, {}, 1, made.nothing(None), False)
    rng, met, struck = random.Random(seed), itertools.count(), []
    session.open()
    lift = session.disk.lift

    def note():
        struck.append(session.disk.struck)
        lift()

    session.disk.lift = note
    session.fault = lambda rng, most=0: fault if next(met) == which else None
    for _ in range(calls):
        session.step(rng)
    session.kill()
    session.open()
    session.kill()
    return any(struck), next(met) > which


def strikes(made, power, seed, every=1):
    """Let changes of a script fail, one after the other: every so many of them. Return how many did."""
    count = 0
    with ram_folder() as folder:
        for number, (error, sticky) in enumerate(ERRORS):
            for which in itertools.count():
                for at in itertools.count(1 + (number + which) % every, every):
                    root = os.path.join(folder, "script")
                    os.mkdir(root)
                    fault = at, OSError(error, os.strerror(error), root), sticky
                    was_struck, was_met = strike(root, made, power, seed, which, fault)
                    shutil.rmtree(root)
                    if not was_struck:
                        break
                    count += 1
                if not was_met:
                    break
    return count


AT_LEVELS = [("rows", False), ("parts", True), *itertools.product(KINDS, (False, True))]


@pytest.mark.parametrize(("kind", "power"), few(dict.fromkeys(AT_LEVELS), 2))
def test_changes_fail(monkeypatch, kind, power):
    same_ids(monkeypatch, 1)
    assert strikes(KINDS[kind], power, 1, 7) > 10


def forgetful(call):
    """Swallow errors: the caller goes on as if the call had been made."""

    def wrong(*args, **options):
        with contextlib.suppress(OSError):
            return call(*args, **options)

    return wrong


CONTROLS = [
    ("rows", False, OpenGroup, "append"),
    ("parts", True, CommitFiles, "append"),
    ("values", False, MutableValues, "update"),
]


@pytest.mark.parametrize(("kind", "power", "owner", "name"), few(CONTROLS))
def test_control_an_error_is_swallowed(monkeypatch, kind, power, owner, name):
    same_ids(monkeypatch, 1)
    monkeypatch.setattr(owner, name, forgetful(getattr(owner, name)))
    with pytest.raises((AssertionError, RingmapError, TypeError)):
        strikes(KINDS[kind], power, 1, 3)


@pytest.mark.campaign
@LEVELS
@pytest.mark.parametrize("kind", KINDS)
def test_all_changes_fail(monkeypatch, kind, power):
    same_ids(monkeypatch, 1)
    count = sum(strikes(KINDS[kind], power, seed) for seed in range(int(os.environ.get("SCRIPTS", 4))))
    print(f"\n{kind}: {count:,} errors, one per change and kind")
