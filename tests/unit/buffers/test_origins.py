"""What an episode is known by, wherever it is copied to: the lineage of its first ring, and its ordinal there."""

import os
import pickle

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import InputError
from ringmap.storage.commit import commit as commit_module
from ringmap.storage.read.episodes import origins
from ringmap.storage.records.table import EPISODE, PART, RETIRE

OTHER = "ab" * 16


def make(path=None, **options):
    return ReplayBuffer(max_steps=60, path=path, spare_rows=20, sync_every_s=0, **options)


def write(buf, number, length=5, data=None):
    buf.write_episode({"x": np.full(length, number), "_episode_data": {"seed": number, **(data or {})}})


def ordinals(buf):
    lineages, found, _ = origins(buf.engine.owned)
    assert len(found) == len(lineages) == buf.num_episodes
    assert (lineages == np.frombuffer(buf.engine.owned.manifest.lineage, np.uint8)).all()
    return found.tolist()


def seeds(buf):
    return buf.get_episode_data().get("seed", [])


@pytest.fixture(params=["ram", "disk"])
def path(request, tmp_path):
    return None if request.param == "ram" else tmp_path / "buf"


def test_an_ordinal_counts_all_episodes_and_none_is_given_twice(path):
    buf = make(path)
    for number in range(20):
        write(buf, number)
    assert ordinals(buf) == seeds(buf) == list(range(8, 20))
    buf.clear()
    write(buf, 20)
    write(buf, 21, length=30)  # longer than the spare rows: a retire record before it
    assert ordinals(buf) == [20, 21]
    assert buf.check() == []
    if path is None:
        other = pickle.loads(pickle.dumps(buf))
        write(other, 22)
        assert ordinals(other) == [20, 21, 22]
        return
    buf.clear()
    buf.close()
    buf = make(path)
    write(buf, 22)
    assert ordinals(buf) == ordinals(ReplayBuffer.open(path)) == [22]
    assert ringmap.check(path) == []
    buf.close()


def test_all_parts_of_an_episode_have_one_ordinal_and_name_the_part_before(path):
    buf = make(path)
    one = buf.begin_episode(commit_every=3)
    for step in range(4):
        one.append({"x": step})
    write(buf, 7)
    two = buf.begin_episode(commit_every=2, episode_data={"_origin": f"{OTHER}-9"})
    for step in range(4):
        two.append({"x": step})
    write(buf, 8)
    for step in range(4, 6):
        one.append({"x": step})
    one.finish()
    two.finish()
    lineages, found, _ = origins(buf.engine.owned)
    assert found.tolist() == [0, 1, 9, 3]
    assert lineages[2].tobytes().hex() == OTHER
    table = buf.engine.owned.table
    records = table.read_range(1, buf.engine.owned.seq)[0]
    parts = records[(records["part"] & PART != 0) & (records["kind"] == EPISODE)]
    for ordinal in (0, 2):
        mine = parts[parts["ordinal"] == ordinal]
        assert len(mine) > 1
        assert mine["previous"].tolist() == [-1, *mine["start"][:-1].tolist()]
    ends = records[records["kind"] == RETIRE]
    assert ends["ordinal"].tolist() == [4] * len(ends)
    assert ends["previous"].tolist() == [int(parts[parts["ordinal"] == ordinal]["start"][-1]) for ordinal in (0, 2)]
    nexts = records["ordinal"] + records["behind"]
    assert (np.diff(nexts.astype(np.int64)) >= 0).all()
    assert (np.diff(records["time"]) >= 0).all()
    assert buf.check() == []
    if path is not None:
        again = origins(ReplayBuffer.open(path).engine.owned)
        assert (again[0] == lineages).all()
        assert (again[1] == found).all()
    buf.close()


def test_an_episode_that_was_copied_keeps_its_first_origin_and_users_do_not_see_it(path):
    buf = make(path)
    write(buf, 0)
    write(buf, 1, data={"_origin": f"{OTHER}-12"})
    write(buf, 2, data={"_origin": "not one", "text": '["_origin", "'})
    write(buf, 3, data={"text": '["_origin", "json"'})
    handles = [buf] if path is None else [buf, ReplayBuffer.open(path)]
    for handle in handles:
        lineages, found, _ = origins(handle.engine.owned)
        assert found.tolist() == [0, 12, 2, 3]
        assert lineages[1].tobytes().hex() == OTHER
        assert len({row.tobytes() for row in lineages[[0, 2, 3]]}) == 1
        assert handle.episode_column_names == ["seed", "text"]
        assert set(handle.get_episode_data()) == {"seed", "text"}
        assert handle.episode_data(1) == {"seed": 1}
        assert [e["_episode_data"].get("_origin") for e in handle.episodes()][:2] == [
            None,
            f"{OTHER}-12",
        ]
    records = buf.engine.owned.table.read_range(1, 4)[0]
    assert records["part"].tolist() == [0, 4, 4, 0], "a text that says so names none"
    if path is not None:
        dataset = ringmap.data.load_dataset(path)
        assert dataset.episode_column_names == ["seed", "text"]
        assert set(dataset.get_episode_data(1)) == {"seed", "text"}
    buf.close()


