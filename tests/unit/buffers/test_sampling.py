"""Sampling: the sampler's contract, the counter, the generator, what survives and what is drawn again."""

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.clips.samplers.uniform import UniformSampler
from ringmap.errors import ClipIndexError, EnvironmentFault, InputError, NoClipsError
from ringmap.storage.disk.files import Disk
from tests.disks import Through
from tests.unit.buffers.processes import Child
from tests.unit.buffers.steps import clip, episode, prove, same

LENGTHS = {0: 9, 1: 4, 2: 7}


@pytest.fixture
def filled(buffer):
    return fill(buffer)


def fill(buffer, **options):
    buf = buffer(**{"max_steps": 20, "history_len": 2, "seed": 0, **options})
    for number, length in LENGTHS.items():
        buf.write_episode(episode(number, length))
    return buf


def draws(buf, times=5):
    return [buf.sample(4)["obs/x"].tobytes() for _ in range(times)]


# -- what comes out ----------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [1, 2])
@pytest.mark.parametrize("history", [None, 1, 2, 3])
def test_shapes_and_proof(buffer, history, skip):
    buf = fill(buffer, frameskip=skip)
    batch = buf.sample(32, history)
    size = history or 2
    assert {name: v.shape for name, v in batch.items()} == {
        "episode": (32, size),
        "step": (32, size),
        "obs/x": (32, size, 3),
        "action": (32, size, 2 * skip),
    }
    assert all(type(v) is np.ndarray for v in batch.values())
    prove(batch, LENGTHS, size, skip)


def test_usable_by_position_and_with_numpy_s_integers(filled):
    prove(filled.sample(3, 4, 7), LENGTHS, 4)
    prove(filled.sample(np.int64(3), np.int32(4)), LENGTHS, 4)
    assert filled.state_dict()["step"] == 1


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "3"])
def test_sizes_must_be_positive(filled, wrong):
    with pytest.raises(InputError, match=r"^ReplayBuffer.sample: batch_size must be positive"):
        filled.sample(wrong)
    with pytest.raises(InputError, match=r"^ReplayBuffer.sample: history_len must be positive"):
        filled.sample(3, wrong)
    assert filled.state_dict()["step"] == 0


def test_no_clips(buffer):
    buf = buffer(max_steps=20, history_len=5)
    for why in (
        r"no clips of 5 steps are stored \(0 episodes\); collect more first",
        "no clip of 5 steps .* fits",
    ):
        with pytest.raises(NoClipsError, match=why) as raised:
            buf.sample(3)
        assert isinstance(raised.value, RuntimeError)
        buf.write_episode(episode(0, 4))
    prove(buf.sample(3, 4), {0: 4}, 4)
    buf.clear()
    with pytest.raises(RuntimeError, match="no clips"):
        buf.sample(3, 1)


def test_every_clip_is_as_likely_as_any_other(filled):
    clips = [(n, s) for n, length in LENGTHS.items() for s in range(length - 1)]
    counts = dict.fromkeys(clips, 0)
    for found in prove(filled.sample(17_000), LENGTHS, 2):
        counts[found] += 1
    # 1000 expected each; 3.9 standard deviations either way
    assert all(880 < count < 1120 for count in counts.values()), counts


# -- the sampler -------------------------------------------------------------------------------


def test_the_sampler_is_called_with_its_four_arguments(filled):
    calls = []

    def sampler(step, buffer, batch_size, history_len):
        calls.append((step, buffer, batch_size, history_len))
        return np.arange(batch_size)

    filled.sampler = sampler
    same(filled.sample(2), stack(clip(0, 0, 2), clip(0, 1, 2)))
    filled.sample(3, 4)
    filled.sample(3, step=77)
    assert calls == [(0, filled, 2, 2), (1, filled, 3, 4), (77, filled, 3, 2)]


def stack(*clips):
    return {name: np.stack([one[name] for one in clips]) for name in clips[0]}


@pytest.mark.parametrize("dtype", ["i1", "i4", "u2", "u8", "list", "tuple"])
def test_ids_are_integers_of_any_kind(filled, dtype):
    ids = [0, 5, 5, 16]
    filled.sampler = lambda *_: {"list": list, "tuple": tuple}.get(dtype, lambda v: np.array(v, dtype))(ids)
    assert prove(filled.sample(4), LENGTHS, 2) == [(0, 0), (0, 5), (0, 5), (2, 5)]


