"""Datasets that other programs made: Minari by its own writer, LeRobot and stable-worldmodel's layouts by hand."""

import io
import json

import h5py
import numpy as np
import pytest
from PIL import Image

from ringmap.data import ReplayBuffer, convert, detect_format, get_format, load_dataset
from ringmap.errors import InputError, UnsupportedError
from ringmap.testing.datasets import make_episodes


@pytest.mark.filterwarnings("ignore::UserWarning:minari", "ignore::UserWarning")
def test_minari(tmp_path, monkeypatch):
    """Instructions, a `Text` space within a `Dict`, as Minari's language tasks have them."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    minari = pytest.importorskip("minari", reason="minari is not installed")
    from gymnasium import spaces
    from minari.data_collector.episode_buffer import EpisodeBuffer

    seen = spaces.Dict({"mission": spaces.Text(40, charset="abcdeé "), "at": spaces.Box(0, 9, (2,))})
    missions = [["a", "bé", "", "abc"], ["abcde abcde é" * 3, "b", "c"]]
    episodes = [
        EpisodeBuffer(
            id=number,
            seed=number,
            observations={"mission": texts, "at": np.full((len(texts), 2), number, np.float32)},
            actions=["a b"] * (len(texts) - 1),
            rewards=[0.0] * (len(texts) - 1),
            infos={},
            terminations=[False] * (len(texts) - 1),
            truncations=[False] * (len(texts) - 1),
        )
        for number, texts in enumerate(missions)
    ]
    minari.create_dataset_from_buffers(
        "words/test-v0", episodes, algorithm_name="random", observation_space=seen, action_space=spaces.Text(5)
    )
    dataset = load_dataset(tmp_path / "words" / "test-v0")
    for number, texts in enumerate(missions):
        got = dataset.load_episode(number)
        assert got["observation/mission"].tolist() == texts[:-1]
        assert got["next_observation/mission"].tolist() == texts[1:]
        assert got["action"].tolist() == ["a b"] * (len(texts) - 1)
        assert got["observation/at"].tolist() == [[number] * 2] * (len(texts) - 1)
        assert not got["terminated"].any() and len(got["reward"]) == len(texts) - 1
    assert dataset.lengths.tolist() == [3, 2] and dataset.get_episode_data()["seed"] == [0, 1]
    buf = ReplayBuffer(100)
    buf.extend_from(dataset)  # wider than the first episode's
    for number, texts in enumerate(missions):
        assert buf.load_episode(number)["next_observation/mission"].tolist() == texts[1:]
    with h5py.File(tmp_path / "words/test-v0/data/main_data.hdf5", "r+") as file:
        file["episode_1/infos/extra"] = np.zeros(3)
    with pytest.warns(UserWarning, match=r"left out: episode 1 has \['info/extra', 'next_info/extra'\]"):
        load_dataset(tmp_path / "words" / "test-v0").load_episode(1)


def test_lerobot(tmp_path):
    pytest.importorskip("av", reason="PyAV is not installed")
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ringmap.formats.media.videos import Encoding, encode_video

    episodes = make_episodes((5, 3, 7))
    fps, root = 10, tmp_path / "robot"
    for folder in ("meta/episodes/chunk-000", "data/chunk-000", "videos/top/chunk-000"):
        (root / folder).mkdir(parents=True)
    info = {
        "codebase_version": "v3.0",
        "fps": fps,
        "total_episodes": 3,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {
            "top": {"dtype": "video", "shape": [12, 10, 3], "names": ["height", "width", "channels"]},
            "wrist": {"dtype": "image", "shape": [3, 12, 10], "names": ["channels", "height", "width"]},
            "action": {"dtype": "float32", "shape": [2]},
            "task_index": {"dtype": "int64", "shape": [1]},
        },
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    pq.write_table(pa.table({"task_index": [0, 1], "task": ["push", "pülls"]}), root / "meta/tasks.parquet")
    # Episodes 0 and 1 share a file of each kind, episode 2 has its own.
    homes, rows = [0, 0, 1], []
    for number, (home, episode) in enumerate(zip(homes, episodes, strict=True)):
        begin = sum(len(e["where"]) for e, h in zip(episodes[:number], homes, strict=False) if h == home)
        rows.append(
            {
                "episode_index": number,
                "length": len(episode["where"]),
                "tasks": ["push"],
                "data/chunk_index": 0,
                "data/file_index": home,
                "videos/top/chunk_index": 0,
                "videos/top/file_index": home,
                "videos/top/from_timestamp": begin / fps,
                "stats/action/mean": [0.0, 0.0],
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")

    def png(frame):
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    for home in (0, 1):
        mine = [(n, e) for n, e in enumerate(episodes) if homes[n] == home]
        frames = np.concatenate([e["pixels"] for _, e in mine])
        encode_video(str(root / f"videos/top/chunk-000/file-{home:03d}.mp4"), frames, Encoding(fps=fps, lossless=True))
        table = pa.table(
            {
                "action": pa.array([a.tolist() for _, e in mine for a in e["action"]], pa.list_(pa.float32())),
                "wrist": [png(255 - f) for f in frames],
                "task_index": [t % 2 for _, e in mine for t in range(len(e["where"]))],
                "episode_index": [n for n, e in mine for _ in e["where"]],
            }
        )
        pq.write_table(table, root / f"data/chunk-000/file-{home:03d}.parquet")

    dataset = load_dataset(root, num_steps=2, layout="HWC")
    assert detect_format(root).name == "lerobot"
    assert dataset.lengths.tolist() == [5, 3, 7]
    for number, stored in enumerate(episodes):
        got = dataset.load_episode(number)
        assert np.array_equal(got["action"], stored["action"])
        assert np.array_equal(got["wrist"], 255 - stored["pixels"])
        assert np.array_equal(got["top"][:, :12, :10], stored["pixels"])
        assert got["task"].tolist() == [["push", "pülls"][t % 2] for t in range(len(stored["where"]))]
    assert np.array_equal(dataset[6]["top"], episodes[2]["pixels"][:2])
    assert dataset.get_episode_data(1)["tasks"][0].tolist() == ["push"]
    (root / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(ValueError, match=r"LeRobot v2\.1, expected v3"):
        load_dataset(root)


def test_a_folder_of_stable_worldmodel(tmp_path):
    """Their layout to the letter: no notes of ours, .jpeg files, columns by name."""
    episodes = make_episodes((3, 2))
    root = tmp_path / "theirs"
    (root / "pixels").mkdir(parents=True)
    for name in ("action", "reward", "where"):
        np.savez(root / f"{name}.npz", np.concatenate([e[name] for e in episodes]))
    np.savez(root / "ep_len.npz", np.array([3, 2], np.int32))
    np.savez(root / "ep_offset.npz", np.array([0, 3], np.int64))
    for number, episode in enumerate(episodes):
        for step, frame in enumerate(episode["pixels"]):
            Image.fromarray(frame).save(root / f"pixels/ep_{number}_step_{step}.jpeg", quality=95)
    dataset = load_dataset(root, num_steps=2)
    assert detect_format(root).name == "folder"
    got = dataset.load_episode(1)
    assert np.array_equal(got["where"], episodes[1]["where"])
    error = np.abs(got["pixels"].numpy().astype(float) - episodes[1]["pixels"].transpose(0, 3, 1, 2))
    assert error.mean() < 3
    assert set(dataset[0]) == {"action", "reward", "where", "pixels"}


def test_a_lance_dataset_of_stable_worldmodel(tmp_path):
    """float32 lists, JPEG in binary columns, and no table of ours; ours with compat=True is the same."""
    import lance
    import pyarrow as pa

    from ringmap.data import get_format

    episodes = make_episodes((3, 2))
    made = {"episode_idx": pa.array([0, 0, 0, 1, 1], pa.int32()), "step_idx": pa.array([0, 1, 2, 0, 1], pa.int32())}
    blobs = []
    for frame in np.concatenate([e["pixels"] for e in episodes]):
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=95)
        blobs.append(buffer.getvalue())
    made["pixels"] = pa.array(blobs, pa.binary())
    for name in ("action", "reward", "where"):
        rows = np.concatenate([e[name] for e in episodes]).astype(np.float32).reshape(5, -1)
        made[name] = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    lance.write_dataset(pa.table(made), tmp_path / "theirs.lance")
    with get_format("lance").open_writer(tmp_path / "ours.lance", compat=True) as writer:
        writer.write_episodes(episodes)
    schema = lance.dataset(tmp_path / "ours.lance").schema
    assert schema.metadata in (None, {})
    assert {f.name: f.type for f in schema} == {n: v.type for n, v in made.items()}
    for path in (tmp_path / "theirs.lance", tmp_path / "ours.lance"):
        dataset = load_dataset(path)
        got = dataset.load_episode(1)
        assert np.array_equal(got["where"], episodes[1]["where"].astype(np.float32))
        assert tuple(got["pixels"].shape) == (2, 3, 12, 10)
    with get_format("lance").open_writer(tmp_path / "ours.lance") as writer:
        writer.write_episodes(episodes)  # appending keeps their layout
    assert load_dataset(tmp_path / "ours.lance").lengths.tolist() == [3, 2, 3, 2]


def test_a_zarr_group_of_diffusion_policy(tmp_path):
    import zarr

    group = zarr.open_group(tmp_path / "pusht.zarr", mode="w", zarr_format=2)
    data, meta = group.create_group("data"), group.create_group("meta")
    episodes = make_episodes((3, 2))
    for name in episodes[0]:
        rows = np.concatenate([e[name] for e in episodes])
        data.create_array(name, data=rows, chunks=(2, *rows.shape[1:]))
    meta.create_array("episode_ends", data=np.array([3, 5]))
    dataset = load_dataset(tmp_path / "pusht.zarr", layout="HWC")
    assert all(np.array_equal(dataset.load_episode(1)[n], episodes[1][n]) for n in episodes[1])


def make_groups(kind, path, more=()):
    """Write a file of another program's with arrays below groups, and arrays that are no columns."""
    arrays = {
        "action": np.arange(5.0),
        "obs/camera": np.arange(5 * 12, dtype=np.uint8).reshape(5, 2, 2, 3),
        "obs/arm/angle": np.arange(10, dtype=np.float32).reshape(5, 2),
        "obs/scale": np.arange(2.0),
        **dict(more),
    }
    if kind == "hdf5":
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                file.create_dataset(name, data=values, maxshape=(None, *values.shape[1:]))
            for name, values in (("ep_len", np.array([3, 2], np.int32)), ("ep_offset", np.array([0, 3]))):
                file.create_dataset(name, data=values, maxshape=(None,))
        return arrays
    import zarr

    group = zarr.open_group(path, mode="w", zarr_format=int(kind[-1]))
    for name, values in arrays.items():
        group.create_array(f"data/{name}", data=values, chunks=(2, *values.shape[1:]))
    group.create_array("meta/episode_ends", data=np.array([3, 5]))
    return arrays


