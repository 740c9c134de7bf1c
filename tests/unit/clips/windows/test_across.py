"""Sequences that run on into the next episode of their lane, against a plain model."""

import logging
import pickle
import random

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.clips import sequences
from ringmap.clips.bounds import Bounds
from ringmap.data import ConcatDataset, MergeDataset, Sequences, load_dataset
from ringmap.datasets.goal import GoalDataset
from ringmap.errors import InputError, NoClipsError
from ringmap.samplers import EpisodeSampler, PrioritizedSampler
from ringmap.storage.read import recovery
from ringmap.storage.records import table
from ringmap.storage.ring.links import WholeEpisodes
from tests.tiers import few


def step_of(lane, episode, step):
    return {"lane": lane, "episode": episode, "step": step}


class Script:
    """Random episodes, in parts on some lanes and whole, and what is stored of them."""

    def __init__(self, buf, seed, whole_only=False):
        self.buf, self.rng = buf, random.Random(seed)
        self.whole_only = whole_only
        self.open = {}
        self.episodes = []  # [lane, number, rows of (position, step), ended, terminated]
        self.number = 0

    def turn(self):
        rng = self.rng
        lane = rng.randrange(-1, 3)
        if lane < 0 or self.whole_only:
            length, ends = rng.randint(1, 7), rng.random() < 0.5
            start, number = self.head, self.count()
            terminated = [False] * (length - 1) + [ends]
            rows = {
                "lane": [-1] * length,
                "episode": [number] * length,
                "step": [*range(length)],
                "terminated": terminated,
            }
            self.buf.write_episode({n: [np.array(v) for v in values] for n, values in rows.items()})
            rows = [(start + t, t) for t in range(length)]
            self.episodes.append([-1, number, rows, True, ends])
            return
        if lane not in self.open:
            self.open[lane] = [
                self.buf.begin_episode(commit_every=3, lane=lane),
                self.count(),
                0,
                None,
                0,
            ]
        episode = self.open[lane]
        stream, number, step, mine, first = episode
        ends, flag = rng.random() < 0.3, rng.random() < 0.5
        for _ in range(rng.randint(1, 5)):
            head = self.head
            row = {"lane": lane, "episode": number, "step": step, "terminated": False}
            stream.append({n: np.array(v) for n, v in row.items()})
            step += 1
            mine = self.note(mine, lane, number, head, first, step)
            first = step if self.head > head else first
        if ends:
            head = self.head
            stream.finish(flag)
            mine = self.note(mine, lane, number, head, first, step)
            if mine is not None:
                mine[3] = True
            del self.open[lane]
            return
        episode[2:] = step, mine, first

    def note(self, mine, lane, number, head, first, step):
        count = self.head - head
        if count:
            if mine is None:
                mine = [lane, number, [], False, False]
                self.episodes.append(mine)
            mine[2] += [(head + t, first + t) for t in range(count)]
        return mine

    def count(self):
        self.number += 1
        return self.number

    @property
    def head(self):
        return int(self.buf.engine.source.head)

    def sequences(self, length):
        """Return anchor -> (episode, step, is_first, is_last, step_id) of each step."""
        tail = int(self.buf.engine.source.tail)
        runs = {}
        for lane, number, rows, ended, _ in sorted(self.episodes, key=lambda e: e[2][0][0] if e[2] else 0):
            live = [(p, t) for p, t in rows if p >= tail]
            if not live:
                continue
            run = runs.setdefault(lane, [[]])[-1]
            last = rows[-1][1]
            run += [(p, number, t, t == 0 or (bool(run) and p == live[0][0]), ended and t == last) for p, t in live]
            if not ended:
                runs[lane].append([])
        found = {}
        for run in (run for lane in runs.values() for run in lane):
            for at in range(len(run) - length + 1):
                found[run[at][0]] = [(*entry[1:], entry[0]) for entry in run[at : at + length]]
        return found


def proves(batch, i, expected):
    names = "episode", "step", "is_first", "is_last", "step_id"
    flags = [batch[name][i].tolist() for name in names]
    assert list(zip(*flags, strict=True)) == expected, (flags, expected)
    ends = batch["is_last"][i] & batch["terminated"][i]
    assert batch["is_terminal"][i].tolist() == ends.tolist()


def look(buf, script, length, rng):
    expected = script.sequences(length)
    window = Sequences(length, across=True)
    if not expected:
        with pytest.raises(NoClipsError):
            buf.sample(4, window=window)
        if buf.num_episodes:
            assert len(buf.view(window=window)) == 0
        return 0
    batch = buf.sample(24, window=window)
    for i, anchor in enumerate(batch.ids.tolist()):
        proves(batch, i, expected[anchor])
    view = buf.view(window=window)
    assert len(view) == len(expected)
    positions = view.positions(np.arange(len(view)))
    assert sorted(positions.tolist()) == sorted(expected)
    ids = [rng.randrange(len(view)) for _ in range(12)]
    found = view[ids]
    for i, number in enumerate(ids):
        proves(found, i, expected[int(positions[number])])
    episodes = view.clip_indices
    episode, step = episodes[ids[0]]
    assert view.positions(np.array([ids[0]]))[0] == positions[ids[0]]
    assert view.load_episode(episode)["step"][step] == expected[int(positions[ids[0]])][0][1]
    assert buf.engine.reader.index.check() == []
    return sum(any(e[2] for e in entry[1:]) for entry in expected.values())


