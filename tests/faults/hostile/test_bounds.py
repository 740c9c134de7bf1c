"""What says that it becomes larger than it should is not unpacked, whichever codec makes room by that number."""

import random

import numcodecs
import pytest

from ringmap.formats.zarr.store import refuse_bomb

NBYTES = 50_000_000
SIZED = ("blosc", "lz4", "zstd")


@pytest.mark.parametrize("name", SIZED)
def test_a_bomb_is_refused_before_it_is_unpacked(name):
    bomb = bytes(numcodecs.get_codec({"id": name}).encode(bytes(NBYTES)))
    refuse_bomb(name, bomb, NBYTES)  # exactly as large as it may be
    with pytest.raises(ValueError, match="becomes"):
        refuse_bomb(name, bomb, 1_000_000)


@pytest.mark.parametrize("name", SIZED)
def test_nonsense_raises_nothing_else(name):
    rng = random.Random(0)
    sound = bytes(numcodecs.get_codec({"id": name}).encode(bytes(range(256)) * 20))
    refused = 0
    for _ in range(300):
        data = bytearray(sound[: rng.randrange(len(sound) + 1)])
        for _ in range(min(3, len(data))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            refuse_bomb(name, data, 5120)
        except ValueError:
            refused += 1
    assert refused > 0
