"""Priorities over the nodes of a cluster: what is drawn, what survives, what is refused."""

import os
import signal
from collections import Counter

import numpy as np
import pytest

import ringmap.ray as rr
from ringmap.data import Window
from ringmap.errors import InputError, NoClipsError
from ringmap.ray.reader import Drawing, Reader
from ringmap.ray.readers import Station
from ringmap.samplers import PrioritizedSampler
from tests.unit.buffers.steps import prove
from tests.unit.ray.conftest import until

pytest.importorskip("ray")

ALPHA, BETA, EPS = 0.7, 0.5, 1e-3


def opened(nodes, **options):
    sampler = PrioritizedSampler(ALPHA, BETA, eps=EPS)
    options = {"history_len": 4, "wait_s": 90, "state": nodes.folder.with_suffix(".learner"), **options}
    return rr.ReplayBuffer(nodes.folder, sampler=sampler, **options)


@pytest.fixture
def buf(nodes):
    with opened(nodes) as buffer:
        until(lambda: len(buffer) == nodes.clips(4))
        yield buffer


def value_of(clip):
    """Node a has 270 clips, of these priorities from 0 to 4; node b 85, of 5 to 9."""
    number, start = clip
    return (number * 3 + start) % 5 + 5 * (number >= 10)


def mass_of(clip):
    return (value_of(clip) + EPS) ** ALPHA


def give_all(buf, nodes):
    """Give every clip its priority; return their number."""
    ids = {}
    while len(ids) < nodes.clips(4):
        batch = buf.sample(256)
        ids.update(zip(prove(batch, nodes.lengths, 4), batch.ids.tolist(), strict=True))
    assert buf.update_priorities(list(ids.values()), [value_of(clip) for clip in ids]) == len(ids)
    buf.flush()
    buf.refresh()
    return list(ids)


def deviation(buf, nodes, clips):
    """Return chi-square over degrees of freedom of 10,240 draws, and check their weights."""
    drawn = Counter()
    for _ in range(40):
        batch = buf.sample(256)
        found = prove(batch, nodes.lengths, 4)
        drawn.update(found)
        expected = np.array([mass_of(clip) for clip in found]) ** -BETA
        np.testing.assert_allclose(batch.weights, expected / expected.max(), rtol=1e-5)
    total = sum(mass_of(clip) for clip in clips)
    wanted = {clip: 40 * 256 * mass_of(clip) / total for clip in clips}
    often = [clip for clip in clips if wanted[clip] > 5]
    assert len(often) > 250
    return sum((drawn[c] - wanted[c]) ** 2 / wanted[c] for c in often) / len(often)


def test_drawn_by_the_priorities_of_all_nodes(buf, nodes):
    assert deviation(buf, nodes, give_all(buf, nodes)) < 1.5


def test_control_nodes_are_drawn_from_by_their_numbers_of_clips(buf, nodes, monkeypatch):
    clips = give_all(buf, nodes)
    monkeypatch.setattr(Station, "share", Station.clips)
    assert deviation(buf, nodes, clips) > 2


def test_a_killed_reader_keeps_them(buf, nodes):
    clips = give_all(buf, nodes)
    (killed,) = (node.pid for node in buf.nodes if node.name == "a")
    batch = buf.sample(64)
    same = [value_of(clip) for clip in prove(batch, nodes.lengths, 4)]

    def is_back():
        """Whether there is another reader; updates go on meanwhile, and those that meet none are passed over."""
        buf.update_priorities(batch.ids, same)
        buf.flush()
        return {node.pid for node in buf.nodes if node.name == "a"}.isdisjoint({None, killed})

    os.kill(killed, signal.SIGKILL)
    until(is_back)
    until(lambda: (buf.sample(256)["episode"] < 10).any())
    buf.refresh()
    assert deviation(buf, nodes, clips) < 1.5


def test_the_next_learner_has_them(nodes):
    with opened(nodes) as buf:
        until(lambda: len(buf) == nodes.clips(4))
        clips = give_all(buf, nodes)
    with opened(nodes) as again:
        until(lambda: len(again) == nodes.clips(4))
        again.refresh()
        assert deviation(again, nodes, clips) < 1.5


