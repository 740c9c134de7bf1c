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
    """Make worlds, with a policy, that are closed in the end."""
    from ringmap import World

    made = []

    def build(name="RingmapTest/Proof-v0", num_envs=3, image_shape=None, policy=None, **options):
        options.setdefault("add_pixels", image_shape is not None)
        made.append(World(name, num_envs, image_shape, **options))
        if policy is not None:
            made[-1].set_policy(policy)
        return made[-1]

    yield build
    for world in made:
        world.close()
