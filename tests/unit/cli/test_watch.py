"""A buffer while it fills: no test waits for a clock, the clock is ours, or the writer is."""

import json
import os
import pty
import signal
import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest

from ringmap.data import ReplayBuffer
from tests.unit.cli.conftest import episode, fill

watching = import_module("ringmap.cli.watch")


def test_once(cli, replay):
    done = cli("watch", replay, "--once")
    assert (done.code, done.out.count("\n")) == (0, 1)
    assert done.out == ("45 of 50 steps, 90.0 % | 4 episodes | - steps/s | 66 written | 0 evicted since | no writer\n")
    found = cli("watch", replay, "--once", "--json").json
    assert found["steps_per_s"] is None
    assert (found["steps"], found["episodes"], found["writer_alive"]) == (45, 4, False)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for `sleep`, in which `clock.then` does what comes next."""

    class Clock:
        now, slept = 100.0, []

        def then(self):
            raise KeyboardInterrupt

        def sleep(self, seconds):
            self.slept.append(seconds)
            self.then()
            self.now += seconds

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(watching, "time", made)
    return made


def test_rates_fill_and_evictions_while_a_writer_writes(cli, tmp_path, clock):
    buffer = fill(tmp_path / "live", episodes=2)  # 10 and 11 steps
    comes = iter([[2, 3], [4, 5], [], None])

    def write():
        numbers = next(comes)
        if numbers is None:
            raise KeyboardInterrupt
        for number in numbers:
            buffer.write_episode(episode(number))

    clock.then = write
    done = cli("watch", "live", "--interval", "0.5", "--json")
    assert done.code == 0
    looks = [json.loads(line) for line in done.out.splitlines()]
    assert [look["steps"] for look in looks] == [21, 43, 45, 45]
    assert [look["steps_written"] for look in looks] == [21, 43, 66, 66]
    assert [look["steps_per_s"] for look in looks] == [None, 44.0, 46.0, 0.0]
    assert [look["steps_evicted"] for look in looks] == [0, 0, 21, 21]
    assert all(look["writer_alive"] for look in looks)
    assert set(clock.slept) == {0.5}
    buffer.close()


def test_a_buffer_that_is_opened_anew_and_cleared(cli, tmp_path, clock):
    fill(tmp_path / "live").close()
    comes = iter([lambda: ReplayBuffer.open(tmp_path / "live", mode="r+").clear(), None])

    def act():
        do = next(comes)
        if do is None:
            raise KeyboardInterrupt
        do()

    clock.then = act
    out = cli("watch", "live").out.splitlines()
    assert out[0].endswith("| 66 written | 0 evicted since | no writer")
    assert out[1].startswith("0 of 50 steps, 0.0 % | 0 episodes | 0 steps/s | 66 written")
    assert "| 45 evicted since |" in out[1]


def test_a_directory_that_is_replaced_is_an_error(cli, tmp_path, clock):
    fill(tmp_path / "live").close()

    def replace():
        (tmp_path / "live").rename(tmp_path / "old")
        fill(tmp_path / "live").close()

    clock.then = replace
    done = cli("watch", "live")
    assert done.code == 1
    assert "replaced" in done.err


def watched(folder, **options):
    """Start `ringmap watch`, with Ctrl-C as a terminal gives it: jobs in the background of a shell ignore it."""
    words = [sys.executable, "-m", "ringmap", "watch", str(folder), "--interval", "0.05"]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(words, preexec_fn=listens, **options)


def test_a_real_one_follows_a_writer_until_ctrl_c(tmp_path):
    buffer = fill(tmp_path / "live", episodes=1)
    process = watched(tmp_path / "live", stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("10 of 50 steps")
        buffer.write_episode(episode(1))
        while not process.stdout.readline().startswith("21 of 50 steps"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        buffer.close()


@pytest.mark.slow
def test_a_terminal_gets_one_line_that_changes(tmp_path):
    buffer = fill(tmp_path / "live", episodes=1)
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "150"}
    process = watched(tmp_path / "live", stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""

    def until(text):
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 4096)

    try:
        until(b"10 of 50 steps")
        buffer.write_episode(episode(1))
        until(b"21 of 50 steps")
        assert b"\r\x1b[2K" in seen  # the line is written over
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        buffer.close()
