"""Priorities: frequencies, weights, ids that name one clip for ever, and what survives a kill."""

import os
import pickle

import numpy as np
import pytest
import torch

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault, InputError
from ringmap.samplers import Linear, MixtureSampler, PrioritizedSampler, UniformSampler
from ringmap.storage.disk.files import Disk
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.priorities import Leaves, PriorityFile
from tests.disks import FullDisk, Through
from tests.unit.clips.samplers import chi_squared


def made(lengths, max_steps=100, history_len=1, path=None, **options):
    sampler = PrioritizedSampler(**{"rng": 0, **options})
    buf = ReplayBuffer(max_steps, history_len, sampler=sampler, path=path, sync_every_s=0)
    fill(buf, lengths)
    return buf, sampler


def fill(buf, lengths, first=0):
    for number, length in enumerate(lengths, first):
        buf.write_episode({"id": number * 1000 + np.arange(length)})


# -- frequencies and weights ---------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_frequencies_are_proportional(alpha):
    """60 clips, 64,000 draws: chi-squared of 59 degrees has mean 59, deviation 10.9; 4 deviations are 103."""
    buf, sampler = made([30, 12, 22], history_len=2, alpha=alpha, eps=0.01)
    rng = np.random.default_rng(1)
    buf.sample(1)
    positions = np.flatnonzero(np.concatenate([np.arange(n) < n - 1 for n in (30, 12, 22)]))
    priorities = rng.random(61) * 3
    assert buf.update_priorities(positions, priorities) == 61
    ids = np.concatenate([sampler(i, buf, 1000, 2) for i in range(64)])
    chances = (priorities.astype(np.float32).astype(np.float64) + 0.01) ** alpha
    value = chi_squared(np.bincount(ids, minlength=61), chances / chances.sum())
    assert value < 104, value
    if alpha:  # a control: the counts do tell proportional from uniform
        assert chi_squared(np.bincount(ids, minlength=61), np.full(61, 1 / 61)) > 1000


def test_frequencies_by_rank():
    """50 clips, 50,000 draws: chi-squared of 49 degrees has mean 49, deviation 9.9."""
    buf, sampler = made([50], kind="rank", alpha=0.7, resort_every=1)
    buf.sample(1)
    priorities = np.random.default_rng(1).permutation(50) / 7
    buf.update_priorities(np.arange(50), priorities)
    ids = np.concatenate([sampler(i, buf, 1000, 1) for i in range(50)])
    ranks = np.empty(50)
    ranks[np.argsort(-priorities)] = np.arange(1, 51)
    chances = ranks**-0.7
    value = chi_squared(np.bincount(ids, minlength=50), chances / chances.sum())
    assert value < 89, value


def test_between_sorts_a_clip_has_the_rank_it_would_have_had():
    buf, sampler = made([50], kind="rank", alpha=1.0, resort_every=1000)
    buf.sample(1)
    buf.update_priorities(np.arange(50), np.arange(50.0))
    sampler._changes = 1000
    buf.sample(1)
    buf.update_priorities([3], [44.5])  # five are higher
    masses = sampler._tree.leaves
    assert masses[3] == pytest.approx(1 / 6)
    assert masses[49] == 1.0


@pytest.mark.parametrize("beta", [0.4, 1.0, Linear(0.4, 1.0, steps=10)])
def test_weights_against_a_float64_reference(beta):
    buf, sampler = made([40], alpha=0.6, beta=beta, eps=1e-3)
    buf.sample(1)
    priorities = np.random.default_rng(1).random(40).astype(np.float32)
    buf.update_priorities(np.arange(40), priorities)
    for step in (0, 5, 10):
        batch = buf.sample(256, step=step)
        np.testing.assert_array_equal(batch["id"][:, 0], sampler.ids)  # one episode, from position 0
        mass = (priorities.astype(np.float64) + 1e-3) ** 0.6
        exponent = beta if isinstance(beta, float) else 0.4 + 0.06 * step
        expected = (40 * (mass / mass.sum())[sampler.ids]) ** -exponent
        np.testing.assert_allclose(sampler.weights, expected / expected.max(), rtol=1e-6)
        np.testing.assert_allclose(sampler.probabilities(np.arange(40)), mass / mass.sum(), rtol=1e-12)


