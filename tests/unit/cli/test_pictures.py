"""Plots and previews: the pixels are those of the buffer."""

import sys

import numpy as np
import pytest
from PIL import Image

from ringmap.cli.pictures import _running_mean
from ringmap.data import ReplayBuffer
from tests.unit.cli.conftest import fill


def test_a_contact_sheet_has_the_frames_of_the_episodes(cli, replay, tmp_path):
    done = cli("preview", replay, "-o", "sheet.png", "--frames", "3")
    assert done.out == "wrote sheet.png: 4 episodes, 12 frames of pixels\n"
    with Image.open(tmp_path / "sheet.png") as opened:
        sheet = np.asarray(opened)
    side, gap, caption = 96, 2, 14
    assert sheet.shape == (4 * (side + caption + gap) + gap, 3 * (side + gap) + gap, 3)
    reader = ReplayBuffer.open(tmp_path / "replay")
    for row in range(4):
        pixels = reader.load_episode(row)["pixels"]
        at = [0, round((len(pixels) - 1) / 2), len(pixels) - 1]
        for column, step in enumerate(at):
            top, left = gap + row * (side + caption + gap) + caption, gap + column * (side + gap)
            tile = sheet[top : top + side : 12, left : left + side : 12]
            assert np.array_equal(tile, pixels[step]), (row, column)


def test_which_episodes(cli, replay):
    done = cli("preview", replay, "-e", "0", "-e", "-1", "--frames", "99")
    assert done.out == "wrote preview.png: 2 episodes, 24 frames of pixels\n"


def test_a_video_has_every_frame(cli, replay, tmp_path):
    av = pytest.importorskip("av")
    done = cli("preview", replay, "-o", "film.mp4", "--episode", "1", "--fps", "5")
    assert done.out == "wrote film.mp4: 1 episode, 10 frames of pixels\n"
    with av.open(str(tmp_path / "film.mp4")) as film:
        assert film.streams.video[0].average_rate == 5
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(frames) == 10
    pixels = ReplayBuffer.open(tmp_path / "replay").load_episode(1)["pixels"]
    large = pixels[3].repeat(24, axis=0).repeat(24, axis=1)
    assert abs(frames[3].astype(int) - large).mean() < 40  # noise, at half the chroma


@pytest.mark.parametrize("shape", [(8, 9), (8, 9, 1), (8, 9, 4), (3, 8, 9)])
def test_kinds_of_pictures(cli, tmp_path, shape):
    buffer = ReplayBuffer(50, path=tmp_path / "k")
    buffer.write_episode({"x": np.zeros(5), "camera": np.full((5, *shape), 200, np.uint8)})
    buffer.close()
    assert cli("preview", "k", "--frames", "1").out.endswith("1 frame of camera\n")
    factor = -(-96 // 8)
    with Image.open(tmp_path / "preview.png") as sheet:
        assert sheet.size == (9 * factor + 4, 8 * factor + 18)
    assert cli("preview", "k", "--force", "--column", "camera").code == 0


@pytest.mark.slow
def test_a_plot_shows_what_is_there(cli, replay, tmp_path):
    assert cli("plot", replay, "-o", "a.png").out == "wrote a.png\n"
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG"
        assert picture.size == (960, 4 * 264)  # length, return, fill, eviction
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10
    cli("dump", replay, "d.h5")
    assert cli("plot", "d.h5", "-o", "b.png").code == 0
    with Image.open(tmp_path / "b.png") as picture:
        assert picture.size == (960, 2 * 264)


def test_a_title_that_is_no_mathematics(cli, tmp_path):
    name = r"$\frac{$_^{"
    fill(tmp_path / name).close()
    assert cli("plot", name).code == 0


def test_running_mean():
    values = np.random.default_rng(0).normal(size=50)
    expected = [values[max(0, i - 19) : i + 1].mean() for i in range(50)]
    assert np.allclose(_running_mean(list(values)), expected)
    assert np.allclose(_running_mean([1.0, 3.0]), [1, 2])


@pytest.mark.parametrize("command", ["plot", "preview"])
def test_a_file_is_replaced_if_told(cli, replay, tmp_path, command):
    (tmp_path / "mine.png").write_bytes(b"mine")
    assert cli(command, replay, "-o", "mine.png", "--force").code == 0
    assert (tmp_path / "mine.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("missing", "extra", "words"),
    [("matplotlib", "plot", ["plot", "replay"]), ("av", "video", ["preview", "replay", "-o", "x.mp4"])],
)
def test_a_missing_extra_is_named(cli, replay, monkeypatch, missing, extra, words):
    monkeypatch.setitem(sys.modules, missing, None)
    done = cli(*words)
    assert done.code == 2
    assert f'pip install "ringmap[{extra}]"' in done.err
