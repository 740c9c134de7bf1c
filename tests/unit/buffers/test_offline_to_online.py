"""Batches of offline and online rows: how many of each, from what, and what happens when it is wrong."""

import errno
import math
import pickle
import sys
from fractions import Fraction

import h5py
import numpy as np
import pytest
import torch

from ringmap import RolloutBuffer, TransitionReplayBuffer
from ringmap.buffers import torchrl_storage as storage_module
from ringmap.buffers.steps import StepRing
from ringmap.data import (
    DistillationBuffer,
    NStep,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    ShardedReplayBuffer,
    Window,
    convert,
    get_format,
    list_formats,
    list_prefixes,
    load_dataset,
    register_dataset,
)
from ringmap.errors import (
    InputError,
    MissingExtraError,
    NoClipsError,
    NotFoundError,
    ReadOnlyError,
    ReplacedError,
    SyncFailedError,
)
from ringmap.formats.catalog import load
from ringmap.samplers import PrioritizedSampler
from tests.disks import FaultyDisk
from tests.tiers import few

FRACTIONS = (0.5, 0.25, 0.1, 1 / 3, 0.85)


def episode(length, side, start=0):
    """Return rows that say which side they are of, and which row they are."""
    return {
        "obs": np.stack([np.full(length, side), np.arange(start, start + length)], 1).astype("f4"),
        "action": np.arange(start, start + length),
    }


def offline_buffer(steps=30, **options):
    buf = ReplayBuffer(max_steps=1000, **options)
    buf.write_episode(episode(steps, 0))
    return buf


def sides(batch):
    return np.asarray(batch["obs"])[..., 0].reshape(len(batch["obs"]), -1)[:, 0]


@pytest.fixture
def made(buffer):
    """What makes mixed buffers, their ring in RAM and on disk."""
    buffers = []

    def make(offline=None, **options):
        if buffer.on_disk:
            options.setdefault("path", buffer.folder / f"ring-{len(buffers)}")
        options.setdefault("online_capacity", 50)
        rb = OfflineToOnlineReplayBuffer(offline or offline_buffer(), **{"seed": 0, **options})
        buffers.append(rb)
        return rb

    yield make
    for rb in buffers:
        rb.close()


# -- how many of each --------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_exact_split_of_every_batch_size(fraction, made):
    rb = made(offline_fraction=fraction)
    rb.extend(episode(20, 1))
    for size in range(1, 65):
        for _ in range(2):
            found = sides(rb.sample(size))
            offline = round(fraction * size)  # Python's rounding: 0.5 to the even one
            assert found.tolist() == [0] * offline + [1] * (size - offline)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("size", few([3, 1, 7]))
def test_carry_keeps_the_running_error_below_one_row(fraction, size, made):
    rb = made(offline_fraction=fraction, rounding="carry")
    rb.extend(episode(20, 1))
    offline = 0
    for batches in range(1, 201):
        offline += int((sides(rb.sample(size)) == 0).sum())
        exact = Fraction(fraction) * size * batches
        assert abs(offline - exact) <= 0.5 + 1e-9
    # What rounding alone does in the end, for this fraction and size, is what carrying is there for.
    assert offline == pytest.approx(fraction * size * 200, abs=0.51)


def test_online_empty_is_all_offline(made):
    rb = made(offline_fraction=0.1)
    assert sides(rb.sample(16)).tolist() == [0] * 16
    rb.anneal(1, 1)
    assert rb.offline_fraction == 0
    assert sides(rb.sample(16)).tolist() == [0] * 16
    rb.extend(episode(3, 1))
    assert sides(rb.sample(16)).tolist() == [1] * 16


@pytest.mark.parametrize(
    ("step", "total", "expected"),
    [(0, 10, 0.5), (5, 10, 0.25), (10, 10, 0), (25, 10, 0), (-5, 10, 0.5), (1, 4, 0.375)],
)
def test_anneal(step, total, expected):
    rb = OfflineToOnlineReplayBuffer(offline_buffer(), online_capacity=5)
    rb.anneal(2, 3)
    rb.anneal(step, total)  # from the base, whatever came before
    assert rb.offline_fraction == pytest.approx(expected)
    for wrong in ((1, 0), (1, -1), (1, math.nan), ("a", 3), (1, "b"), (math.nan, 10)):
        with pytest.raises(ValueError, match="total_steps must be positive|step must be a number"):
            rb.anneal(*wrong)
    assert rb.offline_fraction == pytest.approx(expected)


