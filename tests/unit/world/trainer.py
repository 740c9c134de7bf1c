"""A trainer beside a collector: `python -m tests.unit.world.trainer PATH`, until its stdin ends.

It reads the buffer live through two DataLoader workers, pass after pass, and prints how many
batches it saw, and how many clips in them were torn.
"""

import json
import select
import sys
import warnings

import torch
from torch.utils.data import DataLoader

from ringmap.data import ReplayBuffer


def torn(batch):
    """Return how many clips of a batch are not consecutive steps of one episode."""
    whole = (batch["id"] == batch["id"][:, :1]).all(1)
    whole &= (batch["step_idx"].diff(dim=1) == 1).all(1)
    # An action moves the agent by at most a twentieth; the goal stays.
    whole &= (batch["state"].diff(dim=1).abs() < 0.0501).flatten(1).all(1)
    whole &= (batch["goal_state"] == batch["goal_state"][:, :1]).flatten(1).all(1)
    whole &= (batch["goal"] == batch["goal"][:, :1]).flatten(1).all(1)
    return int((~whole).sum())


def main(path):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    batches = clips = bad = 0
    newest, seen = 0, set()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        buf = ReplayBuffer.open(path, history_len=4)
        for batch in DataLoader(buf, 32, shuffle=True, num_workers=2, multiprocessing_context="fork"):
            batches, clips, bad = batches + 1, clips + len(batch["id"]), bad + torn(batch)
            seen.update(batch["id"][:, 0].tolist())
        newest = max(newest, buf.num_episodes)
        buf.close()
    print(
        json.dumps({"batches": batches, "clips": clips, "torn": bad, "episodes": len(seen)}),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
