"""The sources of a mixed batch, how many rows each gives, and how two parts of one are joined.

    read by number, from the mix's generator    DatasetSource: a dataset or a view
    drawn by its own sampler, and written       BufferSource: a buffer or a fleet; RingSource: a ring of rows;
                                                TorchRLSource

A draw returns flat columns, `(n, ...)`. Of clips of one step these are rows: without a time axis, and with actions in
their stored shape.

    0.25 of 10 rows: round -> 2, 2, 2, 2, ...      carry -> 2, 3, 2, 3, ...

Invariants: joined parts have the same columns, of the same shapes, or nothing is returned; 0 <= fraction <= base < 1,
and with "carry" the fraction is exact on average.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ringmap.buffers.batch import Batch, rows_of
from ringmap.clips.samplers.base import as_sampler
from ringmap.datasets.base import Dataset
from ringmap.datasets.episode import PictureAxes, channels_are_last
from ringmap.errors import InputError, NoClipsError, UnknownColumnError
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.values import flat, is_tensordict

__all__ = ["Share", "Source", "joined", "store_episodes", "torchrl_source"]


Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Any]

_WHERE = "OfflineToOnlineReplayBuffer"
_TORCHRL_NOTES = ("index", "_weight", "priority_weight")
"""The keys that TorchRL's samplers add to the stored rows."""


class Source:
    """One of the two sources of a mix. This one has no rows, and can't be written.

    `holder`: what has the rows; `deep`: whether the data that it returns were nested; `tensordict`: whether they were
    added as TensorDicts; `clip`: observations in a clip, and their stride; (1, 1) for rows; None if unknown, and of the
    items of a window.
    """

    deep = tensordict = False
    clip: tuple[int, int] | None = None

    def __init__(self, holder: Any = None) -> None:
        self.holder = holder

    @property
    def axes(self) -> PictureAxes:
        """The columns of pictures, and whether a draw has their channels first."""
        return {}

    @property
    def has_priorities(self) -> bool:
        """Whether the source draws by priority."""
        return False

    def __len__(self) -> int:
        """Return the number of rows, or clips, that can be drawn."""
        return 0

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        """Draw `count` rows or clips, flat, with ids and importance weights if the sampler has them."""
        raise NoClipsError(f"{_WHERE}.sample: there are no rows")

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Any:
        """Store rows, or episodes, and return their ids."""
        raise InputError(f"{where}: a {type(self.holder).__name__} can't be written; give a buffer or a capacity")

    def update_priorities(self, ids: Array, values: Array) -> int:
        """Set the priorities of drawn rows; return the number updated."""
        raise InputError(
            f"{_WHERE}.update_priorities: the online half does not draw by priority; give an online_storage that does"
        )

    def flush(self, notes: Mapping[str, Any]) -> None:
        """Force what is stored to the disk, with these notes where the source keeps any."""

    def recorded_by(self, sinks: Any, mix: Any) -> Any:
        """Return the sink that fills the source, as `Buffer.recorded_by`."""
        return sinks.refuse(self.holder)

    def state_dict(self) -> dict[str, Any]:
        """Return the source's own sampling state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue sampling from the state that `state_dict` returned."""


