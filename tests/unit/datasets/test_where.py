"""`where=` selects episodes, of every dataset, view and buffer, and all else follows; `anchors=` selects steps
alone."""

import pickle

import numpy as np
import pytest

from ringmap import Marks, OfflineToOnlineReplayBuffer, ReplayBuffer
from ringmap.data import (
    ConcatDataset,
    Dataset,
    GoalDataset,
    MergeDataset,
    ShardedReplayBuffer,
    Window,
    convert,
    get_format,
    load_dataset,
    merge,
)
from ringmap.errors import ArgumentTypeError, ClipIndexError, InputError

LENGTHS = [4, 3, 5, 2, 6, 3]
KEPT = [1, 3, 5]


def episode(number):
    """Return an episode whose steps say which they are, and that is of the task "b" if its number is odd."""
    x = 100 * number + np.arange(LENGTHS[number])
    data = {"seed": number, "task": "ab"[number % 2]}
    reward, terminated = x / 1.0, np.arange(len(x)) == len(x) - 1
    return {"x": x, "reward": reward, "terminated": terminated, "_episode_data": data}


def buffer(path=None, numbers=range(6)):
    buf = ReplayBuffer(1000, path=path, seed=0, reward_at="same")
    for number in numbers:
        buf.write_episode(episode(number))
    return buf


def h5(tmp_path, name="a.h5", numbers=range(6)):
    with get_format("hdf5").open_writer(tmp_path / name) as writer:
        writer.write_episodes(map(episode, numbers))
    return tmp_path / name


class Mine(Dataset):
    """A dataset as a user writes one: no more than what the base class asks for."""

    column_names = property(lambda self: ["x", "reward", "terminated"])
    episode_column_names = property(lambda self: ["seed", "task"])

    def __init__(self):
        super().__init__(LENGTHS, np.cumsum(LENGTHS) - LENGTHS)

    def _load_slice(self, ep, start, end):
        return {name: episode(ep)[name][start:end] for name in self.column_names}

    def get_episode_data(self, idx=None):
        data = [episode(n)["_episode_data"] for n in self._episode_numbers(idx)]
        return {name: [one[name] for one in data] for name in ("seed", "task")}


def ring(tmp_path):
    buffer(tmp_path / "ring").close()
    return tmp_path / "ring"


def fleet(tmp_path):
    buffer(tmp_path / "runs" / "0", range(4)).close()
    buffer(tmp_path / "runs" / "1", range(4, 6)).close()
    return ShardedReplayBuffer(tmp_path / "runs")


def loaded(path, **options):
    return load_dataset(path, output="numpy", **options)


KINDS = {
    "file": lambda tmp: loaded(h5(tmp)),
    "file, options": lambda tmp: loaded(h5(tmp), keys_to_cache=["x"], keys_to_merge={"both": ["x", "reward"]}),
    "ring as a file": lambda tmp: loaded(ring(tmp)),
    "buffer": lambda tmp: buffer(),
    "reader": lambda tmp: ReplayBuffer.open(ring(tmp)),
    "view": lambda tmp: buffer().view(),
    "fleet": fleet,
    "fleet's view": lambda tmp: fleet(tmp).view(),
    "concat": lambda tmp: ConcatDataset([buffer(None, range(2)), loaded(h5(tmp, "b.h5", range(2, 6)))]),
    "merge": lambda tmp: MergeDataset([buffer(), loaded(h5(tmp))], [["reward"], ["x", "terminated"]]),
    "goals": lambda tmp: GoalDataset(buffer(), (1, 0, 0, 0), goal_keys={"x": "goal"}, seed=0),
    "a user's": lambda tmp: Mine(),
}
WHERE = {"text": "task = b", "function": lambda data: data["task"] == "b"}


def x_of(item):
    return np.asarray(item["x"]).reshape(-1).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERE)
def test_everything_follows_the_episodes_that_were_selected(tmp_path, kind, where):
    view = KINDS[kind](tmp_path).view(where=WHERE[where])
    wanted = [episode(number)["x"].tolist() for number in KEPT]
    rows = [x for xs in wanted for x in xs]
    assert view.lengths.tolist() == [LENGTHS[n] for n in KEPT]
    assert view.offsets.tolist() == [0, 3, 5]
    assert view.source_episodes.tolist() == KEPT
    assert len(view) == len(rows) == len(view.clip_indices)
    assert [x_of(view[i]) for i in range(len(view))] == [[x] for x in rows]
    assert [x_of(item) for item in view.__getitems__([7, 0, -1])] == [[rows[i]] for i in (7, 0, -1)]
    assert [view.load_episode(n)["x"].tolist() for n in range(3)] == wanted
    assert [chunk["x"].tolist() for chunk in view.load_chunk([2, 0], [1, 0], [3, 2])] == [wanted[2][1:3], wanted[0][:2]]
    assert view.load_steps(1, 1, 2, ["x"])["x"].tolist() == wanted[1][1:]
    assert view.get_episode_data()["seed"] == KEPT
    assert view.get_episode_data([2, 0])["seed"] == [5, 1]
    assert view.episode_data(1)["seed"] == 3
    assert view.get_col_data("x").tolist() == rows
    assert view.get_row_data([7, 0])["x"].tolist() == [rows[7], rows[0]]
    assert view.get_row_data(-1)["x"] == rows[-1]
    with pytest.raises(ClipIndexError):
        view.load_episode(3)
    again = view.view(where="seed > 1")  # of a view: numbered anew
    assert again.source_episodes.tolist() == KEPT[1:] and again.lengths.tolist() == [2, 3]
    assert again.get_col_data("x").tolist() == wanted[1] + wanted[2]
    assert view.take([2, 0]).get_col_data("x").tolist() == wanted[2] + wanted[0]
    assert view.take([2, 0]).source_episodes.tolist() == [5, 1]
    none = view.view(where="seed > 10")
    assert len(none) == len(none.lengths) == 0 == len(none.source_episodes)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a user's"])
