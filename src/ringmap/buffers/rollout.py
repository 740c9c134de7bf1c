"""On-policy steps of many environments, for PPO: filled, turned into advantages, trained on, cleared.

    add, add, ..., add -> compute_returns_and_advantages -> minibatches -> clear
    one tensor for each leaf, (num_steps, num_envs, ...), on one device, allocated once

    delta_t = r_t + gamma V_{t+1} (1 - done_t) - V_t
    A_t     = delta_t + gamma lambda (1 - done_t) A_{t+1}

The deltas need no order, so they are one vectorised pass; the rest of the recursion is two operations for each step,
in place, over all environments.

Invariants: `add` allocates nothing, and refuses a value that its tensor can't hold; the data returned for training
cover the filled steps, each once per epoch; advantages always belong to the stored steps, otherwise reading them is an
error; they equal the recursion in float64 to 1e-5.
Not here: a ring or a directory: the data are lost with the process unless saved by `save`; nested names (nested.py).
Source: Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, 2016, equation 16.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.arguments import count, fraction, integer, positive
from ringmap.buffers.base import Unindexed
from ringmap.buffers.batch import check_device
from ringmap.buffers.engine import DISK
from ringmap.buffers.nested import Leaves, leaf_array
from ringmap.buffers.options import check_whole
from ringmap.errors import CorruptError, InputError, NoClipsError
from ringmap.extras import require
from ringmap.storage.disk.paths import local_path, refuse_address
from ringmap.storage.disk.system import clear_errors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["RolloutBuffer", "StepTensors", "generalized_advantages"]


_SCALARS = (
    "rewards",
    "dones",
    "values",
    "log_probs",
    "advantages",
    "returns",
    "timeouts",
    "final_values",
)
_SHAPES = {"hidden": "hidden_shape", "privileged_observations": "privileged_obs_shape"}
_VERSION = 1


class RolloutBuffer(Unindexed):
    """Steps of `num_envs` environments, time first.

    Args:
        num_envs: N.
        num_steps: T, the capacity in steps.
        obs_shape: of an observation: a shape, a nested mapping name -> shape or (shape, dtype), or a Gymnasium space.
        action_shape: of an action; `()` for a single index.
        action_dtype: NumPy's or torch's.
        device: of the tensors.
        num_privileged_obs: size of the observation for the critic alone; 0 for none.
        privileged_obs_shape: its shape, if it is not a vector; may be nested too.
        obs_dtype: of observation leaves without their own dtype.
        hidden_shape: of a recurrent policy's state before each step, possibly nested; None for none.
        seed: of the order of minibatches.

    Attributes:
        observations, privileged_observations, actions: `(T, N, ...)`.
        rewards, dones, values, log_probs, advantages, returns: `(T, N)` float32.

    Raises:
        InputError: an argument is wrong.

    Cost: allocates all memory at once; `add` copies N rows, on the device.

    Source: ApexRL, Buffers; PPO: Schulman et al., 2017.

    Example:
        >>> import torch
        >>> buf = RolloutBuffer(num_envs=8, num_steps=4, obs_shape=(3,), action_shape=(2,), seed=0)
        >>> for t in range(4):
        ...     zeros = torch.zeros(8)
        ...     buf.add(torch.zeros(8, 3), None, torch.zeros(8, 2), torch.ones(8), zeros, zeros, zeros)
        >>> buf.compute_returns_and_advantages(torch.zeros(8), gamma=1.0, gae_lambda=1.0)
        >>> buf.returns[:, 0].tolist()
        [4.0, 3.0, 2.0, 1.0]
        >>> [batch["observations"].shape[0] for batch in buf.minibatches(num=2, epochs=2)]
        [16, 16, 16, 16]
    """

    not_recorded = "it stores values and log-probabilities, which only the policy knows; call its add"

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        obs_shape: Any,
        action_shape: Any,
        action_dtype: Any = np.float32,
        device: Any = "cpu",
        num_privileged_obs: int = 0,
        privileged_obs_shape: Any = None,
        *,
        obs_dtype: Any = np.float32,
        hidden_shape: Any = None,
        seed: int | None = None,
    ) -> None:
        where = type(self).__name__
        require("torch", where)
        import torch

        num_envs = positive(where, "num_envs", num_envs)
        num_steps = positive(where, "num_steps", num_steps)
        self.num_envs, self.num_steps = int(num_envs), int(num_steps)
        self.device = check_device("cpu" if device is None else device, where)
        if num_privileged_obs != 0:
            num_privileged_obs = positive(where, "num_privileged_obs", num_privileged_obs)
        if privileged_obs_shape is None and num_privileged_obs:
            privileged_obs_shape = (int(num_privileged_obs),)
        trees = {
            "observations": Leaves.parse("observations", obs_shape, obs_dtype, where),
            "actions": Leaves.parse("actions", action_shape, action_dtype, where),
        }
        if privileged_obs_shape is not None:
            name = "privileged_observations"
            trees[name] = Leaves.parse(name, privileged_obs_shape, obs_dtype, where)
        if hidden_shape is not None:
            trees["hidden"] = Leaves.parse("hidden", hidden_shape, np.float32, where)
        self._tensors = StepTensors(self.num_steps, self.num_envs, trees, _SCALARS, self.device)
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            whole = integer(seed)
            try:
                self._generator.manual_seed(seed if whole is None else whole)
            except (TypeError, ValueError, RuntimeError):
                raise InputError(f"{where}: seed must be an integer, got {seed!r}") from None
        self._step = 0
        self._computed = False

    def __getattr__(self, name: str) -> Any:
        """Return the stored tensors by name, nested as they were declared."""
        tensors = self.__dict__.get("_tensors")
        if tensors is not None and name in tensors.trees:
            return tensors.nested(name)
        if tensors is not None and name in tensors.by_name:
            return tensors.by_name[name]
        if name == "privileged_observations":
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- filling -----------------------------------------------------------------------------

    def add(
        self,
        observations: Any,
        privileged_observations: Any,
        actions: Any,
        rewards: Any,
        dones: Any,
        values: Any,
        log_probs: Any,
        *,
        timeouts: Any = None,
        final_values: Any = None,
        hidden: Any = None,
    ) -> None:
        """Store one step of all environments.

        Args:
            observations: `(N, *obs_shape)`, nested as declared; tensors or arrays.
            privileged_observations: the same; None if none were declared.
            actions: `(N, *action_shape)`.
            rewards: `(N,)`.
            dones: `(N,)`, 1 where the episode ended, also by a timeout.
            values: `(N,)` or `(N, 1)`, the critic's, of `observations`.
            log_probs: `(N,)` or `(N, 1)`, of `actions`.
            timeouts: `(N,)`, 1 where only a time limit ended it; needs `final_values`.
            final_values: `(N,)`, the critic's, of the last observation of a lane that timed out.
            hidden: the policy's state before this step, if `hidden_shape` was given.

        Raises:
            InputError: the buffer is full, a declared value is missing, or a shape does not fit. Nothing was changed.
        """
        where = f"{type(self).__name__}.add"
        if self._step >= self.num_steps:
            raise InputError(f"{where}: the buffer is full ({self.num_steps} steps); train on it, then clear it")
        given = {
            "observations": observations,
            "privileged_observations": privileged_observations,
            "actions": actions,
            "hidden": hidden,
        }
        tensors, rows = self._tensors, dict[str, Any]()
        for name, value in given.items():
            if name not in tensors.trees:
                if value is not None:
                    raise InputError(f"{where}: {name} was given, but {_SHAPES[name]} was not declared")
            elif value is None:
                raise InputError(f"{where}: {name} were declared, but are missing")
            else:
                rows |= tensors.leaves(name, value, where)
        if (timeouts is None) != (final_values is None):
            raise InputError(f"{where}: timeouts and final_values go together")
        scalars = {"rewards": rewards, "dones": dones, "values": values, "log_probs": log_probs}
        if timeouts is not None:
            scalars |= {"timeouts": timeouts, "final_values": final_values}
        for name, value in scalars.items():
            rows[name] = tensors.row(name, value, where)
        tensors.write(self._step, rows)
        if timeouts is None:
            tensors.by_name["timeouts"][self._step].zero_()
        else:  # an episode that timed out has ended, even if the caller does not mark it as done
            dones = tensors.by_name["dones"][self._step]
            dones.copy_(dones.maximum(tensors.by_name["timeouts"][self._step]))
        self._step += 1
        self._computed = False

    _instead = "go through its steps with minibatches(...) or sequence_minibatches(...)"

    def __len__(self) -> int:
        """Return the number of filled steps."""
        return self._step

    @property
    def is_full(self) -> bool:
        """Whether the next `add` would fail."""
        return self._step == self.num_steps

    def clear(self) -> None:
        """Remove all steps; the memory stays allocated."""
        self._step, self._computed = 0, False

    # -- advantages --------------------------------------------------------------------------

    def compute_returns_and_advantages(self, last_values: Any, gamma: float = 0.99, gae_lambda: float = 0.95) -> None:
        """Fill `advantages` and `returns = advantages + values` over the filled steps.

        Where a step timed out, `gamma * final_values` is added to its reward: the episode would have continued.
        The stored rewards do not change.

        Args:
            last_values: `(N,)` or `(N, 1)`, the critic's, of the observation after the last step.
            gamma: the discount, between 0 and 1.
            gae_lambda: of the advantage estimation, between 0 and 1.

        Raises:
            InputError: nothing is stored, or a shape does not fit.
        """
        where = f"{type(self).__name__}.compute_returns_and_advantages"
        if not self._step:
            raise InputError(f"{where}: no step is stored")
        gamma = fraction(where, "gamma", gamma)
        gae_lambda = fraction(where, "gae_lambda", gae_lambda)
        stored = self._tensors.by_name
        last = self._tensors.row("values", last_values, where).to(self.device, stored["values"].dtype)
        filled = {name: stored[name][: self._step] for name in _SCALARS}
        beyond = gamma * filled["final_values"] * filled["timeouts"]
        rewards = filled["rewards"] + beyond.where(filled["timeouts"] > 0, beyond.new_zeros(()))
        advantages = generalized_advantages(rewards, filled["values"], filled["dones"], last, gamma, gae_lambda)
        filled["advantages"].copy_(advantages)
        filled["returns"].copy_(advantages + filled["values"])
        self._computed = True

    # -- training ----------------------------------------------------------------------------

    def get_all_data(self) -> dict[str, Any]:
        """Return all steps flat, `(T * N, ...)`, time first.

        Returns:
            `observations, privileged_observations` (None if there are none)`, actions, old_log_probs, advantages,
            returns,
            values`: views.

        Raises:
            NoClipsError: advantages were not computed since the last `add`.
        """
        return self._batch(None)

    def _batch(self, index: Tensor | None, normalize: bool = False) -> dict[str, Any]:
        """Return the rows for a flat index, None for all."""
        self._check_ready()
        rows = self._tensors.flat(self._step)
        return self._named(rows, slice(None) if index is None else index, normalize)

    def _named(self, rows: Mapping[str, Tensor], at: Any, normalize: bool) -> dict[str, Any]:
        """Return the training data under their public names; `at` picks from each tensor."""

        def picked(name: str) -> Any:
            tree = self._tensors.trees.get(name)
            return None if tree is None else tree.nest({n: rows[n][at] for n in tree.names})

        batch = {
            "observations": picked("observations"),
            "privileged_observations": picked("privileged_observations"),
            "actions": picked("actions"),
            "old_log_probs": rows["log_probs"][at],
            "advantages": rows["advantages"][at],
            "returns": rows["returns"][at],
            "values": rows["values"][at],
        }
        if normalize:
            mean, deviation = self._moments
            batch["advantages"] = (batch["advantages"] - mean) / (deviation + 1e-8)
        return batch

    @property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of all advantages."""
        advantages = self._tensors.by_name["advantages"][: self._step]
        return advantages.mean(), advantages.std(correction=0)

    def _check_ready(self) -> None:
        if not self._computed:
            raise NoClipsError(
                f"{type(self).__name__}: {self._step} steps are stored, but their advantages are not computed; call "
                "compute_returns_and_advantages first"
            )

    def minibatches(
        self, num: int, epochs: int = 1, shuffle: bool = True, normalize_advantages: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield `num` minibatches of nearly equal size in each epoch, each step once per epoch.

        Args:
            num: minibatches per epoch.
            epochs: number of passes over all steps.
            shuffle: a new order for each epoch.
            normalize_advantages: to mean 0 and deviation 1 over all steps, not over a minibatch.

        Raises:
            InputError: `num` or `epochs` is not positive, or there are fewer steps than minibatches.
            NoClipsError: advantages were not computed.
        """
        where = f"{type(self).__name__}.minibatches"
        num = positive(where, "num", num)
        epochs = positive(where, "epochs", epochs)
        self._check_ready()
        count = self._step * self.num_envs
        if num > count:
            raise InputError(f"{where}: num={num}, but only {count} steps are stored")

        def each() -> Iterator[dict[str, Any]]:
            for _ in range(epochs):
                for index in self._order(count, shuffle).tensor_split(num):
                    yield self._batch(index, normalize_advantages)

        return each()

    def _order(self, count: int, shuffle: bool) -> Tensor:
        import torch

        if not shuffle:
            return torch.arange(count, device=self.device)
        return torch.randperm(count, generator=self._generator).to(self.device)

    def get_minibatch(self, size: int) -> dict[str, Any]:
        """Return `size` steps drawn without replacement.

        Raises:
            InputError: `size` is not positive, or more than is stored.
            NoClipsError: advantages were not computed.
        """
        where = f"{type(self).__name__}.get_minibatch"
        size = positive(where, "size", size)
        self._check_ready()
        count = self._step * self.num_envs
        if size > count:
            raise InputError(f"{where}: size={size}, but only {count} steps are stored")
        return self._batch(self._order(count, True)[:size])

    def sequence_minibatches(
        self,
        length: int,
        num: int = 1,
        epochs: int = 1,
        shuffle: bool = True,
        normalize_advantages: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Yield minibatches of whole sequences for recurrent policies, time first: `(length, B, ...)`.

        Adds to the keys of `get_all_data`: `dones` `(length, B)`, after which the state must be reset, and
        `hidden` `(B, ...)`, the state before the first step of each sequence, if `hidden_shape` was given.

        Args:
            length: steps of a sequence; the filled steps are cut into sequences.
            num: minibatches per epoch.
            epochs: number of passes over all sequences.
            shuffle: a new order for each epoch.
            normalize_advantages: as for `minibatches`.

        Raises:
            InputError: the filled steps are not a multiple of `length`, or there are fewer sequences than minibatches.
            NoClipsError: advantages were not computed.
        """
        where = f"{type(self).__name__}.sequence_minibatches"
        for name, value in (("length", length), ("num", num), ("epochs", epochs)):
            positive(where, name, value)
        self._check_ready()
        if self._step % length:
            raise InputError(f"{where}: {self._step} steps are no multiple of length={length}")
        count = self._step // length * self.num_envs
        if num > count:
            raise InputError(f"{where}: num={num}, but only {count} sequences are stored")

        def each() -> Iterator[dict[str, Any]]:
            for _ in range(epochs):
                whole = self._tensors.cut(self._step, length)
                for index in self._order(count, shuffle).tensor_split(num):
                    batch = self._named(whole, (slice(None), index), normalize_advantages)
                    batch["dones"] = whole["dones"][:, index]
                    hidden = self._tensors.trees.get("hidden")
                    if hidden is not None:
                        batch["hidden"] = hidden.nest({n: whole[n][0, index] for n in hidden.names})
                    yield batch

        return each()

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all stored data, and the state of the generator: tensors that share no memory with the buffer."""
        return {
            "version": _VERSION,
            "num_envs": self.num_envs,
            "num_steps": self.num_steps,
            "step": self._step,
            "computed": self._computed,
            "rng": self._generator.get_state(),
            "tensors": {name: tensor[: self._step].clone() for name, tensor in self._tensors.by_name.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned.

        Raises:
            InputError: the state is from a buffer of another size or with other columns. Nothing was changed.
        """
        import torch

        where = f"{type(self).__name__}.load_state_dict"
        check_whole(where, state, ("tensors", "step", "num_steps", "computed", "rng"))
        tensors, step = state["tensors"], count(where, "step", state["step"])
        if count(where, "num_steps", state["num_steps"]) != self.num_steps:
            raise InputError(f"{where}: expected num_steps={self.num_steps}, got num_steps={state['num_steps']}")
        if not isinstance(tensors, Mapping) or step > self.num_steps:
            raise InputError(
                f"{where}: expected tensors by name, and at most {self.num_steps} steps, got {step} of a "
                f"{type(tensors).__name__}"
            )
        generator = torch.Generator()
        try:
            generator.set_state(state["rng"].cpu())
        except (AttributeError, TypeError, RuntimeError) as error:
            raise InputError(
                f"{where}: rng is no state of a torch.Generator ({error}); give what state_dict returned. Nothing was "
                "changed"
            ) from None
        computed = state["computed"]
        if not isinstance(computed, bool):
            raise InputError(f"{where}: computed must be True or False, got {computed!r}")
        self._tensors.take_over(tensors, step, where)
        self._step, self._computed = step, computed
        self._generator = generator

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict` to a file, which appears whole or not at all: it is durable when this returns.

        Raises:
            EnvironmentFault: the disk is full or fails; what was at `path` is still there.
        """
        import torch

        data, where = io.BytesIO(), local_path(path)
        torch.save(self.state_dict(), data)
        with clear_errors(f"{type(self).__name__}.save", where, lambda: "nothing was changed"):
            DISK.replace_file(where, data.getvalue())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a file that `save` wrote.

        Raises:
            CorruptError: it is not such a file.
            InputError: it is from another kind of buffer.
        """
        import torch

        refuse_address(path)
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for its other end
            raise CorruptError(f"{os.fspath(path)}: is no regular file, expected one of a RolloutBuffer")
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            version = int(state["version"])
        except OSError:
            raise
        except Exception as error:
            raise CorruptError(f"{os.fspath(path)}: no file of a RolloutBuffer: {error}") from None
        if version != _VERSION:
            raise CorruptError(f"{os.fspath(path)}: version {version}, expected {_VERSION}")
        try:
            self.load_state_dict(state)
        except InputError as error:
            raise InputError(f"{os.fspath(path)}: {error}") from None
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise CorruptError(f"{os.fspath(path)}: does not make sense: {error!r}") from None

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k != "_generator"}
        return {**state, "_rng": self._generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import torch

        rng = state.pop("_rng")
        self.__dict__.update(state)
        self._generator = torch.Generator()
        self._generator.set_state(rng)

    def __repr__(self) -> str:
        shapes = {spec.name: spec.shape for tree in self._tensors.trees.values() for spec in tree.columns}
        return f"{type(self).__name__}({self._step}/{self.num_steps} steps of {self.num_envs}, {shapes}, {self.device})"


class StepTensors:
    """The tensors of one buffer: of nested values, and float32 `(num_steps, num_envs)` of scalars."""

    def __init__(
        self, num_steps: int, num_envs: int, trees: Mapping[str, Leaves], scalars: tuple[str, ...], device: Any
    ) -> None:
        import torch

        self.trees = dict(trees)
        self.num_envs = num_envs
        self.by_name: dict[str, Tensor] = {}
        for spec in (spec for tree in trees.values() for spec in tree.columns):
            try:
                kind = torch.from_numpy(np.empty(0, spec.dtype)).dtype
            except TypeError:
                raise InputError(f"{spec.name}: no tensor holds {spec.kind}") from None
            shape = (num_steps, num_envs, *spec.shape)
            self.by_name[spec.name] = torch.zeros(shape, dtype=kind, device=device)
        for name in scalars:
            self.by_name[name] = torch.zeros(num_steps, num_envs, device=device)

    # -- in ----------------------------------------------------------------------------------

    def row(self, name: str, value: Any, where: str) -> Tensor:
        """Return a value as one step of a tensor, `(N, ...)`; `(N, 1)` is accepted for `(N,)`."""
        import torch

        target = self.by_name[name]
        expected = target.shape[1:]
        if not isinstance(value, torch.Tensor):
            value = leaf_array(value, where, name)
        try:
            row = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{where}: {name} can't be made a tensor: {error}") from None
        if row.shape != expected and row.shape == (*expected, 1):
            row = row.squeeze(-1)
        if row.shape != expected:
            raise InputError(f"{where}: {name} has shape {tuple(row.shape)}, expected {tuple(expected)}")
        if not _always_fits(row, target) and not _fits(row, target.dtype):
            raise InputError(
                f"{where}: {name} of {row.dtype} has values that {target.dtype} can't hold; convert them, or declare "
                "another dtype"
            )
        return row

    def leaves(self, name: str, value: Any, where: str) -> dict[str, Tensor]:
        """Return a nested value as one step of each of its leaves."""
        parts = self.trees[name].flatten(value, where).items()
        return {leaf: self.row(leaf, part, where) for leaf, part in parts}

    def write(self, step: int, rows: Mapping[str, Tensor]) -> None:
        """Store rows that `row` returned as one step."""
        for name, row in rows.items():
            self.by_name[name][step].copy_(row)

    def take_over(self, tensors: Mapping[str, Tensor], steps: int, where: str) -> None:
        """Store the first steps of all tensors, or nothing if names, shapes or dtypes differ."""
        ours = {n: ((steps, *t.shape[1:]), t.dtype) for n, t in self.by_name.items()}
        theirs = {n: (tuple(t.shape), t.dtype) if hasattr(t, "dtype") else t for n, t in tensors.items()}
        if ours != theirs:
            raise InputError(f"{where}: expected columns {ours}, got {theirs}")
        for name, tensor in tensors.items():
            self.by_name[name][:steps].copy_(tensor)

    # -- out ---------------------------------------------------------------------------------

    def nested(self, name: str) -> Any:
        """Return the tensors of a nested value, nested."""
        return self.trees[name].nest(self.by_name)

    def flat(self, steps: int) -> dict[str, Tensor]:
        """Return the first steps of all tensors, `(steps * N, ...)`."""
        return {n: t[:steps].reshape(-1, *t.shape[2:]) for n, t in self.by_name.items()}

    def cut(self, steps: int, length: int) -> dict[str, Tensor]:
        """Return the first steps of all tensors in sequences, `(length, steps / length * N, ...)`, earlier steps
        first."""
        found = {}
        for name, tensor in self.by_name.items():
            parts = tensor[:steps].reshape(-1, length, self.num_envs, *tensor.shape[2:])
            found[name] = parts.transpose(0, 1).reshape(length, -1, *tensor.shape[2:])
        return found


def _always_fits(row: Tensor, target: Tensor) -> bool:
    """Tell by dtypes whether a cast loses at most float precision: values would wait for the device."""
    import torch

    if row.dtype == target.dtype or row.dtype == torch.bool:
        return True
    floats = row.dtype.is_floating_point and target.dtype.is_floating_point
    return floats and torch.finfo(row.dtype).max <= torch.finfo(target.dtype).max


def _fits(row: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a cast keeps all values; of floats, whether it makes none infinite."""
    import torch

    if row.dtype.is_complex and not dtype.is_complex:
        return not bool(row.imag.any()) and _fits(row.real, dtype)
    made = row.to(dtype)
    if row.dtype.is_floating_point and dtype.is_floating_point:
        return not bool((made.isinf() & ~row.isinf()).any())
    return torch.equal(made.to(row.dtype), row)


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    last_values: Tensor,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
) -> Tensor:
    """Return the advantages `(T, N)` of rewards, values and dones `(T, N)`, and last values `(N,)`; `gae_lambda` 0 is
    one-step TD, 1 the full return.

    Cost: O(T N); two tensors of the size of `rewards`.

    Example:
        >>> import torch
        >>> zeros = torch.zeros(3, 1)
        >>> generalized_advantages(torch.ones(3, 1), zeros, zeros, torch.zeros(1), 0.5, 1.0).ravel().tolist()
        [1.75, 1.5, 1.0]
    """
    import torch

    steps = rewards.shape[0]
    with torch.no_grad():
        factors = (1.0 - dones.to(rewards.dtype)).mul_(gamma)
        advantages = torch.empty_like(rewards)
        if not steps:
            return advantages
        torch.mul(factors[:-1], values[1:], out=advantages[:-1])
        torch.mul(factors[-1], last_values, out=advantages[-1])
        advantages.add_(rewards).sub_(values)
        factors.mul_(gae_lambda)
        rows, scales = advantages.unbind(0), factors.unbind(0)
        for step in range(steps - 2, -1, -1):
            rows[step].addcmul_(scales[step], rows[step + 1])
    return advantages
