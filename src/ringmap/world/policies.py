"""Policies: what chooses an action for each environment.

    policy.set_env(envs)                       once, by `World.set_policy`
    policy.get_action(infos) -> (num_envs, ...)  at every step

The built-in policies draw, for each environment, from a generator that starts again
with each episode, from (the policy's seed, the episode's seed). So an episode does not
depend on earlier or parallel episodes, or on its environment.
Not here: the check of a policy's actions (actions.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.errors import InputError, RoleError

__all__ = ["BasePolicy", "ExpertPolicy", "FeedForwardPolicy", "FunctionPolicy", "RandomPolicy"]

Array = np.ndarray[Any, np.dtype[Any]]


class BasePolicy:
    """What a policy has to have; a subclass supplies `get_action`.

    Args:
        seed: of whatever is random in it. None: only the episode's seed decides, and without one
            nothing does.

    Source: stable-worldmodel, World guide.

    Example:
        >>> import ringmap
        >>> class Right(BasePolicy):
        ...     def get_action(self, infos):
        ...         return np.tile(np.float32([1, 0]), (self.env.num_envs, 1))
        >>> world = ringmap.World("ringmap/TwoRoom-v1", num_envs=2, image_shape=(32, 32))
        >>> world.set_policy(Right())
        >>> world.evaluate(episodes=2, seed=0)["episode_successes"].tolist()
        [False, False]
        >>> world.close()
    """

    env: Any = None

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def get_action(self, infos: Mapping[str, Any]) -> Any:
        """Return one action per environment.

        Args:
            infos: the stacked infos: arrays `(num_envs, 1, ...)`, lists for the rest.

        Returns:
            `(num_envs, *action_shape)`; a dict of such for a Dict space.
        """
        raise NotImplementedError(f"{type(self).__name__} must supply get_action")

    def set_env(self, envs: Any) -> None:
        """Take the pool that the actions are for."""
        self.env = envs
        self._played = [-1] * envs.num_envs

    def set_seed(self, seed: int | None) -> None:
        """Start over with another seed."""
        self.seed = seed
        if self.env is not None:
            self._played = [-1] * self.env.num_envs

    def trained_part(self) -> Any:
        """Return what published weights are loaded into (see `ringmap.Weights`): this policy, if it is a torch
        module."""
        return self

    def new_episodes(self) -> Iterator[tuple[int, np.random.SeedSequence]]:
        """Yield each environment that began an episode since the last call, with what its draws start from."""
        if self.env is None:
            raise RoleError(f"{type(self).__name__}: it has no environments yet; call world.set_policy(policy) first")
        # A pool that is not ours may not count its episodes: then all is one.
        count = self.env.num_envs
        episodes = getattr(self.env, "episodes", [0] * count)
        seeds = getattr(self.env, "seeds", [None] * count)
        for env, number in enumerate(episodes):
            if number == self._played[env]:
                continue
            first, self._played[env] = self._played[env] < 0, number
            seed = seeds[env]
            if seed is None and self.seed is None:
                if first:
                    yield env, np.random.SeedSequence()
            elif seed is None:
                yield env, np.random.SeedSequence((1, self.seed or 0, env, number))
            elif self.seed is None:
                yield env, np.random.SeedSequence((2, seed))
            else:
                yield env, np.random.SeedSequence((3, self.seed, seed))


class RandomPolicy(BasePolicy):
    """Samples the action space.

    Args:
        seed: see `BasePolicy`.
    """

    def set_env(self, envs: Any) -> None:
        """Take the pool; each of its environments gets a space to sample of its own."""
        super().set_env(envs)
        self._spaces = [copy.deepcopy(envs.single_action_space) for _ in range(envs.num_envs)]

    def get_action(self, infos: Mapping[str, Any]) -> Any:
        """Return a sample for each environment."""
        from gymnasium.vector.utils import concatenate, create_empty_array

        for env, seeds in self.new_episodes():
            self._spaces[env].seed(int(seeds.generate_state(1)[0]))
        samples = [space.sample() for space in self._spaces]
        single = self.env.single_action_space
        batch: Any = create_empty_array(single, len(samples))
        return concatenate(single, samples, batch)


class ExpertPolicy(BasePolicy):
    """Asks each environment what its own expert would do: the method `expert_action()` of the unwrapped class.

    Args:
        noise: standard deviation of what is added to each action (Box spaces), in units of the action.
        seed: of the noise; see `BasePolicy`.
    """

    def __init__(self, noise: float = 0.0, seed: int | None = None) -> None:
        super().__init__(seed)
        if noise < 0:
            raise InputError(f"ExpertPolicy: noise must not be negative, got {noise}")
        self.noise = noise

    def set_env(self, envs: Any) -> None:
        """Take the pool."""
        super().set_env(envs)
        self._rngs = [np.random.default_rng(0) for _ in range(envs.num_envs)]

    def get_action(self, infos: Mapping[str, Any]) -> Any:
        """Return the expert's actions, with noise."""
        for env, seeds in self.new_episodes():
            self._rngs[env] = np.random.default_rng(seeds)
        actions = np.stack(self.env.call("expert_action"))
        if self.noise:
            space = self.env.single_action_space
            drawn = [rng.normal(0, self.noise, space.shape) for rng in self._rngs]
            actions = np.clip(actions + drawn, space.low, space.high).astype(space.dtype)
        return actions


