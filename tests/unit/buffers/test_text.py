"""Columns of text in a ring, and in many: no episode says how long text may be.

How text is read beside every other mechanism is in `matrix/`; damaged and forged words are in `damage/`.
"""

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.clips import gather, rings
from ringmap.data import OfflineToOnlineReplayBuffer, ShardedReplayBuffer, Window
from ringmap.errors import CorruptError, InputError
from ringmap.storage.columns import text
from ringmap.storage.commit import commit, group
from ringmap.storage.read import handle as texts
from ringmap.storage.records.blobs import Segments


def text_of(step):
    """Return the text of a step: some are longer than all before."""
    return "" if step % 7 == 3 else f"\u00fc{step}" + " and on" * (step // 5)


def episode(number, length=5):
    steps = np.arange(length) + 100 * number
    tasks = [text_of(step) for step in steps.tolist()]
    return {"step": steps, "task": tasks, "two": [["same", task[:9]] for task in tasks]}


def check(batch):
    """Assert that each text is that of its step."""
    steps = np.asarray(batch["step"])
    expected = [text_of(step) for step in steps.ravel().tolist()]
    assert np.asarray(batch["task"]).ravel().tolist() == expected
    assert np.asarray(batch["two"]).reshape(-1, 2).tolist() == [["same", t[:9]] for t in expected]


@pytest.fixture
def fleet(tmp_path):
    """Three rings; text is longer from one to the next."""
    for ring in range(3):
        with ReplayBuffer(60, path=tmp_path / "fleet" / str(ring), seed=ring) as buf:
            for number in range(4):
                buf.write_episode(episode(4 * ring + number))
    return tmp_path / "fleet"


def test_padding_of_text_is_empty():
    buf = ReplayBuffer(40, seed=0)
    buf.write_episode(episode(1))
    window = {name: Window([-9, 0], pad="zero") for name in ("step", "task")}
    batch = buf.sample(8, window=window)
    assert batch["task"][:, 0].tolist() == [""] * 8
    assert batch["task"][:, 1].tolist() == [text_of(step) for step in batch["step"][:, 1].tolist()]
    assert batch["task"].dtype == f"<U{max(1, max(map(len, batch['task'].ravel().tolist())))}"


def test_an_earlier_batch_is_filled_again():
    buf = ReplayBuffer(40, seed=0)
    for number in range(3):
        buf.write_episode(episode(number))
    first = buf.sample(8)
    again = buf.sample(8, out=first)
    assert again["step"] is first["step"]
    check(again)


def test_what_text_can_not_be():
    with pytest.raises(InputError, match="'task' is of text and mutable; name a width"):
        ReplayBuffer(9, schema={"task": ringmap.Column((), str, mutable=True)})
    buf = ReplayBuffer(9)
    buf.write_episode({"task": ["a", "inner\0nul"]})
    with pytest.raises(InputError, match="step 1 is 'a.x00': NumPy cuts NUL"):
        buf.write_episode({"task": ["a", "a\0"]})
    with pytest.raises(InputError, match="column 'task': step 0 of dtype int64 is of another kind"):
        buf.write_episode({"task": [3]})
    assert buf.num_episodes == 1
    assert buf.load_episode(0)["task"].tolist() == ["a", "inner\0nul"]


@pytest.mark.parametrize("casting", ["safe", "unsafe"])
def test_a_width_that_the_schema_names_stays(casting):
    buf = ReplayBuffer(9, schema={"task": ((), "U3")}, casting=casting)
    buf.write_episode({"task": ["abc", ""]})
    with pytest.raises(
        InputError, match="step 1 of .*'abcd'; shorten it, or name a greater width in the schema, or str"
    ):
        buf.write_episode({"task": ["a", "abcd"]})
    assert buf.load_episode(0)["task"].dtype == "<U3"
    assert buf.num_episodes == 1


def test_words_are_read_once_and_only_where_text_is_asked_for(tmp_path, monkeypatch):
    with ReplayBuffer(60, path=tmp_path / "ring", seed=0) as buf:
        for number in range(6):
            buf.write_episode(episode(number))
    reader, read, real = ReplayBuffer.open(tmp_path / "ring", seed=0), [], Segments.blob_of
    monkeypatch.setattr(Segments, "blob_of", lambda self, *at: read.append(at) or real(self, *at))
    reader.load_steps(0, 1, 3, ["step"])
    reader.get_col_data("step")
    reader.sample(40, columns=["step"])
    assert read == []
    for _ in range(3):
        check(reader.sample(40))
    assert len(read) == len(set(read)) <= 6
    reader.close()
    monkeypatch.setattr(texts, "KEPT_NBYTES", 500)  # of about two episodes
    read.clear()
    with ReplayBuffer.open(tmp_path / "ring", seed=0) as reader:
        for _ in range(3):
            check(reader.sample(40))
    assert len(read) > 6


def test_text_that_is_evicted_during_a_read_is_drawn_again(tmp_path, monkeypatch):
    buf = ReplayBuffer(20, path=tmp_path / "ring", seed=0)
    for number in range(4):
        buf.write_episode(episode(number))
    reader, real = ReplayBuffer.open(tmp_path / "ring", seed=0), texts.Texts._read
    strikes = iter([True])

    def read(self, handle, start):
        if next(strikes, False):
            for number in range(9, 22):  # all that was looked up
                buf.write_episode(episode(number))
            buf.flush()
        return real(self, handle, start)

    monkeypatch.setattr(texts.Texts, "_read", read)
    batch = reader.sample(16)
    check(batch)
    assert (batch["step"] >= 1800).all()
    monkeypatch.setattr(texts.Texts, "_words", lambda *_: [])  # of rows that are live
    with pytest.raises(CorruptError, match="text of the step at position .* is damaged or missing"):
        reader.sample(4)
    reader.close()
    buf.close()


def test_words_of_before_the_history_broke_are_not_kept_by_a_thread_that_read_them(tmp_path, monkeypatch):
    with ReplayBuffer(20, path=tmp_path / "ring", seed=0) as buf:
        buf.write_episode(episode(0))
    reader, real = ReplayBuffer.open(tmp_path / "ring", seed=0), texts.Texts._read

    def read(self, handle, start):
        monkeypatch.setattr(texts.Texts, "_read", real)
        handle.live.era += 1  # meanwhile another thread finds another episode there
        check(reader.sample(4))
        return [word.upper() for word in real(self, handle, start)]

    monkeypatch.setattr(texts.Texts, "_read", read)
    reader.sample(4)
    check(reader.sample(4))
    reader.close()


def test_a_ring_with_longer_text_joins_a_fleet(fleet):
    with ShardedReplayBuffer(fleet, seed=0) as rings:
        assert rings.num_episodes == 12
        for _ in range(3):
            check(rings.sample(50))
        for number in range(12):
            check(rings.view().load_episode(number))
        batch = rings.sample(20, window={n: Window([-1, 0], pad="edge") for n in ("step", "task", "two")})
        check(batch)


@pytest.mark.parametrize("module", [pytest.param(gather, marks=pytest.mark.branch), rings])
def test_control_text_that_numpy_cuts(fleet, tmp_path, monkeypatch, module):
    def cut(into, where, values):
        into[where] = values
        return into

    monkeypatch.setattr(module, "put", cut)
    if module is gather:
        with pytest.raises(AssertionError):
            test_text_that_is_evicted_during_a_read_is_drawn_again(tmp_path, monkeypatch)
    else:
        with pytest.raises(AssertionError):
            test_a_ring_with_longer_text_joins_a_fleet(fleet)


def test_errors_call_text_by_its_name():
    buf = ReplayBuffer(20)
    buf.write_episode(episode(0))
    with pytest.raises(InputError, match="of dtype int64 is of another kind in the locked dtype text"):
        buf.write_episode({**episode(1), "task": range(5)})
    with pytest.raises(InputError, match="pad='nan', but the column holds text"):
        buf.sample(2, window={"task": Window([-1, 0], pad="nan")})


def test_an_open_group_is_committed_before_its_text_is_too_much(tmp_path, monkeypatch):
    """Text that is acknowledged fits in the blob of its commit, however many calls it comes in."""
    monkeypatch.setattr(text, "MOST_NBYTES", 1 << 14)
    monkeypatch.setattr(group, "_FULL_NBYTES", 1 << 12)
    monkeypatch.setattr(commit, "_MOST_DATA", 1 << 15)
    offline = ReplayBuffer(100, seed=0)
    offline.write_episode({"task": ["a"] * 5})
    buf = OfflineToOnlineReplayBuffer(offline, online_capacity=500, path=tmp_path / "rows", batch_size=4)
    given = [f"{i} " + "x" * 300 for i in range(100)]
    for task in given:
        buf.extend({"task": [task]})
    with pytest.raises(InputError, match=r"text of up to [\d,]+ bytes would be one commit, expected at most 16,384"):
        buf.extend({"task": ["y" * (1 << 14)]})
    buf.close()
    with OfflineToOnlineReplayBuffer.open(tmp_path / "rows", offline, batch_size=4) as again:
        assert [task for rows in again.rows() for task in rows["task"]] == given


def test_an_open_episode_refuses_the_step_whose_text_is_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MOST_NBYTES", 1 << 12)
    with ReplayBuffer(100, path=tmp_path / "ring", seed=0) as buf, buf.begin_episode() as open_episode:
        for step in range(100):
            try:
                open_episode.append({"task": f"{step} " + "x" * 100})
            except InputError as error:
                assert "OpenEpisode.append: text of up to" in str(error)
                break
        assert 5 < step < 12
        open_episode.finish()
        assert [task.split()[0] for task in buf.load_episode(0)["task"]] == [str(i) for i in range(step)]
