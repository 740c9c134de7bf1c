"""TensorDicts in, TensorDicts out: with TorchRL's own buffers, and beside its own class of the same name."""

import warnings

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed (extra torchrl)")
    torchrl = pytest.importorskip("torchrl.data", reason="torchrl is not installed (extra torchrl)")

from ringmap.buffers.steps import StepRing
from ringmap.data import OfflineToOnlineReplayBuffer
from ringmap.data import ReplayBuffer as Episodes

LazyTensorStorage, ReplayBuffer = torchrl.LazyTensorStorage, torchrl.ReplayBuffer
TensorDict = tensordict.TensorDict

pytestmark = pytest.mark.filterwarnings("ignore")  # what torchrl says is not for us to mend


def ted(count, side):
    """Return transitions in TorchRL's form."""
    obs = torch.full((count, 4), float(side))
    reward, done = torch.arange(count)[:, None] * 1.0, torch.zeros(count, 1, dtype=torch.bool)
    following = TensorDict({"observation": obs + 0.5, "reward": reward, "done": done}, [count])
    return TensorDict({"observation": obs, "action": torch.zeros(count, 2), "next": following}, [count])


def offline_of(data, **options):
    made = ReplayBuffer(storage=LazyTensorStorage(1000), **options)
    made.extend(data)
    return made


def test_program_of_the_reference_page():
    """Source: TorchRL, OfflineToOnlineReplayBuffer (reference page)."""
    offline = ReplayBuffer(storage=LazyTensorStorage(1000))
    _ = offline.extend(TensorDict({"observation": torch.randn(1000, 4)}, [1000]))
    rb = OfflineToOnlineReplayBuffer(
        offline_dataset=offline,
        online_capacity=500,
        offline_fraction=0.5,
        batch_size=32,
    )
    _ = rb.extend(TensorDict({"observation": torch.randn(10, 4)}, [10]))
    assert rb.sample(32).batch_size == torch.Size([32])


@pytest.mark.parametrize("home", ["ram", "disk"])
def test_nested_rows_come_back_nested(home, tmp_path):
    path = {"path": tmp_path / "ring"} if home == "disk" else {}
    offline = offline_of(ted(100, 0))
    before = offline[:].clone()
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=50, offline_fraction=0.25, **path)
    index = rb.extend(ted(10, 1))
    assert torch.equal(index, torch.arange(10))
    batch = rb.sample(8)
    assert batch["observation"][:, 0].tolist() == [0] * 2 + [1] * 6
    assert batch["next", "observation"][:, 0].tolist() == [0.5] * 2 + [1.5] * 6
    assert batch["next", "done"].dtype == torch.bool
    assert {type(key) for key in batch.keys(True, True)} == {str, tuple}
    assert (offline[:] == before).all()
    rb.close()
    if path:
        again = OfflineToOnlineReplayBuffer(offline, online_capacity=50, **path)
        assert again.sample(8)["next", "observation"][:, 0].tolist() == [0.5] * 4 + [1.5] * 4
        again.close()


def test_a_tensordict_in_extend_alone_is_enough():
    offline = Episodes(max_steps=100)
    offline.write_episode({"observation": torch.zeros(20, 4)})
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=50)
    assert isinstance(rb.sample(4), dict)
    rb.extend(TensorDict({"observation": torch.ones(5, 4)}, [5]))
    batch = rb.sample(4)
    assert isinstance(batch, TensorDict)
    assert batch["observation"].dtype == torch.float32
    assert OfflineToOnlineReplayBuffer(offline, online_capacity=5, to="tensordict").sample(3).shape == (3,)


def test_torchrl_storage_as_online_half():
    rb = OfflineToOnlineReplayBuffer(offline_of(ted(100, 0)), online_storage=LazyTensorStorage(20))
    for _ in range(3):
        rb.extend(ted(10, 1))
    assert isinstance(rb.online_buffer, ReplayBuffer)
    assert len(rb) == 100 + 20
    assert rb.sample(4)["observation"][:, 0].tolist() == [0, 0, 1, 1]


def test_drawing_from_torchrl_can_be_resumed():
    rb = OfflineToOnlineReplayBuffer(offline_of(ted(100, 0)), online_capacity=20, seed=0)
    rb.extend(ted(10, 1))
    state = rb.state_dict()
    first = rb.sample(16)
    rb.sample(3)
    rb.load_state_dict(state)
    assert (rb.sample(16) == first).all()


def test_its_sampler_is_used_and_its_notes_are_left_out():
    sampler = torchrl.SamplerWithoutReplacement(shuffle=False)
    offline = torchrl.TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=8)
    offline.extend(ted(100, 0))
    assert "index" in offline.sample()
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=20)
    rb.extend(ted(10, 1))
    batch = rb.sample(16)
    assert batch["next", "reward"][:8, 0].tolist() == list(range(8, 16))
    assert set(batch.keys()) == {"observation", "action", "next"}


@pytest.mark.parametrize("fraction", [0.5, 0.3, 0.85])
def test_the_split_is_that_of_torchrl(fraction):
    """Beside the real class: the same number of offline rows for every batch size and at every step of annealing."""
    theirs = torchrl.OfflineToOnlineReplayBuffer(offline_of(ted(100, 0)), online_capacity=50, offline_fraction=fraction)
    ours = OfflineToOnlineReplayBuffer(offline_of(ted(100, 0)), online_capacity=50, offline_fraction=fraction)
    for rb in (theirs, ours):
        rb.extend(ted(10, 1))
    for step in (0, 3, 9, 10, 12):
        for size in range(1, 33, 3):
            for rb in (theirs, ours):
                rb.anneal(step, 10)
            assert ours.offline_fraction == pytest.approx(theirs.offline_fraction)
            counts = [int((rb.sample(size)["observation"][:, 0] == 0).sum()) for rb in (ours, theirs)]
            assert counts[0] == counts[1]


def test_what_is_no_tensordict():
    offline = offline_of(torch.arange(10))
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=20)
    with pytest.raises(ValueError, match="expected TensorDicts"):
        rb.sample(3)
    with pytest.raises(ValueError, match="different columns"):
        rb = OfflineToOnlineReplayBuffer(offline_of(ted(10, 0)), online_capacity=20)
        rb.extend(ted(5, 1).exclude(("next", "reward")))
        rb.sample(4)


def test_a_ring_is_an_offline_half_too():
    ring = StepRing(50)
    ring.add({"observation": torch.zeros(10, 4)})
    rb = OfflineToOnlineReplayBuffer(ring, online_capacity=20)
    rb.extend(TensorDict({"observation": torch.ones(5, 4)}, [5]))
    assert rb.sample(4)["observation"][:, 0].tolist() == [0, 0, 1, 1]


def test_a_tensordict_is_an_episode_to_a_replay_buffer():
    offline, online = Episodes(max_steps=50), Episodes(max_steps=50)
    offline.write_episode({"obs": np.zeros((20, 3), np.float32)})
    rb = OfflineToOnlineReplayBuffer(offline, online_storage=online, seed=0)
    assert rb.extend(TensorDict({"obs": torch.ones(10, 3)}, [10])).tolist() == list(range(10))
    assert rb.sample(8)["obs"].shape == (8, 3)
    assert online.lengths.tolist() == [10]
