"""Formats: what comes back, how large it is, and how fast, against each library's own calls.

Reading: clips of 4, batches of 64, from a DataLoader with 0 and 2 workers; the rival's Dataset keeps its handles and
reads whole slices, one call per clip and column; for Zarr it is tensorstore over the same files, where that is
installed, with a
batch of reads at once and decoded chunks cached. Writing: the rival writes the same rows
through the library with no schema, no log and no commits.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import quantiles
from ringmap.data import get_format, list_formats, load_dataset

__all__ = ["run"]

Array = np.ndarray[Any, np.dtype[Any]]

HISTORY, BATCH = 4, 64

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "hdf5": ("hdf5", {}),
    "zarr": ("zarr", {}),
    "lance": ("lance", {}),
    "lance jpeg": ("lance", {"image_format": "jpeg"}),
    "folder png": ("folder", {"image_format": "png"}),
    "folder": ("folder", {}),
    "video": ("video", {}),
    "video lossless": ("video", {"lossless": True}),
}
LOSSY = ("lance jpeg", "folder", "video")


def episodes_of(num: int, length: int, side: int) -> list[dict[str, Array]]:
    """Return rollouts of a ball over a textured ground: pictures that compress as a simulator's do."""
    rng = np.random.default_rng(0)
    ground = np.kron(rng.integers(60, 200, (side // 8 + 1, side // 8 + 1, 3)), np.ones((8, 8, 1)))
    ground = ground[:side, :side].astype(np.uint8)
    row, col = np.mgrid[:side, :side]
    episodes = []
    for number in range(num):
        way = np.cumsum(rng.normal(0, 2, (length, 2)), axis=0) + side / 2
        frames = np.repeat(ground[None], length, 0)
        for frame, (y, x) in zip(frames, way % side, strict=True):
            frame[(row - y) ** 2 + (col - x) ** 2 < (side / 10) ** 2] = (220, 40, number % 256)
        episodes.append(
            {
                "pixels": frames,
                "action": way.astype(np.float32),
                "reward": rng.random(length),
                "step": np.arange(length) + 2**53 + number * length,
            }
        )
    return episodes


# -- the rivals -----------------------------------------------------------------------------------


class Rows:
    """Reads clips: `read(episode, start)` -> column -> `(H, ...)`."""

    def __call__(self, episode: int, start: int) -> dict[str, Any]:
        raise NotImplementedError

    def many(self, clips: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """Read several clips, one by one unless the library has something better."""
        return [self(*clip) for clip in clips]


class PerClip(torch.utils.data.Dataset[dict[str, Any]]):
    """The obvious Dataset: a call of `read` per clip, or of `read.many` per batch."""

    def __init__(self, read: Rows, lengths: Array) -> None:
        self.read = read
        starts = [(e, s) for e, n in enumerate(lengths.tolist()) for s in range(n - HISTORY + 1)]
        self.clips = starts

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._tensors(self.read(*self.clips[index]))

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self._tensors(found) for found in self.read.many([self.clips[i] for i in indices])]

    def _tensors(self, found: dict[str, Any]) -> dict[str, Any]:
        return {
            name: torch.from_numpy(v).permute(0, 3, 1, 2) if name == "pixels" else torch.from_numpy(v)
            for name, v in found.items()
        }


class H5Rows(Rows):
    """Slices of h5py datasets that stay open, per process; without a chunk cache, which would load 1 MB for a clip."""

    def __init__(self, path: str, offsets: Array) -> None:
        self.path, self.offsets, self.pid, self.file = path, offsets, -1, None
        self.columns: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pid": -1, "file": None, "columns": {}}

    def __call__(self, episode: int, start: int) -> dict[str, Any]:
        import h5py

        if self.pid != os.getpid():
            self.file, self.pid = h5py.File(self.path, "r", rdcc_nbytes=0), os.getpid()
            self.columns = {n: self.file[n] for n in ("pixels", "action", "reward", "step")}
        at = int(self.offsets[episode]) + start
        return {n: c[at : at + HISTORY] for n, c in self.columns.items()}


class ZarrRows(H5Rows):
    """Slices of zarr arrays."""

    def __call__(self, episode: int, start: int) -> dict[str, Any]:
        import zarr

        if self.pid != os.getpid():
            self.file, self.pid = zarr.open_group(self.path, mode="r"), os.getpid()
            self.columns = {n: self.file[f"data/{n}"] for n in ("pixels", "action", "reward", "step")}
        at = int(self.offsets[episode]) + start
        return {n: np.asarray(c[at : at + HISTORY]) for n, c in self.columns.items()}


class TensorstoreRows(H5Rows):
    """tensorstore over the same Zarr: a batch of reads at once, decoded chunks kept in a cache."""

    def __call__(self, episode: int, start: int) -> dict[str, Any]:
        return self.many([(episode, start)])[0]

    def many(self, clips: list[tuple[int, int]]) -> list[dict[str, Any]]:
        import tensorstore

        if self.pid != os.getpid():
            cache = tensorstore.Context({"cache_pool": {"total_bytes_limit": 256 << 20}})
            self.pid = os.getpid()
            self.columns = {
                n: tensorstore.open(
                    {
                        "driver": "zarr",
                        "kvstore": {"driver": "file", "path": f"{self.path}/data/{n}/"},
                        "recheck_cached_data": "open",
                    },
                    context=cache,
                    read=True,
                ).result()
                for n in ("pixels", "action", "reward", "step")
            }
        starts = [int(self.offsets[episode]) + start for episode, start in clips]
        reading = [{n: c[at : at + HISTORY].read() for n, c in self.columns.items()} for at in starts]
        return [{n: future.result() for n, future in clip.items()} for clip in reading]


class LanceRows(H5Rows):
    """A `take` per clip, PIL for its images."""

    def __call__(self, episode: int, start: int) -> dict[str, Any]:
        from PIL import Image

        from ringmap.formats.lance import lance

        if self.pid != os.getpid():
            self.file, self.pid = lance().dataset(self.path), os.getpid()
        at = int(self.offsets[episode]) + start
        table = self.file.take(list(range(at, at + HISTORY)))
        images = [np.asarray(Image.open(io.BytesIO(v.as_py()))) for v in table.column("pixels")]
        found = {"pixels": np.stack(images)}
        for name, shape in (("action", (HISTORY, 2)), ("reward", (HISTORY,)), ("step", (HISTORY,))):
            flat = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
            found[name] = flat.reshape(shape).copy()
        return found


class FolderRows(Rows):
    """PIL per image, arrays in memory."""

    def __init__(self, path: str, offsets: Array, suffix: str) -> None:
        self.path, self.offsets, self.suffix = path, offsets, suffix
        names = ("action", "reward", "step")
        self.columns = {n: np.load(f"{path}/{n}.npz")["arr_0"] for n in names}

    def images(self, episode: int, start: int) -> Array:
        from PIL import Image

        names = [f"ep_{episode}_step_{start + i}.{self.suffix}" for i in range(HISTORY)]
        return np.stack([np.asarray(Image.open(f"{self.path}/pixels/{n}")) for n in names])

    def __call__(self, episode: int, start: int) -> dict[str, Any]:
        at = int(self.offsets[episode]) + start
        rows = {n: v[at : at + HISTORY].copy() for n, v in self.columns.items()}
        return {"pixels": self.images(episode, start), **rows}


class VideoRows(FolderRows):
    """PyAV per clip: open, seek, decode."""

    def images(self, episode: int, start: int) -> Array:
        import av

        frames = []
        with av.open(f"{self.path}/pixels/ep_{episode}.mp4") as container:
            stream = container.streams.video[0]
            ticks = 1 / (stream.average_rate * stream.time_base)
            container.seek(int(start * ticks), stream=stream)
            for frame in container.decode(stream):
                if frame.pts / ticks >= start:
                    frames.append(frame.to_ndarray(format="rgb24"))
                if len(frames) == HISTORY:
                    break
        return np.stack(frames)


def rival_reader(case: str, path: str, offsets: Array) -> Rows:
    """Return how one would read a clip with the library alone."""
    name = CASES[case][0]
    if name == "folder":
        return FolderRows(path, offsets, "png" if "png" in case else "jpeg")
    if name == "video":
        return VideoRows(path, offsets, "mp4")
    zarr = TensorstoreRows if find_spec("tensorstore") else ZarrRows
    return {"hdf5": H5Rows, "zarr": zarr, "lance": LanceRows}[name](path, offsets)


def rival_write(case: str, path: str, episodes: list[dict[str, Array]]) -> None:
    """Write the same rows with the library alone."""
    name, options = CASES[case]
    if name == "hdf5":
        import h5py

        with h5py.File(path, "w") as file:
            row = 0
            for episode in episodes:
                for column, rows in episode.items():
                    if column not in file:
                        step = max(1, min((1 << 20) // max(rows[0].nbytes, 1), 16384))
                        file.create_dataset(
                            column,
                            (0, *rows.shape[1:]),
                            rows.dtype,
                            maxshape=(None, *rows.shape[1:]),
                            chunks=(step, *rows.shape[1:]),
                        )
                    file[column].resize(row + len(rows), axis=0)
                    file[column][row:] = rows
                row += len(episode["step"])
    elif name == "zarr":
        import numcodecs
        import zarr

        group = zarr.open_group(path, mode="w", zarr_format=2)
        for episode in episodes:
            for column, rows in episode.items():
                if column not in group:
                    step = max(1, min((1 << 20) // max(rows[0].nbytes, 1), 16384))
                    group.create_array(
                        column,
                        shape=(0, *rows.shape[1:]),
                        chunks=(step, *rows.shape[1:]),
                        dtype=rows.dtype,
                        compressors=numcodecs.Blosc("zstd", 1),
                    )
                group[column].append(rows)  # type: ignore[union-attr]
    elif name == "lance":
        import pyarrow as pa

        from ringmap.formats.lance import lance

        def batches() -> Any:
            for episode in episodes:
                columns = {"pixels": pa.array([_pil(f, options.get("image_format", "png")) for f in episode["pixels"]])}
                for column, rows in episode.items():
                    if column != "pixels":
                        size = rows[0].size
                        columns[column] = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), size)
                yield pa.record_batch(columns)

        made = batches()
        first = next(made)

        def all_of() -> Any:
            yield first
            yield from made

        lance().write_dataset(pa.RecordBatchReader.from_batches(first.schema, all_of()), path)
    else:
        os.makedirs(f"{path}/pixels")
        for number, episode in enumerate(episodes):
            if name == "folder":
                kind = "png" if "png" in case else "jpeg"
                for step, frame in enumerate(episode["pixels"]):
                    Path(f"{path}/pixels/ep_{number}_step_{step}.{kind}").write_bytes(_pil(frame, kind))
            else:
                _pyav(f"{path}/pixels/ep_{number}.mp4", episode["pixels"], options)
        for column in ("action", "reward", "step"):
            np.savez(f"{path}/{column}.npz", np.concatenate([e[column] for e in episodes]))


def _pil(frame: Array, kind: str) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    options = {"compress_level": 1} if kind == "png" else {"quality": 95, "subsampling": 0}
    Image.fromarray(frame).save(buffer, kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def _pyav(path: str, frames: Array, options: dict[str, Any]) -> None:
    import av

    exact = "lossless" in options
    with av.open(path, "w") as container:
        stream: Any = container.add_stream(
            "libx264rgb" if exact else "libx264", rate=30, options={"qp": "0"} if exact else {"crf": "18"}
        )
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24" if exact else "yuv420p"
        stream.codec_context.gop_size = 8
        stream.codec_context.max_b_frames = 0
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())


# -- the tables -----------------------------------------------------------------------------------


def _lossless(place: Place, folder: Path) -> Table:
    """Write every dtype and shape, and compare what comes back; `ringmap.testing.FormatTests` do so, too."""
    from ringmap.testing.formats import VALUES

    values = dict(islice(VALUES.items(), place.size(len(VALUES), 4)))
    table = Table("what comes back of each dtype and shape", heads=["format", *values])
    table.notes.append(
        "=: equal, bit for bit; otherwise mean/largest error of 255, for images of noise, the worst case"
    )
    for case, (name, options) in CASES.items():
        if name not in list_formats():
            continue
        cells = []
        for number, rows in enumerate(values.values()):
            path = folder / f"{case}-{number}.d"
            with get_format(name).open_writer(path, **options) as writer:
                writer.write_episode({"x": rows})
            got = load_dataset(path, format=name, layout="HWC").get_col_data("x")
            assert got.dtype == rows.dtype
            assert got.shape == rows.shape
            same = got.tobytes() == rows.tobytes()
            assert same or case in LOSSY
            off = np.abs(got.astype(float) - rows) if not same else np.zeros(1)
            cells.append("=" if same else f"{off.mean():.1f}/{off.max():.0f}")
            shutil.rmtree(path, ignore_errors=True)
        table.row(case, *cells)
    return table


def size_of(path: str) -> int:
    """Return the bytes of a file or folder."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(p.stat().st_size for p in Path(path).rglob("*") if p.is_file())


def measure(
    folder: Path, case: str, episodes: list[dict[str, Array]], rounds: int, batches: int, workers: tuple[int, ...]
) -> dict[str, Any]:
    """Return sizes, rates and errors of one format."""
    name, options = CASES[case]
    nbytes = sum(v.nbytes for e in episodes for v in e.values())
    took: dict[str, list[float]] = {"ours": [], "theirs": []}
    path = str(folder / case.replace(" ", "-"))
    for _ in range(rounds):
        for who in took:
            target = path if who == "ours" else path + "-raw"
            shutil.rmtree(target, ignore_errors=True)
            Path(target).unlink(missing_ok=True) if os.path.isfile(target) else None
            begin = perf_counter()
            if who == "ours":
                with get_format(name).open_writer(target, **options) as writer:
                    writer.write_episodes(episodes)
            else:
                rival_write(case, target, episodes)
            took[who].append(perf_counter() - begin)
    found: dict[str, Any] = {"size": size_of(path) / nbytes}
    ours, theirs = (np.array(took[w]) for w in ("ours", "theirs"))
    found["write"] = nbytes / np.median(ours) / 1e6
    found["write ratio"] = float(np.median(theirs / ours))
    dataset = load_dataset(path, format=name, num_steps=HISTORY)
    rival = PerClip(rival_reader(case, path, dataset.offsets), dataset.lengths)
    assert len(rival) == len(dataset)
    for i in (0, len(rival) // 2, len(rival) - 1):  # equal first
        left, right = dataset[i], rival[i]
        assert all(np.array_equal(left[n], right[n]) for n in right)
    stored = episodes[-1]["pixels"].astype(float)
    got = np.asarray(load_dataset(path, format=name, layout="HWC").load_episode(-1)["pixels"])
    error = np.abs(got - stored)
    found["error"] = "equal" if not error.any() else f"{error.mean():.2f} / {error.max():.0f}"
    for number in workers:
        rates: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(rounds):
            for who, source in (("ours", dataset), ("theirs", rival)):
                order = np.random.default_rng(turn).integers(0, len(rival), BATCH * batches)
                # Lance and tensorstore do not survive a fork.
                forks = name != "lance" and not (who == "theirs" and isinstance(rival.read, TensorstoreRows))
                how = None if forks or not number else "spawn"
                loader: Any = DataLoader(
                    source, BATCH, sampler=order.tolist(), num_workers=number, multiprocessing_context=how
                )
                steps = iter(loader)
                next(steps)  # workers have started
                if number:
                    next(steps)
                begin, count = perf_counter(), 0
                for _ in steps:
                    count += BATCH
                rates[who].append(count / (perf_counter() - begin))
        mine, other = np.array(rates["ours"]), np.array(rates["theirs"])
        found[f"read {number}"] = float(np.median(mine))
        found[f"read ratio {number}"] = quantiles(mine / other)["median"]
    return found


def run(place: Place) -> list[Table]:
    """Compare what comes back, then time each format beside its library."""
    log = logging.getLogger("ringmap")
    level = log.level
    log.setLevel(logging.ERROR)  # that JPEG is lossy
    try:
        with place.folder() as folder:
            return [_lossless(place, folder), _rates(place, folder)]
    finally:
        log.setLevel(level)


def _rates(place: Place, folder: Path) -> Table:
    num, length, side = place.size(30, 3), place.size(100, 9), place.size(64, 16)
    rounds, batches = place.size(3, 1), place.size(18, 2)
    workers = (0,) if place.tiny else (0, 2)
    episodes = episodes_of(num, length, side)
    table = Table(
        f"{num} episodes of {length} steps, pixels {side}x{side}x3 and 3 small columns; clips of {HISTORY}, batches of "
        f"{BATCH}",
        heads=["format", "pixels off by, mean / most", "size of the raw bytes", "write MB/s", "x the library's"],
    )
    for number in workers:
        table.heads += [f"clips/s, {number} workers", "x the rival's"]
    for case in CASES:
        if CASES[case][0] in list_formats():
            found = measure(folder, case, episodes, rounds, batches, workers)
            reads = [
                cell for w in workers for cell in (f"{found[f'read {w}']:,.0f}", f"{found[f'read ratio {w}']:.1f}")
            ]
            table.row(
                case,
                found["error"],
                f"{found['size']:.2f}",
                f"{found['write']:,.0f}",
                f"{found['write ratio']:.2f}",
                *reads,
            )
    zarr = "tensorstore" if find_spec("tensorstore") else "zarr-python, tensorstore is not installed"
    table.notes.append(f"all in the page cache: it does not show a real disk; the rival over Zarr is {zarr}")
    return table