@pytest.mark.parametrize("wrong", [-1, 17, 10**12, -(2**63), 2**64 - 1])
def test_an_id_out_of_range(filled, wrong):
    ids = np.array([0, wrong, 2], np.uint64 if wrong > 2**63 else np.int64)
    filled.sampler = lambda *_: ids
    with pytest.raises(
        ClipIndexError, match="the sampler returned id .*, which is out of range for 17 clips"
    ) as raised:
        filled.sample(3)
    assert isinstance(raised.value, IndexError)
    if -(2**62) < wrong < 2**62:
        assert f"id {wrong}," in str(raised.value)


def test_a_sampler_sees_the_live_buffer(filled):
    seen = []

    def sampler(step, buffer, batch_size, history_len):
        seen.append(
            (
                buffer.num_valid_ends(history_len),
                buffer.num_episodes,
                buffer.num_steps_stored,
                buffer.lengths.tolist(),
            )
        )
        return np.zeros(batch_size, np.int64)

    filled.sampler = sampler
    filled.sample(2)
    filled.write_episode(episode(3, 5))
    filled.sample(2, 3)
    assert seen == [(17, 3, 20, [9, 4, 7]), (10, 3, 16, [4, 7, 5])]


def test_the_seed_s_schedule(buffer):
    """Seed 000: recent clips early, all of them later."""
    rng = np.random.default_rng(0)

    def warmup_then_uniform(step, buffer, batch_size, history_len):
        n = buffer.num_valid_ends(history_len)
        return rng.integers(max(0, n - 3) if step < 100 else 0, n, batch_size)

    buf = fill(buffer, sampler=warmup_then_uniform)
    assert set(prove(buf.sample(200), LENGTHS, 2)) == {(2, 3), (2, 4), (2, 5)}
    assert len(set(prove(buf.sample(200, step=100), LENGTHS, 2))) > 10


# -- the counter -------------------------------------------------------------------------------


def test_the_counter(filled):
    steps = []
    filled.sampler = lambda step, b, n, h: steps.append(step) or np.zeros(n, np.int64)
    filled.sample(1)
    filled.sample(1)
    filled.sample(1, step=500)
    filled.sample(1, step=0)
    filled.sample(1)
    assert steps == [0, 1, 500, 0, 2]
    filled.clear()
    filled.write_episode(episode(5, 5))
    filled.sample(1)
    assert steps[-1] == 3, "clear() keeps it"


@pytest.mark.parametrize("fault", ["raises", "shape", "range"])
def test_the_counter_advances_even_if_the_sampler_fails(filled, fault):
    def sampler(step, buffer, batch_size, history_len):
        if fault == "raises":
            raise ZeroDivisionError
        return np.zeros(1, int) if fault == "shape" else np.full(batch_size, 99)

    filled.sampler = sampler
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, InputError, ClipIndexError)):
            filled.sample(4)
    with pytest.raises((ZeroDivisionError, InputError, ClipIndexError)):
        filled.sample(4, step=70)
    assert filled.state_dict()["step"] == 2


# -- the generator -----------------------------------------------------------------------------


def test_without_a_seed_each_buffer_draws_its_own(buffer):
    assert draws(fill(buffer, name="0", seed=None)) != draws(fill(buffer, name="1", seed=None))


def test_both_homes_draw_the_same(home):
    ram, disk = ReplayBuffer(20, 2, seed=3), ReplayBuffer(20, 2, seed=3, path=home / "buf")
    for buf in (ram, disk):
        for number, length in LENGTHS.items():
            buf.write_episode(episode(number, length))
    assert draws(ram) == draws(disk)
    disk.close()


def test_never_numpy_s_global_generator(filled):
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    state = filled.state_dict()
    first = draws(filled)
    np.random.seed(2)  # noqa: NPY002
    filled.load_state_dict(state)
    assert draws(filled) == first
    np.random.seed(1)  # noqa: NPY002
    filled.sample(10)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


def test_a_sampler_with_state_is_saved_with_it(buffer):
    class Stateful(UniformSampler):
        def state_dict(self):
            return self.rng.bit_generator.state

        def load_state_dict(self, state):
            self.rng.bit_generator.state = state

    buf = fill(buffer, sampler=Stateful(np.random.default_rng(5)))
    state = buf.state_dict()
    first = draws(buf)
    buf.load_state_dict(state)
    assert draws(buf) == first


# -- what survives -----------------------------------------------------------------------------