def test_new_clips_have_the_highest_priority_so_far():
    buf, sampler = made([10])
    buf.sample(1)
    buf.update_priorities([2], [50.0])
    buf.update_priorities([2], [0.5])
    fill(buf, [10], first=1)
    buf.sample(1)
    chances = sampler.probabilities(np.arange(20))
    assert chances[10:] == pytest.approx(chances[10])
    assert chances[10] / chances[2] == pytest.approx((50 / 0.5) ** 0.6, rel=1e-4)


def test_clips_never_cross_an_episode():
    buf, sampler = made([5, 1, 2, 9], history_len=3, max_steps=20)
    for number in range(4, 60):
        fill(buf, [1 + number % 7], first=number)
        batch = buf.sample(64)["id"]
        assert (np.diff(batch, axis=1) == 1).all()
        buf.update_priorities(sampler.ids, np.random.default_rng(number).random(64))
        assert buf.check() == []
        alive = sampler._tree.leaves > 0
        assert alive.sum() == len(buf)


# -- ids -----------------------------------------------------------------------------------------


def test_an_update_for_an_evicted_clip_never_reaches_its_successor():
    buf, sampler = made([10], max_steps=10)
    rows = buf.engine.source.rows.ring.rows
    buf.sample(16)
    old = sampler.ids
    for number in range(1, 2 * rows // 10 + 3):  # the ring is lapped twice: every slot has another clip
        fill(buf, [10], first=number)
        buf.sample(1)
    before = sampler._tree.leaves.copy()
    assert buf.update_priorities(old, np.full(16, 1e9)) == 0
    np.testing.assert_array_equal(sampler._tree.leaves, before)
    successor = old + np.ceil((sampler._low - old) / rows).astype(int) * rows
    live = successor < sampler._high
    assert buf.update_priorities(successor, np.full(16, 2.0)) == live.sum()


def test_an_update_between_eviction_and_the_next_draw_is_ignored():
    buf, sampler = made([10], max_steps=10)
    buf.sample(16)
    fill(buf, [10], first=1)
    assert buf.update_priorities(sampler.ids, np.ones(16)) == 0


def test_of_an_id_named_twice_the_last_value_counts(tmp_path):
    buf, sampler = made([4], alpha=1.0, path=tmp_path / "buf")
    buf.sample(1)
    buf.update_priorities([1, 2, 1], [5.0, 1.0, 3.0])
    for drawn in (sampler, PrioritizedSampler(alpha=1.0, rng=0)):
        if drawn is not sampler:
            buf.close()
            buf = ReplayBuffer(100, sampler=drawn, path=tmp_path / "buf", sync_every_s=0)
        fill(buf, [1], first=1)  # the highest so far is 3
        buf.sample(1)
        chances = drawn.probabilities(np.arange(5))
        assert chances[1] / chances[2] == pytest.approx(3, rel=1e-5)
        assert chances[4] == chances[1]
    buf.close()


def test_a_mixture_hands_priorities_on():
    inner = PrioritizedSampler(rng=0)
    buf = ReplayBuffer(100, sampler=MixtureSampler([(UniformSampler(0), 1), (inner, 1)], rng=0))
    fill(buf, [10])
    buf.sample(32)
    assert buf.update_priorities(buf.sampler.ids, np.ones(32)) == 32


def test_a_mixture_hands_priorities_on_to_a_part_that_drew_nothing_yet():
    inner = PrioritizedSampler(rng=0, alpha=1.0)
    parts = [(UniformSampler(0), 1), (MixtureSampler([(inner, 1)], rng=0), 0)]
    buf = ReplayBuffer(100, sampler=MixtureSampler(parts, rng=0))
    fill(buf, [10])
    buf.sample(4)
    assert buf.update_priorities(np.arange(10), np.arange(10.0)) == 10
    assert inner.probabilities([9]) == pytest.approx(9 / 45, rel=1e-5)


def test_without_priorities_there_is_nothing_to_update():
    buf = ReplayBuffer(100)
    with pytest.raises(InputError, match="does not draw by priority"):
        buf.update_priorities([0], [1.0])
    mixture = MixtureSampler([(UniformSampler(0), 1)])
    with pytest.raises(InputError, match="none of its samplers draws by priority"):
        mixture.update_priorities([0], [1.0])


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([0], [np.nan], "finite"),
        ([0], [-1.0], "not negative"),
        ([0], [1e300], "finite"),
        ([0], ["a"], "must be numbers"),
        ([0, 1], [1.0], "one shape"),
        ([0.5], [1.0], "integer ids"),
        ([[0]], [[1.0]], "one shape"),
    ],
)
def test_bad_updates_change_nothing(ids, values, message):
    buf, sampler = made([10])
    buf.sample(1)
    before = sampler._tree.leaves.copy()
    with pytest.raises(ValueError, match=message):
        buf.update_priorities(ids, values)
    np.testing.assert_array_equal(sampler._tree.leaves, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1}, "alpha"),
        ({"beta": "0.4"}, "beta"),
        ({"kind": "both"}, "kind"),
        ({"eps": 0}, "eps"),
        ({"resort_every": 0}, "resort_every"),
        ({"rng": "x"}, "rng"),
        ({"alpha": 8}, "alpha must be at most 7"),
        ({"eps": 1e-39}, "eps must be at least 1e-38"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=f"PrioritizedSampler: {message}"):
        PrioritizedSampler(**options)


