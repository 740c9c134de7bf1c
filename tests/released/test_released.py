"""Buffers and datasets of every released format version open, whole, for ever."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.data import get_format, list_formats, load_dataset
from ringmap.errors import CorruptError
from ringmap.storage.manifest import VERSION
from tests.released import datasets
from tests.released.make import LENGTHS, episode, unpack

HERE = Path(__file__).parent
RELEASED = sorted(path.stem.removeprefix("format-") for path in HERE.glob("format-*.txt"))
KEPT = {3: LENGTHS[3], 4: LENGTHS[4], 5: 2, 2: LENGTHS[2]}


def same(got, expected):
    assert list(got) == list(expected)
    for name in expected:
        if name == "_episode_data":
            data = got[name]
            assert {**data, "goal": data["goal"].tolist()} == {
                **expected[name],
                "goal": expected[name]["goal"].tolist(),
            }
        else:
            np.testing.assert_array_equal(np.array(got[name]), expected[name])


def test_every_format_has_its_fixtures():
    assert {f"{version}{kind}" for version in range(1, VERSION + 1) for kind in ("", "-zarr")} <= {
        *RELEASED
    }


@pytest.fixture(params=RELEASED)
def released(request, tmp_path):
    unpack((HERE / f"format-{request.param}.txt").read_text(), tmp_path / "buf")
    return tmp_path / "buf"


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_it_opens_whole(released, mode):
    buf = ReplayBuffer.open(released, mode)
    numbers = sorted(KEPT)
    for got, number in zip(buf.episodes(), numbers, strict=True):
        same(got, episode(number, KEPT[number]))
    assert buf.history_len == 2
    if mode == "r+":
        assert buf.state_dict()["step"] == 1
        buf.write_episode(episode(6, 3))
        assert buf.get_episode_data(-1)["seed"] == [6]
    buf.close()
    assert ringmap.check(released) == []


def test_control_a_byte_of_it_matters(released):
    table = released / "episodes.npy"
    raw = bytearray(table.read_bytes())
    raw[4096 + 6 * 128 + 16] ^= 1
    table.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"episodes\.npy"):
        ReplayBuffer.open(released)


def test_control_a_byte_of_a_chunk_matters(tmp_path):
    unpack((HERE / "format-1-zarr.txt").read_text(), tmp_path / "buf")
    chunk = tmp_path / "buf/columns/000-etat-x.zarr/c.2.0"
    raw = bytearray(chunk.read_bytes())
    raw[20] ^= 1
    chunk.write_bytes(raw)
    with ReplayBuffer.open(tmp_path / "buf") as buf, pytest.raises(CorruptError, match=r"c\.2\.0"):
        list(buf.episodes())
    buf.close()


# -- datasets that a killed writer of a release left ------------------------------------------------


@pytest.fixture(params=[f"{n}{f}" for n in datasets.WRITERS for f in ("", "-fresh")])
def left(request, tmp_path):
    name = request.param.removesuffix("-fresh")
    if name not in list_formats():
        pytest.skip(f"{name} is not installed")
    unpack((HERE / "datasets-1.txt").read_text(), tmp_path)
    return name, tmp_path / f"{request.param}{datasets.WRITERS[name][0]}"


def test_a_dataset_with_a_log_of_a_release_is_read_and_appended_to(left):
    name, path = left
    expected = datasets.episodes()
    for extra in ([], [datasets.make_episode(4, 2) | {"_episode_data": {"seed": 4}}]):
        with (
            get_format(name).open_writer(path, **datasets.WRITERS[name][1])
            if extra
            else nullcontext() as writer
        ):
            for episode in extra:
                writer.write_episode(episode)
        expected += extra
        dataset = load_dataset(path, layout="HWC")
        assert dataset.get_episode_data()["seed"] == list(range(len(expected)))
        for number, wanted in enumerate(expected):
            got = dataset.load_episode(number)
            for column in ("pixels", "where", "action", "reward"):
                np.testing.assert_array_equal(np.asarray(got[column]), wanted[column])
        dataset.close()
    assert not (path / ".ringmap.log").exists()
