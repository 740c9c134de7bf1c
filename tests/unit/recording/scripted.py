"""An environment whose every value says whose it is, and a plain model of what a recording of it must hold.

The model never looks at Gymnasium's vector environments: it plays the same script on states of its own, by the
rules of the three autoreset modes, and keeps the rows in lists.
"""

from dataclasses import dataclass, field

import gymnasium
import numpy as np
from gymnasium import spaces

BITS = 24
KINDS = ("box", "dict", "discrete", "multibinary", "tuple")


def code(env, episode, step):
    """Return one number for an observation: which environment, which of its episodes, which step."""
    assert episode < 4096 and step < 256 and env < 16
    return (env << 20) + (episode << 8) + step


def length_of(env, episode, script):
    """Return the steps of an episode and how it ends: pseudo-random, and the same for all who ask."""
    drawn = (env * 7919 + episode * 104729 + script * 31337 + 17) * 2654435761 % 2**32
    return 1 + (drawn >> 8) % 6, bool(drawn & 1), bool(drawn & 2 and not drawn & 1) or not drawn & 1


def observation(kind, number):
    place = np.array([number >> 20, (number >> 8) & 4095, number & 255], np.int32)
    bits = np.array([(number >> i) & 1 for i in range(BITS)], np.int8)
    return {
        "box": lambda: place,
        "dict": lambda: {"place": place, "in": {"number": np.int64(number)}},
        "discrete": lambda: np.int64(number),
        "multibinary": lambda: bits,
        "tuple": lambda: (place, bits),
    }[kind]()


def space_of(kind):
    box, bits = spaces.Box(0, 4096, (3,), np.int32), spaces.MultiBinary(BITS)
    return {
        "box": box,
        "dict": spaces.Dict({"place": box, "in": spaces.Dict({"number": spaces.Discrete(1 << BITS)})}),
        "discrete": spaces.Discrete(1 << BITS),
        "multibinary": bits,
        "tuple": spaces.Tuple((box, bits)),
    }[kind]


def numbers(kind, columns, prefix="obs"):
    """Return the codes of a column of observations; every leaf of one must agree."""

    def place(rows):
        rows = np.asarray(rows).astype(np.int64)
        return ((rows[:, 0] << 20) + (rows[:, 1] << 8) + rows[:, 2]).tolist()

    def bits(rows):
        return (np.asarray(rows).astype(np.int64) << np.arange(BITS)).sum(1).tolist()

    plain = {
        "box": [(prefix, place)],
        "dict": [(f"{prefix}/place", place), (f"{prefix}/in/number", lambda rows: np.asarray(rows).tolist())],
        "discrete": [(prefix, lambda rows: np.asarray(rows).tolist())],
        "multibinary": [(prefix, bits)],
        "tuple": [(f"{prefix}/0", place), (f"{prefix}/1", bits)],
    }[kind]
    found = [read(columns[name]) for name, read in plain]
    assert all(other == found[0] for other in found[1:]), "two leaves are of different steps"
    return found[0]


class Scripted(gymnasium.Env):
    """The observation is `code(env, episode, step)`; the reward is the action and a half."""

    def __init__(self, number=0, kind="box", script=0, reuse=False):
        self.number, self.kind, self.script, self.reuse = number, kind, script, reuse
        self.observation_space, self.action_space = space_of(kind), spaces.Discrete(1000)
        self.episode = -1
        self.held = None

    def look(self):
        fresh = observation(self.kind, code(self.number, self.episode, self.t))
        if not self.reuse:
            return fresh
        if self.held is None or not isinstance(fresh, np.ndarray):
            self.held = fresh
        else:
            self.held[:] = fresh  # the agent's array changes under its hands
        return self.held

    def info(self):
        info = {"number": code(self.number, self.episode, self.t)}
        return info | ({"odd": 1.5} if self.t % 2 else {})

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        self.length, self.ends, self.cut = length_of(self.number, self.episode, self.script)
        return self.look(), self.info()

    def step(self, action):
        self.t += 1
        over = self.t == self.length
        reward = float(action) + 0.5
        return self.look(), reward, over and self.ends, over and self.cut, self.info()


@dataclass
class Episode:
    """What must be stored: T + 1 codes, T actions and rewards, and how it ended."""

    env: int
    number: int
    obs: list = field(default_factory=list)
    actions: list = field(default_factory=list)
    rewards: list = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False


class Model:
    """Plays a script by the book.

    Args:
        num: environments.
        mode: of the autoreset.
        script: of the episodes' lengths.
        faulty: codes of observations; a step that leads to one is refused by the recording.
    """

    def __init__(self, num, mode, script=0, faulty=()):
        self.num, self.mode, self.script, self.faulty = num, mode, script, set(faulty)
        self.stored, self.transitions, self.errors = [], [], 0
        self.episode, self.t = [-1] * num, [0] * num
        self.open = [None] * num
        self.due = [False] * num
        self.begun = 0

    def _begin(self, env):
        self.open[env] = Episode(env, self.begun, [code(env, self.episode[env], self.t[env])])
        self.begun += 1

    def _restart(self, env):
        self.episode[env] += 1
        self.t[env] = 0
        self.due[env] = False

    def _end(self, env, terminated=False, truncated=False):
        found, self.open[env] = self.open[env], None
        if found is not None and found.actions:
            found.terminated, found.truncated = terminated, truncated
            self.stored.append(found)

    def reset(self, mask):
        for env in np.flatnonzero(mask).tolist():
            self._end(env)
        for env in np.flatnonzero(mask).tolist():
            self._restart(env)
            self._begin(env)

    def step(self, actions):
        """Return the environments that must be reset before the next step."""
        begins, ends = [], []
        rows = []
        for env, action in enumerate(actions):
            if self.due[env] and self.mode == "NextStep":
                self._restart(env)
                begins.append(env)
                continue
            self.t[env] += 1
            length, terminates, truncates = length_of(env, self.episode[env], self.script)
            over = self.t[env] == length
            terminated, truncated = over and terminates, over and truncates
            number = code(env, self.episode[env], self.t[env])
            if number in self.faulty:
                self.errors += 1
                ends.append((env, False, False, True))
                if not over:
                    begins.append(env)
            else:
                now = self.open[env]
                rows.append(
                    (
                        now.obs[-1],
                        action,
                        action + 0.5,
                        number,
                        terminated,
                        truncated,
                        env,
                        now.number,
                        len(now.actions),
                    )
                )
                now.obs.append(number)
                now.actions.append(action)
                now.rewards.append(action + 0.5)
                if over:
                    ends.append((env, terminated, truncated, False))
            if over:
                self.due[env] = True
                if self.mode == "SameStep":
                    begins.append(env)
        self.transitions.append(rows)
        # What is cut by a refusal is stored before what ended by itself.
        for env, terminated, truncated, _ in sorted(ends, key=lambda end: not end[3]):
            self._end(env, terminated, truncated)
        for env in begins:
            if self.mode == "SameStep" and self.due[env]:
                self._restart(env)
        for env in sorted(begins):
            self._begin(env)
        return [env for env in range(self.num) if self.due[env]] if self.mode == "Disabled" else []

    def close(self):
        for env in range(self.num):
            self._end(env)
