"""What test_full_disk.py runs inside a small file system of its own: every writer fills it, and goes on.

python -m tests.unit.formats.full_disk FOLDER
"""

import errno
import shutil
import sys
from pathlib import Path

import numpy as np

from ringmap.data import get_format, load_dataset
from ringmap.errors import EnvironmentFault
from tests.unit.formats.killing import LOSSLESS, WRITERS, place


def episode(number):
    noise = np.random.default_rng(number).integers(0, 256, (5, 64, 64, 3), np.uint8)
    return {"number": np.full(5, number), "pixels": noise}


def fill(path, name):
    """Write until the disk refuses; return how many episodes were written."""
    written = 0
    try:
        with get_format(name).open_writer(path, **LOSSLESS[name]) as writer:
            while True:
                writer.write_episode(episode(written))
                written += 1
    except EnvironmentFault as error:
        assert error.errno == errno.ENOSPC or "No space left" in str(error), error
    return written


def prove(path, count):
    """Assert that these episodes are there, every byte of them."""
    dataset = load_dataset(path, layout="HWC")
    assert len(dataset.lengths) == count, f"{path}: {len(dataset.lengths)} of {count}"
    for number in range(count):
        found = dataset.load_episode(number)
        for column, rows in episode(number).items():
            assert np.array_equal(found[column], rows), f"{path}: {column} of {number}"
    dataset.close()


def main(folder):
    ballast = Path(folder) / "ballast"
    for name in WRITERS:
        home = Path(folder) / name
        home.mkdir()
        ballast.write_bytes(bytes(28 << 20))
        path = place(home, name)
        written = fill(path, name)
        assert written > 5, (name, written)
        ballast.unlink()
        prove(path, written)
        with get_format(name).open_writer(path, **LOSSLESS[name]) as writer:
            writer.write_episode(episode(written))
        prove(path, written + 1)
        shutil.rmtree(home)
        print(name, written)


if __name__ == "__main__":
    main(*sys.argv[1:])
