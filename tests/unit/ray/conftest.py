import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from ringmap import ReplayBuffer
from ringmap.errors import ReplacedError
from tests.unit.buffers.steps import episode

PATIENCE_S = 90.0
NBYTES = 300_000_000
OPTIONS = {"num_cpus": 4, "object_store_memory": NBYTES, "include_dashboard": False}


def until(what, *args, patience_s=PATIENCE_S):
    """Wait until something is true; fail if it never is."""
    end = time.monotonic() + patience_s
    while not (found := what(*args)):
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="session")
def redis(tmp_path_factory):
    """The address of a Redis server, where Ray's head keeps what it must know after a restart; None if there is
    none."""
    server = shutil.which("redis-server")
    if server is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    command = [server, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until(is_answering, port)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def is_answering(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="session")
def cluster(redis):
    """A cluster of three raylets on this machine: `head`, where the tests are the driver, `a` and `b`."""
    import ray
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray keeps the address of a cluster there
    outside = {"external_addresses": [redis, redis], "num_redis_shards": 1} if redis else {}
    head = {**OPTIONS, **outside, "node_name": "head"}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for name in ("a", "b"):
            made.add_node(**OPTIONS, node_name=name)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


class Nodes:
    """Rings below the folders of nodes, with writers in this process."""

    def __init__(self, folder):
        self.folder = folder
        self.writers = {}
        self.lengths = {}
        """Number -> length, of every episode."""

    def ring(self, node, name="0", **options):
        """Make a ring of a node."""
        self.writers[node, name] = ReplayBuffer(5000, path=self.folder / node / name, **options)
        return self.writers[node, name]

    def write(self, node, length, name="0"):
        """Write the next episode."""
        number = len(self.lengths)
        self.writers[node, name].write_episode(episode(number, length))
        self.lengths[number] = length

    def clips(self, span):
        return sum(max(0, n - span + 1) for n in self.lengths.values())


@pytest.fixture
def nodes(cluster):
    """Rings of the nodes a (300 steps) and b (100 steps), in a folder that every raylet has."""
    with tempfile.TemporaryDirectory(prefix="rmray") as folder:
        made = Nodes(Path(folder))
        for node, count in (("a", 10), ("b", 5)):
            made.ring(node)
            for _ in range(count):
                made.write(node, 30 if node == "a" else 20)
        yield made
        for writer in made.writers.values():
            with contextlib.suppress(ReplacedError):
                writer.close()
