"""The rollout buffer: GAE against float64, minibatches, sequences, timeouts, its contract."""

import errno
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmap import RolloutBuffer
from ringmap.buffers.rollout import generalized_advantages
from ringmap.errors import CorruptError, EnvironmentFault, InputError, NoClipsError
from ringmap.storage.disk.system import System


def reference(rewards, values, dones, last, gamma, lam):
    """The recursion, step by step, in float64."""
    advantages, later = np.zeros(rewards.shape), np.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        following = last if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + gamma * following * (1 - dones[t]) - values[t]
        later = delta + gamma * lam * (1 - dones[t]) * later
        advantages[t] = later
    return advantages


def random_step(rng, n, shape=(3,), action=(2,)):
    return {
        "observations": torch.from_numpy(rng.normal(size=(n, *shape)).astype("f4")),
        "privileged_observations": None,
        "actions": torch.from_numpy(rng.normal(size=(n, *action)).astype("f4")),
        "rewards": torch.from_numpy(rng.normal(size=n).astype("f4")),
        "dones": torch.from_numpy((rng.random(n) < 0.1).astype("f4")),
        "values": torch.from_numpy(rng.normal(size=n).astype("f4")),
        "log_probs": torch.from_numpy(rng.normal(size=n).astype("f4")),
    }


def filled(n=4, steps=6, seed=0, fill=None, **options):
    rng = np.random.default_rng(seed)
    buf = RolloutBuffer(n, steps, (3,), (2,), seed=0, **options)
    for t in range(steps if fill is None else fill):
        step = random_step(rng, n)
        step["observations"][:] = torch.arange(n)[:, None] * 1000.0 + t
        buf.add(**step)
    buf.compute_returns_and_advantages(torch.zeros(n))
    return buf


# -- advantages ----------------------------------------------------------------------------------


@given(
    st.integers(1, 40),
    st.integers(1, 20),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_gae_against_float64(steps, n, gamma, lam, seed, often):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, steps, n)).astype("f4")
    dones, last = (rng.random((steps, n)) < often).astype("f4"), rng.normal(size=n).astype("f4")
    tensors = [torch.from_numpy(a) for a in (rewards, values, dones, last)]
    copies = [t.clone() for t in tensors]
    got = generalized_advantages(*tensors, gamma, lam)
    expected = reference(*(a.astype("f8") for a in (rewards, values, dones, last)), gamma, lam)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_no_advantage_leaks_over_the_end_of_an_episode():
    """A control for `dones`: what comes after one changes nothing before it."""
    zeros = torch.zeros(4, 1)
    dones = torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None]
    later = torch.tensor([0.0, 0.0, 100.0, 100.0])[:, None]
    got = generalized_advantages(later, zeros, dones, torch.tensor([50.0]))
    assert got[:2].ravel().tolist() == [0.0, 0.0]
    assert (got[2:] > 90).all()


def test_a_timeout_counts_what_would_have_come():
    """Against an episode that really goes on for ever with this value."""
    buf = RolloutBuffer(2, 3, (1,), ())
    for t in range(3):
        cut = torch.tensor([float(t == 1), 0.0])
        buf.add(
            torch.zeros(2, 1),
            None,
            torch.zeros(2),
            torch.ones(2),
            cut,
            torch.zeros(2),
            torch.zeros(2),
            timeouts=cut,
            final_values=torch.tensor([7.0, float("nan")]),
        )
    buf.compute_returns_and_advantages(torch.zeros(2), gamma=0.5, gae_lambda=1.0)
    assert buf.returns[:, 0].tolist() == [1 + 0.5 * (1 + 0.5 * 7), 1 + 0.5 * 7, 1.0]
    assert buf.returns[:, 1].tolist() == [1.75, 1.5, 1.0]
    assert buf.rewards.unique().tolist() == [1.0]
    again = buf.returns.clone()
    buf.compute_returns_and_advantages(torch.zeros(2), gamma=0.5, gae_lambda=1.0)
    assert torch.equal(buf.returns, again)  # not counted twice


def test_only_the_filled_steps_count():
    buf, whole = filled(fill=3), filled(steps=3)
    assert len(buf) == 3
    data, expected = buf.get_all_data(), whole.get_all_data()
    assert all(torch.equal(data[name], expected[name]) for name in ("advantages", "returns", "observations"))


# -- the program of the guide --------------------------------------------------------------------


