"""Many processes collect: exactly the seeds that were asked for, each once, whoever is killed, and when."""

import io
import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from tqdm import tqdm

import ringmap
from ringmap.data import ReplayBuffer
from ringmap.errors import ExistsError, InputError, LockedError, RolloutError
from tests.unit.fleet import worlds
from tests.unit.fleet.supervised import (
    SEED,
    all_gone,
    call,
    campaign,
    committed,
    is_alive,
    is_written,
    pids,
    said,
    started,
    stored,
    uninterrupted,
    until,
)


def test_like_a_single_process(tmp_path):
    """Spawned as a user's are; another number of collectors goes on; then there is nothing left to do."""
    expected = uninterrupted(30)
    call(tmp_path, 30, 2, context="spawn")
    assert stored(tmp_path) == expected
    call(tmp_path, 30, 3, context="spawn")
    assert len(pids(tmp_path)) == 2, "a process was started for nothing"
    assert all_gone(tmp_path)


def part_of(path, episodes, **options):
    """Let two collectors play until one of them hangs, and kill the call."""
    hanging = partial(worlds.make_world, fault="hangs", at=SEED + episodes // 2)
    supervisor = started(path, episodes, 2, hanging, **options)
    until(said, path, "hangs")
    supervisor.kill()
    supervisor.join()
    until(all_gone, path)


@pytest.mark.slow
def test_goes_on_with_others(tmp_path):
    """Most is evicted meanwhile: the rings still know what they had."""
    part_of(tmp_path, 60, max_steps=40)
    assert 5 < committed(tmp_path) < 60
    call(tmp_path, 60, 3, max_steps=40)
    assert committed(tmp_path) == 60
    expected = uninterrupted(60)
    assert all(expected[seed] == episode for seed, episode in stored(tmp_path).items())


# -- kills -------------------------------------------------------------------------------------


def killed_at_random(tmp_path, kills, episodes, seed):
    room = 12 * episodes + 1000  # of each ring: nothing is evicted
    counts, drawn, torn = campaign(tmp_path / "fleet", random.Random(seed), kills, episodes, max_steps=room)
    found = stored(tmp_path / "fleet")
    assert sorted(found) == list(range(SEED, SEED + episodes))
    assert committed(tmp_path / "fleet") == episodes
    assert found == uninterrupted(episodes)
    assert torn == 0
    return counts, drawn


@pytest.mark.slow
def test_killed_at_random(tmp_path):
    killed_at_random(tmp_path, kills=4, episodes=120, seed=3)


@pytest.mark.campaign
def test_kill_campaign(tmp_path):
    kills = int(os.environ.get("KILLS", 200))
    seed = int(os.environ.get("SEED", 1))
    counts, drawn = killed_at_random(tmp_path, kills, kills * 25, seed)
    print(f"\n{kills * 25:,} seeds, each once; killed {counts}; the learners drew {drawn:,} clips, none torn")


def len_of(ring):
    with ReplayBuffer.open(ring) as buf:
        return buf.num_episodes


def test_without_the_count_seeds_are_played_twice(tmp_path, monkeypatch):
    """The control: no ring is counted at the beginning."""
    part_of(tmp_path, 40)
    played = max(tmp_path.glob("collector-?/manifest.json"), key=lambda made: len_of(made.parent))
    os.rename(played.parent, tmp_path / "collector-7")  # of a call with more collectors
    monkeypatch.setattr("ringmap.collection.collect.finished_below", lambda *_: set())
    call(tmp_path, 40, 2)
    monkeypatch.undo()
    assert committed(tmp_path) > 40
    with pytest.raises(AssertionError):
        stored(tmp_path)
    with pytest.raises(InputError, match="both hold seed 1..: was a ring copied"):
        call(tmp_path, 40, 2)


# -- nobody is left behind -----------------------------------------------------------------------


def hangs(number, deaf=False, workers=0):
    """Make a world whose second seed never ends. `deaf`: the kernel shall not end this process with its parent."""
    if deaf:
        import ctypes

        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    return worlds.make_world(number, 1, fault="hangs", at=SEED + 1, workers=workers)


def hanging(path, **options):
    """Start a collection of two that hangs; return its process, and the process that hangs."""
    make_world = partial(hangs, deaf=options.pop("deaf", False), workers=options.pop("workers", 0))
    supervisor = started(path, 4, 1, make_world, **options)
    until(said, path, "hangs")
    return supervisor, pids(path)[0]


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_a_collector_ends_with_its_parent(tmp_path, context):
    """By the kernel where it is the child of its parent, else by a thread that watches a pipe."""
    supervisor, collector = hanging(tmp_path / "fleet", context=context)
    supervisor.kill()
    supervisor.join()
    until(lambda: not is_alive(collector))


def test_a_deaf_collector_is_waited_for(tmp_path):
    """The control: what the kernel was asked for is taken back. The orphan is found by the lock of its ring."""
    path = tmp_path / "fleet"
    supervisor, collector = hanging(path, context="spawn", deaf=True)
    supervisor.kill()
    supervisor.join()
    try:
        assert is_alive(collector)
        with pytest.raises(LockedError, match=f"collector-0: is being written by process {collector}"):
            call(path, 4, 2, wait_s=0)
        assert is_alive(collector)
    finally:
        os.kill(collector, signal.SIGKILL)
    call(path, 4, 2)  # it waits until the dead one's lock is free
    assert stored(path) == uninterrupted(4)


def test_ctrl_c_ends_all(tmp_path):
    """Also one that catches the signal and goes on, and the processes of its environments."""
    path = tmp_path / "fleet"
    supervisor, collector = hanging(path, workers=1)
    group = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _group(p) == collector]
    assert len(group) > 1, "the collector, and the process of its environment"
    os.kill(supervisor.pid, signal.SIGINT)
    supervisor.join(60)
    assert supervisor.exitcode == 1
    until(lambda: not any(map(is_alive, group)))  # a killed process takes a moment to end
    assert not is_written(path)
    call(path, 4, 2)
    assert sorted(stored(path)) == list(range(SEED, SEED + 4))


