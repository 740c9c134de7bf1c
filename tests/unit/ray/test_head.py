"""Ray's head is killed and started again, with Redis behind it: a learner and a collection go on."""

import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest

import ringmap.ray as rr
from tests.unit.fleet import worlds
from tests.unit.ray.collecting import Beside, all_committed, assert_exact, call, writers
from tests.unit.ray.conftest import until

pytest.importorskip("ray")

EPISODES = 400
SLOWER = partial(worlds.make_world, pause_s=0.05)


class Head:
    """The head's process. Ray ends the others, this one too, if it is not back within 60 s."""

    def __init__(self, node):
        self._node = node
        self.is_away = False

    def kill(self):
        (server,) = self._node.all_processes["gcs_server"]
        os.kill(server.process.pid, signal.SIGKILL)
        self._node.kill_gcs_server(check_alive=False)
        self.is_away = True

    def start(self):
        if self.is_away:
            self._node.start_gcs_server()
            self.is_away = False


class Learner:
    """Draws batches until it is told to end, and looks at every clip."""

    def __init__(self, buf):
        self._buf = buf
        self.batches, self.is_over = 0, False

    def learn(self):
        with self._buf.batches(64, prefetch=4) as batches:
            while not self.is_over:
                seen = next(batches)["observation"]
                assert (seen[:, 0, 0] == seen[:, 1, 0]).all(), "two episodes in a clip"
                assert (seen[:, 0, 1] + 1 == seen[:, 1, 1]).all(), "no consecutive steps"
                self.batches += 1

    def goes_on(self, batches=20):
        """Wait until it has drawn more."""
        enough = self.batches + batches
        until(lambda: self.batches >= enough, patience_s=40)


@pytest.fixture
def head(cluster, redis):
    if redis is None:
        pytest.skip("no redis-server is installed: without Redis, a head knows nothing of its cluster after a restart")
    made = Head(cluster.head_node)
    yield made
    made.start()


def test_the_head_is_killed_and_started_again(head, caplog):
    """Meanwhile batches come and seeds are played. A reader and a collector that die meanwhile are started again after
    it."""
    with tempfile.TemporaryDirectory(prefix="rmhead") as folder:
        path = Path(folder, "replay")
        with Beside(call, path, EPISODES, 3, SLOWER):
            until(lambda: all_committed(path) >= 10)
            with rr.ReplayBuffer(path, history_len=2, wait_s=90) as buf:
                learner = Learner(buf)
                with Beside(learner.learn):
                    try:
                        learner.goes_on()
                        readers = {node.name: node.pid for node in buf.nodes if node.pid}
                        head.kill()
                        count = all_committed(path)
                        learner.goes_on()
                        until(lambda: all_committed(path) >= count + 10)
                        node, killed = readers.popitem()
                        os.kill(killed, signal.SIGKILL)
                        os.kill(min(writers(path).values()), signal.SIGKILL)
                        learner.goes_on()
                        assert all_committed(path) < EPISODES, "nothing was left to collect"
                        head.start()
                        learner.goes_on()
                        until(lambda: {n.name: n.pid for n in buf.nodes}[node] not in (None, killed))
                    finally:
                        learner.is_over = True
                        head.start()
        assert_exact(path, EPISODES)
        assert "was killed" in caplog.text
        assert f"node {node} is back" in caplog.text
