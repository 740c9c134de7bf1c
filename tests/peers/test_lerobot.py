"""The real lerobot loads what we wrote: frames, pictures, tasks, statistics, episodes."""

import os
import sys
import types

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra lerobot)")
pytest.importorskip("av", reason="PyAV is not installed (extra lerobot)")

from ringmap.data import ReplayBuffer, convert, get_format, load_dataset, merge
from ringmap.errors import InputError
from ringmap.formats.common.writer import EpisodeWriter

pytestmark = pytest.mark.filterwarnings("ignore")  # what lerobot says is not for us to mend

WORDS = ["pick", "place the red cube", "pick"]


def episode(number, steps):
    """T + 1 rows; pictures that video does well."""
    rng = np.random.default_rng(number)
    rows = steps + 1
    ramp = np.linspace(0, 120, 64).astype(np.uint8)
    film = np.stack([np.full((48, 64, 3), 12 * number + 6 * t, np.uint8) + ramp[:, None] for t in range(rows)])
    return {
        "pixels/top": film,
        "mask": rng.integers(0, 256, (rows, 9, 7, 3), np.uint8),
        "obs/arm": rng.normal(size=(rows, 4)).astype(np.float32),
        "obs/grid": rng.normal(size=(rows, 2, 3)).astype(np.float32),
        "action": rng.normal(size=(rows, 2)),
        "reward": rng.normal(size=rows).astype(np.float32),
        "terminated": np.arange(rows) == steps,
    }


def write(path, numbers, **options):
    with get_format("lerobot").open_writer(path, **options) as writer:
        for n in numbers:
            writer.write_episode({**episode(n, 5 + n), "_episode_data": {"task": WORDS[n % 3]}})


def check_ours(path, numbers):
    found = load_dataset(path, output="numpy", layout="HWC")
    assert found.lengths.tolist() == [5 + n for n in numbers]
    for at, n in enumerate(numbers):
        got, given, steps = found.load_episode(at), episode(n, 5 + n), 5 + n
        assert got["task"].tolist() == [WORDS[n % 3]] * steps
        assert np.array_equal(got["observation.arm"], given["obs/arm"][:-1])
        assert np.array_equal(got["observation.grid"], given["obs/grid"][:-1])
        assert np.array_equal(got["action"], given["action"][:-1])
        assert np.array_equal(got["next.reward"], given["reward"][1:])
        assert np.array_equal(got["observation.images.mask"], given["mask"][:-1])
        off = got["observation.images.top"].astype(int) - given["pixels/top"][:-1]
        assert abs(off).max() <= 6
        assert got["episode_index"].tolist() == [at] * steps
    found.close()
    return found


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("lerobot", reason="lerobot is not installed (tests/peers/alone.txt)")
    pytest.importorskip("datasets", reason="datasets is not installed (extra exits)")
    from tests.peers.torchvision_stand_in import install

    names = install()
    import lerobot
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    # Its own __init__ imports all policies, and with them diffusers.
    policies = types.ModuleType("lerobot.policies")
    policies.__path__ = [os.path.join(p, "policies") for p in lerobot.__path__]
    sys.modules.setdefault("lerobot.policies", policies)
    yield lambda path, **options: LeRobotDataset("us/set", root=path, video_backend="pyav", **options)
    for name in names:
        del sys.modules[name]


def check_theirs(found, numbers):
    assert found.num_episodes == len(numbers) and found.num_frames == sum(5 + n for n in numbers)
    assert found.fps == 10
    at = 0
    for place, n in enumerate(numbers):
        given = episode(n, 5 + n)
        for step in range(5 + n):
            item = found[at]
            assert item["task"] == WORDS[n % 3]
            assert item["episode_index"] == place and item["frame_index"] == step and item["index"] == at
            assert item["timestamp"].item() == pytest.approx(step / 10)
            assert np.array_equal(item["observation.arm"], given["obs/arm"][step])
            assert np.array_equal(np.asarray(item["observation.grid"]), given["obs/grid"][step])
            assert np.allclose(item["action"], given["action"][step])
            assert item["next.reward"].item() == given["reward"][step + 1]
            assert bool(item["next.terminated"]) == (step == 4 + n)
            mask = item["observation.images.mask"].permute(1, 2, 0).numpy() * 255
            assert np.array_equal(mask.round(), given["mask"][step])
            top = item["observation.images.top"].permute(1, 2, 0).numpy() * 255
            assert abs(top - given["pixels/top"][step]).max() <= 6
            at += 1
    assert at == len(found)
    rows = np.concatenate([episode(n, 5 + n)["action"][:-1] for n in numbers])
    stats = found.meta.stats["action"]
    for key in ("min", "max", "mean", "std"):
        assert np.allclose(stats[key], getattr(rows, key)(0))
    assert stats["count"] == len(rows)
    pixels = np.concatenate([episode(n, 5 + n)["mask"][:-1] for n in numbers]) / 255
    assert np.allclose(found.meta.stats["observation.images.mask"]["mean"].squeeze(), pixels.mean((0, 1, 2)))


