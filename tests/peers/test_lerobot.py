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


def test_three_merges_load_there(tmp_path, theirs):
    write(tmp_path / "a", [0, 1], fps=10)
    write(tmp_path / "b", [2], fps=10)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "1", dest_format="lerobot", progress=False)
    convert(tmp_path / "1", tmp_path / "2", dest_format="lerobot", progress=False)
    merge([tmp_path / "2"], tmp_path / "3", dest_format="lerobot", progress=False)
    check_theirs(theirs(tmp_path / "3"), [0, 1, 2])
    check_ours(tmp_path / "3", [0, 1, 2])


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


def test_an_episode_that_is_refused_adds_no_task_and_a_later_one_may_be_longer(tmp_path):
    path = tmp_path / "set"
    with get_format("lerobot").open_writer(path) as writer:
        writer.write_episode({**episode(0, 5), "_episode_data": {"task": "pick"}})
        with pytest.raises(InputError):
            writer.write_episode({"obs": [[0.0], [1.0]], "_episode_data": {"task": "never"}})
        writer.write_episode({**episode(1, 5), "_episode_data": {"task": "place the green cube on the red one"}})
    found = load_dataset(path, output="numpy")
    assert [found.load_episode(n)["task"][0] for n in range(2)] == ["pick", "place the green cube on the red one"]
    found.close()
