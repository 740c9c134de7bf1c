"""Two versions of the library on one directory: they write in turn, and each reads while the other writes.

    python -m tests.versions.pairs --minutes 2 --seed 1

The older one is a commit of this repository, of the same format version, taken out of its history.
"""

import argparse
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import ROOT

OLDER = {"memmap": "92cfc85", "zarr": "474538a"}
"""Storage -> the first commit that had it."""

SPEAKER = Path(__file__).with_name("speaker.py")


class Wrong(AssertionError):
    """One version read something else than the other wrote."""


def why_not(commit):
    """Return why a commit can't be taken out of the history here, or None."""
    if shutil.which("git") is None:
        return "needs git"
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}:src/ringmap"], cwd=ROOT, capture_output=True
    )
    return f"needs commit {commit} of the repository" if known.returncode else None


@functools.cache
def sources(commit, folder):
    """Return where `src` of a commit lies, unpacked below `folder`."""
    place = Path(folder) / commit
    place.mkdir()
    packed = subprocess.run(
        ["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "x"], cwd=place, input=packed.stdout, check=True)
    return place / "src"


class Version:
    """A process with one version of the library."""

    def __init__(self, name, src, path):
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SPEAKER), str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(src)},
        )  # fmt: skip

    def start(self, *call):
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()

    def result(self):
        line = self._process.stdout.readline()
        if not line:
            raise Wrong(f"{self.name} ended with {self._process.wait()}")
        how, told = json.loads(line)
        if how == "raised":
            raise Wrong(f"{self.name}: {told}")
        return told

    def __call__(self, *call):
        self.start(*call)
        return self.result()

    def kill(self):
        self._process.kill()
        self.end()

    def end(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def stored(model, number, length):
    """Return the model after one more episode."""
    model = [*model, [number, length]]
    while sum(length for _, length in model) > 64:
        model = model[1:]
    return model


def turns(folder, seed, storage, count):
    """Let two versions take `count` turns; return how many calls were made and how many reads were compared."""
    rng = random.Random(seed)
    path = Path(folder) / f"buf-{seed}-{storage}"
    where = {"older": sources(OLDER[storage], folder), "newer": ROOT / "src"}
    options = {"storage": "zarr"} if storage == "zarr" else {}
    model, number, calls, reads = [], 0, 0, 0
    for turn in range(count):
        first = rng.choice(["older", "newer"])
        writer = Version(first, where[first], path)
        other = "newer" if first == "older" else "older"
        reader = Version(other, where[other], path)
        try:
            durability = {"durability": rng.choice(["process", "power"])}
            writer("open", "r+" if turn else "new", {**durability, **({} if turn else options)})
            if turn and writer("seen") != model:
                raise Wrong(f"turn {turn}: {first} opened {writer('seen')}, expected {model}")
            watches = bool(model)
            if watches:
                reader("open", "r", {})
            for _ in range(rng.randint(3, 12)):
                calls += 1
                way = rng.random()
                if watches:
                    reader.start("sample", 10)  # beside the call of the writer
                if way < 0.85:
                    length = rng.randint(2, 12)
                    writer("write", number, length)
                    model = stored(model, number, length)
                    number += 1
                else:
                    writer("flush")
                if watches:
                    reader.result()
                    reads += 1
                    if (seen := reader("seen")) != model:
                        raise Wrong(f"turn {turn}: {other} reads {seen}, {first} wrote {model}")
            if rng.random() < 0.5:
                writer("close")
                writer.end()
            else:
                writer.kill()
            fresh = Version(other, where[other], path)
            fresh("open", "r", {})
            findings, seen = fresh("check"), fresh("seen")
            fresh.end()
            reads += 1
            if findings or seen != model:
                raise Wrong(f"turn {turn}: {other} opened {seen}, expected {model}; {findings}")
        finally:
            for process in (writer, reader):
                if process._process.poll() is None:
                    process.kill()
                elif not process._process.stdout.closed:
                    process.end()
    shutil.rmtree(path)
    return calls, reads


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = {"seed": options.seed, "scripts": 0, "calls": 0, "reads": 0, "violation": None}
    if why := next(filter(None, map(why_not, OLDER.values())), None):
        print(json.dumps({**found, "skipped": why}))
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ringmap-versions-") as folder:
        while time.monotonic() - began < options.minutes * 60 and not found["violation"]:
            seed = options.seed + found["scripts"]
            storage = list(OLDER)[seed % 2]
            try:
                calls, reads = turns(folder, seed, storage, 6)
                found["calls"] += calls
                found["reads"] += reads
            except Wrong as wrong:
                found["violation"] = f"seed {seed}, {storage}: {wrong}"
            found["scripts"] += 1
    print(json.dumps({**found, "seconds": round(time.monotonic() - began)}))
    return found["violation"] is not None


if __name__ == "__main__":
    sys.exit(main())
