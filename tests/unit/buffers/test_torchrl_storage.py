"""TorchRL's own buffers, samplers and a loss, over our ring."""

import pickle
import warnings

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed (extra torchrl)")
    pytest.importorskip("torchrl", reason="torchrl is not installed (extra torchrl)")
    from torchrl.data import (
        LazyTensorStorage,
        RandomSampler,
        ReplayBuffer,
        SamplerWithoutReplacement,
        SliceSampler,
        TensorDictReplayBuffer,
    )

from ringmap.buffers.steps import StepRing
from ringmap.data import ReplayBuffer as Episodes
from ringmap.data import to_torchrl, torchrl_storage
from ringmap.errors import InputError, RoleError

TensorDict, NonTensorData = tensordict.TensorDict, tensordict.NonTensorData
NonTensorStack = tensordict.NonTensorStack

pytestmark = pytest.mark.filterwarnings("ignore")  # what torchrl says is not for us to mend


def ted(start, count):
    """Return transitions that carry their number."""
    numbers = torch.arange(start, start + count)
    following = TensorDict(
        {
            "observation": torch.stack([numbers + 1.0] * 4, 1),
            "reward": torch.ones(count, 1),
            "done": (numbers % 10 == 9)[:, None],
            "terminated": (numbers % 10 == 9)[:, None],
        },
        [count],
    )
    return TensorDict(
        {
            "observation": torch.stack([numbers + 0.0] * 4, 1),
            "action": torch.nn.functional.one_hot(numbers % 2, 2),
            "episode": numbers // 10,
            "next": following,
        },
        [count],
    )


def numbers(batch):
    return batch["observation"][..., 0].int().tolist()


@pytest.fixture(params=["episodes", "steps", "episodes on disk", "steps on disk"])
def ring(request, home):
    path = {"path": home / "ring", "sync_every_s": 0} if "disk" in request.param else {}
    made = StepRing(60, **path) if "steps" in request.param else Episodes(max_steps=64, **path)
    yield made
    made.close()


def test_it_holds_what_their_storage_holds(ring):
    """Row by row and index by index the same as TorchRL's own storage of that size, while the ring wraps."""
    ours = ReplayBuffer(storage=torchrl_storage(ring))
    assert ours.storage.max_size == 60
    theirs = ReplayBuffer(storage=LazyTensorStorage(60))
    rng, total = np.random.default_rng(0), 0
    for _ in range(40):
        count = int(rng.integers(1, 9))
        data = ted(total, count)
        total += count
        if count == 1:
            assert ours.add(data[0]) == theirs.add(data[0])
        else:
            assert torch.equal(ours.extend(data), theirs.extend(data))
        assert len(ours) == len(theirs)
        assert (ours[:] == theirs[:]).all()
        some = torch.from_numpy(rng.integers(0, len(ours), 7))
        assert (ours[some] == theirs[some]).all()
        assert (ours[int(some[0])] == theirs[int(some[0])]).all()
        assert ours.storage.contains(0) and not ours.storage.contains(len(ours))
    assert total > 120
    assert ours[:].batch_size == theirs[:].batch_size


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_their_samplers(sampler, ring):
    rb = TensorDictReplayBuffer(storage=torchrl_storage(ring), sampler=sampler(), batch_size=20)
    for start in range(0, 100, 5):
        rb.extend(ted(start, 5))
    seen = set()
    for _ in range(3 if sampler is SamplerWithoutReplacement else 40):
        batch = rb.sample()
        assert batch.batch_size == (20,)
        assert [number % 60 for number in numbers(batch)] == batch["index"].tolist()
        seen |= set(numbers(batch))
    assert seen == set(range(40, 100))


def test_slices_of_trajectories(ring):
    sampler = SliceSampler(slice_len=5, traj_key="episode")
    rb = TensorDictReplayBuffer(storage=torchrl_storage(ring), sampler=sampler, batch_size=20)
    for start in range(0, 50, 5):
        rb.extend(ted(start, 5))
    for _ in range(10):
        found = rb.sample().reshape(4, 5)
        assert (torch.diff(found["observation"][..., 0], dim=1) == 1).all()
        assert (found["episode"] == found["episode"][:, :1]).all()