def _group(process):
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return None


@pytest.mark.parametrize("interrupted", ["drop", "keep"])
def test_what_was_open_at_ctrl_c(tmp_path, interrupted):
    path, options = tmp_path / "fleet", {"commit_every": 1, "interrupted": interrupted}
    make_world = partial(worlds.make_world, num_envs=1, fault="waits", at=SEED + 1)
    supervisor = started(path, 6, 1, make_world, **options)
    until(said, path, "waits")
    os.kill(supervisor.pid, signal.SIGINT)
    supervisor.join(60)
    assert supervisor.exitcode == 1
    call(path, 6, 2, **options)
    found, expected = stored(path), uninterrupted(6)
    for seed in expected.keys() - {SEED + 1}:
        assert found[seed]["observation"] == expected[seed]["observation"]
    kept, whole = found[SEED + 1]["observation"], expected[SEED + 1]["observation"]
    assert (kept == whole) == (interrupted == "drop")
    assert whole[2].startswith(kept[2])
    assert len(found) == 6


# -- what goes wrong -----------------------------------------------------------------------------


def fails(number):
    """Fail to make a world."""
    raise ZeroDivisionError(f"no world for {number}")


def no_world(number):
    """Make something else."""
    return number


def dies(path, number):
    """Make a world in which collector 0 dies in its first step; the others begin when it has died five times."""
    log = path / "collect/collector-0.log"
    while number and not (log.exists() and log.read_text().count("the last words") == 5):
        time.sleep(0.02)
    return worlds.make_world(number, 1, fault="prints and dies" if number == 0 else "")


def test_make_world_fails(tmp_path):
    with pytest.raises(RolloutError) as caught:
        call(tmp_path, 5, 3, fails)
    message = str(caught.value)
    assert message.count("ZeroDivisionError: no world for") == 1
    assert "could not begin" in message and "collector-" in message and "in fails" in message
    with pytest.raises(InputError, match=r"make_world\(\d\) must return a ringmap.World, got int"):
        call(tmp_path, 5, 2, no_world)
    assert all_gone(tmp_path)


@pytest.mark.slow
def test_one_is_given_up(tmp_path, caplog):
    """The others play its seeds; the message shows its last words."""
    call(tmp_path, 12, 2, partial(dies, tmp_path))
    assert stored(tmp_path) == uninterrupted(12)
    said = caplog.text
    assert said.count("was killed by SIGKILL, and is started again") == 4
    assert "collector 0 is given up: it ended 5 times without a new episode" in said
    assert "the last words" in said and "Its seeds go to the others" in said


def test_all_are_given_up(tmp_path):
    fault = partial(worlds.make_world, fault="raises", at=SEED + 3)
    with pytest.raises(RolloutError) as caught:
        call(tmp_path, 6, 1, fault)
    message = str(caught.value)
    assert "collector 0 is given up" in message and "ZeroDivisionError: planted" in message
    assert str(tmp_path / "collect/collector-0.log") in message
    call(tmp_path, 6, 1)
    assert stored(tmp_path) == uninterrupted(6)


def test_bad_calls(tmp_path):
    """Nothing is made, and no process is started."""
    path = tmp_path / "fleet"
    for match, options in [
        ("say how many episodes: a number", {"episodes": "x"}),
        ("collectors", {"collectors": 0}),
        ("max_steps", {"max_steps": 0}),
        ("threads", {"threads": 0}),
        ("context must be 'spawn' or 'forkserver', got 'fork'", {"context": "fork"}),
        ("options must be one mapping", {"options": [None]}),
        ("weights= must be a ringmap.Weights, got str", {"weights": "runs/policy"}),
        ("pace= must be a ringmap.Pace, got int", {"pace": 3}),
        ("pace= counts the rings in", {"pace": ringmap.Pace(tmp_path / "x", samples_per_insert=1, min_steps=100)}),
        ("unknown argument 'max_step'.*interrupted", {"max_step": 3}),
        ("make_world can't be sent to another process.*top level", {"make_world": lambda number: None}),
        ("policy can't be sent to another process", {"policy": lambda infos: None}),
        ("make_world must be a function", {"make_world": 3}),
        ("expected 'module:name', got 'worlds'", {"make_world": "worlds"}),
        ("No module named 'no_such_module'", {"make_world": "no_such_module:make"}),
        ("has no attribute 'make'", {"make_world": "tests.unit.fleet.worlds:make"}),
    ]:
        with pytest.raises(InputError, match=match):
            call(path, **{"episodes": 3, "collectors": 1, **options})
    assert not path.exists()


