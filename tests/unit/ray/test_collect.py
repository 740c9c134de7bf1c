"""`ringmap.ray.collect` over a cluster of raylets: exactly the seeds that were asked for, each once, whatever dies."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import ringmap.ray as rr
from ringmap.errors import EnvironmentFault, ExistsError, InputError, LockedError, RolloutError
from tests.unit.fleet import worlds
from tests.unit.fleet.supervised import SEED, committed, is_alive
from tests.unit.ray.collecting import SLOW, Beside, all_committed, assert_exact, call, rings, writers
from tests.unit.ray.conftest import NBYTES, OPTIONS, until

ray = pytest.importorskip("ray")
NodeAffinitySchedulingStrategy = pytest.importorskip("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy


@pytest.fixture
def path(cluster):
    with tempfile.TemporaryDirectory(prefix="rmcol") as folder:
        yield Path(folder, "replay")


def test_like_a_single_process(path):
    """Rings lie below the nodes' names; other numbers of collectors go on; then nothing is left to do."""
    call(path, 30, 3)
    assert_exact(path, 30)
    assert {ring.parent.name for ring in rings(path)} <= {"head", "a", "b"}
    assert len({ring.parent.name for ring in rings(path)}) > 1, "all on one node"
    before = rings(path)
    call(path, 30, 5)
    assert rings(path) == before
    with pytest.raises(ExistsError, match="hold 30 episodes of a collection with seed 100"):
        call(path, 30, 3, resume=False)
    with rr.ReplayBuffer(path, wait_s=60) as buf:
        until(lambda: sum(shard.episodes for node in buf.nodes for shard in node.shards) == 30)


def test_collectors_are_killed(path, caplog):
    rng = random.Random(5)

    def kill():
        for n in range(4):
            until(lambda n=n: all_committed(path) >= 10 + 12 * n)
            os.kill(rng.choice(list(until(writers, path).values())), signal.SIGKILL)

    with Beside(kill):
        call(path, 120, 3, SLOW)
    assert_exact(path, 120)
    assert caplog.text.count("and is started again") >= 4


