"""torchdata's StatefulDataLoader over our buffers: a pass that was stopped goes on exactly where it was."""

import numpy as np
import pytest

pytest.importorskip("torchdata", reason="torchdata is not installed (extra exits)")

from torchdata.stateful_dataloader import StatefulDataLoader

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.data import Window

pytestmark = pytest.mark.filterwarnings("ignore")  # what torchdata says is not for us to mend


def episodes(path):
    buf = ReplayBuffer(max_steps=500, path=path, history_len=4)
    for length in (20, 31, 17):
        buf.write_episode({"step": np.arange(length) + 100 * length})
    return buf


def transitions(path):
    buf = TransitionReplayBuffer(100, (1,), device=None, path=path)
    for step in range(60):
        buf.add([step], 0, 0.0, [step + 1], False)
    return buf


KINDS = {
    "buffer": (episodes, lambda buf: buf),
    "view": (episodes, lambda buf: buf.view()),
    "windows": (episodes, lambda buf: buf.view(window={"step": Window(range(-2, 1))})),
    "transitions": (transitions, lambda buf: buf),
}


def numbers(batch):
    values = next(iter(batch.values()))
    return np.asarray(values).reshape(len(values), -1)[:, 0].astype(int).tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_goes_on_where_it_was(tmp_path, kind, workers):
    make, pick = KINDS[kind]
    buf = make(tmp_path / "ring")
    data = pick(buf)

    def loader():
        return StatefulDataLoader(data, batch_size=7, shuffle=True, num_workers=workers)

    first = loader()
    batches, state = [], None
    for number, batch in enumerate(first):
        batches.append(numbers(batch))
        if number == 2:
            state = first.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert [numbers(batch) for batch in again] == batches[3:]
    assert len(batches) > 5
    buf.close()