def test_no_slice_joins_the_newest_row_to_the_oldest(ring):
    """A full ring is cut at its cursor, as TorchRL's own storage is: by whoever wrote the newest row."""
    sampler = SliceSampler(num_slices=8, traj_key="episode", cache_values=True)
    rb = TensorDictReplayBuffer(storage=torchrl_storage(ring), sampler=sampler, batch_size=40)
    for start in range(0, 200, 10):
        frames = ted(start, 10)
        frames["episode"][:] = 0  # one that never ends: nothing but the cursor cuts it
        rb.extend(frames)
        for _ in range(5):
            found = rb.sample().reshape(8, 5)["observation"][..., 0]
            assert (torch.diff(found, dim=1) == 1).all(), found
            assert found.min() >= start + 10 - 60


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lambda: TensorDict({"x": torch.zeros(2), "task": NonTensorStack("a", "b")}, [2]), "task holds no tensors"),
        (lambda: TensorDict({"a": {"task": NonTensorData(object(), batch_size=[2])}}, [2]), "a/task holds no tensors"),
        (lambda: [TensorDict({"x": 0.0}), TensorDict({"x": 0.0, "y": 1.0})], "only some rows have y"),
        (lambda: [TensorDict({"x": [0.0]}), TensorDict({"x": [0.0, 1.0]})], "x has not one shape"),
        (lambda: TensorDict({"x": torch.zeros(2, dtype=torch.bfloat16)}, [2]), "'x' can't be made an array"),
        (lambda: TensorDict({"x": torch.tensor([0.5, 1e300], dtype=torch.float64)}, [2]), "'x': step 1"),
        (lambda: TensorDict({"x": torch.zeros(2), "y": torch.zeros(2)}, [2]), r"extra columns \['y'\]"),
    ],
)
def test_what_a_column_can_not_hold_is_refused_by_name(rows, words):
    """Nothing of a row is left out: it is stored whole, or not at all."""
    rb = ReplayBuffer(storage=torchrl_storage(StepRing(60)))
    rb.extend(TensorDict({"x": torch.zeros(2)}, [2]))
    with pytest.raises(InputError, match=words):
        rb.extend(rows())
    assert len(rb) == 2


def test_prioritized_sampler(ring):
    torchrl = pytest.importorskip("torchrl.data")
    try:
        sampler = torchrl.PrioritizedSampler(60, alpha=1.0, beta=1.0)
    except RuntimeError as error:
        pytest.skip(f"torchrl's prioritized sampler does not run here: {error}")
    rb = TensorDictReplayBuffer(storage=torchrl_storage(ring), sampler=sampler, batch_size=20)
    rb.extend(ted(0, 5))
    rb.update_priority(torch.arange(5), torch.tensor([0.0, 0, 1, 0, 0]) + 1e-9)
    assert set(numbers(rb.sample())) == {2}


