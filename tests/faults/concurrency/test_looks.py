"""Looks at what moves: episodes by position across a restarted writer, and patience while there is progress."""

import threading

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.clips.gather import ClipReader
from ringmap.errors import CorruptError, LappedError
from ringmap.storage.disk.calls import lifted
from ringmap.storage.disk.checksums import SLOT_NBYTES
from ringmap.storage.read import read_live
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import MOST, retry
from ringmap.storage.records.state import StateFile
from tests.disks import FaultyDisk


def write(buf, number, steps=10):
    buf.write_episode({"step": np.arange(steps) + 1000 * number, "_episode_data": {"number": number}})


def numbers(episodes):
    return [int(episode["step"][0]) // 1000 for episode in episodes]


def restarted(path, evicted):
    """Return a full writer that was closed and opened again, of a ring that has evicted so many episodes."""
    writer = ReplayBuffer(100, path=path, sync_every_s=0)
    for number in range(10 + evicted):
        write(writer, number)
    return writer


@pytest.mark.parametrize("seen", [0, 1, 4, 9])
@pytest.mark.parametrize("evicted", [0, 3, 25])
@pytest.mark.parametrize("more", [0, 2])
def test_a_reader_skips_no_live_episode_when_the_writer_was_restarted(tmp_path, seen, evicted, more):
    writer = restarted(tmp_path / "buf", evicted)
    reader = ReplayBuffer.open(tmp_path / "buf")
    episodes = reader.episodes()
    found = numbers(next(episodes) for _ in range(seen))
    writer.close()
    writer = ReplayBuffer.open(tmp_path / "buf", "r+")
    for number in range(more):
        write(writer, 10 + evicted + number)
    reader.refresh()
    found += numbers(episodes)
    live = range(evicted + more, evicted + 10 + (0 if seen else more))  # it begins with the first one asked for
    assert found == sorted({*range(evicted, evicted + seen), *live})
    writer.close()


def test_a_copy_of_a_reader_that_refreshes_meanwhile_is_whole(tmp_path):
    """`dump` and `extend_from` go by `episodes`: here each one that is written restarts the writer."""
    writers = [restarted(tmp_path / "buf", 7)]
    reader = ReplayBuffer.open(tmp_path / "buf")

    def restart(episode):
        writers.pop().close()
        writers.append(ReplayBuffer.open(tmp_path / "buf", "r+"))
        reader.refresh()
        return episode

    copy = ReplayBuffer(200, key_filter=restart)
    copy.extend_from(reader)
    assert numbers(copy.episodes()) == list(range(7, 17))
    writers.pop().close()


def test_what_comes_while_episodes_are_read_waits_for_the_next_time(tmp_path):
    buf = ReplayBuffer(100)
    for number in range(3):
        write(buf, number)
    found = []
    for episode in buf.episodes():
        found.append(int(episode["step"][0]) // 1000)
        write(buf, 3 + len(found))
    assert found == [0, 1, 2]


@pytest.mark.parametrize(
    "read", [lambda reader: reader.load_episode(0)["step"], lambda reader: reader.load_chunk([0], [0], [10])[0]["step"]]
)
def test_an_episode_is_the_one_that_was_asked_for_when_the_writer_was_restarted(tmp_path, monkeypatch, read):
    """A refresh by another thread, as soon as the number is known: numbers begin at 0 then."""
    writer = restarted(tmp_path / "buf", 0)
    reader = ReplayBuffer.open(tmp_path / "buf")
    for number in range(3):
        write(writer, 10 + number)
    reader.refresh()
    writer.close()
    writer = ReplayBuffer.open(tmp_path / "buf", "r+")
    source, number_of = reader.engine.owned, reader.engine.owned.number

    def refreshed(*args):
        found = number_of(*args)
        other = threading.Thread(target=reader.refresh)
        other.start()
        if not source.lock.locked():  # else it waits for us
            other.join()
        threads.append(other)
        return found

    threads = []
    monkeypatch.setattr(source, "number", refreshed)
    assert int(np.asarray(read(reader)).reshape(-1)[0]) == 3000
    for thread in threads:
        thread.join()
    writer.close()


# -- patience --------------------------------------------------------------------------------------


def read(attempt, refresh=lambda: None, retry_s=0, **options):
    retry(attempt, refresh, "here", "do this", retry_s=retry_s, **options)


LAPPED = f"here: the writer overtook this reader {MOST} times in a row, for 0 s; do this"


def test_ten_looks_in_vain_are_too_many():
    lefts = [*[5] * (MOST - 1), *[4] * (MOST - 1), 3, 2, *[1] * (MOST - 1)]
    given, refreshes = iter([*lefts, 0]), []
    read(lambda: next(given), lambda: refreshes.append(1))
    assert len(refreshes) == len(lefts)
    given = iter([*lefts, 1])
    with pytest.raises(LappedError, match=LAPPED):
        read(lambda: next(given))
    assert not list(given)


def test_an_attempt_of_the_caller_counts():
    given = iter([4] * (MOST - 1))
    with pytest.raises(LappedError, match=LAPPED):
        read(lambda: next(given), left=4)
    read(lambda: pytest.fail("there was nothing left"), left=0)


def test_a_reader_without_a_processor_tries_for_seconds_however_often(monkeypatch):
    """Ten looks pass in milliseconds beside a writer that laps a small ring again and again."""
    now, lefts = [0.0], iter([5] * 500)
    monkeypatch.setattr(read_live.time, "monotonic", lambda: now[0])

    def refresh():
        now[0] += 0.01

    with pytest.raises(LappedError, match="50[0-2] times in a row, for 5 s; do this"):
        read(lambda: next(lefts, 5), refresh, retry_s=5)
    lefts = iter([5] * 450)
    read(lambda: next(lefts, 0), refresh, retry_s=5)
    lefts = iter([*[5] * 450, *[4] * 450])  # progress: the seconds begin again
    read(lambda: next(lefts, 0), refresh, retry_s=5)


class Losing:
    """A clip reader whose writer evicts between copy and look, so that `left` clips of a batch are lost each time."""

    def __init__(self, monkeypatch, buf, lefts):
        self.rounds, lefts = 0, iter(lefts)
        gather, tail = ClipReader._gather, type(buf.engine.owned).newest_tail
        self.positions = np.empty(0, np.int64)

        def gathering(reader, positions, *args, **options):
            self.positions, self.rounds = positions, self.rounds + 1
            return gather(reader, positions, *args, **options)

        def moved(source):
            left = next(lefts, 0)
            return int(np.sort(self.positions)[left - 1]) + 1 if left else tail(source)

        monkeypatch.setattr(ClipReader, "_gather", gathering)
        monkeypatch.setattr(type(buf.engine.owned), "newest_tail", moved)


def test_a_batch_that_gets_smaller_each_time_is_read(monkeypatch):
    """Thirty rounds, each with one clip fewer: no reason to give up."""
    buf = ReplayBuffer(100_000, seed=0)
    buf.write_episode({"step": np.arange(100_000)})
    losing = Losing(monkeypatch, buf, range(30, 0, -1))
    batch = buf.sample(32)
    assert losing.rounds > 30
    np.testing.assert_array_equal(batch.ids, batch["step"][:, 0])


def test_a_batch_that_gets_no_smaller_is_given_up(monkeypatch):
    buf = ReplayBuffer(100_000, seed=0)
    buf.write_episode({"step": np.arange(100_000)})
    losing = Losing(monkeypatch, buf, [32] * 1000)
    monkeypatch.setattr(Handle, "retry_s", 0)
    with pytest.raises(LappedError, match="10 times in a row"):
        buf.sample(32)
    assert losing.rounds == MOST


# -- beside a writer that is far ahead -------------------------------------------------------------


@pytest.mark.parametrize("reads", ["map", "pread"])
def test_records_that_were_overwritten_hide_none_that_is_live(tmp_path, reads):
    """The reader was not refreshed since: half of the records that it knows are others now, and so are the ones that a
    search meets first."""
    writer = ReplayBuffer(200, path=tmp_path / "buf", spare_rows=8, sync_every_s=0)
    for number in range(200):
        write(writer, number, 1)
    reader = ReplayBuffer.open(tmp_path / "buf", reads=reads)
    for number in range(200, 372):
        write(writer, number, 1)
    for number in range(172, 200):
        assert numbers([reader.load_episode(number)]) == [number]
        assert reader.get_episode_data(number)["number"] == [number]
    writer.close()


HIGH = [1 << 60]
"""Starts beyond all that is sought."""


def test_a_search_that_meets_a_record_in_mid_write_misses_none(tmp_path, monkeypatch):
    writer = restarted(tmp_path / "buf", 0)
    reader = ReplayBuffer.open(tmp_path / "buf")
    table = type(reader.engine.source.table)
    monkeypatch.setattr(reader.engine.source.table, "_walk", None)
    monkeypatch.setattr(table, "_peek", lambda table, seq: ((HIGH, [], [], [-1 if seq == 5 or seq < 2 else seq]), 0))
    assert [numbers([reader.load_episode(n)]) for n in range(10)] == [[n] for n in range(10)]
    monkeypatch.setattr(table, "search", lambda *_: None)  # a control
    with pytest.raises(CorruptError, match="a live record is damaged"):
        reader.load_episode(0)
    writer.close()


def test_a_look_whose_second_half_is_three_states_later_is_no_old_copy(tmp_path, monkeypatch):
    """While a reader opens, the writer stores three episodes between the halves of one read of state.bin, and is in the
    middle of a fourth."""
    writer = restarted(tmp_path / "buf", 0)
    table, whole, mixed = type(writer.engine.owned.table), StateFile.data, []
    find, struck = table.read, []

    def data(file):
        return mixed.pop() if mixed else whole(file)

    def read(records, seq):
        if not struck:
            struck.append(seq)
            file = writer.engine.owned.files.state_file
            before = whole(file)
            for number in range(10, 13):
                write(writer, number)
            after = whole(file)
            newest = writer.engine.owned.files.state.generation % 2 * SLOT_NBYTES
            torn = after[newest : newest + 40] + before[newest + 40 : newest + SLOT_NBYTES]
            mixed.append(before[:newest] + torn + before[newest + SLOT_NBYTES :])
        return find(records, seq)

    monkeypatch.setattr(StateFile, "data", data)
    monkeypatch.setattr(table, "read", read)
    reader = ReplayBuffer.open(tmp_path / "buf")
    assert struck
    assert not mixed
    reader.refresh()
    assert numbers(reader.episodes()) == list(range(3, 13))
    writer.close()


def test_a_look_waits_for_a_slot_that_is_being_written(tmp_path, monkeypatch):
    """The other slot may be two states behind: it would hide what was evicted."""
    writer, whole, torn = restarted(tmp_path / "buf", 0), StateFile.data, []

    def data(file):
        found = whole(file)
        if len(torn) < 3:
            at = writer.engine.owned.files.state.generation % 2 * SLOT_NBYTES
            found = found[: at + 40] + b"?" * 8 + found[at + 48 :]
            torn.append(found)
        return found

    monkeypatch.setattr(StateFile, "data", data)
    found, seen = writer.engine.owned.files.state_file.peek()
    assert len(torn) == 3
    assert found == writer.engine.owned.files.state
    assert seen not in torn
    writer.close()


def test_a_full_table_keeps_the_records_that_the_shown_state_names(tmp_path):
    """Parts and their ends fill the table before steps fill the rows: a writer may be killed before it shows each
    state."""
    opened = []

    class Opening(FaultyDisk):
        def before(self, change, path, *details):
            if change == "write" and path.endswith("state.bin") and writer:
                opened.append(lifted(count))

    def count():
        with ReplayBuffer.open(tmp_path / "buf") as reader:
            return reader.num_episodes

    writer = []
    writer.append(ReplayBuffer(200, path=tmp_path / "buf", spare_rows=8, sync_every_s=0, disk=Opening()))
    for number in range(150):
        streamed = writer[0].begin_episode(commit_every=1)
        streamed.append({"step": number})
        streamed.finish(terminated=True)
    store = writer[0].engine.owned
    assert store.seq > store.table.slots, "the table is full"
    assert len(opened) >= 300
    writer.pop().close()
