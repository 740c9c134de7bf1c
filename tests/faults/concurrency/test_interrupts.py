"""Ctrl-C anywhere in a draw: the next draw goes on, and every clip proves itself."""

import itertools
import subprocess
import sys

import pytest

import ringmap.clips.gather
import ringmap.clips.index
import ringmap.storage.read.handle
import ringmap.storage.read.reader
import ringmap.storage.ring.live
from benchmarks.harness.proof import Episodes, num_torn
from ringmap import ReplayBuffer
from ringmap.clips.index import SpanIndex
from tests.faults.crash.kill.blows import can_be_interrupted

FILES = {
    module.__file__
    for module in (
        ringmap.clips.gather,
        ringmap.clips.index,
        ringmap.clips.index,
        ringmap.storage.ring.live,
        ringmap.storage.read.reader,
        ringmap.storage.read.handle,
    )
}


class Pen:
    def __init__(self, buffer):
        self.buffer, self.number, self._episodes = buffer, 0, Episodes(8, 9)

    def write(self, episodes):
        for _ in range(episodes):
            self.buffer.write_episode(self._episodes(self.number, 2 + self.number * 5 % 8))
            self.number += 1


def interrupt():
    raise KeyboardInterrupt


class Interrupt:
    """Strikes once, ahead of the n-th line that runs in some files, of those where a signal can: with Ctrl-C, or a
    handler."""

    def __init__(self, at, files=FILES, strike=interrupt):
        self.left, self.files, self.strike = at, files, strike

    def __call__(self, frame, event, _):
        code, before = frame.f_code, (None, None)
        if code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes = True

        def local(frame, event, _):
            nonlocal before
            if event == "line" and can_be_interrupted(code, frame.f_lasti, *before):
                self.left -= 1
                if self.left == 0:
                    self.strike()
            elif event == "opcode":
                before = before[1], frame.f_lasti
            return local

        return local

    def strikes_in(self, call):
        """Run the call; tell whether it was struck."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self.left <= 0


def faults_after_interrupts(path, role, episodes, every):
    """Interrupt a draw at every so many lines of it in turn, each after a write; return what was wrong then."""
    writer = ReplayBuffer(60, 2, path=path, spare_rows=20, seed=0, sync_every_s=0)
    pen = Pen(writer)
    pen.write(40)
    who = writer if role == "writer" else ReplayBuffer.open(path, seed=0)
    faults = []
    who.sample(8)
    for at in itertools.count(1, every):
        pen.write(episodes)
        if not Interrupt(at).strikes_in(lambda: who.sample(32)):
            break
        pen.write(1)
        for history in (2, 1):
            batch = who.sample(64, history)
            if num_torn(batch) or batch["episode"].min() < writer.load_episode(0)["episode"][0]:
                faults.append((at, "torn"))
        if who.lengths.tolist() != writer.lengths.tolist():
            faults.append((at, "lengths"))
        faults += [(at, fault) for fault in who.engine.reader.index.check()]
        if faults:
            break
    assert faults or at > 50
    if who is not writer:
        who.close()
    writer.close()
    return faults


@pytest.mark.parametrize("role", ["writer", "reader"])
@pytest.mark.parametrize("episodes", [1, 3, 40])
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_draw_after_an_interrupted_one(fast, role, episodes, every):
    assert faults_after_interrupts(fast / "buf", role, episodes, every) == []


def test_control_an_index_that_does_not_start_over(fast, monkeypatch):
    follow = SpanIndex.follow

    def forgetful(index):
        if index._era == -1:
            index._era = index.live.era
        follow(index)

    monkeypatch.setattr(SpanIndex, "follow", forgetful)
    assert faults_after_interrupts(fast / "buf", "writer", 1, every=3)


IMPORTING = """
import signal, sys
import numpy as np
from ringmap import ReplayBuffer
from ringmap.errors import RoleError

buf = ReplayBuffer(100, path="b")
for _ in range(9):
    buf.write_episode({"obs": np.arange(9)})
said, armed = [], False

def calls(at):
    return (lambda: buf.snapshot(f"s{at}"), buf.check, buf.view, lambda: buf.split(0.5),
            lambda: list(buf.pass_sampler()),
            lambda: next(iter(buf.batches(2, prefetch=0))), lambda: buf.begin_episode().abandon())

def handler(*_):
    global armed
    armed = False
    for call in calls(f"h{len(said)}"):
        try:
            call()
            said.append("")
        except RoleError:  # in the middle of a write
            said.append("")
        except BaseException as error:
            said.append(repr(error))
    armed = True

def hook(event, found):
    global begun
    if armed and event == "import" and found[0].startswith("ringmap."):
        begun += 1  # the second one is imported by the first, which is half done
        if begun == 2:
            signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGTERM, handler)
sys.addaudithook(hook)
for number, call in enumerate(calls("m")):
    armed, begun = True, 0
    call()
    armed = False
print(sorted({error for error in said if error}))
"""


def test_a_first_call_in_a_handler_meets_no_half_imported_module(tmp_path):
    """Whatever a handle can do is imported before there is a handle: a handler may come in mid-import."""
    done = subprocess.run([sys.executable, "-c", IMPORTING], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