def test_the_program_of_the_guide():
    from ringmap.buffer.rollout_buffer import RolloutBuffer

    n = 64
    buffer = RolloutBuffer(
        num_envs=n,
        num_steps=24,
        obs_shape=(48,),
        action_shape=(12,),
        action_dtype=torch.float32,
        device="cpu",
        num_privileged_obs=0,
    )
    for _ in range(24):
        buffer.add(
            observations=torch.randn(n, 48),
            privileged_observations=None,
            actions=torch.randn(n, 12),
            rewards=torch.randn(n),
            dones=(torch.rand(n) < 0.1).float(),
            values=torch.randn(n, 1),
            log_probs=torch.randn(n),
        )
    buffer.compute_returns_and_advantages(last_values=torch.randn(n), gamma=0.99, gae_lambda=0.95)
    data = buffer.get_all_data()
    assert {name: None if v is None else tuple(v.shape) for name, v in data.items()} == {
        "observations": (24 * n, 48),
        "privileged_observations": None,
        "actions": (24 * n, 12),
        "old_log_probs": (24 * n,),
        "advantages": (24 * n,),
        "returns": (24 * n,),
        "values": (24 * n,),
    }
    assert tuple(buffer.observations.shape) == (24, n, 48)
    assert tuple(buffer.actions.shape) == (24, n, 12)
    for name in ("rewards", "dones", "values", "log_probs", "advantages", "returns"):
        assert tuple(getattr(buffer, name).shape) == (24, n)
    with pytest.raises(ValueError, match=r"full \(24 steps\)"):
        buffer.add(torch.zeros(n, 48), None, torch.zeros(n, 12), *[torch.zeros(n)] * 4)
    buffer.clear()
    assert len(buffer) == 0


# -- minibatches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num", [1, 3, 24])
def test_each_step_once_per_epoch(num, shuffle):
    buf = filled()
    expected = sorted(buf.observations.reshape(-1, 3)[:, 0].tolist())
    orders = []
    batches = list(buf.minibatches(num, epochs=2, shuffle=shuffle))
    assert len(batches) == 2 * num
    for epoch in (batches[:num], batches[num:]):
        seen = torch.cat([batch["observations"][:, 0] for batch in epoch]).tolist()
        assert sorted(seen) == expected
        orders.append(seen)
        sizes = [len(batch["actions"]) for batch in epoch]
        assert max(sizes) - min(sizes) <= 1
    assert (orders[0] == orders[1]) is not shuffle
    rows = {
        row[0]: value
        for row, value in zip(buf.observations.reshape(-1, 3).tolist(), buf.returns.ravel().tolist(), strict=True)
    }
    for batch in batches:
        assert batch["returns"].tolist() == [rows[key] for key in batch["observations"][:, 0].tolist()]


def test_advantages_are_normalized_over_all_steps():
    buf = filled(n=8, steps=10)
    whole = torch.cat([b["advantages"] for b in buf.minibatches(4, shuffle=False, normalize_advantages=True)])
    assert abs(whole.mean()) < 1e-6
    assert abs(whole.std(correction=0) - 1) < 1e-5
    plain = torch.cat([b["advantages"] for b in buf.minibatches(4, shuffle=False)])
    np.testing.assert_array_equal(plain, buf.advantages.reshape(-1))


def test_the_same_seed_gives_the_same_orders():
    orders = [torch.cat([b["observations"] for b in filled().minibatches(3, 2)]) for _ in range(2)]
    assert torch.equal(*orders)