@pytest.mark.parametrize("kind", ["hdf5", "zarr2", "zarr3"])
def test_arrays_below_a_group_are_columns(tmp_path, kind):
    """What does not have a row for each step is named in a warning: nothing is left out in silence."""
    path = tmp_path / f"theirs.{kind.rstrip('23').replace('hdf5', 'h5')}"
    arrays = make_groups(kind, path)
    with pytest.warns(UserWarning, match=r"left out.*obs/scale'$"):
        dataset = load_dataset(path, layout="HWC", output="numpy")
    assert sorted(dataset.column_names) == ["action", "obs/arm/angle", "obs/camera"]
    for name in dataset.column_names:
        assert np.array_equal(dataset.get_col_data(name), arrays[name])
        assert np.array_equal(dataset.load_episode(1)[name], arrays[name][3:])
    dataset.close()
    with (
        pytest.raises(ValueError, match=r"missing columns .*obs"),
        pytest.warns(UserWarning, match=r"left out.*obs/scale'$"),
        get_format(kind.rstrip("23")).open_writer(path) as writer,
    ):
        writer.write_episode({"action": np.zeros(2)})


@pytest.mark.parametrize("kind", ["lance", "folder"])
def test_a_table_or_file_that_is_not_read_is_named(tmp_path, kind):
    path, action = tmp_path / f"theirs.{kind}", np.arange(5.0, dtype=np.float32)
    if kind == "lance":
        lance = pytest.importorskip("lance", reason="pylance is not installed")
        import pyarrow as pa

        index = {
            "episode_idx": pa.array([0, 0, 0, 1, 1], pa.int32()),
            "step_idx": pa.array([0, 1, 2, 0, 1], pa.int32()),
        }
        pose = pa.array([{"x": 1.0}] * 5)
        lance.write_dataset(pa.table({**index, "action": action, "pose": pose}), path)
    else:
        path.mkdir()
        for name, values in (
            ("ep_len", np.array([3, 2], np.int32)),
            ("ep_offset", np.array([0, 3])),
            ("action", action),
        ):
            np.savez(path / f"{name}.npz", values)
        np.savez(path / "pose.npz", np.array([{"x": 1.0}] * 5))
    with pytest.raises(UnsupportedError, match=r"column 'pose' is .*; read the others with keys_to_load=\['action'\]"):
        load_dataset(path)
    assert np.array_equal(load_dataset(path, keys_to_load=["action"]).get_col_data("action"), action)
    if kind == "folder":
        (path / "obs").mkdir()
        np.savez(path / "obs/camera.npz", action)
        with pytest.warns(UserWarning, match=r"left out.*'obs'$"):
            load_dataset(path, keys_to_load=["action"])


