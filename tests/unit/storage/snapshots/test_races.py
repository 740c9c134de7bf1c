"""A snapshot under a flat-out writer is one of the states that were committed, byte for byte.

Beside the races, which depend on the scheduler, there are cases in which the writer strikes exactly while
rows are copied; the controls are of that kind. The campaign makes 100 snapshots of each race.
"""

import shutil

import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import CorruptError, LappedError
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.disk.calls import thread
from ringmap.storage.inspect.snapshot import Copy
from tests.faults.concurrency.conftest import fast  # noqa: F401 - a fixture
from tests.tiers import few
from tests.unit.storage.snapshots.race import (
    Ring,
    a_writer,
    a_writing_thread,
    full_buffer,
    goes_on,
    logged,
    proven,
    write_some,
)

RINGS = {
    "one record": Ring(max_steps=256, spare=16),
    "retired first": Ring(max_steps=256, spare=1),
    "small rows": Ring(max_steps=4096, spare=256, longest=64, row_nbytes=256),
}


@pytest.fixture(params=RINGS.values(), ids=RINGS.keys())
def ring(request):
    return request.param


def race_with_a_process(folder, ring, count, storage="memmap"):
    """Make snapshots from a reader; return the number of the state of each, and how often the writer lapped it."""
    laps = 0
    with a_writer(str(folder / "buf"), ring, storage) as log:
        reader = ReplayBuffer.open(folder / "buf")
        before = reader.engine.source.seq
        for i in range(count):
            while True:
                try:
                    reader.snapshot(folder / f"copy{i}")
                    break
                except LappedError:
                    laps += 1
                    assert laps < 10 * count
        assert reader.engine.source.seq == before, "the reader's own view stays as it is"
        reader.close()
    states = [proven(folder / f"copy{i}", ring, log) for i in range(count)]
    goes_on(folder / "copy0", ring)
    return states, laps


def race_with_a_thread(folder, ring, count, home, storage="memmap"):
    with logged() as log:
        buffer, number = full_buffer(str(folder / "buf") if home == "disk" else None, ring, storage)
        with a_writing_thread(buffer, ring, number):
            for i in range(count):
                buffer.snapshot(folder / f"copy{i}")
        states = [proven(folder / f"copy{i}", ring, log) for i in range(count)]
        assert buffer.check() == []
        buffer.close()
        goes_on(folder / "copy0", ring)
    return states


def test_from_a_reader(fast, ring):  # noqa: F811
    states, laps = race_with_a_process(fast, ring, 4)
    print(f"\n{ring}: states {states}, lapped {laps} times")
    assert states == sorted(states)
    assert len(set(states)) > 1, "nothing was written meanwhile"


@pytest.mark.parametrize("home", few(["disk", "ram"]))
def test_from_the_writer_s_own_handle(fast, ring, home):  # noqa: F811
    states = race_with_a_thread(fast, ring, 4, home)
    print(f"\n{ring}, {home}: states {states}")
    assert states == sorted(states)


COMPRESSED = Ring(max_steps=512, spare=32, row_nbytes=4096)
MIXED = {"row": ringmap.Zarr(codecs="lz4", chunk_steps=24), "step": "zarr"}


def test_compressed_columns(fast):  # noqa: F811
    """Chunks bring older rows along, whose checksums then decide."""
    states, laps = race_with_a_process(fast, COMPRESSED, 3, MIXED)
    print(f"\n{COMPRESSED}: states {states}, lapped {laps} times")
    assert states == sorted(states)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["disk", "ram"])
def test_compressed_columns_from_the_writer_s_own_handle(fast, home):  # noqa: F811
    race_with_a_thread(fast, COMPRESSED, 3, home, MIXED)


@pytest.mark.campaign
def test_a_hundred_of_compressed_columns(fast):  # noqa: F811
    for part in range(10):
        folder = fast / str(part)
        folder.mkdir()
        states, laps = race_with_a_process(folder, COMPRESSED, 10, MIXED)
        print(f"\n{COMPRESSED}: 10 more, {len(set(states))} states, lapped {laps} times")
        shutil.rmtree(folder)


@pytest.mark.campaign
def test_a_hundred_from_a_reader(fast, ring):  # noqa: F811
    seen = set()
    for part in range(10):
        folder = fast / str(part)
        folder.mkdir()
        states, laps = race_with_a_process(folder, ring, 10)
        seen |= set(states)
        print(f"\n{ring}: 10 more, lapped {laps} times")
        shutil.rmtree(folder)
    print(f"\n{ring}: 100 snapshots, {len(seen)} different states")


@pytest.mark.campaign
@pytest.mark.parametrize("home", ["disk", "ram"])
def test_a_hundred_from_the_writer_s_own_handle(fast, ring, home):  # noqa: F811
    for part in range(10):
        folder = fast / str(part)
        folder.mkdir()
        race_with_a_thread(folder, ring, 10, home)
        shutil.rmtree(folder)


# -- the writer strikes while rows are copied -------------------------------------------------------


RING = Ring(max_steps=64, spare=8, longest=8, row_nbytes=512)


