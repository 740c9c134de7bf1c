"""Sessions that store several episodes by one call, as a recording step does that ends several."""

import numpy as np

from tests.faults.crash.cases import Session, draw_step, episode, rows_of, size_of


def draw(rng, max_steps, spare):
    """Draw a step; some of them store several episodes, seldom more than fit in the spare rows."""
    if rng.random() < 0.4:
        fault = None
        if rng.random() < 0.3:
            fault = rng.choice(["interrupt", "ENOSPC", "EIO", "partial", "die"]), rng.randint(1, 14)
        room = spare if rng.random() < 0.9 else max_steps
        lengths = [rng.randint(1, max(1, spare - 1)) for _ in range(rng.randint(2, 4))]
        while len(lengths) > 1 and sum(lengths) > room:
            lengths.pop()
        return "several", tuple(lengths), fault
    return draw_step(rng, max_steps, spare)


def joined(episodes):
    """Return the rows of episodes `(number, length)`, one behind the other, as `write_joined` takes them."""
    parts = [rows_of(*one) for one in episodes]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def store_joined(buf, episodes):
    """Store episodes as a recording does: together, and those that were left alone; return how many were stored
    together."""
    data = [{"number": number} for number, _ in episodes]
    count = buf.write_joined(joined(episodes), [length for _, length in episodes], data)
    for one in episodes[count:]:
        buf.write_episode(episode(*one))
    return count


def states_on_the_way(before, episodes, max_steps):
    """Return the states after each of the episodes, a set for each, beginning with that before them."""
    states = [{before}]
    for number, length in episodes:
        rests = {state[i:] for state in states[-1] for i in range(len(state) + 1)}
        fits = {rest for rest in rests if size_of(rest) + length <= max_steps}
        states.append({(*rest, (number, length)) for rest in fits})
    return states


class JoinedSession(Session):
    """A session with calls that store several episodes."""

    draw_step = staticmethod(draw)
    together = 0
    """How many episodes were stored together with others, ever."""

    def do_several(self, lengths, fault=None):
        episodes = [(next(self.numbers), length) for length in lengths]
        (now,) = self.now.newest
        *middles, ends = states_on_the_way(now, episodes, self.case.max_steps)
        middles = set().union(*middles)
        if max(lengths) > self.case.spare:
            middles |= {state[i:] for state in middles for i in range(len(state) + 1)}

        def do():
            JoinedSession.together += store_joined(self.buf, episodes)

        *others, last = [number for number, _ in episodes]
        self.call(do, ends, middles, last, fault, others=others)