class DatasetSource(Source):
    """A ringmap dataset or view."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self.clip = (dataset.num_steps, dataset.frameskip) if dataset.cut.history else None

    @property
    def axes(self) -> PictureAxes:
        return {} if self.holder.items_are_rows else self.holder.picture_axes()

    def __len__(self) -> int:
        return len(self.holder)

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        return Batch(self.holder.items_at(rng.integers(0, len(self.holder), count)))


class BufferSource(Source):
    """A ringmap buffer, drawn by its own sampler.

    `draw`: draws so many rows or clips; `clip`: what it is cut into; `most`: whether a draw may have no more rows than
    are stored; `store`: stores data; None: `add`, by the names of its arguments.
    """

    def __init__(
        self,
        buffer: Any,
        draw: Callable[[int], Batch[Any]],
        clip: tuple[int, int] | None = None,
        most: bool = False,
        store: Callable[[Any, Any, Mapping[str, Any], str], None] | None = None,
    ) -> None:
        super().__init__(buffer)
        self.clip = clip
        self._draw, self._most, self._store = draw, most, _add if store is None else store

    @property
    def has_priorities(self) -> bool:
        sampler = self.holder.sampler
        return sampler is not None and as_sampler(sampler).has_priorities

    def __len__(self) -> int:
        self.holder.refresh()
        return len(self.holder)

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        if not self._most:
            return self._flat(self._draw(count), count)
        left, batch = count, None
        while left:
            asked = min(left, len(self.holder))
            part = self._flat(self._draw(asked), asked)
            batch = part if batch is None else _after(batch, part)
            left -= asked
        assert batch is not None
        return batch

    def _flat(self, batch: Batch[Any], count: int) -> Batch[Any]:
        """Return a batch in flat columns; ids and weights are attributes alone."""
        if not self.holder.holds_episodes:
            columns, deep = flat(batch, _WHERE)
            self.deep = self.deep or deep
            if batch.weights is not None:
                del columns["ids"], columns["weights"]
        elif self.clip == (1, 1):
            columns = rows_of(batch, self.holder.engine.schema, count)
        else:
            return batch
        return Batch(columns, batch.ids, batch.weights)

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Array:
        engine = self.holder.engine
        engine.writer(where)
        first = engine.source.head
        self._store(self.holder, data, notes, where)
        return np.arange(first, engine.source.head)

    def update_priorities(self, ids: Array, values: Array) -> int:
        if not self.has_priorities:
            return super().update_priorities(ids, values)
        found = self.holder.update_priorities(ids, values)
        return len(ids) if found is None else int(found)  # a user's sampler may return nothing

    def flush(self, notes: Mapping[str, Any]) -> None:
        self.holder.flush()

    def recorded_by(self, sinks: Any, mix: Any) -> Any:
        return self.holder.recorded_by(sinks, mix)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.holder.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.holder.load_state_dict(state)


def _add(buffer: Any, data: Any, notes: Mapping[str, Any], where: str) -> None:
    """Store rows by `add`, by the names of its arguments."""
    name = f"{type(buffer).__name__}.add"
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: expected a mapping of what {name} takes, got {type(data).__name__}")
    try:
        buffer.add(**data)
    except TypeError as error:  # argument names that it does not take, or too few of them
        raise InputError(f"{where}: {error}; give what {name} takes, by name, got {list(data)}") from error


def store_episodes(buffer: Any, data: Any, notes: Mapping[str, Any], where: str) -> None:
    """Store an episode, or several, in a `ReplayBuffer`."""
    if is_tensordict(data):
        data, _ = flat(data, where)
    episodes = [data] if isinstance(data, Mapping) else data
    if isinstance(episodes, str) or not isinstance(episodes, Iterable):
        raise InputError(
            f"{where}: the online half is a ReplayBuffer: expected an episode (column -> one value per step) "
            f"or several, got {type(data).__name__}"
        )
    for episode in episodes:
        buffer.write_episode(episode, notes=notes)


class RingSource(Source):
    """A ring of rows (steps.py), which remembers whether they came nested, and as TensorDicts."""

    def __init__(self, ring: Any) -> None:
        super().__init__(ring)
        self.clip = 1, 1
        self.deep = bool(ring.buffer.notes.get("deep"))
        self.tensordict = bool(ring.buffer.notes.get("tensordict"))

    def __len__(self) -> int:
        self.holder.buffer.refresh()
        return len(self.holder)

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        self.holder.buffer.refresh()
        return Batch(*self.holder.rows_at(self.holder.draw(count, rng)))

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Any:
        rows, deep = flat(data, where)
        made = is_tensordict(data)
        before = self.deep, self.tensordict
        now = self.deep or deep, self.tensordict or made
        # First: another thread that draws the new rows returns them in the type of the input.
        self.deep, self.tensordict = now
        try:
            add = self.holder.append if now == before else self.holder.add
            ids = add(rows, {**notes, "deep": now[0], "tensordict": now[1]}, where)
        except BaseException:
            self.deep, self.tensordict = before
            raise
        if not made:
            return ids
        import torch

        return torch.from_numpy(ids)

    def flush(self, notes: Mapping[str, Any]) -> None:
        if self.holder.buffer.mode == "r+":  # a pickled or forked copy only reads
            self.holder.buffer.flush(notes=notes)

    def recorded_by(self, sinks: Any, mix: Any) -> Any:
        return sinks.rows(self.holder, mix)


class TorchRLSource(Source):
    """A TorchRL replay buffer.

    One with TorchRL's uniform sampler is drawn by number from the mix's generator, so that it can be resumed; any
    other is drawn by its own sampler, which uses torch's generator. TorchRL holds the state.
    """

    tensordict = True

    def __init__(self, buffer: Any) -> None:
        super().__init__(buffer)
        self._uniform = type(getattr(buffer, "_sampler", None)).__name__ == "RandomSampler"

    def __len__(self) -> int:
        return len(self.holder)

    def draw(self, count: int, rng: np.random.Generator) -> Batch[Any]:
        if self._uniform:
            import torch

            batch = self.holder[torch.from_numpy(rng.integers(0, len(self.holder), count))]
        else:
            batch = self.holder.sample(count)
        if not is_tensordict(batch):
            raise InputError(f"{_WHERE}: the TorchRL buffer holds {type(batch).__name__}, expected TensorDicts")
        columns, deep = flat(batch, _WHERE)
        self.deep = self.deep or deep
        return Batch({name: v for name, v in columns.items() if name not in _TORCHRL_NOTES})

    def extend(self, data: Any, notes: Mapping[str, Any], where: str) -> Any:
        return self.holder.extend(data)


def torchrl_source(holder: Any) -> Source | None:
    """Return the source for a storage or buffer of TorchRL's; None for anything else. It imports nothing."""
    torchrl = sys.modules.get("torchrl.data")
    if torchrl is None:
        return None
    if isinstance(holder, torchrl.Storage):
        holder = torchrl.ReplayBuffer(storage=holder)
    return TorchRLSource(holder) if isinstance(holder, torchrl.ReplayBuffer) else None


