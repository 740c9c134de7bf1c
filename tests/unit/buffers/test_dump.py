"""dump: a regular dataset comes out, episode by episode, and what was there stays until it is whole."""

import sys
import tracemalloc

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.buffers.episodes import StoredEpisodes
from ringmap.data import FORMATS, Format, load_dataset, register_format
from ringmap.errors import InputError
from ringmap.formats.base import EPISODE_DATA_KEY
from tests.unit.buffers.steps import COLUMNS, columns, episode, same, snapshot


def fill(buffer, data=False, **options):
    buf = buffer(**{"max_steps": 20, **options})
    for number, length in enumerate([9, 4, 7, 6]):
        buf.write_episode(episode(number, length, {"number": number} if data else None))
    return buf


class Recorder(Format):
    """A format that keeps what it is given; it holds no episode data."""

    name = "recorder"

    def __init__(self):
        self.path = self.options = None
        self.written, self.events = [], []

    def __enter__(self):
        self.events.append("enter")
        return self

    def __exit__(self, kind, *_):
        self.events.append(f"exit {kind.__name__ if kind else None}")

    def write_episode(self, given):
        self.events.append("write")
        self.written.append(given)

    last = None

    @classmethod
    def detect(cls, path):
        return False

    @classmethod
    def open_writer(cls, path, **options):
        made = Recorder.last = cls()
        made.path, made.options = path, options
        return made


@pytest.fixture
def recorder():
    register_format(Recorder)
    yield Recorder
    del FORMATS["recorder"]


# -- any format --------------------------------------------------------------------------------


def test_episodes_stream_through_the_registered_writer(buffer, recorder, tmp_path):
    buf = fill(buffer)
    assert buf.dump(tmp_path / "out", "recorder", mode="append", quality=7) is None
    made = recorder.last
    assert (made.path, made.options) == (tmp_path / "out", {"mode": "append", "quality": 7})
    assert made.events == ["enter", "write", "write", "write", "exit None"]
    for got, (number, length) in zip(made.written, [(1, 4), (2, 7), (3, 6)], strict=True):
        assert all(type(values) is np.ndarray for values in got.values())
        same(got, columns(number, 0, length))


def test_episode_data_that_the_format_can_t_hold_are_refused_or_dropped(buffer, recorder, tmp_path):
    buf = fill(buffer, data=True)
    with pytest.raises(InputError, match=r"'recorder' can't hold episode data 'number'.*drop="):
        buf.dump(tmp_path / "out", "recorder")
    buf.dump(tmp_path / "out", "recorder", drop=["number"])
    assert len(recorder.last.written) == 3
    assert all(EPISODE_DATA_KEY not in got for got in recorder.last.written)


def test_one_episode_at_a_time_is_in_memory(buffer, recorder, tmp_path):
    buf = buffer(max_steps=400)
    for number in range(40):
        buf.write_episode({"x": np.full((10, 1 << 14), number, np.uint8)})
    Recorder.write_episode, keep = lambda self, given: None, Recorder.write_episode
    buf.dump(tmp_path / "warm", "recorder")
    try:
        tracemalloc.start()
        buf.dump(tmp_path / "out", "recorder")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        Recorder.write_episode = keep
    assert peak < 4 * 10 * (1 << 14), "of 40 episodes, not even four"


def test_an_exception_reaches_the_writer_and_the_caller(buffer, recorder, tmp_path, monkeypatch):
    buf = fill(buffer)

    def refuse(self, given):
        raise OSError(28, "full")

    monkeypatch.setattr(Recorder, "write_episode", refuse)
    before = snapshot(buf)
    with pytest.raises(OSError, match="full"):
        buf.dump(tmp_path / "out", "recorder")
    assert recorder.last.events == ["enter", "exit OSError"]
    assert snapshot(buf) == before


def test_an_unknown_format_or_mode(buffer, tmp_path):
    buf = fill(buffer)
    with pytest.raises(InputError, match="unknown format 'vhs'"):
        buf.dump(tmp_path / "out", "vhs")
    with pytest.raises(InputError, match="mode must be one of"):
        buf.dump(tmp_path / "out.h5", "hdf5", mode="w")
    assert list(tmp_path.glob("out*")) == []


def test_a_progress_bar_on_long_work_only(buffer, recorder, tmp_path, monkeypatch, capsys):
    buf = fill(buffer)
    buf.dump(tmp_path / "out", "recorder")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("ringmap.formats.catalog.convert._BAR_AFTER_S", 0)
    buf.dump(tmp_path / "out", "recorder")
    assert "dump to recorder" in capsys.readouterr().err


# -- HDF5 --------------------------------------------------------------------------------------


def check(path, expected, **options):
    dataset = load_dataset(path, **options)
    assert dataset.lengths.tolist() == [length for _, length in expected]
    assert list(dataset.column_names) == COLUMNS
    for i, (number, length) in enumerate(expected):
        loaded = dataset.load_episode(i)
        same({name: np.asarray(loaded[name]) for name in COLUMNS}, columns(number, 0, length))
    return dataset


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_was_there_stays_until_the_new_one_is_whole(buffer, tmp_path, monkeypatch, error):
    buf, path = fill(buffer), tmp_path / "out.h5"
    buf.dump(path, "hdf5")
    buf.write_episode(episode(9, 20))
    walk = buf.engine.episodes.each

    def stopped():
        yield from walk()
        check(path, [(1, 4), (2, 7), (3, 6)])
        raise error

    monkeypatch.setattr(StoredEpisodes, "each", lambda self, *limits: stopped())
    with pytest.raises(error):
        buf.dump(path, "hdf5")
    check(path, [(1, 4), (2, 7), (3, 6)])
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("out")] == ["out.h5"], "and no traces"
    monkeypatch.undo()
    buf.dump(path, "hdf5")
    check(path, [(9, 20)])


@pytest.mark.parametrize("schema", [None, {"x": ((2,), "f4")}])
def test_an_empty_buffer_is_a_valid_empty_dataset(buffer, tmp_path, schema):
    buf = buffer(max_steps=20, schema=schema)
    buf.dump(tmp_path / "out.h5", "hdf5")
    dataset = load_dataset(tmp_path / "out.h5")
    assert (len(dataset), len(dataset.lengths)) == (0, 0)
    for number in range(2):
        buf.write_episode({"x": np.full((3, 2), number, "f4")})
    buf.clear()
    buf.dump(tmp_path / "cleared.h5", "hdf5")
    assert len(load_dataset(tmp_path / "cleared.h5")) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_walk_over_a_large_column_leaves_no_map_in_memory(tmp_path):
    """Pages of a map that were touched count as memory of the process: here they would be 96 MiB."""

    def mapped():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssFile")) << 10

    steps = 96
    with ReplayBuffer(steps, path=tmp_path / "buffer") as buf:
        for number in range(0, steps, 8):
            buf.write_episode({"x": np.full((8, 1 << 20), number, np.uint8)})
        before = mapped()
        seen = [int(episode["x"][0][0]) for episode in buf.episodes()]
        seen += [int(buf.load_episode(number)["x"][-1, -1]) for number in range(len(buf.lengths))]
        assert seen == 2 * list(range(0, steps, 8))
        assert mapped() - before < 16 << 20
