"""Buffers and datasets of every released format version open, whole, for ever."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.data import DistillationBuffer, get_format, list_formats, load_dataset
from ringmap.errors import CorruptError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.inspect.describe import pending_at
from ringmap.storage.records.manifest import VERSION
from tests.released import datasets
from tests.released.make import (
    CHAINS,
    FORMATS,
    KINDS,
    KINDS_2,
    LENGTHS,
    episode,
    packed_episode,
    pictured,
    rows,
    step,
    unpack,
)

HERE = Path(__file__).parent
RINGS = ["", "-zarr", "-mixed", "-prioritized"]
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
    kinds = {"", "-codecs", *(f"-{kind}" for kind in KINDS if kind != "memmap")}
    found = {path.stem.removeprefix("format-") for path in HERE.glob("format-*.txt")}
    assert VERSION == 2
    assert found == {f"1{kind}" for kind in kinds} | {f"2-{kind}" for kind in KINDS_2}


@pytest.fixture
def old(tmp_path):
    """Return what unpacks a fixture."""

    def unpacked(kind, version=1):
        unpack((HERE / f"format-{version}{kind}.txt").read_text(), tmp_path / "buf")
        return tmp_path / "buf"

    return unpacked


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("kind", RINGS)
def test_it_opens_whole(old, kind, mode):
    path = old(kind)
    buf = ReplayBuffer.open(path, mode)
    numbers = sorted(KEPT)
    for got, number in zip(buf.episodes(), numbers, strict=True):
        same(got, episode(number, KEPT[number]))
    assert buf.history_len == 2
    if mode == "r+":
        assert buf.state_dict()["step"] == 1
        buf.write_episode(episode(6, 3))
        assert buf.get_episode_data(-1)["seed"] == [6]
    buf.close()
    assert ringmap.check(path) == []


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr")
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_chains_of_codecs_that_have_no_name_are_read_and_written(old, mode):
    path = old("-codecs")
    with ReplayBuffer.open(path, mode) as buf:
        for number, got in enumerate(buf.episodes(), 1):
            same(got, packed_episode(number))
        assert buf.sample(9).keys() == CHAINS.keys()
        if mode == "r+":
            buf.write_episode(packed_episode(7))
            same(buf.load_episode(-1), packed_episode(7))
    assert ringmap.check(path) == []
    with ReplayBuffer.open(path) as again:
        same(again.load_episode(-1), packed_episode(7 if mode == "r+" else 2))


def test_priorities_are_there(old):
    sampler = PrioritizedSampler()
    with ReplayBuffer.open(old("-prioritized"), "r+", sampler=sampler) as buf:
        kept = sampler.kept_priorities()
        assert kept.values[8:13].tolist() == [1, 3, 5, 7, 1]
        assert len(buf.sample(4).weights) == 4


@pytest.mark.parametrize("interrupted", ["drop", "keep"])
def test_an_episode_that_was_cut_off_is_there(old, interrupted):
    path = old("-streaming")
    with ReplayBuffer.open(path, "r+", interrupted=interrupted) as buf:
        first, second = (
            {k: v for k, v in episode(*e).items() if k[0] != "_"} for e in ((0, 3), (1, 2))
        )
        same(buf.load_episode(0), first)
        assert buf.num_episodes == 1 + (interrupted == "keep")
        if interrupted == "keep":
            same(buf.load_episode(1), second)
    assert ringmap.check(path) == []


def version_of(path):
    body = json.loads((path / "manifest.json").read_text())
    return body["version"], body.get("features", [])


VERSION_2 = 2, ["groups"]


def steps_at(t, lane):
    """Return the columns of the steps of these numbers and lanes."""
    expected = [np.stack(column) for column in zip(*map(step, t), strict=True)]
    return [column[np.arange(len(t)), lane.astype(int)] for column in expected]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_rows_of_an_open_group_are_there(old, mode):
    path = old("-transitions", 2)
    assert version_of(path) == VERSION_2
    assert (pending_at(path), ringmap.check(path)) == (10, [])
    with TransitionReplayBuffer.open(path, mode, device=None, sampler=everything) as buf:
        count = 20 if mode == "r" else 30
        assert len(buf) == count
        batch = buf.sample(count)
        assert sorted(batch["actions"]) == sorted([*range(count // 2)] * 2)
        lane = batch["observations"][:, 0] >= 100
        names = ("observations", "actions", "rewards", "next_observations", "dones")
        wanted = steps_at(batch["actions"], lane)
        same({name: batch[name] for name in names}, dict(zip(names, wanted, strict=True)))
    assert pending_at(path) == (10 if mode == "r" else 0)
    assert ringmap.check(path) == []


def everything(step, buffer, batch_size, history_len):
    """Return the clips in order."""
    return np.arange(batch_size)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_rows_of_an_open_group_of_a_distillation_are_there(old, mode):
    path = old("-distillation", 2)
    assert version_of(path / "rows") == VERSION_2
    pending = pending_at(path / "rows")
    assert pending == 8
    with DistillationBuffer.open(path, mode) as buf:
        count = 24 if mode == "r+" else 24 - pending
        batch = buf.rows(np.arange(count))
        observations, labels = map(np.concatenate, zip(*map(rows, range(count // 4)), strict=True))
        np.testing.assert_array_equal(batch["student_observations"], observations)
        assert batch["teacher_actions"].tolist() == labels.tolist()
    assert ringmap.check(path / "rows") == []


@pytest.mark.parametrize("kind", [*RINGS, "-transitions"])
def test_version_1_is_upgraded_by_name_and_stays_whole(old, kind):
    path = old(kind)
    assert version_of(path) == (1, [])
    before = read(path)
    assert ringmap.upgrade(path) == ["chains", "groups", "mutable"]
    assert version_of(path) == (2, ["chains", "groups", "mutable"])
    assert ringmap.check(path) == []
    assert read(path) == before


def read(path):
    """Return the bytes of all episodes."""
    with ReplayBuffer.open(path) as buf:
        return [
            {n: np.array(v).tobytes() for n, v in one.items() if n[0] != "_"}
            for one in buf.episodes()
        ]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_transitions_are_there(old, mode):
    path, sampler = old("-transitions"), PrioritizedSampler()
    with TransitionReplayBuffer.open(path, mode, device=None, sampler=sampler) as buf:
        assert len(buf) == 24
        batch = buf.sample(24)
        chosen = steps_at(batch["actions"], batch["observations"][:, 0] >= 100)
        names = ("observations", "actions", "rewards", "next_observations", "dones")
        same({name: batch[name] for name in names}, dict(zip(names, chosen, strict=True)))
        if mode == "r+":
            assert set(sampler.kept_priorities().values.tolist()) == {1, 5}
            assert version_of(path) == (1, [])
            buf.add(*step(20))
    assert version_of(path) == (VERSION_2 if mode == "r+" else (1, []))
    assert ringmap.check(path) == []


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_rows_of_a_distillation_and_their_labels_are_there(old, mode):
    path = old("-distillation")
    with DistillationBuffer.open(path, mode) as buf:
        assert (buf.retention, buf.keep_rounds, buf.round) == ("last", 2, 2)
        batch = buf.rows(np.arange(8, 24))
        observations, labels = map(np.concatenate, zip(*map(rows, range(2, 6)), strict=True))
        labels[8:12] += 1
        np.testing.assert_array_equal(batch["student_observations"], observations)
        assert batch["teacher_actions"].tolist() == labels.tolist()
        assert batch["policy_version"].tolist() == [6] * 8 + [7] * 8
        if mode == "r+":
            assert buf.start_round() == 3
            assert buf.add(*rows(6)).tolist() == [24, 25, 26, 27]
    assert ringmap.check(path / "rows") + ringmap.check(path / "labels") == []


def test_a_rollout_is_there(old):
    buf = ringmap.RolloutBuffer(2, 4, (3,), (2,))
    buf.load(old("-rollout") / "rollout.pt")
    assert len(buf) == 4
    assert buf.observations[:, 1, 2].tolist() == buf.rewards[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", FORMATS)
def test_datasets_are_there(old, kind):
    path = old(f"-{kind}") / FORMATS[kind]
    dataset = load_dataset(path, output="numpy")
    assert dataset.lengths.tolist() == LENGTHS
    expected = [pictured(number, length) for number, length in enumerate(LENGTHS)]
    for name in ("action", "x"):
        together = np.concatenate([one[name] for one in expected])
        np.testing.assert_array_equal(dataset.get_col_data(name), together)
    frames = dataset.load_episode(1)["pixels"]
    np.testing.assert_array_equal(frames.transpose(0, 2, 3, 1), expected[1]["pixels"])


def test_control_a_byte_of_it_matters(old):
    table = old("") / "episodes.npy"
    raw = bytearray(table.read_bytes())
    raw[4096 + 6 * 128 + 16] ^= 1
    table.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"episodes\.npy"):
        ReplayBuffer.open(table.parent)


def test_control_a_byte_of_a_chunk_matters(old):
    chunk = old("-zarr") / "columns/000-etat-x.zarr/c.2.0"
    raw = bytearray(chunk.read_bytes())
    raw[20] ^= 1
    chunk.write_bytes(raw)
    with (
        ReplayBuffer.open(chunk.parents[2]) as buf,
        pytest.raises(CorruptError, match=r"c\.2\.0"),
    ):
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
