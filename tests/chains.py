"""Columns with codecs that no release makes any more: earlier ones took any codecs of Zarr."""

import contextlib

import pytest

from ringmap.storage.columns import backends
from ringmap.storage.columns.codecs import chain_of

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
TRANSPOSED = [{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE, {"name": "crc32c"}]


@contextlib.contextmanager
def made_with(**chains):
    """Let `ringmap.Zarr` take these chains by their names, which those with names can be among."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "check_codecs", lambda given, where: None)
        patch.setattr(backends, "chain_of", lambda name, spec: chains.get(name) or chain_of(name, spec))
        yield
