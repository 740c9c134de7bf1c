"""What a batch of a window carries: ids, numbers of episodes, computed columns in memory of the caller's or of the
loader's."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DataLoader

from ringmap import ReplayBuffer
from ringmap.clips.gather import ClipReader
from ringmap.data import Hindsight, Index, ReturnToGo, TimeToEnd, Window
from ringmap.errors import InputError, NoClipsError
from ringmap.samplers import PrioritizedSampler
from tests.unit.clips.windows import model


def filled(episodes=12, **options):
    buf = ReplayBuffer(**{"max_steps": 400, "seed": 0, "spare_rows": 50, "reward_at": "same", **options})
    for number in range(episodes):
        buf.write_episode(model.episode(number, 4 + number % 9))
    return buf


# -- ids ----------------------------------------------------------------------------------------


def test_a_batch_by_ids_has_the_ids_of_a_draw():
    """They are the anchors' positions, attributes and no keys; an item that is redrawn has the new one."""
    buf = filled(sampler=PrioritizedSampler(rng=0))
    view = buf.view(window={"where": Window([-1, 0])})
    batch = view[[3, 5, 3]]
    assert set(batch) == set(buf.column_names)
    assert batch.ids.tolist() == view.positions(np.array([3, 5, 3])).tolist()
    assert batch.weights is None
    view.sample(4)
    assert buf.update_priorities(batch.ids[:2], [9.0, 9.0]) == 2
    assert buf[[0, 7]].ids.tolist() == [0, 7]
    for other in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert other.ids.tolist() == batch.ids.tolist()
    while view.num_valid_ends() == len(view):
        buf.write_episode(model.episode(50, 40))
    again = view[[0]]
    position = int(again.ids[0])
    now = buf.view()
    ep = int(np.searchsorted(now.starts, position, side="right")) - 1
    assert again["where"][0, 1, 1] == position - now.starts[ep]


@pytest.mark.parametrize("context", [None, "fork", "forkserver"])
def test_batches_of_a_mapping_keep_their_ids_in_a_loader(home, context):
    buf = filled(path=home / "ring")
    view = buf.view(window={"where": Window([-1, 0]), "left": TimeToEnd()})
    order = BatchSampler(range(len(view)), 8, drop_last=False)
    loader = DataLoader(
        view,
        batch_size=None,
        sampler=order,
        num_workers=1 if context else 0,
        multiprocessing_context=context,
    )
    found = [batch for batch in loader]
    assert [b.ids.tolist() for b in found] == [view.positions(np.array(ids)).tolist() for ids in order]
    assert all("ids" not in batch for batch in found)
    for batch, ids in zip(found, order, strict=True):
        np.testing.assert_array_equal(batch["left"], view[ids]["left"])
    buf.close()


# -- numbers of episodes ------------------------------------------------------------------------


def test_the_index_of_a_view_counts_its_own_episodes():
    """Whatever is written or evicted; one that came in place of another has the number of what came."""
    buf = filled()
    chosen = [7, 2, 5]
    view = buf.view(window={"at": Index()}).take(chosen)
    every = list(range(len(view)))
    batch = view[every]
    assert list(zip(batch["at_episode"], batch["at_step"], strict=True)) == list(view.clip_indices)
    np.testing.assert_array_equal(batch["where"][:, 0], np.array(chosen)[batch["at_episode"]])
    left, redrawn = set(chosen), 0
    for number in itertools.count(50):
        buf.write_episode(model.episode(number, 9))
        left &= set(buf.get_col_data("where")[:, 0].tolist())
        if not left:
            break
        batch = view[every]
        assert set(batch["where"][:, 0].tolist()) <= left
        np.testing.assert_array_equal(batch["where"][:, 0], np.array(chosen)[batch["at_episode"]])
        redrawn += batch.redrawn.sum()
    assert redrawn
    with pytest.raises(NoClipsError):
        view[every]
    copied = pickle.loads(pickle.dumps(buf.view(window={"at": Index()})))
    assert copied[[0]]["at_episode"].tolist() == [0]


