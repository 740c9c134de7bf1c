"""The chunks of a Zarr column by zarr-python: what `Codec` must equal."""

import numpy as np
import zarr
from zarr.storage import MemoryStore

from ringmap.storage.columns.zarr import chain_of


class ByZarr:
    """As `Codec`: a chunk passes through an array of one chunk in memory."""

    def __init__(self, name, spec, steps):
        shape = (steps, *spec.shape)
        self.key = ".".join(["c", *("0" for _ in shape)])
        self.store = {}
        self.array = zarr.create(
            store=MemoryStore(self.store),
            shape=shape,
            chunks=shape,
            dtype=spec.dtype,
            fill_value=np.zeros((), spec.dtype)[()],
            codecs=chain_of(name, spec),
            zarr_format=3,
            chunk_key_encoding=("default", "."),
            config={"write_empty_chunks": True},
        )

    def encode(self, rows):
        self.array[...] = rows.reshape(-1).view(self.array.dtype).reshape(self.array.shape)
        return self.store.pop(self.key).to_bytes()

    def decode(self, data, out):
        # A buffer class of zarr's, taken from its metadata object: its module has moved between releases.
        self.store[self.key] = type(self.store["zarr.json"]).from_bytes(data)
        out.reshape(-1)[:] = np.ascontiguousarray(self.array[...]).reshape(-1).view(np.uint8)
