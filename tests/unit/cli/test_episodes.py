"""The table of episodes, against one that is made by hand."""

import operator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap.cli.episodes import matching, rows_of, sorted_by
from ringmap.data import ReplayBuffer, convert, load_dataset
from ringmap.datasets.marks import Marks
from ringmap.errors import InputError
from ringmap.formats.hdf5 import HDF5Writer
from tests.unit.cli.conftest import episode, fill


def test_rows(cli, replay):
    assert cli("episodes", replay, "--json").json == [
        {
            "episode": i,
            "length": length,
            "return": float(number * (length - 1)),
            "ended": "terminated" if number % 2 else None,
            "data": {"seed": 100 + number, "room": "left" if number % 2 else "right"},
        }
        for i, (number, length) in enumerate([(2, 12), (3, 10), (4, 11), (5, 12)])
    ]


def test_the_table(cli, replay):
    assert cli("episodes", replay).out == (
        "episode  length  return  ended       seed  room\n"
        "      0      12      22  -           102   right\n"
        "      1      10      27  terminated  103   left\n"
        "      2      11      40  -           104   right\n"
        "      3      12      55  terminated  105   left\n"
    )


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--min-length", "11"], [0, 2, 3]),
        (["--last", "2"], [2, 3]),
        (["--last", "0"], []),
        (["--last", "99"], [0, 1, 2, 3]),
        (["--min-length", "12", "--last", "1"], [3]),
        (["--where", "room=left"], [1, 3]),
        (["--where", "room!=left", "--where", "seed>102"], [2]),
        (["-w", "return >= 27", "-w", "length<12"], [1, 2]),
        (["--where", "ended=terminated"], [1, 3]),
        (["--where", "return > 22 and seed < 105"], [1, 2]),
        (["--where", "room contains ft or episode = 2", "-w", "not length = 10"], [2, 3]),
        (["--where", "seed=1e2"], []),
        (["--where", "seed=103.0"], [1]),
        (["--where", "seed in (102, 105)", "-w", "seed is not null"], [0, 3]),
        (["--sort", "length"], [1, 2, 0, 3]),
        (["--sort", "length", "--reverse"], [0, 3, 2, 1]),
        (["-s", "room", "-r"], [0, 2, 1, 3]),
        (["--sort", "ended"], [1, 3, 0, 2]),
    ],
)
def test_filters(cli, replay, words, left):
    assert [row["episode"] for row in cli("episodes", replay, *words, "--json").json] == left


OPS = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@given(
    values=st.lists(st.none() | st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from("abc")),
    how=st.sampled_from(sorted(OPS)),
    want=st.integers(-3, 3) | st.sampled_from("abc"),
)
def test_conditions_as_by_hand(values, how, want):
    rows = [{"episode": i, "length": 1, "data": {} if v is None else {"x": v}} for i, v in enumerate(values)]
    if values and all(v is None for v in values):
        with pytest.raises(InputError):
            matching(rows, [f"x{how}{want}"])
        return
    kinds = {isinstance(value, str) for value in values if value is not None}
    if values and isinstance(want, str) not in kinds:  # text against a number
        with pytest.raises(InputError, match="it is compared with"):
            matching(rows, [f"x{how}{want}"])
        return
    expected = []
    for i, value in enumerate(values):
        if isinstance(value, str) != isinstance(want, str) or value is None:
            meets = how == "!="  # a missing value, or one of the other kind
        else:
            meets = OPS[how](value, want)
        expected += [i] if meets else []
    assert [row["episode"] for row in matching(rows, [f"x{how}{want}"])] == expected


@given(
    values=st.lists(st.none() | st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from("abc")), reverse=st.booleans()
)
def test_order_as_by_hand(values, reverse):
    rows = [{"episode": i, "length": 1, "data": {} if v is None else {"x": v}} for i, v in enumerate(values)]
    if all(v is None for v in values):
        return
    found = [values[row["episode"]] for row in sorted_by(rows, "x", reverse)]
    numbers = sorted((v for v in values if isinstance(v, int | float)), reverse=reverse)
    texts = sorted((v for v in values if isinstance(v, str)), reverse=reverse)
    nones = [v for v in values if v is None]
    assert found == numbers + texts + nones