@pytest.mark.parametrize(
    ("window", "length", "missed"),
    [
        ({"flag": Window([0, 10])}, 12, 8),
        ({"flag": Window([0, 10])}, 25, 0),
        ({"flag": Window([0, 10])}, 15, 5),
        ({"flag": Window([-3, 4])}, 9, 5),
        ({"flag": Window([3], pad="edge")}, 9, 3),
        ({"flag": Window([0, 10], pad="edge")}, 12, 0),
        ({"flag": Window([5])}, 9, 5),
        ({"flag": Window([12])}, 9, 9),
    ],
)
def test_steps_between_offsets_are_unreached(window, length, missed):
    """Counted, not estimated: the steps that no item holds, in any of its columns."""
    buf = ReplayBuffer(100, seed=0)
    for number in range(2):
        buf.write_episode(model.episode(number, length))
    view = buf.view(window=window, columns=["flag"])
    offsets = np.array(window["flag"].offsets)
    held = {(ep, t + o) for ep, t in view.clip_indices for o in offsets.tolist() if 0 <= t + o < length}
    assert view.num_unreachable_steps == 2 * length - len(held) == 2 * missed


# -- memory -------------------------------------------------------------------------------------


def reached(achieved, goal):
    return -np.abs(achieved - goal)


def test_computed_columns_go_into_out():
    """An earlier batch serves as `out`, computed columns and relabelled goals included."""
    buf = ReplayBuffer(100, seed=0, reward_at="same")
    for at in (0, 20):
        steps = np.arange(at, at + 20.0)
        buf.write_episode({"achieved_goal": steps, "desired_goal": -steps, "reward": steps})
    window = {
        "left": TimeToEnd(),
        "r": ReturnToGo(offsets=[0, 1]),
        "her": Hindsight(reached, "final"),
        "twice": lambda batch: batch["reward"] * 2,
    }
    first = buf.sample(8, window=window)
    kept = dict(first)
    for _ in range(3):
        again = buf.sample(8, window=window, out=first)
        assert all(again[name] is values for name, values in kept.items())
        np.testing.assert_array_equal(again["twice"], 2 * again["reward"])
        np.testing.assert_array_equal(again["left"], 19 - again["achieved_goal"] % 20)
        last = again["achieved_goal"] // 20 * 20 + 19
        goals = np.where(again["her"], last, -again["achieved_goal"])
        np.testing.assert_array_equal(again["desired_goal"], goals)
    with pytest.raises(InputError, match=r"out\['left'\] must be"):
        buf.sample(8, window=window, out={"left": np.empty(8)})


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_computed_columns_travel_in_the_slot(home, context):
    """From the second batch of a worker on, computed columns lie in the shared slot, too."""
    buf = filled(path=home / "ring")
    view = buf.view(window={"where": Window([0, 1]), "left": TimeToEnd(), "r": ReturnToGo()})
    loader = DataLoader(view, batch_size=8, num_workers=1, multiprocessing_context=context)
    apart = []
    for number, batch in enumerate(loader):
        # A tensor that PyTorch sent has shared memory of its own; one over the slot does not say so.
        apart.append({name for name, values in batch.items() if values.is_shared()})
        ids = list(range(8 * number, 8 * number + len(batch["left"])))
        np.testing.assert_array_equal(batch["r"], view[ids]["r"])
    assert apart[0] == {"left", "r"}
    assert set().union(*apart[1:]) == set()
    buf.close()


@pytest.mark.branch
def test_batches_of_a_view_ask_the_disk_ahead(monkeypatch):
    """Each batch is asked for before the one before it is read."""
    buf, told = filled(), []
    right_want, right_at = ClipReader.want, ClipReader.at
    monkeypatch.setattr(ClipReader, "want", lambda *a: told.append("want") or right_want(*a))
    monkeypatch.setattr(ClipReader, "at", lambda *a: told.append(f"read {a[5]}") or right_at(*a))
    view = buf.view(window={"where": Window([0, 1])})
    assert [len(b["where"]) for b in view.batches(4, steps=3)] == [4, 4, 4]
    assert told == ["want", "want", "read True", "want", "read True", "read True"]
