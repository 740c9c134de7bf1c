"""Writes that are killed ahead of a change to a file, ours or a library's, in children."""

import functools

import pytest

from ringmap.data import get_format, list_formats, load_dataset
from ringmap.formats.common import disk
from ringmap.testing.kills import killed_after, reason_why_not

LOSSLESS = {"hdf5": {}, "zarr": {}, "lance": {}, "folder": {"image_format": "png"}, "video": {"lossless": True}}
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


def run_killed_at(at, action, *args):
    """Run `action` in a child that is killed ahead of change number `at` to a file; return how it ended."""
    if reason := reason_why_not():
        pytest.skip(reason)
    return killed_after(at, functools.partial(action, *args), fresh="lance" in args)


def each_kill(whole, begin, action, most):
    """Yield `(at, outcome, what begin returned)` of runs killed at each of their changes.

    Args:
        whole: whether to kill at each; otherwise at about `most` of them, evenly.
        begin: called before each run; returns the arguments of `action`.
        action: what is run, in a child.
        most: how many.
    """
    calls = len(run_killed_at(1 << 30, action, *begin()).calls)
    assert calls > most
    for at in range(calls) if whole else range(0, calls, -(-calls // most)):
        args = begin()
        yield at, run_killed_at(at, action, *args), args
