"""Fuzz: damage one file of a real buffer, and judge everything that is then done with it.

    python -m tests.faults.damage.fuzz FOLDER SEED START STOP

Prints a JSON line per case. Runs in a process of its own, so that a crash is seen: the line of
the case is missing.
"""

import json
import logging
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import CorruptError, DamageError, RingmapError
from ringmap.storage.disk.files import Disk
from ringmap.storage.inspect.repair import repair_folder
from tests.disks import undisturbed
from tests.faults.damage.buffers import KINDS, booted, make, served

HOWS = {
    "flip": 6,
    "bytes": 3,
    "zeros in it": 2,
    "cut": 3,
    "grown": 2,
    "missing": 2,
    "random": 1,
    "all zeros": 1,
    "swapped": 4,
    "foreign": 2,
    "stale": 2,
}
CLIPS = 32


@dataclass(frozen=True)
class Plan:
    """What is done to which file."""

    kind: str
    how: str
    name: str
    second: str = ""
    at: int = 0
    count: int = 1
    rebooted: bool = False
    kills: tuple[int, ...] = ()
    """Before which changes of a repair it is killed; then it is started again."""

    def __str__(self):
        return f"{self.how} {self.name}" + f" with {self.second}" * (self.how == "swapped")


class Bench:
    """Pristine buffers, another one of each kind, and a backup of each."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.truths = {}
        for kind in KINDS:
            place = self.folder / kind

            def back_up(place=place):
                shutil.copytree(place, place.with_suffix(".stale"))

            self.truths[kind] = make(kind, place, pause=back_up)
            make(kind, place.with_suffix(".foreign"), base=500)

    def draw(self, seed, number):
        """Draw what to do to which file of which buffer."""
        rng = np.random.default_rng((seed, number))
        kind = str(rng.choice(list(KINDS), p=[0.2, 0.2, 0.16, 0.06, 0.13, 0.13, 0.12]))
        pristine = bytes_in(self.folder / kind)
        names = sorted(pristine)
        num_chunks = sum(is_chunk(name) for name in names)
        weights = np.array([4 if n == "episodes.npy" else 8 / num_chunks if is_chunk(n) else 1 for n in names])
        name = str(rng.choice(names, p=weights / weights.sum()))
        how = str(rng.choice(list(HOWS), p=np.array(list(HOWS.values())) / sum(HOWS.values())))
        second = str(rng.choice([n for n in names if n != name]))
        at = int(rng.integers(len(pristine[name])))
        if rng.random() < 0.7 and (spans := self.truths[kind].spans.get(name)):  # where it hurts
            span = spans[int(rng.integers(len(spans)))]
            at = int(rng.integers(span.start, span.stop))
        count, rebooted = int(rng.integers(1, 64)), bool(rng.random() < 0.4)
        kills = tuple(rng.integers(0, 30, int(rng.integers(1, 4))).tolist())
        return Plan(kind, how, name, second, at, count, rebooted, kills)

    def damage(self, plan):
        """Make a copy of the buffer and damage it."""
        folder = self.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / plan.kind, folder)
        path, at, count = folder / plan.name, plan.at, plan.count
        old = path.read_bytes()
        noise = np.random.default_rng(at)
        if plan.how == "flip":
            new = old[:at] + bytes([old[at] ^ 1 << count % 8]) + old[at + 1 :]
        elif plan.how == "bytes":
            new = old[:at] + noise.bytes(count) + old[at + count :]
        elif plan.how == "zeros in it":
            new = old[:at] + bytes(len(old[at : at + 64 * count])) + old[at + 64 * count :]
        elif plan.how == "cut":
            new = old[:at]
        elif plan.how == "grown":
            new = old + noise.bytes(count)
        elif plan.how == "random":
            new = noise.bytes(len(old))
        elif plan.how == "all zeros":
            new = bytes(len(old))
        elif plan.how in ("foreign", "stale"):
            other = self.folder / f"{plan.kind}.{plan.how}" / plan.name
            new = other.read_bytes() if other.exists() else None
        elif plan.how == "swapped":
            new = (folder / plan.second).read_bytes()
            (folder / plan.second).write_bytes(old)
        else:
            new = None
        if new is None:
            path.unlink()
        else:
            path.write_bytes(new)
        return folder


def is_chunk(name):
    return ".zarr/c." in name


def bytes_in(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


class Killed(BaseException):
    pass


class DyingDisk(Disk):
    """Raises at the n-th change and at each after it; a write is cut in the middle."""

    def __init__(self, at, torn):
        super().__init__()
        self.left, self.torn = at, torn

    def before(self, change, path, *details):
        self.left -= 1
        if self.left < 0:
            if change == "write" and self.torn and self.left == -1:
                offset, data = details
                with open(path, "r+b") as file:
                    file.seek(offset)
                    file.write(bytes(data)[: len(bytes(data)) // 2])
            raise Killed


def readable(buf):
    """Yield `(number, columns, data)` of every episode that a buffer does not refuse as damaged."""
    for i in range(buf.num_episodes):
        try:
            columns = buf.load_episode(i)
            data = {name: v[0] for name, v in buf.get_episode_data(i).items()}
        except CorruptError:
            continue
        yield data["number"], columns, data


def faults_after_kill(folder, truth, touched=()):
    """Return what is wrong with half a repair: it is refused, or serves what is true, clips included.

    If `touched` names records whose rows are damaged, their episodes may be refused, and clips, which are not verified,
    are left out.
    """
    try:
        buf = ReplayBuffer.open(folder, "r+")
    except RingmapError:
        return []
    faults = []
    try:
        for number, columns, data in readable(buf) if touched else served(buf):
            faults.append(truth.fault(number, columns, data))
        if buf.num_episodes and not touched:
            clips = buf.sample(2 * CLIPS, history_len=1)
            for i in range(2 * CLIPS):
                faults.append(truth.clip_fault({name: v[i, 0] for name, v in clips.items()}))
    finally:
        buf.close()
    return [fault for fault in faults if fault is not None]


class Case:
    """One damaged buffer, judged."""

    def __init__(self, bench, plan):
        self.plan, self.how, self.name, self.rebooted = plan, plan.how, plan.name, plan.rebooted
        self.folder, self.truth = bench.damage(plan), bench.truths[plan.kind]
        self.before, self.after = bytes_in(bench.folder / plan.kind), bytes_in(self.folder)
        self.wrong = []
        self.seen = {}
        self.touched, self.hurt = set(), set()
        self.kept = self.whole = None
        for name in self.before:
            self._compare(name)

    def _compare(self, name):
        """Find out which episodes lost bytes in a file, and whether the damage matters at all."""
        old, new = self.before[name], self.after.get(name, b"")
        if old == new or name == "lock":
            return
        if name == "manifest.json":
            try:
                same = json.loads(old) == json.loads(new)
            except ValueError:
                same = False
            self.hurt |= set() if same else {name}
            return
        if name in self.truth.chunks:
            self._compare_chunk(name, old, new)
            return
        if is_chunk(name):  # of rows that are gone
            return
        longer = max(len(old), len(new))
        padded = (np.frombuffer(data.ljust(longer, b"\0"), np.uint8) for data in (old, new))
        changed = np.bitwise_xor(*padded)
        if name.startswith("columns/") and name not in self.after:
            changed[:] = 0xFF  # a column that is missing costs every episode, those whose rows are zeros, too
        if name.startswith("data/"):
            changed[min(len(old), len(new)) : len(old)] = 0xFF
        elif not name.startswith("open/") and len(old) != len(new):
            self.hurt.add(name)
        for span in self.truth.spans.get(name, []):
            if (changed[span.start : span.stop] & span.mask).any():
                self.hurt.add(name)
                if span.seq is not None:
                    self.touched.add(span.seq)

    def _compare_chunk(self, name, old, new):
        chunk = self.truth.chunks[name]
        before, after = chunk.rows_in(old), chunk.rows_in(new)
        for row, seq in chunk.live.items():
            if after is None or after[row] != before[row]:
                self.hurt.add(name)
                self.touched.add(seq)

    def judge(self):
        """Do everything that can be done with the buffer."""
        # After a reboot the newest records may be lost to the power cut, and nobody knows of them.
        oldest = min(self.touched, default=0)
        last_ones = self.touched == {seq for seq in self.truth.episodes if seq >= oldest}
        cut_off = self.name == "episodes.npy" and last_ones and oldest > self.truth.mark
        self.unknown = self.rebooted and cut_off
        self.findings = []
        for what in (self._check, self._open_for_reading, self._open_for_writing, self._repair):
            try:
                what()
            except Exception as error:
                self.wrong.append(f"{what.__name__} raised {type(error).__name__}: {error}")
        findings = self.findings
        return {
            "case": str(self.plan),
            "how": self.how,
            "kind": self.plan.kind,
            "rebooted": self.rebooted,
            "hurt": sorted(self.hurt),
            "findings": [str(f) for f in findings],
            "seen": self.seen,
            "kept": self.kept,
            "whole": self.whole,
            "wrong": self.wrong,
        }

    def _check(self):
        findings = self.findings = ringmap.check(self.folder)
        named = {finding.file for finding in findings}
        expected = {
            name.partition(".zarr/")[0] + ".zarr" if ".zarr/" in name else name
            for name in self.hurt
            if not (is_chunk(name) and "episodes.npy" in self.hurt)  # then nothing tells what was in it
        }
        if self.how != "flip":
            expected = {name for name in expected if not name.startswith("open/")}
        if self.how == "stale":
            expected -= {"manifest.json"}  # an older manifest is sound
            expected -= {"state.bin"} if self.rebooted else set()
        if self.unknown:
            expected -= {"episodes.npy"}
        if not expected <= named:
            self.wrong.append(f"unreported: {sorted(expected - named)}")
        # What lies in open/ is cut by a kill, too, and no byte of it is counted on.
        told = [f for f in findings if not (self.name.startswith("open/") and f.file.startswith("open/"))]
        if not self.hurt and told:
            self.wrong.append(f"false alarm: {findings[0]}")
        if bytes_in(self.folder) != self.after:
            self.wrong.append("check changed something")

    def _copy(self):
        folder = self.folder.with_name("copy")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return folder

    def _open_for_reading(self):
        self._open("r")

    def _open_for_writing(self):
        self._open("r+")

    def _open(self, mode):
        folder = self._copy() if mode == "r+" else self.folder
        try:
            buf = ReplayBuffer.open(folder, mode)
        except RingmapError as error:
            self.seen[mode] = "refused"
            if not (isinstance(error, DamageError) and any(name in str(error) for name in self._names())):
                self.seen[mode] = f"refused: {type(error).__name__}: {error}"
            return
        try:
            count = 0
            for number, columns, data in readable(buf):
                self._compare_episode(number, columns, data, mode)
                count += 1
            self.seen[mode] = f"served {count} of {buf.num_episodes}"
        except CorruptError:
            self.seen[mode] = "refused later"
        finally:
            buf.close()

    def _names(self):
        return [*self.before, "data/", "open/", ".zarr"]

    def _compare_episode(self, number, columns, data, where):
        fault = self.truth.fault(number, columns, data)
        if fault is not None:
            self.wrong.append(f"served wrong ({where}): {fault}")

    def _repair(self):
        try:
            planned = ringmap.repair(self.folder)
        except CorruptError as error:
            self._refused(error)
            return
        if bytes_in(self.folder) != self.after:
            self.wrong.append("a dry run changed something")
        self._kill_repairs()
        done = ringmap.repair(self.folder, dry_run=False)
        if self.plan.kills:
            done = planned  # some of it was done by those before
        elif [str(a) for a in planned] != [str(a) for a in done]:
            self.wrong.append(f"planned {planned}, did {done}")
        if not self.findings and done:
            self.wrong.append(f"repaired what was sound: {done}")
        if left := ringmap.check(self.folder):
            self.wrong.append(f"left after repair: {left[0]}")
        buf = ReplayBuffer.open(self.folder, "r+")
        numbers = []
        for number, columns, data in served(buf):
            self._compare_episode(number, columns, data, "repaired")
            numbers.append(number)
        if numbers:
            clips = buf.sample(CLIPS, history_len=1)
            for i in range(CLIPS):
                fault = self.truth.clip_fault({name: values[i, 0] for name, values in clips.items()})
                if fault is not None:
                    self.wrong.append(f"served wrong (clip, repaired): {fault}")
        expected = [n for seq, n in self.truth.episodes.items() if seq not in self.touched]
        extra = [n for n in numbers if n not in expected] if self.unknown else []
        if [n for n in numbers if n not in extra] != expected:
            self.wrong.append(f"kept {numbers}, expected {expected}")
        if not self.unknown:
            self._compare_drops(done, self.touched)
        buf.close()
        self.kept, self.whole = len(numbers), len(expected)
        self.seen["repair"] = f"kept {len(numbers)} of {len(self.truth.episodes)}" if done else "nothing to do"

    def _refused(self, error):
        """Accept that a file which is something else is named, and nothing changed."""
        self.seen["repair"] = f"refused: {error}"
        if self.how not in ("swapped", "foreign"):
            self.wrong.append(f"repair refused: {error}")
        try:
            ringmap.repair(self.folder, dry_run=False)
            self.wrong.append("the dry run alone refused")
        except CorruptError:
            pass
        if {n for n, d in bytes_in(self.folder).items() if d != self.after.get(n)} - {"lock"}:
            self.wrong.append("a refused repair changed something")

    def _kill_repairs(self):
        """Kill a repair, and the one that goes on after it, each before a change; what is left is refused or true."""
        killed = 0
        for at in self.plan.kills:
            try:
                repair_folder(DyingDisk(at, at % 2), str(self.folder), dry_run=False)
            except Killed:
                killed += 1
                self.wrong += [
                    f"served wrong (killed repair): {fault}"
                    for fault in faults_after_kill(self._copy(), self.truth, self.touched)
                ]
        self.seen["killed"] = killed

    def _compare_drops(self, actions, touched):
        """Compare what was reported as dropped with what is gone."""
        told = {action.seq for action in actions}
        for action in actions:
            if run := re.search(r"records (\d+) to (\d+)", action.what):
                told |= set(range(int(run[1]), int(run[2]) + 1))
        if not touched <= told:
            self.wrong.append(f"dropped without a word: records {sorted(touched - told)}")


def judge(bench, plan):
    """Damage a buffer and return what came of it."""
    case = Case(bench, plan)
    with booted(plan.rebooted):
        return case.judge()


def main(folder, seed, start, stop):
    logging.getLogger("ringmap").setLevel(logging.CRITICAL)
    undisturbed()
    bench = Bench(folder)
    for number in range(int(start), int(stop)):
        print(
            json.dumps({"number": number, **judge(bench, bench.draw(int(seed), number))}),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
