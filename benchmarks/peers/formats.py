"""Files of the formats as one reads and writes them with the library alone, and a Dataset over such a reader.

    reader(case, path) -> read(episode, step, row) -> column -> (H, ...)        opened in each process once
    write(case, path, episodes)                                                 no schema, no log, no commits

Handles stay open and a clip is one whole slice per column.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["CASES", "HISTORY", "PerClip", "survives_fork", "write"]

Array = np.ndarray[Any, np.dtype[Any]]
Episodes = list[dict[str, Array]]
Read = Callable[[int, int, int], dict[str, Any]]

HISTORY = 4
COLUMNS = ("pixels", "action", "reward", "step")

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
"""Case -> its format, and the options of our writer."""


def survives_fork(case: str) -> bool:
    """Tell whether a process that read it may be forked."""
    return not case.startswith(("lance", "zarr"))


class PerClip(torch.utils.data.Dataset[dict[str, Any]]):
    """The obvious Dataset: a call of `read` per clip."""

    def __init__(self, case: str, path: str, lengths: Array, offsets: Array) -> None:
        steps = [(e, s) for e, length in enumerate(lengths.tolist()) for s in range(length - HISTORY + 1)]
        self.clips = [(episode, step, int(offsets[episode]) + step) for episode, step in steps]
        self._open, self._pid, self._read = partial(_READERS[case.split()[0]], case, path), -1, None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pid": -1, "_read": None}

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        if self._pid != os.getpid():
            self._pid, self._read = os.getpid(), self._open()
        read: Any = self._read
        found = [read(*self.clips[index]) for index in indices]
        return [{name: _tensor(name, rows) for name, rows in clip.items()} for clip in found]


def _tensor(name: str, rows: Any) -> Any:
    made = torch.from_numpy(rows.result() if hasattr(rows, "result") else rows)  # a batch of reads is under way at once
    return made.permute(0, 3, 1, 2) if name == "pixels" else made


def _hdf5(case: str, path: str) -> Read:
    import h5py

    file = h5py.File(path, "r", rdcc_nbytes=0)  # a chunk cache would load 1 MB for a clip
    columns = {name: file[name] for name in COLUMNS}
    return lambda episode, step, row: {name: rows[row : row + HISTORY] for name, rows in columns.items()}


def _zarr(case: str, path: str) -> Read:
    """tensorstore, decoded chunks cached."""
    import tensorstore

    cache = tensorstore.Context({"cache_pool": {"total_bytes_limit": 256 << 20}})
    spec = {"driver": "zarr", "recheck_cached_data": "open"}
    columns = {}
    for name in COLUMNS:
        files = {"driver": "file", "path": f"{path}/data/{name}/"}
        columns[name] = tensorstore.open({**spec, "kvstore": files}, context=cache, read=True).result()
    return lambda episode, step, row: {name: rows[row : row + HISTORY].read() for name, rows in columns.items()}


def _lance(case: str, path: str) -> Read:
    from PIL import Image

    from ringmap.formats.lance import lance

    dataset = lance().dataset(path)

    def read(episode: int, step: int, row: int) -> dict[str, Any]:
        table = dataset.take(list(range(row, row + HISTORY)))
        images = [np.asarray(Image.open(io.BytesIO(v.as_py()))) for v in table.column("pixels")]
        found = {"pixels": np.stack(images)}
        for name in COLUMNS[1:]:
            flat = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
            found[name] = flat.reshape((HISTORY, 2) if name == "action" else HISTORY).copy()
        return found

    return read


def _folder(case: str, path: str) -> Read:
    """PIL per image, or PyAV per clip (open, seek, decode); arrays in memory."""
    columns = {name: np.load(f"{path}/{name}.npz")["arr_0"] for name in COLUMNS[1:]}
    images = _decoded if case.startswith("video") else partial(_opened, suffix="png" if "png" in case else "jpeg")

    def read(episode: int, step: int, row: int) -> dict[str, Any]:
        rows = {name: values[row : row + HISTORY].copy() for name, values in columns.items()}
        return {"pixels": images(f"{path}/pixels/ep_{episode}", step), **rows}

    return read


def _opened(start: str, step: int, suffix: str) -> Array:
    from PIL import Image

    return np.stack([np.asarray(Image.open(f"{start}_step_{step + i}.{suffix}")) for i in range(HISTORY)])


def _decoded(start: str, step: int) -> Array:
    import av

    frames: list[Array] = []
    with av.open(f"{start}.mp4") as container:
        stream = container.streams.video[0]
        ticks = 1 / (stream.average_rate * stream.time_base)
        container.seek(int(step * ticks), stream=stream)
        for frame in container.decode(stream):
            if frame.pts / ticks >= step:
                frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) == HISTORY:
                break
    return np.stack(frames)


_READERS = {"hdf5": _hdf5, "zarr": _zarr, "lance": _lance, "folder": _folder, "video": _folder}


# -- writing -------------------------------------------------------------------------------------


def write(case: str, path: str, episodes: Episodes) -> None:
    """Write these rows with the library alone."""
    name, options = CASES[case]
    {"hdf5": _write_hdf5, "zarr": _write_zarr, "lance": _write_lance}.get(name, _write_folder)(
        case, path, episodes, options
    )


def _chunks(rows: Array) -> tuple[int, ...]:
    return (max(1, min((1 << 20) // max(rows[0].nbytes, 1), 16384)), *rows.shape[1:])


def _write_hdf5(case: str, path: str, episodes: Episodes, options: Mapping[str, Any]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        row = 0
        for episode in episodes:
            for name, rows in episode.items():
                if name not in file:
                    shape = (0, *rows.shape[1:]), rows.dtype
                    file.create_dataset(name, *shape, maxshape=(None, *rows.shape[1:]), chunks=_chunks(rows))
                file[name].resize(row + len(rows), axis=0)
                file[name][row:] = rows
            row += len(episode["step"])


def _write_zarr(case: str, path: str, episodes: Episodes, options: Mapping[str, Any]) -> None:
    import numcodecs
    import zarr

    group: Any = zarr.open_group(path, mode="w", zarr_format=2)
    for episode in episodes:
        for name, rows in episode.items():
            if name not in group:
                codec = numcodecs.Blosc("zstd", 1)
                shape = (0, *rows.shape[1:])
                group.create_array(name, shape=shape, chunks=_chunks(rows), dtype=rows.dtype, compressors=codec)
            group[name].append(rows)


def _write_lance(case: str, path: str, episodes: Episodes, options: Mapping[str, Any]) -> None:
    import pyarrow as pa

    from ringmap.formats.lance import lance

    def batches() -> Iterator[Any]:
        for episode in episodes:
            columns = {"pixels": pa.array([_pil(f, options.get("image_format", "png")) for f in episode["pixels"]])}
            for name, rows in episode.items():
                if name != "pixels":
                    columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows[0].size)
            yield pa.record_batch(columns)

    made = batches()
    first = next(made)

    def all_of_them() -> Iterator[Any]:
        yield first
        yield from made

    lance().write_dataset(pa.RecordBatchReader.from_batches(first.schema, all_of_them()), path)


def _write_folder(case: str, path: str, episodes: Episodes, options: Mapping[str, Any]) -> None:
    os.makedirs(f"{path}/pixels")
    kind = "png" if "png" in case else "jpeg"
    for number, episode in enumerate(episodes):
        start = f"{path}/pixels/ep_{number}"
        if case.startswith("video"):
            _pyav(f"{start}.mp4", episode["pixels"], "lossless" in options)
            continue
        for step, frame in enumerate(episode["pixels"]):
            Path(f"{start}_step_{step}.{kind}").write_bytes(_pil(frame, kind))
    for name in COLUMNS[1:]:
        np.savez(f"{path}/{name}.npz", np.concatenate([e[name] for e in episodes]))


def _pil(frame: Array, kind: str) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    options: dict[str, Any] = {"compress_level": 1} if kind == "png" else {"quality": 95, "subsampling": 0}
    Image.fromarray(frame).save(buffer, kind, **options)
    return buffer.getvalue()


def _pyav(path: str, frames: Array, exact: bool) -> None:
    import av

    codec, options = ("libx264rgb", {"qp": "0"}) if exact else ("libx264", {"crf": "18"})
    with av.open(path, "w") as container:
        stream: Any = container.add_stream(codec, rate=30, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24" if exact else "yuv420p"
        stream.codec_context.gop_size = 8
        stream.codec_context.max_b_frames = 0
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())
