"""Rounds of signals, threads, forks and replaced directories, two at a time, each in processes of its own.

    python -m tools.campaign.edges --rounds 2000 --seed 1
    python -m tools.campaign.edges --seed 1 --round 17 --times 50      one of them again
    python -m tools.campaign.edges --plant close-abandons --rounds 40  a planted bug, to be caught

A violation is printed with the command that plays the round again, and what its processes wrote. The last line is JSON.
"""

import argparse
import collections
import json
import os
import pickle
import select
import shutil
import signal
import sys
import time
import traceback

from tests.disks import ram_folder
from tools.campaign.edges import planted
from tools.campaign.edges.rounds import PLAYS, Result, Told, play


def rounds(told, at_once=2):
    """Play rounds, so many at once, each in a forked host; yield their results as they come."""
    todo, running = iter(told), {}
    exhausted = False
    while running or not exhausted:
        while len(running) < at_once and not exhausted:
            one = next(todo, None)
            if one is None:
                exhausted = True
                break
            running[_host(one)] = one
        if not running:
            break
        for end in select.select(list(running), [], [])[0]:
            yield _heard(end, running.pop(end))


def _host(told):
    """Fork a host; return the end of the pipe on which its result comes, and its id."""
    here, there = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(there)
        _PIDS[here] = pid
        return here
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(here)
        try:
            result = play(told)
        except BaseException:
            text = traceback.format_exc()
            result = Result(told.number, told.scenario, violations=[("host", text)])
        data = pickle.dumps(result)
        while data:
            data = data[os.write(there, data) :]
    finally:
        os._exit(0)


_PIDS = {}


def _heard(end, told):
    data = b""
    while part := os.read(end, 1 << 16):
        data += part
    os.close(end)
    os.waitpid(_PIDS.pop(end), 0)
    if not data:
        return Result(told.number, told.scenario, violations=[("host", "died without a word")])
    return pickle.loads(data)


def main(words=None):
    parser = argparse.ArgumentParser(prog="python -m tools.campaign.edges", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="scenarios, of " + ", ".join(PLAYS))
    parser.add_argument("--round", type=int, help="this one alone, --times")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--plant", choices=sorted(planted.PLANTS))
    parser.add_argument("--keep", help="a folder for what violations left")
    parser.add_argument("--first", action="store_true", help="end with the first violation")
    parser.add_argument("--brief", action="store_true", help="no more than a line for a violation")
    options = parser.parse_args(words)
    only = options.only.split(",") if options.only else None
    if only and set(only) - set(PLAYS):
        parser.error(f"--only: expected some of {', '.join(PLAYS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its folder goes, too
    began = time.monotonic()
    until = began + 60 * options.minutes if options.minutes else float("inf")
    total, judges, played, bad = (
        collections.Counter(),
        collections.Counter(),
        collections.Counter(),
        0,
    )
    first, longest = None, collections.Counter()
    with ram_folder() as folder:

        def told():
            for i in range(options.times if options.round is not None else options.rounds):
                if time.monotonic() > until or (first and options.first):
                    return
                number = i if options.round is None else options.round
                yield Told.of(options.seed, number, str(folder / str(i)), only, options.plant)

        for result in rounds(told()):
            played[f"rounds of {result.scenario}"] += 1
            longest[result.scenario] = max(longest[result.scenario], round(result.seconds, 1))
            total.update(result.tallies)
            if not result.violations:
                continue
            bad += 1
            judges.update({f"{result.scenario}: {judge}" for judge, _ in result.violations})
            again = f"python -m tools.campaign.edges --seed {options.seed} --round {result.number} --times 20"
            again += f" --only {options.only}" if only else ""
            shown = "\n".join(f"  {judge}: {text}" for judge, text in result.violations[:8])
            text = (
                f"VIOLATION, round {result.number}, {result.scenario}: {again}\n{shown}\n  log:\n{result.log[-6000:]}"
            )
            first = first or text
            print(text[:300].split("\n  log")[0] if options.brief else text, flush=True)
            if options.keep:
                shutil.copytree(folder, os.path.join(options.keep, str(result.number)), dirs_exist_ok=True)
    told_all = {"rounds": sum(played.values()), "violating": bad, **played, **total}
    told_all |= {
        "judges": dict(judges.most_common()),
        "longest": longest,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps({**told_all, "violation": first}))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
