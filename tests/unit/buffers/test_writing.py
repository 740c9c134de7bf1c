"""Writing: the order of the checks, what a failing call leaves behind (nothing), copies in."""

import re

import gymnasium
import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.buffers.replay import EPISODE_DATA_KEY
from ringmap.datasets.episode import EpisodeDict
from ringmap.errors import InputError
from ringmap.recording import ReplayBufferCollectionWrapper
from ringmap.storage.records.table import TERMINATED
from tests.unit.buffers.steps import COLUMNS, columns, episode, same, snapshot, stored


@pytest.fixture
def filled(buffer):
    """A buffer with a locked schema and three episodes, and no room for a fourth of 5 steps."""
    buf = buffer(max_steps=15)
    for number in range(3):
        buf.write_episode(episode(number, 5, {"number": number}))
    return buf


def unchanged(buffer, buf, work, error, words):
    """Check that `work` raises, and that neither the buffer nor a byte of its files changes."""
    before, files = snapshot(buf), buffer.files()
    with pytest.raises(error, match=words) as raised:
        work()
    assert snapshot(buf) == before
    assert buffer.files() == files
    buf.write_episode(episode(9, 5))
    assert stored(buf)[-1] == 9, "and it goes on"
    return raised.value


# -- no-ops ------------------------------------------------------------------------------------

NOTHING = {
    "empty dict": {},
    "only episode data": {EPISODE_DATA_KEY: {"seed": 1}},
    "length 0": {"x": np.zeros((0, 3)), "y": []},
    "length 0 and episode data": {"x": [], EPISODE_DATA_KEY: {"seed": 1}},
    "no episode data at all": {EPISODE_DATA_KEY: None},
    "empty episode data": {EPISODE_DATA_KEY: {}},
}


@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_nothing_is_a_no_op(buffer, nothing, first):
    buf = buffer(max_steps=15)
    if not first:
        buf.write_episode(episode(0, 5))
    before, files = snapshot(buf), buffer.files()
    assert buf.write_episode(NOTHING[nothing]) is None
    assert snapshot(buf) == before
    assert buffer.files() == files
    if first:
        buf.write_episode({"other": [1, 2]})
        assert buf.column_names == ["other"], "the schema was not locked"


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_key_filter_that_leaves_nothing_is_a_no_op(buffer, nothing):
    buf = buffer(max_steps=15, key_filter=lambda given: nothing)
    before, files = snapshot(buf), buffer.files()
    buf.write_episode(episode(0, 5))
    assert snapshot(buf) == before
    assert buffer.files() == files


def test_a_falsy_mapping_is_never_looked_at(buffer):
    class Falsy(dict):
        def __bool__(self):
            return False

    buf = buffer(max_steps=15)
    buf.write_episode(Falsy(x=3))
    assert buf.num_episodes == 0


# -- the order of the checks -------------------------------------------------------------------

ORDER = [
    ("episode data is no mapping", {EPISODE_DATA_KEY: 3}, "_episode_data.* must be a mapping"),
    ("the key filter", {"filtered": True}, "from the key filter"),
    ("a scalar", {"step": 7}, "column 'step' is a scalar"),
    (
        "unequal lengths",
        {"step": np.zeros(16, np.int32)},
        "column 'step' has 16 steps, expected 17",
    ),
    ("another schema", {"more": np.zeros(17)}, "schema mismatch"),
    ("another shape", {"step": np.zeros((17, 2))}, "per-step shape"),
    ("another value", {"step": np.full(17, 0.5)}, "step 0 of dtype float64 does not fit"),
    (
        "too long",
        {},
        re.escape("episode of 17 steps exceeds max_steps=15; raise max_steps or split the episode"),
    ),
]


@pytest.mark.parametrize("at", range(len(ORDER)), ids=lambda i: ORDER[i][0])
def test_the_first_fault_in_order_is_the_one_that_is_named(filled, buffer, at):
    """Each call has all the faults from `at` on, as far as they can be had together."""

    def key_filter(given):
        if given.pop("filtered", None) is not None:
            raise InputError("from the key filter")
        return given

    filled.key_filter = key_filter
    given = dict(columns(7, 0, 17))
    for _, fault, _ in reversed(ORDER[at:]):
        given.update(fault)
    unchanged(buffer, filled, lambda: filled.write_episode(given), InputError, ORDER[at][2])


def test_length_0_comes_before_the_schema(filled):
    filled.write_episode({"anything": np.zeros((0, 9))})
    assert filled.num_episodes == 3


def test_unequal_lengths_come_before_length_0(filled):
    with pytest.raises(InputError, match="expected 0"):
        filled.write_episode({"a": [], "b": [1]})