@pytest.mark.parametrize("format", ["hdf5", "zarr"])
def test_a_dump_of_many_rings_says_what_each_episode_was_first_stored_as(tmp_path, format):
    for ring in "ab":
        with make(tmp_path / "rings" / ring) as buf:
            for number in range(20):
                write(buf, number, data={"ring": ring})
            with buf.begin_episode(commit_every=2, episode_data={"seed": 20, "ring": ring}) as one:
                for step in range(5):
                    one.append({"x": step})
            write(buf, 21, data={"ring": ring, "_origin": f"{OTHER}-9"} if ring == "b" else {"ring": ring})
    with ShardedReplayBuffer(tmp_path / "rings") as fleet:
        fleet.dump(tmp_path / "out", format, progress=False)
        copy, view = ringmap.data.load_dataset(tmp_path / "out", format=format), fleet.view()
        assert copy.get_episode_data() == fleet.get_episode_data()
        for theirs, mine in zip(copy.origins(), view.origins(), strict=True):
            assert np.array_equal(theirs, mine)
        lineages, found = copy.origins()
        assert len({(line.tobytes(), number) for line, number in zip(lineages, found.tolist(), strict=True)}) == len(
            found
        )
        assert (lineages[-1].tobytes().hex(), found[-1]) == (OTHER, 9)
        for theirs, mine in zip(copy.split(0.5, seed=3), fleet.split(0.5, seed=3), strict=True):
            assert theirs.get_episode_data() == mine.get_episode_data()
        with make(**{"path": None}) as again:
            again.write_episodes(fleet.episodes())
            assert again.get_episode_data() == {n: v[-12:] for n, v in fleet.get_episode_data().items()}
        copy.close()


def test_lineage(tmp_path):
    def lineage(name, folder=tmp_path, **options):
        with make(folder / name, **options) as buf:
            write(buf, 0)
            found = buf.engine.owned.manifest.lineage
            buf.snapshot(folder / f"copy of {name}")
            buf.close()
        with ReplayBuffer.open(folder / f"copy of {name}") as copy:
            assert copy.engine.owned.manifest.lineage == found
            assert ordinals(copy) == [0]
        return found

    (tmp_path / "again").mkdir()
    first = lineage("a", seed=3)
    assert lineage("a", tmp_path / "again", seed=3) == first, "a repeated run"
    assert len({first, lineage("b", seed=3), lineage("c", seed=4), lineage("d"), lineage("e")}) == 5
    os.unlink(tmp_path / "a/manifest.json")
    ringmap.repair(tmp_path / "a", dry_run=False)
    with ReplayBuffer.open(tmp_path / "a") as buf:
        assert buf.engine.owned.manifest.lineage == first, "each column's label has it"


@pytest.mark.parametrize("lost", [[20], [19], [15, 16], "all"])
def test_a_repair_lets_no_ordinal_be_given_again(tmp_path, lost):
    with make(tmp_path / "buf") as buf:
        for number in range(20):
            write(buf, number)
        buf.close()
    table = tmp_path / "buf/episodes.npy"
    data = bytearray(table.read_bytes())
    for seq in range(1, 21) if lost == "all" else lost:
        at = 4096 + 128 * (seq % (len(data[4096:]) // 128))
        data[at : at + 40] = b"?" * 40
    table.write_bytes(data)
    ringmap.repair(tmp_path / "buf", dry_run=False)
    assert ringmap.check(tmp_path / "buf") == []
    with make(tmp_path / "buf") as buf:
        kept = ordinals(buf)
        assert kept == seeds(buf)
        write(buf, 20)
        assert ordinals(buf)[-1] >= 20  # it can't know that nothing newer was lost
        assert ordinals(buf)[:-1] == seeds(buf)[:-1]
        assert buf.check() == []
        buf.close()


def test_a_size_that_a_record_cannot_say_is_refused_before_anything_changes(path, monkeypatch):
    monkeypatch.setattr(commit_module, "_MOST_STEPS", 8)
    monkeypatch.setattr(commit_module, "_MOST_DATA", 100)
    monkeypatch.setattr(commit_module, "MOST_U4", 3)
    buf = make(path)
    write(buf, 0)
    with pytest.raises(InputError, match="9 steps, expected at most 8"):
        write(buf, 1, length=9)
    with pytest.raises(InputError, match="bytes of episode data and text, expected at most 100"):
        write(buf, 1, data={"text": "x" * 100})
    with (
        pytest.raises(InputError, match="4 as its lane"),
        buf.begin_episode(commit_every=2, lane=4) as episode,
    ):
        for step in range(3):
            episode.append({"x": step})
    with buf.begin_episode(commit_every=2) as episode:
        for step in range(2):
            episode.append({"x": step})
        for number in range(1, 5):
            write(buf, number)
        with pytest.raises(InputError, match="5 episodes that began since its first part, expected at most 3"):
            for step in range(2, 9):
                episode.append({"x": step})
        episode.abandon()
    assert ordinals(buf) == [0, 1, 2, 3, 4, 5]
    assert buf.check() == []
    buf.close()
