import gymnasium
import pytest

from tests.unit.world import envs


@pytest.fixture(autouse=True, scope="package")
def _registered():
    for name, entry in envs.IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry)


@pytest.fixture
def make():
    """Make worlds that are closed in the end."""
    from ringmap import World

    made = []

    def build(name="RingmapTest/Proof-v0", num_envs=3, image_shape=None, **options):
        options.setdefault("add_pixels", image_shape is not None)
        made.append(World(name, num_envs, image_shape, **options))
        return made[-1]

    yield build
    for world in made:
        world.close()
