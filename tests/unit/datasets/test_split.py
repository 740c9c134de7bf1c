"""Splits: an episode has its side for good, whatever grows, is evicted, copied or opened elsewhere."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from ringmap.data import (
    ConcatDataset,
    GoalDataset,
    MergeDataset,
    ReplayBuffer,
    ShardedReplayBuffer,
    convert,
    load_dataset,
    merge,
)
from ringmap.datasets.split import Arcs
from ringmap.errors import InputError
from tests.tiers import few

ALL = np.zeros((10_000, 16), np.uint8)


def write(buf, numbers, length=5):
    for number in numbers:
        buf.write_episode({"x": np.full(length, number), "_episode_data": {"number": number, "task": f"t{number % 3}"}})
    return buf


def numbers(dataset):
    return set(dataset.get_episode_data()["number"])


def sides(dataset, *args, **options):
    return [numbers(side) for side in dataset.split(*args, **options)]


def check_sides(found, known, whole):
    """Check that sides share nothing, have all of `whole`, and agree with earlier ones."""
    assert not set.intersection(*found)
    assert set.union(*found) == set(whole)
    for side, before in zip(found, known, strict=True):
        for other in known:
            assert other is before or not side & other


# -- the circle ------------------------------------------------------------------------------------


def held(arcs, first, count, lineage=b""):
    rows = ALL[:count] if not lineage else np.frombuffer(lineage * count, np.uint8).reshape(-1, 16)
    return arcs.hold(rows, np.arange(first, first + count, dtype=np.uint64))


@pytest.mark.parametrize("seed", range(4))
def test_a_share_is_exact_to_within_three_episodes_of_any_span(seed):
    rng, worst = np.random.default_rng(seed), 0.0
    for _ in range(150):
        count, first = (int(np.exp(rng.uniform(np.log(3), np.log(10_000)))), int(rng.integers(1 << 40)))
        share, lineage = float(rng.uniform(0.02, 0.98)), rng.bytes(16)
        one, other = Arcs.whole(seed).divided([share, 1 - share], seed)
        mine = held(one, first, count, lineage)
        assert (mine ^ held(other, first, count, lineage)).all()
        worst = max(worst, abs(mine.sum() - share * count))
    assert worst < 3


@pytest.mark.parametrize("every", range(2, 22))
def test_tasks_in_turns_are_shared_alike(every):
    one, _ = Arcs.whole(0).divided([0.8, 0.2], 0)
    turns = 10_000 // every
    mine = held(one, 0, turns * every).reshape(turns, every)
    by_chance = (0.8 * 0.2 / turns) ** 0.5
    assert np.abs(mine.mean(0) - 0.8).mean() < by_chance


def test_a_side_of_a_side_divides_it():
    train, rest = Arcs.whole(3).divided([0.8, 0.2], 3)
    for seed, share in itertools.product((3, 4, -9), (0.9, 0.5)):
        one, other = train.divided([share, 1 - share], seed)
        mine = [held(arcs, 0, 10_000) for arcs in (one, other, rest)]
        assert (sum(side.astype(int) for side in mine) == 1).all()
        assert abs(mine[0].mean() - 0.8 * share) < 0.001


@pytest.mark.parametrize("share", [0.5, 0.3, 0.2, 0.1, 0.03])
def test_the_longest_wait_is_what_is_said(share):
    one, _ = Arcs.whole(1).divided([share, 1 - share], 1)
    assert np.diff(np.flatnonzero(held(one, 0, 10_000))).max() == one.longest_wait


# -- rings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [False, True])
def test_no_episode_changes_sides_as_a_ring_grows_evicts_and_is_opened_again(tmp_path, parts):
    buf = ReplayBuffer(300, path=tmp_path / "ring")
    known = [set(), set()]
    for first in range(0, 120, 10):
        for number in range(first, first + 10):
            if parts and number % 2:
                episode = buf.begin_episode(commit_every=2, episode_data={"number": number})
                for step in range(5):
                    episode.append({"x": step})
                episode.finish()
            else:
                write(buf, [number])
        found = sides(buf, 0.8, seed=1)
        check_sides(found, known, numbers(buf))
        known = [before | side for before, side in zip(known, found, strict=True)]
        if first == 60:
            buf.close()
            buf = ReplayBuffer.open(tmp_path / "ring", "r+")
    assert abs(len(known[0]) - 96) < 3
    check_sides(sides(ReplayBuffer.open(tmp_path / "ring"), 0.8, seed=1), known, numbers(buf))
    check_sides(sides(load_dataset(tmp_path / "ring"), 0.8, seed=1), known, numbers(buf))
    buf.snapshot(tmp_path / "copy")
    check_sides(sides(ReplayBuffer.open(tmp_path / "copy"), 0.8, seed=1), known, numbers(buf))
    buf.close()


def test_a_fleet_splits_alike_in_any_process_and_order(tmp_path):
    for name in ("b", "a", "c"):
        write(ReplayBuffer(1000, path=tmp_path / name), range(100 * ord(name), 100 * ord(name) + 20)).close()
    code = (
        "import sys; from ringmap.data import ShardedReplayBuffer as S\n"
        "print(*sorted(set(S(sys.argv[1:]).split(0.7)[1].get_episode_data()['number'])))"
    )
    paths = [str(tmp_path / name) for name in "cab"]
    run = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    with ShardedReplayBuffer(tmp_path) as fleet:
        train, validation = sides(fleet, 0.7)
    assert {int(word) for word in run.stdout.split()} == validation
    for name in "abc":
        of_ring = {number for number in train if number // 100 == ord(name)}
        assert abs(len(of_ring) - 14) < 3, "exact in each ring"


def test_a_side_of_a_live_view_takes_the_new_episodes_of_its_side():
    buf = write(ReplayBuffer(200, seed=0), range(20))
    train, rest = buf.view(live=True).split(0.75)
    before = [numbers(train), numbers(rest)]
    write(buf, range(20, 50))
    train.refresh()
    rest.refresh()
    check_sides([numbers(train), numbers(rest)], before, numbers(buf))
    assert abs(len(train.lengths) - 30) < 3


def test_what_a_view_has_lost_is_on_no_side():
    buf = write(ReplayBuffer(100, seed=0), range(20))
    view = buf.view()
    before = sides(view, 0.6)
    write(buf, range(20, 26))
    found = sides(view, 0.6)
    check_sides(found, before, range(6, 20))


def test_the_same_seed_and_name_split_alike(tmp_path):
    found = []
    for run in ("one", "two"):
        buf = write(ReplayBuffer(1000, path=tmp_path / run / "replay", seed=7), range(30))
        found.append(sides(buf, 0.8))
        buf.close()
    assert found[0] == found[1]


# -- copies and joins ------------------------------------------------------------------------------


COPIES = {
    "dump": lambda buf, path: buf.dump(path, progress=False),
    "convert": lambda buf, path: convert(buf, path, progress=False),
    "merge": lambda buf, path: merge([buf], path, progress=False),
    "from a view": lambda buf, path: convert(buf.view(), path, progress=False),
}


@pytest.mark.parametrize("name", few(["copy.h5", "ring", "copy.zarr", "folder"], 2))
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_episode_is_on_its_side(tmp_path, how, name):
    buf = write(ReplayBuffer(100, seed=3), range(30))
    known, path = sides(buf, 0.7), tmp_path / name
    if name == "ring":
        copy = ReplayBuffer(1000, path=path)
        copy.extend_from(buf if how == "dump" else buf.view())
    elif name == "folder":
        convert(buf, path, dest_format="folder", progress=False)
        copy = load_dataset(path)
    else:
        COPIES[how](buf, path)
        copy = load_dataset(path)
    assert sides(copy, 0.7) == known
    again = tmp_path / "again.h5"
    convert(copy, again, where="number >= 15", progress=False)
    some = load_dataset(again)
    check_sides(sides(some, 0.7), known, {number for number in numbers(buf) if number >= 15})
    assert list(some.episode_column_names) == ["number", "task"]
    copy.close()


def test_filters_joins_and_goals_keep_sides():
    buf = write(ReplayBuffer(1000, seed=3), range(30))
    other = write(ReplayBuffer(1000, seed=4), range(100, 130))
    known = [a | b for a, b in zip(sides(buf, 0.7), sides(other, 0.7), strict=True)]
    for made in (
        ConcatDataset([buf, other]),
        ConcatDataset([other, buf]).view(where="task = 't1'"),
        MergeDataset([other, other.view()]),
        GoalDataset(buf, goal_keys={}),
        buf.view(where="number > 9"),
    ):
        check_sides(sides(made, 0.7), known, numbers(made))
    inner, held_out = buf.split(0.7)
    check_sides([*sides(inner, 0.9), numbers(held_out)], [*sides(inner, 0.9), known[1]], numbers(buf))


WAYS = {
    "moment": lambda buf, side: buf.view(at=json.loads(json.dumps(side.moment))),
    "goals": lambda buf, side: GoalDataset(side, goal_keys={}).view(where="number >= 0"),
    "columns": lambda buf, side: MergeDataset([side, buf.view(at=side.moment)]),
    "episodes": lambda buf, side: ConcatDataset([side.take(np.arange(5)), side.take(np.arange(5, len(side.lengths)))]),
    "goals of joined": lambda buf, side: GoalDataset(ConcatDataset([side]), goal_keys={}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["ring", "live", "rings"])
def test_a_side_is_divided_alike_wherever_it_goes(tmp_path, kind, way):
    buf = write(ReplayBuffer(1000, seed=3, path=tmp_path / "ring"), range(40))
    source = ShardedReplayBuffer([tmp_path / "ring"]) if kind == "rings" else buf
    whole = source.view(live=True) if kind == "live" else source.view()
    side, _ = whole.split(0.8)
    made = WAYS[way](source, side)
    inner, held_out = side.split(0.9)
    assert sides(made, 0.9) == [numbers(inner), numbers(held_out)]
    assert sides(made.split(0.9)[0], 0.5) == sides(inner, 0.5)


def test_joined_sides_are_no_side():
    buf = write(ReplayBuffer(1000, seed=3), range(40))
    joined = ConcatDataset(buf.split(0.8))
    check_sides(sides(joined, 0.7), sides(buf, 0.7), numbers(buf))


def test_a_moment_whose_side_is_none_is_refused():
    buf = write(ReplayBuffer(1000, seed=3), range(40))
    moment = buf.split(0.8)[0].moment
    for wrong in (
        None,
        [],
        {},
        {"seed": 0, "pieces": []},
        {"seed": 0, "pieces": [[1]]},
        {"seed": 1.5, "pieces": [[0, 1]]},
        {"seed": 0, "pieces": [[2, 1]]},
        {"seed": 0, "pieces": [[0, 1 << 65]]},
        {"seed": 1 << 64, "pieces": [[0, 1]]},
    ):
        with pytest.raises(InputError):
            buf.view(at={**moment, "arcs": wrong})


def test_a_file_that_says_nothing_keeps_sides_as_it_grows(tmp_path):
    from ringmap.data import get_format

    path, known = tmp_path / "a.h5", [set(), set()]
    for mode in ("error", "append", "append"):
        with get_format("hdf5").open_writer(path, mode=mode) as writer:
            for _ in range(10):
                writer.write_episode({"x": np.arange(4)})
        dataset = load_dataset(path)
        one, other = dataset.split(0.8)
        found = [set(one.source_episodes.tolist()), set(other.source_episodes.tolist())]
        check_sides(found, known, range(len(dataset.lengths)))
        dataset.close()
        known = found
    assert abs(len(known[0]) - 24) < 3


# -- what is refused -------------------------------------------------------------------------------


def test_shares_may_be_of_numpy():
    buf = write(ReplayBuffer(1000, seed=3), range(30))
    assert sides(buf, [np.float32(0.8), np.float32(0.2)]) == sides(buf, 0.8)


def test_three_shares_make_three_sides():
    buf = write(ReplayBuffer(1000, seed=0), range(50))
    found = sides(buf, [0.8, 0.1, 0.1])
    check_sides(found, [set(), set(), set()], range(50))
    assert [abs(len(side) - n) < 3 for side, n in zip(found, (40, 5, 5), strict=True)] == [True] * 3
    assert found[0] == sides(buf, 0.8)[0]


@pytest.mark.parametrize(
    ("train", "match"),
    [
        (0, "between 0 and 1"),
        (1.0, "between 0 and 1"),
        ([0.5, 0.4], "add up to 0.9"),
        ([1.0], "two sides"),
        ("half", "number"),
        (None, "number"),
        (np.array(0.5), "number"),
    ],
)
def test_shares_that_are_none_are_refused(train, match):
    buf = write(ReplayBuffer(100, seed=0), range(10))
    with pytest.raises(InputError, match=match):
        buf.split(train)
    with pytest.raises(InputError, match="integer of 64 bits"):
        buf.split(0.5, seed=0.5)


def test_an_empty_side_says_how_many_episodes_it_takes():
    buf = write(ReplayBuffer(1000, seed=0), range(3))
    with pytest.raises(InputError, match="0.02 has none of the 3 episodes; of 89 episodes in a row it has one"):
        buf.split(0.98)
