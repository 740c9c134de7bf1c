"""Writers that are killed before every system call that changes a file; and wrong orders, which that must find."""

import contextlib
import os
import subprocess

import numpy as np
import pytest

from ringmap.data import get_format, list_formats, load_dataset
from ringmap.errors import ExistsError, LockedError
from ringmap.formats.builtin import Zarr
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.zarr.store import InsideStore
from tests.unit.formats import test_exported, test_folder, test_hdf5, test_lance, test_parquet, test_video, test_zarr

SUITES = [
    test_hdf5.TestHDF5,
    test_hdf5.TestCompressed,
    test_zarr.TestZarr,
    test_zarr.TestSmallChunks,
    test_folder.TestFolder,
    test_folder.TestFolderPNG,
    test_video.TestVideo,
    test_video.TestLossless,
    test_lance.TestLance,
    test_parquet.TestParquet,
    test_exported.TestBox,
    test_exported.TestShelf,
]


@pytest.mark.campaign
@pytest.mark.parametrize("kept", [0, 2], ids=["made", "extended"])
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.__name__)
def test_killed_at_every_system_call(tmp_path, suite, kept):
    with test_exported.registered():
        calls, lost = suite().losses(tmp_path, kept)
    print(f"{suite.__name__}, {kept} kept: {calls} places, {len(lost)} losses")
    assert lost == []


@pytest.mark.slow
def test_control_lengths_before_rows(tmp_path, monkeypatch):
    """Zarr's own order, the metadata of an array ahead of its chunks, must be caught."""

    def at_once(self, key, value):
        self._write(key, value.to_bytes())

    monkeypatch.setattr(InsideStore, "set_sync", at_once)
    assert test_zarr.TestZarr().losses(tmp_path, 2, 60, stop=True)[1]


def test_control_a_log_that_is_dropped_too_early(tmp_path, monkeypatch):
    monkeypatch.setattr(EpisodeWriter, "_take_over", lambda self: self._log.remove())
    assert test_folder.TestFolderPNG().losses(tmp_path, 0, 4, stop=True)[1]


@pytest.mark.slow
def test_control_a_reader_that_knows_no_log(tmp_path, monkeypatch):
    monkeypatch.setattr(Zarr, "open_dataset", Zarr.open_reader)
    assert test_zarr.TestZarr().losses(tmp_path, 0, 4, stop=True)[1]


LOGGED = ["hdf5", "zarr", "folder", "video", "lance", "parquet", "lerobot", "minari", "robomimic"]


NAMES = {"minari": "set-v0", "robomimic": "set.hdf5", "hdf5": "set.h5", "lance": "set.lance"}


@pytest.mark.parametrize("name", sorted({*LOGGED} & {*list_formats()} - {"lance"}))  # which does not live in a fork
def test_a_run_begins_anew_what_a_killed_one_left_without_episodes(tmp_path, name):
    """By default a writer refuses what exists; nothing is lost of a dataset without episodes."""
    path, x = tmp_path / NAMES.get(name, "set"), np.arange(4.0)
    rows = {"obs": x[:, None], "action": x[:, None], "reward": x, "terminated": x == 3}
    with get_format(name).open_writer(path, mode="error"), pytest.raises(LockedError):
        get_format(name).open_writer(path, mode="error").__enter__()
    for fps in (20, 30):
        pid = os.fork()
        if not pid:
            with contextlib.ExitStack() as stack:
                stack.callback(os._exit, 1)
                writer = stack.enter_context(get_format(name).open_writer(path, mode="error"))
                if fps == 30:
                    writer.write_episode(rows)
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert len(load_dataset(path, format=name).lengths) == fps // 30
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(ExistsError), get_format(name).open_writer(path, mode="error"):  # an episode is in its log
        pass
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", [name for name in LOGGED if name in list_formats()])
def test_a_copy_of_what_a_shell_sees_has_every_episode(tmp_path, name):
    """`cp DIR/* NEW/` beside a writer, or after its kill, copies no hidden file: what was acknowledged comes along."""
    made = tmp_path / "made"
    path = made / NAMES.get(name, "set")
    x = np.arange(4.0)
    with get_format(name).open_writer(path) as writer:
        writer.write_episode({"obs": x[:, None], "action": x[:, None], "reward": x})
        for folder, copy in ((made, tmp_path / "all"), (path, tmp_path / "inside" / path.name)):
            if folder.is_dir():
                copy.mkdir(parents=True)
                seen = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
                subprocess.run(["cp", "-r", *seen, copy], check=True)
    places = [tmp_path / "all" / path.name]
    if made != path and path.is_dir() and name not in ("zarr", "parquet"):  # whose own hidden files say what they are
        places.append(tmp_path / "inside" / path.name)
    for place in places:
        assert len(load_dataset(place, format=name, output="numpy").lengths) == 1, place
