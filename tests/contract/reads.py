"""Every way to read a buffer, compared with a `PlainRing`: tables of them.

    failures(READS, buffer, ring.episodes())    what differs, by the name of the read

The columns: `where` `(2,)`, which differs from step to step, `goal` of the same kind, `reward`, `action`, `latent`,
`terminated`. Not here: what is stored (plain.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ringmap.buffers.episodes import StoredEpisodes
from ringmap.clips.rewards import Hindsight, NStep, ReturnToGo
from ringmap.clips.sequences import Index, Sequences, TimeToEnd
from ringmap.clips.window import Window
from ringmap.formats.base import EPISODE_DATA_KEY
from tests.contract.plain import PlainEpisode

__all__ = ["LOADS", "READS", "failures", "loader"]

Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Array]
Episodes = Sequence[PlainEpisode]
Read = Callable[[Any, Episodes], None]

_OFFSETS = (-5, -1, 0, 2, 6)
_LENGTH = 4
_RETURNS: WeakKeyDictionary[Any, ReturnToGo] = WeakKeyDictionary()
"""One for each buffer: it keeps sums."""


def failures(reads: Mapping[str, Read], buf: Any, episodes: Episodes) -> dict[str, str]:
    """Return which of these reads fail, and how."""
    found = {}
    for name, read in reads.items():
        try:
            read(buf, episodes)
        except Exception as error:  # each is made, whatever another one does
            found[name] = f"{type(error).__name__}: {error}"[:600]
    return found


def _same(got: Any, expected: Any, what: object = "") -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected), err_msg=str(what))


def _all_same(got: Mapping[str, Any], expected: Mapping[str, Array], what: object) -> None:
    assert set(got) == set(expected), (what, set(got) ^ set(expected))
    for name, values in expected.items():
        _same(got[name], values, (what, name))


def _steps_of(episodes: Episodes) -> dict[int, tuple[int, int]]:
    """Return position -> episode and step."""
    return {
        position: (number, step)
        for number, episode in enumerate(episodes)
        for step, position in enumerate(episode.positions.tolist())
    }


def _whole(view: Any) -> Columns:
    found: Columns = view[np.arange(len(view))]
    return found


# -- drawn, and by id ------------------------------------------------------------------------


def clips(buf: Any, episodes: Episodes) -> None:
    """`sample`, and the items of a view."""
    expected, view = _clips_of(buf, episodes), buf.view()
    batch = buf.sample(40)
    for item in range(40):
        clip = {name: values[item] for name, values in batch.items()}
        _all_same(clip, expected[_key(clip)], ("sample", batch.ids[item]))
    assert len(view) == len(expected)
    _items(view, expected)


def items(buf: Any, episodes: Episodes) -> None:
    """`buf[ids]`. A clip that lost its first steps with a part of its episode keeps its number: another one comes in
    its place."""
    expected = _clips_of(buf, episodes)
    lost = (buf.span - 1) * sum(episode.first_step > 0 for episode in episodes)
    assert 0 <= len(buf) - len(expected) <= lost, (len(buf), len(expected))
    _items(buf, expected)


def _items(source: Any, expected: Mapping[bytes, Columns]) -> None:
    found = _whole(source)
    seen = {_key(found, item): item for item in range(len(source))}
    assert set(seen) == set(expected)
    for key, clip in expected.items():
        _all_same({name: values[seen[key]] for name, values in found.items()}, clip, key)


def _clips_of(buf: Any, episodes: Episodes) -> dict[bytes, Columns]:
    clips = (
        episode.clip(step, buf.num_steps, buf.frameskip)
        for episode in episodes
        for step in range(len(episode) - buf.span + 1)
    )
    return {_key(clip): clip for clip in clips}


def _key(columns: Mapping[str, Any], item: Any = ...) -> bytes:
    """Return what tells clips apart: their first row of `where`."""
    first: Array = np.asarray(columns["where"])[item][0]
    return first.tobytes()


def windows(buf: Any, episodes: Episodes) -> None:
    """Windows with padding, in a view and drawn."""
    names, known = list(episodes[0].rows), _steps_of(episodes)
    window: dict[str, Any] = {name: Window(_OFFSETS, pad="edge") for name in names}
    window["at"] = Index()
    view = buf.view(window=window)
    assert len(view) == len(known)
    for batch in (_whole(view), buf.sample(20, window=window), view.sample(20)):
        for item, position in enumerate(batch["at_position"].tolist()):
            number, step = known[position]
            for name in names:
                rows, is_pad = episodes[number].window(name, step, _OFFSETS)
                _same(batch[f"{name}_is_pad"][item], is_pad, (name, position, "is_pad"))
                _same(batch[name][item], rows, (name, position))


def computed(buf: Any, episodes: Episodes) -> None:
    """`NStep`, `TimeToEnd`, `Index` and `Hindsight`."""
    window = {
        "sum": NStep(3, 0.5, next=("where",)),
        "left": TimeToEnd(),
        "at": Index(),
        "again": Hindsight(_reached, "final", k=3, goal="goal", achieved="where"),
    }
    known, columns = _steps_of(episodes), ["where", "latent", *window]
    view = buf.view(window, columns)
    for batch in (_whole(view), buf.sample(20, window=window, columns=columns)):
        for item, position in enumerate(batch["at_position"].tolist()):
            number, step = known[position]
            rows, length = episodes[number].rows, len(episodes[number])
            total, discount, count = episodes[number].n_step(step, 3, 0.5)
            found = [batch[f"sum{name}"][item] for name in ("", "_discount", "_steps")]
            _same(found, [total, discount, count], ("n-step", position))
            _same(batch["next_where"][item], rows["where"][min(step + count, length - 1)])
            _same(batch["latent"][item], rows["latent"][step], position)
            _same(batch["left"][item], length - 1 - step)
            _same([batch["at_episode"][item], batch["at_step"][item]], [number, step])
            goal = rows["where"][-1] if batch["again"][item] else rows["goal"][step]
            _same(batch["goal"][item], goal, ("goal", position))
            if batch["again"][item]:
                reached = _reached(rows["where"][[step + 1]], goal[None])
                _same(batch["again_reward"][[item]], reached, ("reward", position))


def _reached(achieved: Array, goal: Array) -> Array:
    found: Array = (achieved == goal).all(1).astype(float)
    return found


def return_to_go(buf: Any, episodes: Episodes) -> None:
    """`ReturnToGo` of episodes that have ended, always with the same object for a buffer."""
    ended = [number for number, episode in enumerate(episodes) if not episode.is_open]
    sums, known = _RETURNS.setdefault(buf.engine, ReturnToGo(0.5)), _steps_of(episodes)
    view = buf.view({"return": sums, "at": Index()}, ["return", "at"]).take(ended)
    for batch in (_whole(view), view.sample(10)):
        for item, position in enumerate(batch["at_position"].tolist()):
            number, step = known[position]
            expected = episodes[number].return_to_go(step, 0.5)
            np.testing.assert_allclose(batch["return"][item], expected, err_msg=str(position))


def sequences(buf: Any, episodes: Episodes) -> None:
    """`Sequences`, in episodes and across them."""
    inside = [[(number, step) for step in range(len(ep))] for number, ep in enumerate(episodes)]
    for across, runs in ((False, inside), (True, _runs(episodes))):
        expected = {
            int(episodes[run[at][0]].positions[run[at][1]]): run[at : at + _LENGTH]
            for run in runs
            for at in range(len(run) - _LENGTH + 1)
        }
        view = buf.view(Sequences(_LENGTH, across=across))
        assert len(view) == len(expected), (across, len(view), len(expected))
        for batch in (_whole(view), view.sample(10)):
            for item, ids in enumerate(batch["step_id"].tolist()):
                steps = [(episodes[number], step) for number, step in expected[ids[0]]]
                _same(ids, [ep.positions[step] for ep, step in steps], across)
                ends = [step == len(ep) - 1 and not ep.is_open for ep, step in steps]
                terminal = [end and ep.terminated for end, (ep, _) in zip(ends, steps, strict=True)]
                first = [step == 0 == ep.first_step for ep, step in steps]
                for flag, values in (("first", first), ("last", ends), ("terminal", terminal)):
                    _same(batch[f"is_{flag}"][item], values, (across, flag, ids))
                for name in episodes[0].rows:
                    rows = [ep.rows[name][step] for ep, step in steps]
                    _same(batch[name][item], rows, (across, name, ids))


def _runs(episodes: Episodes) -> list[list[tuple[int, int]]]:
    """Return pairs of an episode and a step, run by run: episodes of a lane follow each other, after one that is open
    nothing does."""
    lanes: dict[int | None, list[list[tuple[int, int]]]] = {}
    for number, episode in enumerate(episodes):
        runs = lanes.setdefault(episode.lane, [[]])
        runs[-1] += [(number, step) for step in range(len(episode))]
        if episode.is_open:
            runs.append([])
    return [run for runs in lanes.values() for run in runs]


def split(buf: Any, episodes: Episodes) -> None:
    """Both sides of a split have every step once between them, and share no episode."""
    known, sides = _steps_of(episodes), buf.split(0.5, window={"at": Index()}, columns=["latent", "at"])
    positions = []
    for side in map(_whole, sides):
        positions.append(side["at_position"].tolist())
        for item, position in enumerate(positions[-1]):
            number, step = known[position]
            _same(side["latent"][item], episodes[number].rows["latent"][step], position)
    assert sorted(positions[0] + positions[1]) == sorted(known)
    one, other = ({known[position][0] for position in side} for side in positions)
    assert not one & other


# -- by episode and by row -------------------------------------------------------------------


def stored(buf: Any, episodes: Episodes) -> None:
    """Episodes and rows as another thread reads them: what is pending is not committed first."""
    source = buf.engine.source
    found, names = StoredEpisodes(source), source.schema.names
    for number, episode in enumerate(episodes):
        steps = found.steps(number, 0, len(episode), "test")
        _all_same(dict(zip(names, steps, strict=True)), episode.rows, ("steps", number))
    _all_same(found.rows(None, names, "test"), _joined(episodes), "rows")


def _joined(episodes: Episodes) -> Columns:
    names = episodes[0].rows
    return {name: np.concatenate([episode.rows[name] for episode in episodes]) for name in names}


def load(buf: Any, episodes: Episodes) -> None:
    """`load_episode`, `load_steps`, `load_chunk` (of a frameskip of 1), and a view's slices."""
    assert buf.lengths.tolist() == [len(episode) for episode in episodes]
    view = buf.view()
    for number, episode in enumerate(episodes):
        rows, stop = episode.rows, len(episode)
        _all_same(buf.load_episode(number), rows, ("load_episode", number))
        _all_same(view.load_episode(number), rows, ("view", number))
        some = {name: values[1:] for name, values in rows.items()}
        _all_same(buf.load_steps(number, min(1, stop), stop), some, ("load_steps", number))
        one = buf.load_steps(number, 0, stop, columns=["latent"])
        _same(one["latent"], rows["latent"], ("load_steps of a column", number))
        (chunk,) = buf.load_chunk([number], [0], [stop])
        _all_same(chunk, rows, ("load_chunk", number))


