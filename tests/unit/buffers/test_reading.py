"""Reading: clip ids, the shapes of clips, slices, rows and columns, copies out."""

import numpy as np
import pytest

from ringmap.errors import ClipIndexError, CorruptError, InputError, UnknownColumnError
from tests.unit.buffers.steps import COLUMNS, clip, columns, episode, same, snapshot

LENGTHS = [7, 1, 12, 5, 6, 3, 9]


@pytest.fixture(params=[(1, 1), (1, 3), (3, 1), (2, 2), (4, 3)], ids=lambda p: f"H{p[0]}K{p[1]}")
def shape(request):
    """history_len and frameskip."""
    return request.param


def fill(buffer, history=1, skip=1, max_steps=25):
    """Return a buffer on its second lap, and its `(number, length)` pairs."""
    buf, kept = buffer(max_steps, history, skip), []
    for number, length in enumerate(LENGTHS * 2):
        buf.write_episode(episode(number, length))
        kept.append((number, length))
        while sum(n for _, n in kept) > max_steps:
            kept.pop(0)
    return buf, kept


def expected_clips(kept, history, skip):
    span = history * skip
    return [(i, number, start) for i, (number, length) in enumerate(kept) for start in range(length - span + 1)]


# -- clips -------------------------------------------------------------------------------------


def test_ids_run_from_the_oldest_episode_then_by_first_step(buffer, shape):
    buf, kept = fill(buffer, *shape)
    expected = expected_clips(kept, *shape)
    assert len(buf) == buf.num_valid_ends() == buf.num_valid_ends(shape[0]) == len(expected)
    assert type(len(buf)) is int
    assert list(buf.clip_indices) == [(i, start) for i, _, start in expected]
    for idx, (_, number, start) in enumerate(expected):
        same(buf[idx], clip(number, start, *shape))
        same(buf[idx - len(expected)], clip(number, start, *shape))
        same(buf[np.int64(idx)], clip(number, start, *shape))


