"""Writes that are killed ahead of a change to the disk, in children.

    run_killed_at(at, action, *args)          a fork of this process
    zygote: the same, for Lance               a fork of a process that never used it: its threads do not survive a fork

`python -m tests.formats.killing` is the zygote: it reads pickled calls, and says of each how its child ended.
"""

import atexit
import os
import pickle
import signal
import subprocess
import sys

from ringmap.data import get_format, list_formats, load_dataset
from ringmap.formats.common import disk
from tests import ROOT
from tests.house import PYTHON

CALLS = ("append", "exchange", "make_folder", "remove", "remove_folder", "replace", "replace_file",
         "sync_all", "truncate", "write_file")  # fmt: skip

LOSSLESS = {
    "hdf5": {},
    "zarr": {},
    "lance": {},
    "folder": {"image_format": "png"},
    "video": {"lossless": True},
}
WRITERS = [name for name in LOSSLESS if name in list_formats()]
FOLDERS = [name for name in WRITERS if name != "hdf5"]
SUFFIX = {"hdf5": ".h5", "lance": ".lance", "zarr": ".zarr"}


def place(folder, name, stem="made"):
    return folder / f"{stem}{SUFFIX.get(name, '')}"


def write(path, name, episodes, **options):
    with get_format(name).open_writer(path, **LOSSLESS[name], **options) as writer:
        writer.write_episodes(episodes)
    return path


def wheres(path):
    dataset = load_dataset(path)
    found = [dataset.load_episode(i)["where"].tolist() for i in range(len(dataset.lengths))]
    data = dataset.get_episode_data().get("n", [None] * len(found))
    dataset.close()
    return found, data


def with_data(episodes, first=0):
    return [e | {"_episode_data": {"n": first + i}} for i, e in enumerate(episodes)]


def overwrite(path, name, episodes, exchange):
    """Replace a dataset; `exchange`: whether the system can swap two names."""
    if not exchange:
        disk.exchange = lambda left, right: False
    write(path, name, episodes, mode="overwrite")


def append(path, name, episodes, told):
    """Write episodes, and tell in a file of each that was."""
    with (
        get_format(name).open_writer(path, **LOSSLESS[name]) as writer,
        open(told, "ab", 0) as file,
    ):
        for episode in episodes:
            writer.write_episode(episode)
            file.write(b".")


def run_killed_at(at, action, *args):
    """Run `action` in a child that kills itself ahead of change number `at`; return whether it was."""
    status = _Zygote.run(at, action, args) if "lance" in args else _forked(at, action, args)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    return status != 0


def _forked(at, action, args):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            count = [0]

            def wrap(call):
                def counted(*args):
                    # Of the many files that are deleted one by one, every eighth is a step.
                    count[0] += 1 if call.__name__ != "remove" else 1 / 8
                    if count[0] > at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args)

                return counted

            for name in CALLS:
                setattr(disk, name, wrap(getattr(disk, name)))
            action(*args)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


class _Zygote:
    """The other process, started when it is first asked; it ends with this one, which holds its input."""

    process = None

    @classmethod
    def run(cls, at, action, args):
        if cls.process is None:
            cls.process = subprocess.Popen(
                [PYTHON, "-m", "tests.formats.killing"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )  # fmt: skip
            atexit.register(cls.end)
        pickle.dump((at, action.__name__, args), cls.process.stdin)
        cls.process.stdin.flush()
        return int(cls.process.stdout.readline())

    @classmethod
    def end(cls):
        with cls.process:
            cls.process.stdin.close()


def serve():
    """Run what is asked for until nobody asks any more."""
    answers = os.dup(1)
    os.dup2(2, 1)
    while True:
        try:
            at, action, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        assert "lance" not in sys.modules
        # By name in this very module, which is `__main__` here.
        os.write(answers, b"%d\n" % _forked(at, globals()[action], args))


if __name__ == "__main__":
    serve()
