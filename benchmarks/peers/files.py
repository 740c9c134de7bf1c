"""Other people's files, filled with our episodes: random clips of them, each at its library's best.

    file -> read(starts) -> column -> (B, H, ...)        a whole batch in one call, small columns from memory
         -> batches(workers)                             in a DataLoader, or in threads of the library

Handles stay open and a clip is one slice. Two of them, litdata and webdataset, are streams: they can't draw
any clip. Their files hold ready clips, which they shuffle within a buffer.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.stored import Stored
from benchmarks.peers.rivals import Field, Rival, expect_random

__all__ = [
    "array_record_grain",
    "hdf5",
    "hugging_face",
    "lance_rows",
    "litdata_stream",
    "tensorstore_zarr",
    "webdataset_tar",
    "write_lance",
]

Array = np.ndarray[Any, np.dtype[Any]]
Read = Callable[[Array], dict[str, Array]]

_SMALL_NBYTES = 64 << 20
_SHARD = 64 << 20


@dataclass
class Clips:
    """A map-style dataset of clips that a `DataLoader` asks for a batch at a time.

    `open` gives `read`: first steps `(B,)` -> column -> `(B, H, ...)`; each process opens its own.
    """

    open: Callable[[], Read]
    length: int
    history: int
    num_episodes: int
    _read: Read | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.num_episodes * (self.length - self.history + 1)

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        import torch

        found = self.read(self.starts(np.asarray(numbers)))
        return {name: torch.from_numpy(values) for name, values in found.items()}

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: values[0] for name, values in self.__getitems__([number]).items()}

    def starts(self, numbers: Array) -> Array:
        """Return the rows at which these clips begin."""
        episodes, steps = np.divmod(numbers, self.length - self.history + 1)
        found: Array = episodes * self.length + steps
        return found

    def read(self, starts: Array) -> dict[str, Array]:
        """Return the clips that begin at these rows."""
        if self._read is None:
            self._read = self.open()
        return self._read(starts)


def _clips(field: Field, open: Callable[[], Read]) -> Clips:
    return Clips(open, field.stored.length, field.history, field.stored.num_episodes)


def _as_it_is(batch: Any) -> Any:
    return batch


def _loaded(field: Field, clips: Clips) -> Callable[[int], Iterable[Any]]:
    """Return passes of a `DataLoader` that fetches whole batches."""

    def batches(workers: int) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        ahead = {"prefetch_factor": 2} if workers else {}
        some: Any = clips
        return DataLoader(some, field.batch_size, shuffle=True, num_workers=workers, collate_fn=_as_it_is, **ahead)

    return batches


def _ahead(field: Field, clips: Clips, depth: int) -> Callable[[int], Iterable[Any]]:
    """Return passes of batches. Threads read several batches at the same time, as the library allows it."""

    def batches(_: int) -> Iterator[Any]:
        order = np.random.default_rng().permutation(len(clips))
        starts = iter(np.split(order, range(field.batch_size, len(order), field.batch_size)))
        pool, reading = ThreadPoolExecutor(depth), deque[Any]()
        try:
            for numbers in starts:
                reading.append(pool.submit(clips.read, clips.starts(numbers)))
                if len(reading) > depth:
                    yield reading.popleft().result()
            while reading:
                yield reading.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    return batches


def _steps(starts: Array, history: int) -> Array:
    found: Array = starts[:, None] + np.arange(history)
    return found


def _write_small(field: Field, folder: Path) -> None:
    """Keep the columns but the pixels as arrays beside a file that is good at large rows alone."""
    chunks = [{n: v for n, v in chunk.items() if n != "pixels"} for chunk in field.stored.chunks()]
    for name in set(chunks[0]) - {"episode"}:
        np.save(folder / f"{name}.npy", np.concatenate([chunk[name] for chunk in chunks]))


def _small(folder: Path) -> dict[str, Array]:
    return {path.stem: np.load(path) for path in folder.glob("*.npy")}


# -- HDF5 ----------------------------------------------------------------------------------------


def hdf5(field: Field) -> Rival:
    """h5py: contiguous, not compressed; a slice for each clip."""
    import h5py

    path, done = field.folder / "clips.h5", 0
    if not path.exists():
        with h5py.File(path, "w") as file:
            for name, values in field.stored.first.items():
                file.create_dataset(name, (field.stored.num_steps, *values.shape[1:]), values.dtype)
            for chunk in field.flat():
                numbers = chunk.pop("episode")
                for name, values in chunk.items():
                    file[name][done : done + len(numbers)] = values
                done += len(numbers)
    history = field.history

    def open_file() -> Read:
        columns = dict(h5py.File(path).items())  # open as long as `read` is
        small = {n: c[()] for n, c in columns.items() if c.nbytes < _SMALL_NBYTES and n != "pixels"}
        large = {name: c for name, c in columns.items() if name not in small}

        def read(starts: Array) -> dict[str, Array]:
            found = {name: values[_steps(starts, history)] for name, values in small.items()}
            for name, column in large.items():
                out = np.empty((len(starts), history, *column.shape[1:]), column.dtype)
                for i, start in enumerate(starts.tolist()):
                    out[i] = column[start : start + history]
                found[name] = out
            return found

        return read

    return Rival(
        f"a Dataset over h5py {version('h5py')}",
        in_files=True,
        batches=_loaded(field, _clips(field, open_file)),
        workers=4,
        setting="handles kept, a slice for each clip into one batch, small columns in memory, DataLoader of 4 workers, "
        "prefetch_factor=2",
    )


# -- Lance ---------------------------------------------------------------------------------------


def write_lance(field: Field) -> None:
    """Write the steps as rows of a Lance dataset. Its encoders take a gigabyte, so not where memory is limited."""
    import lance
    import pyarrow as pa

    first = field.stored.first
    widths = {name: int(np.prod(values.shape[1:], dtype=int)) for name, values in first.items()}
    kinds = {name: pa.from_numpy_dtype(values.dtype) for name, values in first.items()}
    schema = pa.schema([(name, pa.list_(kinds[name], width)) for name, width in widths.items()])

    def rows() -> Iterable[Any]:
        for chunk in field.flat():
            columns = [
                pa.FixedSizeListArray.from_arrays(chunk[name].reshape(-1), width) for name, width in widths.items()
            ]
            yield pa.record_batch(columns, schema=schema)

    lance.write_dataset(rows(), str(field.folder / "clips.lance"), schema=schema)


def lance_rows(field: Field) -> Rival:
    """Lance: one row for each step, written by pylance; `take` of the steps of all clips, as NumPy arrays."""
    import lance

    if not (field.folder / "clips.lance").exists():
        write_lance(field)
    first, history = field.stored.first, field.history

    def open_file() -> Read:
        dataset = lance.dataset(str(field.folder / "clips.lance"))

        def read(starts: Array) -> dict[str, Array]:
            found = dataset.take(_steps(starts, history).reshape(-1))
            clips = {}
            for name, values in first.items():
                rows = found[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                clips[name] = rows.reshape(len(starts), history, *values.shape[1:])
            return clips

        return read

    return Rival(
        f"Lance {version('pylance')}, take",
        in_files=True,
        batches=_ahead(field, _clips(field, open_file), 3),
        workers=3,
        setting="take() of a whole batch, its own I/O threads, 3 batches in flight",
    )


# -- tensorstore ---------------------------------------------------------------------------------


def tensorstore_zarr(field: Field) -> Rival:
    """tensorstore: Zarr 3, shards of 1,000 steps, not compressed, a chunk for each step."""
    import tensorstore

    folder, first, history = field.folder / "tensorstore", field.stored.first, field.history
    frame, num_steps = first["pixels"].shape[1:], field.stored.num_steps
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 32 << 20}, "file_io_concurrency": {"limit": 64}})
    inner = {"chunk_shape": [1, *frame], "codecs": [{"name": "bytes"}]}
    shard = [min(1000, num_steps), *frame]
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder / "pixels")},
        "recheck_cached_data": "open",
    }
    new = {
        "shape": [num_steps, *frame],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
    if not folder.exists():
        folder.mkdir()
        _write_small(field, folder)
        out, done = tensorstore.open({**spec, "metadata": new, "create": True}).result(), 0
        for chunk in field.stored.chunks(1000):
            rows = chunk["pixels"]
            out[done : done + len(rows)].write(rows).result()
            done += len(rows)

    def open_file() -> Read:
        rows, small = tensorstore.open(spec, context=context).result(), _small(folder)

        def read(starts: Array) -> dict[str, Array]:
            steps = _steps(starts, history)
            pixels = rows[tensorstore.d[0][steps.reshape(-1)]].read().result()
            found = {name: values[steps] for name, values in small.items()}
            return {**found, "pixels": pixels.reshape(*steps.shape, *frame)}

        return read

    return Rival(
        f"tensorstore {version('tensorstore')}, Zarr 3",
        in_files=True,
        batches=_ahead(field, _clips(field, open_file), 2),
        workers=2,
        setting="sharded, not compressed, a chunk for each step, one indexed read a batch, file_io_concurrency=64, 2 "
        "batches in flight",
    )


# -- array_record and grain ----------------------------------------------------------------------


def array_record_grain(field: Field) -> Rival:
    """array_record and grain: a record for each step, `group_size:1`, not compressed."""
    import grain
    from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

    folder, first, history = field.folder / "array_record", field.stored.first, field.history
    path = str(folder / "pixels.arrayrecord")
    if not folder.exists():
        folder.mkdir()
        _write_small(field, folder)
        writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
        for episode in field.stored:
            for frame in episode["pixels"]:
                writer.write(frame.tobytes())
        writer.close()
    shape = first["pixels"].shape[1:]

    def open_file() -> Read:
        options = "readahead_buffer_size:0,max_parallelism:32"
        reader, small = ArrayRecordReader(path, options=options), _small(folder)

        def read(starts: Array) -> dict[str, Array]:
            steps = _steps(starts, history)
            out = np.empty((steps.size, *shape), np.uint8)
            for row, record in zip(out, reader.read(steps.reshape(-1).tolist()), strict=True):
                row[...] = np.frombuffer(record, np.uint8).reshape(shape)
            found = {name: values[steps] for name, values in small.items()}
            return {**found, "pixels": out.reshape(*steps.shape, *shape)}

        return read

    clips = _clips(field, open_file)

    def batches(_: int) -> Iterable[Any]:
        drawn = grain.MapDataset.range(len(clips)).shuffle(seed=0).batch(field.batch_size)
        read = drawn.map(lambda numbers: clips.read(clips.starts(np.asarray(numbers))))
        return read.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=4))

    clips.read(np.zeros(1, int))  # opened before its threads all would
    return Rival(
        f"array_record {version('array-record')}, grain {version('grain')}",
        in_files=True,
        batches=batches,
        workers=4,
        setting="group_size:1, a parallel read a batch, no readahead, grain ReadOptions(num_threads=4, "
        "prefetch_buffer_size=4)",
    )


# -- Hugging Face --------------------------------------------------------------------------------


def hugging_face(field: Field) -> Rival:
    """Hugging Face datasets: a row for each step, in an Arrow file that it maps, NumPy format."""
    import datasets
    import pyarrow as pa

    folder, first, history = field.folder / "hugging_face", field.stored.first, field.history
    shape = first["pixels"].shape[1:]
    path, width = folder / "pixels.arrow", int(np.prod(shape))
    if not folder.exists():
        folder.mkdir()
        _write_small(field, folder)
        schema = pa.schema([("pixels", pa.list_(pa.uint8(), width))])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for chunk in field.stored.chunks(1000):
                rows = pa.FixedSizeListArray.from_arrays(chunk["pixels"].reshape(-1), width)
                writer.write_batch(pa.record_batch([rows], schema=schema))

    def open_file() -> Read:
        rows, small = datasets.Dataset.from_file(str(path)).with_format("numpy"), _small(folder)
        if field.threads:  # it offers no way to say so itself
            for chunk in rows.data.column("pixels").chunks:
                values = chunk.values.buffers()[1]
                expect_random(values.address, values.size)

        def read(starts: Array) -> dict[str, Array]:
            steps = _steps(starts, history)
            pixels = np.asarray(rows[steps.reshape(-1).tolist()]["pixels"])
            found = {name: values[steps] for name, values in small.items()}
            return {**found, "pixels": pixels.reshape(*steps.shape, *shape)}

        return read

    return Rival(
        f"Hugging Face datasets {version('datasets')}",
        in_files=True,
        batches=_ahead(field, _clips(field, open_file), 2),
        workers=2,
        setting='Arrow, with_format("numpy"), a whole batch of indices, map told MADV_RANDOM, 2 batches in flight; '
        "workers of a DataLoader need more memory than there is",
    )


# -- streams -------------------------------------------------------------------------------------


def _cut(stored: Stored, history: int) -> Iterator[dict[str, Array]]:
    """Yield clips that do not overlap. A stream with all clips would store each step 4 times."""
    for episode in stored:
        for start in range(0, stored.length - history + 1, history):
            yield {name: rows[start : start + history] for name, rows in episode.items()}


def _packed(clip: Mapping[str, Array]) -> bytes:
    return b"".join(clip[name].tobytes() for name in sorted(clip))


def _unpacked(rows: Iterable[bytes], first: Mapping[str, Array], history: int) -> dict[str, Array]:
    """Return a batch of what `_packed` packed."""
    packed = np.stack([np.frombuffer(row, np.uint8) for row in rows])
    found, at = {}, 0
    for name in sorted(first):
        values = first[name]
        nbytes = values[0].nbytes * history
        part = np.ascontiguousarray(packed[:, at : at + nbytes]).view(values.dtype)
        found[name] = part.reshape(len(packed), history, *values.shape[1:])
        at += nbytes
    return found


@dataclass
class _Collate:
    """A batch of packed clips as tensors; picklable, for workers."""

    first: dict[str, Array]
    history: int

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        import torch

        packed = [row["clip"] if isinstance(row, dict) else row for row in rows]
        found = _unpacked(packed, self.first, self.history)
        return {name: torch.from_numpy(values) for name, values in found.items()}


def webdataset_tar(field: Field) -> Rival:
    """webdataset: ready clips in tar files of 64 MB, shuffled in a buffer of 1,000."""
    import webdataset

    folder = field.folder / "webdataset"
    if not folder.exists():
        folder.mkdir()
        pattern = str(folder / "%06d.tar")
        with webdataset.ShardWriter(pattern, maxsize=_SHARD, verbose=0) as sink:
            for number, clip in enumerate(_cut(field.stored, field.history)):
                sink.write({"__key__": f"{number:09d}", "clip": _packed(clip)})
    tars = sorted(map(str, folder.glob("*.tar")))
    collate = _Collate({n: v[:1] for n, v in field.stored.first.items()}, field.history)

    def batches(workers: int) -> Iterable[Any]:
        used = min(workers, len(tars))
        files = webdataset.WebDataset(tars, shardshuffle=len(tars), empty_check=False)
        clips = files.shuffle(1000).batched(field.batch_size, collation_fn=collate)
        return webdataset.WebLoader(clips, batch_size=None, num_workers=used)

    return Rival(
        f"webdataset {version('webdataset')}",
        in_files=True,
        batches=batches,
        workers=2,
        streams=True,
        setting="a stream of ready clips that do not overlap; 64 MB tar files and a buffer of 1,000 shuffled; "
        "WebLoader of 2 workers",
    )


def litdata_stream(field: Field) -> Rival:
    """litdata: ready clips in chunks of 64 MB. It shuffles the chunks, and the clips of each chunk."""
    import litdata
    from litdata.streaming.writer import BinaryWriter

    folder = field.folder / "litdata"
    if not folder.exists():
        folder.mkdir()
        os.environ.setdefault("DATA_OPTIMIZER_GLOBAL_RANK", "0")  # what optimize() sets in its own workers
        os.environ.setdefault("DATA_OPTIMIZER_NUM_WORKERS", "1")
        writer = BinaryWriter(str(folder), chunk_bytes=_SHARD)
        for number, clip in enumerate(_cut(field.stored, field.history)):
            writer.add_item(number, {"clip": _packed(clip)})
        writer.done()
        writer.merge(1)
    assert json.loads((folder / "index.json").read_text())["chunks"]
    collate = _Collate({n: v[:1] for n, v in field.stored.first.items()}, field.history)

    def batches(workers: int) -> Iterable[Any]:
        rows = litdata.StreamingDataset(str(folder), shuffle=True)
        return litdata.StreamingDataLoader(rows, batch_size=field.batch_size, num_workers=workers, collate_fn=collate)

    return Rival(
        f"litdata {version('litdata')}",
        in_files=True,
        batches=batches,
        workers=2,
        streams=True,
        setting="a stream of ready clips that do not overlap; 64 MB chunks, shuffle=True; StreamingDataLoader of 2 "
        "workers",
    )
