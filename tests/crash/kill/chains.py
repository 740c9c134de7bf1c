"""Episodes in parts, for the victims: what a call makes true, the hands that make it, and the scripts."""

from dataclasses import dataclass, replace

from tests.crash.kill.script import (
    DROPPED,
    FULL,
    INTERRUPTED,
    MAX_STEPS,
    OPEN,
    SAMPLE,
    TERMINATED,
    Model,
    Scenario,
    episode,
    writes,
)
from tests.crash.kill.verdict import must, observe_rows
from tests.crash.kill.victim import Hands

EVERY = 3
"""Steps of a part."""
FIRST = 500
"""Numbers from here up to that of the probe are of episodes in parts."""


def is_chain(k):
    return FIRST <= k < 900


@dataclass(frozen=True)
class ChainModel(Model):
    """`episodes` holds a part like an episode; `begun`: the numbers of all that was stored, in the order of first
    steps; `ended`: number -> flags of the episodes in parts that have ended; `counted`: number -> steps that were ever
    stored."""

    begun: tuple = ()
    ended: tuple = ()
    counted: tuple = ()

    def stored(self, k, steps, flags=0):
        made = super().stored(k, steps, flags)
        counted = {**dict(made.counted), k: dict(made.counted).get(k, 0) + steps}
        begun = made.begun if k in made.begun else (*made.begun, k)
        return replace(made, begun=begun, counted=tuple(counted.items()))

    def end(self, k, flags):
        """Return the model with the end of an episode in parts, if it has any."""
        if k not in dict(self.counted) or k in dict(self.ended):
            return self
        return replace(self, ended=(*self.ended, (k, flags)))

    def seen(self):
        parts = {}
        for k, n, flags in self.episodes:
            if not flags & DROPPED:
                parts[k] = parts.get(k, 0) + n
        found = []
        for k in sorted(parts, key=self.begun.index):
            flags = dict(self.ended).get(k, INTERRUPTED) if is_chain(k) else self.flags_of(k)
            first = dict(self.counted)[k] - parts[k] if is_chain(k) else 0
            found.append((k, parts[k], first, not flags & INTERRUPTED))
        return tuple(found)

    def is_in(self, table):
        """Whether the call itself or the opening after a kill stored a whole part does not matter: only the flag
        tells."""
        if len(table) != len(self.episodes):
            return False
        pairs = zip(self.episodes, table, strict=True)
        return all(
            n == steps and (flags == seen or (is_chain(k) and not TERMINATED & (flags | seen)))
            for (k, n, flags), (steps, seen) in pairs
        )

    def flags_of(self, k):
        return next(flags for number, _, flags in self.episodes if number == k)

    def settled(self, keep):
        states, at = [], self
        for k, steps in self.streams:
            after = at.without(k)
            if keep and steps:
                after = after.stored(k, steps, INTERRUPTED)
                if is_chain(k):
                    after = after.end(k, INTERRUPTED)
            states.append(after)
            at = after
        for k in at.begun:
            if is_chain(k) and any(number == k for number, _, _ in at.episodes):
                at = at.end(k, INTERRUPTED)
        return [*states, at]

    def grown(self, k, steps):
        """Return the model with a part whose file has so many steps; a new part has a new file."""
        return replace(self.without(k), streams=(*self.without(k).streams, (k, steps)))

    def after(self, op, index, keep=False):
        kind, *args = op
        if kind == "chain":
            return replace(self, streams=(*self.streams, (args[0], 0)))
        if not args or not is_chain(args[0]):
            return super().after(op, index, keep)
        k = args[0]
        steps = dict(self.streams)[k]
        if kind == "append":
            if steps + 1 < EVERY:
                return replace(self, streams=tuple((n, s + (n == k)) for n, s in self.streams))
            return replace(self.stored(k, EVERY).grown(k, 0), saved=index)
        rest = self.without(k)
        if kind == "finish":
            if steps:
                rest = rest.stored(k, steps, TERMINATED)
            made = rest.end(k, TERMINATED)
        else:
            made = rest.end(k, INTERRUPTED)
        return replace(made, saved=index) if (steps and kind == "finish") or made != rest else rest

    def allowed(self, op, index, keep=False):
        kind, *args = op
        if not args or not is_chain(args[0]) or kind == "chain":
            return super().allowed(op, index, keep)
        k, after = args[0], self.after(op, index, keep)
        if kind == "append" and dict(self.streams)[k] + 1 == EVERY:
            return [self, self.grown(k, EVERY), after]
        if kind == "abandon":
            return [self, replace(self.end(k, INTERRUPTED), saved=after.saved), after]
        return [self, after]


class ChainHands(Hands):
    """Episodes with numbers from FIRST on are in parts."""

    def do_now(self, index, op):
        if op[0] == "chain":
            self.streams[op[1]] = self.buffer.begin_episode(commit_every=EVERY, lane=op[1] % 3)
        else:
            self.do(op)

    def see(self, buffer):
        if buffer.mode == "r+" and not self.streams:
            is_open = self.store(buffer).live.whole.is_open
            must(not is_open.any(), "an episode was left open:", is_open.tolist())
        return observe_rows(buffer)

    def check_clips(self, buffer, model):
        steps = {k: (first, first + n) for k, n, first, _ in model.seen()}
        if not steps:
            return
        spans = [span for span in (1, 4) if any(b - a >= span for a, b in steps.values())]
        for span in spans:
            batch = buffer.sample(8, history_len=span)
            for obs, actions in zip(batch["obs"], batch["action"], strict=True):
                k, t = obs[0].tolist()
                low, high = steps.get(k, (0, 0))
                made = episode(k, t + span)
                fits = low <= t and t + span <= high and (obs == made["obs"][t:]).all()
                fits = fits and (actions.ravel() == made["action"][t:]).all()
                must(fits, "a clip of episode", k, "step", t, obs.tolist(), "of", steps)


def chain(k, steps, end="finish"):
    return [("chain", k), *[("append", k)] * steps, (end, k)]


BOTH = [("chain", 501), ("chain", 502), *[("append", 501), ("append", 502)] * 5]

CHAINS = {"family": "chains", "model": ChainModel}

SCENARIOS_OF_CHAINS = [
    Scenario("chains: birth", [OPEN, *chain(501, 4)], **CHAINS),
    Scenario("chains: first part", chain(501, 4), [*FULL], [OPEN], **CHAINS),
    Scenario(
        "chains: side by side, keep",
        [*BOTH, ("write", 9, 2), ("finish", 502), ("append", 501), ("finish", 501)],
        [*FULL, SAMPLE],
        [OPEN],
        {"interrupted": "keep"},
        **CHAINS,
    ),
    Scenario(
        "chains: side by side, drop",
        [*BOTH, ("append", 501), ("finish", 501), ("abandon", 502), *writes(5, first=9)],
        FULL,
        [OPEN],
        **CHAINS,
    ),
    Scenario(
        "chains: longer than the ring",
        [*[("append", 501)] * (MAX_STEPS - 8), ("flush",), ("finish", 501), *writes(3, first=9)],
        [*FULL, SAMPLE],
        [OPEN, ("chain", 501), *[("append", 501)] * 20],
        {"interrupted": "keep"},
        **CHAINS,
    ),
    Scenario(
        "chains: open, keep",
        [OPEN],
        [*FULL, *BOTH],
        options={"interrupted": "keep"},
        **CHAINS,
    ),
    Scenario("chains: open, drop", [OPEN], [*FULL, *BOTH], **CHAINS),
]
