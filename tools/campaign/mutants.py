"""Mutants: one small fault in the package at a time, and whether a test notices it.

    python -m tools.campaign.mutants --out verdicts.json                 300 mutants, two at a time: two to three hours
    python -m tools.campaign.mutants --out verdicts.json --again         those whose killer went or changed since
    python -m tools.campaign.mutants --count 6 --only storage --tests tests/unit/storage

A mutant runs in a copy of the tree, against the tests that ran its line, at most 120 s, until one fails: its killer,
which the verdict keeps. Which tests ran which line is asked once, with coverage's contexts (`pip install coverage`): it
takes as long as the suite. A test file that starts processes counts with all of its tests for each module that it ran a
line of, since lines of children are not seen. A sample is drawn by seed, and stays while the package does.

Read the survivors: a test to write, no fault at all (the same result), or one of cost only. Not here: which of these.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from tests import ROOT

SHARES = {"storage": 110, "clips": 50, "buffers": 80, "formats": 60}
LIMIT_S = 120
KILLED, SURVIVED, LATE, UNTESTED, GONE = "killed", "survived", "timeout", "no test runs it", "gone"

_PAIRS = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
    (ast.BitAnd, ast.BitOr),
    (ast.LShift, ast.RShift),
]
_OTHERS = {ast.Mod: ast.FloorDiv} | dict(_PAIRS) | {other: one for one, other in _PAIRS}
_STARTS_PROCESSES = re.compile(r"\b(subprocess|multiprocessing|os\.fork|Popen|forked|DataLoader|spawn)\b")


@dataclass
class Mutant:
    """A fault: text of a file from `begin` to `end`, in bytes, is replaced. Then its verdict."""

    file: str
    line: int
    kind: str
    begin: int
    end: int
    before: str
    after: str
    verdict: str = ""
    killer: str = ""
    killer_sum: str = ""
    seconds: float = 0.0

    @property
    def group(self):
        return self.file.split("/")[2]

    def applied(self, text):
        """Return the text of the file with the fault; None if the place has other text now."""
        data, before = text.encode(), self.before.encode()
        if data[self.begin : self.end] != before:
            return None
        return (data[: self.begin] + self.after.encode() + data[self.end :]).decode()


# -- faults ----------------------------------------------------------------------------------------


def mutants_of(file, text):
    """Return all faults that can be planted in a module: operators, constants, branches, removed statements."""
    lines, starts = text.encode().splitlines(keepends=True), [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(node):
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    found = []
    for node in _nodes(ast.parse(text)):
        begin, end = place(node)
        before = text.encode()[begin:end].decode()
        for kind, other in _faults_of(node):
            after = other if isinstance(other, str) else _as_expression(node, other)
            found.append(Mutant(file, node.lineno, kind, begin, end, before, after))
        if isinstance(node, ast.If):
            begin, end = place(node.test)
            before = text.encode()[begin:end].decode()
            found.append(Mutant(file, node.lineno, "branch", begin, end, before, f"not ({before})"))
    return found


def _as_expression(node, other):
    """Return the source of what replaces a node; a statement keeps its form, an expression gets brackets."""
    return ast.unparse(other) if isinstance(node, ast.stmt | ast.Constant) else f"({ast.unparse(other)})"


def _nodes(tree):
    """Yield the nodes that run: no annotations, docstrings, decorators, defaults of `__all__`, logs or asserts."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith(("log.", "warnings.")):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            continue
        if hasattr(node, "lineno"):
            yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            todo += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]


def _faults_of(node):
    """Yield `(kind, replacement)` of a node, as another node or as text."""
    other = copy.copy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHERS:
        other.ops = [_OTHERS[type(node.ops[0])]()]
        yield "operator", other
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _OTHERS:
        is_text = isinstance(node, ast.BinOp) and any(isinstance(one, ast.JoinedStr) for one in ast.walk(node))
        if not is_text:
            other.op = _OTHERS[type(node.op)]()
            yield "operator", other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "operator", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", str(node.value + 1)
    elif isinstance(node, ast.IfExp):
        other.body, other.orelse = node.orelse, node.body
        yield "branch", other
    elif _can_go(node):
        yield "removed", "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "removed", "return None"


