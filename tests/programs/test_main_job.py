"""The main job notices what it is there to notice. `tests/programs` runs it whole."""

import argparse
import gc
import importlib.util
import re
import sys

import numpy as np
import pytest
import torch

from ringmap.data import EPISODE_DATA_KEY, ReplayBuffer
from tests import ROOT


@pytest.fixture(scope="module")
def job():
    spec = importlib.util.spec_from_file_location("main_job", ROOT / "examples/main_job.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def episodes(job):
    return [{**job.play(seed, draw=True), EPISODE_DATA_KEY: {"seed": seed}} for seed in range(4)]


@pytest.fixture
def store(job, tmp_path):
    """Make what a collector would leave in a directory."""
    made = []

    def make(episodes):
        buf = ReplayBuffer(job.MAX_STEPS, job.HISTORY_LEN, job.FRAMESKIP, path=tmp_path / f"{len(made)}/replay")
        buf.write_episodes(episodes)
        made.append(buf)
        return buf

    yield make
    for buf in made:
        buf.close()


def spoilt(episode, name, t):
    """Return the episode with one bit of one value turned over."""
    values = np.stack(episode[name])
    values.view(np.uint8).reshape(len(values), -1)[t, 0] ^= 1
    return {**episode, name: values}


def test_collecting_goes_on_where_it_was(job, tmp_path, capsys, monkeypatch):

    class Enough(Exception):
        pass

    class BatchSource(job.HalfBlind):
        def say(self, infos):
            if (infos["step_idx"] == 15).any():
                raise Enough

    with monkeypatch.context() as patched:
        patched.setattr(job, "HalfBlind", BatchSource)
        with pytest.raises(Enough):
            job.collect(tmp_path, 4)
    gc.collect()  # the lock, which a kill gives back
    job.collect(tmp_path, 4)
    job.collect(tmp_path, 4)
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    stored = [int(seed) for word, seed, _ in said if word == "stored"]
    assert sorted(stored) == [0, 1, 2, 3]
    buf = ReplayBuffer.open(tmp_path)
    assert job.seeds_in(buf) == stored
    assert job.episodes_asked(tmp_path) == 4
    job.replay_and_compare(buf, {0, 1, 2, 3})


def test_a_seed_gives_the_same_steps_drawn_or_not(job, episodes):
    blind = job.play(1, draw=False)
    assert "pixels" not in blind
    assert all(v.tobytes() == episodes[1][name].tobytes() for name, v in blind.items())


@pytest.mark.parametrize("name", ["observation", "action", "reward", "truncated", "pixels", "step_idx"])
def test_a_changed_bit_is_seen(job, episodes, store, name):
    buf = store([*episodes[:2], spoilt(episodes[2], name, 3)])
    with pytest.raises(job.Off, match=f"column '{name}' of episode 2 differs"):
        job.replay_and_compare(buf, {2})


def test_another_dump_is_seen(job, episodes, store, tmp_path):
    buf, other = store(episodes), store([*episodes[:3], spoilt(episodes[3], "pixels", 0)])
    buf.dump(tmp_path / "a.h5", format="hdf5")
    job.compare_dump(buf, tmp_path / "a.h5")
    with pytest.raises(job.Off, match="column 'pixels' of episode 3 differs"):
        job.compare_dump(other, tmp_path / "a.h5")
    renamed = [{**episode, EPISODE_DATA_KEY: {"seed": 0}} for episode in episodes]
    with pytest.raises(job.Off, match="episode data"):
        job.compare_dump(store(renamed), tmp_path / "a.h5")
    with pytest.raises(job.Off, match="clips in the file"):
        job.compare_dump(store(episodes[:3]), tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("said", "doing", "found", "sound"),
    [
        ([0, 1], "step", [0, 1], True),
        ([0, 1], "write", [0, 1], True),
        ([0, 1], "write", [0, 1, 2], True),  # killed between the commit and the word for it
        ([0, 1], "step", [0, 1, 2], False),
        ([0, 1], "step", [0], False),
        ([0, 1], "write", [0, 1, 1], False),
    ],
)
def test_what_a_kill_may_leave(job, said, doing, found, sound):
    collector = argparse.Namespace(stored=said[1:], doing=doing, seed=2)
    if sound:
        job.expect_nothing_lost(found, collector, said[:1])
    else:
        with pytest.raises(job.Off, match="are stored, but"):
            job.expect_nothing_lost(found, collector, said[:1])


def test_a_torn_clip_is_seen(job):
    whole = {"id": torch.zeros(2, 3), "step_idx": torch.tensor([[0, 2, 4], [5, 7, 9]])}
    job.expect_whole(whole)
    for name, value in {"id": 1, "step_idx": 8}.items():
        torn = {**whole, name: whole[name].clone()}
        torn[name][1, 2] = value
        with pytest.raises(job.Off, match="torn"):
            job.expect_whole(torn)


@pytest.mark.parametrize(
    ("seeds", "loss", "wrong"),
    [
        ([0, 1, 2, 3], 0.1, None),
        ([0, 1, 3], 0.1, r"lost: \[2\]"),
        ([0, 1, 2, 3, 3], 0.1, "doubled: 1"),
        ([0, 1, 2, 3], 0.9, "loss did not go down"),
    ],
)
def test_what_is_off_ends_the_job(job, episodes, store, monkeypatch, capsys, seeds, loss, wrong):
    """The whole job, but for collection and training, whose outcome is planted."""
    buf = store([])

    def planted(path, options, before):
        buf.write_episodes(episodes[seed] for seed in seeds)
        trainer = job.Trainer()
        trainer.losses = [1.0] * 5 + [loss] * 20
        return trainer, 20, [1], 2

    monkeypatch.setattr(job, "collect_and_train", planted)
    monkeypatch.setattr(sys, "argv", ["job", "--dir", str(buf.path.parent), "--episodes", "4"])
    code = job.main()
    out, err = capsys.readouterr()
    if wrong is None:
        assert (code, "All is well" in out) == (0, True), err
    else:
        assert (code, "All is well" in out) == (1, False)
        assert re.search(f"NOT AS IT SHOULD BE: .*{wrong}", err)