class FeedForwardPolicy(BasePolicy):
    """A torch module on the stacked infos.

    Args:
        model: called with one tensor, if `keys` is one name, else with a dict of tensors.
        keys: the infos that it sees: a name, several, or None for all that are numbers.
        device: where it runs; None: where its first parameter is.
        history: keep the time axis: the model sees `(num_envs, 1, ...)` instead of `(num_envs, ...)`.

    Example:
        >>> import ringmap, torch
        >>> world = ringmap.World("ringmap/TwoRoom-v1", num_envs=2, image_shape=(32, 32))
        >>> world.set_policy(FeedForwardPolicy(torch.nn.Linear(2, 2), keys="state"))
        >>> world.evaluate(episodes=2, seed=0)["episode_lengths"].tolist()
        [100, 100]
        >>> world.close()
    """

    def __init__(
        self,
        model: Any,
        keys: str | Sequence[str] | None = None,
        device: Any = None,
        history: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.keys, self.history = model, keys, history
        if device is None:
            device = next((p.device for p in getattr(model, "parameters", list)()), "cpu")
        self.device = device

    def trained_part(self) -> Any:
        """Return the model."""
        return self.model

    def get_action(self, infos: Mapping[str, Any]) -> Any:
        """Return the model's output, without gradients."""
        import torch

        if isinstance(self.keys, str):
            names = [self.keys]
        else:
            names = list(self.keys or (n for n, v in infos.items() if _numbers(v)))
        for name in names:
            if not _numbers(infos.get(name)):
                there = sorted(n for n, v in infos.items() if _numbers(v))
                raise InputError(
                    f"FeedForwardPolicy: no info {name!r} with a number for each environment; there are {there}"
                )
        at = slice(None) if self.history else 0
        seen = {name: torch.as_tensor(infos[name].copy(), device=self.device)[:, at] for name in names}
        with torch.no_grad():
            said = self.model(seen[self.keys] if isinstance(self.keys, str) else seen)
        if isinstance(said, Mapping):
            return {name: _flat(part) for name, part in said.items()}
        shape = self.env.single_action_space.shape if self.env is not None else None
        actions = _flat(said)
        if shape is not None and actions.ndim == len(shape) + 2 and actions.shape[1] == 1:
            actions = actions[:, 0]
        return actions


class FunctionPolicy(BasePolicy):
    """A function of the stacked infos; `World.set_policy` makes one of any callable."""

    def __init__(self, function: Callable[[Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self.function = function

    def get_action(self, infos: Mapping[str, Any]) -> Any:
        """Return the function's result."""
        return self.function(infos)


def _numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def _flat(value: Any) -> Array:
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