def test_rows_are_drawn_uniformly(made):
    rb = made(offline_fraction=0.5, online_capacity=20)
    for start in range(0, 35, 5):
        rb.extend(episode(5, 1, start))
    counts = np.zeros((2, 40))
    for _ in range(100):
        obs = rb.sample(80)["obs"].astype(int)
        np.add.at(counts, (obs[:, 0], obs[:, 1]), 1)
    online, offline = counts[1, 15:35], counts[0, :30]
    assert counts[1].sum() == online.sum() == 4000  # the newest twenty only
    for found in (online, offline):
        expected = found.sum() / len(found)
        chi = ((found - expected) ** 2 / expected).sum()
        assert chi < len(found) + 5 * math.sqrt(2 * len(found))


# -- the ring of rows --------------------------------------------------------------------------


def test_extend_returns_ids_and_leaves_the_offline_data_alone(made):
    offline = offline_buffer()
    before = offline.get_col_data("obs").tobytes()
    rb = made(offline, online_capacity=10)
    assert rb.extend(episode(4, 1)).tolist() == [0, 1, 2, 3]
    assert rb.extend(episode(8, 1, 4)).tolist() == list(range(4, 12))
    assert rb.extend({"obs": np.empty((0, 2), "f4"), "action": np.empty(0, int)}).tolist() == []
    assert len(rb) == 30 + 10
    ring = rb.online_buffer
    assert ring.ids().tolist() == list(range(2, 12))
    assert ring.rows(ring.ids())["obs"][:, 1].tolist() == list(range(2, 12))
    assert rb.offline_buffer is offline
    assert offline.get_col_data("obs").tobytes() == before
    with pytest.raises(ValueError, match="11 rows exceed capacity=10"):
        rb.extend(episode(11, 1))


def test_more_rows_than_a_group_are_all_or_nothing(buffer):
    path = {"path": buffer.folder / "ring"} if buffer.on_disk else {}
    ring = StepRing(5000, **path)
    ring.add({"x": np.zeros(1, np.uint8)})
    bad = np.zeros(4000)
    bad[-1] = 0.5
    with pytest.raises(ValueError, match="step 3999"):
        ring.add({"x": bad})
    assert len(ring) == 1  # though the first groups of it are good
    assert ring.add({"x": np.arange(4000) % 256}).tolist() == list(range(1, 4001))
    assert ring.rows(ring.ids())["x"].tolist() == [0, *(np.arange(4000) % 256).tolist()]
    ring.close()


# -- state -------------------------------------------------------------------------------------


def test_a_mix_is_closed_after_a_failed_sync(tmp_path):
    """As every buffer: the error came with the sync, and `close` gives everything back."""
    disk = FaultyDisk()
    rb = OfflineToOnlineReplayBuffer(offline_buffer(), online_capacity=20, path=tmp_path / "ring", disk=disk)
    rb.extend(episode(5, 1))
    disk.fail(1, OSError(errno.EIO, "bad sector"), only="sync")
    with pytest.raises(SyncFailedError):
        rb.flush()
    disk.lift()
    rb.close()
    again = OfflineToOnlineReplayBuffer.open(tmp_path / "ring", offline_buffer())
    assert again.extend(episode(2, 1)).tolist() == [5, 6]
    again.close()


# -- what comes out ----------------------------------------------------------------------------


def test_to_torch_provenance_and_transform(made):
    rb = made(
        offline_fraction=0.25,
        device="cpu",
        provenance="offline",
        transform=lambda batch: {**batch, "sum": batch["obs"].sum()},
    )
    rb.extend(episode(5, 1))
    batch = rb.sample(8)
    assert batch["offline"].tolist() == [True] * 2 + [False] * 6
    assert batch["obs"].dtype == torch.float32
    assert batch["sum"] == batch["obs"].sum()
    clash = made(provenance="obs")
    with pytest.raises(ValueError, match="name of a column that is stored"):
        clash.sample(2)


def test_nested_rows(made):
    offline = ReplayBuffer(max_steps=10)
    offline.write_episode({"obs/eye": np.zeros((4, 2)), "reward": np.zeros(4)})
    rb = made(offline)
    rb.extend({"obs": {"eye": np.ones((3, 2))}, "reward": torch.ones(3)})
    batch = rb.sample(4)
    assert batch["obs"]["eye"].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    with pytest.raises(ValueError, match="holds a slash"):
        rb.extend({"obs": {"eye": np.ones((3, 2))}, "a/b": np.ones(3)})


def test_different_dtypes_take_the_one_that_holds_both(made):
    rb = made()
    rb.extend({"obs": np.ones((3, 2)), "action": np.ones(3, np.int32)})
    batch = rb.sample(4)
    assert (batch["obs"].dtype, batch["action"].dtype) == (np.float64, np.int64)


