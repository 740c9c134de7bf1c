import json
import multiprocessing
import os

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    max_examples=50,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("default"), print_blob=True)
settings.register_profile(
    "campaign",
    settings.get_profile("default"),
    derandomize=False,  # new cases each time; --hypothesis-seed=N gives the same ones again
    max_examples=5_000,
    stateful_step_count=100,
    print_blob=True,
)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# What is started from a fork server is given its arguments as a spawned process is, and imports none of this again.
multiprocessing.set_forkserver_preload(
    ["torch.utils.data", "gymnasium", "h5py", "ringmap.data", "ringmap.collection.collector"]
)


HAS_BRANCH = os.environ.get("RINGMAP_TEST_BRANCH") != "0"
"""Whether a single ring is read by its own reader, not as many are: see README.md."""


@pytest.fixture(autouse=True, scope="session")
def _branch():
    if not HAS_BRANCH:
        from ringmap.buffers.engine import Engine

        Engine.has_branch = False


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_BRANCH and item.get_closest_marker("branch"):
            item.add_marker(pytest.mark.skip(reason="it patches the branch"))


@pytest.fixture(autouse=True)
def _start_method():
    """Let every test begin with the platform's own start method: some libraries change it when they are imported."""
    multiprocessing.set_start_method(None, force=True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def workers_end_soon(monkeypatch):
    """Let PyTorch end workers at once that do not end by themselves, as after an error: it gives each of them 5 s."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Return what gives `make()`, which JSON can hold: the first process of pytest-xdist makes it, and the others read
    it."""

    def get(name, make):
        if "PYTEST_XDIST_WORKER" not in os.environ:
            return make()
        file = tmp_path_factory.getbasetemp().parent / f"{name}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                made = json.dumps(make())
                file.write_text(made)
        return json.loads(file.read_text())

    return get
