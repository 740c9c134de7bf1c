"""The conformance suite of a computed column: inherit it, say how to make one, and pytest does the rest.

    class TestMine(ComputedTests):
        def make(self):
            return MyColumn()

The episodes have the columns `obs` int64 (its value is 100 times the episode's number, plus the step), `reward`
float64, `terminated` bool, `achieved_goal` and `desired_goal` float64 (2,). Another `episodes` may have others.
Not here: windows themselves, samplers.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.buffers.replay import ReplayBuffer
from ringmap.clips.items import Computed

__all__ = ["ComputedTests"]

Array = np.ndarray[Any, np.dtype[Any]]


class ComputedTests:
    """What every computed column owes. Subclass it and define `make`."""

    is_random: bool = False
    """Whether it draws, so that the same item may differ from batch to batch."""

    def make(self) -> Computed:
        """Return the column."""
        raise NotImplementedError(f"{type(self).__name__} must supply make")

    def episodes(self) -> list[dict[str, Any]]:
        """Return the episodes that it is computed over."""
        rng = np.random.default_rng(0)
        made = []
        for number, length in enumerate((7, 1, 12, 2, 9, 5, 11)):
            made.append(
                {
                    "obs": 100 * number + np.arange(length),
                    "reward": rng.normal(size=length),
                    "terminated": np.arange(length) == length - (number % 2),
                    "achieved_goal": rng.normal(size=(length, 2)),
                    "desired_goal": rng.normal(size=(length, 2)),
                }
            )
        return made

    def filled(self, episodes: list[dict[str, Any]] | None = None, rows: int = 64) -> ReplayBuffer:
        """Return a buffer of these episodes."""
        buffer = ReplayBuffer(rows, spare_rows=16, seed=0, reward_at="next")
        for episode in self.episodes() if episodes is None else episodes:
            buffer.write_episode(episode)
        return buffer

    def added(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """Return those columns of a batch that the column adds."""
        return {name: np.asarray(batch[name]) for name in self.make().adds("made")}

    def batch(self, buffer: ReplayBuffer, ids: list[int]) -> dict[str, Array]:
        """Return the columns for these items."""
        return self.added(buffer.view(window={"made": self.make()})[ids])

    def test_it_adds_what_it_names(self) -> None:
        """Every column that `adds` names is there, one row per item, and no other."""
        buffer = self.filled()
        batch = buffer.sample(5, window={"made": self.make()})
        names = set(self.make().adds("made"))
        assert set(batch) == {*buffer.column_names, *names}
        assert all(len(batch[name]) == 5 for name in names)

    def test_it_reads_what_it_names(self) -> None:
        """Every column that `reads` names is one of the stored."""
        buffer = self.filled()
        schema = buffer.engine.source.schema
        assert schema is not None
        assert set(self.make().reads(schema)) <= set(schema.names)

    def test_an_item_does_not_depend_on_others(self) -> None:
        """The columns of an item are the same alone, in any batch, and whatever the other episodes hold."""
        if self.is_random:
            return
        episodes = self.episodes()
        buffer = self.filled()
        view = buffer.view()
        ids = list(range(len(view)))
        whole = self.batch(buffer, ids)
        pairs = list(view.clip_indices)
        for number in ids:
            alone = self.batch(buffer, [number])
            for name, values in alone.items():
                np.testing.assert_array_equal(values[0], whole[name][number], err_msg=name)
        for ep in range(view.lengths.size):
            others = self.filled(
                [
                    e if i == ep else {n: np.roll(v, 1, 0) * 2 if v.dtype != bool else ~v for n, v in e.items()}
                    for i, e in enumerate(episodes[-view.lengths.size :])
                ]
            )
            mine = [i for i, (number, _) in enumerate(pairs) if number == ep]
            for name, values in self.batch(others, mine).items():
                np.testing.assert_array_equal(values, whole[name][mine], err_msg=name)

    def test_a_column_is_its_own_memory(self) -> None:
        """What a caller writes into a batch changes no later batch."""
        if self.is_random:
            return
        buffer, column = self.filled(), self.make()
        view = buffer.view(window={"made": column})
        ids = list(range(len(view)))
        first = self.added(view[ids])
        kept = {name: values.copy() for name, values in first.items()}
        for values in first.values():
            values[...] = 0
        for name, values in self.added(view[ids]).items():
            np.testing.assert_array_equal(values, kept[name], err_msg=name)

    def test_it_is_pickled(self) -> None:
        """A copy in another process computes the same."""
        column = pickle.loads(pickle.dumps(self.make()))
        buffer = self.filled()
        view = buffer.view(window={"made": column})
        ids = list(range(len(view)))
        again = self.added(view[ids])
        if not self.is_random:
            for name, values in self.batch(buffer, ids).items():
                np.testing.assert_array_equal(values, again[name], err_msg=name)

    def test_it_follows_a_ring_that_wraps(self) -> None:
        """After old episodes are evicted, the columns are those of a ring that never held them."""
        if self.is_random:
            return
        column, old = self.make(), self.filled(rows=40)
        for _ in range(3):
            for episode in self.episodes():
                old.write_episode(episode)
            view = old.view(window={"made": column})
            found = self.added(view[list(range(len(view)))])
            fresh = self.filled(self.episodes()[-len(view.lengths) :])
            for name, values in self.batch(fresh, list(range(len(view)))).items():
                if not name.endswith(("position", "_id")):
                    np.testing.assert_array_equal(found[name], values, err_msg=name)