def test_clips_on_both_sides():
    offline = offline_buffer(history_len=3, frameskip=2, seed=0)
    online = ReplayBuffer(max_steps=100, history_len=3, frameskip=2, seed=1)
    rb = OfflineToOnlineReplayBuffer(offline, online_storage=online, seed=0)
    assert rb.extend(episode(12, 1)).tolist() == list(range(12))
    assert rb.extend([episode(8, 1), episode(9, 1)]).tolist() == list(range(12, 29))
    batch = rb.sample(6)
    assert sides(batch).tolist() == [0] * 3 + [1] * 3
    assert batch["obs"].shape == (6, 3, 2)
    assert batch["action"].shape == (6, 3, 2)
    assert (np.diff(batch["obs"][..., 1], axis=1) == 2).all()
    assert online.num_episodes == 3
    state = rb.state_dict()
    expected = rb.sample(6)["obs"].tolist()
    rb.load_state_dict(state)
    assert rb.sample(6)["obs"].tolist() == expected
    view = OfflineToOnlineReplayBuffer(offline.view(), online_storage=online)
    assert sides(view.sample(6)).tolist() == [0] * 3 + [1] * 3
    with pytest.raises(InputError, match="expected an episode"):
        rb.extend(3)
    with pytest.raises(InputError, match="save it by its own means"):
        rb.save("nowhere")


def test_episodes_of_one_step_are_rows_on_both_sides():
    online = ReplayBuffer(max_steps=100)
    for offline in (offline_buffer(), offline_buffer().view()):
        rb = OfflineToOnlineReplayBuffer(offline, online_storage=online)
        rb.extend(episode(9, 1))
        batch = rb.sample(4)
        assert batch["obs"].shape == (4, 2)
        assert len(batch["action"]) == 4


class Bag:
    """A buffer of somebody else's."""

    def __len__(self):
        return 1

    def sample(self, count):
        return {"obs": np.zeros((count, 2))}

    def add(self, obs):
        pass


def test_buffers_of_other_classes_are_refused():
    for given in ({"online_storage": Bag()}, {"online_capacity": 5}):
        offline = Bag() if "online_capacity" in given else offline_buffer()
        with pytest.raises(InputError, match=r"must be a dataset or a buffer of ours, or a TorchRL buffer, got Bag"):
            OfflineToOnlineReplayBuffer(offline, **given)
    mix = OfflineToOnlineReplayBuffer(offline_buffer(), online_capacity=5)
    for given in (mix, RolloutBuffer(1, 4, (3,), ())):
        with pytest.raises(InputError, match="can't be a half of a mix"):
            OfflineToOnlineReplayBuffer(given, online_capacity=5)


def test_a_source_without_priorities_refuses_them():
    for online in (ReplayBuffer(50), TransitionReplayBuffer(50, (2,), device=None), DistillationBuffer(50)):
        rb = OfflineToOnlineReplayBuffer(offline_buffer(), online_storage=online)
        with pytest.raises(InputError, match="does not draw by priority"):
            rb.update_priorities([1], [1.0])
        with pytest.raises(InputError, match=r"of one shape \(B,\)"):
            rb.update_priorities([1, 2], [1.0])


class Favourite:
    """A sampler with priorities: only one clip has any."""

    def __call__(self, step, buffer, batch_size, history_len):
        self.ids, self.weights = np.full(batch_size, 3), np.full(batch_size, 0.25, np.float32)
        return self.ids

    def update_priorities(self, ids, values):
        self.told = ids.tolist()


def test_priorities_of_a_replay_buffer():
    online = ReplayBuffer(max_steps=100, sampler=Favourite())
    rb = OfflineToOnlineReplayBuffer(offline_buffer(), online_storage=online)
    rb.extend(episode(9, 1))
    batch = rb.sample(4)
    assert batch["obs"][2:].tolist() == [[1, 3], [1, 3]]
    assert batch["ids"].tolist() == [-1, -1, 3, 3]
    assert rb.update_priorities(batch["ids"], np.ones(4)) == 2
    assert online.sampler.told == [3, 3]


def test_transitions_by_priority():
    def add(buf, side, count):
        state = np.full((count, 3), side, np.float32)
        zeros = np.zeros(count, np.float32)
        rows = {"observations": state, "actions": zeros[:, None], "rewards": np.arange(count)}
        buf({**rows, "next_observations": state, "dones": zeros})

    offline, online = (
        TransitionReplayBuffer(100, (3,), action_shape=(1,), action_dtype=np.float32, seed=0, sampler=sampler)
        for sampler in (None, PrioritizedSampler(alpha=1.0, rng=0))
    )
    add(lambda rows: offline.add(**rows), 0, 10)
    rb = OfflineToOnlineReplayBuffer(offline, online_storage=online, seed=0)
    add(rb.extend, 1, 5)
    batch = rb.sample(16)  # more online rows than there are
    assert batch["observations"][:, 0].tolist() == [0] * 8 + [1] * 8
    values = np.where(batch["rewards"] == 2, 1.0, 0.0)
    assert rb.update_priorities(batch["ids"], values) == 8
    missing = np.setdiff1d(np.arange(5), batch["ids"])
    online.update_priorities(missing, np.zeros(len(missing)))
    online.update_priorities(np.array([2]), np.array([1.0]))
    assert (rb.sample(40)["rewards"][20:] == 2).all()
    rb.load_state_dict(rb.state_dict())


