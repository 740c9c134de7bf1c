"""A victim: a forked process that makes the calls of a script, says which returned, and is killed."""

import json
import os
import signal
import sys
import traceback
import uuid
from contextlib import closing, suppress
from dataclasses import dataclass, field

import numpy as np
from filelock import FileLock

from ringmap.buffers import engine
from ringmap.buffers.replay import ReplayBuffer
from ringmap.errors import NoClipsError
from ringmap.storage.records import blobs
from tests.crash.kill import verdict
from tests.crash.kill.blows import AtChange
from tests.crash.kill.script import MAX_STEPS, SPARE, STORAGES, TERMINATED, episode

mouth = -1
"""The descriptor over which this process, if it is a victim, speaks."""


class Hands:
    """Makes the calls of a script on one buffer, and shows what is in it; of other buffers, see families.py."""

    def __init__(self, folder, scenario, level):
        self.folder = folder
        self.in_ram = level == "ram"
        self.options = {**scenario.options, "storage": STORAGES[scenario.storage]}
        if not self.in_ram:
            self.options |= {"path": folder, "durability": level}
        self.buffer = None
        self.streams = {}
        blobs.Segments.__init__.__defaults__ = (scenario.segment_nbytes or blobs.SEGMENT_NBYTES,)

    def open(self):
        return ReplayBuffer(MAX_STEPS, seed=0, spare_rows=SPARE, sync_every_s=0, **self.options)

    def open_reader(self):
        return ReplayBuffer.open(self.folder, mode="r")

    @property
    def home(self):
        """The directory of the table."""
        return self.folder

    def write(self, buffer, k, steps):
        buffer.write_episode(episode(k, steps))

    def store(self, buffer):
        return buffer.engine.owned

    def see(self, buffer):
        """Return the episodes, having compared every byte of them."""
        return verdict.observe(buffer)

    def given(self, buffer):
        """Return what the model's `given` must be, number -> value."""
        return {}

    def agrees(self, given, model):
        """Tell whether what `given` returned is what the model says."""
        known = model.given()
        return all(known.get(k) == value for k, value in given.items())

    def check_clips(self, buffer, model):
        verdict.check_clips(buffer, model)

    def state_of(self, buffer):
        return sampling_of(buffer)

    def fresh_state(self):
        """Return what `state_of` is at first."""
        fresh = {"step": 0, "rng": np.random.default_rng(0).bit_generator.state}
        return json.dumps(fresh, default=str, sort_keys=True)

    def do_now(self, index, op):
        """Make call number `index` of the script."""
        self.do(op)

    def do(self, op):
        kind, *args = op
        buffer = self.buffer
        if kind == "open":
            if not self.in_ram or buffer is None:  # what is in RAM lives in its process alone
                self.buffer = None
                self.buffer = self.open()
        elif kind == "write":
            self.write(buffer, *args)
        elif kind == "sample":
            with suppress(NoClipsError):
                buffer.sample(4)
        elif kind == "sync":
            self.store(buffer).sync_behind()
        elif kind == "begin":
            self.streams[args[0]] = buffer.begin_episode()
        elif kind == "append":
            stream = self.streams[args[0]]
            whole = episode(args[0], stream.num_steps + 1)
            stream.append({name: whole[name][-1] for name in ("obs", "action")})
        elif kind == "finish":
            data = episode(args[0], 1)["_episode_data"]
            self.streams[args[0]].finish(terminated=bool(TERMINATED), episode_data=data)
        elif kind == "abandon":
            self.streams[args[0]].abandon()
        else:
            getattr(buffer, kind)()

    def sampling(self):
        return self.state_of(self.buffer)


def sampling_of(buffer):
    """Return the sampling state as text; a closed buffer still tells its own."""
    return json.dumps(buffer.state_dict(), default=str, sort_keys=True)


def hands_of(folder, scenario, level):
    """Return the hands for a scenario's kind of buffer."""
    from tests.crash.kill.families import FAMILIES

    return FAMILIES[scenario.family](folder, scenario, level)


@dataclass
class Death:
    """How a victim ended. `returned`: the sampling state after each call that did."""

    killed: bool
    returned: list
    said: dict = field(default_factory=dict)
    said_all: list = field(default_factory=list)
    error: str = ""


def same_ids(since):
    """Make ids follow from how many were made since call number `since`: two victims leave the same bytes."""
    count = iter(range(1, 1000))
    uuid.uuid4 = lambda: uuid.UUID(int=(1000 * since + next(count)) << 64, version=4)


class Voice:
    """What a victim says over a pipe: one JSON line each."""

    def __init__(self, fd):
        self.fd = fd

    def say(self, **what):
        line = json.dumps(what).encode() + b"\n"
        while line:
            line = line[os.write(self.fd, line) :]


def rehearse():
    """Do what a process does but once after a fork: now, so that all cases of a process run the same lines.

    It takes as long as what a victim does: where neither lines nor system calls are counted, it is left out.
    """
    FileLock(os.devnull)  # fills filelock's cache
    with closing(ReplayBuffer(4, seed=0, storage="zarr")) as buffer:  # the first batch counts the cores
        buffer.write_episode(episode(1, 2))
        buffer.sample(1)


def run(body, before_wait=None, rehearsed=True):
    """Fork, run `body(voice)` in the child, and return how it ended.

    `before_wait(pid)` is called in the parent, which may kill the child from outside. `rehearsed`: see `rehearse`.
    """
    global mouth
    ear, mouth = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            os.close(ear)
            voice = Voice(mouth)
            try:
                if rehearsed:
                    rehearse()
                body(voice)
            except BaseException:
                sys.settrace(None)
                voice.say(error=traceback.format_exc(limit=-12))
        finally:
            os._exit(0)
    os.close(mouth)
    if before_wait is not None:
        try:
            before_wait(pid)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    heard = b""
    while part := os.read(ear, 1 << 20):
        heard += part
    os.close(ear)
    status = os.waitpid(pid, 0)[1]
    killed = os.WIFSIGNALED(status)
    death = Death(killed, [])
    if killed and os.WTERMSIG(status) != signal.SIGKILL:
        death.error = f"died of signal {os.WTERMSIG(status)}"
    for line in heard.decode().splitlines():
        said = json.loads(line)
        death.said_all.append(said)
        if "returned" in said:
            death.returned.append(said["returned"])
        elif "error" in said:
            death.error = said["error"]
        else:
            death.said.update(said)
    return death


def perform(folder, scenario, level, ops, since, quiet, blow=None, boot=None, before_wait=None):
    """Fork a victim that makes the calls: the first `quiet` of them untouched, then under the blow.

    `since` calls were made by others before; `boot`, the id of another boot, in which it lives.
    """

    def body(voice):
        same_ids(since)
        if boot is not None:
            engine.DISK.system.boot_id = lambda: boot
        hands = hands_of(folder, scenario, level)
        for index, op in enumerate(ops[:quiet], since):
            hands.do_now(index, op)
            voice.say(returned=hands.sampling())
        for index, op in enumerate(ops[quiet:], since + quiet):
            if blow is not None:
                blow.arm()
            hands.do_now(index, op)
            if blow is not None:
                blow.disarm()
            voice.say(returned=hands.sampling())
        if blow is not None:
            voice.say(places=blow.places)

    counts_lines = blow is not None and not isinstance(blow, AtChange)
    return run(body, before_wait, rehearsed=counts_lines)
