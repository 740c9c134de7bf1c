"""What becomes larger than it should is not unpacked, whichever codec packed it."""

import random
import tracemalloc

import numcodecs
import pytest

from ringmap.formats.zarr.store import KNOWN, refuse_bomb
from tests.tiers import few

NBYTES = 50_000_000


@pytest.mark.parametrize("name", few(sorted(KNOWN), 3))
def test_a_bomb_is_refused_before_it_is_unpacked(name):
    codec = numcodecs.get_codec({"id": name})
    options = {k: v for k, v in codec.get_config().items() if k != "id"}
    bomb = bytes(codec.encode(bytes(NBYTES)))
    refuse_bomb(name, options, bomb, NBYTES)  # exactly as large as it may be
    tracemalloc.start()
    with pytest.raises(ValueError, match="becomes"):
        refuse_bomb(name, options, bomb, 1_000_000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20_000_000


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_nonsense_raises_nothing_else(name):
    rng = random.Random(0)
    sound = bytes(numcodecs.get_codec({"id": name}).encode(bytes(range(256)) * 20))
    refused = 0
    for _ in range(300):
        data = bytearray(sound[: rng.randrange(len(sound) + 1)])
        for _ in range(min(3, len(data))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            refuse_bomb(name, {}, data, 5120)
        except ValueError:
            refused += 1
    assert refused > 0


def test_raw_lzma_is_refused():
    with pytest.raises(ValueError, match="without a header"):
        refuse_bomb("lzma", {"format": 3}, b"x", 100)
