"""Folder: the conformance suite, and what is its own."""

from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from ringmap.data import get_format, load_dataset
from ringmap.errors import CorruptError
from ringmap.testing.formats import FormatTests
from tests.unit.formats.others import OtherOptions


class TestFolder(OtherOptions, FormatTests):
    name = "folder"
    suffix = ""
    mean_error = 2.0


@pytest.mark.slow
class TestFolderPNG(OtherOptions, FormatTests):
    name = "folder"
    suffix = ".d"
    writer_options: ClassVar = {"image_format": "png"}


@pytest.mark.parametrize("size", [(1, 1), (12, 9)])
@pytest.mark.parametrize("steps", [2, 40], ids=["few", "many"])
@pytest.mark.parametrize("side", [16, 128], ids=["one thread", "threads"])
def test_a_picture_of_another_size_is_refused(tmp_path, size, steps, side):
    """One pixel would fit into any picture, as NumPy copies it."""
    with get_format("folder").open_writer(tmp_path / "made", image_format="png") as writer:
        writer.write_episode({"x": np.zeros((steps, side, side, 3), np.uint8)})
    dataset = load_dataset(tmp_path / "made")
    assert dataset.load_episode(0)["x"].shape == (steps, 3, side, side)
    Image.new("RGB", size).save(tmp_path / "made/x/ep_0_step_1.png")
    with pytest.raises(CorruptError, match=r"ep_0_step_1\.png"):
        load_dataset(tmp_path / "made").load_episode(0)


@pytest.mark.parametrize("forged", [[-2, 5], [2.0, 3.0], [[2, 3]], [1 << 40, 3]])
@pytest.mark.parametrize("file", ["ep_len.npz", "ep_offset.npz"])
def test_forged_places_of_episodes_are_refused(tmp_path, file, forged):
    with get_format("folder").open_writer(tmp_path) as writer:
        writer.write_episodes([{"x": np.arange(2.0)}, {"x": np.arange(3.0)}])
    assert load_dataset(tmp_path).lengths.tolist() == [2, 3]
    np.savez(tmp_path / file, np.array(forged))
    with pytest.raises(CorruptError, match=r"expected \(E,\) integers|do not describe episodes"):
        load_dataset(tmp_path)