def test_columns_that_are_no_rewards(cli, tmp_path):
    buffer = ReplayBuffer(50, path=tmp_path / "odd")
    buffer.write_episode({"reward": np.zeros((4, 2)), "terminated": np.array(["a"] * 4), "big": np.zeros(4)})
    buffer.write_episode(
        {
            "reward": np.zeros((4, 2)),
            "terminated": np.array(["a"] * 4),
            "big": np.zeros(4),
            "_episode_data": {"map": np.zeros((30, 30)), "raw": b"\x00\xff", "nan": float("nan")},
        }
    )
    buffer.close()
    rows = cli("episodes", "odd", "--json").json
    assert rows[0] == {"episode": 0, "length": 4, "data": {}}
    data = rows[1]["data"]
    assert data == {"map": {"dtype": "float64", "shape": [30, 30]}, "raw": "00ff", "nan": None}
    assert cli("episodes", "odd").code == 0


def test_a_table_is_of_one_moment():
    """What comes, and what is evicted, while it is read, is not in it; each row is of one episode."""
    buffer = ReplayBuffer(30)
    for number in range(3):
        buffer.write_episode({"reward": np.full(10, number), "_episode_data": {"number": number}})
    pinned, left = buffer.pinned(), [3, 4]

    class Going(type(pinned)):
        def get_episode_data(self, idx=None):
            while left:
                value = left.pop()
                buffer.write_episode({"reward": np.full(10, value), "_episode_data": {"number": value}})
            return super().get_episode_data(idx)

    pinned.__class__ = Going
    rows = rows_of(pinned)
    assert [row["data"]["number"] for row in rows] == [2]
    assert [row["return"] for row in rows] == [10 * row["data"]["number"] for row in rows]


@pytest.mark.parametrize("name", ["replay", "a.h5", "rings"])
def test_by_marks(cli, tmp_path, name):
    with fill(tmp_path / "replay", episodes=3) as buffer, fill(tmp_path / "rings" / "r0", episodes=3) as ring:
        for one in (buffer, ring):
            Marks(one).set(int(one.episode_spans()[0][1]), flags="badly_lit", note="it slips")
            Marks(one).set(int(one.episode_spans()[0][2]), flags=("bad", "worse"))
        convert(buffer, tmp_path / "a.h5", progress=False)
    with closing(load_dataset(tmp_path / "a.h5")) as dataset:
        Marks(dataset).set(1, flags="badly_lit", note="it slips")
        Marks(dataset).set(2, flags=("bad", "worse"))

    def found(*words):
        return [row["episode"] for row in cli("episodes", name, "--json", *words).json]

    assert found("--where", "flags contains bad") == [2]
    assert found("--where", "not flags contains bad") == [0, 1]
    assert found("--where", "flags = ''") == [0]
    assert found("--where", "note contains SLIP", "--where", "flags != ''") == [1]
    assert found("--sort", "flags", "--reverse") == [1, 2, 0]
    assert "flags" not in cli("episodes", name, "--json").json[0]


def test_a_live_buffer(cli, tmp_path):
    buffer = fill(tmp_path / "live", episodes=3)
    assert len(cli("episodes", "live", "--json").json) == 3
    buffer.write_episode(episode(3))
    assert len(cli("episodes", "live", "--json").json) == 4
    buffer.close()


@pytest.mark.parametrize("name", ["reward", "rewards", "next.reward", "next/reward"])
def test_rewards_by_any_of_their_names(cli, tmp_path, name):
    with HDF5Writer(tmp_path / "a.h5") as writer:
        for length in (2, 3):
            writer.write_episode({"obs": np.zeros((length, 2)), name: np.ones(length)})
    rows = cli("episodes", tmp_path / "a.h5", "--json").json
    assert [row["return"] for row in rows] == [2, 3]
    dest = tmp_path / "b.h5"
    convert(tmp_path / "a.h5", dest, where="return > 2", progress=False)
    with closing(load_dataset(dest)) as found:
        assert found.lengths.tolist() == [3]