@pytest.mark.parametrize("whole_only", [False, True], ids=["lanes", "no lanes"])
@pytest.mark.parametrize("on_disk", few([True, False]), ids=["disk", "RAM"])
def test_against_a_model(tmp_path, whole_only, on_disk):
    crossed = 0
    for seed in range(6):
        path = tmp_path / f"{seed}" if on_disk else None
        buf = ReplayBuffer(40, path=path, spare_rows=12, seed=seed)
        script, rng = Script(buf, seed, whole_only), random.Random(seed)
        for turn in range(60):
            script.turn()
            if turn % 4 == 0:
                crossed += look(buf, script, rng.choice([1, 2, 5, 9]), rng)
        if on_disk:
            with ReplayBuffer.open(path) as reader:
                look(reader, script, 6, rng)
            buf.close()
        else:
            look(pickle.loads(pickle.dumps(buf)), script, 6, rng)
    assert crossed > 300


def test_controls(monkeypatch):
    """Runs that go on after an open episode, or mix lanes, or flags of the run alone, are found."""
    real = WholeEpisodes.by_lane

    def without(name, value):
        def by_lane(self):
            kept = getattr(self, name)
            setattr(self, name, value(kept))
            try:
                return real(self)
            finally:
                setattr(self, name, kept)

        return by_lane

    plants = [
        (WholeEpisodes, "by_lane", without("is_open", np.zeros_like)),
        (WholeEpisodes, "by_lane", without("lanes", np.zeros_like)),
        (WholeEpisodes, "are_begins", lambda self, places: np.isin(places, self.places)),
        (Bounds, "positions", lambda self, places: places),
        (sequences.Sequences, "across", property(lambda self: False, lambda self, value: None)),
    ]
    for where, name, plant in plants:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, plant, raising=False)
            with pytest.raises((AssertionError, KeyError)):
                for seed in range(6):
                    buf = ReplayBuffer(40, spare_rows=12, seed=seed)
                    script = Script(buf, seed)
                    for turn in range(60):
                        script.turn()
                        if turn % 4 == 0:
                            look(buf, script, 5, random.Random(seed))


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


@pytest.mark.parametrize("kind", [EpisodeSampler, PrioritizedSampler])
def test_samplers(kind):
    sampler = kind(rng=0) if kind is EpisodeSampler else kind()
    buf = ReplayBuffer(40, spare_rows=12, sampler=sampler)
    script = Script(buf, 3)
    for turn in range(60):
        script.turn()
        expected = script.sequences(5)
        if expected and turn % 5 == 0:
            batch = buf.sample(16, window=Sequences(5, across=True))
            for i, anchor in enumerate(batch.ids.tolist()):
                proves(batch, i, expected[anchor])
            if kind is PrioritizedSampler:
                sampler.update_priorities(batch.ids, np.random.default_rng(turn).random(16) + 0.1)


def test_a_view_keeps_its_sequences_while_its_lanes_go_on(tmp_path):
    for on_disk in (False, True):
        buf = ReplayBuffer(60, path=tmp_path / "buf" if on_disk else None, spare_rows=12, seed=0)
        script = Script(buf, 5)
        for _ in range(25):
            script.turn()
        view = buf.view(window=Sequences(4, across=True))
        before = script.sequences(4)
        if on_disk:
            view = pickle.loads(pickle.dumps(view))  # as in the worker of a DataLoader
        positions, redrawn = view.positions(np.arange(len(view))).tolist(), 0
        for _ in range(12):
            for _ in range(3):
                script.turn()
            if on_disk:
                buf.flush()
                view.engine.refresh()
            now = script.sequences(4)
            left = {before[p][0][:2]: before[p] for p in positions if p in now}
            if not left:
                with pytest.raises(NoClipsError, match="evicted since"):
                    view[list(range(len(view)))]
                break
            batch = view[list(range(len(view)))]
            for i, position in enumerate(positions):
                if position in now:
                    proves(batch, i, before[position])
                else:
                    redrawn += 1
                    number, step = int(batch["episode"][i][0]), int(batch["step"][i][0])
                    proves(batch, i, left[number, step])
        else:
            pytest.fail("it was never empty")
        assert redrawn > 20


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


def mixed(path):
    """Return the writer of a buffer with whole episodes between the parts of two lanes."""
    buf = ReplayBuffer(100, path=path, seed=0)
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