# -- wrong ways --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "got neither"),
        ({"online_capacity": 5, "online_storage": ReplayBuffer(9)}, "got both"),
        ({"online_capacity": 0}, "online_capacity must be positive"),
        ({"online_capacity": 5, "batch_size": 0}, "batch_size must be positive"),
        ({"online_capacity": 5, "num_steps": 3}, r"\['num_steps'\] are for loading"),
        ({"online_capacity": 5, "rounding": "up"}, "rounding must be one of"),
        ({"online_capacity": 5, "to": "jax"}, "to must be one of"),
        ({"online_capacity": 5, "to": "numpy", "device": "cpu"}, "are for tensors"),
        ({"online_storage": ReplayBuffer(9), "path": "here"}, "path is for the ring"),
        ({"online_storage": object()}, "online_storage must be a dataset"),
        ({"online_storage": ReplayBuffer(9, 2)}, r"clips of \(1, 1\).*into \(2, 1\)"),
        *(
            ({"online_capacity": 5, "offline_fraction": f}, "between 0 and 1")
            for f in (0, 1, -0.1, 1.5, math.nan, "half", None)
        ),
    ],
)
def test_wrong_arguments(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        OfflineToOnlineReplayBuffer(offline_buffer(), **options)
    assert list(tmp_path.iterdir()) == []


def test_wrong_offline_data():
    for given in (3, [1, 2], None):
        with pytest.raises(ValueError, match="offline_dataset must be a dataset"):
            OfflineToOnlineReplayBuffer(given, online_capacity=5)
    with pytest.raises(ValueError, match="batch_size is needed"):
        OfflineToOnlineReplayBuffer("minari:some/thing-v0", online_capacity=5)
    with pytest.raises(ValueError, match="makes a ring of rows"):
        OfflineToOnlineReplayBuffer(offline_buffer(history_len=2), online_capacity=5)
    empty = OfflineToOnlineReplayBuffer(ReplayBuffer(max_steps=5), online_capacity=5)
    with pytest.raises(NoClipsError, match="offline data, which is empty"):
        empty.sample(3)
    silent = OfflineToOnlineReplayBuffer(offline_buffer(), online_storage=load_only())
    with pytest.raises(ValueError, match="can't be written"):
        silent.extend({"obs": [1]})


def load_only():
    return offline_buffer().view()


def test_wrong_batches(made):
    rb = made()
    with pytest.raises(ValueError, match="no batch_size"):
        rb.sample()
    for size in (0, -1, 2.5):
        with pytest.raises(ValueError, match="batch_size must be positive"):
            rb.sample(size)
    rb.extend({"obs": np.ones((3, 2)), "act": np.ones(3)})
    with pytest.raises(KeyError, match=r"only offline \['action'\], only online \['act'\]"):
        rb.sample(4)
    rb = made(batch_size=4)
    assert len(rb.sample()["obs"]) == 4
    rb.extend({"obs": np.ones((3, 5)), "action": np.ones(3)})
    with pytest.raises(ValueError, match=r"'obs' has shape \(2,\) offline and \(5,\) online"):
        rb.sample()
    for wrong in (3, [1, 2], {3: [1]}):
        with pytest.raises(ValueError, match=r"expected a mapping|keys are strings"):
            rb.extend(wrong)


# -- ids and paths -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hdf5", "folder"])
def test_a_path_of_a_set(name, tmp_path):
    path = tmp_path / "prior"
    with get_format(name).open_writer(path) as writer:
        for start in range(0, 30, 10):
            writer.write_episode(episode(10, 0, start))
    rb = OfflineToOnlineReplayBuffer(str(path), online_capacity=20, batch_size=8, seed=0, num_steps=1)
    rb.extend(episode(7, 1))
    seen = set()
    for _ in range(20):
        batch = rb.sample()
        assert sides(batch).tolist() == [0] * 4 + [1] * 4
        assert (batch["obs"][:, 1] == batch["action"]).all()
        seen |= set(batch["action"][:4].tolist())
    assert len(seen & set(range(30))) == len(seen) > 20
    state = rb.state_dict()
    expected = rb.sample()["obs"].tolist()
    rb.load_state_dict(state)
    assert rb.sample()["obs"].tolist() == expected
    online = ReplayBuffer(max_steps=50, history_len=2)
    clips = OfflineToOnlineReplayBuffer(path, online_storage=online, batch_size=4, num_steps=2)
    clips.extend(episode(5, 1))
    assert clips.sample()["obs"].shape == (4, 2, 2)


def test_a_directory_of_a_buffer(tmp_path):
    with offline_buffer(path=tmp_path / "prior"):
        pass
    rb = OfflineToOnlineReplayBuffer(tmp_path / "prior", online_capacity=20, batch_size=8)
    assert sides(rb.sample()).tolist() == [0] * 8


def test_a_transform_of_the_dataset_is_its_own(tmp_path):
    with get_format("hdf5").open_writer(tmp_path / "prior.h5") as writer:
        writer.write_episode(episode(10, 0))
    dataset = load_dataset(tmp_path / "prior.h5", transform=lambda s: {"obs": s["obs"] + 5})
    rb = OfflineToOnlineReplayBuffer(dataset, online_capacity=20)
    assert (sides(rb.sample(4)) == 5).all()
    assert rb.sample(4)["obs"].shape == (4, 2)


@pytest.fixture
def prefix():
    yield "toy"
    load._LOADERS.pop("toy", None)


def test_register_dataset(prefix):
    asked = []

    def loader(name, **options):
        asked.append((name, options))
        return offline_buffer()

    register_dataset(prefix, loader)
    assert prefix in list_prefixes()
    rb = OfflineToOnlineReplayBuffer("toy:a:b", online_capacity=5, batch_size=4, depth=3)
    assert asked == [("a:b", {"depth": 3})]  # split at the first ":" only
    assert len(rb.sample()["obs"]) == 4
    with pytest.raises(ValueError, match="already registered"):
        register_dataset(prefix, loader)
    for wrong in ("", "a:b", 3):
        with pytest.raises(ValueError, match="non-empty string without ':'"):
            register_dataset(wrong, loader)
    with pytest.raises(ValueError, match="must be callable"):
        register_dataset("other", 3)


def test_a_loader_that_names_batch_size_is_given_it(prefix):
    register_dataset(prefix, lambda name, batch_size: asked.append(batch_size) or offline_buffer())
    asked = []
    OfflineToOnlineReplayBuffer("toy:x", online_capacity=5, batch_size=4)
    assert asked == [4]


def test_unknown_prefix_names_the_known():
    for name in ("mujoco:hopper", "Minari:x", ":x"):
        with pytest.raises(ValueError, match=r"unknown prefix.*'minari', 'lerobot', 'd4rl'"):
            OfflineToOnlineReplayBuffer(name, online_capacity=5, batch_size=4)
    with pytest.raises(ValueError, match="names no dataset"):
        load_dataset("d4rl:")


def test_a_path_with_a_colon_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with get_format("hdf5").open_writer("d4rl:odd.h5") as writer:
        writer.write_episode(episode(10, 0))
    assert len(load_dataset("d4rl:odd.h5")) == 10


def write_d4rl(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values


def test_d4rl(tmp_path, monkeypatch):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "d4rl"))
    terminals, timeouts = np.zeros(12, bool), np.zeros(12, bool)
    terminals[3] = timeouts[3] = timeouts[7] = timeouts[8] = True  # then 4, 4, 1 and 3 rows
    rows = np.arange(12)
    columns = {
        "observations": rows[:, None].astype("f4"),
        "actions": rows[:, None],
        "rewards": rows * 1.0,
        "terminals": terminals,
        "timeouts": timeouts,
    }
    write_d4rl(tmp_path / "d4rl/hopper_medium-v2.hdf5", **columns)
    dataset = load_dataset("d4rl:hopper-medium-v2")
    assert dataset.lengths.tolist() == [4, 3, 2]
    found = dataset.get_row_data(np.arange(9))
    assert found["observation"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 10]
    assert found["next_observation"][:, 0].tolist() == [1, 2, 3, 3, 5, 6, 7, 10, 11]
    assert found["terminated"].nonzero()[0].tolist() == [3]
    assert found["truncated"].nonzero()[0].tolist() == [6, 8]
    assert dataset.load_episode(1)["reward"].tolist() == [4, 5, 6]
    assert len(load_dataset("d4rl:hopper-medium-v2", num_steps=3)) == 2 + 1
    with pytest.raises(IndexError):
        dataset._load_slice(0, 2, 5)

    columns["next_observations"] = columns["observations"] + 100
    write_d4rl(tmp_path / "d4rl/hopper_medium-v2.hdf5", **columns)
    whole = load_dataset("d4rl:hopper-medium-v2")
    assert whole.lengths.tolist() == [4, 4, 1, 3]
    assert (whole.get_col_data("next_observation")[:, 0] == rows + 100).all()

    rb = OfflineToOnlineReplayBuffer("d4rl:hopper-medium-v2", online_capacity=5, batch_size=6)
    assert set(rb.sample()) == {"observation", "next_observation", "action", "reward", "terminated", "truncated"}
    with pytest.raises(NotFoundError, match="set D4RL_DATASET_DIR"):
        load_dataset("d4rl:walker2d-medium-v2")
    write_d4rl(tmp_path / "d4rl/bad.hdf5", observations=np.zeros((3, 1)), actions=np.zeros(2))
    with pytest.raises(ValueError, match="without"):
        load_dataset("d4rl:bad")
    (tmp_path / "d4rl/torn.hdf5").write_bytes(b"no")
    with pytest.raises(ValueError, match="not an HDF5 file"):
        load_dataset("d4rl:torn")


