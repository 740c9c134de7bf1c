"""Hands for the other buffers: what they store besides episodes must be that of a stored call too."""

import json

import numpy as np

from ringmap.buffers.distillation.buffer import DistillationBuffer
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.transitions.buffer import TransitionReplayBuffer
from ringmap.clips.samplers.prioritized import PrioritizedSampler
from ringmap.storage.columns.schema import Column
from ringmap.storage.sidecars import priorities
from tests.crash import labels, transitions
from tests.crash.kill.chains import SCENARIOS_OF_CHAINS, ChainHands
from tests.crash.kill.script import MAX_STEPS, SCENARIOS_OF_OTHERS, SCHEMA, SPARE
from tests.crash.kill.verdict import must, observe
from tests.crash.kill.victim import Hands


class TransitionHands(Hands):
    """A write is a call with so many lanes; each transition proves its next observation."""

    def kind(self):
        return TransitionReplayBuffer

    def open(self):
        return self.kind()(
            MAX_STEPS // 2, (4,), device=None, obs_dtype=np.int32, seed=0, sync_every_s=0, **self.options
        )

    def open_reader(self):
        return self.kind().open(self.folder, "r", device=None)

    def store(self, buffer):
        return buffer._ring.buffer.engine.owned

    def write(self, buffer, k, steps):
        calls, _ = transitions.look(buffer)
        buffer.add(*transitions.call_of(k, steps, calls[-1] if calls else None))
        buffer.engine.commit_pending("a test")  # a commit for each call, as the model has it

    def see(self, buffer):
        calls, lost = transitions.look(buffer)
        must(not lost, "what follows is not known of", lost)
        return tuple((k, steps, True) for k, steps in calls)

    def check_clips(self, buffer, model):
        if len(buffer):
            transitions.prove(buffer.sample(min(8, len(buffer))))


class PriorityHands(Hands):
    """An update gives the first clip of each episode the number of the call as its priority."""

    def __init__(self, folder, scenario, level):
        super().__init__(folder, scenario, level)
        priorities._PAGE, priorities._LOG_LEAST, priorities._PIECE = 64, 192, 8

    def open(self):
        self.sampler = PrioritizedSampler(rng=0)
        return ReplayBuffer(MAX_STEPS, seed=0, spare_rows=SPARE, sync_every_s=0, sampler=self.sampler, **self.options)

    def firsts(self, buffer):
        """Return the number of each episode, and where it begins on the ring."""
        numbers = [k for k, _, _ in self.see(buffer)]
        live = self.store(buffer).live
        return dict(zip(numbers, live.starts.tolist(), strict=True))

    def do_now(self, index, op):
        if op[0] != "update":
            self.do(op)
            return
        at = self.firsts(self.buffer)
        chosen = [k for k in at if k in op[1:] or not op[1:]]
        places = np.array([at[k] for k in chosen], np.int64)
        old = places[places >= MAX_STEPS + SPARE] - MAX_STEPS - SPARE  # evicted long ago
        self.sampler(0, self.buffer, 1, 1)
        values = np.full(len(old) + len(chosen), float(index + 1))
        values[len(chosen) :] = 900.5
        done = self.buffer.update_priorities(np.concatenate([places, old]), values)
        must(done == len(chosen), "updated", done, "of", chosen)

    def agrees(self, given, model):
        updated = dict(model.also)  # any other clip has the highest priority of some moment
        return all(updated[k] == value for k, value in given.items() if k in updated)

    def state_of(self, buffer):
        state = {name: value for name, value in buffer.state_dict().items() if name != "sampler"}
        return json.dumps(state, default=str, sort_keys=True)

    def given(self, buffer):
        at = self.firsts(buffer)
        if not at:
            return {}
        sampler = buffer.sampler
        sampler(0, buffer, 1, 1)
        state = sampler.state_dict()
        values = {k: float(state["values"][place - state["low"]]) for k, place in at.items()}
        must(900.5 not in values.values(), "an update of an evicted clip was applied:", values)
        return values


