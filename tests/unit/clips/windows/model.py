"""Windows over episodes as a plain loop over Python lists would cut them: what the fast code is compared with.

Every step carries the number of its episode and its own, so that a row proves itself.
"""

import numpy as np

COLUMNS = {"where": "i8", "reward": "f8", "action": "f4", "flag": "u1"}


def episode(number, length):
    """Return the columns of an episode: every value follows from the episode's number and the step's."""
    steps = np.arange(length)
    return {
        "where": np.stack([np.full(length, number), steps], 1),
        "reward": 1000.0 * number + steps,
        "action": (number + steps[:, None] / 1024 + np.array([0, 0.5])).astype("f4"),
        "flag": ((number * 7 + steps) % 251).astype("u1"),
    }


def real(name, length, reward_at):
    """Return the first step of a column that has a value, and one past the last."""
    first = 1 if reward_at == "next" and name == "reward" else 0
    last = length - 1 if reward_at == "next" and name == "action" else length
    return first, last


def anchors(length, window, cut=slice(None), drop=False, reward_at=None):
    """Return the steps of an episode of this length that are anchors, one by one."""
    found = []
    for t in range(length):
        good = t >= (cut.start or 0) and t < length + (cut.stop or 0)
        for name, w in window.items():
            first, last = real(name, length, reward_at)
            inside = [first <= t + o < last for o in w.offsets]
            if w.pad is None:
                good = good and all(inside)
            elif drop:
                gaps = np.diff(sorted(set(w.offsets)))
                # Where offsets have gaps, episodes shorter than the widest are left out as a whole.
                good = good and any(inside) and (not len(gaps) or last - first >= gaps.max())
        if good:
            found.append(t)
    return found


def item(stored, t, window, reward_at=None, columns=None):
    """Return what an item at step t of an episode holds: column -> array."""
    length = len(stored["where"])
    made = {}
    for name, rows in stored.items():
        if columns is not None and name not in columns:
            continue
        if name not in window:
            made[name] = rows[t]
            continue
        w = window[name]
        first, last = real(name, length, reward_at)
        values, mask = [], []
        for offset in w.offsets:
            step = t + offset
            if first <= step < last:
                values.append(rows[step])
                mask.append(False)
                continue
            mask.append(True)
            if w.pad == "edge":
                near = min(max(step, first), last - 1) if last > first else None
                # Where no step has a value, any row of the episode may stand for it.
                values.append(rows[near] if near is not None else None)
            else:
                fill = {"zero": 0, "nan": np.nan}.get(w.pad, w.pad)
                values.append(np.full_like(rows[0], fill))
        made[name] = values
        if w.pad is not None:
            made[w.mask.replace("{}", name)] = mask
    return made


def same(got, expected):
    """Compare one item with the model's, bit for bit."""
    assert set(got) == set(expected), (set(got), set(expected))
    for name, values in expected.items():
        found = np.asarray(got[name])
        if isinstance(values, list):
            assert len(found) == len(values), (name, found.shape, len(values))
            for row, value in zip(found, values, strict=True):
                if value is not None:
                    np.testing.assert_array_equal(row, value, err_msg=name)
        else:
            np.testing.assert_array_equal(found, values, err_msg=name)