def test_several_at_once_are_the_same(buffer, shape):
    buf, kept = fill(buffer, *shape)
    if not len(buf):
        return
    ids = [0, len(buf) - 1, 0, -1, len(buf) // 2]
    for one, idx in zip(buf.__getitems__(ids), ids, strict=True):
        same(one, buf[idx])
    assert buf.__getitems__([]) == []


def test_every_history_has_its_own_ids(buffer):
    buf, kept = fill(buffer, 2, 2)
    for history in range(1, 9):
        assert buf.num_valid_ends(history) == len(expected_clips(kept, history, 2))
    for wrong in (0, -1, 1.5):
        with pytest.raises(InputError, match="history_len must be positive"):
            buf.num_valid_ends(wrong)


@pytest.mark.parametrize("idx", [None, "0", 1.0, slice(3)])
def test_an_id_is_an_integer(buffer, idx):
    buf, _ = fill(buffer)
    with pytest.raises(TypeError):
        buf[idx]


def test_out_of_range(buffer):
    buf, kept = fill(buffer, 2, 1)
    size = len(expected_clips(kept, 2, 1))
    for idx in (size, -size - 1, 10**12, -(10**12)):
        with pytest.raises(ClipIndexError, match=f"clip {idx} is out of range for {size} clips"):
            buf[idx]


def test_empty(buffer):
    buf = buffer(max_steps=25, history_len=3)
    for why in ("no clips of 3 steps are stored", "no clip of 3 steps .* fits"):
        for idx in (0, -1, 5):
            with pytest.raises(IndexError, match=f"empty: {why}"):
                buf[idx]
        buf.write_episode(episode(0, 2))
    buf.write_episode(episode(0, 3))
    same(buf[0], clip(0, 0, 3))
    buf.clear()
    with pytest.raises(IndexError, match="empty"):
        buf[0]


def test_iterating_ends(buffer):
    buf, kept = fill(buffer)
    assert [int(one["episode"][0]) for one in buf] == [n for n, length in kept for _ in range(length)]


@pytest.mark.parametrize(
    ("step", "width"),
    [((), 1), ((1,), 1), ((3,), 3), ((2, 2), 4), ((0,), 0)],
)
@pytest.mark.parametrize("skip", [1, 2])
def test_actions_are_dense_and_reshaped_always(buffer, step, width, skip):
    buf = buffer(max_steps=25, history_len=3, frameskip=skip)
    actions = np.arange(12 * int(np.prod(step)), dtype=np.float32).reshape(12, *step)
    for _ in range(3):
        buf.write_episode({"action": actions, "action2": actions, "reward": np.arange(12)})
    for start in range(12 - 3 * skip + 1):
        for got in (buf[start], {k: v[0] for k, v in first(buf, start).items()}):
            assert got["action"].shape == (3, width * skip)
            np.testing.assert_array_equal(got["action"], actions[start : start + 3 * skip].reshape(3, width * skip))
            np.testing.assert_array_equal(got["action2"], actions[start : start + 3 * skip : skip])
            np.testing.assert_array_equal(got["reward"], np.arange(start, start + 3 * skip, skip))


def first(buf, idx):
    buf.sampler = lambda step, b, batch_size, history: np.full(batch_size, idx)
    return buf.sample(1)


def test_a_transform_is_applied_to_clips_and_to_nothing_else(buffer):
    buf, kept = fill(buffer, 2)
    buf.transform = lambda one: {"seen": sorted(one)}
    assert buf[0] == {"seen": sorted(COLUMNS)}
    assert buf.__getitems__([1, 2]) == [{"seen": sorted(COLUMNS)}] * 2
    assert sorted(buf.sample(2)) == sorted(COLUMNS)
    assert sorted(buf.load_episode(0)) == sorted(COLUMNS)
    assert sorted(next(buf.episodes())) == sorted(COLUMNS)
    assert sorted(buf.get_row_data(0)) == sorted(COLUMNS)


# -- whole episodes and slices -----------------------------------------------------------------


def test_episodes_are_dense_lists_of_steps(buffer):
    buf, kept = fill(buffer, 2, 3)
    got = list(buf.episodes())
    assert len(got) == len(kept)
    for one, (number, length) in zip(got, kept, strict=True):
        assert all(type(values) is list and len(values) == length for values in one.values())
        same({name: np.array(values) for name, values in one.items()}, columns(number, 0, length))


def test_episodes_may_be_walked_while_more_come(buffer):
    buf, kept = fill(buffer)
    seen = []
    for one in buf.episodes():
        seen.append(int(one["episode"][0]))
        buf.write_episode(episode(100 + len(seen), 6))
    assert seen == sorted(seen), "what was evicted meanwhile is left out, what came is not there yet"
    assert set(seen) <= {number for number, _ in kept}


def test_load_episode_is_dense_and_never_folded(buffer):
    buf, kept = fill(buffer, 2, 3)
    for i, (number, length) in enumerate(kept):
        same(buf.load_episode(i), columns(number, 0, length))
        same(buf.load_episode(i - len(kept)), columns(number, 0, length))


def test_slices_are_dense_and_never_folded(buffer):
    buf, kept = fill(buffer, 2, 3)
    for i, (number, length) in enumerate(kept):
        for start in range(length + 1):
            for end in range(start, length + 1):
                same(buf._load_slice(i, start, end), columns(number, start, end))


def test_bounds_of_episodes_and_slices(buffer):
    buf, kept = fill(buffer)
    for wrong in (len(kept), -len(kept) - 1, 10**9):
        with pytest.raises(ClipIndexError, match=f"episode {wrong} is out of range for {len(kept)} episodes"):
            buf.load_episode(wrong)
        with pytest.raises(ClipIndexError, match="out of range"):
            buf._load_slice(wrong, 0, 1)
    length = kept[0][1]
    for start, end in ((-1, 1), (0, length + 1), (2, 1), (length + 1, length + 1)):
        with pytest.raises(ClipIndexError, match=f"steps \\[{start}, {end}\\) are out of range"):
            buf._load_slice(0, start, end)
    for wrong in (None, "0", 1.5):
        with pytest.raises(TypeError):
            buf.load_episode(wrong)


def test_load_chunk(buffer):
    buf, kept = fill(buffer, 2, 3)
    i = [length for _, length in kept].index(9)
    number = kept[i][0]
    one, two = buf.load_chunk([i, i - len(kept)], [0, 2], [6, 8])
    for chunk, start in ((one, 0), (two, 2)):
        dense = columns(number, start, start + 6)
        same(chunk, {**dense, "action": dense["action"].reshape(2, 6)})
    assert buf.load_chunk([], [], []) == []
    with pytest.raises(InputError, match="do not fold"):
        buf.load_chunk([i], [0], [4])
    with pytest.raises(ClipIndexError, match="out of range"):
        buf.load_chunk([i], [0], [30])
    with pytest.raises(InputError, match="as many of each"):
        buf.load_chunk([i], [0, 1], [3])


# -- rows and columns --------------------------------------------------------------------------


def test_column_and_row_data_and_dims(buffer):
    buf, kept = fill(buffer, 2, 3)
    whole = [columns(number, 0, length) for number, length in kept]
    expected = {name: np.concatenate([part[name] for part in whole]) for name in COLUMNS}
    same({name: buf.get_col_data(name) for name in COLUMNS}, expected)
    assert [buf.get_dim(name) for name in COLUMNS] == [1, 1, 3, 2]
    total = buf.num_steps_stored
    rows = [0, total - 1, 3, 3, -1, 7, -total]
    same(buf.get_row_data(rows), {name: values[rows] for name, values in expected.items()})
    same(buf.get_row_data(np.array(rows)), {name: values[rows] for name, values in expected.items()})
    for row in (0, -1, 5):
        same(
            buf.get_row_data(row),
            {name: np.asarray(values[row]) for name, values in expected.items()},
        )
    for i, offset in enumerate(buf.offsets.tolist()):
        same(buf.get_row_data([offset]), {n: v[:1] for n, v in whole[i].items()})


def test_rows_and_columns_that_are_not_there(buffer):
    buf, kept = fill(buffer)
    total = buf.num_steps_stored
    for wrong in (total, -total - 1, [0, total]):
        with pytest.raises(ClipIndexError, match=f"out of range for {total} rows"):
            buf.get_row_data(wrong)
    for work in (buf.get_col_data, buf.get_dim):
        with pytest.raises(UnknownColumnError, match=r"no column 'pixles'; there are \['episode'"):
            work("pixles")
        with pytest.raises(KeyError):
            work("pixles")


def test_rows_of_an_empty_buffer(buffer):
    buf = buffer(max_steps=25)
    assert buf.get_row_data([]) == {}
    with pytest.raises(UnknownColumnError):
        buf.get_col_data("step")
    buf.write_episode(episode(0, 5))
    buf.clear()
    assert buf.get_col_data("obs/x").shape == (0, 3)
    assert {name: v.shape for name, v in buf.get_row_data([]).items()} == {
        "episode": (0,),
        "step": (0,),
        "obs/x": (0, 3),
        "action": (0, 2),
    }
    with pytest.raises(ClipIndexError):
        buf.get_row_data(0)


# -- copies out --------------------------------------------------------------------------------

OUT = {
    "clip": lambda b: b[0],
    "clips": lambda b: b.__getitems__([0, 1])[1],
    "sample": lambda b: b.sample(20),
    "episode": lambda b: b.load_episode(0),
    "slice": lambda b: b._load_slice(0, 0, 2),
    "chunk": lambda b: b.load_chunk([0], [0], [2])[0],
    "column": lambda b: {"step": b.get_col_data("step")},
    "row": lambda b: b.get_row_data([0, 1]),
    "one row": lambda b: {n: v for n, v in b.get_row_data(0).items() if v.ndim},
    "steps": lambda b: {n: v for n, values in next(b.episodes()).items() for v in values if v.ndim},
}


@pytest.mark.parametrize("way", OUT)
def test_what_came_out_can_be_changed(buffer, way):
    buf, _ = fill(buffer, 2)
    before = {**snapshot(buf), "sampling": 1 if way == "sample" else 0}
    for values in OUT[way](buf).values():
        assert values.flags.writeable
        values[...] = 77
    assert snapshot(buf) == before


@pytest.mark.parametrize("way", OUT)
def test_what_came_out_stays(buffer, way):
    buf, _ = fill(buffer, 2)
    out = OUT[way](buf)
    kept = {name: values.copy() for name, values in out.items()}
    for number in range(20):
        buf.write_episode(episode(100 + number, 6))
    buf.clear()
    buf.close()
    same(out, kept)


# -- damage ------------------------------------------------------------------------------------


def test_rows_that_were_damaged_are_refused_by_name(disk_buffer, home):
    buf = disk_buffer(max_steps=25)
    buf.write_episode(episode(0, 5))
    buf.write_episode(episode(1, 5))
    with open(home / "buf/columns/003-action.npy", "r+b") as file:
        file.seek(4096 + 16 * 7)
        file.write(b"\xff\xff")
    assert int(buf.load_episode(0)["episode"][0]) == 0
    with pytest.raises(CorruptError, match=r"columns \['action'\].*rows of record 2.*ringmap.check"):
        buf.load_episode(1)
    with pytest.raises(CorruptError, match="action"):
        list(buf.episodes())