def test_what_a_world_wrote_can_be_drawn():
    buf = Episodes(max_steps=100)
    for number in range(5):
        buf.write_episode({"observation": np.full((10, 3), number, "f4"), "action": np.arange(10)})
    storage = torchrl_storage(buf)
    rb = ReplayBuffer(storage=storage, writer=storage.writer(), batch_size=16)
    assert len(rb) == 50
    assert rb.sample()["observation"].shape == (16, 3)
    index = rb.extend(TensorDict({"observation": torch.zeros(3, 3), "action": torch.arange(3)}, [3]))
    assert index.tolist() == [50, 51, 52]
    assert buf.num_steps_stored == 53
    assert buf.load_episode(5)["action"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("rows", [30, 60, 100])
def test_a_ring_that_is_opened_again(rows, tmp_path):
    with StepRing(60, path=tmp_path / "ring").buffer as buf:
        rb = ReplayBuffer(storage=torchrl_storage(buf_ring(buf)))
        for start in range(0, rows, 5):
            rb.extend(ted(start, 5))
        before = rb[:]
    buf.close()
    ring = StepRing(60, path=tmp_path / "ring")
    storage = torchrl_storage(ring)
    rb = ReplayBuffer(storage=storage, writer=storage.writer())
    assert sorted(numbers(rb[:])) == sorted(numbers(before))
    assert {*rb[:].keys(True)} == {*before.keys(True)}
    if rows < 60:  # TorchRL's own writer begins at 0, where a row is
        with pytest.raises(InputError, match=r"writer=storage.writer\(\)"):
            ReplayBuffer(storage=torchrl_storage(ring)).extend(ted(0, 2))
    index = rb.extend(ted(rows, 4))
    assert numbers(rb[index]) == [rows, rows + 1, rows + 2, rows + 3]
    assert max(numbers(rb[:])) == rows + 3
    ring.close()


def buf_ring(buf):
    ring = StepRing.__new__(StepRing)
    ring.buffer, ring.capacity, ring.group = buf, 60, 60
    return ring


def test_wrong_ways(ring):
    storage = torchrl_storage(ring)
    rb = ReplayBuffer(storage=storage)
    rb.extend(ted(0, 5))
    for change in (
        lambda: storage.set(2, ted(0, 1)[0]),
        lambda: rb.__setitem__(5, ted(0, 1)[0]),
        lambda: storage.set(range(6, 8), ted(0, 2)),
    ):
        with pytest.raises(InputError, match="never overwritten"):
            change()
    for index in (5, -6, torch.tensor([0, 9])):
        with pytest.raises(IndexError, match="out of range for 5 rows"):
            storage.get(index)
    with pytest.raises(InputError, match="one axis"):
        storage.get((0, 1))
    with pytest.raises(InputError, match="expected a TensorDict"):
        storage.set(5, torch.zeros(3))
    with pytest.raises(InputError, match="schema mismatch"):
        storage.set(range(5, 7), ted(0, 2).exclude("action"))
    assert len(rb) == 5
    assert numbers(rb[:]) == [0, 1, 2, 3, 4]
    assert numbers(rb[-2:]) == [3, 4]
    assert numbers(rb[torch.tensor([True, False, True, False, False])]) == [0, 2]
    with pytest.raises(InputError, match="expected a ReplayBuffer or a StepRing"):
        torchrl_storage(LazyTensorStorage(3))
    with pytest.raises(InputError, match="at least 2"):
        torchrl_storage(Episodes(max_steps=1))


def test_empty(ring):
    rb = ReplayBuffer(storage=torchrl_storage(ring))
    for start in range(0, 85, 5):
        rb.extend(ted(start, 5))
    rb.empty()
    assert len(rb) == 0
    assert rb.extend(ted(7, 3)).tolist() == [0, 1, 2]
    assert numbers(rb[:]) == [7, 8, 9]


def test_state_in_ram():
    rb = TensorDictReplayBuffer(storage=torchrl_storage(StepRing(60)), batch_size=8)
    for start in range(0, 85, 5):
        rb.extend(ted(start, 5))
    state = rb.state_dict()
    again = TensorDictReplayBuffer(storage=torchrl_storage(StepRing(60)), batch_size=8)
    again.load_state_dict(state)
    assert (again[:] == rb[:]).all()
    for buffer in (rb, again):
        assert buffer.extend(ted(85, 3)).tolist() == [25, 26, 27]
    assert (again[:] == rb[:]).all()
    with pytest.raises(RoleError, match="an empty ring"):
        rb.load_state_dict(state)


def test_state_on_disk(tmp_path):
    ring = StepRing(60, path=tmp_path / "ring")
    rb = TensorDictReplayBuffer(storage=torchrl_storage(ring), batch_size=8)
    rb.extend(ted(0, 5))
    state = rb.state_dict()
    assert "rows" not in state["_storage"]
    rb.load_state_dict(state)
    rb.extend(ted(5, 5))
    with pytest.raises(RoleError, match="after 5 rows, but .* has 10"):
        rb.load_state_dict(state)
    ring.close()


@pytest.mark.parametrize("kind", ["episodes", "steps"])
def test_dumps_and_loads(kind, tmp_path):
    def make():
        buf = StepRing(60) if kind == "steps" else Episodes(max_steps=64)
        return TensorDictReplayBuffer(storage=torchrl_storage(buf), batch_size=8)

    rb = make()
    for start in range(0, 85, 5):
        rb.extend(ted(start, 5))
    rb.dumps(tmp_path / "kept")
    again = make()
    again.loads(tmp_path / "kept")
    assert (again[:] == rb[:]).all()
    assert again.extend(ted(85, 3)).tolist() == [25, 26, 27]


def test_a_pickled_storage_reads(tmp_path):
    ring = StepRing(60, path=tmp_path / "ring")
    storage = torchrl_storage(ring)
    rb = ReplayBuffer(storage=storage)
    rb.extend(ted(0, 5))
    copy = pickle.loads(pickle.dumps(ring))
    assert numbers(torchrl_storage(copy).get(slice(None))) == [0, 1, 2, 3, 4]
    with pytest.raises(RoleError):
        torchrl_storage(copy).set(range(5, 7), ted(5, 2))
    copy.close()
    ring.close()


def test_a_collector_writes_into_the_ring(tmp_path):
    """One line: their collector, their slices, our rows, which are there when the process is gone."""
    from torchrl import collectors
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

    buf = Episodes(max_steps=1600, path=tmp_path / "ring")
    rb = to_torchrl(
        buf, sampler=SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False), batch_size=32
    )
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    made = vars(collectors).get("Collector") or collectors.SyncDataCollector  # of older versions
    collector = made(env, None, frames_per_batch=50, total_frames=200, replay_buffer=rb)
    for _ in collector:
        pass
    collector.shutdown()
    assert len(rb) == buf.num_steps_stored == 200
    rows = rb[:]
    same = rows["collector", "traj_ids"][1:] == rows["collector", "traj_ids"][:-1]
    assert torch.equal(rows["observation"][1:][same], rows["next", "observation"][:-1][same])
    drawn = rb.sample()
    within = drawn["step_count"].flatten().diff()
    assert set(within[drawn["collector", "traj_ids"].diff() == 0].tolist()) >= {1}
    buf.close()

    again = Episodes.open(tmp_path / "ring", mode="r+")
    rb = to_torchrl(again, batch_size=64)
    assert torch.equal(rb[:]["observation"], rows["observation"])
    rb.extend(rows[:50])
    assert again.num_steps_stored == 250
    for wrong in ({"storage": None}, {"writer": None}):
        with pytest.raises(InputError, match="can't be chosen"):
            to_torchrl(again, **wrong)
    again.close()