class ValueHands(Hands):
    """An update gives the first row of each episode the number of the call, in the order of the episodes."""

    def open(self):
        schema = {**SCHEMA, "latent": Column((40,), "int64", mutable=True)}
        return ReplayBuffer(MAX_STEPS, seed=0, spare_rows=SPARE, sync_every_s=0, schema=schema, **self.options)

    def do_now(self, index, op):
        if op[0] != "put":
            self.do(op)
            return
        starts = self.store(self.buffer).live.starts.tolist()
        at = {k: p for (k, _, _), p in zip(self.see(self.buffer), starts, strict=True)}
        ids = [place for k, place in at.items() if k in op[1:] or not op[1:]]
        done = self.buffer.update(ids, {"latent": np.full((len(ids), 40), index + 1)})
        must(done == len(ids), "updated", done, "of", ids)

    def see(self, buffer):
        return observe(buffer, ["latent"])

    def given(self, buffer):
        found = {}
        for episode in buffer.episodes():
            first, *others = episode["latent"]
            must((first == first[0]).all(), "a value is torn:", first)
            must(not np.any(others), "an update of another row was applied:", others)
            found[int(episode["obs"][0][0])] = int(first[0])
        return found


class LabelHands(Hands):
    """A write is an episode of one actor; a relabelling gives its rows the number of the call."""

    def open(self):
        return DistillationBuffer(MAX_STEPS // 2, seed=0, retention="fifo", sync_every_s=0, **self.label_options)

    @property
    def label_options(self):
        return {name: value for name, value in self.options.items() if name != "storage"}

    def open_reader(self):
        return DistillationBuffer.open(self.folder, "r", retention="fifo")

    def store(self, buffer):
        return buffer._ring.buffer.engine.owned

    def write(self, buffer, k, steps):
        buffer.add(
            labels.rows_of(k, steps, buffer.round),
            np.full(steps, labels.label_of(0, buffer.round)),
            actor_id=np.full(steps, k),
            dones=np.arange(steps) == steps - 1,
        )
        buffer._ring.engine.commit_pending("a test")  # a commit for each call, as the model has it

    def see(self, buffer):
        return tuple((k, steps, True) for k, steps in labels.look(buffer)[0])

    def do_now(self, index, op):
        if op[0] == "round":
            self.buffer.start_round()
        elif op[0] == "relabel":
            parts = self.buffer.episodes()
            numbers = [int(self.buffer.rows(p[:1])["student_observations"][0, 0]) for p in parts]
            parts = [p for p, k in zip(parts, numbers, strict=True) if k in op[1:] or not op[1:]]
            label = labels.label_of(index + 1, self.buffer.round)
            self.buffer.relabel(parts, lambda rows: np.full(len(rows["ids"]), label))
        elif op[0] == "sample":
            self.buffer.batch(2)
        else:
            self.do(op)

    def given(self, buffer):
        return labels.look(buffer)[1]

    def agrees(self, given, model):
        new = dict(model.also)
        old = new if model.before is None else dict(model.before)
        return all(label in (new.get(k, 0), old.get(k, 0)) for (k, _), label in given.items())

    def check_clips(self, buffer, model):
        labels.look(buffer)

    def state_of(self, buffer):
        state = buffer.state_dict()
        state["round"] = max(0, state["round"])
        return json.dumps(state, default=str, sort_keys=True)

    def fresh_state(self):
        return self.state_of(DistillationBuffer(1, seed=0))


SCENARIOS_OF_OTHERS |= {s.name: s for s in SCENARIOS_OF_CHAINS}

FAMILIES = {
    "episodes": Hands,
    "transitions": TransitionHands,
    "priorities": PriorityHands,
    "labels": LabelHands,
    "values": ValueHands,
    "chains": ChainHands,
}
