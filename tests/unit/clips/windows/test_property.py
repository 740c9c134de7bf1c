"""Random windows over random rings, against a plain Python model."""

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.clips import cut as cut_module
from ringmap.clips.cut import Steps
from ringmap.data import Window
from ringmap.errors import NoClipsError
from tests.tiers import few
from tests.unit.clips.windows import model

STORAGES = {"ram": {}, "memmap": {"path": True}, "zarr": {"path": True, "storage": "zarr"}}


def random_window(rng):
    """Return a random window: some columns, some of them padded."""
    window = {}
    for name in model.COLUMNS:
        if rng.random() < 0.3:
            continue
        if rng.random() < 0.6:
            low = int(rng.integers(-5, 5))
            offsets = range(low, low + int(rng.integers(1, 7)))
        else:
            offsets = rng.integers(-6, 7, rng.integers(1, 5)).tolist()
        pads = [None, None, "edge", "zero", 3]
        if model.COLUMNS[name][0] == "f":
            pads.append("nan")
        window[name] = Window(offsets, pad=pads[rng.integers(len(pads))])
    return window


def random_request(rng):
    """Return the arguments of a draw, and what the model needs to know of them."""
    window = random_window(rng)
    cut = slice(None)
    if rng.random() < 0.4:
        cut = slice(int(rng.integers(0, 4)), -int(rng.integers(1, 4)))
    drop = bool(rng.random() < 0.4)
    columns = None
    if rng.random() < 0.3:
        columns = [name for name in model.COLUMNS if rng.random() < 0.7] or ["where"]
        columns = sorted({*columns, *window, "where"})
    return {"window": window, "anchors": cut, "drop_all_padded": drop, "columns": columns}


def check_case(number, home, storage):
    """Compare one random case with the model; return how many items were compared."""
    rng = np.random.default_rng([number, 18])
    options = dict(STORAGES[storage])
    if options.pop("path", False):
        options["path"] = home / f"ring{number}"
    reward_at = [None, "next", "same"][rng.integers(3)]
    buf = ReplayBuffer(
        int(rng.integers(20, 60)),
        spare_rows=int(rng.integers(1, 20)),
        seed=number,
        reward_at=reward_at,
        **options,
    )
    stored = {}
    for ep in range(int(rng.integers(1, 12))):
        made = model.episode(ep, int(rng.integers(1, 16)))
        stored[ep] = made
        buf.write_episode(made)
    live = buf.num_episodes
    kept = list(stored.values())[-live:]
    request = random_request(rng)
    how = (request["window"], request["anchors"], request["drop_all_padded"], reward_at)
    expected = [(i, t) for i, e in enumerate(kept) for t in model.anchors(len(e["where"]), *how)]
    view = buf.view(**request)
    assert list(view.clip_indices) == expected, request
    assert len(view) == len(expected)
    if not expected:
        with pytest.raises(NoClipsError):
            buf.sample(3, **request)
        return 0
    ids = rng.integers(0, len(expected), 8)
    batch = view[ids.tolist()]
    for row, (ep, t) in enumerate(expected[i] for i in ids):
        got = {name: values[row] for name, values in batch.items()}
        model.same(got, model.item(kept[ep], t, request["window"], reward_at, request["columns"]))
    for drawn in (buf.sample(16, **request), view.sample(16)):
        for row, position in enumerate(drawn.ids):
            ep = int(np.searchsorted(view.starts, position, side="right")) - 1
            t = int(position - view.starts[ep])
            assert (ep, t) in expected
            got = {name: values[row] for name, values in drawn.items()}
            want = model.item(kept[ep], t, request["window"], reward_at, request["columns"])
            model.same(got, want)
    buf.close()
    return len(ids) + 32


@pytest.mark.parametrize("storage", few(STORAGES))
def test_random_windows_are_those_of_the_plain_loop(home, storage):
    """150 random cases in all, each over a ring of its own."""
    compared = sum(check_case(n, home, storage) for n in range({"ram": 90}.get(storage, 30)))
    assert compared > 1000


@pytest.mark.campaign
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_windows(home, storage, part):
    """The same, many times over: 8,000 cases in RAM, 1,000 each on disk, in ten parts."""
    cases = {"ram": 800}.get(storage, 100)
    first = 1000 + cases * part
    assert sum(check_case(n, home, storage) for n in range(first, first + cases)) > 20 * cases


# -- controls: each planted fault is found ------------------------------------------------------


def faulty(monkeypatch, change):
    right = cut_module.clamp

    def clamp(wanted, starts, lengths, blank_first=0, blank_last=0):
        return change(right, wanted, starts, lengths, blank_first, blank_last)

    monkeypatch.setattr(cut_module, "clamp", clamp)


def cases(home):
    for number in range(60):
        check_case(number, home, "ram")


def one_early(right, wanted, starts, lengths, first, last):
    return right(wanted, starts, lengths, first, last + 1)


def one_late(right, wanted, starts, lengths, first, last):
    return right(wanted, starts, lengths + 1, first, last)


def one_before(right, wanted, starts, lengths, first, last):
    return right(wanted, starts - 1, lengths + 1, first, last)


def one_after(right, wanted, starts, lengths, first, last):
    return right(wanted, starts, lengths, first + 1, last)


def inverted(right, wanted, starts, lengths, first, last):
    places, is_pad = right(wanted, starts, lengths, first, last)
    return places, ~is_pad


def slipped_reward(right, wanted, starts, lengths, first, last):
    return right(wanted, starts, lengths, 0, last)


def blank_action(right, wanted, starts, lengths, first, last):
    return right(wanted, starts, lengths, first, 0)


@pytest.mark.parametrize("fault", [one_early, one_late, one_before, one_after, inverted, slipped_reward, blank_action])
def test_control_a_planted_fault_is_found(home, monkeypatch, fault):
    """An end that is off by one (the next episode's edge too), an inverted mask, a blank that counts as a value."""
    faulty(monkeypatch, fault)
    with pytest.raises(AssertionError):
        cases(home)


@pytest.mark.parametrize("name", ["before", "after"])
def test_control_anchors_off_by_one_are_found(home, monkeypatch, name):
    """A window that reaches one step beyond its episode."""
    right = getattr(Steps, name).fget
    monkeypatch.setattr(Steps, name, property(lambda self: max(0, right(self) - 1)))
    with pytest.raises(AssertionError):
        cases(home)
