"""The sources of a mixed batch: one interface over everything that rows can be drawn from.

    ringmap dataset or view     rows by number, or items        NumPy
    ringmap buffer or fleet     rows, or items, by its sampler  NumPy
    a ring of steps             rows by position                NumPy
    a TorchRL buffer            rows by its own sampler         torch, nested

A draw returns flat columns, `(n, ...)`. A dataset of one-step clips is drawn as rows: without a time axis,
and with actions in their stored shape.
Not here: how many rows each source gives (offline_fraction.py), how they are joined (concat.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from ringmap.buffers.batch import Batch
from ringmap.buffers.distillation.buffer import DistillationBuffer
from ringmap.buffers.engine import Engine
from ringmap.buffers.pinned_view import PinnedView
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.sampled import Sampled
from ringmap.buffers.steps import StepRing
from ringmap.buffers.transitions.buffer import TransitionReplayBuffer
from ringmap.clips.samplers.base import BaseSampler, as_sampler
from ringmap.datasets.base import Dataset
from ringmap.datasets.image_axes import PictureAxes
from ringmap.errors import InputError, NoClipsError
from ringmap.storage.columns.values import flat, is_tensordict

__all__ = ["BatchSource", "StepsHalf", "half_of", "is_torchrl"]

Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Any]

_WHERE = "OfflineToOnlineReplayBuffer"
_TORCHRL_NOTES = ("index", "_weight", "priority_weight")
"""The keys that TorchRL's samplers add to the stored rows."""


class BatchSource(Protocol):
    """One of the two sources of the mix."""

    deep: bool
    """Whether the data that it returns were nested."""
    tensordict: bool
    """Whether the data that it holds were added as TensorDicts."""
    clip: tuple[int, int] | None
    """Observations in a clip, and their stride; (1, 1) for rows; None if unknown, and of the items of a window."""

    @property
    def axes(self) -> PictureAxes:
        """The columns of pictures, and whether a draw has their channels first."""
        ...

    @property
    def has_priorities(self) -> bool:
        """Whether the source draws by priority."""
        ...

    def __len__(self) -> int:
        """Return the number of rows, or clips, that can be drawn."""
        ...

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        """Draw `count` rows or clips, flat, with ids and importance weights if the sampler has them."""
        ...

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Any:
        """Store rows, or episodes, and return their ids."""
        ...

    def update_priorities(self, ids: Array, values: Array) -> int:
        """Set the priorities of drawn rows; return the number updated."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the source's own sampling state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue sampling from the state that `state_dict` returned."""
        ...