def test_the_seed_counts_at_birth_only(disk_buffer):
    buf = fill(disk_buffer, seed=7)
    expected = draws(buf, 10)
    buf.close()
    fresh = fill(disk_buffer, seed=7, name="fresh")
    assert draws(fresh, 3) == expected[:3]
    fresh.close()
    again = disk_buffer(max_steps=20, history_len=2, seed=123, name="fresh")
    assert draws(again, 7) == expected[3:]
    assert again.state_dict()["step"] == 10


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("stored_by", ["write_episode", "clear", "flush", "with", "close", "finish"])
def test_the_state_rides_in_each_commit_and_in_a_flush(disk_buffer, home, stored_by, durability):
    """After a kill, what was drawn since then is drawn again, and nothing before it."""

    def work(child):
        buf = ReplayBuffer(20, 2, seed=1, path=home / "buf", durability=durability, sync_every_s=0)
        for number, length in LENGTHS.items():
            buf.write_episode(episode(number, length))
        draws(buf, 3)
        if stored_by == "write_episode":
            buf.write_episode(episode(3, 5))
        elif stored_by == "clear":
            buf.clear()
        elif stored_by == "with":
            with buf:
                pass
        elif stored_by == "finish":
            recording = buf.begin_episode()
            for t in range(5):
                recording.append({name: v[t] for name, v in episode(3, 5).items()})
            recording.finish()
        else:
            getattr(buf, stored_by)()
        state = buf.state_dict()
        if stored_by not in ("close", "clear"):
            draws(buf, 2)
        child.say(state)
        child.hear()

    child = Child(work)
    state = child.hear()
    child.kill()
    assert state["step"] == 3
    again = disk_buffer(max_steps=20, history_len=2)
    assert again.state_dict() == state
    if stored_by != "clear":
        prove(again.sample(9), {**LENGTHS, 3: 5}, 2)


def test_a_failing_clear_or_an_empty_one_forgets_no_draw(disk_buffer):
    buf = disk_buffer(max_steps=20, seed=0)
    with pytest.raises(NoClipsError):
        buf.sample(3)
    buf.clear()
    buf.close()
    assert disk_buffer(max_steps=20).state_dict()["step"] == 1


def test_a_clear_of_nothing_stores_nothing_so_the_draws_stay_to_be_stored(home):
    """A recovery in between takes the state from the files: what was only in memory is gone there."""

    class Refusing(Disk):
        no = False

        def before(self, change, path, *details):
            if self.no:
                raise OSError(28, "full")

    Buffer = Through(ReplayBuffer, Refusing())

    buf = Buffer(max_steps=20, path=home / "buf", seed=0, sync_every_s=0)
    with pytest.raises(NoClipsError):
        buf.sample(3)
    buf.clear()
    Buffer.disk.no = True
    with pytest.raises(EnvironmentFault):
        buf.write_episode(episode(0, 5))
    Buffer.disk.no = False
    buf.close()
    again = Buffer(max_steps=20, path=home / "buf")
    assert again.state_dict()["step"] == 1
    again.close()


def test_a_write_that_is_refused_forgets_no_draw(disk_buffer):
    buf = fill(disk_buffer)
    buf.sample(3)
    with pytest.raises(InputError):
        buf.write_episode({"x": 3})
    with pytest.raises(InputError):
        buf.write_episode({"x": [3]})
    buf.close()
    assert disk_buffer(max_steps=20, history_len=2).state_dict()["step"] == 1


def test_load_state_dict_is_stored_too(disk_buffer):
    buf = fill(disk_buffer)
    state = buf.state_dict()
    draws(buf)
    buf.flush()
    buf.load_state_dict({**state, "step": 41})
    buf.close()
    assert disk_buffer(max_steps=20, history_len=2).state_dict() == {**state, "step": 41}


def test_a_reader_saves_nothing(disk_buffer, home):
    buf = fill(disk_buffer)
    buf.sample(3)
    buf.flush()
    files = disk_buffer.files()
    reader = ReplayBuffer.open(home / "buf", seed=3)
    draws(reader)
    reader.flush()
    state = reader.state_dict()
    assert state["step"] == 5
    after = draws(reader)
    reader.close()
    assert disk_buffer.files() == files
    other = ReplayBuffer.open(home / "buf", seed=3)
    assert other.state_dict()["step"] == 0
    other.load_state_dict(state)
    assert draws(other) == after
    other.close()


# -- control -----------------------------------------------------------------------------------


def test_control_a_clip_with_one_wrong_row_does_not_prove_itself(filled):
    batch = filled.sample(5)
    batch["obs/x"][3, 1, 0] ^= 1
    with pytest.raises(AssertionError):
        prove(batch, LENGTHS, 2)
