import os

import numpy as np
import pytest
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


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
