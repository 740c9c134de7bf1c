"""Steps that carry their own episode and step number, so that a clip proves itself."""

import numpy as np

from ringmap import Column
from ringmap.buffers.replay import EPISODE_DATA_KEY

MUTABLE = {
    "obs": ((2,), "<i8"),
    "latent": Column((3,), "<f4", mutable=True),
    "label": Column((), "<i4", mutable=True),
}
"""The schema of a ring with values that change."""

COLUMNS = ["episode", "step", "obs/x", "action"]


def columns(number, first, last):
    """Return steps `[first, last)` of episode `number`, every column computed from these."""
    steps = np.arange(first, last)
    return {
        "episode": np.full(len(steps), number, np.int64),
        "step": steps.astype(np.int32),
        "obs/x": ((number * 31 + steps[:, None] * 7 + np.arange(3)) % 251).astype(np.uint8),
        "action": (number + steps[:, None] / 1024 + np.array([0, 0.5])).astype(np.float64),
    }


def episode(number, length, data=None):
    """Return an episode for `write_episode`."""
    made = columns(number, 0, length)
    return made if data is None else {**made, EPISODE_DATA_KEY: data}


def same(got, expected):
    """Compare two dicts of arrays, bit for bit; text is as wide as what is read."""
    assert list(got) == list(expected)
    for name, values in expected.items():
        found = np.asarray(got[name])
        if found.dtype.kind == "U":
            values = values.astype(found.dtype.str)
            np.testing.assert_array_equal(values, expected[name])
        assert found.dtype == values.dtype, name
        assert found.shape == values.shape, (name, found.shape, values.shape)
        assert found.tobytes() == values.tobytes(), name


def clip(number, first, history, skip=1):
    """Return the clip of episode `number` that starts at step `first`."""
    dense = columns(number, first, first + history * skip)
    return {name: values.reshape(history, -1) if name == "action" else values[::skip] for name, values in dense.items()}


def prove(batch, lengths, history, skip=1):
    """Check every clip of a batch against what it says of itself; return `(episode, start)` of each.

    Args:
        batch: what `sample` returned.
        lengths: episode number -> length, of the episodes that may be stored.
        history: observations per clip.
        skip: frameskip.
    """
    found = []
    for i in range(len(batch["episode"])):
        one = {name: values[i] for name, values in batch.items()}
        number, first = int(one["episode"][0]), int(one["step"][0])
        assert number in lengths, f"episode {number} is not stored"
        assert 0 <= first <= lengths[number] - history * skip
        same(one, clip(number, first, history, skip))
        found.append((number, first))
    return found


def snapshot(buf):
    """Return all that a buffer shows, for comparison before and after a call that must change nothing."""
    return {
        "columns": buf.column_names,
        "lengths": buf.lengths.tolist(),
        "offsets": buf.offsets.tolist(),
        "num": (buf.num_episodes, buf.num_steps_stored, len(buf)),
        "episodes": [
            {
                name: repr(values)
                if name == EPISODE_DATA_KEY
                else [(v.dtype.str, v.shape, v.tobytes()) for v in values]
                for name, values in episode.items()
            }
            for episode in buf.episodes()
        ],
        "data names": buf.episode_column_names,
        "data": repr(buf.get_episode_data()),
        "clips": list(buf.clip_indices),
        "sampling": buf.state_dict()["step"],
        "redraws": buf.num_redraws,
        "settings": (buf.max_steps, buf.history_len, buf.frameskip, buf.mode, buf.path),
    }


def stored(buf):
    """Return the numbers of the stored episodes, after checking every row of each."""
    numbers = []
    for i, length in enumerate(buf.lengths.tolist()):
        steps = buf.load_episode(i)
        number = int(steps["episode"][0])
        same(steps, columns(number, 0, length))
        numbers.append(number)
    return numbers
