"""What is no dataset at a path is called by its name: a link to nothing, a zip file."""

import os
import zipfile

import numpy as np
import pytest

import ringmap
from ringmap.data import convert, load_dataset, merge
from ringmap.errors import NotFoundError, UnsupportedError

EPISODE = {"obs": np.arange(5.0)}


@pytest.fixture
def dangling(tmp_path):
    os.symlink(tmp_path / "unmounted" / "ring", tmp_path / "link")
    return tmp_path / "link"


def write(path):
    buf = ringmap.ReplayBuffer(10)
    buf.write_episode(EPISODE)
    return buf


@pytest.mark.parametrize(
    "read",
    [
        ringmap.ReplayBuffer.open,
        lambda path: ringmap.ReplayBuffer(10, path=path),
        lambda path: ringmap.TransitionReplayBuffer(10, (2,), path=path),
        ringmap.check,
        ringmap.repair,
        load_dataset,
        lambda path: convert(path, f"{path}.h5"),
    ],
)
def test_a_link_to_nothing_says_so(dangling, read):
    with pytest.raises(NotFoundError, match=r"link: is a link to .*unmounted/ring, which is not there; mount"):
        read(dangling)
    assert not os.path.exists(dangling.parent / "unmounted")


@pytest.mark.parametrize("name", ["replay.zarr.zip", "set.ZIP"])
def test_a_zip_file_is_refused_by_name(tmp_path, name):
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("zarr.json", "{}")
    stem = str(path)[:-4]
    for use in (
        load_dataset,
        lambda path: convert(path, tmp_path / "to.h5"),
        lambda path: merge([path], tmp_path / "to.h5"),
        lambda path: write(path).dump(path),
        lambda path: write(path).dump(path, format="zarr"),
    ):
        with pytest.raises(UnsupportedError, match="not read or written in zip files; unpack it") as found:
            use(path)
        assert f"name the folder, {stem}" in str(found.value)
    assert sorted(os.listdir(tmp_path)) == [name]
