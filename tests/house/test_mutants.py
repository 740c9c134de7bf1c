"""The campaign of mutants, over a package of one module: what is planted, what notices it, and what is tried again."""

import ast
import subprocess

import pytest

from tools.campaign.mutants import (
    GONE,
    KILLED,
    LATE,
    SURVIVED,
    UNTESTED,
    Contexts,
    Mutant,
    mutants_of,
    sample,
    table,
    to_try_again,
    try_all,
)

MODULE = '''"""A ring."""


def kept(rows, head, most):
    """Return the rows that count."""
    while head > most + 99:
        head -= 100
    if head < most and rows:
        return rows[:head]
    rows.sort()
    return rows
'''
TESTS = """from ringmap.storage.ring import kept


def test_few():
    assert kept([1, 2, 3], 2, 3) == [1, 2]


def test_many():
    assert kept([1, 2, 3, 4], 3, 3) == [1, 2, 3, 4]
"""
FILE, TEST = "src/ringmap/storage/ring.py", "tests/test_ring.py"


@pytest.fixture
def tree(tmp_path):
    for name, text in ((FILE, MODULE), (TEST, TESTS), ("src/ringmap/__init__.py", ""), ("pytest.ini", "[pytest]")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def one_of(kind, before):
    return next(m for m in mutants_of(FILE, MODULE) if (m.kind, m.before) == (kind, before))


def contexts():
    tests = {f"{TEST}::test_few", f"{TEST}::test_many"}
    return Contexts({FILE: dict.fromkeys(range(4, 12), tests)})


def test_each_fault_changes_the_module_and_can_be_compiled():
    found = mutants_of(FILE, MODULE)
    assert {m.kind for m in found} == {"operator", "constant", "branch", "removed"}
    texts = {m.applied(MODULE) for m in found}
    assert len(texts) == len(found)
    assert MODULE not in texts
    for text in texts:
        ast.parse(text)
    assert not any('"""' in m.before for m in found)


def test_a_sample_is_the_same_for_a_seed(tree):
    assert sample(tree, {"storage": 5}, 3) == sample(tree, {"storage": 5}, 3) != sample(tree, {"storage": 5}, 4)


@pytest.mark.slow
def test_verdicts_keep_the_killer_and_only_a_changed_one_is_tried_again(tree):
    mutants = [one_of("operator", "head < most"), one_of("removed", "rows.sort()"), one_of("removed", "head -= 100")]
    late = Mutant(FILE, 7, "removed", *_span("while head > most + 99:"), "while True:")
    untested, gone = one_of("constant", "99"), Mutant(FILE, 4, "constant", 0, 4, "else", "5")
    untested.line = 1
    every = [*mutants, untested, gone]
    try_all(every, tree, contexts(), 2)
    assert [m.verdict for m in every] == [KILLED, SURVIVED, SURVIVED, UNTESTED, GONE]
    assert every[0].killer == f"{TEST}::test_many"
    try_all([late], tree, contexts(), 1, limit_s=3)
    assert late.verdict == LATE
    assert "| storage | 1 | 2 | 0 | 1 | 1 |" in table(every)
    assert (tree / FILE).read_text() == MODULE
    assert to_try_again(every, tree) == []
    (tree / TEST).write_text(TESTS.replace("3, 3)", "4, 4)"))
    assert to_try_again(every, tree) == [every[0]]
    (tree / TEST).unlink()
    assert to_try_again(every, tree) == [every[0]]


def _span(text):
    begin = MODULE.index(text)
    return begin, begin + len(text), text
