"""Data of an episode are those of that episode, whatever another program removed: right, or refused."""

import json
import pickle
import shutil

import numpy as np
import pytest

from ringmap.data import convert, get_format, list_formats, load_dataset
from ringmap.errors import CorruptError, ReplacedError

FORMATS = set(list_formats())


def episode(number, length=4):
    x = np.full(length, float(number))
    return {"x": x, "action": x, "reward": x, "_episode_data": {"seed": number, "goal": f"g{number}"}}


def written(path, name, count=5, lengths=None, **options):
    with get_format(name).open_writer(path, **options) as writer:
        for number in range(count):
            writer.write_episode(episode(number, 4 if lengths is None else lengths[number]))
    return path


def pairs(path, name=None):
    """Return what each episode's rows say that it is, and what its data say."""
    found = load_dataset(path, format=name, output="numpy")
    x = next(n for n in found.column_names if n.endswith("x"))
    return [
        (int(found.load_episode(n)[x][0]), int(found.get_episode_data([n])["seed"][0]))
        for n in range(len(found.lengths))
    ]


def same(*numbers):
    return [(number, number) for number in numbers]


@pytest.mark.skipif("lance" not in FORMATS, reason="needs pylance")
def test_lance_after_a_delete_and_appends(tmp_path):
    import lance

    path = written(tmp_path / "a.lance", "lance")
    old = load_dataset(path, output="numpy")
    sent = pickle.dumps(old)
    lance.dataset(str(path)).delete("episode_idx = 2")
    assert pairs(path) == same(0, 1, 3, 4)
    assert int(old.load_episode(2)["x"][0]) == 2  # what it opened
    with pytest.raises(ReplacedError):
        pickle.loads(sent).load_episode(2)
    written(path, "lance", 1, mode="append")
    assert pairs(path)[4:] == same(0)
    lance.dataset(str(path)).delete("episode_idx = 5")  # the newest, whose number is given again
    with get_format("lance").open_writer(path, mode="append") as writer:
        writer.write_episode(episode(7))
        writer.write_episode(episode(8))
    assert pairs(path) == same(0, 1, 3, 4, 7, 8)
    copy = tmp_path / "copy.h5"
    convert(path, copy, progress=False)
    assert pairs(copy) == same(0, 1, 3, 4, 7, 8)


@pytest.mark.skipif("lance" not in FORMATS, reason="needs pylance")
def test_lance_data_of_another_program_stay_where_ours_are_added(tmp_path):
    import lance
    import pyarrow as pa

    path = written(tmp_path / "a.lance", "lance", 3)
    beside = str(tmp_path / "a_episodes.lance")
    table = pa.table({"episode_idx": pa.array([2, 0, 1], pa.int32()), "seed": [2, 0, 1]})
    lance.write_dataset(table, beside, mode="overwrite")
    assert pairs(path) == same(0, 1, 2)
    with get_format("lance").open_writer(path, mode="append") as writer:
        writer.write_episode(episode(3))
    assert pairs(path) == same(0, 1, 2, 3)


@pytest.mark.skipif("parquet" not in FORMATS, reason="needs pyarrow")
def test_parquet_without_some_of_its_rows(tmp_path):
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = written(tmp_path / "a.parquet", "parquet", 2)
    for number in (2, 3):
        with get_format("parquet").open_writer(path) as writer:
            writer.write_episode(episode(number))
    (path / "data-00001.parquet").unlink()
    assert pairs(path) == same(0, 1, 3)
    table = pq.read_table(path / "data-00000.parquet")
    pq.write_table(table.filter(pc.field("episode_index") != 0), path / "data-00000.parquet")
    with pytest.raises(CorruptError, match="no facts of ours in its footer"):
        load_dataset(path)


@pytest.mark.skipif("lerobot" not in FORMATS, reason="needs pyarrow and PyAV")
def test_lerobot_without_an_episode_of_its_table(tmp_path):
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = tmp_path / "set"
    with get_format("lerobot").open_writer(path, reward_at="same") as writer:
        for number in range(4):
            writer.write_episode({**episode(number), "_episode_data": {"task": f"g{number}"}})
    (table,) = path.glob("meta/episodes/*/*.parquet")
    rows = pq.read_table(table)
    pq.write_table(rows.filter(pc.field("episode_index") != 1), table)
    found = load_dataset(path, output="numpy")
    got = [(found.load_episode(n)["x"][0], found.source.episode_data(n)["tasks"].tolist()) for n in range(3)]
    assert got == [(0, ["g0"]), (2, ["g2"]), (3, ["g3"])]


@pytest.mark.parametrize("name", [name for name in ("robomimic", "minari") if name in FORMATS])
def test_a_group_of_hdf5_that_is_removed(tmp_path, name):
    import h5py

    path = tmp_path / ("a.hdf5" if name == "robomimic" else "a-v0")
    with get_format(name).open_writer(path, reward_at="next") as writer:
        for number in range(4):
            rows = episode(number)
            writer.write_episode({"obs/x": rows.pop("x"), **rows})
    file = path if name == "robomimic" else path / "data" / "main_data.hdf5"
    with h5py.File(file, "r+") as opened:
        del opened["data/demo_1" if name == "robomimic" else "episode_1"]
    if name == "minari":
        meta = path / "data" / "metadata.json"
        facts = json.loads(meta.read_text())
        meta.write_text(json.dumps({**facts, "total_episodes": 3, "total_steps": 9}))
    try:
        found = pairs(path, name)
    except CorruptError:
        return  # Minari numbers its groups without a gap
    assert found == same(0, 2, 3)