def test_get_minibatch_draws_without_replacement():
    drawn = filled().get_minibatch(20)["observations"][:, 0]
    assert len(drawn.unique()) == 20


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_sequences_are_of_one_environment_in_order(length):
    rng = np.random.default_rng(0)
    buf = RolloutBuffer(4, 6, (3,), (2,), seed=0, hidden_shape={"h": (5,)})
    for t in range(6):
        step = random_step(rng, 4)
        step["observations"][:] = torch.arange(4)[:, None] * 1000.0 + t
        buf.add(**step, hidden={"h": torch.full((4, 5), float(t))})
    buf.compute_returns_and_advantages(torch.zeros(4))
    seen = []
    for batch in buf.sequence_minibatches(length, num=2):
        obs = batch["observations"][..., 0]
        assert obs.shape[0] == length
        assert torch.equal(obs, obs[0] + torch.arange(length)[:, None])
        assert torch.equal(batch["hidden"]["h"][:, 0], obs[0] % 1000)
        for name, whole in (("dones", buf.dones), ("returns", buf.returns)):
            envs, steps = (obs // 1000).long(), (obs % 1000).long()
            assert torch.equal(batch[name], whole[steps, envs])
        seen += obs.ravel().tolist()
    assert sorted(seen) == sorted(buf.observations[..., 0].ravel().tolist())


# -- the contract --------------------------------------------------------------------------------


def test_nested_and_privileged_observations():
    buf = RolloutBuffer(
        3,
        2,
        {"image": ((4, 4), np.uint8), "state": {"q": (2,)}},
        (),
        action_dtype=torch.int64,
        num_privileged_obs=9,
        privileged_obs_shape=(3, 3),
    )
    for t in range(2):
        obs = {
            "image": np.full((3, 4, 4), t, np.uint8),
            "state": {"q": torch.full((3, 2), float(t))},
        }
        buf.add(obs, torch.ones(3, 3, 3), torch.arange(3), *[torch.zeros(3)] * 4)
    buf.compute_returns_and_advantages(torch.zeros(3))
    data = buf.get_all_data()
    assert data["observations"]["image"].dtype == torch.uint8
    assert data["observations"]["state"]["q"][:, 0].tolist() == [0.0] * 3 + [1.0] * 3
    assert data["privileged_observations"].shape == (6, 3, 3)
    assert data["actions"].tolist() == [0, 1, 2] * 2
    assert RolloutBuffer(1, 1, (1,), (), num_privileged_obs=7).privileged_observations.shape == (
        1,
        1,
        7,
    )


def test_a_tensordict_is_an_observation():
    tensordict = pytest.importorskip("tensordict", reason="pip install -e '.[torchrl]'")
    buf = RolloutBuffer(3, 1, {"a": (2,)}, ())
    buf.add(tensordict.TensorDict({"a": torch.ones(3, 2)}, batch_size=[3]), None, *[torch.zeros(3)] * 5)
    assert buf.observations["a"].sum() == 6


BAD = {
    "missing": ({"privileged_observations": None}, "privileged_observations were declared, but are missing"),
    "shape": ({"rewards": torch.zeros(5)}, "rewards has shape"),
    "leaves": ({"observations": {"x": torch.zeros(4, 3)}}, "expected leaves"),
    "half": ({"timeouts": torch.zeros(4)}, "go together"),
    "hidden": ({"hidden": torch.zeros(4)}, "hidden_shape was not declared"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_steps_change_nothing(name):
    buf = RolloutBuffer(4, 3, (3,), (2,), num_privileged_obs=2)
    step = {
        **random_step(np.random.default_rng(0), 4),
        "privileged_observations": torch.zeros(4, 2),
    }
    buf.add(**step)
    before = {key: value.clone() for key, value in buf._tensors.by_name.items()}
    changed, message = BAD[name]
    with pytest.raises(InputError, match=message):
        buf.add(**{**step, **changed})
    assert len(buf) == 1
    assert all(torch.equal(value, before[key]) for key, value in buf._tensors.by_name.items())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.minibatches(0), "num"),
        (lambda b: b.minibatches(25), "only 24 steps"),
        (lambda b: b.minibatches(2, 0), "epochs"),
        (lambda b: b.get_minibatch(25), "only 24 steps"),
        (lambda b: b.sequence_minibatches(4), "no multiple of length=4"),
        (lambda b: b.sequence_minibatches(3, 9), "only 8 sequences"),
        (lambda b: b.compute_returns_and_advantages(torch.zeros(3)), "expected"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(InputError, match=message):
        call(filled())


def test_advantages_of_old_steps_are_not_handed_out():
    buf = filled(fill=5)
    buf.add(**random_step(np.random.default_rng(0), 4))
    for call in (
        buf.get_all_data,
        lambda: buf.minibatches(1),
        lambda: buf.get_minibatch(1),
        lambda: buf.sequence_minibatches(1),
    ):
        with pytest.raises(NoClipsError, match="compute_returns_and_advantages first"):
            call()
    buf.clear()
    with pytest.raises(InputError, match="no step is stored"):
        buf.compute_returns_and_advantages(torch.zeros(4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, (1,), ()), "num_envs"),
        ((1, 0, (1,), ()), "num_steps"),
        ((1, 1, "x", ()), "expected a shape"),
        ((1, 1, (1,), (), "x"), "no dtype"),
        ((1, 1, (1,), (), "f4", "nowhere"), "device"),
        ((1, 1, (1,), (), "f4", "cpu", -1), "num_privileged_obs"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        RolloutBuffer(*arguments)


def test_save_and_load(tmp_path):
    buf, other = filled(fill=5), RolloutBuffer(4, 6, (3,), (2,))
    next(iter(buf.minibatches(2)))
    buf.save(tmp_path / "rollout.pt")
    expected = [batch["returns"].tolist() for batch in buf.minibatches(3, 2)]
    other.load(tmp_path / "rollout.pt")
    assert len(other) == 5
    assert [batch["returns"].tolist() for batch in other.minibatches(3, 2)] == expected
    copy = pickle.loads(pickle.dumps(buf))
    assert torch.equal(copy.returns, buf.returns)
    with pytest.raises(InputError, match="expected num_steps=7"):
        RolloutBuffer(4, 7, (3,), (2,)).load(tmp_path / "rollout.pt")
    (tmp_path / "rollout.pt").write_bytes(b"nonsense")
    with pytest.raises(CorruptError, match="no file of a RolloutBuffer"):
        other.load(tmp_path / "rollout.pt")
    assert len(other) == 5


def test_what_is_saved_is_durable_or_was_not_touched(tmp_path, monkeypatch):
    """The bytes are synced before the name counts, and the folder after; a disk that fails leaves the old file."""
    saw = []
    path = tmp_path / "rollout.pt"
    with monkeypatch.context() as watched:
        for name in ("fsync", "fdatasync"):
            real = getattr(os, name)
            watched.setattr(os, name, lambda fd, real=real: (saw.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
        filled().save(path)
    assert [os.path.basename(one) for one in saw] == ["rollout.pt.tmp", tmp_path.name]
    before = path.read_bytes()

    def fails(self, fd, *rest):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(System, "sync", fails)
    with pytest.raises(EnvironmentFault, match="nothing was changed"):
        filled(fill=2).save(path)
    assert path.read_bytes() == before


def test_repr():
    assert repr(filled()) == "RolloutBuffer(6/6 steps of 4, {'observations': (3,), 'actions': (2,)}, cpu)"


def test_a_value_that_a_dtype_can_not_hold_is_refused():
    buf = RolloutBuffer(2, 2, (1,), (), action_dtype=np.int64, obs_dtype=np.uint8)
    zeros = torch.zeros(2)
    good = {
        "observations": torch.zeros(2, 1),
        "privileged_observations": None,
        "actions": zeros,
        "rewards": zeros,
        "dones": zeros,
        "values": zeros,
        "log_probs": zeros,
    }
    for name, bad in (
        ("actions", torch.tensor([1.7, 2.0])),
        ("observations", torch.tensor([[300.0], [0.0]])),
        ("observations", torch.tensor([[-1], [0]])),
        ("rewards", torch.tensor([1e300, 0], dtype=torch.float64)),
        ("values", torch.tensor([1j, 0])),
    ):
        with pytest.raises(ValueError, match=f"{name} .* can't hold"):
            buf.add(**{**good, name: bad})
    assert len(buf) == 0
    infinite = torch.tensor([torch.inf, 0.1], dtype=torch.float64)
    buf.add(**{**good, "actions": torch.tensor([1.0, 2.0], dtype=torch.float64), "rewards": infinite})
    assert buf.actions[0].tolist() == [1, 2]
    other = RolloutBuffer(2, 2, (1,), (), action_dtype=np.float32, obs_dtype=np.uint8)
    with pytest.raises(ValueError, match="expected columns"):
        other.load_state_dict(buf.state_dict())
    assert len(other) == 0


def test_a_timeout_ends_an_episode_though_it_is_not_called_done():
    def advantages(dones):
        buf = RolloutBuffer(1, 3, (1,), ())
        for t in range(3):
            late = t == 1
            buf.add(
                torch.zeros(1, 1),
                None,
                torch.zeros(1),
                torch.ones(1),
                torch.tensor([dones * late]),
                torch.full((1,), 5.0),
                torch.zeros(1),
                timeouts=torch.tensor([late]),
                final_values=torch.full((1,), 7.0),
            )
        buf.compute_returns_and_advantages(torch.full((1,), 5.0))
        return buf.advantages.tolist(), buf.dones.tolist()

    assert advantages(0.0) == advantages(1.0)


def test_privileged_observations_that_are_not_declared():
    buf = RolloutBuffer(1, 3, (1,), ())
    with pytest.raises(ValueError, match="privileged_obs_shape was not declared"):
        buf.add(torch.zeros(1, 1), torch.zeros(1, 1), *[torch.zeros(1)] * 5)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 1000},
        {"step": 2.5},
        {"tensors": [1]},
        {"rng": 3},
        {"computed": torch.zeros(3)},
        {"num_steps": torch.zeros(3)},
        {"version": torch.zeros(3)},
    ],
    ids=lambda change: str(change)[:20],
)
def test_a_file_that_makes_no_sense_changes_nothing(tmp_path, change):
    buf, path = filled(), tmp_path / "rollout.pt"
    buf.save(path)
    torch.save({**torch.load(path, weights_only=True), **change}, path)
    before = buf.state_dict()
    with pytest.raises((CorruptError, InputError), match=rf"^{path}: "):
        buf.load(path)
    after = buf.state_dict()
    for name, tensor in before.pop("tensors").items():
        assert torch.equal(tensor, after["tensors"][name])
    assert torch.equal(before.pop("rng"), after.pop("rng"))
    assert {name: after[name] for name in before} == before
