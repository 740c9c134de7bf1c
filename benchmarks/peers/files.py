"""Other libraries' files, filled with our episodes: random clips of them, each at its library's best.

    file -> read(starts) -> column -> (B, H, ...)        a whole batch in one call, small columns from memory
         -> batches(workers)                             in a DataLoader, or in threads of the library

Handles stay open and a clip is one slice. Two of them, litdata and webdataset, are streams: they can't draw
any clip. Their files hold ready clips, which they shuffle within a buffer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.data import Stored
from benchmarks.peers.base import NO_DEPS, PEERS, Array, Peer, Spec, expect_random, release

__all__ = ["ArrayRecord", "Hdf5", "HuggingFace", "Lance", "LitData", "Tensorstore", "WebDataset"]

Read = Callable[[Array], dict[str, Array]]

_SMALL_NBYTES = _SHARD = 64 << 20


class Files(Peer):
    """Files in a folder of their own: `write` writes them, `open` gives `read`, in each process once.

    `depth`: so many batches are read by threads at the same time, as the library allows it; 0: by a DataLoader.
    `module`: what is imported, if its name is not that of the package.
    """

    install = PEERS
    depth = 0
    module = ""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.folder = Path(str(spec.folder), type(self).__name__)
        self.load()

    def load(self) -> None:
        """Import the library; raises ImportError without it."""
        self.library: Any = import_module(self.module or self.package)

    def write(self, stored: Stored) -> None:
        """Write the files."""
        raise NotImplementedError

    def open(self) -> Read:
        """Return `read`: first steps `(B,)` -> column -> `(B, H, ...)`."""
        raise NotImplementedError

    def fill(self, stored: Stored) -> None:
        """Write the files, unless another process has."""
        if not self.folder.exists():
            self.folder.mkdir()
            self.write(stored)
        self.stored = stored
        self.dataset = Clips(self.open, stored, self.spec.history)

    def write_small(self, stored: Stored) -> None:
        """Write all columns but the pixels as arrays, where the file itself is good at large rows only."""
        chunks = [{n: v for n, v in chunk.items() if n != "pixels"} for chunk in stored.chunks()]
        for name in set(chunks[0]) - {"episode"}:
            np.save(self.folder / f"{name}.npy", np.concatenate([chunk[name] for chunk in chunks]))

    def small(self) -> Callable[[Array], dict[str, Array]]:
        """Return what reads those: steps -> column -> rows."""
        columns = {path.stem: np.load(path) for path in self.folder.glob("*.npy")}
        return lambda steps: {name: values[steps] for name, values in columns.items()}

    def steps(self, starts: Array) -> Array:
        """Return the steps of clips, `(B, H)`."""
        found: Array = starts[:, None] + np.arange(self.spec.history)
        return found

    @property
    def frame(self) -> tuple[int, ...]:
        """The shape of a frame of pixels."""
        return self.spec.first["pixels"].shape[1:]

    def batches(self, workers: int) -> Iterable[Any]:
        """Return a pass."""
        if self.depth:
            return self._ahead()
        from torch.utils.data import DataLoader

        some: Any = self.dataset
        ahead: dict[str, Any] = {"prefetch_factor": 2} if workers else {}
        return DataLoader(some, self.spec.batch, shuffle=True, num_workers=workers, collate_fn=_as_it_is, **ahead)

    def _ahead(self) -> Iterator[Any]:
        order, clips, size = np.random.default_rng().permutation(len(self.dataset)), self.dataset, self.spec.batch
        pool, reading = ThreadPoolExecutor(self.depth), deque[Any]()
        try:
            for numbers in np.split(order, range(size, len(order), size)):
                reading.append(pool.submit(clips.read, clips.starts(numbers)))
                if len(reading) > self.depth:
                    yield reading.popleft().result()
            while reading:
                yield reading.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class Clips:
    """A map-style dataset of clips that a `DataLoader` asks for a batch at a time; each process opens its own."""

    def __init__(self, open: Callable[[], Read], stored: Stored, history: int) -> None:
        self._open, self._length, self._count = open, stored.length, stored.num_episodes
        self._clips, self._read = stored.length - history + 1, None

    def __len__(self) -> int:
        return self._count * self._clips

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        import torch

        return {name: torch.from_numpy(rows) for name, rows in self.read(self.starts(np.asarray(numbers))).items()}

    def starts(self, numbers: Array) -> Array:
        """Return the rows at which these clips begin."""
        episodes, steps = np.divmod(numbers, self._clips)
        found: Array = episodes * self._length + steps
        return found

    def read(self, starts: Array) -> dict[str, Array]:
        """Return the clips that begin at these rows."""
        self._read = self._read or self._open()  # type: ignore[assignment]
        return self._read(starts)  # type: ignore[misc]


def _as_it_is(batch: Any) -> Any:
    return batch


class Hdf5(Files):
    """h5py: contiguous, not compressed; a slice for each clip."""

    package, called, workers = "h5py", "a Dataset over h5py", 4
    setting = (
        "handles kept, a slice for each clip into one batch, small columns in memory, DataLoader of 4 workers, "
        "prefetch_factor=2"
    )

    def write(self, stored: Stored) -> None:
        done = 0
        with self.library.File(self.folder / "clips.h5", "w") as file:
            for name, values in stored.first.items():
                file.create_dataset(name, (stored.num_steps, *values.shape[1:]), values.dtype)
            for chunk in stored.chunks():
                numbers = chunk.pop("episode")
                for name, values in chunk.items():
                    file[name][done : done + len(numbers)] = values
                done += len(numbers)

    def open(self) -> Read:
        columns = dict(self.library.File(self.folder / "clips.h5").items())  # open as long as `read` is
        small = {n: c[()] for n, c in columns.items() if c.nbytes < _SMALL_NBYTES and n != "pixels"}
        large, history = {name: c for name, c in columns.items() if name not in small}, self.spec.history

        def read(starts: Array) -> dict[str, Array]:
            found = {name: values[self.steps(starts)] for name, values in small.items()}
            for name, column in large.items():
                out = found[name] = np.empty((len(starts), history, *column.shape[1:]), column.dtype)
                for i, start in enumerate(starts.tolist()):
                    out[i] = column[start : start + history]
            return found

        return read


class Lance(Files):
    """Lance: one row for each step, written by pylance; `take` of the steps of all clips, as NumPy arrays."""

    package, module, called, way, depth = "pylance", "lance", "Lance", ", take", 3
    setting = "take() of a whole batch, its own I/O threads, 3 batches in flight"

    def write(self, stored: Stored) -> None:
        import pyarrow as pa

        widths = {name: int(np.prod(values.shape[1:], dtype=int)) for name, values in stored.first.items()}
        kinds = {name: pa.from_numpy_dtype(values.dtype) for name, values in stored.first.items()}
        schema = pa.schema([(name, pa.list_(kinds[name], width)) for name, width in widths.items()])

        def rows() -> Iterable[Any]:
            for chunk in stored.chunks():
                columns = [
                    pa.FixedSizeListArray.from_arrays(chunk[n].reshape(-1), width) for n, width in widths.items()
                ]
                yield pa.record_batch(columns, schema=schema)

        self.library.write_dataset(rows(), str(self.folder / "clips.lance"), schema=schema)

    def open(self) -> Read:
        dataset, first = self.library.dataset(str(self.folder / "clips.lance")), self.spec.first

        def read(starts: Array) -> dict[str, Array]:
            steps, clips = self.steps(starts), dict[str, Array]()
            found = dataset.take(steps.reshape(-1))
            for name, values in first.items():
                rows = found[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                clips[name] = rows.reshape(*steps.shape, *values.shape[1:])
            return clips

        return read


class Tensorstore(Files):
    """tensorstore: Zarr 3, shards of 1,000 steps, not compressed, a chunk for each step."""

    package, called, way, depth = "tensorstore", "tensorstore", ", Zarr 3", 2
    setting = (
        "sharded, not compressed, a chunk for each step, one indexed read a batch, file_io_concurrency=64, 2 batches "
        "in flight"
    )

    def load(self) -> None:
        super().load()
        self._spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(self.folder / "pixels")},
            "recheck_cached_data": "open",
        }

    def write(self, stored: Stored) -> None:
        self.write_small(stored)
        shard = [min(1000, stored.num_steps), *self.frame]
        inner = {"chunk_shape": [1, *self.frame], "codecs": [{"name": "bytes"}]}
        new = {
            "shape": [stored.num_steps, *self.frame],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
            "codecs": [{"name": "sharding_indexed", "configuration": inner}],
        }
        out, done = self.library.open({**self._spec, "metadata": new, "create": True}).result(), 0
        for chunk in stored.chunks(1000):
            rows = chunk["pixels"]
            out[done : done + len(rows)].write(rows).result()
            done += len(rows)

    def open(self) -> Read:
        limits = {"cache_pool": {"total_bytes_limit": 32 << 20}, "file_io_concurrency": {"limit": 64}}
        rows = self.library.open(self._spec, context=self.library.Context(limits)).result()
        small, axis = self.small(), self.library.d[0]

        def read(starts: Array) -> dict[str, Array]:
            steps = self.steps(starts)
            pixels = rows[axis[steps.reshape(-1)]].read().result()
            return {**small(steps), "pixels": pixels.reshape(*steps.shape, *self.frame)}

        return read


class ArrayRecord(Files):
    """array_record and grain: a record for each step, `group_size:1`, not compressed."""

    package, called, workers = "array-record", "array_record", 4
    module = "array_record.python.array_record_module"
    setting = (
        "group_size:1, a parallel read a batch, no readahead, grain ReadOptions(num_threads=4, prefetch_buffer_size=4)"
    )

    def load(self) -> None:
        super().load()
        import grain

        self.grain = grain
        self.way = f", grain {release('grain')}"

    def write(self, stored: Stored) -> None:
        self.write_small(stored)
        writer = self.library.ArrayRecordWriter(str(self.folder / "pixels"), "group_size:1,uncompressed")
        for episode in stored:
            for frame in episode["pixels"]:
                writer.write(frame.tobytes())
        writer.close()

    def open(self) -> Read:
        options = "readahead_buffer_size:0,max_parallelism:32"
        reader, small = self.library.ArrayRecordReader(str(self.folder / "pixels"), options=options), self.small()

        def read(starts: Array) -> dict[str, Array]:
            steps = self.steps(starts)
            out = np.empty((steps.size, *self.frame), np.uint8)
            for row, record in zip(out, reader.read(steps.reshape(-1).tolist()), strict=True):
                row[...] = np.frombuffer(record, np.uint8).reshape(self.frame)
            return {**small(steps), "pixels": out.reshape(*steps.shape, *self.frame)}

        return read

    def batches(self, workers: int) -> Iterable[Any]:
        """Return a pass of grain, in its threads."""
        clips = self.dataset
        clips.read(np.zeros(1, int))  # opened before its threads all would
        drawn = self.grain.MapDataset.range(len(clips)).shuffle(seed=0).batch(self.spec.batch)
        read = drawn.map(lambda numbers: clips.read(clips.starts(np.asarray(numbers))))
        found: Iterable[Any] = read.to_iter_dataset(self.grain.ReadOptions(num_threads=4, prefetch_buffer_size=4))
        return found


class HuggingFace(Files):
    """Hugging Face datasets: a row for each step, in an Arrow file that it maps, NumPy format."""

    package, called, depth = "datasets", "Hugging Face datasets", 2
    setting = (
        'Arrow, with_format("numpy"), a whole batch of indices, map told MADV_RANDOM, 2 batches in flight; '
        "workers of a DataLoader need more memory than there is"
    )

    def write(self, stored: Stored) -> None:
        import pyarrow as pa

        self.write_small(stored)
        width = int(np.prod(self.frame))
        schema = pa.schema([("pixels", pa.list_(pa.uint8(), width))])
        with pa.OSFile(str(self.folder / "pixels"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for chunk in stored.chunks(1000):
                rows = pa.FixedSizeListArray.from_arrays(chunk["pixels"].reshape(-1), width)
                writer.write_batch(pa.record_batch([rows], schema=schema))

    def open(self) -> Read:
        rows = self.library.Dataset.from_file(str(self.folder / "pixels")).with_format("numpy")
        for chunk in rows.data.column("pixels").chunks if self.spec.threads else ():
            values = chunk.values.buffers()[1]  # it offers no way to say so itself
            expect_random(values.address, values.size)
        small = self.small()

        def read(starts: Array) -> dict[str, Array]:
            steps = self.steps(starts)
            pixels = np.asarray(rows[steps.reshape(-1).tolist()]["pixels"])
            return {**small(steps), "pixels": pixels.reshape(*steps.shape, *self.frame)}

        return read


# -- streams -------------------------------------------------------------------------------------


def _cut(stored: Stored, history: int) -> Iterator[bytes]:
    """Yield clips that do not overlap. A stream with all clips would store each step 4 times."""
    for episode in stored:
        for start in range(0, stored.length - history + 1, history):
            yield b"".join(episode[name][start : start + history].tobytes() for name in sorted(episode))


class _Collate:
    """A batch of packed clips as tensors; picklable, for workers."""

    def __init__(self, spec: Spec) -> None:
        self.first, self.history = {n: v[:1] for n, v in spec.first.items()}, spec.history

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        import torch

        packed = np.stack([np.frombuffer(row["clip"] if isinstance(row, dict) else row, np.uint8) for row in rows])
        found, at = {}, 0
        for name, values in sorted(self.first.items()):
            nbytes = values.nbytes * self.history
            part = np.ascontiguousarray(packed[:, at : at + nbytes]).view(values.dtype)
            found[name] = torch.from_numpy(part.reshape(len(packed), self.history, *values.shape[1:]))
            at += nbytes
        return found


class WebDataset(Files):
    """webdataset: ready clips in tar files of 64 MB, shuffled in a buffer of 1,000."""

    package, called, workers = "webdataset", "webdataset", 2
    setting = (
        "a stream of ready clips that do not overlap; 64 MB tar files and a buffer of 1,000 shuffled; WebLoader of 2 "
        "workers"
    )

    def write(self, stored: Stored) -> None:
        with self.library.ShardWriter(f"{self.folder}/%06d.tar", maxsize=_SHARD, verbose=0) as sink:
            for number, clip in enumerate(_cut(stored, self.spec.history)):
                sink.write({"__key__": f"{number:09d}", "clip": clip})

    def batches(self, workers: int) -> Iterable[Any]:
        """Return a pass of the stream."""
        tars = sorted(map(str, self.folder.glob("*.tar")))
        files = self.library.WebDataset(tars, shardshuffle=len(tars), empty_check=False)
        clips = files.shuffle(1000).batched(self.spec.batch, collation_fn=_Collate(self.spec))
        found: Iterable[Any] = self.library.WebLoader(clips, batch_size=None, num_workers=min(workers, len(tars)))
        return found


class LitData(Files):
    """litdata: ready clips in chunks of 64 MB. It shuffles the chunks, and the clips of each chunk."""

    package, called, workers, install = "litdata", "litdata", 2, NO_DEPS
    setting = (
        "a stream of ready clips that do not overlap; 64 MB chunks, shuffle=True; StreamingDataLoader of 2 workers"
    )

    def write(self, stored: Stored) -> None:
        from litdata.streaming.writer import BinaryWriter

        os.environ.setdefault("DATA_OPTIMIZER_GLOBAL_RANK", "0")  # what optimize() sets in its own workers
        os.environ.setdefault("DATA_OPTIMIZER_NUM_WORKERS", "1")
        writer = BinaryWriter(str(self.folder), chunk_bytes=_SHARD)
        for number, clip in enumerate(_cut(stored, self.spec.history)):
            writer.add_item(number, {"clip": clip})
        writer.done()
        writer.merge(1)

    def batches(self, workers: int) -> Iterable[Any]:
        """Return a pass of the stream."""
        rows = self.library.StreamingDataset(str(self.folder), shuffle=True)
        found: Iterable[Any] = self.library.StreamingDataLoader(
            rows, batch_size=self.spec.batch, num_workers=workers, collate_fn=_Collate(self.spec)
        )
        return found
