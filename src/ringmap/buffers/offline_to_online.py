"""A buffer that mixes an offline dataset with online experience: each batch has a fixed fraction of both.

    offline dataset --- round(fraction * B) rows --+
                                                   +--> join --> transform --> batch [B]
    online ring     --- the rest ------------------+
         ^
         extend

Invariants: the offline data are never changed; a batch has offline rows first, and exactly as many as
`split` returns; both parts have the same columns, or nothing is returned.
Not here: how rows are drawn and stored, and how many (sources.py, steps.py), ids of datasets
(formats/catalog/load.py).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers.base import Buffer
from ringmap.buffers.batch import Batch, Emit, as_tensordict
from ringmap.buffers.options import check_whole
from ringmap.buffers.row_episodes import RowSource
from ringmap.buffers.sources import DatasetSource, RingSource, Share, Source, joined, torchrl_source
from ringmap.buffers.steps import OverRing, StepRing
from ringmap.buffers.workers import WorkerGenerator
from ringmap.clips.window import WindowSpec
from ringmap.datasets.base import Dataset
from ringmap.datasets.stored import StoredDataset
from ringmap.errors import ClosedError, EnvironmentFault, InputError, NoClipsError, RoleError
from ringmap.storage.columns.values import as_array, nested
from ringmap.storage.disk.calls import note_nested
from ringmap.storage.disk.files import Disk

__all__ = ["OfflineToOnlineReplayBuffer"]


Array = np.ndarray[Any, np.dtype[Any]]

_WHERE = "OfflineToOnlineReplayBuffer"


class OfflineToOnlineReplayBuffer(OverRing):
    """An offline dataset and a growing online buffer, sampled together.

    Batches are rows, `(B, ...)`, if the offline data are cut into clips of one step, and clips, `(B, history, ...)`, if
    both sources are cut into the same longer clips. A batch is a dict of NumPy arrays; a TensorDict if the offline
    data or an input of `extend` was one; or the type that `to` names.

    Args:
        offline_dataset: a ringmap dataset, view or buffer, or a TorchRL buffer; or a path or id for `load_dataset`
            ("minari:...", "d4rl:...", "lerobot:...").
        online_storage: the target of online data: a ringmap buffer (of a `ReplayBuffer` `extend` takes episodes), or a
            TorchRL storage or buffer.
        online_capacity: instead, the rows of a ring that is made here; it takes the columns of the first `extend`.
        offline_fraction: fraction of offline rows in a batch, between 0 and 1.
        batch_size: of `sample()` without one. A dataset id needs it; a loader with such an argument receives it.
        transform: batch -> batch, applied to what `sample` returns.
        rounding: "round": `round(fraction * B)` offline rows in every batch. "carry": the remainder of rounding
            is carried to the next batch, so that the fraction is exact on average.
        provenance: name of a bool column that is True for offline rows; None for none.
        path: directory of the ring that is made for `online_capacity`; a path that holds a ring is opened, with the
            mixing state as of the last `extend` or `flush`.
        to: "numpy", "torch" or "tensordict"; None for the type that fits the data, as above.
        device: where tensors go.
        pin_memory: whether they go there through page-locked memory.
        seed: of the generator that draws. Used when the buffer is made, not when a path is opened again.
        durability: of the ring at `path`, as for `ReplayBuffer`.
        disk: of the ring, as for `ReplayBuffer`.
        window: what an item of both halves holds, as for `ReplayBuffer.sample`: from episodes, `{"sum": NStep(1,
            next=["obs"])}` with `columns=["obs", "action", "sum"]`, `anchors=slice(0, -1)` gives s, a, r and s', and no
            observation is stored twice.
        columns: names of the columns of both halves to read; None: all.
        anchors: the steps to leave out at the ends of episodes, as for `ReplayBuffer.sample`.
        dataset_kwargs: for the loader of an id or a path.

    Raises:
        InputError: both or neither of the online arguments; a fraction that is not between 0 and 1; an id without
            `batch_size`; dataset options with an object; sources cut into different clips.

    Cost: a draw from each source, and one copy to join them.

    Source: TorchRL, OfflineToOnlineReplayBuffer (reference page).

    Example:
        >>> from ringmap.data import OfflineToOnlineReplayBuffer, ReplayBuffer
        >>> offline = ReplayBuffer(max_steps=100)
        >>> offline.write_episode({"obs": np.zeros((20, 3))})
        >>> rb = OfflineToOnlineReplayBuffer(offline, online_capacity=50, offline_fraction=0.25, seed=0)
        >>> rb.extend({"obs": np.ones((10, 3))})
        array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        >>> rb.sample(8)["obs"][:, 0].tolist()
        [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        offline_dataset: Any,
        *,
        online_storage: Any = None,
        online_capacity: int | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        rounding: str = "round",
        provenance: str | None = None,
        path: str | os.PathLike[str] | None = None,
        to: str | None = None,
        device: Any = None,
        pin_memory: bool = False,
        seed: int | None = None,
        durability: str = "process",
        disk: Disk | None = None,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        **dataset_kwargs: Any,
    ) -> None:
        if (online_storage is None) == (online_capacity is None):
            raise InputError(
                f"{_WHERE}: give either online_storage or online_capacity, got "
                f"{'neither' if online_storage is None else 'both'}"
            )
        self._share = Share(offline_fraction, rounding, _WHERE)
        if batch_size is not None:
            batch_size = positive(_WHERE, "batch_size", batch_size)
        if online_capacity is not None:
            online_capacity = positive(_WHERE, "online_capacity", online_capacity)
        elif path is not None:
            raise InputError(f"{_WHERE}: path is for the ring of online_capacity; online_storage has its own home")
        if transform is not None and not callable(transform):
            raise InputError(f"{_WHERE}: transform must be a function of the batch, got {transform!r}")
        if provenance is not None and (not isinstance(provenance, str) or not provenance):
            raise InputError(f"{_WHERE}: provenance must be a column's name, got {provenance!r}")
        self._out = Emit(to, device, bool(pin_memory))
        self._out.check(_WHERE)
        offline = self._opened(offline_dataset, batch_size, dataset_kwargs)
        given = {"window": window, "columns": None if columns is None else tuple(columns), "anchors": anchors}
        items = {name: value for name, value in given.items() if value is not None}
        self._offline = _source_of(offline, "offline_dataset", items)
        self._online: Source
        self._ring: StepRing | None = None
        if online_capacity is not None:
            if self._offline.clip not in (None, (1, 1)):
                raise InputError(
                    f"{_WHERE}: the offline data is cut into clips of {self._offline.clip} (num_steps, frameskip), "
                    "but online_capacity makes a ring of rows; give online_storage=ReplayBuffer(...) cut alike"
                )
            self._ring = StepRing(online_capacity, path=path, where=_WHERE, durability=durability, disk=disk)
            self._online = RingSource(self._ring)
        else:
            self._online = _source_of(online_storage, "online_storage", items)
            clips = self._offline.clip, self._online.clip
            if None not in clips and clips[0] != clips[1]:
                raise InputError(
                    f"{_WHERE}: the offline data is cut into clips of {clips[0]} (num_steps, frameskip), the online "
                    f"storage into {clips[1]}; cut both alike"
                )
        self._given = offline
        self.batch_size = batch_size
        self.transform = transform
        self.provenance = provenance
        self._draws = WorkerGenerator(seed, _WHERE)
        if self._ring is not None:
            saved = self._ring.buffer.notes.get("mix")
            if saved is not None:
                self._resume(saved)

    @staticmethod
    def _opened(given: Any, batch_size: int | None, options: dict[str, Any]) -> Any:
        if not isinstance(given, str | Path):
            if options:
                raise InputError(
                    f"{_WHERE}: options {sorted(options)} are for loading a dataset by its id or path, but "
                    f"offline_dataset is a {type(given).__name__} already; give them to its own constructor"
                )
            return given
        if batch_size is None:
            raise InputError(f"{_WHERE}: batch_size is needed with a dataset by id or path, {given!r}")
        from ringmap.formats.catalog.load import load_dataset, takes

        if takes(str(given), "batch_size"):
            options = {"batch_size": batch_size, **options}
        return load_dataset(given, **options)

    # -- the mix -----------------------------------------------------------------------------

    @property
    def offline_buffer(self) -> Any:
        """The offline data, as given or loaded."""
        return self._given

    @property
    def online_buffer(self) -> Any:
        """The target of `extend`: the `online_storage`, or the ring made for `online_capacity`."""
        return self._online.holder

    @property
    def offline_fraction(self) -> float:
        """The fraction of offline rows, after annealing."""
        return self._share.fraction

    @property
    def rounding(self) -> str:
        """How a fraction that does not divide the batch is rounded."""
        return self._share.rounding

    _instead = "draw batches with sample(batch_size)"

    def __len__(self) -> int:
        """Return the number of rows, or clips, in both sources."""
        return len(self._offline) + len(self._online)

    def anneal(self, step: int, total_steps: int) -> None:
        """Set the fraction of offline rows to `base * max(0, 1 - step / total_steps)`, at most `base`.

        Raises:
            InputError: `total_steps` is not positive, or an argument is not a number.
        """
        self._share.anneal(step, total_steps, f"{_WHERE}.anneal")

    def split(self, batch_size: int) -> tuple[int, int]:
        """Return the number of offline and online rows in the next batch of this size."""
        return self._share.split(batch_size) if len(self._online) else (batch_size, 0)

    def sample(self, batch_size: int | None = None, *, nest: bool = False) -> Any:
        """Draw a batch, offline rows first.

        Before the first `extend` all rows are offline. With a fraction annealed to 0 all are online.

        Args:
            batch_size: B; None for that of the constructor.
            nest: return the columns `obs/a`, `obs/b` as `{"obs": {"a": ..., "b": ...}}`, as is done anyway where a
                source gives nested batches.

        Returns:
            column -> `(B, ...)`, transformed. Where the sources differ in dtype, a dtype that holds both. If the online
            source draws by priority: `ids`, -1 for offline rows, and `weights`, 1 for offline rows, as columns and as
            attributes.

        Raises:
            InputError: no batch size; a column whose shape differs between the sources; or `nest`, and a column has
                the name of what would hold another one.
            UnknownColumnError: (KeyError) only one source has a column.
            NoClipsError: both sources are empty.
        """
        where = f"{_WHERE}.sample"
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise InputError(f"{where}: no batch_size: pass one here, or to the constructor for all calls")
        positive(where, "batch_size", size)
        size = operator.index(size)
        mixed = bool(len(self._online))  # read once: another thread may extend it meanwhile
        offline, online = self._share.split(size) if mixed else (size, 0)
        parts = []
        for half, count in ((self._offline, offline), (self._online, online)):
            if count and not len(half):
                raise NoClipsError(f"{where}: {count} rows of {size} are to come from the offline data, which is empty")
            if count:
                parts.append(half.draw(count, self._draws.rng))
        batch: dict[str, Any] = parts[0] if len(parts) == 1 else joined(parts[0], parts[1], self._offline.axes, where)
        if mixed:
            self._share.drew(offline, size)
        notes: dict[str, Any] = {}
        if self.provenance is not None:
            notes[self.provenance] = np.arange(size) < offline
        ids = None
        if self._online.has_priorities:
            ids, weights = np.full(size, -1), np.ones(size, np.float32)
            if online:
                drawn = parts[-1]
                if drawn.ids is not None:
                    ids[offline:] = drawn.ids
                if drawn.weights is not None:
                    weights[offline:] = drawn.weights
            notes |= {"ids": ids, "weights": weights}
        for name in notes:
            if name in batch:
                raise InputError(
                    f"{where}: {name!r} is the name of a column that is stored, and is needed for "
                    f"{'provenance; choose another' if name == self.provenance else 'priorities; rename the column'}"
                )
        batch = {**batch, **notes}
        made = self._as_asked(batch, size, nest, where)
        if isinstance(made, dict):
            made = Batch(made, ids, None if ids is None else made["weights"])
        return made if self.transform is None else self.transform(made)

    def _as_asked(self, batch: dict[str, Any], size: int, nest: bool, where: str) -> Any:
        deep, to = nest or self._offline.deep or self._online.deep, self._out.plain
        if self._out.to is None and (self._offline.tensordict or self._online.tensordict):
            to = "tensordict"
        columns = self._out.arrays(batch) if to == "numpy" else self._out.tensors(batch)
        if to == "tensordict":
            return as_tensordict(columns, size, deep, where)
        return nested(columns, where) if deep else columns

    def extend(self, data: Any) -> Any:
        """Add experience to the online source; the offline data are never changed.

        Args:
            data: rows: column -> `(n, ...)`, possibly nested, or a TensorDict of batch size `[n]`. Where the
                online source is a `ReplayBuffer`: an episode, or several.

        Returns:
            The ids of the rows, int64 `(n,)`: a tensor for a TensorDict, else an array. Ids of a ring are
            never reused.

        Raises:
            InputError: the online source refuses the data. Nothing was changed.
        """
        where = f"{_WHERE}.extend"
        try:
            return self._online.extend(data, self._notes(), where)
        except (InputError, RoleError, EnvironmentFault) as error:
            *rest, said = error.args
            if str(said).startswith(where):
                raise
            raise type(error)(*rest, f"{where}: {said}") from error  # it names a call of the source

    def recorded_by(self, sinks: Any, mix: Any = None) -> Any:
        """Return the sink that fills the online source."""
        return self._online.recorded_by(sinks, self)

    def rows(self, batch_size: int = 1024) -> Iterator[dict[str, Any]]:
        """Yield the rows of the ring that was made here, oldest first, as arrays, column -> `(n, ...)`.

        Args:
            batch_size: rows at a time.

        Raises:
            InputError: the online source is yours.
            LappedError: the writer evicted rows before they were read.
        """
        batch_size = positive(f"{_WHERE}.rows", "batch_size", batch_size)
        ring = self._own_ring("rows")
        ring.buffer.refresh()
        ids, schema = ring.ids(), ring.schema
        for begin in range(0, len(ids), batch_size):
            part = ids[begin : begin + batch_size]
            yield {name: ring.column(name, part) for name in (schema.names if schema else ())}

    def episode_dataset(self, **options: Any) -> StoredDataset:
        """Return the rows of the ring that was made here as episodes, as they are now: for `convert`.

        An episode ends where `terminated`, `truncated` or `done` says so (also below `next`), and, with next
        observations, where the
        next row does not begin with them: rows of several environments that were added in turn are episodes of one row.
        `reward_at` is "same". Sides of `split` go by an episode's place among those that are stored now.

        Args:
            options: of a dataset: `num_steps`, `transform`, `keys_to_load`, ...; arrays by default (`output`,
                `layout`).

        Raises:
            InputError: the online source is yours, or no column tells where an episode ends.
        """
        source = RowSource(self._own_ring("episode_dataset"))
        return StoredDataset(source, **{"output": "numpy", "layout": "HWC", **options})

    def _own_ring(self, method: str) -> StepRing:
        if self._ring is None:
            raise InputError(
                f"{_WHERE}.{method}: the online half is a {type(self.online_buffer).__name__} of yours; read it by its "
                "own means"
            )
        return self._ring

    def update_priorities(self, ids: Any, values: Any) -> int:
        """Set the priorities of online rows, if the online source draws by priority; return the number updated.

        Args:
            ids: `(B,)`, from `batch.ids`; the -1 of offline rows are skipped.
            values: `(B,)`, their priorities.

        Raises:
            InputError: the online source has no priorities.
        """
        where = f"{_WHERE}.update_priorities"
        asked, given = (
            as_array(ids, f"{where}: ids", "id"),
            as_array(values, f"{where}: values", "value"),
        )
        if asked.shape != given.shape or asked.ndim != 1:
            raise InputError(f"{where}: expected ids and values of one shape (B,), got {asked.shape} and {given.shape}")
        online = asked >= 0
        return self._online.update_priorities(asked[online], given[online])

    # -- state -------------------------------------------------------------------------------

    def _mix(self) -> dict[str, Any]:
        return {**self._share.state, "rng": self._draws.state}

    def _notes(self) -> dict[str, Any]:
        return {"mix": self._mix()}

    def _resume(self, state: Mapping[str, Any], whatever_base: bool = False) -> None:
        rng = self._draws.state
        self._draws.state = state["rng"]
        try:
            self._share.resume(state, whatever_base)
        except BaseException:
            self._draws.state = rng
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state of mixing and sampling, to store with a checkpoint."""
        return {
            **self._mix(),
            "offline": self._offline.state_dict(),
            "online": self._online.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue mixing from the state that `state_dict` returned, over the same data.

        Raises:
            InputError: the state is not valid. Nothing was changed.
        """
        before = self.state_dict()
        check_whole(f"{_WHERE}.load_state_dict", state, before)
        try:
            self._load(state)
        except BaseException:
            self._load(before)
            raise

    def _load(self, state: Mapping[str, Any]) -> None:
        self._offline.load_state_dict(state["offline"])
        self._online.load_state_dict(state["online"])
        self._resume(state, whatever_base=True)

    def flush(self) -> None:
        """Force the online rows, and the mixing state, to the disk, if the ring was made here."""
        if note_nested(self.flush):
            return
        self._online.flush(self._notes())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the online ring and the mixing state to a new directory, for `open`.

        Raises:
            InputError: the online source is not a ring made for `online_capacity`: save that source itself.
            ExistsError: the directory exists.
        """
        if self._ring is None:
            raise InputError(
                f"{_WHERE}.save: the online half is a {type(self.online_buffer).__name__} of yours; save it by its "
                "own means, and state_dict() beside it"
            )
        self._ring.save(path, self._notes(), f"{_WHERE}.save")

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], offline_dataset: Any = None, mode: str | None = None, **options: Any
    ) -> OfflineToOnlineReplayBuffer:
        """Open a directory of `path=` or `save`, over the same offline data.

        Args:
            path: the directory.
            offline_dataset: as for the constructor; None: the rows of the ring alone, for reading.
            mode: "r" for a live reader of the ring; "r+" for its writer; None: "r+" with offline data, else "r".
            options: as for the constructor, without `online_capacity`. `offline_fraction` defaults to the stored one.

        Raises:
            InputError: mode "r+" without offline data.
            NotFoundError, UnknownFormatError, CorruptError, LockedError: as `ReplayBuffer.open`.
        """
        where = f"{_WHERE}.open"
        mode = mode or ("r" if offline_dataset is None else "r+")
        if mode == "r":
            return cls._reader(path, offline_dataset, options)
        if mode != "r+":
            raise InputError(f"{where}: mode must be 'r' (read) or 'r+' (write), got {mode!r}")
        if offline_dataset is None:
            raise InputError(f"{where}: {os.fspath(path)} is written over offline data; give offline_dataset=, or read")
        capacity = StepRing.manifest_at(path, where, options.get("disk")).capacity
        made = cls(offline_dataset, online_capacity=capacity, path=path, **options)
        assert made._ring is not None
        saved = made._ring.buffer.notes.get("mix")
        if saved is not None and "offline_fraction" not in options:
            made._resume(saved, whatever_base=True)
        return made

    @classmethod
    def _reader(
        cls, path: str | os.PathLike[str], offline: Any, options: dict[str, Any]
    ) -> OfflineToOnlineReplayBuffer:
        ring = StepRing.open(path, where=f"{_WHERE}.open", disk=options.pop("disk", None))
        try:
            made = cls(Source() if offline is None else offline, online_storage=ring, **options)
        except BaseException:
            ring.close()
            raise
        made._ring = ring
        saved = ring.notes().get("mix")
        if offline is None:
            made._given = None
            made._share.anneal(1, 1, _WHERE)  # no row is offline
        elif saved is not None and "offline_fraction" not in options:
            made._share.resume(saved, True)
        return made

    def __repr__(self) -> str:
        try:
            halves = f"offline={len(self._offline)}, online={len(self._online)}"
        except ClosedError:
            halves = "closed"
        return (
            f"{_WHERE}({halves}, offline_fraction={self.offline_fraction:g}, rounding={self.rounding!r}, "
            f"batch_size={self.batch_size})"
        )


def _source_of(holder: Any, what: str, items: Mapping[str, Any]) -> Source:
    """Return the source for a dataset or buffer; `what`: the argument to name in an error."""
    if isinstance(holder, Source):
        return holder
    of_episodes = holder.holds_episodes if isinstance(holder, Buffer) else isinstance(holder, Dataset)
    if items and not of_episodes:
        raise InputError(
            f"{_WHERE}: {sorted(items)} are for datasets and buffers of episodes, and {what} is a "
            f"{type(holder).__name__}; leave them out, and give both halves the same columns"
        )
    made: Source | None
    if isinstance(holder, Buffer):
        made = holder.mix_source(items)
    else:
        made = DatasetSource(holder.view(**items) if items else holder) if of_episodes else torchrl_source(holder)
    if made is None:
        raise InputError(
            f"{_WHERE}: {what} must be a dataset or a buffer of ours, or a TorchRL buffer, got {type(holder).__name__}"
        )
    return made