def test_ids_of_what_is_not_here(monkeypatch, tmp_path):
    for prefix, variable, package in (
        ("minari", "MINARI_DATASETS_PATH", "minari"),
        ("lerobot", "HF_LEROBOT_HOME", "av"),
    ):
        monkeypatch.setenv(variable, str(tmp_path))
        if prefix in list_formats():
            with pytest.raises(NotFoundError, match="fetch it first"):
                load_dataset(f"{prefix}:user/name")
        else:
            with pytest.raises(ValueError, match="unknown format"):
                load_dataset(f"{prefix}:user/name")


def test_notes_of_a_flush(tmp_path):
    buf = ReplayBuffer(max_steps=10, path=tmp_path / "buf")
    buf.flush(notes={"a": 1})
    buf.write_episode({"x": [1]}, notes={"b": 2})
    buf.flush(notes={"a": 3})
    buf.engine.owned.abandon()
    with pytest.raises(ReadOnlyError):
        ReplayBuffer.open(tmp_path / "buf").flush(notes={"a": 4})
    again = ReplayBuffer.open(tmp_path / "buf", mode="r+")
    assert again.notes == {"a": 3, "b": 2}
    again.close()


def test_a_reader_reads_the_notes(tmp_path):
    """As of its last refresh, whichever of a commit and a flush carries the newest."""
    with ReplayBuffer(max_steps=10, path=tmp_path / "buf", schema={"x": ((), "int64")}) as buf:
        reader = ReplayBuffer.open(tmp_path / "buf")
        assert reader.notes == {}
        buf.write_episode({"x": [1]}, notes={"a": 1})
        assert reader.refresh()
        assert reader.notes == {"a": 1}
        buf.flush(notes={"b": 2})
        reader.refresh()
        assert reader.notes == {"a": 1, "b": 2} == pickle.loads(pickle.dumps(buf)).notes
        reader.close()


