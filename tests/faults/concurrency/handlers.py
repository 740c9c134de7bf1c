"""A signal handler at every line of a call, and what it calls there: each case in a forked process.

    call under way   |line|line|line|...      handler   line n: close(), write_episode(), sample() ...

Whatever the handler calls works or refuses (RoleError) and changes nothing then; the call under way goes on.
Lines are those before which CPython may run a handler: see `tests/faults/crash/kill/blows.py`.
"""

import contextlib
import faulthandler
import os
import random
import shutil
import threading
from contextlib import closing
from pathlib import Path

from ringmap import ReplayBuffer
from ringmap.buffers import engine as engines
from ringmap.errors import ClosedError, NoClipsError, RoleError
from ringmap.storage.commit import store as commits
from ringmap.storage.commit.store import Store
from ringmap.storage.disk import calls
from tests.faults.crash.cases import STORAGES, episode, look, rows_of, size_of
from tests.faults.crash.kill.blows import PACKAGE, AfterCall, AtLine
from tests.faults.crash.kill.forks import run, serve

OURS = tuple(str(PACKAGE / part) + os.sep for part in ("storage", "buffers", "clips"))
HANGS_S = 60
MAX_STEPS, SPARE = 24, 6
GIVEN = ((1, 5), (2, 6), (3, 4), (4, 5))
UNDER_WAY, BY_HANDLER, PROBE = (11, 5), (21, 6), (31, 3)


def stored(episodes, number, steps):
    """Return the episodes once another one is stored; the oldest make room."""
    while size_of(episodes) + steps > MAX_STEPS:
        episodes = episodes[1:]
    return (*episodes, (number, steps))


class AtOurLine(AtLine):
    paths = OURS


class AfterOurCall(AfterCall):
    paths = OURS
    forgiving = False


class Case:
    """A buffer with some episodes, a stream of two steps, and a reader.

    `at`: number of the line at which the handler calls; 0: never, and `blow.places` lists the lines.
    """

    def __init__(self, folder, storage, durability, calls, acts, at, blow=AtOurLine):
        shutil.rmtree(folder, ignore_errors=True)
        self.folder, self.calls, self.acts = folder, calls, acts
        self.options = {
            "path": folder / "buf",
            "spare_rows": SPARE,
            "sync_every_s": 0,
            "seed": 0,
            "storage": STORAGES[storage],
            "durability": durability,
        }
        self.writer = ReplayBuffer(MAX_STEPS, **self.options)
        self.model = ()
        for k, steps in () if calls == "first" else GIVEN:
            self.writer.write_episode(episode(k, steps))
            self.model = stored(self.model, k, steps)
        self.stream = self.writer.begin_episode()
        self.streamed = 0
        if calls != "first":
            self.append(2)
        self.reader = ReplayBuffer.open(folder / "buf", seed=1)
        if calls.startswith("reader"):
            self.writer.write_episode(episode(9, 6))
            self.model = stored(self.model, 9, 6)
        self.blow = blow(at, self.strike)
        self.outcome = "not struck"
        self.done = []
        """Which of the two calls had their effect, in order: "handler", "call"."""

    def append(self, count):
        whole = rows_of(UNDER_WAY[0], self.streamed + count)
        for t in range(self.streamed, self.streamed + count):
            self.stream.append({name: values[t] for name, values in whole.items()})
            self.streamed += 1

    # -- calls -------------------------------------------------------------------------------

    def do(self, name, number):
        buffer = self.reader if name.startswith("reader") else self.writer
        if name in ("write", "first"):
            buffer.write_episode(episode(*number))
        elif name in ("sample", "reader.sample"):
            batch = buffer.sample(6, 2)
            for pair in batch["obs"]:
                (k, t), (same, after) = pair.tolist()
                assert k == same and after == t + 1, f"a clip mixes rows: {batch['obs'].tolist()}"
                assert t + 1 < dict([*GIVEN, (9, 6), UNDER_WAY, BY_HANDLER])[k], f"no such step: {k}, {t}"
        elif name == "read":
            look(buffer)
        elif name == "finish":
            self.stream.finish(episode_data=episode(UNDER_WAY[0], 1)["_episode_data"])
        elif name == "append":
            self.append(1)
        elif name == "abandon":
            self.stream.abandon()
        elif name == "snapshot":
            buffer.snapshot(self.folder / f"copy-{number[0]}")
        elif name == "background":
            buffer.engine.owned.sync_behind()
        else:
            getattr(buffer, name.rpartition(".")[2])()

    def after(self, model, name, number):
        """Return the model after a call that had its effect."""
        if name in ("write", "first"):
            return stored(model, *number)
        if name == "finish":
            return stored(model, UNDER_WAY[0], self.streamed) if self.streamed else model
        return () if name == "clear" else model

    def strike(self, _place):
        try:
            self.do(self.acts, BY_HANDLER)
        except ClosedError:
            self.outcome = "closed"
        except RoleError:
            self.outcome = "refused"
        except NoClipsError:
            self.outcome = "empty"
        else:
            self.outcome = "worked"
            self.done.append("handler")

    def play(self):
        """Make the call under the handler, then compare everything; raise what is wrong."""
        self.blow.arm()
        try:
            self.do(self.calls, UNDER_WAY)
        except ClosedError:
            self.blow.disarm()
            closed = self.outcome == "worked" and self.acts.endswith("close")
            assert closed, f"the call under way was refused, after the handler's {self.outcome}"
        except NoClipsError:
            assert self.acts == "clear", f"no clips, after the handler's {self.outcome}"
            self.done.append("call")
        except RoleError as error:
            ended = self.outcome == "worked" and self.acts in ("finish", "abandon")
            assert ended, f"the call under way was refused ({error}), after {self.outcome}"
        else:
            self.done.append("call")
        finally:
            self.blow.disarm()
        if not self.blow.struck:
            return False
        self.recover_if_stale()
        return True

    def recover_if_stale(self):
        """Compare what is stored with what had an effect; then close, and open again."""
        calls = {"call": (self.calls, UNDER_WAY), "handler": (self.acts, BY_HANDLER)}
        allowed = []
        for order in (self.done, self.done[::-1]):
            model = self.model
            for who in order:
                model = self.after(model, *calls[who])
            allowed.append(model)
        for number, name in ((UNDER_WAY, self.calls), (BY_HANDLER, self.acts)):
            copy = self.folder / f"copy-{number[0]}"
            if name == "snapshot" and copy.exists():
                with closing(ReplayBuffer.open(copy)) as copied:
                    assert look(copied) in [*allowed, self.model], f"the copy has {look(copied)}"
        if not self.writer.engine.is_closed:
            assert look(self.writer) in allowed, f"there is {look(self.writer)}, allowed: {allowed}"
            assert self.writer.check() == []
            self.do("sample", None) if allowed[0] else None
            self.writer.write_episode(episode(*PROBE))  # it goes on
            with contextlib.suppress(RoleError):
                self.stream.abandon()
            self.writer.close()
        else:
            with closing(ReplayBuffer(MAX_STEPS, **self.options)) as again:
                assert look(again) in allowed, f"opened again, there is {look(again)}, allowed: {allowed}"
                again.write_episode(episode(*PROBE))
        reader = self.reader
        if not reader.engine.is_closed:
            reader.refresh()
            look(reader)
            assert reader.engine.reader.index.check() == []
            reader.close()
        with closing(ReplayBuffer(MAX_STEPS, **self.options)) as again:
            found = look(again)
            assert found[-1:] == (PROBE,), f"the probe is lost: {found}"
            assert any(a[len(a) - len(found) + 1 :] == found[:-1] for a in allowed), f"at last there is {found}"
            assert again.check() == []