def each(buf: Any, episodes: Episodes) -> None:
    """`episodes()`."""
    for number, (got, episode) in enumerate(zip(buf.episodes(), episodes, strict=True)):
        got.pop(EPISODE_DATA_KEY, None)
        _all_same(got, episode.rows, ("episodes()", number))


def rows_of(buf: Any, episodes: Episodes) -> None:
    """`get_col_data` and `get_row_data`."""
    expected = _joined(episodes)
    for name, values in expected.items():
        _same(buf.get_col_data(name), values, ("get_col_data", name))
    numbers = np.arange(len(expected["where"]))[::-3]
    found = buf.get_row_data(numbers)
    _all_same(found, {n: v[numbers] for n, v in expected.items()}, "get_row_data")


def dumped(buf: Any, episodes: Episodes) -> None:
    """`dump` to HDF5, loaded again."""
    from ringmap.data import load_dataset

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.h5"
        buf.dump(path, progress=False)
        dataset = load_dataset(path, output="numpy")
        assert dataset.lengths.tolist() == [len(episode) for episode in episodes]
        for number, episode in enumerate(episodes):
            _all_same(dataset.load_episode(number), episode.rows, ("dump", number))


def loader(buf: Any, episodes: Episodes, workers: int = 0) -> None:
    """A pass of a DataLoader."""
    from torch.utils.data import DataLoader

    expected, seen = _clips_of(buf, episodes), set[bytes]()
    made = DataLoader(buf, batch_size=16, sampler=buf.pass_sampler(seed=1), num_workers=workers)
    for batch in made:
        for item in range(len(batch["where"])):
            key = _key(batch, item)
            clip = {name: values[item] for name, values in batch.items()}
            _all_same(clip, expected[key], ("loader", key))
            seen.add(key)
    assert seen == set(expected)


READS: dict[str, Read] = {
    "clips": clips,
    "windows": windows,
    "computed": computed,
    "return_to_go": return_to_go,
    "sequences": sequences,
    "split": split,
    "stored": stored,
}
"""Reads that leave what is pending as it is."""

LOADS: dict[str, Read] = {
    "items": items,
    "load": load,
    "episodes": each,
    "rows": rows_of,
    "dump": dumped,
    "loader": loader,
}
"""Reads that commit it first."""
