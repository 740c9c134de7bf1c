"""Generalized advantage estimation, over all environments at once.

    delta_t = r_t + gamma V_{t+1} (1 - done_t) - V_t
    A_t     = delta_t + gamma lambda (1 - done_t) A_{t+1}

The deltas need no order, so they are one vectorised pass; the rest of the recursion is two
operations for each step, in place, over all environments.

Invariants: equal to the recursion in float64 to 1e-5; the inputs are not changed.
Not here: where the tensors are stored (tensors.py).
Source: Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, 2016, equation 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["generalized_advantages"]


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