def test_a_missing_extra_is_named(monkeypatch):
    for name in ("tensordict", "torchrl", "torchrl.data"):
        monkeypatch.setitem(sys.modules, name, None)
    storage_module._storage_class.cache_clear()
    with pytest.raises(MissingExtraError, match=r"ringmap\[torchrl\]"):
        OfflineToOnlineReplayBuffer(offline_buffer(), online_capacity=5, to="tensordict")
    with pytest.raises(MissingExtraError, match=r"ringmap\[torchrl\]"):
        storage_module.torchrl_storage(offline_buffer())
    with pytest.raises(InputError, match="expected a ReplayBuffer"):
        storage_module.torchrl_storage([])


# -- beside what comes by default ---------------------------------------------------------------


def test_a_mix_is_opened_as_it_was_left(tmp_path):
    offline = offline_buffer()
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=50, path=tmp_path / "ring", offline_fraction=0.25)
    rb.anneal(1, 2)
    rb.close()
    for options, expected, base in (({}, 0.125, 0.25), ({"offline_fraction": 0.4}, 0.4, 0.4)):
        with OfflineToOnlineReplayBuffer.open(tmp_path / "ring", offline, **options) as again:
            assert again.offline_fraction == expected
            assert len(again.online_buffer) == 0
            again.anneal(0, 1)
            assert again.offline_fraction == base
            again.anneal(1, 2)
        again.close()


def test_ids_and_weights_are_in_every_batch():
    offline = offline_buffer()
    online = ReplayBuffer(max_steps=100, sampler=PrioritizedSampler(rng=0))
    rb = OfflineToOnlineReplayBuffer(offline, online_storage=online, offline_fraction=0.5, seed=0)
    batch = rb.sample(4)
    assert batch["ids"].tolist() == [-1] * 4
    assert batch["weights"].tolist() == [1] * 4
    rb.extend(episode(12, 1))
    for size in (1, 4):
        batch = rb.sample(size)
        assert (batch["ids"] >= 0).sum() == rb.split(size)[1]
        assert batch["weights"].shape == (size,)


# -- windows, fleets and readers -----------------------------------------------------------------


def numbered(first, length):
    """Return an episode whose observation t is `first + t`, and whose reward for leaving it is that, negative."""
    steps = np.arange(first, first + length)
    return {"obs": steps[:, None].astype("f4"), "action": steps, "reward": -steps.astype("f4")}