# -- a call that raises changes nothing --------------------------------------------------------

five = lambda **change: {**columns(7, 0, 5), **change}  # noqa: E731
WRONG = {
    "a scalar": (five(step=3), "column 'step' is a scalar"),
    "a scalar among lists": (five(step=np.int32(3)), "scalar"),
    "unequal lengths": (five(step=[1, 2, 3, 4]), "expected 5"),
    "too long": (columns(7, 0, 16), "exceeds max_steps=15"),
    "a missing column": ({"episode": [1]}, r"schema mismatch: missing columns \['step', 'obs/x', 'action'\]"),
    "an extra column": (five(more=np.zeros(5)), r"schema mismatch: missing columns \[\], extra columns \['more'\]"),
    "a misspelt column": (
        {**{k: v for k, v in five().items() if k != "action"}, "Action": np.zeros((5, 2))},
        r"missing columns \['action'\], extra columns \['Action'\]",
    ),
    "another per-step shape": (five(action=np.zeros((5, 3))), r"per-step shape \(3,\), expected \(2,\)"),
    "one dimension less": (five(action=np.zeros(5)), r"per-step shape \(\), expected \(2,\)"),
    "300.7 in uint8": (
        five(**{"obs/x": np.full((5, 3), 300.7)}),
        "column 'obs/x': step 0 of dtype float64 does not fit in the locked dtype uint8",
    ),
    "a late 2.9 in an integer": (five(step=[0, 1, 2, 3, 2.9]), "column 'step': step 4 of dtype float64"),
    "a late NaN in an integer": (five(episode=[0, 1, np.nan, 3, 4]), "column 'episode': step 2"),
    "a string": (five(step=list("abcde")), "of another kind"),
    "objects": (five(step=[None] * 5), "Python objects"),
    "ragged": (five(action=[np.zeros(2)] * 4 + [np.zeros(3)]), "column 'action' is ragged.*pad them"),
    "a name that is no string": ({3: [1]}, "column names are strings"),
    "episode data that is no mapping": (five(**{EPISODE_DATA_KEY: [1]}), "must be a mapping"),
    "episode data of an unknown type": (five(**{EPISODE_DATA_KEY: {"x": object()}}), "episode data 'x'"),
    "episode data with a name that is no string": (five(**{EPISODE_DATA_KEY: {3: 1}}), "names are strings"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_call_that_raises_evicts_writes_and_changes_nothing(filled, buffer, wrong):
    given, words = WRONG[wrong]
    error = unchanged(buffer, filled, lambda: filled.write_episode(given), InputError, words)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("wrong", ["a scalar", "unequal lengths", "too long", "objects", "ragged"])
def test_a_first_call_that_raises_locks_nothing(buffer, wrong):
    buf = buffer(max_steps=15)
    files = buffer.files()
    with pytest.raises(InputError):
        buf.write_episode(WRONG[wrong][0])
    assert buf.column_names == []
    assert buffer.files() == files
    buf.write_episode({"other": [1]})


def test_a_key_filter_that_raises_changes_nothing(filled, buffer):
    def key_filter(given):
        raise ZeroDivisionError("mine")

    def work():
        filled.key_filter = key_filter
        try:
            filled.write_episode(episode(7, 5))
        finally:
            filled.key_filter = None

    unchanged(buffer, filled, work, ZeroDivisionError, "mine")


def test_control_a_call_that_evicts_first_is_caught(filled, buffer):
    def evict_first():
        filled.engine.owned.clear()
        filled.write_episode(WRONG["a scalar"][0])

    with pytest.raises(AssertionError):
        unchanged(buffer, filled, evict_first, InputError, "scalar")


def test_unsafe_casting_is_the_original_s_rule(buffer):
    buf = buffer(max_steps=15, casting="unsafe")
    buf.write_episode(
        {
            "pixel": np.zeros(2, np.uint8),
            "n": np.zeros(2, np.int64),
            "f": np.zeros(2, "f4"),
            "s": [b"ab"] * 2,
        }
    )
    buf.write_episode({"pixel": [300.7, 1], "n": [2.9, 1], "f": [1e300, 1], "s": [12, 3]})
    assert {name: v.tolist() for name, v in buf.load_episode(1).items()} == {
        "pixel": [44, 1],
        "n": [2, 1],
        "f": [np.inf, 1],
        "s": [b"12", b"3"],
    }
    with pytest.raises(InputError, match="'s': step 0 .*; shorten it, or name a greater width"):  # never cut
        buf.write_episode({"pixel": [1], "n": [1], "f": [1], "s": [b"abcd"]})


# -- what is welcome ---------------------------------------------------------------------------


def test_columns_keep_the_order_of_the_first_episode(buffer):
    buf = buffer(max_steps=15)
    buf.write_episode({"b": [1], "a": [2]})
    buf.write_episode({"a": [20], "b": [10]})
    assert buf.column_names == ["b", "a"]
    assert list(buf.load_episode(1)) == ["b", "a"]
    assert (buf.load_episode(1)["a"][0], buf.load_episode(1)["b"][0]) == (20, 10)


def test_arrays_need_not_be_contiguous(buffer):
    buf = buffer(max_steps=15)
    wide = np.arange(60.0).reshape(5, 3, 4)
    given = {
        "a": wide[:, ::2, ::-1],
        "b": wide.transpose(0, 2, 1),
        "c": np.broadcast_to(np.float32(3), (5, 2)),
    }
    buf.write_episode(given)
    same(buf.load_episode(0), {name: np.ascontiguousarray(v) for name, v in given.items()})


def test_images_that_were_turned_are_turned_back(buffer):
    frames = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    buf = buffer(max_steps=15)
    buf.write_episode(EpisodeDict({"pixels": frames.transpose(0, 3, 1, 2)}, {"pixels"}))
    same(buf.load_episode(0), {"pixels": frames})


NAMES = [
    "obs/pixels",
    "état",
    "..",
    ".",
    "",
    " ",
    "a" * 300,
    "/etc/passwd",
    "../../x",
    "con",
    "a\0b",
    "a\nb",
    "漢字",
    "\ud800",
    "x.npy",
    "columns",
    "%s{}",
    "-rf *",
    "A",
    "a",
    "_private",
    "__class__",
]


def test_any_string_is_a_column_name(buffer, home):
    buf = buffer(max_steps=15)
    for number in range(5):
        buf.write_episode({name: np.full(4, number * 100 + i) for i, name in enumerate(NAMES)})
    assert buf.column_names == NAMES
    for i, name in enumerate(NAMES):
        assert buf.get_col_data(name).tolist() == [n * 100 + i for n in (2, 3, 4) for _ in range(4)]
    assert set(buf.sample(3)) == set(NAMES)
    if not buffer.on_disk:
        return
    assert {path.name for path in home.iterdir()} == {"buf"}, "nothing is written outside the directory"
    files = sorted(path.name for path in (home / "buf/columns").iterdir())
    assert len(files) == len(NAMES)
    assert all(re.fullmatch(r"\d{3}-[a-z0-9-]*\.npy", name) for name in files)
    buf.close()
    again = buffer(max_steps=15)
    assert again.column_names == NAMES
    assert again.load_episode(-1)["état"].tolist() == [401] * 4
    reader = ReplayBuffer.open(home / "buf")
    assert reader.column_names == NAMES
    reader.close()


def test_a_thousand_columns(buffer):
    buf = buffer(max_steps=5)
    buf.write_episode({f"c{i}": [i] for i in range(1001)})
    assert buf.load_episode(0)["c1000"].tolist() == [1000]
    assert len(buf.column_names) == 1001


# -- copies ------------------------------------------------------------------------------------


def test_what_went_in_can_be_changed_afterwards(buffer):
    buf = buffer(max_steps=15)
    given, data = episode(0, 5), {"goal": np.arange(3)}
    buf.write_episode({**given, EPISODE_DATA_KEY: data})
    lists = {name: list(values) for name, values in episode(1, 5).items()}
    buf.write_episode(lists)
    before = snapshot(buf)
    for values in given.values():
        values[...] = 99
    data["goal"][:] = 99
    data["more"] = 1
    for values in lists.values():
        values[:] = values[:1]
    given.clear()
    assert snapshot(buf) == before


def test_what_was_given_is_not_changed(buffer):
    seen = []
    buf = buffer(max_steps=15, key_filter=lambda given: seen.append(given) or {"step": given.pop("step")})
    given = episode(0, 5, {"seed": 1})
    buf.write_episode(given)
    assert list(given) == [*COLUMNS, EPISODE_DATA_KEY]
    assert list(seen[0]) == ["episode", "obs/x", "action"], "per-step columns only, in a dict of its own"
    assert buf.get_episode_data() == {"seed": [1]}


# -- many at once ------------------------------------------------------------------------------


def test_write_episodes_commits_each_as_it_arrives(buffer):
    buf, seen = buffer(max_steps=15), []

    def arriving():
        for number in range(5):
            seen.append(buf.num_episodes)
            yield episode(number, 5)

    buf.write_episodes(arriving())
    assert seen == [0, 1, 2, 3, 3]
    assert stored(buf) == [2, 3, 4]


def test_extend_from_is_the_resize(buffer):
    small = buffer(max_steps=15, name="small")
    for number in range(5):
        small.write_episode(episode(number, 5, {"number": number}))
    large = buffer(max_steps=60, name="large")
    large.write_episode(episode(77, 5))
    large.extend_from(small)
    assert stored(large) == [77, 2, 3, 4]
    assert large.get_episode_data() == {"number": [None, 2, 3, 4]}
    assert stored(small) == [2, 3, 4]


# -- several by one call ---------------------------------------------------------------------------


def mixed():
    """Return short alike episodes, which share their writes, and between them lists, a view and long or empty ones,
    which do not."""
    made = [episode(number, 1 + number % 3, {"number": number}) for number in range(12)]
    made.insert(3, {name: list(values) for name, values in episode(20, 2).items()})
    made.insert(6, {name: values[::-1] for name, values in episode(21, 3).items()})
    made.insert(8, episode(22, 14))
    return [*made, {}, episode(23, 1), {"x": np.zeros((0, 3)), "y": np.zeros(0)}, episode(24, 2)]


@pytest.mark.parametrize("as_given", [list, tuple, iter])
def test_several_by_one_call_are_what_they_are_alone(buffer, as_given, monkeypatch):
    together, counts = ReplayBuffer.write_joined, []

    def counted(self, *args, **options):
        counts.append(together(self, *args, **options))
        return counts[-1]

    monkeypatch.setattr(ReplayBuffer, "write_joined", counted)
    alone, buf = ReplayBuffer(max_steps=40, spare_rows=10), buffer(max_steps=40, spare_rows=10)
    for one in mixed():
        alone.write_episode(one)
    buf.write_episodes(as_given(mixed()))
    assert {**snapshot(buf), "settings": 0} == {**snapshot(alone), "settings": 0}
    assert (sum(counts) >= 8) == (as_given is not iter), "those that can be are stored together"
    assert all(counts), "no run is longer than the spare rows"
    assert buf.check() == []


def test_lists_of_several_are_what_they_are_alone(buffer):
    first = {"x": np.zeros(2), "terminated": np.zeros(2, bool)}
    rows = {"x": [1.0, 2.0, 3.0], "terminated": [False, True, False]}
    alone, buf = buffer(max_steps=40), ReplayBuffer(max_steps=40)
    for one in (alone, buf):
        one.write_episode(first)
    for part in (slice(0, 2), slice(2, 3)):
        alone.write_episode({name: values[part] for name, values in rows.items()})
    assert buf.write_joined(rows, [2, 1]) == 2
    assert {**snapshot(buf), "settings": 0} == {**snapshot(alone), "settings": 0}
    for one in (alone, buf):
        table = one.engine.owned.table
        assert [table.read(seq).flags for seq in (1, 2, 3)] == [0, TERMINATED, 0]


def test_data_of_several_is_of_each(buffer):
    buf = buffer(max_steps=40)
    buf.write_episode({"x": np.zeros(2)})
    with pytest.raises(InputError, match="2 lengths, but episode_data of 1 episodes; give one"):
        buf.write_joined({"x": np.zeros(3)}, [2, 1], [{"number": 1}])
    assert buf.num_episodes == 1


class Counting(ReplayBuffer):
    """A subclass whose `write_episode` is its own."""

    written = 0

    def write_episode(self, *args, **options):
        self.written += 1
        super().write_episode(*args, **options)


def test_a_write_episode_of_a_subclass_is_called():
    """For lists of short episodes, and by a recorder."""
    buf = Counting(max_steps=400)
    buf.write_episodes([{"obs": np.full(4, n)} for n in range(10)])
    assert (buf.written, buf.num_episodes) == (10, 10)
    recorded = Counting(max_steps=4000)
    envs = ReplayBufferCollectionWrapper(
        gymnasium.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync"), recorded
    )
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(60):
        envs.step(envs.action_space.sample())
    assert recorded.written == recorded.num_episodes > 8


def test_those_before_one_that_is_refused_are_stored(buffer):
    buf = buffer(max_steps=40, spare_rows=10)
    wrong = {**episode(32, 2), "episode": episode(32, 2)["episode"] + 0.5}
    with pytest.raises(InputError):
        buf.write_episodes([episode(29, 1), episode(30, 2), episode(31, 2), wrong, episode(33, 2)])
    assert stored(buf) == [29, 30, 31]
    doubles = [{**episode(n, 2), "episode": np.full(2, float(n))} for n in range(34, 38)]
    doubles[2]["episode"] += 0.5
    with pytest.raises(InputError):
        buf.write_episodes(doubles)  # all are of one kind, and stored together if none is refused
    assert stored(buf) == [29, 30, 31, 34, 35]
    buf.write_episodes([])
    assert stored(buf)[-1] == 35