def joined(offline: Columns, online: Columns, axes: PictureAxes, where: str) -> Columns:
    """Join two batches, in the column order of the first; `axes`: of its pictures."""
    if offline.keys() != online.keys():
        raise UnknownColumnError(
            f"{where}: the halves have different columns: only offline {sorted(offline.keys() - online.keys())}, "
            f"only online {sorted(online.keys() - offline.keys())}; store the same ones"
        )
    batch: Columns = {}
    for name, first in offline.items():
        second = online[name]
        spec, turned = axes.get(name, (None, False))
        if turned and spec is not None and channels_are_last(second, spec):
            raise InputError(
                f"{where}: column {name!r} comes with its channels first offline and last online; load with "
                "layout='HWC'"
            )
        if tuple(first.shape[1:]) != tuple(second.shape[1:]):
            raise InputError(
                f"{where}: column {name!r} has shape {tuple(first.shape[1:])} offline and "
                f"{tuple(second.shape[1:])} online; store it alike (for images: load with layout='HWC')"
            )
        batch[name] = _end_to_end(first, second)
    return batch


def _after(batch: Batch[Any], part: Batch[Any]) -> Batch[Any]:
    columns = {name: _end_to_end(values, part[name]) for name, values in batch.items()}
    weights = None if batch.weights is None else _end_to_end(batch.weights, part.weights)
    return Batch(columns, _end_to_end(batch.ids, part.ids), weights)


def _end_to_end(first: Any, second: Any) -> Any:
    """Return arrays or tensors of one column as one, in a dtype that holds both; on the device of the first."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        shape = len(first) + len(second), *first.shape[1:]
        return np.concatenate([first, second], out=empty(shape, np.result_type(first, second)))
    import torch

    begin, end = torch.as_tensor(first), torch.as_tensor(second)
    return torch.cat([begin, end.to(begin.device)])


class Share:
    """A fraction of each batch, initially `base`.

    Raises:
        InputError: `base` is not between 0 and 1, or the `rounding` is unknown.
    """

    def __init__(self, base: float, rounding: str, where: str) -> None:
        if not _inside(base):
            raise InputError(f"{where}: offline_fraction must lie between 0 and 1, both excluded, got {base!r}")
        if rounding not in ("round", "carry"):
            raise InputError(f"{where}: rounding must be one of ('round', 'carry'), got {rounding!r}")
        self.rounding = rounding
        self.base = self.fraction = float(base)
        self._carry = 0.0

    def anneal(self, step: float, total_steps: float, where: str) -> None:
        """Set the fraction to `base * max(0, 1 - step / total_steps)`, at most `base`."""
        try:
            left = 1 - step / total_steps if total_steps > 0 else math.nan
        except TypeError:
            left = math.nan
        if math.isnan(left):
            raise InputError(
                f"{where}: step must be a number, and total_steps must be positive, got {step!r} and {total_steps!r}"
            )
        self.fraction = min(self.base, self.base * max(0.0, left))

    def split(self, size: int) -> tuple[int, int]:
        """Return the number of offline and online rows in a batch of this size."""
        exact = self.fraction * size
        if self.rounding == "carry" and self.fraction:
            exact += self._carry
        offline = min(size, max(0, round(exact)))
        return offline, size - offline

    def drew(self, offline: int, size: int) -> None:
        """Record that a batch was returned."""
        if self.rounding == "carry" and self.fraction:
            self._carry += self.fraction * size - offline

    @property
    def state(self) -> dict[str, Any]:
        """Base, fraction and the carried remainder, as JSON values."""
        return {"base": self.base, "fraction": self.fraction, "carry": self._carry}

    def resume(self, state: Mapping[str, Any], whatever_base: bool) -> None:
        """Continue from a `state`; restore the fraction only for the same base, or with `whatever_base`."""
        try:
            base, fraction, carry = (float(state[name]) for name in ("base", "fraction", "carry"))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the state of the mix is none ({error!r}); nothing was changed") from None
        if not _inside(base) or not 0 <= fraction <= base or not math.isfinite(carry):
            raise InputError(
                f"the state of the mix has base {base}, fraction {fraction}, carry {carry}: expected 0 <= fraction <= "
                "base < 1; nothing was changed"
            )
        if whatever_base:
            self.base = base
        if base == self.base:  # else this call asks for another mix
            self.fraction = fraction
        self._carry = carry


def _inside(fraction: Any) -> bool:
    try:
        return math.isfinite(fraction) and 0 < fraction < 1
    except TypeError:
        return False
