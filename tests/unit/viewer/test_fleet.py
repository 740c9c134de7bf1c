"""A fleet's page: all rings as one table against plain lists, counts and pace; rings that are damaged, gone or
replaced."""

import contextlib
import shutil
import threading
import time

import numpy as np
import pytest

import ringmap
from ringmap import DistillationBuffer, Pace
from ringmap.buffers.opening import EPISODES
from ringmap.data import ReplayBuffer, ShardedReplayBuffer
from ringmap.errors import InputError, NotFoundError
from ringmap.storage.disk.checksums import decode_signed, encode_signed
from ringmap.storage.read.reader import Reader
from ringmap.viewer import library as library_module
from ringmap.viewer.library import Library
from ringmap.viewer.open_dataset import EpisodeIndex, JoinedTable, Part, RequestCounter
from ringmap.viewer.sources import RingSource
from tests.unit.viewer.conftest import add_transitions, episode, fill, fill_transitions, until


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A library that looks for new rings each time."""
    monkeypatch.setattr(library_module, "_AGAIN_S", 0.0)
    monkeypatch.setattr(library_module, "_TIMES", 0)
    made = Library([tmp_path])
    yield made
    made.close()


def fleet_of(library):
    (key,) = [place.key for place in library.places() if place.kind == "fleet"]
    return key


def rows_of(library, key, where="", sort="episode", descending=False):
    """Return ring and number of each row of a table that is known whole."""
    library.follow(key)
    table = library.shown(key).table
    table.start()
    until(lambda: table.rows(0, 0, "", "episode", False), lambda t: t["indexed"] == t["total"])
    return [(row["ring"], row["episode"]) for row in table.rows(0, 500, where, sort, descending)["rows"]]


def test_the_table_of_all_rings_against_plain_lists(tmp_path):
    rng = np.random.default_rng(0)
    stored, buffers = {}, {}
    for name, count in (("a", 12), ("b", 3), ("c", 7)):
        buffer = buffers[name] = ReplayBuffer(60, path=tmp_path / name)
        for number in range(count):
            length, seed = int(rng.integers(3, 9)), int(rng.integers(100))
            data = {"seed": seed} if name != "b" else {"room": f"room {seed}"}
            rewards = rng.integers(-9, 9, length).astype(np.float32)
            buffer.write_episode({"reward": rewards, "_episode_data": data})
            stored.setdefault(name, []).append((length, float(rewards.sum()), data))
        stored[name] = stored[name][-buffer.num_episodes :]  # the others were evicted
    library = Library([tmp_path])
    key = fleet_of(library)
    model = [(name, n, *known) for name, one in stored.items() for n, known in enumerate(one)]
    ages = {(name, n): len(stored[name]) - n for name, n, *_ in model}
    by_age = sorted(model, key=lambda row: -ages[row[:2]])
    for where, meets in {
        "": lambda row: True,
        "return > 0 and length < 8": lambda row: row[3] > 0 and row[2] < 8,
        "ring = 'b' or episode = 2": lambda row: row[0] == "b" or row[1] == 2,
        "seed >= 50": lambda row: row[4].get("seed", -1) >= 50,
        "not room contains '1'": lambda row: "1" not in row[4].get("room", ""),
    }.items():
        chosen = [row for row in by_age if meets(row)]
        assert rows_of(library, key, where) == [row[:2] for row in chosen], where
        assert rows_of(library, key, where, descending=True) == [row[:2] for row in chosen][::-1]
        found = rows_of(library, key, where, "return", True)
        assert found == [row[:2] for row in sorted(chosen, key=lambda row: -row[3])], where
    with_seed = [row for row in by_age if "seed" in row[4]]
    without = [row for row in by_age if "seed" not in row[4]]
    found = rows_of(library, key, sort="seed")
    assert found == [row[:2] for row in (*sorted(with_seed, key=lambda row: row[4]["seed"]), *without)]
    assert [ring for ring, _ in rows_of(library, key, sort="ring")] == sorted(r[0] for r in model)
    with pytest.raises(InputError, match="no value 'rings'; there are .*'ring'"):
        rows_of(library, key, "rings = 'a'")
    spread = library.shown(key).table.spread()
    for at, name in ((2, "length"), (3, "return")):
        values = [row[at] for row in by_age]
        assert sum(spread[name]["counts"]) == len(model)
        assert spread[name]["means"] == pytest.approx(values)
    library.close()
    for buffer in buffers.values():
        buffer.close()


def test_rows_of_one_ring_are_neither_copied_nor_reordered(tmp_path):
    with fill(tmp_path / "a", 3) as buffer:
        index = EpisodeIndex(RingSource(buffer))
        index.start()
        until(lambda: index.done, lambda done: done == 3)
        one, two = (JoinedTable([Part("k", "a", index)] * n) for n in (1, 2))
        assert one.rows(0, 9, "", "episode", False)["total"] == 3
        assert np.shares_memory(one.values("seed").numbers, index.table.data["seed"].numbers)
        assert two.rows(0, 9, "", "episode", False)["total"] == 6  # control
        assert not np.shares_memory(two.values("seed").numbers, index.table.data["seed"].numbers)
        index.close()


def test_commits_evictions_and_rings_that_join_are_followed(tmp_path, shelf):
    a, b = fill(tmp_path / "a", 4, max_steps=100), fill(tmp_path / "b", 2)
    key = fleet_of(shelf)
    assert rows_of(shelf, key) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("a", 3), ("b", 1)]
    before = shelf.follow(key)["version"]
    assert shelf.follow(key)["version"] == before  # nothing is new
    for number in range(4, 8):
        a.write_episode(episode(number))  # a holds five, and loses its oldest
    assert shelf.follow(key)["version"] > before
    assert len(rows_of(shelf, key)) == 5 + 2
    assert [row["data"]["seed"] for row in shelf.shown(key).table.rows(0, 9, "ring = 'a'", "episode", True)["rows"]][
        -1
    ] == 103
    c = ReplayBuffer(100, path=tmp_path / "c")  # it has no columns yet
    assert len(fleet_of_fresh(tmp_path)) == 1
    state = shelf.follow(key)
    assert [(line["name"], line["episodes"], line["problem"]) for line in state["shards"]] == [
        ("a", 5, None),
        ("b", 2, None),
        ("c", 0, None),
    ]
    c.write_episode(episode(0))
    assert rows_of(shelf, key)[-1] == ("c", 0)
    state = shelf.follow(key)
    assert (state["episodes"], state["steps"], state["written"], state["writers"]) == (8, 160, 220, 3)
    for buffer in (a, b, c):
        buffer.close()
    assert shelf.follow(key)["writers"] == 0


def test_what_is_wrong_with_a_ring_is_said_in_its_line(tmp_path, shelf):
    for name in "abcd":
        fill(tmp_path / name, 2).close()
    key = fleet_of(shelf)
    assert len(rows_of(shelf, key)) == 8
    (tmp_path / "a/manifest.json").write_text("{")
    shutil.rmtree(tmp_path / "b")
    shutil.rmtree(tmp_path / "c")
    with ReplayBuffer(100, path=tmp_path / "c") as other:
        other.write_episode({"x": np.zeros(5)})
    problems = {line["name"]: line["problem"] for line in shelf.follow(key)["shards"]}
    assert "manifest" in problems["a"]
    assert problems["b"] == "the ring was removed or renamed"
    assert "other columns" in problems["c"] and problems["d"] is None  # those that were there first
    assert rows_of(shelf, key) == [("d", 0), ("d", 1)]
    shutil.rmtree(tmp_path / "c")
    shelf.places()
    assert shelf.num_open == 1  # files of rings that are gone are closed
    assert {ring for ring, _ in rows_of(shelf, key)} == {"d"}  # one is left, and it stays a fleet
    assert fleet_of(shelf) == key
    assert fleet_of_fresh(tmp_path) == []  # control: who never saw the others sees a ring alone


def fleet_of_fresh(path):
    library = Library([path])
    found = [place for place in library.places() if place.kind == "fleet"]
    library.close()
    return found


def test_a_ring_that_was_replaced_is_opened_again(tmp_path, shelf):
    fill(tmp_path / "a", 3).close()
    (place,) = shelf.places()
    assert shelf.follow(place.key)["episodes"] == 3
    shutil.rmtree(tmp_path / "a")
    for _ in range(3):
        with pytest.raises(NotFoundError, match=r"/a: was removed or renamed|nothing of that name"):
            shelf.follow(place.key)
    fill(tmp_path / "a", 2).close()
    shelf.places()
    assert shelf.follow(place.key)["episodes"] == 2
    assert shelf.open(place.key).source.data(0)["seed"] == 100


def test_a_ring_that_fails_is_not_opened_at_each_look(tmp_path, monkeypatch):
    fill(tmp_path / "a", 2).close()
    fill(tmp_path / "b", 2).close()
    library = Library([tmp_path])
    key, tried = fleet_of(library), []

    def broken(path):
        tried.append(path)
        raise OSError("the disk fails")

    monkeypatch.setitem(library_module.SOURCES, EPISODES, broken)
    for _ in range(3):
        lines = library.follow(key)["shards"]
    assert [line["problem"] for line in lines] == ["the disk fails"] * 2
    assert len(tried) == 2
    monkeypatch.setattr(library_module, "_AGAIN_S", 0.0)
    monkeypatch.setattr(library_module, "_TIMES", 0)
    library._failed.clear()
    for _ in range(3):
        library.follow(key)
    assert len(tried) == 8  # control
    library.close()


def test_links_out_of_the_given_paths_are_no_rings_of_the_fleet(tmp_path, shelf):
    fill(tmp_path / "runs/a", 1).close()
    fill(tmp_path / "runs/b", 1).close()
    fill(tmp_path / "elsewhere/c", 1).close()
    (tmp_path / "runs/c").symlink_to(tmp_path / "elsewhere/c")
    library = Library([tmp_path / "runs"])
    assert [line["name"] for line in library.follow(fleet_of(library))["shards"]] == ["a", "b"]
    library.close()


def test_policies_and_pace(tmp_path, shelf):
    for name, steps in (("a", (10, 30)), ("b", (20,)), ("c", (None,))):
        with ReplayBuffer(1000, path=tmp_path / name) as buffer:
            for step in steps:
                data = {} if step is None else {"policy_step": step}
                buffer.write_episode({"x": np.zeros(100), "_episode_data": data})
    key = fleet_of(shelf)
    state = shelf.follow(key)
    assert [line["policy_step"] for line in state["shards"]] == [30, 20, None]
    assert (state["policy_step"], state["staleness"], state["pace"]) == (30, 10, None)
    rows_of(shelf, key)
    assert shelf.shown(key).table.spread()["policy step"]["most"] == 30
    with Pace(tmp_path, samples_per_insert=4, min_steps=200, slack=1) as pace:
        pace.draw(300)
        told = shelf.follow(key)["pace"]
        assert told == {
            "samples_per_insert": 4,
            "min_steps": 200,
            "inserted": 400,
            "drawn": 300,
            "ratio": 1.5,
            "ahead": 500.0,
            "slack": 800.0,
            "learner": True,
        }
    assert not shelf.follow(key)["pace"]["learner"]
    numbers = tmp_path / "pace/pace.json"
    body, _ = decode_signed(numbers.read_bytes())
    for hostile in (
        {"samples_per_insert": 1e300, "min_steps": 9, "slack": 1e300},
        {"samples_per_insert": 1, "min_steps": 10**400, "slack": 1},
    ):
        numbers.write_bytes(encode_signed({**body, "numbers": hostile}))
        assert "too large" in shelf.follow(key)["pace"]["problem"]
    numbers.write_text("[")
    assert "pace.json: is not what was written" in shelf.follow(key)["pace"]["problem"]


def most_at_once(paths, turn):
    """Return how many of several indices read at once."""
    requests, now, most = RequestCounter(), [], []
    if turn is not None:
        requests.turn = turn

    class Slow(RingSource):
        def data(self, name):
            now.append(name)
            most.append(len(now))
            time.sleep(0.002)
            now.pop()
            return super().data(name)

    indices = [EpisodeIndex(Slow(str(path)), requests) for path in paths]
    for index in indices:
        index.start()
    until(lambda: sum(index.done for index in indices), lambda done: done == 30)
    for index in indices:
        index.close()
        index.source.close()
    return max(most)


def test_indices_take_turns(tmp_path):
    for name in "abc":
        fill(tmp_path / name, 10).close()
    paths = [tmp_path / name for name in "abc"]
    assert most_at_once(paths, None) == 1
    assert most_at_once(paths, threading.Semaphore(3)) > 1  # control


def test_an_index_that_waits_for_its_turn_can_be_closed(tmp_path):
    with fill(tmp_path / "a", 2) as buffer:
        requests = RequestCounter()
        index = EpisodeIndex(RingSource(buffer), requests)
        with requests.turn:
            index.start()
            (thread,) = [t for t in threading.enumerate() if t.name == "ringmap-view-index"]
            index.close()
            assert not thread.is_alive()
        assert index.done == 0  # it never had a turn


def test_a_search_opens_no_ring(tmp_path, monkeypatch):
    with fill(tmp_path / "a", 2):

        def refuse(*_):
            raise AssertionError("a reader")

        monkeypatch.setattr(Reader, "__init__", refuse)
        library = Library([tmp_path])
        assert [place.kind for place in library.places()] == ["episodes"]
        with pytest.raises(AssertionError, match="a reader"):  # control
            library.open(library.places()[0].key)


def test_the_server_answers_for_a_fleet(tmp_path, serve):
    for name in "ab":
        fill(tmp_path / name, 3).close()
    client = serve()
    places = client.json("places")["places"]
    (card,) = [place for place in places if place["kind"] == "fleet"]
    assert (card["episodes"], card["thumbnail"], card["columns"][0]) == (6, True, "pixels")
    key = card["key"]
    assert client.api("thumb", p=key)[:4] == b"\x89PNG"
    until(lambda: client.json("episodes", p=key), lambda t: t["indexed"] == 6)
    found = client.json("episodes", p=key, where="ring = 'b'", sort="return", desc=1)["rows"]
    assert [(row["ring"], row["episode"], row["data"]["seed"]) for row in found] == [
        ("b", 2, 102),
        ("b", 1, 101),
        ("b", 0, 100),
    ]
    one = client.json("episode", p=found[0]["p"], e=found[0]["id"])
    assert (one["episode"], one["data"]["seed"]) == (2, 102)
    about = client.json("place", p=key)
    assert (about["can_mark"], about["max_steps"], len(about["columns"])) == (True, 2000, 6)
    assert client.json("place", p=found[0]["p"])["fleet"] == {"key": key, "name": card["name"]}
    assert sum(client.json("spread", p=key)["length"]["counts"]) == 6
    for name in ("episode", "columns", "frames", "text", "download"):
        said = client.json(name, p=key, e=0, c="reward", status=400, **{"as": "hdf5"})["error"]
        assert "is a fleet; an episode is in one of its rings" in said, name


def test_a_fleet_of_transitions_against_the_buffer_that_reads_it(tmp_path, shelf):
    a, b = (fill_transitions(tmp_path / n, c, policy_step=p) for n, c, p in (("a", 160, 30), ("b", 40, 10)))
    key = fleet_of(shelf)

    def compared():
        state = shelf.follow(key)
        with ShardedReplayBuffer(tmp_path) as read:
            shards = read.shards
        own = [
            (line["name"], line["steps"], line["written"], line["writer"]["alive"], line["problem"])
            for line in state["shards"]
        ]
        assert own == [(s.name, s.steps, s.written, s.writer.alive, None) for s in shards]
        assert state["steps"] == sum(s.steps for s in shards)
        assert state["written"] == sum(s.written for s in shards)
        return state

    state = compared()
    assert (state["episodes"], state["steps"], state["max_steps"], state["written"]) == (None, 140, 200, 200)
    assert (state["policy_step"], state["staleness"], state["writers"]) == (30, 20, 2)
    assert [line["episodes"] for line in state["shards"]] == [None, None]
    add_transitions(b, 40, 20, policy_step=40)
    assert (compared()["staleness"], shelf.follow(key)["policy_step"]) == (10, 40)
    c = fill_transitions(tmp_path / "c", 5)
    assert [line["name"] for line in compared()["shards"]] == ["a", "b", "c"]
    with Pace(tmp_path, samples_per_insert=4, min_steps=100, slack=1) as pace:
        pace.draw(300)
        told = shelf.follow(key)["pace"]
        assert (told["inserted"], told["drawn"]) == (160 + 60 + 5, 300)
    for buffer in (a, b, c):
        buffer.close()
    assert compared()["writers"] == 0
    assert rows_of(shelf, key) == []
    columns = {column["name"]: column for column in shelf.describe(key)["columns"]}
    assert columns["rewards"]["range"] == [0.0, 159.0]  # of the newest steps of all rings
    assert columns["observations"]["kind"] == "picture"
    assert shelf.shown(key).thumbnail()[:4] == b"\x89PNG"
    (tmp_path / "a/manifest.json").write_text("{")
    problems = {line["name"]: line["problem"] for line in shelf.follow(key)["shards"]}
    assert "manifest" in problems["a"] and problems["b"] is None
    assert shelf.follow(key)["episodes"] is None


def test_a_ring_of_transitions_is_followed(tmp_path, serve):
    with contextlib.closing(fill_transitions(tmp_path / "ring", 30)) as buffer:
        client = serve()
        ((name, key),) = client.keys().items()
        about = client.json("place", p=key)
        assert (name, about["episodes"], about["steps"], about["max_steps"]) == ("ring", None, 30, 100)
        assert "ringmap.open(" in about["code"] and not about["can_mark"]
        assert {c["name"]: c for c in about["columns"]}["rewards"]["range"] == [0.0, 29.0]
        before = client.api("thumb", p=key)
        add_transitions(buffer, 30, 130)
        about = client.json("place", p=key)
        assert (about["steps"], about["tail"], about["head"]) == (len(buffer), 60, 160)
        assert {c["name"]: c for c in about["columns"]}["rewards"]["range"] == [60.0, 159.0]
        assert client.api("thumb", p=key) != before
        assert client.json("episodes", p=key)["total"] == 0
        for name in ("episode", "columns", "download"):
            said = client.json(name, p=key, e=0, c="rewards", status=410, **{"as": "hdf5"})["error"]
            assert "transitions has no episodes" in said, name


def test_rings_of_transitions_and_of_episodes_are_no_fleet(tmp_path, shelf):
    fill(tmp_path / "a", 1).close()
    fill_transitions(tmp_path / "b").close()
    assert [place.kind for place in shelf.places()] == ["episodes", "transitions"]
    fill_transitions(tmp_path / "c").close()
    kinds = {place.name.rpartition("/")[2]: place.kind for place in shelf.places()}
    assert kinds == {"a": "episodes", "b": "transitions", "c": "transitions"}


def test_the_python_lines_open_what_is_shown(tmp_path, shelf):
    for name in "ab":
        fill(tmp_path / f"episodes/{name}", 3).close()
        fill_transitions(tmp_path / f"steps/{name}", 40).close()
    ReplayBuffer.open(tmp_path / "episodes/a").dump(tmp_path / "set.h5", progress=False)
    with DistillationBuffer(20, path=tmp_path / "students") as students:
        students.add(np.zeros((4, 2)), np.arange(4))
    students.close()
    ran = []
    for place in shelf.places():
        made = {}
        exec(shelf.describe(place.key)["code"], made)
        ran.append(place.kind)
        for name in ("buf", "dataset"):
            if name in made:
                made[name].close()
    steps = ["fleet", "transitions", "transitions"]
    assert ran == ["fleet", "episodes", "episodes", "dataset", *steps, "distillation"]


def test_what_is_a_fleet_is_what_opens_as_one(tmp_path, shelf):
    def ring(name, columns, **options):
        with ReplayBuffer(40, path=tmp_path / name, **options) as buf:
            buf.write_episode({column: np.zeros((5, 3), np.float32) for column in columns})
        buf.close()

    mutable = {"obs": ringmap.Column((3,), np.float32, mutable=True)}
    ring("order/a", ["obs", "action"])
    ring("order/b", ["action", "obs"])
    ring("mutable/a", ["obs"])
    ring("mutable/b", ["obs"], schema=mutable)
    ReplayBuffer(40, path=tmp_path / "unborn/a").close()
    fill_transitions(tmp_path / "unborn/b").close()
    assert {place.path for place in shelf.places() if place.kind == "fleet"} == {
        str(tmp_path / "order"),
        str(tmp_path / "mutable"),
    }
    for name, is_fleet in {"order": True, "mutable": True, "unborn": False}.items():
        with contextlib.nullcontext() if is_fleet else pytest.raises(InputError, match="no columns yet"):
            ringmap.open(tmp_path / name).close()
