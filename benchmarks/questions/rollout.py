"""Advantages of a rollout, beside the loop over steps that guides show."""

from __future__ import annotations

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn


def run(place: Place) -> list[Table]:
    """Time 24 steps of 4096 environments."""
    import torch

    from ringmap import RolloutBuffer

    steps, envs = 24, place.size(4096, 64)
    torch.manual_seed(0)
    buf = RolloutBuffer(envs, steps, (1,), (1,))
    for _ in range(steps):
        done = (torch.rand(envs) < 0.05).float()
        buf.add(
            torch.zeros(envs, 1),
            None,
            torch.zeros(envs, 1),
            torch.randn(envs),
            done,
            torch.randn(envs),
            torch.zeros(envs),
        )
    last = torch.randn(envs)

    def loop() -> torch.Tensor:
        advantages, later = torch.zeros(steps, envs), torch.zeros(envs)
        for t in reversed(range(steps)):
            following = last if t == steps - 1 else buf.values[t + 1]
            delta = buf.rewards[t] + 0.99 * following * (1 - buf.dones[t]) - buf.values[t]
            later = delta + 0.99 * 0.95 * (1 - buf.dones[t]) * later
            advantages[t] = later
        return advantages

    def one_by_one() -> list[list[float]]:
        rewards, values, dones = buf.rewards.tolist(), buf.values.tolist(), buf.dones.tolist()
        following, later = last.tolist(), [0.0] * envs
        advantages = [[0.0] * envs for _ in range(steps)]
        for t in reversed(range(steps)):
            for i in range(envs):
                on = 1 - dones[t][i]
                later[i] = rewards[t][i] + 0.99 * following[i] * on - values[t][i] + 0.99 * 0.95 * on * later[i]
                advantages[t][i] = later[i]
            following = values[t]
        return advantages

    buf.compute_returns_and_advantages(last)
    torch.testing.assert_close(buf.advantages, loop(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(buf.advantages, torch.tensor(one_by_one()), rtol=1e-4, atol=1e-5)
    table = Table(
        f"returns and advantages of {steps} steps of {envs:,} environments, {torch.get_num_threads()} threads"
    )
    ours, theirs, plain = (
        "RolloutBuffer",
        "the loop over steps, on tensors",
        "the loop over steps and environments, in Python",
    )
    calls = {ours: lambda: buf.compute_returns_and_advantages(last), theirs: loop}
    table.add_all(in_turn(calls, place.size(60, 2), burst=place.size(10, 2)))
    table.add_all(in_turn({plain: one_by_one}, place.size(5, 1)))
    table.bar(f"{ours}, median ms", table.times[ours]["median"] * 1e3, at_most=3)
    table.faster(ours, theirs)
    table.faster(ours, plain)
    table.notes.append("ours also fills in returns, and counts timeouts")
    return [table]
