"""Ctrl-C and signal handlers anywhere in a draw from many rings, while rings join and leave: the next draw goes on, all
rings are read."""

import itertools
import shutil

import numpy as np
import pytest

import ringmap.buffers.engine
import ringmap.buffers.sharded.clip_table
import ringmap.buffers.sharded.reader
import ringmap.buffers.sharded.rings
import ringmap.clips.rings
from ringmap.buffers.sharded.rings import Fleet as Rings
from ringmap.buffers.sharded.rings import _Open
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import RoleError
from tests.faults.concurrency.test_interrupts import Interrupt, interrupt
from tests.unit.buffers.sharded.conftest import Fleet
from tests.unit.buffers.steps import prove

FILES = {
    module.__file__
    for module in (
        ringmap.buffers.sharded.clip_table,
        ringmap.buffers.engine,
        ringmap.buffers.sharded.reader,
        ringmap.buffers.sharded.rings,
        ringmap.clips.rings,
    )
}


def faults_after(folder, every, strike, files=FILES):
    """Strike a draw at every so many lines of it in turn, each after a write, a new ring and one that left.

    Args:
        folder: of the rings.
        every: so many lines.
        strike: called with the buffer in the middle of a draw of it.
        files: whose lines count.

    Returns:
        What was wrong afterwards, the first line that was, and how often it was called.
    """
    fleet, calls = Fleet(folder), 0
    for name in ("a", "b"):
        fleet.ring(name)
        fleet.write(name, 9)
    buf = ShardedReplayBuffer(folder, history_len=3, seed=0)
    buf.sample(8)

    def struck():
        nonlocal calls
        calls += 1
        strike(buf)

    for at in itertools.count(1, every):
        fleet.write("b", 9)
        new, gone = f"new {at}", f"new {at - every}"
        fleet.ring(new)
        fleet.write(new, 9)
        if gone in fleet.writers:
            fleet.writers.pop(gone).close()
            shutil.rmtree(folder / gone)
            del fleet.model[gone]
        try:
            if not Interrupt(at, files, struck).strikes_in(lambda: look(buf)):
                break
            fleet.write("a", 9)
            buf.refresh()
            found = {number for number, _ in prove(buf.sample(1500), fleet.lengths, 3)}
        except Exception as error:
            return [repr(error)], at, calls
        names = [shard.name for shard in buf.shards if shard.problem is None]
        if found != set(fleet.lengths) or names != sorted(fleet.model):
            return [found ^ set(fleet.lengths), names], at, calls
    buf.close()
    for writer in fleet.writers.values():
        writer.close()
    return [], at, calls


def look(buf):
    buf.refresh()
    buf.sample(8)


def handler(buf):
    for call in (buf.refresh, lambda: buf.sample(8)):
        try:
            call()
        except RoleError as error:
            assert "in the middle of another call" in str(error)


STRIKES = {"Ctrl-C": lambda buf: interrupt(), "handler": handler}


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize(
    "every",
    [19, pytest.param(7, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.campaign)],
)
def test_a_draw_after_a_struck_one(fast, strike, every):
    faults, at, calls = faults_after(fast / "fleet", every, STRIKES[strike])
    assert not faults, at
    assert calls > 20
    print(f"\n{strike}: {calls:,} strikes")


def test_an_interrupt_before_the_engine_is_told(fleet, monkeypatch):
    """What it left undone is done at the next draw, not at the next look for new rings."""
    fleet.ring("a")
    fleet.write("a", 9)
    buf = ShardedReplayBuffer(fleet.folder, history_len=3, seed=0)
    fleet.ring("b")
    fleet.write("b", 9)
    members = buf.engine.members
    whole = members.changed
    monkeypatch.setattr(members, "changed", lambda gone: interrupt())
    with pytest.raises(KeyboardInterrupt):
        buf.refresh()
    monkeypatch.setattr(members, "changed", whole)
    monkeypatch.setattr(members, "_take_turn", lambda now, scan: None)
    prove(buf.sample(50), fleet.lengths, 3)
    assert len(buf.engine.rings) == 2


@pytest.mark.parametrize("call", ["sample", "refresh"])
def test_a_look_in_the_middle_of_a_look_is_refused(fleet, monkeypatch, call):
    fleet.ring("a")
    fleet.write("a", 9)
    buf, told = ShardedReplayBuffer(fleet.folder, history_len=3, seed=0), []
    whole = buf.engine.members._scan

    def scan(*args, **options):
        with pytest.raises(RoleError, match="in the middle of another call"):
            buf.sample(3) if call == "sample" else buf.refresh()
        told.append(call)
        return whole(*args, **options)

    monkeypatch.setattr(buf.engine.members, "_scan", scan)
    buf.refresh()
    assert told == [call]


@pytest.mark.slow
def test_control_looks_in_the_middle_of_a_look(fast, monkeypatch):
    monkeypatch.setattr(Rings, "refuse_nested", lambda members, where: None)
    faults, _, _ = faults_after(fast / "fleet", 3, handler)
    assert faults


def test_control_rings_that_are_replaced_one_name_after_the_other(fast, monkeypatch):
    def put(members, rings):
        now, other = members._now, _Open(rings, np.zeros(len(rings), np.int64))
        for name in ("rings", "changes", "seen", "swept", "by_number"):
            setattr(now, name, getattr(other, name))

    monkeypatch.setattr(Rings, "_put", put)
    faults, _, _ = faults_after(fast / "fleet", 1, STRIKES["Ctrl-C"], {__file__})
    assert faults
