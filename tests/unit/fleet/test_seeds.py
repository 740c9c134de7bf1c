"""Seeds that collectors share: each is finished, leased or waiting, and each is finished once."""

import random

import pytest

from ringmap.collection.seeds import Seeds, finished_in
from ringmap.errors import InputError
from ringmap.world.progress import Progress, identity_of, ranges_of


def scenario(seed, kind=Seeds):
    """Let random collectors ask, finish, die until all is finished; return what each finished."""
    rng = random.Random(seed)
    episodes, collectors = rng.randint(0, 60), rng.randint(1, 5)
    before = set(rng.sample(range(episodes), rng.randint(0, episodes)))
    seeds = kind(episodes, before, collectors)
    rings = {holder: set() for holder in range(collectors)}
    playing = {holder: [] for holder in rings}
    while seeds.left:
        seeds.check()
        holder = rng.randrange(collectors)
        event = rng.random()
        if event < 0.1:
            unsaid = set(playing[holder][: rng.randint(0, 1)])  # committed, and killed before it could say so
            rings[holder] |= unsaid
            assert seeds.release(holder, rings[holder]) == len(unsaid)
            playing[holder] = []
        elif event < 0.4 or not playing[holder]:
            playing[holder] += seeds.lease(holder) or []
        else:
            k = playing[holder].pop(rng.randrange(len(playing[holder])))
            rings[holder].add(k)
            seeds.finish(holder, k)
    seeds.check()
    played = sorted(k for ring in rings.values() for k in ring)
    assert played == sorted(set(range(episodes)) - before), "a seed was lost, or played twice"
    return rings


def test_each_is_finished_once():
    for seed in range(300):
        scenario(seed)


class Forgets(Seeds):
    def release(self, holder, finished):
        return super().release(holder, set())


class LosesABlock(Seeds):
    def release(self, holder, finished):
        found = {k for k in self._held.pop(holder, ()) if k in finished}
        self.left -= len(found)
        return len(found)


class LeasesTwice(Seeds):
    def lease(self, holder):
        before = list(self._waiting)
        block = super().lease(holder)
        if block is not None and block.start % 5 == 0:
            self._waiting = before
        return block


@pytest.mark.parametrize("flawed", [Forgets, LosesABlock, LeasesTwice])
def test_a_fault_is_caught(flawed):
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(300):
            scenario(seed, flawed)


def test_a_ring_keeps_few_ranges():
    """Eight collectors of the same speed take blocks of a collection in turn."""
    seeds = Seeds(100_000, [], collectors=8)
    taken = [[] for _ in range(8)]
    turn = 0
    while (block := seeds.lease(turn % 8)) is not None:
        taken[turn % 8] += block
        turn += 1
    assert max(len(ranges_of(offsets)) for offsets in taken) < 50
    assert sum(map(len, taken)) == 100_000


def test_what_is_not_leased():
    seeds = Seeds(4, [], collectors=1)
    seeds.lease("a")
    with pytest.raises(ValueError, match="offset 0 is not leased to 'b'"):
        seeds.finish("b", 0)


def test_rings_together():
    identity = identity_of("E", 100, 10, None)
    a, b = Progress(identity, [0, 1, 5]), Progress(identity, [2])
    assert finished_in({"a": a, "b": b}, "here") == {0, 1, 2, 5}
    assert finished_in({}, "here") == set()
    with pytest.raises(InputError, match="here: a and c both hold seed 105: was a ring copied?"):
        finished_in({"a": a, "b": b, "c": Progress(identity, [5])}, "here")
    other = Progress(identity_of("F", 100, 10, None), [3])
    with pytest.raises(InputError, match="here: c holds a part of another collection .* than a"):
        finished_in({"a": a, "c": other}, "here")