def possible(folder, storage, durability, calls, blow=AtOurLine):
    """Return the numbers of the lines of a call at which a handler may run."""

    def body(say):
        case = Case(folder, storage, durability, calls, "sample", 0, blow)
        case.play()
        say(places=[n for n, (_, can) in enumerate(case.blow.places, 1) if can])

    death = run(body)
    assert not death.error, death.error
    return death.said[0]["places"]


def wrong_at(folder, storage, durability, calls, acts, numbers, blow=AtOurLine, most=3):
    """Let the handler call at each of these lines in turn; return `(how the handler's calls ended, what was wrong)`."""
    outcomes, wrong, numbers = {}, [], list(numbers)

    def body(say):
        for at in numbers:
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            say(at=at)
            case = None
            try:
                case = Case(folder, storage, durability, calls, acts, at, blow)
                case.play()
                say(outcome=case.outcome)
            except BaseException as error:
                place = case.blow.struck if case is not None else "before"
                say(wrong=f"{calls}, {acts} at {place}: {type(error).__name__}: {error}"[:600])
                return
        faulthandler.cancel_dump_traceback_later()

    while numbers and len(wrong) < most:
        death = run(body)
        at = max(said.get("at", 0) for said in death.said)
        found = [said["outcome"] for said in death.said if "outcome" in said]
        for outcome in found:
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if "wrong" in death.said[-1]:
            wrong.append(death.said[-1]["wrong"])
        elif death.killed or death.error or len(found) < len(numbers):
            wrong.append(f"{calls}, {acts} at line {at}: hung or died {death.error}")
        numbers = numbers[numbers.index(at) + 1 :] if wrong else []
    return outcomes, wrong


BLOWS = {"lines": AtOurLine, "calls": AfterOurCall}


class Twice:
    """A lock that a thread takes twice."""

    def __init__(self):
        self._lock = threading.RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def locked(self):
        return False

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


def without_the_gate():
    """Let calls into one another, as once."""
    begin = Store.__init__

    def careless(store, *args, **options):
        begin(store, *args, **options)
        store._mutex, store._syncing, store.lock = Twice(), Twice(), Twice()

    Store.__init__ = careless
    for module in (commits, engines, calls):
        module.refuse_nested = lambda where: None
    for module in (commits, engines):
        module.note_nested = lambda call: False
    calls._Thread.is_marked = property(lambda thread: False)
    calls.thread.searching = Twice()


def run_job(root, storage, durability, calls, acts, number=None, blow="lines", gate=True):
    """Try lines of a call, `number` of them drawn by chance (None: all).

    Returns:
        How the handler's calls ended, and what was wrong.
    """
    if not gate:
        without_the_gate()
    case = Path(root) / "case", storage, durability, calls
    lines = possible(*case, BLOWS[blow])
    if number is not None and len(lines) > number:
        lines = sorted(random.Random(f"{calls} {acts} {storage}").sample(lines, number))
    return wrong_at(*case, acts, lines, BLOWS[blow], most=3 if gate else 1)


if __name__ == "__main__":
    serve(run_job)
