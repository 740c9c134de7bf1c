"""KeyboardInterrupt in the middle of a call, and the process goes on with the same buffer."""

import gc
import sys
import traceback
from contextlib import closing, suppress

from ringmap.buffers.replay import ReplayBuffer
from ringmap.errors import RoleError
from tests.crash.kill.script import PROBE, episode
from tests.crash.kill.verdict import check_clips, check_sound, check_tidy, must, observe, seen_of
from tests.crash.kill.victim import hands_of, run, same_ids, sampling_of


def interrupt(fresh, scenario, level, cases):
    """Fork a process in which blows raise KeyboardInterrupt, one case after the other.

    Args:
        fresh: makes a copy of what was given, and returns its path.
        scenario: what is done.
        level: of durability.
        cases: `(blow, again)`: `again` falls in what follows the interrupt.

    Returns:
        How each case ended, with `error` unless well; shorter than `cases` if one ended ill: it may have left
        the process in any state.
    """

    def body(voice):
        for blow, again in cases:
            ended = person_at(fresh(), scenario, level, blow, again)
            voice.say(ended=ended)
            if "error" in ended:
                return
            gc.collect()  # now, not at some line of a later case

    death = run(body)
    ended = [said["ended"] for said in death.said_all if "ended" in said]
    if death.killed or death.error:
        ended.append({"error": death.error or "died"})
    return ended


def person_at(folder, scenario, level, blow, again):
    since = 0 if level == "ram" else len(scenario.given)
    begun = len(scenario.given) + len(scenario.first)
    same_ids(since)
    person = Person(folder, scenario, level, again, blind=blow.at % 2)
    try:
        for index in range(since, begun):
            person.hands.do(scenario.ops[index])
        person.act(begun, blow)
    except BaseException:
        sys.settrace(None)
        return {"error": traceback.format_exc(limit=-12)}
    return person.said | {"struck": blow.struck}


class Person:
    """Somebody who presses Ctrl-C, and then goes on working: after a look at what is stored, or `blind`."""

    def __init__(self, folder, scenario, level, again, blind):
        self.hands = hands_of(folder, scenario, level)
        self.scenario = scenario
        self.models = scenario.models()
        self.again = again
        self.blind = blind
        self.said = {}

    def act(self, start, blow):
        ops = self.scenario.ops
        index, struck = start, None
        try:
            for index in range(start, len(ops)):
                blow.arm()
                self.hands.do(ops[index])
                blow.disarm()
        except KeyboardInterrupt:
            blow.disarm()
            if blow.forgiving:
                struck = index
            else:
                # Here, where the exception still holds the frames that it came through: where a program saves
                # and ends, and what an interactive session keeps.
                self.go_on(index)
                return
        blow.disarm()
        if struck is None:
            must(not blow.struck, "an interrupt was swallowed:", blow.struck)
        else:
            self.go_on(struck)

    def second(self, call):
        """Make a call under the second blow, if there is one; tell whether it was struck."""
        again, self.again = self.again, None
        if again is None:
            return
        try:
            again.arm()
            call()
        except KeyboardInterrupt:
            pass
        again.disarm()
        if not again.at:
            self.said["places"] = again.places

    def go_on(self, index):
        ops, hands = self.scenario.ops, self.hands
        op, before, after = ops[index], self.models[index], self.models[index + 1]
        kind = op[0]
        if kind == "open":
            self.second(hands.open)
            hands.do(op)
        elif kind == "close":
            self.second(hands.buffer.close)
            hands.buffer.close()
            hands.do(("open",))
        elif kind in ("finish", "abandon", "flush", "sync") and self.blind:
            self.second(lambda: hands.do(op))
            with suppress(RoleError):  # it had ended
                hands.do(op)
        else:
            buffer = hands.buffer
            self.second(lambda: buffer.num_episodes)
            seen = observe(buffer)
            allowed = [seen_of(m) for m in before.allowed(op, index, self.scenario.keep)]
            must(seen in allowed, "after the interrupt there is", seen, "allowed:", allowed)
            self.finish_call(op, seen == seen_of(after), before)
        must(observe(hands.buffer) == seen_of(after), "the call made again:", observe(hands.buffer))
        for later in ops[index + 1 :]:
            if later[0] != "open" or hands.buffer is None:
                hands.do(later)
            if later[0] == "close":
                hands.buffer = None
        if hands.buffer is None:
            hands.do(("open",))
        self.settle_accounts()

    def finish_call(self, op, stored, before):
        """Make the call again unless it had its effect."""
        kind, *args = op
        if kind in ("write", "clear"):
            if not stored:
                self.hands.do(op)
        elif kind == "append":
            steps = dict(before.streams)[args[0]]
            have = self.hands.streams[args[0]].num_steps
            must(have in (steps, steps + 1), "the stream says it has", have, "steps, of", steps)
            if have == steps:
                self.hands.do(op)
        elif kind in ("finish", "abandon"):
            with suppress(RoleError):  # it had ended
                self.hands.do(op)
        else:
            self.hands.do(op)

    def settle_accounts(self):
        """Compare what goes on with a new reader, and with what a new process would find."""
        hands, model = self.hands, self.models[-1]
        buffer = hands.buffer
        must(observe(buffer) == seen_of(model), "at the end there is", observe(buffer), "of", model)
        buffer.write_episode(episode(PROBE, 3))
        model = model.stored(PROBE, 3)
        must(observe(buffer) == seen_of(model), "after one more episode", observe(buffer))
        check_clips(buffer, model)
        check_sound(buffer)
        if hands.in_ram:
            return
        with closing(ReplayBuffer.open(hands.folder, mode="r")) as reader:
            must(observe(reader) == seen_of(model), "a reader sees", observe(reader), "of", model)
        buffer.close()
        with closing(hands.open()) as reopened:
            seen = observe(reopened)
            end = (model.settled(self.scenario.keep) or [model])[-1]
            must(seen == seen_of(end), "reopened, there is", seen, "of", end)
            must(sampling_of(reopened) == sampling_of(buffer), "reopened, it samples otherwise")
            check_tidy(hands.folder, end)