def test_the_driver_is_killed(cluster, path):
    """Its actors end with it; another driver counts all rings, and goes on with other collectors."""
    for kill_at in (8, 25):
        command = [sys.executable, "-m", "tests.unit.ray.collecting", cluster.address, str(path), "80", "3"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
            until(lambda at=kill_at: all_committed(path) >= at)
            orphans = list(until(writers, path).values())
            driver.kill()
        until(lambda pids=orphans: not any(map(is_alive, pids)))
    assert all_committed(path) < 80
    call(path, 80, 2)
    assert_exact(path, 80)


class Hoard:
    """Keeps more in the store of its node than fits, in use, so that nothing of it can be moved out."""

    def ready(self):
        return True

    def fill(self):
        kept = [ray.put(np.zeros(50_000_000, np.uint8)) for _ in range(8)]
        self.views = [ray.get(ref) for ref in kept]
        return sum(view.nbytes for view in self.views)


def test_full_stores(path):
    """Collectors, parent and the notes of nodes need no room in a store."""
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    hoards = [
        ray.remote(Hoard)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote()
        for node in alive
    ]
    assert all(ray.get([hoard.ready.remote() for hoard in hoards]))

    def fill():
        until(lambda: all_committed(path) >= 10)
        pids = list(until(writers, path).values())
        for pid in pids:  # on a busy machine they would be done first
            os.kill(pid, signal.SIGSTOP)
        try:
            assert min(ray.get([hoard.fill.remote() for hoard in hoards])) > NBYTES
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert all_committed(path) < 200, "nothing was left to collect beside full stores"

    try:
        with Beside(fill):
            call(path, 250, 3, SLOW)
        assert_exact(path, 250)
        call(path.with_name("begun"), 30, 3)
        assert_exact(path.with_name("begun"), 30)
    finally:
        for hoard in hoards:
            ray.kill(hoard)


def test_a_node_goes_with_its_disk_and_comes_back(cluster, path, caplog):
    """What its collector held is not played by others, but counted when the disk is there again."""
    here = {"c": cluster.add_node(**OPTIONS, node_name="c", resources={"rings": 1})}
    away = path.with_name("away")

    try:
        with Beside(call, path, 60, 1, SLOW, actor={"resources": {"rings": 1}}, wait_s=60):
            (ring, pid), *_ = until(lambda: list(writers(path).items()))
            until(lambda: committed(ring.parent) >= 4)
            os.kill(pid, signal.SIGSTOP)
            os.rename(path / "c", away)
            cluster.remove_node(here.pop("c"), allow_graceful=False)
            os.kill(pid, signal.SIGKILL)
            until(lambda: "can't be reached, and keeps its seeds until it can" in caplog.text)
            os.rename(away, path / "c")
            here["c"] = cluster.add_node(**OPTIONS, node_name="c", resources={"rings": 1})
        assert ring.parent.name == "c"
        assert_exact(path, 60)
    finally:
        for node in here.values():
            cluster.remove_node(node)


def test_a_node_is_away_at_the_beginning(path, caplog):
    """It is known from the notes of the others, and waited for, then named; or given up by name."""
    call(path, 30, 3)
    gone = max(path.glob("*"), key=committed)
    assert len(list(path.glob("*/collect/nodes.json"))) > 1
    lost = committed(gone)
    os.rename(gone, path.with_name("away"))
    with pytest.raises(EnvironmentFault, match=f"no node that is alive sees them: {gone} of node {gone.name}"):
        call(path, 30, 3, wait_s=0)
    os.rename(path.with_name("away"), gone)
    call(path, 30, 3, wait_s=0)
    assert_exact(path, 30)
    shutil.rmtree(gone)
    call(path, 30, 3, wait_s=0, lost=[gone.name])
    assert_exact(path, 30)
    assert lost > 0


def test_without_the_notes_seeds_are_played_twice(path):
    """The control: nobody notes where rings are."""
    call(path, 30, 3)
    for noted in path.glob("*/collect/nodes.json"):
        noted.unlink()
    gone = max(path.glob("*"), key=committed)
    os.rename(gone, path.with_name("away"))
    call(path, 30, 3, wait_s=0)
    os.rename(path.with_name("away"), path / "back")  # others may play below its name by now
    assert all_committed(path) > 30
    with pytest.raises(InputError, match="both hold seed 1"):
        call(path, 30, 3, wait_s=0)


def test_without_the_count_seeds_are_played_twice(path, monkeypatch):
    """The control: no ring is counted at the beginning."""
    call(path, 30, 3)
    monkeypatch.setattr("ringmap.ray.census.finished_in", lambda *_: set())
    call(path, 30, 1)
    monkeypatch.undo()
    assert all_committed(path) > 30
    with pytest.raises(InputError, match="both hold seed 1"):
        call(path, 30, 3)


def test_one_call_at_a_time(path):
    def second():
        until(lambda: all_committed(path) >= 2)
        with pytest.raises(LockedError, match="is collecting here already"):
            call(path, 40, 2, wait_s=0)

    with Beside(second):
        call(path, 40, 1, SLOW)
    assert_exact(path, 40)


def fails(number):
    raise ZeroDivisionError(f"no world for {number}")


def test_what_goes_wrong(path, cluster):
    with pytest.raises(RolloutError, match="could not begin.*ring") as caught:
        call(path, 5, 2, fails)
    assert str(caught.value).count("ZeroDivisionError: no world for") == 1
    with pytest.raises(InputError, match=r"make_world\(\d\) must return a ringmap.World, got int"):
        call(path, 5, 2, int)
    fault = partial(worlds.make_world, fault="raises", at=SEED + 3)
    with pytest.raises(RolloutError, match="collector 0 is given up") as caught:
        call(path, 6, 1, fault)
    assert "ZeroDivisionError: planted" in str(caught.value)
    call(path, 6, 1)
    assert_exact(path, 6)
    with pytest.raises(InputError, match="another collection with seed 100"):
        call(path, 7, 1)
    one = rings(path)[0]
    shutil.copytree(one, path / "b" / "copy")
    with pytest.raises(InputError, match="are the same ring, by a copy or a shared disk"):
        call(path, 6, 1)


def test_bad_calls(path):
    for match, options in [
        ("say how many episodes: a number", {"episodes": "x"}),
        ("collectors", {"collectors": 0}),
        ("actor= must not have 'max_restarts'", {"actor": {"max_restarts": 3}}),
        ("lost= must list names", {"lost": "a"}),
        ("make_world must be a function", {"make_world": 3}),
        ("unknown argument 'max_step'", {"max_step": 3}),
    ]:
        with pytest.raises(InputError, match=match):
            call(path, **{"episodes": 3, "collectors": 1, **options})
    assert not path.exists()
