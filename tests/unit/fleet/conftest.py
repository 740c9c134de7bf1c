import gymnasium
import pytest

from tests.unit.world import envs


@pytest.fixture(autouse=True, scope="package")
def _registered():
    for name, entry in envs.IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry)