def _can_go(node):
    """Tell whether a statement may be left out: names stay bound."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.Raise | ast.AugAssign)


def sample(root, shares, seed):
    """Return mutants of each group of `src/ringmap`, so many, drawn by seed."""
    found, rng = [], random.Random(seed)
    for group, count in shares.items():
        every = []
        for path in sorted((root / "src/ringmap" / group).rglob("*.py")):
            every += mutants_of(path.relative_to(root).as_posix(), path.read_text())
        found += rng.sample(every, min(count, len(every)))
    return found


# -- which tests run a line ------------------------------------------------------------------------


def pytest_runtest_setup(item):
    """Name the context of the lines that this test runs: this module is a plugin of the run that asks for them."""
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)


def ask_contexts(root, tests, where):
    """Run tests with coverage, and keep which line each of them ran in a file of coverage's."""
    config = Path(where).with_suffix(".rc")
    config.write_text("[run]\nsource = src/ringmap\nrelative_files = true\n")
    words = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", f"--data-file={where}", "-m", "pytest"]
    words += ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tools.campaign.mutants", *tests]
    subprocess.run(words, cwd=root, env=_environment(root), check=False)


class Contexts:
    """Which tests ran which line: `lines[file][line]` and `files[file]` are sets of tests."""

    def __init__(self, lines):
        self.lines = lines
        self.files = {file: set().union(*by_line.values()) for file, by_line in lines.items()}

    @classmethod
    def read(cls, where):
        """Read what `ask_contexts` kept: a bit for each line of a file and a context."""
        lines = {}
        with contextlib.closing(sqlite3.connect(where)) as data:
            query = (
                "select file.path, context.context, numbits from line_bits "
                "join file on file.id = file_id join context on context.id = context_id where context.context != ''"
            )
            for file, context, bits in data.execute(query):
                by_line = lines.setdefault(Path(file).as_posix(), {})
                for number in range(8 * len(bits)):
                    if bits[number // 8] >> number % 8 & 1:
                        by_line.setdefault(number, set()).add(context)
        return cls(lines)

    def of(self, mutant, root):
        """Return the tests to run, those of files that are named like the module first."""
        found = set(self.lines.get(mutant.file, {}).get(mutant.line, ()))
        for file in {test.partition("::")[0] for test in self.files.get(mutant.file, ())}:
            if _STARTS_PROCESSES.search((root / file).read_text()):
                found.add(file)
        name = Path(mutant.file).stem
        return sorted(found, key=lambda test: (name not in test.partition("::")[0], test))


# -- runs ------------------------------------------------------------------------------------------


def _environment(root):
    found = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    others = [one for one in found if not Path(one).is_relative_to(ROOT)]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), *others])}