@pytest.mark.parametrize("kind", ["proportional", "rank"])
def test_the_extremes_of_all_options_together_leave_sound_masses(kind):
    buf, sampler = made([50, 50], alpha=7.0, eps=1e-38, kind=kind)
    buf.sample(1)
    buf.update_priorities(np.arange(100), np.where(np.arange(100) % 2, 3e38, 0.0))
    batch = buf.sample(64)["id"]
    assert (batch % 2 == 1).all() if kind == "proportional" else len(batch)
    assert np.isfinite(sampler.weights).all()
    buf.update_priorities(np.arange(100), np.zeros(100))
    buf.sample(64)
    assert np.isfinite(sampler.weights).all()
    assert (sampler._tree.leaves[:100] > 0).all()


def test_priorities_may_come_in_half_precision():
    buf, sampler = made([4], alpha=1.0)
    buf.sample(1)
    buf.update_priorities(np.arange(4), torch.tensor([1, 2, 3, 4], dtype=torch.bfloat16))
    assert sampler.probabilities([3])[0] == pytest.approx(0.4, rel=1e-5)


def test_nothing_drawn_has_no_probabilities():
    with pytest.raises(InputError, match="no clip was drawn"):
        PrioritizedSampler().probabilities([0])


def test_one_sampler_serves_one_buffer():
    buf, sampler = made([10])
    buf.sample(1)
    with pytest.raises(InputError, match="another buffer already"):
        ReplayBuffer(100, sampler=sampler)
    other = ReplayBuffer(100)
    with pytest.raises(InputError, match="another buffer already"):
        other.sampler = sampler


# -- what survives -------------------------------------------------------------------------------


def test_a_full_log_is_written_out_and_goes_on(tmp_path):
    buf, sampler = made([50], path=tmp_path / "buf", alpha=1.0)
    buf.sample(1)
    rng = np.random.default_rng(0)
    for _ in range(900):  # 600 bytes each; a log has 64 KiB
        latest = rng.random(50)
        buf.update_priorities(np.arange(50), latest)
    assert sampler._stored.file._number > 6
    assert ringmap.check(tmp_path / "buf") == []
    expected = sampler._tree.leaves.copy()
    buf.engine.owned.abandon()  # as a kill would
    again = PrioritizedSampler(alpha=1.0, rng=0)
    buf = ReplayBuffer(100, sampler=again, path=tmp_path / "buf", sync_every_s=0)
    buf.sample(1)
    np.testing.assert_array_equal(again._tree.leaves, expected)
    np.testing.assert_allclose(again._leaves.values[:50], latest.astype(np.float32))
    buf.close()


def test_an_update_larger_than_the_log_is_stored_whole(tmp_path):
    buf, sampler = made([30_000], max_steps=30_000, path=tmp_path / "buf", alpha=1.0)
    buf.sample(1)
    values = np.random.default_rng(0).random(30_000)
    for _ in range(2):
        buf.update_priorities(np.arange(30_000), values)
    buf.engine.owned.abandon()  # as a kill would
    again = PrioritizedSampler(alpha=1.0, rng=0)
    buf = ReplayBuffer(30_000, sampler=again, path=tmp_path / "buf", sync_every_s=0)
    buf.sample(1)
    np.testing.assert_array_equal(again._leaves.values[:30_000], values.astype(np.float32))
    buf.close()