def is_offline_first(batch, offline):
    """Tell which rows of a batch are of the first 1,000 numbers."""
    return (np.asarray(batch["action"]).reshape(len(batch["action"]), -1)[:, 0] < 1000) == (
        np.arange(len(batch["action"])) < offline
    )


@pytest.mark.parametrize("kind", ["view", "file", "file view", "split", "buffer"])
def test_a_window_over_the_offline_data(kind, tmp_path):
    """Whatever the items of a dataset or view are, these are drawn, and joined with items of the same shape."""
    window = {"obs": Window(range(-1, 2), pad="edge")}
    offline = ReplayBuffer(100, reward_at="same", seed=1)  # which decides the sides of a split
    for first in (0, 20):
        offline.write_episode(numbered(first, 10))
    online = ReplayBuffer(100, reward_at="same")
    online.write_episode(numbered(1000, 30))
    offline.dump(tmp_path / "data.h5", progress=False)
    given, items = {
        "view": lambda: (offline.view(window), {}),
        "split": lambda: (offline.split(0.5, window=window)[0], {}),
        "file view": lambda: (load_dataset(tmp_path / "data.h5").view(window), {}),
        "file": lambda: (load_dataset(tmp_path / "data.h5"), {"window": window}),
        "buffer": lambda: (offline, {"window": window}),
    }[kind]()
    side = online if items else online.view(window)
    rb = OfflineToOnlineReplayBuffer(given, online_storage=side, seed=0, **items)
    batch = rb.sample(40)
    assert batch["obs"].shape == (40, 3, 1)
    assert batch["obs_is_pad"].shape == (40, 3)
    assert is_offline_first(batch, 20).all()
    steps = np.asarray(batch["obs"])[:, :, 0]
    whole = ~np.asarray(batch["obs_is_pad"]).any(1)
    assert (np.diff(steps[whole], axis=1) == 1).all()
    assert (steps[:, 1] == np.asarray(batch["action"]).reshape(-1)).all()


def test_transitions_from_a_ring_of_episodes(tmp_path):
    """(s, a, r, s') of both halves, from episodes that store each observation once; and of rows that a ring of rows
    takes."""
    offline, online = (ReplayBuffer(200, reward_at="same", seed=i) for i in range(2))
    for first in (0, 100):
        offline.write_episode(numbered(first, 50))
    window = {"r": NStep(1, next=["obs"])}
    items = {"window": window, "columns": ["obs", "action", "r"], "anchors": slice(0, -1)}
    rb = OfflineToOnlineReplayBuffer(offline, online_storage=online, seed=0, **items)
    rb.extend(numbered(1000, 50))
    batch = rb.sample(64)
    assert is_offline_first(batch, 32).all()
    np.testing.assert_array_equal(batch["next_obs"], batch["obs"] + 1)
    np.testing.assert_array_equal(batch["r"], -batch["obs"][:, 0])
    view = offline.view(**items)
    rows = OfflineToOnlineReplayBuffer(view, online_capacity=100, seed=0)
    rows.extend({name: batch[name] for name in view[[0]]})
    assert rows.sample(8)["next_obs"].shape == (8, 1)
    rows.close()
    side = TransitionReplayBuffer(9, (1,), device=None)
    with pytest.raises(InputError, match=r"window.* are for datasets and buffers of episodes.*TransitionReplayBuffer"):
        OfflineToOnlineReplayBuffer(offline, online_storage=side, **items)


def test_the_online_half_sees_what_others_write(tmp_path):
    """A fleet, a reader of a ring and a reader of transitions: opened while empty, drawn from once a collector
    wrote."""
    offline = ReplayBuffer(100)
    offline.write_episode(numbered(0, 30))
    ring = ReplayBuffer(100, path=tmp_path / "fleet/a", sync_every_s=0)
    steps = TransitionReplayBuffer(50, (1,), device=None, path=tmp_path / "steps/a", sync_every_s=0)
    sides = {
        "fleet": ShardedReplayBuffer(tmp_path / "fleet", seed=0),
        "reader": ReplayBuffer.open(tmp_path / "fleet/a"),
        "transitions": TransitionReplayBuffer.open(tmp_path / "steps/a", device=None),
        "fleet of transitions": ShardedReplayBuffer(tmp_path / "steps", seed=0),
    }
    old = TransitionReplayBuffer(50, (1,), device=None)
    old.add(np.zeros((5, 1)), np.arange(5), np.zeros(5), np.ones((5, 1)), np.zeros(5))
    mixes = {
        name: OfflineToOnlineReplayBuffer(old if "transitions" in name else offline, online_storage=side, seed=0)
        for name, side in sides.items()
    }
    key = {name: "actions" if "transitions" in name else "action" for name in mixes}
    for name, rb in mixes.items():
        assert rb.split(8) == (8, 0), name
        assert (np.asarray(rb.sample(8)[key[name]]) < 1000).all()
    ring.write_episode(numbered(1000, 20))
    steps.add(np.zeros((9, 1)), np.full(9, 1000), np.zeros(9), np.ones((9, 1)), np.zeros(9))
    steps.flush()
    for name, rb in mixes.items():
        assert rb.split(8) == (4, 4), name
        assert (np.asarray(rb.sample(8)[key[name]]) >= 1000).tolist() == [False] * 4 + [True] * 4
        with pytest.raises((InputError, ReadOnlyError), match=r"only read|opened with mode='r'"):
            rb.extend(numbered(5, 5) if "transitions" not in name else _a_transition())
    for one in (*sides.values(), ring, steps):
        one.close()


