"""The long campaign: everything that tries to break a buffer, for as long as there is time, in one table.

    python -m tools.campaign --minutes 60
    python -m tools.campaign --minutes 5 --only power,blocks --seed 7

It runs the campaigns that are there (`PARTS`), each in processes of its own, and adds up what they print. A violation
is printed with the command that runs that case again; the exit code is 1 then. A part that can't run here says why, and
counts as nothing.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

from tests import ROOT
from tests.faults.filesystems.blocks.mounted import MAKE, missing

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--tb=short"]


@dataclass
class Row:
    """What came out of one command."""

    part: str
    what: str
    cases: int = 0
    survived: int = 0
    violations: int = 0
    caught: int = 0
    planted: int = 0
    seconds: float = 0.0
    note: str = ""
    command: str = ""
    told: str = ""


@dataclass
class Command:
    """One command of a part.

    Args:
        what: it tries, in words.
        words: the command; `{seconds}`, `{minutes}` and `{seed}` are filled in.
        env: likewise.
        count: how the numbers are read from what it prints: a function of (row, text).
        share: of the time of its part.
        control: whether it plants faults: then a test that passes has caught one.
    """

    what: str
    words: list
    env: dict = field(default_factory=dict)
    count: object = None
    share: float = 1.0
    control: bool = False
    why_not: object = None


def _number(pattern, text):
    """Return the sum of what the groups of a pattern find."""
    return sum(int(one.replace(",", "")) for one in re.findall(pattern, text))


def _disks(row, text):
    row.cases = row.survived = _number(r"([\d,]+) disks of", text)


def _states(row, text):
    row.cases = row.survived = _number(r"([\d,]+) states", text)


def _collections(row, text):
    row.cases = row.survived = _number(r"([\d,]+) kills", text)


def _errors(row, text):
    row.cases = row.survived = _number(r"([\d,]+) errors, one per", text)


def _kills(row, text):
    row.cases = row.survived = _number(r"(?m)^\| [^|]+: \w+ \| ([\d,]+) \|", text)


def _killed(row, text):
    told = "".join(re.findall(r"each once; killed \{(.*?)\}", text))
    row.cases = row.survived = _number(r": (\d+)", told)


def _strikes(row, text):
    row.cases = row.survived = _number(r"([\d,]+) strikes", text)


def _races(row, text):
    row.cases = _number(r"of ([\d,]+) (?:clips torn|transitions wrong)", text)
    row.survived = _number(r"([\d,]+) redrawn", text)


def _insides(row, text):
    row.cases = _number(r"(?m)^\| all of .*\bworks ([\d,]+)", text)
    row.survived = _number(r"(?m)^\| all of .*\bRoleError ([\d,]+)", text)


def _forgeries(row, text):
    row.cases = row.survived = _number(r"forged ([\d,]+)", text)


def _damages(row, text):
    row.cases = _number(r"cases ([\d,]+)", text)
    row.survived = _number(r"harmful ([\d,]+)", text)


def _clips(row, text):
    row.cases = _number(r"clips=([\d,]+)", text)
    row.survived = _number(r"redraws=([\d,]+)", text)


def _json(cases, survived):
    def count(row, text):
        for line in text.splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                row.cases += sum(found.get(name) or 0 for name in cases)
                row.survived += sum(found.get(name) or 0 for name in survived)
                row.note = found.get("skipped", row.note)
                if found.get("violation"):
                    row.violations, row.told = 1, found["violation"]

    return count


def _blocks(kind):
    return Command(
        f"cuts of {kind}",
        [
            *[sys.executable, "-m", "tests.faults.filesystems.blocks.campaign", kind],
            *["--minutes", "{minutes}", "--seed", "{seed}"],
        ],
        count=_json(["cuts"], ["lossy"]),
        why_not=lambda: missing(kind),
    )


def _controls(what, *tests, share=0.3):
    return Command(what, [*PYTEST, *tests], share=share, control=True)


PARTS = {
    "power": [
        Command(
            f"cuts at level {level}, {storage}",
            [*PYTEST, "-s", "-m", "campaign", f"tests/faults/crash/test_power.py::test_campaign[{level}]"],
            {"STORAGE": storage, "SEED": "{seed}", "LASTS_S": "{seconds}"},
            _disks,
        )
        for level in ("process", "power")
        for storage in ("memmap", "zarr", "mixed")
    ]
    + [
        Command(
            "cuts of transitions, priorities, labels, both levels",
            [*PYTEST, "-s", "-m", "campaign", "tests/faults/crash/test_power.py", "-k", "campaign_of_other_buffers"],
            {"SEED": "{seed}", "LASTS_S": "{sixth}"},
            _disks,
        )
    ]
    + [
        Command(
            f"cuts and kills of {what}, both levels",
            [*PYTEST, "-s", "-m", "campaign", f"tests/faults/crash/{file}", "-k", tests],
            {"SEED": "{seed}", "LASTS_S": "{sixth}"},
            _states,
        )
        for what, file, tests in (
            ("episodes in parts", "test_parts.py", "scripts"),
            ("steps stored alone", "test_groups.py", "scripts"),
            ("values that change", "test_updates.py", "length"),
        )
    ]
    + [
        _controls("planted in the protocol", "tests/faults/crash/test_power.py", "-k", "control"),
        _controls("planted in what keeps parts together", "tests/faults/crash/test_parts.py", "-k", "guard"),
        _controls(
            "planted in groups and in values",
            "tests/faults/crash/test_groups.py",
            "tests/faults/crash/test_updates.py",
            "-k",
            "guard",
        ),
    ],
    "kill": [
        Command(
            "kills at random",
            [*PYTEST, "-s", "-m", "campaign", "tests/faults/crash/test_kill.py", "-k", "random_kills"],
            {"SEED": "{seed}", "LASTS_S": "{seconds}"},
            _kills,
        ),
        Command(
            "seeded collections in parts, killed at random",
            [*PYTEST, "-s", "-m", "campaign", "tests/unit/world/test_parts.py"],
            {"SEED": "{seed}", "LASTS_S": "{sixth}"},
            _collections,
        ),
        Command(
            "collectors, learner and supervisor of a fleet, killed at random",
            [*PYTEST, "-s", "-m", "campaign", "tests/unit/fleet/test_supervised.py"],
            {"SEED": "{seed}", "KILLS": "40"},
            _killed,
        ),
        _controls("planted in the order of changes", "tests/faults/crash/test_kill.py", "-k", "control"),
    ],
    "errors": [
        Command(
            f"a disk that says no, {storage}",
            [*PYTEST, "-s", "-m", "campaign", "tests/faults/crash/test_errors.py", "-k", f"{storage} and 1048576"],
            {"SEED": "{seed}", "LASTS_S": "{seconds}"},
            _errors,
        )
        for storage in ("memmap", "zarr", "mixed")
    ]
    + [
        Command(
            "errors of calls that store steps alone, parts and values",
            [*PYTEST, "-s", "-m", "campaign", "tests/faults/crash/test_errors_of_steps.py"],
            {"SCRIPTS": "1"},
            _errors,
        ),
        _controls(
            "planted in the handling of errors",
            "tests/faults/crash/test_errors.py",
            "tests/faults/crash/test_errors_of_steps.py",
            "-k",
            "control",
        ),
    ],
    "damage": [
        Command(
            "damaged files",
            [*PYTEST, "-s", "-m", "campaign", "tests/faults/damage/test_fuzz.py", "-k", "campaign[{eleventh}]"],
            {"LASTS_S": "{seconds}"},
            _damages,
        ),
        Command(
            "forged fields",
            [*PYTEST, "-s", "-m", "campaign", "tests/faults/damage/test_forged.py", "-k", "campaign[{eleventh}]"],
            {"LASTS_S": "{seconds}"},
            _forgeries,
        ),
        _controls("planted in the checks", "tests/faults/damage/test_fuzz.py", "-k", "control"),
        _controls("planted in what is refused", "tests/faults/damage/test_forged.py", "-k", "control"),
    ],
    "blocks": [_blocks(kind) for kind in MAKE]
    + [
        Command(
            "syncs left out",
            [*PYTEST, "-m", "campaign", "tests/faults/filesystems/test_blocks.py", "-k", "control"],
            share=1.5,
            control=True,
            why_not=lambda: missing("ext4"),
        )
    ],
    "machine": [
        Command(
            "random calls, a live reader beside them",
            [
                *[sys.executable, "-W", "ignore", "-m", "tools.campaign.machine"],
                *["--minutes", "{minutes}", "--seed", "{seed}"],
            ],
            count=_json(["steps"], ["faults", "crashes"]),
            share=2,
        ),
        _controls("planted in the store", "tests/unit/buffers/test_state_machine.py", "-k", "control"),
    ],
    "readers": [
        Command(
            "clips under a flat-out writer, maps and compressed",
            [*PYTEST, "-s", "tests/faults/concurrency/test_torn.py", "-k", "processes or threads"],
            count=_clips,
        ),
        Command(
            "clips and transitions of many rings, each under a flat-out writer",
            [
                *PYTEST,
                "-s",
                "-m",
                "campaign",
                "tests/unit/buffers/sharded/test_torn.py",
                "tests/unit/buffers/sharded/test_transitions_torn.py",
            ],
            {"CLIPS": "50000"},
            _races,
        ),
        Command(
            "kill, lock, live reader, reads of both kinds",
            [*PYTEST, "-m", "slow", "tests/faults/filesystems/test_file_systems.py", "-k", "kill"],
        ),
        _controls(
            "a second look left out",
            "tests/faults/concurrency/test_torn.py",
            "tests/unit/buffers/sharded/test_torn.py",
            "tests/unit/buffers/sharded/test_transitions_torn.py",
            "-k",
            "control",
        ),
    ],
    "signals-threads-forks": [
        Command(
            "rounds of threads, forks, replaced directories",
            [
                *[sys.executable, "-m", "tools.campaign.rounds", "--rounds", "100000"],
                *["--minutes", "{minutes}", "--seed", "{seed}"],
            ],
            count=_json(["rounds"], ["calls", "forks", "replaced"]),
            share=2,
        ),
        Command(
            "Ctrl-C and signal handlers at each line of a draw from many rings",
            [*PYTEST, "-s", "-m", "campaign", "tests/unit/buffers/sharded/test_interrupts.py"],
            count=_strikes,
        ),
        Command(
            "each public call inside others, in handlers, finalizers, forks, callables and loops",
            [sys.executable, "-m", "tools.campaign.inside", "--every", "997"],
            count=_insides,
        ),
        _controls("planted in looks at many rings", "tests/unit/buffers/sharded/test_interrupts.py", "-k", "control"),
        _controls(
            "planted in what threads, forks and replaced directories meet",
            "-m",
            "campaign",
            "tests/faults/concurrency/test_rounds.py",
            "-k",
            "control",
        ),
    ],
}


def run(part, command, seconds, seed):
    """Run a command for about so many seconds; one that knows no time is ended after twice as many, controls after a
    quarter of an hour."""
    filled = {
        "seconds": f"{seconds:.0f}",
        "minutes": f"{seconds / 60:.3f}",
        "seed": seed,
        "eleventh": seed % 11 + 1,
        "sixth": f"{seconds / 6:.1f}",
    }
    row = Row(part, command.what)
    if command.why_not is not None and (why := command.why_not()):
        row.note = f"not run: {why}"
        return row
    words = [str(word).format(**filled) for word in command.words]
    env = {name: value.format(**filled) for name, value in command.env.items()}
    row.command = " ".join([*(f"{k}={v}" for k, v in env.items()), "python", *map(repr_of, words[1:])])
    began = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | env,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        longest = 2 * seconds + 60
        text, _ = process.communicate(timeout=max(longest, 900) if command.control else longest)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        text, _ = process.communicate()
        row.note = "ended when its time was over"
    row.seconds = time.monotonic() - began
    if command.count is not None:
        command.count(row, text)
    ends = re.findall(r"(?m)^=* ?((?:\d+ \w+,? )+in [\d.]+s.*)$", text)[-1:]  # not "3,544 errors, one per ..."
    passed, failed = (
        sum(_number(pattern, end) for end in ends) for pattern in (r"\b(\d+) passed", r"\b(\d+) (?:failed|errors?)\b")
    )
    if command.control:
        row.caught, row.planted = passed, passed + failed
    elif command.count is None:
        row.cases = row.survived = passed
    if (failed or process.returncode) and not row.note:
        row.violations = max(row.violations, failed, 1)
        row.told = row.told or text[-3000:]
    return row


def repr_of(word):
    """Return a word as a shell takes it."""
    return word if re.fullmatch(r"[\w./:=,-]+", word) else f"'{word}'"


def main(words=None):
    parser = argparse.ArgumentParser(prog="python -m tools.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="in all; controls take what they take")
    parser.add_argument("--only", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(words)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    commands = [(part, command) for part in chosen for command in PARTS[part]]
    share = options.minutes * 60 / sum(command.share for _, command in commands)
    rows = []
    print("| part | what | cases | faults survived | violations | planted bugs caught | s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for part, command in commands:
        row = run(part, command, share * command.share, options.seed)
        rows.append(row)
        caught = f"{row.caught} of {row.planted}" if row.planted else ""
        print(
            f"| {part} | {row.what}{f' ({row.note})' if row.note else ''} | {row.cases:,} | {row.survived:,} | "
            f"{row.violations} | {caught} | {row.seconds:.0f} |",
            flush=True,
        )
    wrong = [row for row in rows if row.violations]
    for row in wrong:
        print(f"\nVIOLATION, {row.part}: {row.what}\n    {row.command}\n{row.told}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