def test_a_disk_that_fails_changes_nothing(tmp_path):
    Buffer = Through(ReplayBuffer, FullDisk("write", where="priorities.bin"))

    sampler = PrioritizedSampler(rng=0)
    buf = Buffer(100, sampler=sampler, path=tmp_path / "buf", sync_every_s=0)
    fill(buf, [10])
    buf.sample(1)
    before = sampler._tree.leaves.copy()
    Buffer.disk.full = True
    with pytest.raises(EnvironmentFault, match="no priority was changed"):
        buf.update_priorities([1], [9.0])
    np.testing.assert_array_equal(sampler._tree.leaves, before)
    fill(buf, [10], first=1)
    with pytest.raises(OSError, match="No space"):
        buf.sample(1)
    Buffer.disk.full = False
    assert buf.update_priorities([1], [9.0]) == 1
    buf.sample(1)
    assert (sampler._tree.leaves[:20] > 0).all()
    buf.close()


def test_a_power_cut_that_takes_rows_back_takes_their_priorities_along(tmp_path):
    """Positions beyond the recovered head get the priority of new clips, not what was stored for those lost."""
    other, _ = made([10], path=tmp_path / "other")
    other.sample(1)
    uuid = other.engine.source.manifest.uuid
    other.close()
    # Priorities of twenty rows, in a buffer that has only the first ten.
    values = np.ones(200, np.float32)
    values[:20] = np.linspace(0.1, 2, 20)
    (tmp_path / "other/priorities.bin").unlink()
    PriorityFile.create(Home(Disk(), str(tmp_path / "other"), uuid, 200), Leaves(values, 20, 2.0))
    again = PrioritizedSampler(alpha=1.0, rng=0)
    other = ReplayBuffer(100, sampler=again, path=tmp_path / "other", sync_every_s=0)
    fill(other, [10], first=5)
    other.sample(1)
    np.testing.assert_allclose(again._leaves.values[:10], values[:10])
    np.testing.assert_allclose(again._leaves.values[10:20], 2.0)
    other.close()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("place", ["disk", "ram", "reader"])
def test_a_snapshot_has_the_priorities(tmp_path, place, mixed):
    sampler = PrioritizedSampler(rng=0)
    outer = MixtureSampler([(UniformSampler(0), 1), (sampler, 1)], rng=0) if mixed else sampler
    path = None if place == "ram" else tmp_path / "buf"
    buf = ReplayBuffer(100, sampler=outer, path=path, sync_every_s=0)
    fill(buf, [30, 40, 50])
    buf.sample(1)
    low = int(buf.engine.source.tail)
    buf.update_priorities(low + np.arange(80), np.arange(80.0))
    handle = ReplayBuffer.open(path) if place == "reader" else buf
    handle.snapshot(tmp_path / "copy")
    copied = PrioritizedSampler(rng=0)
    with ReplayBuffer.open(tmp_path / "copy", "r+", sampler=copied) as copy:
        copy.sample(1)
        ids = low + np.arange(90)
        np.testing.assert_array_equal(copied.probabilities(ids), sampler.probabilities(ids))
        assert copied.probabilities([low + 79]) > copied.probabilities([low])
        assert copy.check() == []
    assert ringmap.check(tmp_path / "copy") == []
    buf.close()


def test_a_snapshot_of_an_earlier_moment_takes_no_priority_of_what_came_later():
    values = np.arange(10, dtype=np.float32)  # the slots of positions 20 to 29, but 30 to 32 have come in
    kept = Leaves(values, 33, 50.0).back_to(22, 30)
    assert (kept.upto, kept.highest, kept.values.tolist()) == (30, 50.0, [0, 1, 50, *range(3, 10)])
    assert values[2] == 2


def test_a_reader_starts_with_what_is_stored_and_writes_nothing(tmp_path):
    buf, sampler = made([20], path=tmp_path / "buf")
    buf.sample(1)
    buf.update_priorities(np.arange(20), np.arange(20.0))
    bytes_before = (tmp_path / "buf/priorities.bin").read_bytes()
    own = PrioritizedSampler(rng=0)
    with ReplayBuffer.open(tmp_path / "buf", sampler=own) as reader:
        reader.sample(8)
        np.testing.assert_array_equal(own._tree.leaves, sampler._tree.leaves)
        assert reader.update_priorities([3], [99.0]) == 1
        assert own._tree.leaves[3] != sampler._tree.leaves[3]
        state = pickle.loads(pickle.dumps(reader.state_dict()))
    assert (tmp_path / "buf/priorities.bin").read_bytes() == bytes_before
    resumed = PrioritizedSampler(rng=5)
    with ReplayBuffer.open(tmp_path / "buf", sampler=resumed) as reader:
        reader.load_state_dict(state)
        reader.sample(1)
        np.testing.assert_array_equal(resumed._tree.leaves, own._tree.leaves)
    buf.close()