def _a_transition():
    zero = np.zeros((1, 1), "f4")
    return {
        "observations": zero,
        "actions": [0],
        "rewards": [0.0],
        "next_observations": zero,
        "dones": [False],
    }


# -- the rows of a ring go out -------------------------------------------------------------------


def a_step(number, ended, lane=0):
    now, then = ([[number + 100 * lane + i]] for i in (0, 1))
    return {"obs": np.array(now, "f4"), "next_obs": np.array(then, "f4"), "reward": [1.0], "terminated": [ended]}


@pytest.mark.parametrize("has_next", [False, True])
def test_the_rows_of_a_ring_as_episodes(has_next, tmp_path):
    """Cut at ends, and where rows don't go on from each other; the same in memory, from the directory, and
    converted."""
    offline = ReplayBuffer(9)
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=60, path=tmp_path / "mix")
    for number in range(100):
        step = a_step(number if number < 95 else number + 7, number % 10 == 9)
        if not has_next:
            del step["next_obs"]
        rb.extend(step)
    lengths = [10] * 6 if not has_next else [10] * 5 + [5, 5]
    told = rb.episode_dataset()
    rows = list(rb.rows(batch_size=7))
    assert [len(part["obs"]) for part in rows] == [7] * 8 + [4]
    rb.flush()
    convert(tmp_path / "mix", tmp_path / "out.h5", progress=False)
    convert(rb, tmp_path / "of-object.h5", progress=False)
    places = [load_dataset(tmp_path / name, output="numpy") for name in ("mix", "out.h5", "of-object.h5")]
    for dataset in (told, pickle.loads(pickle.dumps(told)), *places):
        assert dataset.lengths.tolist() == lengths
        for name in told.column_names:
            expected = np.concatenate([part[name] for part in rows])
            np.testing.assert_array_equal(dataset.get_col_data(name), expected)
    assert told.reward_at == places[0].reward_at == "same"
    for _ in range(300):
        rb.extend(a_step(0, False) if has_next else {n: a_step(0, False)[n] for n in told.column_names})
    with pytest.raises(ReplacedError, match="look them up again"):
        told.load_episode(0)
    rb.close()


def test_rows_of_environments_in_turn_are_no_episode_together():
    rb = OfflineToOnlineReplayBuffer(ReplayBuffer(9), online_capacity=60)
    for number in range(5):
        for lane in range(2):
            rb.extend(a_step(number, False, lane))
    assert rb.episode_dataset().lengths.tolist() == [1] * 10


def test_rows_that_do_not_say_where_an_episode_ends(tmp_path):
    offline = ReplayBuffer(9)
    rb = OfflineToOnlineReplayBuffer(offline, online_capacity=60, path=tmp_path / "mix")
    rb.extend({"obs": np.zeros((5, 2))})
    for call in (rb.episode_dataset, lambda: (rb.flush(), load_dataset(tmp_path / "mix"))):
        with pytest.raises(InputError, match=r"no column of its rows, \['obs'\], tells .*rows\(\)"):
            call()
    assert [part["obs"].shape for part in rb.rows()] == [(5, 2)]
    rb.close()
    mine = OfflineToOnlineReplayBuffer(offline, online_storage=ReplayBuffer(9))
    for call in (mine.episode_dataset, lambda: list(mine.rows())):
        with pytest.raises(InputError, match="is a ReplayBuffer of yours"):
            call()


def test_rows_that_are_refused_change_nothing_in_what_is_drawn():
    offline = ReplayBuffer(20)
    offline.write_episode({"obs/a": np.zeros((4, 2)), "x": np.arange(4)})
    mix = OfflineToOnlineReplayBuffer(offline, online_capacity=20)
    mix.extend({"obs/a": np.zeros((4, 2)), "x": np.arange(4)})
    with pytest.raises(InputError):
        mix.extend({"obs": {"a": np.zeros((4, 3))}, "x": np.arange(4)})
    assert set(mix.sample(4)) == {"obs/a", "x"}
    mix.close()