def cut_hdf5(path, keep, compact):
    import h5py

    with h5py.File(path, "r+") as file:
        lengths, offsets = file["ep_len"][:], file["ep_offset"][:]
        rows = np.concatenate([np.arange(offsets[n], offsets[n] + lengths[n]) for n in keep])
        for column in [n for n in file if not n.startswith("ep_")] if compact else ():
            values = file[column][:][rows]
            file[column].resize(len(rows), axis=0)
            file[column][:] = values
        kept = np.cumsum(lengths[keep]) - lengths[keep] if compact else offsets[keep]
        for table, values in (("ep_len", lengths[keep]), ("ep_offset", kept)):
            file[table].resize(len(keep), axis=0)
            file[table][:] = values


def cut_folder(path, keep, compact):
    tables = {n: np.load(path / f"{n}.npz")["arr_0"] for n in ("ep_len", "ep_offset")}
    lengths, offsets = tables["ep_len"], tables["ep_offset"]
    rows = np.concatenate([np.arange(offsets[n], offsets[n] + lengths[n]) for n in keep])
    for column in ("x", "action", "reward") if compact else ():
        np.savez(path / f"{column}.npz", np.load(path / f"{column}.npz")["arr_0"][rows])
    kept = np.cumsum(lengths[keep]) - lengths[keep] if compact else offsets[keep]
    np.savez(path / "ep_len.npz", lengths[keep])
    np.savez(path / "ep_offset.npz", kept)


def cut_zarr(path, keep, compact):
    import zarr

    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    ends = group["meta/episode_ends"][:]
    offsets = np.concatenate([[0], ends[:-1]])
    rows = np.concatenate([np.arange(offsets[n], ends[n]) for n in keep])
    for column in ("x", "action", "reward"):
        values = group[f"data/{column}"][:][rows]
        group[f"data/{column}"].resize((len(rows),))
        group[f"data/{column}"][:] = values
    group["meta/episode_ends"].resize((len(keep),))
    group["meta/episode_ends"][:] = np.cumsum((ends - offsets)[keep])


CUTS = {"hdf5": cut_hdf5, "folder": cut_folder, "zarr": cut_zarr}


@pytest.mark.parametrize("compact", [False, True], ids=["table", "rows"])
@pytest.mark.parametrize("lengths", [[4] * 5, [4, 3, 5, 2, 6]], ids=["equal", "other"])
@pytest.mark.parametrize("name", [name for name in CUTS if name in FORMATS])
def test_an_episode_that_was_removed_by_hand(tmp_path, name, lengths, compact):
    """Rows are read, and of the data it is said that they are of other episodes; nothing is appended to such a
    dataset."""
    whole = written(tmp_path / f"whole.{'h5' if name == 'hdf5' else name}", name, 5, lengths)
    for keep in ([0, 2, 3, 4], [1, 2, 3, 4], [2, 1, 0, 3, 4]):
        path = tmp_path / f"{keep[0]}{keep[1]}{whole.suffix}"
        (shutil.copytree if whole.is_dir() else shutil.copy)(whole, path)
        CUTS[name](path, keep, compact)
        if name == "zarr" and lengths[0] == 4 and len(keep) == 5:
            continue  # the ends are what they were
        if compact and len(keep) == 5 and lengths[0] == 4:
            continue  # and so are the tables
        found = load_dataset(path, format=name, output="numpy")
        assert [int(found.load_episode(n)["x"][0]) for n in range(len(keep))] == keep
        with pytest.raises(CorruptError, match="the data of its episodes were written for other episodes"):
            found.get_episode_data([0])
        found.close()
        with pytest.raises(CorruptError, match="written for other episodes"):
            written(path, name, 1, mode="append")


@pytest.mark.parametrize("name", [name for name in CUTS if name in FORMATS])
def test_episodes_that_another_program_appended_have_no_data(tmp_path, name):
    """The others keep theirs, and so do those that we add after them."""
    path = written(tmp_path / f"a.{'h5' if name == 'hdf5' else name}", name, 3)
    if name == "hdf5":
        import h5py

        with h5py.File(path, "r+") as file:
            for column in ("x", "action", "reward"):
                file[column].resize(16, axis=0)
                file[column][12:] = 3.0
            for table, value in (("ep_len", 4), ("ep_offset", 12)):
                file[table].resize(4, axis=0)
                file[table][3] = value
    elif name == "folder":
        for column in ("x", "action", "reward"):
            rows = np.load(path / f"{column}.npz")["arr_0"]
            np.savez(path / f"{column}.npz", np.append(rows, np.full(4, 3.0)))
        np.savez(path / "ep_len.npz", np.array([4] * 4, np.int32))
        np.savez(path / "ep_offset.npz", np.array([0, 4, 8, 12]))
    else:
        import zarr

        group = zarr.open_group(path, mode="r+", use_consolidated=False)
        for column in ("x", "action", "reward"):
            group[f"data/{column}"].append(np.full(4, 3.0))
        group["meta/episode_ends"].append(np.array([16]))
    with get_format(name).open_writer(path) as writer:
        writer.write_episode(episode(4))
    found = load_dataset(path, format=name, output="numpy")
    data = [found.source.episode_data(n).get("seed") for n in range(5)]
    assert data == [0, 1, 2, None, 4]
