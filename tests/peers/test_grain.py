"""grain's loaders over our buffers and datasets: every clip once, also with workers."""

import pickle

import numpy as np
import pytest

pytest.importorskip("grain", reason="grain is not installed (extra exits)")

import grain
from absl import flags

import ringmap
from ringmap.data import ReplayBuffer, load_dataset

pytestmark = pytest.mark.filterwarnings("ignore")  # what grain says is not for us to mend


def filled(path):
    buf = ReplayBuffer(max_steps=500, path=path, history_len=4)
    for length in (20, 3, 31, 4):
        buf.write_episode({"step": np.arange(length) + 100 * length, "x": np.zeros((length, 2))})
    return buf


def loaded(source, workers):
    sampler = grain.samplers.IndexSampler(len(source), grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=0)
    operations = [grain.transforms.Batch(8, drop_remainder=False)]
    return list(grain.DataLoader(data_source=source, sampler=sampler, operations=operations, worker_count=workers))


EXPECTED = sorted(100 * n + i for n in (20, 31, 4) for i in range(n - 3))


@pytest.mark.parametrize("kind", ["buffer", "view", "dataset", "transitions"])
def test_a_loader_hands_out_every_clip_once(tmp_path, kind):
    if kind == "transitions":
        buf = ringmap.TransitionReplayBuffer(100, (1,), device=None, path=tmp_path / "ring")
        for step in range(50):
            buf.add([step], 0, 0.0, [step + 1], False)
        source, name, expected = ringmap.grain.source(buf), "observations", list(range(50))
    else:
        buf, name, expected = filled(tmp_path / "ring"), "step", EXPECTED
        data = {"buffer": buf, "view": buf.view()}.get(kind)
        if data is None:
            buf.dump(tmp_path / "kept.h5", format="hdf5")
            data = load_dataset(tmp_path / "kept.h5", num_steps=4)
        source = ringmap.grain.source(data)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    batches = loaded(source, 0)
    found = [int(one) for batch in batches for one in batch[name].reshape(len(batch[name]), -1)[:, 0]]
    assert sorted(found) == expected
    buf.close()


def test_workers(tmp_path):
    flags.FLAGS.mark_as_parsed()  # as absl's app.run does: workers take their settings from flags
    buf = filled(tmp_path / "ring")
    source = ringmap.grain.source(buf)
    found = [int(one) for batch in loaded(source, 2) for one in batch["step"][:, 0]]
    assert sorted(found) == EXPECTED
    buf.close()


def test_the_clips_are_those_of_the_moment(tmp_path):
    buf = filled(tmp_path / "ring")
    source = ringmap.grain.source(buf)
    buf.write_episode({"step": np.arange(9), "x": np.zeros((9, 2))})
    assert len(source) == len(EXPECTED) == len(buf) - 6
    copy = pickle.loads(pickle.dumps(source))
    assert [copy[i]["step"][0] for i in range(len(copy))] == [source[i]["step"][0] for i in range(len(source))]
    dataset = grain.MapDataset.source(source).shuffle(seed=0).batch(8)
    assert len(dataset[0]["step"]) == 8
    buf.close()
