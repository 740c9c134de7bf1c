"""`drop_all_padded` over episodes in parts, of which the oldest are gone: what is left may be shorter than a gap
between offsets."""

from functools import partial

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.data import Index, ShardedReplayBuffer, Window
from ringmap.errors import NoClipsError
from ringmap.samplers import EpisodeSampler, EpochSampler, PrioritizedSampler, RecencySampler

WINDOW = {"where": Window([-8, 8], pad="zero"), "at": Index()}


def recorded(path, **options):
    """Return a ring whose oldest episode has lost all but its last 12 steps."""
    buf = ReplayBuffer(120, path=path, seed=0, spare_rows=20, sync_every_s=0, **options)
    for number, length in enumerate((40, 30, 5, 20, 25, 28)):
        record(buf, number, length)
    return buf


def record(buf, number, length):
    with buf.begin_episode(commit_every=4) as part:
        for step in range(length):
            part.append({"where": np.array([number, step]) + 1})


def stored(buf):
    rows = buf.get_col_data("where") - 1
    for number in np.unique(rows[:, 0]).tolist():
        steps = rows[rows[:, 0] == number, 1]
        yield number, int(steps.min()), int(steps.max()) + 1


def draws(buf, kind):
    if kind == "batches":
        with buf.batches(250, steps=4, window=WINDOW, drop_all_padded=True) as batches:
            yield from batches
        return
    if kind == "view":
        buf = buf.view(WINDOW, drop_all_padded=True)
        yield buf[range(len(buf))]
        yield buf.sample(1000)
        return
    yield buf.sample(1000, window=WINDOW, drop_all_padded=True)


SAMPLERS = {
    "priorities": PrioritizedSampler,
    "recency": partial(RecencySampler, 60),
    "episodes": EpisodeSampler,
    "epochs": lambda rng: EpochSampler(rng),
    "a function": lambda rng: lambda step, buf, size, history: np.arange(size) % buf.num_valid_ends(history),
}


@pytest.mark.parametrize("kind", ["sample", "batches", "view", "fleet", *SAMPLERS])
def test_no_item_is_padding_alone(home, kind):
    sampler = SAMPLERS[kind](rng=0) if kind in SAMPLERS else None
    writer = recorded(home / "fleet" / "ring", sampler=sampler)
    buf = ShardedReplayBuffer(str(home / "fleet"), seed=0) if kind == "fleet" else writer
    assert any(stop - start < 16 and start for _, start, stop in stored(writer)), "one is cut short"
    for number in range(6, 9):
        for batch in draws(buf, kind):
            assert not batch["where_is_pad"].all(1).any()
        record(writer, number, 9)
    buf.close()
    writer.close()


def test_all_that_is_left_is_too_short(home):
    buf = ReplayBuffer(24, path=home / "ring", seed=0, spare_rows=12, sync_every_s=0)
    record(buf, 0, 22)
    assert len(buf.view(WINDOW, drop_all_padded=True)) > 0
    record(buf, 1, 11)
    with pytest.raises(NoClipsError):
        buf.sample(4, window=WINDOW, drop_all_padded=True)
    buf.close()