class Striking:
    """Has the writer write `episodes` more, once the first column of a round was copied, `times` times."""

    def __init__(self, monkeypatch, writer, number, episodes, times):
        self.left, self.struck = times, 0
        copy = MemmapColumn.copy_from

        def copy_and_strike(column, source, slot, count):
            copied = copy(column, source, slot, count)
            busy = thread.inside  # in its last round nobody can write
            if column.spec.name == "row" and self.left and not busy:
                self.left -= 1
                first = number + self.struck * episodes
                self.struck += 1
                write_some(writer, RING, range(first, first + episodes))
            return copied

        monkeypatch.setattr(MemmapColumn, "copy_from", copy_and_strike)


@pytest.fixture(params=["writer", "reader"])
def handles(request, fast):  # noqa: F811
    """Yield a writer, the next number, the handle that makes the snapshot, and what was committed."""
    with logged() as log:
        writer, number = full_buffer(str(fast / "buf"), RING)
        who = writer if request.param == "writer" else ReplayBuffer.open(fast / "buf")
        yield writer, number, who, log
        who.close()
        writer.close()


@pytest.mark.parametrize("episodes", [1, 2, 5, 60])
@pytest.mark.parametrize("times", [1, 3])
def test_what_was_overwritten_meanwhile_is_not_taken(
    fast,  # noqa: F811
    monkeypatch,
    handles,
    episodes,
    times,
):
    writer, number, who, log = handles
    before = writer.engine.source.seq
    striking = Striking(monkeypatch, writer, number, episodes, times)
    who.snapshot(fast / "copy")
    assert proven(fast / "copy", RING, log) >= before
    assert striking.struck >= 1
    goes_on(fast / "copy", RING)


def test_retired_rows_count_while_their_checksum_holds(fast, monkeypatch, handles):  # noqa: F811
    writer, number, who, log = handles
    before = writer.engine.source.seq
    Striking(monkeypatch, writer, number, 1, 1)  # its rows go where nothing live stood
    who.snapshot(fast / "copy")
    assert proven(fast / "copy", RING, log) == before, "one round was enough"


def test_a_reader_lapped_time_after_time_says_so(fast, monkeypatch):  # noqa: F811
    writer, number = full_buffer(str(fast / "buf"), RING)
    reader = ReplayBuffer.open(fast / "buf")
    striking = Striking(monkeypatch, writer, number, 60, 1000)
    with pytest.raises(LappedError, match="raise max_steps"):
        reader.snapshot(fast / "copy")
    assert striking.struck in range(10, 21), "ten rounds, of one or two pieces each"
    striking.left = 0
    assert sorted(p.name for p in fast.iterdir()) == ["buf"]
    reader.snapshot(fast / "copy")
    assert ringmap.check(fast / "copy") == []
    reader.close()
    writer.close()


def test_the_writer_s_own_handle_always_ends(fast, monkeypatch):  # noqa: F811
    with logged() as log:
        writer, number = full_buffer(str(fast / "buf"), RING)
        striking = Striking(monkeypatch, writer, number, 60, 1000)
        writer.snapshot(fast / "copy")
        assert proven(fast / "copy", RING, log) == writer.engine.source.seq
        assert striking.struck < 10
        writer.close()


def strike_and_see(fast, monkeypatch, handles):  # noqa: F811
    writer, number, who, log = handles
    Striking(monkeypatch, writer, number, 60, 1)
    who.snapshot(fast / "copy")
    try:
        proven(fast / "copy", RING, log)
    except (AssertionError, CorruptError):
        return "caught"
    return "passed"


def test_sound(fast, monkeypatch, handles):  # noqa: F811
    assert strike_and_see(fast, monkeypatch, handles) == "passed"


def test_control_without_the_second_look(fast, monkeypatch, handles):  # noqa: F811
    monkeypatch.setattr(Copy, "is_whole", lambda *_: True)
    assert strike_and_see(fast, monkeypatch, handles) == "caught"


def test_control_without_the_checksum(fast, monkeypatch, handles):  # noqa: F811
    monkeypatch.setattr("ringmap.storage.inspect.snapshot.bad_columns", lambda *_: [])
    assert strike_and_see(fast, monkeypatch, handles) == "caught"


def test_another_writer_may_take_over_meanwhile(fast, monkeypatch):  # noqa: F811
    """A recovery may go back, and use positions again: then all is copied anew."""
    with logged() as log:
        writer, number = full_buffer(str(fast / "buf"), RING)
        reader = ReplayBuffer.open(fast / "buf")
        opened, begun = [writer], []
        copy, begin = MemmapColumn.copy_from, Copy._make_columns

        def copy_and_reopen(column, source, slot, count):
            copied = copy(column, source, slot, count)
            if len(opened) == 1 and column.spec.name == "row":
                opened[0].close()
                opened.append(ReplayBuffer.open(fast / "buf", mode="r+"))
                write_some(opened[1], RING, range(number, number + 2))
            return copied

        monkeypatch.setattr(MemmapColumn, "copy_from", copy_and_reopen)
        monkeypatch.setattr(Copy, "_make_columns", lambda self, *now: (begun.append(now[-1]), begin(self, *now))[1])
        reader.snapshot(fast / "copy")
        assert proven(fast / "copy", RING, log) == opened[1].engine.source.seq
        assert [now.seq for now in begun] == [
            opened[1].engine.source.seq - 2,
            opened[1].engine.source.seq,
        ]
        reader.close()
        opened[1].close()
