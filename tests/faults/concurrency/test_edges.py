"""Signals, threads, forks, replaced directories at random moments: a sample of the campaign, and its controls.

The whole of it: `python -m tools.campaign --only signals-threads-forks`.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests import ROOT
from tools.campaign.edges import others
from tools.campaign.edges.ledger import CLEAR, DONE, OPEN, REFUSED, WRITE, Ledger, faults
from tools.campaign.edges.planted import NO_PLACE, PLANTS
from tools.campaign.edges.proof import Strangers, made, spoiled, wrong

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, /proc")


def campaign(*words):
    """Play rounds in a process of their own, which has no threads; return what it printed, and its last line."""
    command = [sys.executable, "-m", "tools.campaign.edges", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_sample():
    text, told = campaign("--rounds", "8", "--seed", "20")
    assert told["violating"] == 0, text[:8000]
    assert {name for name in told if name.startswith("rounds of ")} >= {
        "rounds of signals",
        "rounds of threads",
    }
    assert min(told[name] for name in ("writes", "reads", "signals", "closes", "strangers")) > 0, told


@pytest.mark.campaign
def test_two_thousand_rounds():
    text, told = campaign("--rounds", "2000", "--seed", os.environ.get("SEED", "1"))
    assert told["violating"] == 0, text[:20_000]
    names = (
        "writes refused",
        "closes refused",
        "snapshots",
        "streams",
        "raised",
        "forks",
        "replaced",
        "told so",
        "adds",
    )
    assert min(told[name] for name in names) > 0, told


@pytest.mark.campaign
@pytest.mark.parametrize("plant", PLANTS)
def test_control(plant):
    _, scenario, judge = PLANTS[plant]
    text, told = campaign("--plant", plant, "--only", scenario, "--rounds", "150", "--first", "--seed", "3")
    print(f"{plant}: after {told['rounds']} rounds, by {sorted(told['judges'])}")
    assert f"{scenario}: {judge}" in told["judges"]
    assert NO_PLACE not in text


@pytest.mark.slow
def test_control_of_the_sample_an_episode_that_is_not_stored():
    _, told = campaign("--plant", "forgets", "--only", "threads", "--rounds", "8", "--first", "--seed", "3")
    assert any("lost" in judge for judge in told["judges"])


# -- the judges --------------------------------------------------------------------------------


def ledger(*calls):
    """Return entries of calls `(kind, number, length, how)`, one after the other; `+` begins before the last one
    ended."""
    made, late = Ledger(), []
    for kind, number, length, how, *beside in calls:
        entry = made.begin(kind, number, length)
        if beside:
            late.append((entry, how))
            continue
        made.end(entry, how)
    for entry, how in late:
        made.end(entry, how)
    return made.entries


def judges(entries, stored, max_steps=100):
    return sorted({judge for judge, _ in faults(entries, stored, max_steps)})


THREE = [(WRITE, n, 10, DONE) for n in range(3)]


@pytest.mark.parametrize(
    ("calls", "stored", "max_steps", "expected"),
    [
        (THREE, [0, 1, 2], 100, []),
        (THREE, [1, 2], 25, []),
        (THREE, [1, 2], 30, ["lost"]),
        (THREE, [0, 2], 100, ["lost"]),
        (THREE, [0, 1], 100, ["lost"]),
        (THREE, [], 100, ["lost"]),
        (THREE, [0, 2, 1], 100, ["order"]),
        (THREE, [0, 1, 1, 2], 100, ["twice"]),
        (THREE, [0, 1, 2, 7], 100, ["extra"]),
        (THREE, [0, 1, 2], 25, ["capacity"]),
        ([*THREE, (WRITE, 3, 10, REFUSED)], [0, 1, 2], 100, []),
        ([*THREE, (WRITE, 3, 10, REFUSED)], [0, 1, 2, 3], 100, ["refused"]),
        ([*THREE, (WRITE, 3, 10, OPEN)], [0, 1, 2], 100, []),
        ([*THREE, (WRITE, 3, 10, OPEN)], [0, 1, 2, 3], 100, []),
        ([*THREE, (CLEAR, 0, 0, DONE)], [], 100, []),
        ([*THREE, (CLEAR, 0, 0, DONE)], [2], 100, ["clear", "lost"]),
        ([*THREE, (CLEAR, 0, 0, OPEN)], [], 100, []),
        ([*THREE, (CLEAR, 0, 0, OPEN)], [0, 1, 2], 100, []),
        ([*THREE, (CLEAR, 0, 0, OPEN)], [1, 2], 100, ["lost"]),
        ([*THREE, (CLEAR, 0, 0, REFUSED)], [], 100, ["lost"]),
        ([(WRITE, 9, 10, DONE, "+"), *THREE], [0, 9, 1, 2], 100, []),
        ([(CLEAR, 0, 0, DONE, "+"), *THREE], [2], 100, []),
        ([(CLEAR, 0, 0, DONE, "+"), *THREE], [], 100, []),
        ([(CLEAR, 0, 0, DONE, "+"), *THREE], [1], 100, ["lost"]),
    ],
)
def test_what_may_be_stored(calls, stored, max_steps, expected):
    assert judges(ledger(*calls), [(n, 10) for n in stored], max_steps) == expected


def test_an_episode_of_another_length_is_torn():
    assert judges(ledger(*THREE), [(0, 10), (1, 9), (2, 10)]) == ["torn"]


def test_violations_are_told_to_the_host():
    made = Ledger()
    made.violation("lost", "episode 3")
    made.violation("hang", "é" * 9000)
    assert [judge for judge, _ in made.violations] == ["lost", "hang"]


def test_episodes_prove_themselves():
    steps = made(7, 5)
    assert wrong(steps, 0, 1) is None
    assert "another buffer" in wrong(steps, 1, 1)
    steps["row"][3, 2] += 1
    assert "torn" in wrong(steps, 0, 1)
    assert "torn" in wrong({name: values for name, values in steps.items()}, 0, 0)


def test_a_stranger_notices(tmp_path):
    told = Ledger()
    strangers = Strangers(str(tmp_path), told)
    strangers.turn(12)
    assert told.violations == []
    fd, path, _ = strangers._open[0]
    os.pwrite(fd, b"rows", 100)
    assert "wrote into it" in spoiled(path)
    os.close(strangers._open[3][0])
    strangers.close()
    assert [judge for judge, _ in told.violations] == ["stranger"]


def test_other_buffers_prove_themselves():
    lane = np.arange(4)
    now, then = others.observed(5, 4, 0.0), others.observed(6, 4, 0.0)
    final = ((5 + 3 * lane) % 11 == 0) | ((5 + 5 * lane) % 13 == 0)
    then = others.observed(6, 4, final.astype(float))
    batch = {
        "observations": now,
        "next_observations": then,
        "actions": lane,
        "rewards": np.full(4, 5.0, np.float32),
        "dones": ((5 + 3 * lane) % 11 == 0).astype(np.float32),
    }
    assert others.wrong_transitions(batch, 1) is None
    later = {**batch, "next_observations": others.observed(7, 4, 0.0)}
    assert others.wrong_transitions(later, 1)[0] == "successor"
    assert others.wrong_transitions({**batch, "observations": now + 1}, 1)[0] == "torn"
    labels = {
        "student_observations": now,
        "label_round": np.full(4, 2),
        "teacher_actions": np.stack([others.key(5, lane), np.full(4, 2)], 1),
    }
    assert others.wrong_labels(labels) is None
    assert others.wrong_labels({**labels, "label_round": np.full(4, 3)})[0] == "label"
    who = np.array([[-1, 0, others.key(-1, 0)], [3, 1, others.key(3, 1)]], float)
    halves = {"who": who, "is_offline": np.array([True, False])}
    assert others.wrong_halves(halves, 0.5) is None
    assert others.wrong_halves({**halves, "is_offline": np.array([False, True])}, 0.5)[0] == "half"