def test_windows_and_steps_of_selected_episodes(tmp_path, kind):
    window = {"x": Window([0, 1])}
    whole = KINDS[kind](tmp_path)
    view = whole.view(window, anchors=slice(1, None), where="task = b")
    assert [x_of(view[i]) for i in range(len(view))] == [[101, 102], [501, 502]]
    for other in (whole.view(window, anchors=slice(1, None)), whole.view(anchors=slice(1, None))):
        assert other.lengths.tolist() == LENGTHS  # anchors change the items alone
        assert len(other) < len(whole) and len(other.get_col_data("x")) == sum(LENGTHS)
        assert other.source_episodes.tolist() == list(range(6))
    both = whole.view(window, anchors=slice(1, None)).view(window, where=lambda data: data["seed"] == 1)
    assert [x_of(both[i]) for i in range(len(both))] == [[100, 101], [101, 102]]


def test_copies_and_mixes_follow(tmp_path):
    """Exports, mixes, goals and pickles hold what was selected, and nothing else."""
    view = loaded(h5(tmp_path), where="task = b")
    seeds = {
        "convert": lambda out: convert(view, out, progress=False),
        "convert(where=)": lambda out: convert(h5(tmp_path, "c.h5"), out, where="task = b", progress=False),
        "merge": lambda out: merge([view, view.take([])], out, progress=False),
    }
    for name, copy in seeds.items():
        copy(tmp_path / f"{name}.h5")
        assert loaded(tmp_path / f"{name}.h5").get_episode_data()["seed"] == KEPT, name
    buf = ReplayBuffer(1000)
    buf.extend_from(view)
    assert buf.get_episode_data()["seed"] == KEPT
    buf.extend_from(buffer().view(where="seed = 2"))
    assert buf.get_episode_data()["seed"] == [*KEPT, 2]
    rows = set(view.get_col_data("x").tolist())
    for dataset in (view, buffer().view(where="task = b")):
        mix = OfflineToOnlineReplayBuffer(dataset, online_capacity=10, offline_fraction=0.9)
        assert set(mix.sample(500)["x"].tolist()) == rows
        goals = GoalDataset(dataset, (1, 0, 0, 0), goal_keys={"x": "goal"}, seed=0)
        assert {int(goals[i % 8]["goal"][0]) for i in range(300)} == rows
    for dataset in (view, buffer(tmp_path / "ring").view(where="task = b")):
        other = pickle.loads(pickle.dumps(dataset))
        assert other.get_episode_data()["seed"] == KEPT and other.source_episodes.tolist() == KEPT


def test_split_of_selected_episodes():
    train, rest = buffer().split(0.5, where="seed >= 2")
    assert sorted(train.get_episode_data()["seed"] + rest.get_episode_data()["seed"]) == [2, 3, 4, 5]


