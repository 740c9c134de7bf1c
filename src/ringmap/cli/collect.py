"""`ringmap collect`: a collection by many processes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ringmap.cli.arguments import DropNames, WriterOptions, writer_options
from ringmap.cli.console import count, is_watched, show
from ringmap.cli.watch import opened, total

Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="module:function, which makes the World of a collector from its number. Modules are looked for here, too.",
    ),
]
Path = Annotated[str, typer.Option("--path", metavar="DIR", help="Directory of the rings.")]
Episodes = Annotated[int, typer.Option("--episodes", metavar="N", min=0, help="How many in all.")]
Collectors = Annotated[int, typer.Option("--collectors", metavar="N", min=1, help="How many processes.")]
MaxSteps = Annotated[int, typer.Option("--max-steps", metavar="N", min=1, help="Capacity of each ring, in steps.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of the first episode.")]
Resume = Annotated[bool, typer.Option("--resume/--no-resume", help="Go on with what is there, or refuse it.")]
Policy = Annotated[
    str | None,
    typer.Option("--policy", metavar="SPEC", help="module:name; by default the World has one."),
]
WeightsDir = Annotated[
    str | None,
    typer.Option("--weights", metavar="DIR", help="Where a learner publishes the policy."),
]
CommitEvery = Annotated[
    int | None,
    typer.Option("--commit-every", metavar="N", min=1, help="Commit open episodes every N rows."),
]


def collect(
    spec: Spec,
    path: Path,
    episodes: Episodes,
    collectors: Collectors,
    max_steps: MaxSteps,
    seed: Seed = 0,
    resume: Resume = True,
    policy: Policy = None,
    weights: WeightsDir = None,
    commit_every: CommitEvery = None,
    option: WriterOptions = None,
    drop: DropNames = None,
) -> None:
    """Collect with several processes, each into a ring of its own.

    Killed at any moment, the same call goes on, with any number of collectors: each seed is played once. -O gives each
    ring an option of ReplayBuffer, such as interrupted=keep.
    """
    from ringmap.collection.collect import collect as collect_with
    from ringmap.collection.job import imported
    from ringmap.fleet.weights import Weights

    if (here := os.getcwd()) not in sys.path:  # a command, unlike a script, does not look there
        sys.path.insert(0, here)
    collect_with(
        imported(spec, "collect"),
        path,
        episodes,
        collectors,
        seed,
        resume,
        max_steps=max_steps,
        policy=None if policy is None else imported(policy, "collect"),
        weights=None if weights is None else Weights(weights),
        commit_every=commit_every,
        progress=is_watched(),
        drop=drop or (),
        **writer_options(option, "collect"),
    )
    if episodes:
        with opened(path) as buffer:
            now = total(path, buffer.shards)
        stored = f"{count(now['episodes'], 'episode')}, {count(now['steps'], 'step')}"
        show(
            f"{count(episodes, 'seed')} {'is' if episodes == 1 else 'are'} played, each once; "
            f"{count(now['rings'], 'ring')} in {path} hold {stored}."
        )
