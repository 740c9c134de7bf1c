"""The environments that come with ringmap, by their Gymnasium ids."""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

TWO_ROOM = "ringmap.world.envs.two_room:TwoRoom"
PUSH_T = "ringmap.world.envs.pusht:make_push_t"
IDS = {
    "ringmap/TwoRoom-v1": TWO_ROOM,
    "swm/TwoRoom-v1": TWO_ROOM,
    "ringmap/PushT-v1": PUSH_T,
    "swm/PushT-v1": PUSH_T,
}


def register() -> None:
    """Register them with Gymnasium; an id that is taken already (by stable-worldmodel) stays as it is."""
    import gymnasium

    for name, entry in IDS.items():
        if name not in gymnasium.registry:
            more: dict[str, Any] = {"max_episode_steps": 100 if entry == TWO_ROOM else 300}
            gymnasium.register(name, entry_point=entry, **more)