def test_rings_that_do_not_fit(tmp_path):
    call(tmp_path, 3, 1)
    with pytest.raises(ExistsError, match="hold 3 episodes of a collection with seed 100"):
        call(tmp_path, 3, 1, resume=False)
    with pytest.raises(InputError, match="another collection with seed 100.*episodes: 3 there, 4 now"):
        call(tmp_path, 4, 1)
    os.symlink(tmp_path / "collector-0", tmp_path / "link")
    call(tmp_path, 3, 1)  # a link is the ring that it leads to
    os.remove(tmp_path / "link")
    shutil.copytree(tmp_path / "collector-0", tmp_path / "copy")
    with pytest.raises(InputError, match="collector-0 and .*copy both hold seed 100: was a ring copied"):
        call(tmp_path, 3, 1)
    shutil.rmtree(tmp_path / "copy")
    with (
        ringmap.ReplayBuffer.open(tmp_path / "collector-0", mode="r+"),
        pytest.raises(LockedError, match="collector-0"),
    ):
        call(tmp_path, 3, 1, wait_s=0)
    call(tmp_path, 3, 1, seed=200)  # another collection, into the same ring
    assert sorted(stored(tmp_path)) == [100, 101, 102, 200, 201, 202]


def test_one_call_at_a_time(tmp_path):
    path = tmp_path / "fleet"
    supervisor, _ = hanging(path)
    with pytest.raises(LockedError, match=f"process {supervisor.pid} .* is collecting here already"):
        call(path, 4, 2)
    supervisor.kill()
    supervisor.join()
    until(all_gone, path)


# -- with a learner ------------------------------------------------------------------------------


def acting(number):
    """Make a world, and take the threads that it may use into its log."""
    import torch

    print("threads", torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), flush=True)
    return worlds.make_world(number)


def test_weights_pace_and_threads(tmp_path):
    import torch

    from ringmap.policy import FeedForwardPolicy

    weights = ringmap.Weights(tmp_path / "policy")
    published, played = torch.nn.Linear(3, 3).double(), torch.nn.Linear(3, 3).double()
    weights.publish(published, 7)
    policy = FeedForwardPolicy(Bounded(played), keys="observation")
    given = {
        "policy": policy,
        "weights": ringmap.Weights(tmp_path / "policy", played),
        "pace": ringmap.Pace(tmp_path / "fleet", samples_per_insert=1, min_steps=1000, slack=0.5),
    }
    call(tmp_path / "fleet", 4, 2, acting, threads=3, **given)
    buf = ringmap.data.ShardedReplayBuffer(tmp_path / "fleet")
    assert set(buf.get_episode_data()["policy_step"]) == {7}
    first = buf.load_episode(0)
    said = Bounded(published)(torch.as_tensor(first["observation"][:-1]))
    assert torch.equal(said.float(), torch.as_tensor(first["action"][:-1]))
    buf.close()
    assert not played.weight.is_shared(), "a collector could write the caller's model"
    assert "threads 3" in (tmp_path / "fleet/collect/collector-0.log").read_text()
    weights.publish(torch.nn.Linear(3, 4).double(), 8)
    with pytest.raises(InputError, match="weights are of another model: 'weight' is float64") as caught:
        call(tmp_path / "other", 4, 2, **{**given, "pace": None})
    assert "in collector" in "".join(caught.value.__notes__)


class Bounded:
    """A model whose actions are in the space."""

    def __init__(self, model):
        self.model = model

    def __call__(self, seen):
        return self.model(seen).tanh().detach()

    def parameters(self):
        return self.model.parameters()


@pytest.mark.parametrize("columns", [160, 80])
def test_a_wide_terminal_shows_each_collector(tmp_path, monkeypatch, columns):
    shown = io.StringIO()

    def bar_of(what, count, progress, done=0):
        return tqdm(total=count, initial=done, desc="fleet", mininterval=0, file=shown, ncols=columns)

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("ringmap.collection.collect.bar_of", bar_of)
    call(tmp_path, 12, 2, progress=True)
    last = shown.getvalue().split("\r")[-1]
    assert "12/12" in last
    each = re.search(r"0:(\d+) 1:(\d+)", last)
    if columns == 80:
        assert each is None
    else:
        assert each is not None
        assert int(each[1]) + int(each[2]) == 12
