"""A disk that is really full, and files that may not grow: what was written stays, what was not is refused."""

import contextlib
import errno
import os
import resource
import shutil
import sys

import numpy as np
import pytest

from ringmap.data import get_format, load_dataset
from ringmap.errors import EnvironmentFault
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.testing.datasets import make_episode
from tests.faults.filesystems.mounts import in_a_namespace
from tests.tiers import few
from tests.unit.formats.killing import LOSSLESS, WRITERS, place, wheres


@contextlib.contextmanager
def files_at_most(nbytes):
    """Let no file of this process grow beyond a size: a write across it is cut short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_every_writer_on_a_full_disk(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    mounting = f"mount -t tmpfs -o size=30m none {mount}"
    tried = in_a_namespace(mounting)
    if tried.returncode:
        pytest.skip(f"can't mount here: {tried.stderr.strip()}")
    command = f"{mounting} && exec {sys.executable} -m tests.unit.formats.full_disk {mount}"
    done = in_a_namespace(command)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(WRITERS)


def test_half_a_picture_is_refused(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8)
    path = tmp_path / "made"
    with get_format("folder").open_writer(path, image_format="png") as writer:
        writer.write_episode({"pixels": pixels[:1]})
        size = os.path.getsize(path / "ep_len.log")
        with files_at_most(size + size // 2), pytest.raises(EnvironmentFault, match="nothing was written"):
            writer.write_episode({"pixels": pixels})
        writer.write_episode({"pixels": pixels[::-1]})
    dataset = load_dataset(path, layout="HWC")
    assert dataset.lengths.tolist() == [1, 3]
    assert np.array_equal(dataset.load_episode(1)["pixels"], pixels[::-1])


def retry(writer, episode):
    """Write as a caller does that tries again when it is told that nothing was written."""
    for _ in range(2):
        try:
            writer.write_episode(episode)
        except EnvironmentFault as error:
            assert error.errno == errno.EFBIG or "File too large" in str(error), error
            continue
        return True
    return False


@pytest.mark.parametrize("name", few(WRITERS, 2))
def test_a_retry_never_stores_twice(tmp_path, monkeypatch, name):
    """Wherever the limit stands, an episode of which a call said that it is not written is not there."""
    monkeypatch.setattr(EpisodeWriter, "group_nbytes", 4096)
    odd = [make_episode(i, 7) | {"x": np.full((7, 101), i, np.uint8)} for i in range(8)]
    for limit in (0, 101, 6_001, 14_001, 45_001):  # beyond the size of a file, if it is one
        path = place(tmp_path, name, f"made{limit}")
        stored = []
        with get_format(name).open_writer(path, **LOSSLESS[name]) as writer:
            writer.write_episode(odd[0])
            with files_at_most(max(0, limit + os.path.getsize(path) * path.is_file())):
                stored += [i for i in range(1, 7) if retry(writer, odd[i])]
            writer.write_episode(odd[7])
        expected = [odd[i]["where"].tolist() for i in (0, *stored, 7)]
        assert wheres(path)[0] == expected, limit


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", few(WRITERS))
def test_a_limit_while_the_log_goes_over(tmp_path, name, every):
    """What a limit cuts short, of the format's own files, counts for nothing: all is read, and the next block finishes
    it."""
    episodes = [make_episode(i, 7) | {"x": np.full((7, 101), i, np.uint8)} for i in range(6)]
    expected, refused = [e["where"].tolist() for e in episodes], 0
    path = write_all(place(tmp_path, name, "whole"), name, episodes)
    sizes = {p.stat().st_size for p in path.rglob("*") if p.is_file()}
    if path.is_file():
        sizes = {path.stat().st_size * n // 9 for n in range(1, 10)}
    for limit in sorted({0} | {size - 1 for size in sizes} | {size - 9 for size in sizes})[::every]:
        path = place(tmp_path, name, f"made{limit}")
        writer = get_format(name).open_writer(path, **LOSSLESS[name])
        writer.__enter__()
        writer.write_episodes(episodes)
        try:
            with files_at_most(max(0, limit)):
                writer.__exit__(None, None, None)
        except EnvironmentFault as error:
            assert "all its episodes are written" in str(error)
            refused += 1
        assert wheres(path)[0] == expected, limit
        write_all(path, name, [])
        assert wheres(path)[0] == expected, limit
        assert not list(tmp_path.rglob("*log"))
    assert refused > 1


def write_all(path, name, episodes):
    with get_format(name).open_writer(path, **LOSSLESS[name]) as writer:
        writer.write_episodes(episodes)
    return path