@pytest.mark.filterwarnings("ignore:.*left out", "ignore:The data type")
@pytest.mark.parametrize("kind", ["hdf5", "zarr3"])
def test_a_column_that_is_not_read_is_named(tmp_path, kind):
    path = tmp_path / f"theirs.{kind.rstrip('23').replace('hdf5', 'h5')}"
    strange = np.zeros(5, [("a", "i4"), ("b", "i4")])
    make_groups(kind, path, [("obs/pair", strange)])
    with pytest.raises(
        UnsupportedError, match=r"column 'obs/pair' is .*; read the others with keys_to_load=\['action'"
    ):
        load_dataset(path)
    with pytest.raises(UnsupportedError, match="'obs/pair'"):
        load_dataset(path, keys_to_load=["action", "obs/pair"])
    for drop in ([], ["action"]):
        with pytest.raises(UnsupportedError, match=r"copy them with drop=\['obs/pair'\]"):
            convert(path, tmp_path / "copy.h5", drop=drop, progress=False)
    convert(path, tmp_path / "copy.h5", drop=["obs/pair", "action"], progress=False)
    assert sorted(load_dataset(tmp_path / "copy.h5").column_names) == ["obs/arm/angle", "obs/camera"]
    with pytest.raises(InputError, match="there is no such column"):
        convert(path, tmp_path / "other.h5", drop=["obs/pair", "nope"], progress=False)
    dataset = load_dataset(path, keys_to_load=["action", "obs/arm/angle"])
    assert dataset.get_col_data("action").tolist() == [0, 1, 2, 3, 4]
    dataset.close()
    with (
        pytest.raises(UnsupportedError, match="nothing can be appended"),
        get_format(kind.rstrip("23")).open_writer(path),
    ):
        pass


