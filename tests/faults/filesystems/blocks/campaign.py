"""Power cuts of real file systems: lives on a volume, cut again and again.

    python -m tests.faults.filesystems.blocks.campaign ext4 --minutes 4 --seed 1
    python -m tests.faults.filesystems.blocks.campaign xfs --planted "no sync at all"

It needs root, FUSE and loop devices, and moves into a mount namespace of its own, which takes all its mounts with it
when it ends, however it ends. Prints one line of JSON; exits with 1 where something that was promised is not so. When
the kernel writes is not ours to say, so that a seed gives the same calls and cuts again, but not the same log; the disk
of a violation is kept (`--keep`).
"""

import argparse
import collections
import contextlib
import json
import logging
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback

import pytest

from tests.faults.crash.recording import same_ids
from tests.faults.filesystems.blocks.lives import LIVES, new_life
from tests.faults.filesystems.blocks.mounted import MAKE, BlockDisk, FileSystemLost, Mounted, is_lost

PLANTED = {
    "no sync at all": lambda change, path: True,
    "columns are not synced": lambda change, path: change == "sync" and "/columns" in path,
    "the table is not synced": lambda change, path: path.endswith("episodes.npy"),
    "segments are not synced": lambda change, path: change == "sync" and "/data/" in path,
}
"""Name -> which syncs are left out, for a control."""

CUTS = 45
"""Cuts of one life."""


_HOME = "RINGMAP_FIRST_NAMESPACE"


class Violation(AssertionError):
    """A cut disk showed what it must not."""


class Campaign:
    """Lives on file systems of one kind, each cut `CUTS` times.

    Args:
        kind: the file system.
        folder: for the images.
        home: a descriptor of the mount namespace that this process was born in.
        cheats: see `BlockDisk`.
        keep: where the image of a violation is kept, or None.
    """

    def __init__(self, kind, folder, home, cheats=None, keep=None):
        self.kind, self.folder, self.home, self.cheats, self.keep = kind, folder, home, cheats, keep
        self.counts = collections.Counter()
        self.boots = 1
        self.lives = 0

    def run(self, seed, power, what):
        """Live one life and cut it."""
        life = new_life(seed, power, what)
        folder = os.path.join(self.folder, str(self.lives))
        self.lives += 1
        with pytest.MonkeyPatch.context() as patch:
            same_ids(patch, seed)
            life.recover_if_stale(patch)
            mounted = Mounted(self.kind, folder, self.home)
            try:
                with mounted:
                    disk = self._disk(mounted, seed)
                    life = _in_a_child(lambda: life.live(mounted, disk))
                    end = mounted.volume.position
                self.counts["lives"] += 1
                for name, value in mounted.volume.count().items():
                    self.counts[name] += value
                where = f"{self.kind}, seed {seed}, {'power' if power else 'process'}, {what}"
                self._explore(mounted, life, end, random.Random(seed), 0, where, CUTS)
            finally:
                mounted.close()
                shutil.rmtree(folder)

    def _disk(self, mounted, seed):
        self.boots += 1
        return BlockDisk(mounted, self.boots, seed, self.cheats)

    def _explore(self, mounted, life, end, rng, depth, where, cuts):
        """Cut a life at so many places: half of them where a call had just returned or begins."""
        moments = [at for at in life.moments if at <= end]
        places = [rng.choice(moments) if rng.random() < 0.5 else rng.randint(0, end) for _ in range(cuts)]
        for place in sorted(places):
            seed = rng.getrandbits(32)
            goes_on = depth == 0 and rng.random() < 0.15
            told = mounted.volume.cut(place, seed)
            self.counts["cuts"] += 1
            self.counts["again"] += depth > 0
            self.counts["lossy"] += told["lost"] + told["torn"] > 0
            self.counts["torn"] += told["torn"] > 0
            self.counts["writes lost"] += told["lost"]
            self.counts["writes torn"] += told["torn"]
            after = None
            try:
                with mounted:
                    after = self._judge(mounted, life, place, seed, goes_on)
                    last = mounted.volume.position
                self.counts["small state lost"] += getattr(after, "told", False)
                if goes_on and after is not None:
                    self._explore(mounted, after, last, rng, depth + 1, f"{where}, cut {place}", 4)
            except FileSystemLost as error:
                self.counts["file system lost"] += 1
                print(f"{where}, cut {place} ({told}): {error}", file=sys.stderr)
            except Violation as violation:
                kept = self._keep(mounted, place, seed)
                raise Violation(f"{where}, cut {place} of {end} ({told}): {violation}{kept}") from None
            mounted.volume.back()

    def _judge(self, mounted, life, place, seed, goes_on):
        disk = self._disk(mounted, seed)
        return _in_a_child(lambda: life.judge(mounted, disk, place, goes_on))

    def _keep(self, mounted, place, seed):
        if self.keep is None:
            return ""
        os.makedirs(self.keep, exist_ok=True)
        path = os.path.join(self.keep, f"{self.kind}-{place}-{seed}.img")
        mounted.volume.back()
        mounted.volume.cut(place, seed)
        mounted.volume.save(path)
        return f"; its disk is {path}"


def _in_a_child(do):
    """Return what `do` returns, run in a forked process: nothing of it keeps the volume busy, and SIGBUS is seen."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            told = "returned", do()
        except BaseException as error:
            how = "lost" if is_lost(error) else "wrong"
            told = how, "".join(traceback.format_exception(error)[-4:])
        with open(theirs, "wb") as file:
            pickle.dump(told, file)
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:
        answer = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status or not answer:
        raise Violation(f"the process ended with {status}")
    how, told = pickle.loads(answer)
    if how == "returned":
        return told
    raise (FileSystemLost if how == "lost" else Violation)(told)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=MAKE)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--lives", type=int, default=None, help="so many, instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(LIVES), help="of " + ", ".join(LIVES))
    parser.add_argument("--levels", default="process,power")
    parser.add_argument("--planted", choices=PLANTED)
    parser.add_argument("--keep", help="a folder for the disk of a violation")
    options = parser.parse_args(words)
    home = os.environ.pop(_HOME, None)
    if home is None:
        home = os.open("/proc/self/ns/mnt", os.O_RDONLY)
        os.set_inheritable(home, True)
        os.environ[_HOME] = str(home)
        again = [sys.executable, "-W", "error", "-m", __spec__.name, *(words or sys.argv[1:])]
        os.execvp("unshare", ["unshare", "--mount", *again])
    logging.getLogger("ringmap").addFilter(lambda record: False)
    began, violation = time.monotonic(), None
    lives, levels = options.only.split(","), options.levels.split(",")
    turns = [  # all lives first, at one level or the other
        (what, levels[(i + j) % len(levels)]) for j in range(len(levels)) for i, what in enumerate(lives)
    ]
    with tempfile.TemporaryDirectory(prefix="ringmap-blocks-") as folder:
        campaign = Campaign(options.kind, folder, int(home), PLANTED.get(options.planted), options.keep)
        while (
            campaign.lives < options.lives
            if options.lives is not None
            else time.monotonic() - began < options.minutes * 60
        ):
            what, level = turns[campaign.lives % len(turns)]
            try:
                campaign.run(options.seed + campaign.lives, level == "power", what)
            except Violation as error:
                violation = str(error)
                break
    found = {"kind": options.kind, "seed": options.seed, **campaign.counts}
    found |= {"seconds": round(time.monotonic() - began), "violation": violation}
    print(json.dumps(found))
    return violation is not None


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
