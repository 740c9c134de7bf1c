"""Transitions kept the plain way, both observations of each, and random life to compare by."""

import numpy as np


class Reference:
    """A list of transitions: what a buffer that stores everything twice would hand out."""

    def __init__(self, capacity, n_step=1, gamma=0.99):
        self.capacity, self.n_step, self.gamma = capacity, n_step, gamma
        self.steps = []
        self.last = None  # indices of the lanes of the call before

    def add(self, obs, actions, rewards, after, dones, truncated):
        count = len(rewards)
        lanes = list(range(len(self.steps), len(self.steps) + count))
        self.append_each(obs, actions, rewards, after, dones, truncated)
        if self.last is not None and len(self.last) == count:
            for i, before in enumerate(self.last):
                if self.steps[before]["next"].tobytes() == obs[i].tobytes():
                    self.steps[before]["following"] = lanes[i]
        self.last = lanes

    def append_each(self, *columns):
        """Append a step of each lane, from which none goes on yet."""
        names = ("obs", "action", "reward", "next", "done", "truncated")
        for values in zip(*columns, strict=True):
            self.steps.append({**dict(zip(names, values, strict=True)), "following": None})

    def clear(self):
        self.steps, self.last = [], None

    def batch(self):
        """Return all that counts, oldest first."""
        found = {
            name: []
            for name in (
                "observations",
                "actions",
                "rewards",
                "next_observations",
                "dones",
                "discounts",
            )
        }
        for index in range(max(0, len(self.steps) - self.capacity), len(self.steps)):
            first = last = self.steps[index]
            total, discount = float(first["reward"]), self.gamma
            for power in range(1, self.n_step):
                if last["done"] or last["truncated"] or last["following"] is None:
                    break
                last = self.steps[last["following"]]
                total += self.gamma**power * float(last["reward"])
                discount *= self.gamma
            for name, value in (
                ("observations", first["obs"]),
                ("actions", first["action"]),
                ("rewards", np.float32(total)),
                ("next_observations", last["next"]),
                ("dones", np.float32(last["done"])),
                ("discounts", np.float32(discount)),
            ):
                found[name].append(value)
        return {name: np.array(values) for name, values in found.items()}


class Life:
    """Lanes of an environment that ends, is cut off, is reset without a word, and changes its number of lanes."""

    def __init__(self, seed, shape=(3,), dtype=np.float32):
        self.rng, self.shape, self.dtype = np.random.default_rng(seed), shape, dtype
        self.now = None

    def _fresh(self, count):
        if np.issubdtype(self.dtype, np.integer):
            return self.rng.integers(0, 4, (count, *self.shape)).astype(self.dtype)
        return self.rng.choice([0.0, -0.0, 1.5, np.nan, 2.5], (count, *self.shape)).astype(self.dtype)

    def step(self, lanes):
        rng = self.rng
        if self.now is None or len(self.now) != lanes:
            self.now = self._fresh(lanes)
        obs, after = self.now, self._fresh(lanes)
        dones, truncated = rng.random(lanes) < 0.15, rng.random(lanes) < 0.15
        reset = dones | truncated | (rng.random(lanes) < 0.05)
        self.now = np.where(reset.reshape(-1, *[1] * len(self.shape)), self._fresh(lanes), after)
        return (
            obs,
            rng.integers(0, 5, lanes),
            rng.normal(size=lanes).astype(np.float32),
            after,
            dones,
            truncated,
        )


class StackedLife:
    """Lanes of an environment whose observations are stacks, as `FrameStackObservation` hands them out.

    `alike`: whether frames have few values, so that stacks are equal by chance; else each frame is a number of its own.
    """

    def __init__(self, seed, size=4, padding="reset", shape=(3,), dtype=np.uint8, alike=False):
        self.rng, self.size, self.padding = np.random.default_rng(seed), size, padding
        self.shape, self.dtype, self.alike = shape, dtype, alike
        self.now, self.number = None, 0

    def _frame(self):
        self.number += 1
        if self.alike:
            return self.rng.integers(0, 2, self.shape).astype(self.dtype)
        return np.full(self.shape, self.number % 251 + 1, self.dtype)

    def _start(self):
        frame = self._frame()
        older = frame if self.padding == "reset" else np.zeros_like(frame)
        return np.stack([older] * (self.size - 1) + [frame])

    def step(self, lanes):
        rng = self.rng
        if self.now is None or len(self.now) != lanes:
            self.now = np.stack([self._start() for _ in range(lanes)])
        obs = self.now
        frames = np.stack([self._frame() for _ in range(lanes)])
        after = np.concatenate([obs[:, 1:], frames[:, None]], 1)
        dones, truncated = rng.random(lanes) < 0.15, rng.random(lanes) < 0.15
        reset = dones | truncated | (rng.random(lanes) < 0.05)
        self.now = np.stack([self._start() if reset[i] else after[i] for i in range(lanes)])
        return (
            obs,
            rng.integers(0, 5, lanes),
            rng.normal(size=lanes).astype(np.float32),
            after,
            dones,
            truncated,
        )


def in_order(step, buffer, batch_size, history_len):
    """A sampler that hands out the oldest ids in order."""
    return np.arange(batch_size)


def same(batch, expected):
    """Compare bit for bit, but for sums of floats."""
    for name, values in batch.items():
        values = np.asarray(values)
        assert values.shape == expected[name].shape, name
        if name == "rewards":
            np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6)
        elif name == "discounts":
            np.testing.assert_allclose(values, expected[name], rtol=1e-6)
        else:
            assert values.dtype == expected[name].dtype, name
            assert values.tobytes() == expected[name].tobytes(), name