def test_a_ring_that_joins_costs_none(buf, nodes):
    """Each reader closes its rings and opens them with the new one. The clips of the new ring get the highest priority
    so far."""
    clips = give_all(buf, nodes)
    nodes.ring("a", "new")
    nodes.write("a", 4, "new")
    until(lambda: len(buf) == len(clips) + 1)
    until(lambda: (buf.sample(256)["episode"] == 15).any())
    drawn = Counter(clip for _ in range(20) for clip in prove(buf.sample(256), nodes.lengths, 4))
    mass = {c: mass_of(c) for c in clips} | {(15, 0): (9 + EPS) ** ALPHA}
    for node in (lambda n: n >= 10 and n < 15, lambda n: n < 10):
        got = sum(count for (number, _), count in drawn.items() if node(number)) / (20 * 256)
        assert abs(got - sum(m for (n, _), m in mass.items() if node(n)) / sum(mass.values())) < 0.03


def test_of_windows(buf, nodes):
    """Another kind of clips: their priorities are those of their anchors."""
    give_all(buf, nodes)
    window = {"step": Window(range(-1, 2))}
    seen = Counter()
    for _ in range(20):
        batch = buf.sample(256, window=window, columns=["episode", "step"], anchors=slice(1, -15))
        seen.update(zip(batch["episode"].ravel().tolist(), batch["step"][:, 1].tolist(), strict=True))
    wanted = {(n, s): mass_of((n, s)) for n, size in nodes.lengths.items() for s in range(1, size - 15)}
    assert seen.keys() <= wanted.keys()
    scale = 20 * 256 / sum(wanted.values())
    often = {clip: mass * scale for clip, mass in wanted.items() if mass * scale > 5}
    assert sum((seen[c] - n) ** 2 / n for c, n in often.items()) / len(often) < 1.8
    assert len(buf) == nodes.clips(4), "of its own clips, whatever was drawn last"
    assert prove(buf.sample(8), nodes.lengths, 4)
    assert deviation(buf, nodes, list(wanted_clips(nodes))) < 1.5


def wanted_clips(nodes):
    return ((n, s) for n, size in nodes.lengths.items() for s in range(size - 3))


def test_evicted_clips_are_passed_over(buf, nodes):
    batch = buf.sample(64)
    assert buf.update_priorities(batch.ids, np.ones(64)) == 64
    for _ in range(200):  # once round the ring of node a
        nodes.write("a", 30)
    until(lambda: len(buf) > 4400)
    buf.update_priorities(batch.ids, np.full(64, 1e6))
    buf.flush()
    buf.refresh()
    old = {i for i, n in zip(batch.ids.tolist(), batch["episode"][:, 0], strict=True) if n < 10}
    assert old
    assert old.isdisjoint(buf.sample(2000).ids.tolist())


def test_a_reader_that_was_started_again_passes_updates_over():
    reader = Reader({}, Drawing(ALPHA, EPS, "nowhere"))  # it has had no look yet
    assert reader.update([(bytes(16), np.array([3]), np.ones(1, np.float32))]) == 0


def test_another_learner_on_one_directory(buf, nodes):
    with pytest.raises(NoClipsError, match=r"is held by process .*give each learner its own"):
        opened(nodes, wait_s=30)
    assert buf.sample(8).ids.shape == (8,)


def test_bad_input(buf, nodes):
    state = nodes.folder.with_suffix(".other")
    refused = [
        ({"sampler": PrioritizedSampler()}, "needs state="),
        ({"state": state}, "pass sampler= too"),
        ({"sampler": PrioritizedSampler(kind="rank"), "state": state}, "kind='proportional'"),
        ({"sampler": lambda *_: None, "state": state}, "kind='proportional'"),
        ({"sampler": PrioritizedSampler(), "state": nodes.folder}, "where the rings lie"),
    ]
    for options, words in refused:
        with pytest.raises(InputError, match=words):
            rr.ReplayBuffer(nodes.folder, **options)
    with pytest.raises(InputError, match=r"pass batch\.ids"):
        buf.update_priorities([(77 << 48) + 3], [1.0])
    with pytest.raises(InputError, match="finite"):
        buf.update_priorities(buf.sample(1).ids, [float("nan")])
    with (
        rr.ReplayBuffer(nodes.folder, history_len=4, wait_s=90) as uniform,
        pytest.raises(InputError, match="draws uniformly"),
    ):
        uniform.update_priorities([1], [1.0])