def lance_of(path, **columns):
    lance = pytest.importorskip("lance", reason="pylance is not installed")
    import pyarrow as pa

    index = {"episode_idx": pa.array([0, 0, 1], pa.int32()), "step_idx": pa.array([0, 1, 0], pa.int32())}
    lance.write_dataset(pa.table({**index, "action": np.arange(3.0), **columns}), path)


@pytest.mark.parametrize("kind", ["number", "text", "vector", "inside", "image"])
def test_missing_values_of_a_table_are_refused_by_name(tmp_path, kind):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    picture = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(picture, "PNG")
    lance_of(
        tmp_path / "theirs.lance",
        x={
            "number": pa.array([1, None, 3]),
            "text": pa.array(["a", None, "c"]),
            "vector": pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int32(), 2)),
            "inside": pa.array([[1, 2], [3, None], [5, 6]], pa.list_(pa.int32(), 2)),
            "image": pa.array([picture.getvalue(), None, picture.getvalue()]),
        }[kind],
    )
    path = str(tmp_path / "theirs.lance")
    with pytest.raises(UnsupportedError, match=f"{path}: column 'x' has missing values.*keys_to"):
        load_dataset(path).load_episode(0)
    assert load_dataset(path, keys_to_load=["action"]).load_episode(0)["action"].tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore:The data type")
@pytest.mark.parametrize("version", [2, 3])
def test_text_and_bytes_of_a_foreign_zarr_are_read_and_appended(tmp_path, version):
    import zarr

    path = tmp_path / "theirs.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=version)
    texts, codes = np.array(["a", "bb", "7"]), np.array([b"1", b"22", b"x"])
    for name, values in (("data/text", texts), ("data/code", codes), ("meta/episode_ends", np.array([2, 3]))):
        group.create_array(name, data=values)
    read = load_dataset(path).load_episode(0)
    assert read["text"].tolist() == ["a", "bb"] and read["code"].tolist() == [b"1", b"22"]
    with get_format("zarr").open_writer(path, mode="append") as writer:
        writer.write_episode({"text": texts[:2], "code": codes[1:]})
    read = load_dataset(path).load_episode(2)
    assert read["text"].tolist() == ["a", "bb"] and read["code"].tolist() == [b"22", b"x"]


NO_PICTURE = r"column 'x' is of (bytes that are no picture|.*missing values).*keys_to_load=\['action'\]"


@pytest.mark.parametrize("bytes_", [b"no picture", b"\x89PNG\r\n\x1a\n", b"", None])
def test_bytes_that_are_no_picture_are_named(tmp_path, bytes_):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    lance_of(tmp_path / "theirs.lance", x=pa.array([bytes_] * 3, pa.binary()))
    path = str(tmp_path / "theirs.lance")
    with pytest.raises(UnsupportedError, match=NO_PICTURE):
        load_dataset(path)
    assert load_dataset(path, keys_to_load=["action"]).load_episode(0)["action"].tolist() == [0, 1]
