"""Sequences that run on into the next episode of their lane: what they say, refuse, and read of files.

That they are right is asked by `tests/contract/test_reads.py`.
"""

import logging

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.data import ConcatDataset, MergeDataset, Sequences, load_dataset
from ringmap.datasets.goal import GoalDataset
from ringmap.errors import InputError, NoClipsError
from ringmap.samplers import EpisodeSampler, PrioritizedSampler
from ringmap.storage.read import recovery
from ringmap.storage.records import table


def episodes(count=6):
    for number in range(count):
        length = 3 + number % 4
        steps = np.arange(length)
        yield {"x": 100.0 * number + steps, "terminated": (steps == length - 1) & (number % 2 == 0)}


def rows_of(data):
    return np.concatenate([e["x"] for e in data]), np.concatenate([np.arange(len(e["x"])) == 0 for e in data])


@pytest.mark.parametrize("kind", ["hdf5", "zarr", "folder", "ringmap", "joined"])
def test_datasets(tmp_path, kind, caplog):
    from ringmap.data import get_format

    data = list(episodes())
    if kind == "ringmap":
        with ReplayBuffer(100, path=tmp_path / "data.ringmap") as buf:
            buf.write_episodes(data)
        dataset = load_dataset(tmp_path / "data.ringmap")
    else:
        suffix = {"hdf5": "h5", "joined": "h5"}.get(kind, kind)
        parts = [data[:3], data[3:]] if kind == "joined" else [data]
        paths = [tmp_path / f"data{i}.{suffix}" for i in range(len(parts))]
        for path, part in zip(paths, parts, strict=True):
            with get_format("hdf5" if kind == "joined" else kind).open_writer(path) as writer:
                for one in part:
                    writer.write_episode({n: list(v) for n, v in one.items()})
        found = [load_dataset(path) for path in paths]
        dataset = ConcatDataset(found) if kind == "joined" else found[0]
    values, firsts = rows_of(data)
    with caplog.at_level(logging.INFO, logger="ringmap"):
        view = dataset.view(window=Sequences(5, across=True, burn_in=1))
        assert len(view) == len(values) - 4
        batch = view.__getitems__(list(range(len(view))))
    assert caplog.text.count("in the order of storage") == 1
    for i in range(len(view)):
        item = batch[i] if isinstance(batch, list) else {n: v[i] for n, v in batch.items()}
        assert np.asarray(item["x"]).tolist() == values[i : i + 5].tolist()
        assert np.asarray(item["is_first"]).tolist() == firsts[i : i + 5].tolist()
        lasts = [*firsts[i + 1 : i + 6].tolist(), True][:5]
        assert np.asarray(item["is_last"]).tolist() == lasts
        ends = np.asarray(item["is_last"]) & (np.asarray(item["terminated"]) != 0)
        assert np.asarray(item["is_terminal"]).tolist() == ends.tolist()
        assert np.asarray(item["is_burn_in"]).tolist() == [True, False, False, False, False]
        assert np.asarray(item["step_id"]).tolist() == list(range(i, i + 5))
        episode, step = view.clip_indices[i]
        assert data[episode]["x"][step] == values[i]
    assert view.clip_indices[2:4] == [view.clip_indices[2], view.clip_indices[3]]
    assert float(np.asarray(view[-1]["x"])[-1]) == values[-1]


def test_it_is_said_once_and_not_where_lanes_are_known(caplog):
    buf = ReplayBuffer(100, seed=0)
    buf.write_episodes(episodes())
    with caplog.at_level(logging.INFO, logger="ringmap"):
        for length in (2, 3, 4):
            buf.sample(4, window=Sequences(length, across=True))
    assert caplog.text.count("in the order of storage") == 1
    caplog.clear()
    buf = ReplayBuffer(100, seed=0)
    for lane in (0, 1):
        with buf.begin_episode(commit_every=2, lane=lane) as episode:
            for t in range(5):
                episode.append({"x": t})
    with caplog.at_level(logging.INFO, logger="ringmap"):
        buf.sample(4, window=Sequences(2, across=True))
        len(buf.view(window=Sequences(2, across=True)))
    assert not caplog.text