class _Base:
    deep = tensordict = False
    clip: tuple[int, int] | None = None

    @property
    def axes(self) -> PictureAxes:
        return {}

    @property
    def has_priorities(self) -> bool:
        return False

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Any:
        raise InputError(f"{where}: {type(self).__name__} can't be written; give a buffer or a capacity")

    def update_priorities(self, ids: Array, values: Array) -> int:
        raise InputError(
            f"{_WHERE}.update_priorities: the online half does not draw by priority; give an online_storage that does"
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class NoRows(_Base):
    """In place of the offline half, where the rows of a ring are read alone."""

    def __len__(self) -> int:
        return 0

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        """Never called: there are no rows."""
        raise NoClipsError(f"{_WHERE}.sample: there are no offline rows")


class DatasetHalf(_Base):
    """A ringmap dataset or view, read-only."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.clip = _clip_of(dataset)

    @property
    def axes(self) -> PictureAxes:
        return {} if self.dataset.items_are_rows else self.dataset.picture_axes()

    def __len__(self) -> int:
        return len(self.dataset)

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        return Batch(self._columns(count, rng))

    def _columns(self, count: int, rng: np.random.Generator) -> Columns:
        dataset = self.dataset
        ids = rng.integers(0, len(dataset), count)
        if isinstance(dataset, PinnedView):
            batch = dataset[ids]
            return batch if self.clip != (1, 1) else _flat_rows(dataset.engine, batch, count)
        if dataset.items_are_rows:
            return dataset.get_row_data(ids)  # actions are not folded
        clips = dataset.__getitems__(ids.tolist())
        batch = {name: _stacked([clip[name] for clip in clips]) for name in clips[0]}
        return batch if self.clip != (1, 1) else {name: v[:, 0] for name, v in batch.items()}


class ReplayHalf(_Base):
    """A ringmap buffer of clips, or a fleet of them: drawn by its own sampler, written by the episode.

    `items`: the arguments of `sample` that say what an item holds.
    """

    def __init__(self, buffer: Sampled[Any], items: Mapping[str, Any]) -> None:
        self.buffer, self._items = buffer, items
        self.clip = None if items else _clip_of(buffer)

    @property
    def has_priorities(self) -> bool:
        return as_sampler(self.buffer.sampler).has_priorities

    def __len__(self) -> int:
        self.buffer.refresh()
        return len(self.buffer)

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        batch: Batch[Any] = self.buffer.sample(count, **self._items)
        if not self.buffer.engine.holds_episodes:
            columns, deep = flat(batch, _WHERE)
            self.deep = self.deep or deep
            return Batch(_unlisted(columns), batch.ids, batch.weights)
        if self.clip != (1, 1):
            return batch
        return Batch(_flat_rows(self.buffer.engine, batch, count), batch.ids, batch.weights)

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Array:
        buffer = self.buffer
        if not isinstance(buffer, ReplayBuffer):
            raise InputError(
                f"{where}: the online half is a {type(buffer).__name__}, which only reads; its collectors write into "
                "their rings"
            )
        if is_tensordict(data):
            data, _ = flat(data, where)
        episodes = [data] if isinstance(data, Mapping) else data
        if isinstance(episodes, str) or not isinstance(episodes, Iterable):
            raise InputError(
                f"{where}: the online half is a ReplayBuffer: expected an episode (column -> one value per step) "
                f"or several, got {type(data).__name__}"
            )
        ids = []
        for episode in episodes:
            first = buffer.engine.source.head
            buffer.write_episode(episode, notes=notes)
            ids.append(np.arange(first, buffer.engine.source.head))
        return np.concatenate(ids) if ids else np.empty(0, np.int64)

    def update_priorities(self, ids: Array, values: Array) -> int:
        return _updated(self.buffer, ids, values)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.buffer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buffer.load_state_dict(state)


class StepsHalf(_Base):
    """A ring of steps."""

    def __init__(self, ring: StepRing) -> None:
        self.ring = ring
        self.clip = 1, 1
        self.deep = bool(ring.buffer.notes.get("deep"))
        self.tensordict = bool(ring.buffer.notes.get("tensordict"))

    def __len__(self) -> int:
        self.ring.buffer.refresh()
        return len(self.ring)

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        """Return rows of the window."""
        self.ring.buffer.refresh()
        return Batch(*self.ring.rows_at(self.ring.draw(count, rng)))

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Any:
        """Store rows, and the type of the input."""
        rows, deep = flat(data, where)
        made = is_tensordict(data)
        before = self.deep, self.tensordict
        kinds = {"deep": self.deep or deep, "tensordict": self.tensordict or made}
        # First: another thread that draws the new rows returns them in the type of the input.
        self.deep, self.tensordict = kinds["deep"], kinds["tensordict"]
        try:
            add = self.ring.add if kinds != dict(zip(kinds, before, strict=True)) else self.ring.append
            ids = add(rows, {**notes, **kinds}, where)
        except BaseException:
            self.deep, self.tensordict = before
            raise
        if not made:
            return ids
        import torch

        return torch.from_numpy(ids)


class SampledHalf(_Base):
    """Any other buffer with `sample(n)`, a length, and `extend(batch)` or `add(**batch)`."""

    _weighed = False

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    @property
    def has_priorities(self) -> bool:
        sampler = self._sampler
        return self._weighed or (sampler is not None and sampler.has_priorities)

    @property
    def _sampler(self) -> BaseSampler | None:
        """The sampler of the buffer, if it has one with our methods."""
        given = getattr(self.buffer, "sampler", None)
        return as_sampler(given) if callable(given) else None

    def __len__(self) -> int:
        return len(self.buffer)

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        parts, left = [], count
        while left:  # some refuse to return more than they hold
            asked = min(left, len(self.buffer))
            if not asked:
                raise NoClipsError(
                    f"{_WHERE}.sample: {type(self.buffer).__name__} is empty: it was cleared meanwhile; add some rows "
                    "first"
                )
            batch = self._sample(asked)
            columns, deep = flat(batch, f"{_WHERE}: sample() of {type(self.buffer).__name__}")
            self.deep, self.tensordict = self.deep or deep, self.tensordict or is_tensordict(batch)
            parts.append(columns)
            left -= asked
        columns = parts[0] if len(parts) == 1 else _end_to_end(parts)
        if not columns.keys() >= {"ids", "weights"}:
            return Batch(columns)
        self._weighed = True
        ids, weights = (np.asarray(columns.pop(name)) for name in ("ids", "weights"))
        return Batch(columns, ids, weights)

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Any:
        self.tensordict = self.tensordict or is_tensordict(data)
        if hasattr(self.buffer, "extend"):
            return self.buffer.extend(data)
        if not hasattr(self.buffer, "add"):
            return super().extend(data, notes, where)
        name = f"{type(self.buffer).__name__}.add"
        if not isinstance(data, Mapping):
            raise InputError(f"{where}: expected a mapping of what {name} takes, got {type(data).__name__}")
        try:
            return self.buffer.add(**data)
        except TypeError as error:  # argument names that it does not take, or too few of them
            raise InputError(f"{where}: {error}; give what {name} takes, by name, got {list(data)}") from error

    def update_priorities(self, ids: Array, values: Array) -> int:
        if hasattr(self.buffer, "update_priorities"):
            return _updated(self.buffer, ids, values)
        sampler = self._sampler
        if sampler is None or not sampler.has_priorities:
            return super().update_priorities(ids, values)
        return _updated(sampler, ids, values)

    def _sample(self, count: int) -> Any:
        return self.buffer.sample(count)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.buffer.state_dict()) if hasattr(self.buffer, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.buffer, "load_state_dict"):
            self.buffer.load_state_dict(state)


class TransitionHalf(SampledHalf):
    """A ringmap buffer of transitions."""

    def __len__(self) -> int:
        self.buffer.refresh()
        return len(self.buffer)

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Array:
        first = self.buffer.engine.source.head
        super().extend(data, notes, where)
        return np.arange(first, self.buffer.engine.source.head)


class StudentHalf(SampledHalf):
    """A ringmap buffer of a student's rows and a teacher's labels, whose `sample` has two columns only."""

    def __len__(self) -> int:
        self.buffer.refresh()
        return len(self.buffer)

    def _sample(self, count: int) -> Any:
        return self.buffer.batch(count)


class TorchRLHalf(SampledHalf):
    """A TorchRL replay buffer.

    One with TorchRL's uniform sampler is drawn by number from our generator, so that it can be resumed;
    any other is drawn by its own sampler, which uses torch's generator.
    """

    tensordict = True

    def __init__(self, buffer: Any) -> None:
        super().__init__(buffer)
        self._uniform = type(getattr(buffer, "_sampler", None)).__name__ == "RandomSampler"

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        if self._uniform:
            import torch

            batch = self.buffer[torch.from_numpy(rng.integers(0, len(self.buffer), count))]
        else:
            batch = self.buffer.sample(count)
        if not is_tensordict(batch):
            raise InputError(f"{_WHERE}: the TorchRL buffer holds {type(batch).__name__}, expected TensorDicts")
        columns, deep = flat(batch, _WHERE)
        self.deep = self.deep or deep
        return Batch({name: v for name, v in columns.items() if name not in _TORCHRL_NOTES})

    def state_dict(self) -> dict[str, Any]:
        return {}  # TorchRL holds the rows

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _updated(given: Any, ids: Array, values: Array) -> int:
    """Pass priorities on; return the number of clips updated, or all of them if the buffer returns nothing."""
    found = given.update_priorities(ids, values)
    return len(ids) if found is None else int(found)


def half_of(given: Any, what: str, items: Mapping[str, Any] | None = None) -> BatchSource:
    """Return the source for a dataset or buffer.

    Args:
        given: the dataset or buffer.
        what: the argument to name in an error.
        items: `window`, `columns`, `anchors`: what an item holds; none for what the data are cut into.

    Raises:
        InputError: rows can't be drawn from it, or not by a window.
    """
    items = items or {}
    if isinstance(given, NoRows):
        return given
    if isinstance(given, Sampled):
        return ReplayHalf(given, items)
    if isinstance(given, Dataset):
        return DatasetHalf(given.view(**items) if items else given)
    if items:
        raise InputError(
            f"{_WHERE}: {sorted(items)} are for datasets and buffers of episodes, and {what} is a "
            f"{type(given).__name__}; leave them out, and give both halves the same columns"
        )
    if isinstance(given, TransitionReplayBuffer):
        return TransitionHalf(given)
    if isinstance(given, DistillationBuffer):
        return StudentHalf(given)
    if isinstance(given, StepRing):
        return StepsHalf(given)
    if is_torchrl(given, "Storage"):
        import torchrl.data

        return TorchRLHalf(torchrl.data.ReplayBuffer(storage=given))
    if is_torchrl(given, "ReplayBuffer"):
        return TorchRLHalf(given)
    if hasattr(given, "sample") and hasattr(given, "__len__"):
        return SampledHalf(given)
    raise InputError(
        f"{_WHERE}: {what} must be a dataset, a buffer (with sample(n) and a length) or a TorchRL buffer, got "
        f"{type(given).__name__}"
    )


def is_torchrl(value: Any, name: str) -> bool:
    """Tell whether a value is of a class of `torchrl.data`, without importing the package."""
    module = sys.modules.get("torchrl.data")
    return module is not None and isinstance(value, getattr(module, name))


def _end_to_end(parts: list[Columns]) -> Columns:
    made: Columns = {}
    for name, first in parts[0].items():
        if hasattr(first, "detach"):
            import torch

            made[name] = torch.cat([part[name] for part in parts])
        else:
            made[name] = np.concatenate([part[name] for part in parts])
    return made


def _stacked(values: list[Any]) -> Any:
    if hasattr(values[0], "detach"):
        import torch

        return torch.stack(values).numpy()
    return np.stack([np.asarray(value) for value in values])


def _clip_of(dataset: Dataset) -> tuple[int, int] | None:
    """Return what a dataset or buffer is cut into, None for the items of a window."""
    return (dataset.num_steps, dataset.frameskip) if dataset.cut.history else None


def _unlisted(columns: Columns) -> Columns:
    """Return columns without the ids and weights of a batch, which it has as attributes too."""
    return {name: values for name, values in columns.items() if name not in ("ids", "weights")}


def _flat_rows(engine: Engine, batch: Mapping[str, Any], count: int) -> Columns:
    """Return clips of one step without their time axis, each column in its stored shape."""
    schema = engine.schema
    assert schema is not None
    shapes = {spec.name: spec.shape for spec in schema.columns}
    return {name: v.reshape(count, *shapes[name]) if name in shapes else v[:, 0] for name, v in batch.items()}
