"""Actions of several environments: checked as a batch, returned one by one.

A batch is an array `(num_envs, ...)` for Box, Discrete, MultiDiscrete and MultiBinary spaces,
a dict or tuple of such for Dict and Tuple spaces, and a list for all others.

Invariants: only the actions of stepped environments are checked in depth: the entries of
waiting environments are ignored.
Not here: who chooses the actions (policies.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from ringmap.datasets.episode import blank
from ringmap.errors import InputError

__all__ = ["blank_action", "split_actions"]

Array = np.ndarray[Any, np.dtype[Any]]


def split_actions(actions: Any, space: spaces.Space[Any], num_envs: int, mask: Array, where: str) -> list[Any]:
    """Return one action per environment, in the dtypes of the space; `mask` says which are to be stepped."""
    if isinstance(space, spaces.Dict):
        if not isinstance(actions, Mapping) or set(actions) != set(space.spaces):
            got = sorted(actions) if isinstance(actions, Mapping) else type(actions).__name__
            raise InputError(f"{where}: expected a dict of actions {list(space.spaces)}, got {got}")
        parts = {
            name: split_actions(actions[name], part, num_envs, mask, f"{where}: {name!r}")
            for name, part in space.spaces.items()
        }
        return [{name: part[i] for name, part in parts.items()} for i in range(num_envs)]
    if isinstance(space, spaces.Tuple):
        if not isinstance(actions, Sequence) or len(actions) != len(space.spaces):
            raise InputError(f"{where}: expected a tuple of {len(space.spaces)} batches of actions")
        columns = [
            split_actions(given, part, num_envs, mask, f"{where}: [{i}]")
            for i, (given, part) in enumerate(zip(actions, space.spaces, strict=True))
        ]
        return list(zip(*columns, strict=True))
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        if not hasattr(actions, "__len__") or len(actions) != num_envs:
            raise InputError(f"{where}: expected {num_envs} actions, one per environment")
        return list(actions)
    return list(_checked(actions, space, num_envs, mask, where))


def _checked(actions: Any, space: Any, num_envs: int, mask: Array, where: str) -> Array:
    if hasattr(actions, "detach"):
        actions = actions.detach().cpu().numpy()
    try:
        batch = np.asarray(actions)
    except ValueError as error:
        raise InputError(f"{where}: the actions are no array: {error}") from None
    shape = (num_envs, *(space.shape or ()))
    if batch.shape != shape:
        raise InputError(
            f"{where}: actions of shape {batch.shape}, expected {shape}: one action of "
            f"{space} for each of {num_envs} environments"
        )
    if batch.dtype.kind not in "biuf":
        raise InputError(f"{where}: actions of dtype {batch.dtype}, expected {space.dtype}")
    asked = batch[mask]
    if batch.dtype.kind == "f":
        bad = ~np.isfinite(asked)
        if bad.any():
            rows = np.flatnonzero(mask)[bad.reshape(len(asked), -1).any(axis=1)]
            raise InputError(
                f"{where}: the actions of envs {rows.tolist()} are NaN or infinite; expected finite numbers"
            )
        if space.dtype.kind != "f" and (asked != np.trunc(asked)).any():
            raise InputError(f"{where}: actions of dtype {batch.dtype}, expected integers ({space})")
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        low = space.start
        high = low + (space.n if isinstance(space, spaces.Discrete) else space.nvec)
        bad = (asked < low) | (asked >= high)
        if bad.any():
            first = int(np.argwhere(bad)[0][0])
            env = int(np.flatnonzero(mask)[first])
            raise InputError(f"{where}: action {asked[first]} of env {env} is not in {space}")
    with np.errstate(invalid="ignore"):  # NaN in the place of one that waits
        return batch.astype(space.dtype)


def blank_action(space: Any) -> Any:
    """Return the value of a row without an action: NaN, or 0 for integers and flags.

    Example:
        >>> blank_action(spaces.Box(-1, 1, (2,)))
        array([nan, nan], dtype=float32)
    """
    if isinstance(space, spaces.Dict):
        return {name: blank_action(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(blank_action(part) for part in space.spaces)
    if space.shape is None or space.dtype is None:
        return None
    return blank(space.shape, space.dtype)