def test_bad_input():
    buf = ReplayBuffer(100, seed=0)
    buf.write_episodes(episodes())
    window = Sequences(5, across=True)
    with pytest.raises(InputError, match=r"anchors= leaves out steps"):
        buf.sample(4, window=window, anchors=slice(1, None))
    with pytest.raises(InputError, match="with frameskip=2 would miss ends of episodes"):
        ReplayBuffer(100, history_len=2, frameskip=2, schema=buf.schema).view(window=window)
    for part in (buf.view().take([0, 2]), buf.split(0.5)[0]):
        with pytest.raises(InputError, match="use across=False, or a view of the whole buffer"):
            part.view(window=window)
    with pytest.raises(InputError, match="use across=False"):
        buf.view(window=window).take([1])
    some = buf.view(where="episode > 1")
    for joined in (ConcatDataset([buf, some]), MergeDataset([some, some]), ConcatDataset([buf, buf]).take([0, 2])):
        with pytest.raises(InputError, match="use across=False, or a view of all episodes"):
            joined.view(window=window)
    with pytest.raises(InputError, match="a goal lies in the episode"):
        GoalDataset(buf.view(window=window))
    with pytest.raises(NoClipsError, match="no sequence of 500 steps fits in a lane: 25 steps are stored"):
        buf.sample(4, window=Sequences(500, across=True))


def mixed(path, sampler=None):
    """Return the writer of a buffer with whole episodes between the parts of two lanes."""
    buf = ReplayBuffer(100, path=path, sampler=sampler, seed=0)
    ones = [buf.begin_episode(commit_every=2, lane=lane) for lane in (1, 0)]
    for t in range(6):
        for lane, one in enumerate(ones):
            one.append({"x": 10 * lane + t})
        if t % 3 == 0:
            buf.write_episode({"x": 100 + np.arange(4) + t})
    for one in ones:
        one.finish()
    return buf


def test_every_handle_knows_the_lanes_and_numbers_items_alike(tmp_path):
    """A reader and a reopened writer take lanes from records, where they have no sign."""
    window = Sequences(4, across=True)

    def look_at(buf):
        view = buf.view(window=window)
        lanes = buf.engine.owned.live.whole.lanes.tolist()
        return view.positions(np.arange(len(view))).tolist(), lanes, buf.engine.has_lanes

    with mixed(tmp_path / "buf") as buf:
        expected = look_at(buf)
        assert sorted(expected[1]) == [-1, -1, 0, 1]
        with ReplayBuffer.open(tmp_path / "buf") as reader:
            assert look_at(reader) == expected
        buf.close()
    with ReplayBuffer.open(tmp_path / "buf", "r+") as again:
        assert look_at(again) == expected
        again.close()


@pytest.mark.parametrize("sampler", [EpisodeSampler(rng=0), PrioritizedSampler()])
def test_samplers(sampler):
    buf, window = mixed(None, sampler), Sequences(4, across=True)
    view = buf.view(window=window)
    expected = {item["step_id"][0]: item["step_id"].tolist() for item in view}
    batch = buf.sample(32, window=window)
    assert batch["step_id"].tolist() == [expected[anchor] for anchor in batch.ids.tolist()]
    assert any(row[3] - row[0] > 3 for row in batch["step_id"].tolist())


def test_control_lanes_without_a_sign(tmp_path, monkeypatch):
    def unsigned(records):
        parts = table.parts_of(records)
        return parts and parts._replace(lanes=parts.lanes.astype(np.uint32).astype(np.int64))

    monkeypatch.setattr(recovery, "parts_of", unsigned)
    with pytest.raises(AssertionError):
        test_every_handle_knows_the_lanes_and_numbers_items_alike(tmp_path)


@pytest.mark.parametrize(("name", "burn_in"), [("step_id", 0), ("is_burn_in", 1)])
def test_a_stored_column_takes_no_name_of_ids(name, burn_in):
    buf = ReplayBuffer(100, seed=0)
    buf.write_episode({"obs": np.arange(9), name: np.arange(9)})
    with pytest.raises(InputError, match=f"Sequences adds a column '{name}', and one is stored"):
        buf.sample(2, window=Sequences(3, burn_in))