CALLS = {
    "dataset.view": lambda tmp, fn: loaded(h5(tmp)).view(anchors=fn),
    "load_dataset": lambda tmp, fn: load_dataset(h5(tmp), anchors=fn),
    "buffer.view": lambda tmp, fn: buffer().view(anchors=fn),
    "empty.view": lambda tmp, fn: ReplayBuffer(10).view(anchors=fn),
    "view.view": lambda tmp, fn: buffer().view().view(anchors=fn),
    "split": lambda tmp, fn: buffer().split(anchors=fn),
    "sample": lambda tmp, fn: buffer().sample(2, anchors=fn),
    "batches": lambda tmp, fn: buffer().batches(2, anchors=fn),
    "fleet.view": lambda tmp, fn: fleet(tmp).view(anchors=fn),
    "goals": lambda tmp, fn: GoalDataset(buffer()).view(anchors=fn),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("anchors", [lambda data: True, "task = b"], ids=["function", "text"])
def test_anchors_select_no_episodes(tmp_path, call, anchors):
    with pytest.raises(TypeError, match="which episodes are wanted says where=") as caught:
        CALLS[call](tmp_path, anchors)
    assert isinstance(caught.value, ArgumentTypeError)


def test_what_is_no_condition_is_refused(tmp_path):
    for whole in (buffer(), loaded(h5(tmp_path))):
        with pytest.raises(ArgumentTypeError, match="a condition, such as 'return > 100', or a function"):
            whole.view(where=[0, 1])
        with pytest.raises(InputError, match="expected True or False"):
            whole.view(where=lambda data: np.arange(2))
        with pytest.raises(InputError, match="no value 'sed'"):
            whole.view(where="sed < 2")


def test_what_is_evicted_is_not_selected():
    buf = ReplayBuffer(10)
    for number in (0, 1, 2):
        buf.write_episode(episode(number) | {"_episode_data": {"seed": number}})
    view = buf.view()
    assert view.source_episodes.tolist() == [0, 1]
    buf.write_episode(episode(5))
    for where in (lambda data: True, "seed >= 0", "return >= 0"):
        assert view.view(where=where).source_episodes.tolist() == [1], where
    assert view.view(where="length >= 0").source_episodes.tolist() == [0, 1]  # asks for nothing


def test_a_condition_reads_what_is_stored(tmp_path):
    """Whatever a dataset loads and makes of it: returns, ends, and marks, are those of the file."""
    path, out = h5(tmp_path), tmp_path / "out.h5"
    Marks(loaded(path)).set(3, flags="bad")
    options = {
        "as it is": {},
        "keys_to_load": {"keys_to_load": ["x"]},
        "transform": {"transform": lambda steps: {"x": steps["x"] + 1}},
        "merge": {"keys_to_merge": {"reward": ["x", "reward"]}},
        "torch": {"output": "torch"},
    }
    for name, given in options.items():
        dataset = load_dataset(path, **{"output": "numpy", **given})
        assert list(Marks(dataset).all()) == [3], name
        wanted = "not flags contains bad and return > 303 and ended = terminated"
        assert dataset.view(where=wanted).source_episodes.tolist() == [2, 4, 5], name
        some = dataset.view(where="task = b")
        assert list(Marks(some).all()) == [3]
        assert some.view(where="flags contains bad").source_episodes.tolist() == [3]
        convert(dataset, out, where="not flags contains bad", mode="overwrite", progress=False)
        assert loaded(out).get_episode_data()["seed"] == [0, 1, 2, 4, 5], name
    Marks(loaded(path).view(where="task = b")).set(5, flags="worse")
    assert list(Marks(loaded(path)).all()) == [3, 5]
    for kind in (buffer(tmp_path / "ring"), GoalDataset(buffer(tmp_path / "ring2"))):
        inner = getattr(kind, "dataset", kind)
        Marks(inner).set(inner.episode_spans()[0][3], flags="bad")
        assert kind.view(where="flags contains bad").source_episodes.tolist() == [3]
        assert kind.view(where="task = b").view(where="flags contains bad").source_episodes.tolist() == [3]


def test_returns_without_rewards_are_refused(tmp_path):
    with get_format("hdf5").open_writer(tmp_path / "a.h5") as writer:
        writer.write_episode({"x": [0, 1], "_episode_data": {"task": "return"}})
    dataset = loaded(tmp_path / "a.h5")
    assert len(dataset.view(where="task = return")) == 2
    for condition in ("return > 1", "ended = terminated"):
        with pytest.raises(InputError, match="needs one of the columns"):
            dataset.view(where=condition)


def test_marks_of_some_episodes_of_a_buffer_s_directory(tmp_path):
    """Where they stand in the ring, not where they stand among the selected ones."""
    with ReplayBuffer(100, path=tmp_path / "ring") as buf:
        for number in range(4):
            buf.write_episode({"x": np.full(10, number)})
        Marks(buf).set(20, flags="bad")
    some = load_dataset(tmp_path / "ring").take([3, 2, 0])
    assert some.view(where="flags contains bad").source_episodes.tolist() == [2]
    assert some.view(where="not flags contains bad").source_episodes.tolist() == [3, 0]


@pytest.mark.parametrize("kind", ["buffer", "hdf5"])
def test_every_name_of_episode_data_is_known_to_a_condition(tmp_path, kind):
    dataset = ReplayBuffer(1000) if kind == "buffer" else get_format("hdf5").open_writer(tmp_path / "a.h5")
    with dataset as writer:
        for number in range(3):
            data = {f"name{n}": number for n in range(100)}
            writer.write_episode({"x": np.full(2, number), "_episode_data": data})
    dataset = dataset if kind == "buffer" else loaded(tmp_path / "a.h5")
    assert dataset.view(where="name99 = 1").load_episode(0)["x"].tolist() == [1, 1]
    with pytest.raises(InputError, match="name100") as error:
        dataset.view(where="name100 = 1")
    assert "name99" in str(error.value)
