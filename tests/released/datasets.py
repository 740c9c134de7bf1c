"""Makes the fixture of datasets that writers of a release left when they were killed, to be run at that release:

python -m tests.released.datasets > tests/released/datasets-1.txt

The episodes of the first block are in the files of each format; of the second, killed, in its log or its last commit.
"""

import os
import sys
import tempfile
from pathlib import Path

from ringmap.data import get_format
from ringmap.testing.datasets import make_episode
from tests.released.make import pack

WRITERS = {
    "hdf5": (".h5", {}),
    "zarr": (".zarr", {}),
    "lance": (".lance", {}),
    "folder": ("", {"image_format": "png"}),
    "video": (".d", {"lossless": True}),
}
LENGTHS = [2, 3, 1, 4]
STORED = 2


def episodes():
    return [make_episode(i, n) | {"_episode_data": {"seed": i}} for i, n in enumerate(LENGTHS)]


def make(path, name, options, first, stop, killed):
    child = os.fork()
    if child == 0:
        writer = get_format(name).open_writer(path, **options)
        writer.__enter__()
        for episode in episodes()[first:stop]:
            writer.write_episode(episode)
        if not killed:
            writer.__exit__(None, None, None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        for name, (suffix, options) in WRITERS.items():
            path = Path(home) / f"{name}{suffix}"
            make(path, name, options, 0, STORED, False)
            make(path, name, options, STORED, len(LENGTHS), True)
            fresh = Path(home) / f"{name}-fresh{suffix}"
            make(fresh, name, options, 0, len(LENGTHS), True)
        sys.stdout.write(pack(Path(home)))