def test_a_new_sampler_takes_over_each_priority_up_to_the_newest():
    buf, sampler = made([20])
    buf.sample(1)
    buf.update_priorities(np.arange(20), np.arange(20.0))
    state = buf.state_dict()
    other, resumed = made([20])
    other.load_state_dict(state)
    other.sample(1)
    np.testing.assert_array_equal(resumed._tree.leaves, sampler._tree.leaves)


def test_a_forked_child_writes_nothing(tmp_path):
    buf, sampler = made([20], path=tmp_path / "buf")
    buf.sample(1)
    buf.update_priorities([3], [7.0])
    bytes_before = (tmp_path / "buf/priorities.bin").read_bytes()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            buf.sample(8)
            buf.update_priorities([3], [9.0])
            code = 0 if sampler._leaves.values[3] == 9 else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "buf/priorities.bin").read_bytes() == bytes_before
    assert sampler._leaves.values[3] == 7
    buf.close()


# -- damage --------------------------------------------------------------------------------------


def damaged(tmp_path, offset, byte):
    buf, sampler = made([50], path=tmp_path / "buf", alpha=1.0)
    buf.sample(1)
    buf.flush()
    for value in range(1, 4):
        buf.update_priorities(np.arange(50), np.full(50, float(value)))
    buf.engine.owned.abandon()  # as a kill would: a close leaves the logs empty
    path = tmp_path / "buf/priorities.bin"
    data = bytearray(path.read_bytes())
    data[offset] ^= byte
    path.write_bytes(data)
    return path


PLACES = {
    "word": (94, "1 words are damaged"),
    "begin": (4096 + 30, "frame 0 of the log is damaged"),
    "log": (4096 + 56 + 100, "frame 1 of the log is damaged"),
}


@pytest.mark.parametrize("place", PLACES)
def test_damage_is_named_and_mended(tmp_path, place):
    offset, message = PLACES[place]
    path = damaged(tmp_path, offset, 4)
    findings = ringmap.check(tmp_path / "buf")
    assert {f.file for f in findings} == {"priorities.bin"}
    assert message in str(findings[0])
    actions = ringmap.repair(tmp_path / "buf")
    assert {a.file for a in actions} >= {"priorities.bin"}
    assert [str(a) for a in ringmap.repair(tmp_path / "buf", dry_run=False)] == [str(a) for a in actions]
    left = ringmap.check(tmp_path / "buf")
    assert left == []
    sampler = PrioritizedSampler(alpha=1.0, rng=0)
    with ReplayBuffer(100, sampler=sampler, path=tmp_path / "buf", sync_every_s=0) as buf:
        buf.sample(8)
        assert (sampler._tree.leaves[:50] > 0).all()
        assert buf.num_episodes == 1
    buf.close()
    assert path.exists()


@pytest.mark.parametrize("place", PLACES)
def test_a_writer_warns_of_damage_and_goes_on(tmp_path, place, caplog):
    offset, message = PLACES[place]
    damaged(tmp_path, offset, 4)
    sampler = PrioritizedSampler(alpha=1.0, rng=0)
    buf = ReplayBuffer(100, sampler=sampler, path=tmp_path / "buf", sync_every_s=0)
    buf.sample(8)
    assert message in caplog.text
    values = np.random.default_rng(0).random(50)
    buf.update_priorities(np.arange(50), values)
    buf.close()
    assert ringmap.check(tmp_path / "buf") == []
    again = PrioritizedSampler(alpha=1.0, rng=0)
    with ReplayBuffer(100, sampler=again, path=tmp_path / "buf", sync_every_s=0) as buf:
        buf.sample(1)
        np.testing.assert_array_equal(again._leaves.values[:50], values.astype(np.float32))
    buf.close()


def test_a_foreign_file_is_removed(tmp_path):
    buf, _ = made([10], path=tmp_path / "buf")
    buf.sample(1)
    buf.close()
    other, _ = made([10], path=tmp_path / "other")
    other.sample(1)
    other.close()
    (tmp_path / "other/priorities.bin").rename(tmp_path / "buf/priorities.bin")
    assert "of another buffer" in str(ringmap.check(tmp_path / "buf")[0])
    ringmap.repair(tmp_path / "buf", dry_run=False)
    assert not (tmp_path / "buf/priorities.bin").exists()