def test_a_set_of_ours_loads_there(tmp_path, monkeypatch, theirs):
    path = tmp_path / "set"
    with monkeypatch.context() as patch:
        patch.setattr(EpisodeWriter, "group_nbytes", 1)  # each episode is a group, in files of its own
        write(path, range(5), fps=10)
    check_ours(path, range(5))
    check_theirs(theirs(path), range(5))
    assert len(list(path.glob("data/*/*.parquet"))) == 5


STEPS = int(os.environ.get("STEPS", "20"))
"""Of training: 20 in CI, 100 by hand."""


def test_three_merges_load_there(tmp_path, theirs):
    write(tmp_path / "a", [0, 1], fps=10)
    write(tmp_path / "b", [2], fps=10)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "1", dest_format="lerobot", progress=False)
    convert(tmp_path / "1", tmp_path / "2", dest_format="lerobot", progress=False)
    merge([tmp_path / "2"], tmp_path / "3", dest_format="lerobot", progress=False)
    check_theirs(theirs(tmp_path / "3"), [0, 1, 2])
    check_ours(tmp_path / "3", [0, 1, 2])


def test_act_trains_on_a_set_of_ours(tmp_path, theirs):
    """LeRobot's dataset, its processors and its policy, as its own script puts them together; a small network."""
    pytest.importorskip("einops", reason="einops is not installed (tests/peers/alone.txt)")
    import torch
    from lerobot.configs.types import FeatureType
    from lerobot.datasets.utils import dataset_to_policy_features
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.act.processor_act import make_act_pre_post_processors

    buf, rng = ReplayBuffer(1_000), np.random.default_rng(0)
    for _ in range(4):
        at = rng.uniform(-1, 1, 2) + np.cumsum(rng.normal(size=(26, 2)) / 10, 0)
        pixels = np.repeat(np.uint8(90 + 60 * np.tanh(at[:, :1, None, None])), 3, 3) + np.zeros(
            (1, 32, 32, 1), np.uint8
        )
        buf.write_episode({"pixels": pixels, "obs": at.astype(np.float32), "action": -at.astype(np.float32)})
    convert(buf, tmp_path / "set", dest_format="lerobot", fps=10, task="go back", progress=False)

    chunk = 4
    dataset = theirs(tmp_path / "set", delta_timestamps={"action": [i / 10 for i in range(chunk)]})
    features = dataset_to_policy_features(dataset.features)
    outputs = {n: f for n, f in features.items() if f.type is FeatureType.ACTION}
    config = ACTConfig(
        input_features={n: f for n, f in features.items() if n not in outputs},
        output_features=outputs,
        chunk_size=chunk,
        n_action_steps=chunk,
        pretrained_backbone_weights=None,
        dim_model=32,
        n_heads=2,
        dim_feedforward=64,
        n_encoder_layers=1,
        n_vae_encoder_layers=1,
        latent_dim=8,
        device="cpu",
    )
    assert {f.type for f in config.input_features.values()} == {FeatureType.VISUAL, FeatureType.STATE}
    torch.manual_seed(0)
    policy = ACTPolicy(config)
    before, _ = make_act_pre_post_processors(config, dataset.meta.stats)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True)
    losses, batches = [], iter(())
    while len(losses) < STEPS:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            continue
        loss, _ = policy.forward(before(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {STEPS} steps")
    few = STEPS // 5
    assert np.mean(losses[-few:]) < 0.7 * np.mean(losses[:few])


def test_episodes_by_number(tmp_path, theirs):
    """`episodes=[0, 3]` there, a subset of the clips here: the same frames."""
    from torch.utils.data import Subset

    write(tmp_path / "set", range(4), fps=10)
    found = theirs(tmp_path / "set", episodes=[0, 3])
    ours = load_dataset(tmp_path / "set")
    view = Subset(ours, [i for i, (episode, _) in enumerate(ours.clip_indices) if episode in (0, 3)])
    assert len(found) == len(view) == 5 + 8
    for at in range(len(view)):
        for name in ("observation.arm", "episode_index", "frame_index"):
            assert np.array_equal(np.asarray(found[at][name]), np.asarray(view[at][name])[0])


def killed(path, numbers):
    """Write in a child that dies in its block; return how it ended."""
    pid = os.fork()
    if not pid:
        try:
            with get_format("lerobot").open_writer(path, fps=10) as writer:
                for n in numbers:
                    writer.write_episode({**episode(n, 5 + n), "_episode_data": {"task": WORDS[n]}})
                os._exit(9)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_and_copied(tmp_path):
    path = tmp_path / "set"
    assert killed(path, [0, 1]) == 9
    check_ours(path, [0, 1])  # out of the log
    convert(path, tmp_path / "copy", dest_format="lerobot", fps=10, progress=False)
    assert check_ours(tmp_path / "copy", [0, 1]).fps == 10


@pytest.mark.parametrize("at", range(1, 11))
def test_killed_while_it_is_exported(tmp_path, monkeypatch, at):
    """Before each rename at the end of the block: the episodes are in the log until the whole set is in its place."""
    from ringmap.formats.common import disk

    path, calls, real = tmp_path / "set", iter(range(1, 100)), disk.replace_file
    pid = os.fork()
    if not pid:
        try:
            with get_format("lerobot").open_writer(path, fps=10) as writer:
                for n in (0, 1):
                    writer.write_episode({**episode(n, 5 + n), "_episode_data": {"task": WORDS[n]}})
                monkeypatch.setattr(EpisodeWriter, "group_nbytes", 1)
                monkeypatch.setattr(disk, "replace_file", lambda *a: os._exit(8) if next(calls) == at else real(*a))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (8 if at < 10 else 0)
    check_ours(path, [0, 1])
    convert(path, tmp_path / "copy", dest_format="lerobot", fps=10, progress=False)
    check_ours(tmp_path / "copy", [0, 1])


def test_by_name_and_back(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    buf = ReplayBuffer(100, reward_at="next")
    buf.write_episodes([episode(0, 5), episode(1, 6)])
    convert(buf, "lerobot:us/set", fps=10, task="go", progress=False, columns={"mask": "observation.images.seg"})
    found = load_dataset("lerobot:us/set", output="numpy")
    assert found.lengths.tolist() == [5, 6] and "observation.images.seg" in found.column_names
    convert("lerobot:us/set", "lerobot:us/again", fps=10, progress=False)
    again = load_dataset("lerobot:us/again", output="numpy")
    assert again.lengths.tolist() == [5, 6]
    assert again.load_episode(1)["task"].tolist() == ["go"] * 6
    assert sorted(again.column_names) == sorted(found.column_names)


def test_what_it_refuses(tmp_path):
    with pytest.raises(InputError, match="fps"):
        get_format("lerobot").open_writer(tmp_path / "set", fps=0)
    with get_format("lerobot").open_writer(tmp_path / "set") as writer:
        for wrong, message in [
            ({"obs": [[0.0], [1.0]], "state": [0, 1], "observation.state": [0, 1]}, "so would"),
            ({"when": np.zeros(2, "M8[s]")}, "no feature"),
            ({"a": [0.0]}, "has no step"),
        ]:
            with pytest.raises(InputError, match=message):
                writer.write_episode(wrong)
    assert len(load_dataset(tmp_path / "set").lengths) == 0


def test_an_episode_that_is_refused_adds_no_task(tmp_path):
    path = tmp_path / "set"
    with get_format("lerobot").open_writer(path) as writer:
        writer.write_episode({**episode(0, 5), "_episode_data": {"task": "pick"}})
        with pytest.raises(InputError):
            writer.write_episode({"obs": [[0.0], [1.0]], "_episode_data": {"task": "never"}})
        writer.write_episode({**episode(1, 5), "_episode_data": {"task": "place"}})
    found = load_dataset(path, output="numpy")
    assert [found.load_episode(n)["task"][0] for n in range(2)] == ["pick", "place"]
    found.close()


def test_a_task_of_a_later_episode_may_be_longer(tmp_path):
    path = tmp_path / "set"
    with get_format("lerobot").open_writer(path) as writer:
        for number, task in enumerate(("pick", "place the green cube on the red one")):
            writer.write_episode({**episode(number, 5), "_episode_data": {"task": task}})
    found = load_dataset(path, output="numpy")
    assert found.load_episode(1)["task"][0] == "place the green cube on the red one"
    found.close()