def copy_of(root, folder):
    """Copy what git knows of a tree, changed or new, and return the copy."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=root, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def try_one(mutant, root, tests, limit_s=LIMIT_S):
    """Plant a fault in a copy of the tree, run tests until one fails, and note the verdict."""
    path, begun = root / mutant.file, time.monotonic()
    whole = path.read_text()
    text = mutant.applied(whole)
    if text is None:
        mutant.verdict = GONE
        return mutant
    if not tests:
        mutant.verdict = UNTESTED
        return mutant
    arguments = root / "mutant-tests.txt"
    arguments.write_text("\n".join(tests))
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", f"@{arguments}"]
    try:
        _write(path, text)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        process = subprocess.Popen(words, cwd=root, env=_environment(root), start_new_session=True, **streams)
        try:
            told = process.communicate(timeout=limit_s)[0]
            nothing_ran = process.returncode in (4, 5)  # no such test any more
            mutant.verdict = UNTESTED if nothing_ran else KILLED if process.returncode else SURVIVED
            named = re.search(r"(?m)^(?:FAILED|ERROR) (\S+::.+?|\S+)(?: - .*)?$", told)
            mutant.killer = named[1] if named and mutant.verdict == KILLED else ""
        except subprocess.TimeoutExpired:
            mutant.verdict = LATE
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own children, which a hang leaves
            process.communicate()
    finally:
        _write(path, whole)
    mutant.killer_sum = sum_of_test(root, mutant.killer)
    mutant.seconds = round(time.monotonic() - begun, 1)
    return mutant


def _write(path, text):
    """Write a module; without its bytecode, which counts as new for a second."""
    path.write_text(text)
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink(missing_ok=True)


def sum_of_test(root, test):
    """Return a checksum of the source of a test; "" if it is not there."""
    file, _, name = test.partition("::")
    if not (root / file).is_file():
        return ""
    text, names = (root / file).read_text(), name.partition("[")[0].split("::")
    for node in ast.walk(ast.parse(text)) if name else ():
        if isinstance(node, ast.FunctionDef) and node.name == names[-1]:
            return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]
    return "" if name else hashlib.sha256(text.encode()).hexdigest()[:16]


def try_all(mutants, root, contexts, jobs, done=lambda mutant: None, limit_s=LIMIT_S):
    """Try mutants, so many at a time, each in a copy of the tree of its own."""
    with tempfile.TemporaryDirectory(prefix="ringmap-mutants-") as folder:
        copies = SimpleQueue()
        for number in range(jobs):
            copies.put(copy_of(root, Path(folder) / str(number)))

        def work(mutant):
            mine = copies.get()
            try:
                return try_one(mutant, mine, contexts.of(mutant, mine), limit_s)
            finally:
                copies.put(mine)

        with ThreadPoolExecutor(jobs) as pool:
            for mutant in pool.map(work, mutants):
                done(mutant)


def to_try_again(mutants, root):
    """Return those whose killer went, or changed."""
    return [m for m in mutants if m.verdict == KILLED and (not m.killer or sum_of_test(root, m.killer) != m.killer_sum)]


def table(mutants):
    """Return the verdicts of each group as a table, and the survivors one by one."""
    verdicts = [KILLED, SURVIVED, LATE, UNTESTED, GONE]
    rows = ["| group | " + " | ".join(verdicts) + " |", "| --- " * (1 + len(verdicts)) + "|"]
    for group in sorted({m.group for m in mutants}):
        counts = [sum(m.group == group and m.verdict == verdict for m in mutants) for verdict in verdicts]
        rows.append(f"| {group} | " + " | ".join(map(str, counts)) + " |")
    left = [m for m in mutants if m.verdict in (SURVIVED, UNTESTED)]
    return "\n".join([*rows, *(f"{m.file}:{m.line}: {m.before!r} -> {m.after!r} ({m.verdict})" for m in left)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("mutants.json"), help="verdicts")
    parser.add_argument("--coverage", type=Path, default=Path("mutants.coverage"), help="made if it is missing")
    parser.add_argument("--again", action="store_true", help="only those whose killer went or changed")
    parser.add_argument("--count", type=int, default=sum(SHARES.values()))
    parser.add_argument("--only", choices=SHARES)
    parser.add_argument("--tests", nargs="*", default=["tests"], help="that coverage asks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    given, root = parser.parse_args(), Path(ROOT)
    if not given.coverage.exists():
        with tempfile.TemporaryDirectory(prefix="ringmap-mutants-") as folder:
            ask_contexts(copy_of(root, Path(folder)), given.tests, given.coverage.resolve())
    contexts = Contexts.read(given.coverage)
    if given.again:
        every = [Mutant(**one) for one in json.loads(given.out.read_text())]
        chosen = to_try_again(every, root)
    else:
        shares = {given.only: given.count} if given.only else SHARES
        shares = {group: -(-count * given.count // sum(shares.values())) for group, count in shares.items()}
        every = chosen = sample(root, shares, given.seed)

    def done(mutant):
        print(f"{mutant.verdict:8} {mutant.seconds:6} s  {mutant.file}:{mutant.line}  {mutant.killer}", flush=True)
        given.out.write_text(json.dumps([asdict(one) for one in every], indent=1))

    try_all(chosen, root, contexts, given.jobs, done)
    print(table(every))


if __name__ == "__main__":
    main()
