"""Forgeries: one field of one structure of a sound buffer is changed, and its checksum made right again.

    python -m tests.faults.damage.forge FOLDER SEED START STOP

Prints a JSON line per case. Runs in a process of its own, with little memory and time, so that a crash, a
hang or a vast allocation is seen. What may not happen, whatever was forged:

- anything but a `RingmapError` from opening, reading, sampling, writing, check or repair;
- `check` finds nothing, and something of that is refused, or serves what was never written;
- `check` finds something, and `repair` neither mends it nor refuses by name;
- an episode that was not touched is gone after a repair.
"""

import json
import logging
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault, NoClipsError, RingmapError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.disk.checksums import json_checksum
from tests.disks import undisturbed
from tests.faults.damage.buffers import KINDS as SOUND
from tests.faults.damage.buffers import booted, episode_of, make, rows_of, wrapped

SECONDS = 10  # of the processor: how busy the machine is says nothing
MORE_NBYTES = 1 << 30
MOST_NBYTES = 128 << 20

RECORD = struct.Struct("<QqqQQQIIIIQqqqqIIBBBBIQ")
RECORD_FIELDS = (
    "seq",
    "start",
    "tail",
    "first",
    "rows_sum",
    "blob_sum",
    "length",
    "blob_segment",
    "blob_offset",
    "blob_size",
    "ordinal",
    "time",
    "chain",
    "step",
    "previous",
    "number",
    "lane",
    "kind",
    "flags",
    "part",
    "reserved",
    "behind",
)
FLAGS = 113
STATE = struct.Struct("<8sQQQqqQQ16s")
STATE_FIELDS = ("magic", "generation", "seq", "first", "tail", "head", "mark", "era", "boot")


def prioritized(path, base=0, pause=lambda: None):
    return wrapped(path, base, pause, sampler=PrioritizedSampler(rng=0))


def dropped(path, base=0, pause=lambda: None):
    """One of its episodes was damaged, and dropped by a repair."""
    truth = wrapped(path, base, pause)
    newest = max(np.load(Path(path) / "episodes.npy"), key=lambda r: r["seq"])
    column = Path(path) / "columns/000-obs-x.npy"
    slot = int(newest["start"] - 5) % len(np.load(column))
    with open(column, "r+b") as file:
        file.seek(4096 + slot * 12)
        file.write(b"damage")
    assert ringmap.repair(path, dry_run=False)
    return truth


KINDS = {**SOUND, "prioritized": prioritized, "dropped": dropped}


BLOB_HEAD = struct.Struct("<IIIIIQ")


def parts_of(blob, segment):
    """Return the sums, the small state, the data and the words of a blob in this segment."""
    count, words, nbytes, at, size, _ = BLOB_HEAD.unpack_from(blob)
    stop = BLOB_HEAD.size + 8 * count
    sums, words = blob[BLOB_HEAD.size : stop], blob[stop : stop + words]
    return sums, segment[at : at + size], blob[len(blob) - nbytes :], words


def packed(at, sums, carried, data, words):
    """Return a blob that begins at byte `at` of its segment, and has the small state itself."""
    begin = at + BLOB_HEAD.size + len(sums) + len(words)
    place = begin, len(carried), xxhash.xxh3_64_intdigest(carried)
    head = BLOB_HEAD.pack(len(sums) // 8, len(words), len(data), *place)
    return head + sums + words + carried + data


# -- forging ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is forged: `where`, which field, and the new value, in words; `seq`: the record whose episode it costs."""

    kind: str
    where: str
    field: str
    value: str
    rebooted: bool
    seq: int | None = None
    newest: bool = False

    def __str__(self):
        return f"{self.kind}: {self.where}: {self.field} = {self.value}" + ", after a reboot" * self.rebooted


def number_near(rng, old, slots):
    """Return a number that somebody might put in the place of one."""
    known = [
        0,
        1,
        2,
        3,
        4,
        5,
        old - 1,
        old + 1,
        old - 2,
        old + 2,
        2 * old,
        old + slots,
        old - slots,
        1 << 16,
        1 << 31,
        1 << 33,
        1 << 40,
        1 << 48,
        (1 << 62) - 9,
        1 << 62,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
    ]
    return int(rng.choice(np.array([n % (1 << 64) for n in known if n != old], np.uint64)))


class Forger:
    """Changes the files of a buffer, each with a checksum that holds."""

    def __init__(self, folder, rng):
        self.folder, self.rng = Path(folder), rng
        self.body = json.loads((self.folder / "manifest.json").read_bytes())
        self.uuid = bytes.fromhex(self.body["uuid"].replace("-", ""))
        self.slots = self.body["table_slots"]

    def pick(self, given):
        return given[int(self.rng.integers(len(given)))]

    # records

    def record(self, slot):
        with open(self.folder / "episodes.npy", "rb") as file:
            file.seek(4096 + slot * 128)
            return dict(zip(RECORD_FIELDS, RECORD.unpack(file.read(128)), strict=False))

    def write_record(self, slot, fields):
        packed = RECORD.pack(*fields.values(), 0)
        summed = packed[:FLAGS] + bytes([packed[FLAGS] & 0x07]) + packed[FLAGS + 1 : 120]
        check = xxhash.xxh3_64_intdigest(summed, xxhash.xxh3_64_intdigest(self.uuid))
        with open(self.folder / "episodes.npy", "r+b") as file:
            file.seek(4096 + slot * 128)
            file.write(packed[:120] + check.to_bytes(8, "little"))

    def newest(self):
        return max(self.state(slot)[2] for slot in (0, 1))

    def numbers(self):
        """Return the numbers of the live range, and one more on each side."""
        newest = self.newest()
        if not newest:
            return []
        while self.record((newest + 1) % self.slots)["seq"] == newest + 1:
            newest += 1
        return list(range(self.record(newest % self.slots)["first"], newest + 1))

    def forge_record(self, seq):
        slot = seq % self.slots
        fields = self.record(slot)
        name = self.pick(RECORD_FIELDS)
        kind, old = RECORD.format[1 + RECORD_FIELDS.index(name)], fields[name]
        if name == "kind":
            fields[name] = self.pick([0, 1, 2, 3, 4, 5, 9, 255])
        elif kind == "B":
            fields[name] = int(self.rng.integers(256))
        else:
            value = number_near(self.rng, old, self.slots)
            fields[name] = value - (1 << 64) if kind == "q" and value >> 63 else value
            if kind == "I":
                fields[name] %= 1 << 32
        self.write_record(slot, fields)
        if self.rng.random() < 0.4 and seq == self.newest() and name in STATE_FIELDS:
            for slot in (0, 1):
                shown = self.state(slot)
                if shown[2] == seq:
                    shown[STATE_FIELDS.index(name)] = fields[name]
                    self.write_state(slot, shown)
            name += " and what state.bin shows of it"
        elif self.rng.random() < 0.3 and name in ("start", "tail") and seq == self.newest():
            head = fields["start"] + fields["length"]
            for slot in (0, 1):
                shown = self.state(slot)
                if shown[2] == seq and abs(head) < 1 << 63:
                    shown[4:6] = fields["tail"], head
                    self.write_state(slot, shown)
            name += " and what state.bin shows of it"
        return name, repr(fields[name.partition(" ")[0]])

    def add_record(self):
        """Add a record after the newest one, as a newer ringmap might."""
        newest = self.numbers()[-1]
        fields = self.record(newest % self.slots)
        fields.update(seq=newest + 1, start=fields["start"] + fields["length"], length=0)
        fields["kind"] = kind = self.pick([0, 1, 2, 3, 4, 200])
        self.write_record((newest + 1) % self.slots, fields)
        return "a record after the newest", f"of kind {kind}, without rows"

    # state.bin

    def state(self, slot):
        with open(self.folder / "state.bin", "rb") as file:
            file.seek(4096 * slot)
            return list(STATE.unpack(file.read(STATE.size)))

    def write_state(self, slot, fields):
        packed = STATE.pack(*fields)
        with open(self.folder / "state.bin", "r+b") as file:
            file.seek(4096 * slot)
            file.write(packed + xxhash.xxh3_64_intdigest(self.uuid + packed).to_bytes(8, "little"))

    def forge_state(self):
        at = 1 + int(self.rng.integers(len(STATE_FIELDS) - 1))
        name, which = STATE_FIELDS[at], self.pick([(0,), (1,), (0, 1)])
        told = []
        for slot in which:
            fields = self.state(slot)
            if name == "boot":
                fields[at] = self.pick([bytes(16), b"another boot id.", self.rng.bytes(16)])
            else:
                value = number_near(self.rng, fields[at], self.slots)
                fields[at] = value - (1 << 64) if name in ("tail", "head") and value >> 63 else value
            told.append(fields[at])
            self.write_state(slot, fields)
        return f"{name} in slots {which}", repr(told)

    # JSON

    def mutate(self, body, path=()):
        """Change something in a JSON value; return the path and what it became."""
        while True:
            keys = list(body) if isinstance(body, dict) else list(range(len(body)))
            key = self.pick(keys)
            old = body[key]
            path = (*path, key)
            if not (isinstance(old, dict | list) and old) or self.rng.random() < 0.15:
                break
            body = old
        if isinstance(body, dict) and self.rng.random() < 0.1:
            del body[key]
            return path, "gone"
        near = [number_near(self.rng, old, self.slots), old + 1, old - 1, float(old)] if type(old) is int else []
        deep = json.loads("[" * 60 + "]" * 60)
        known = [
            None,
            -1,
            0,
            1,
            1.5,
            1e300,
            1 << 33,
            1 << 55,
            1 << 70,
            "x",
            "",
            "é",
            [],
            {},
            [1],
            {"a": 1},
            True,
            deep,
        ]
        new = self.pick([*near, *near, *known])
        body[key] = new
        return path, json.dumps(new)[:60]

    def forge_manifest(self):
        del self.body["checksum"]
        path, value = self.mutate(self.body)
        self.body["checksum"] = json_checksum(self.body)
        (self.folder / "manifest.json").write_text(json.dumps(self.body, indent=1) + "\n")
        return "/".join(map(str, path)), value

    # blobs

    def forge_blob(self, seq):
        fields = self.record(seq % self.slots)
        segment = self.folder / f"data/{fields['blob_segment']:012d}.bin"
        data = segment.read_bytes()
        blob = data[fields["blob_offset"] : fields["blob_offset"] + fields["blob_size"]]
        name, value, new = self.forged(blob, data)
        segment.write_bytes(data + new)
        fields.update(blob_offset=len(data), blob_size=len(new), blob_sum=xxhash.xxh3_64_intdigest(new))
        self.write_record(seq % self.slots, fields)
        return name, value

    def forged(self, blob, segment):
        """Return what of a blob is forged, how, and the new one, which goes behind the segment. It has the small state
        itself."""
        head, (sums, carried, data, words) = BLOB_HEAD.unpack_from(blob), parts_of(blob, segment)
        what = self.pick(["head", "cut", "sums", "words", "carried", "carried", "data", "data"])
        if what == "head":
            parts = list(head)
            which = int(self.rng.integers(len(parts)))
            parts[which] = number_near(self.rng, parts[which], self.slots) % (1 << 32)
            return "blob head", repr(parts), BLOB_HEAD.pack(*parts) + blob[BLOB_HEAD.size :]
        if what == "cut":
            size = int(self.pick([0, 1, 27, 28, 29, len(blob) - 1, len(blob) // 2]))
            return "blob cut to", str(size), blob[:size]
        if what == "sums":
            sums = self.pick([sums[8:], sums + bytes(8), bytes(8) + sums[8:], b"", sums[::-1]])
            value = f"{len(sums) // 8} sums"
        elif what == "words":
            few = struct.pack("<II", 1, 1) + b"a"
            words = self.pick(
                [b"", words[:-1], words + b"x", few, struct.pack("<I", 1 << 31) + words, b"\xff" * len(words)]
            )
            value = repr(words[:30])
        elif what == "carried":
            known = [
                b"",
                b"[",
                b"[]",
                b"null",
                b"1",
                b"{}",
                b'"x"',
                b"[" * 100_000,
                b"\xff\xfe",
                b'{"a": NaN}',
                b'{"finished": 3}',
                b'{"finished": [1, null]}',
                b'{"finished": {}}',
                b'{"notes": [1]}',
                b'{"notes": null}',
                b'{"sampling": 1}',
                b'{"sampling": {}}',
                b'{"sampling": null}',
                b'{"sampling": {"step": 1, "rng": {"bit_generator": "os.system"}}}',
            ]
            carried = self.pick(known)
            value = repr(carried[:70])
            if self.rng.random() < 0.5:
                body = json.loads(parts_of(blob, segment)[1])
                if body:
                    path, value = self.mutate(body)
                    carried, value = (
                        json.dumps(body).encode(),
                        f"{'/'.join(map(str, path))} = {value}",
                    )
        elif not data or self.rng.random() < 0.3:
            data = self.pick(
                [
                    b"\0",
                    b"\xff" * 9,
                    struct.pack("<I", 2) + b"[]",
                    struct.pack("<I", 2) + b"{}",
                    data[:-1],
                    data + b"x",
                    struct.pack("<I", 90_000) + b"[" * 90_000,
                ]
            )
            value = repr(data[:30])
        else:
            size = int.from_bytes(data[:4], "little")
            heads = json.loads(data[4 : 4 + size])
            path, value = self.mutate(heads)
            text = json.dumps(heads).encode()
            data = len(text).to_bytes(4, "little") + text + data[4 + size :]
            value = f"{'/'.join(map(str, path))} = {value}"
        return f"blob {what}", value, packed(len(segment), sums, carried, data, words)

    def swap_blobs(self, seq):
        """Let a record name the blob of another one."""
        fields, others = self.record(seq % self.slots), [n for n in self.numbers() if n != seq]
        if not others:
            return "blob", "as it was"
        other = self.pick(others)
        theirs = self.record(other % self.slots)
        fields.update({name: v for name, v in theirs.items() if name.startswith("blob_")})
        self.write_record(seq % self.slots, fields)
        return "blob", f"that of record {other}"

    # open/

    def forge_stream(self):
        streams = sorted(self.folder.glob("open/*/steps.bin"))
        if not streams:
            return None
        data = streams[0].read_bytes()
        size = int.from_bytes(data[:4], "little")
        columns = json.loads(data[12 : 12 + size])
        path, value = self.mutate(columns)
        text = json.dumps(columns).encode()
        head = struct.pack("<IQ", len(text), xxhash.xxh3_64_intdigest(text, seed=0))
        streams[0].write_bytes(head + text + data[12 + size :])
        return "frame 0: " + "/".join(map(str, path)), value


class Bench:
    """Sound buffers, and what is true of them."""

    def __init__(self, folder, kinds=KINDS):
        self.folder = Path(folder)
        self.truths = {}
        SOUND.update(prioritized=prioritized, dropped=dropped)
        try:
            for kind in kinds:
                self.truths[kind] = make(kind, self.folder / kind)
        finally:
            del SOUND["prioritized"], SOUND["dropped"]

    def case(self, seed, number):
        """Forge something in a copy of a buffer; return what, and where it is."""
        rng = np.random.default_rng((*str(seed).encode(), number))
        kind = str(rng.choice(list(self.truths)))
        where = str(
            rng.choice(
                ["record", "blob", "state", "manifest", "added", "swapped", "stream"],
                p=[0.3, 0.25, 0.18, 0.2, 0.02, 0.03, 0.02],
            )
        )
        folder = self.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / kind, folder)
        forger = Forger(folder, rng)
        numbers = forger.numbers()
        rebooted, seq = bool(rng.random() < 0.3), None
        forged = None
        if where in ("record", "blob", "swapped"):
            live = [n for n in numbers if n in self.truths[kind].episodes]
            wanted = live if live and where != "record" else numbers
            seq = int(rng.choice([*wanted, wanted[-1]]))
            forged = {
                "record": forger.forge_record,
                "blob": forger.forge_blob,
                "swapped": forger.swap_blobs,
            }[where](seq)
        elif where == "state":
            forged = forger.forge_state()
            shown = max(map(forger.state, (0, 1)), key=lambda fields: fields[1])[2]
            if forged[0].startswith("generation") and shown == numbers[-1] - 1:
                # This is the state before the newest commit: its episode may be lost.
                seq = numbers[-1]
        elif where == "added":
            forged = forger.add_record()
        elif where == "stream":
            forged = forger.forge_stream()
        if forged is None:
            where, forged = "manifest", forger.forge_manifest()
        name = f"{where} {seq}" if seq else where
        return Plan(kind, name, *forged, rebooted, seq, seq is not None and seq == numbers[-1]), folder


# -- judging ---------------------------------------------------------------------------------------


class Hung(BaseException):
    """It did not come back."""


def _hang(*_):
    raise Hung


def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


@dataclass
class Outcome:
    """`value`: what came back; `error`: of ours; `wrong`: anything else."""

    value: object = None
    error: RingmapError | None = None
    wrong: str = ""

    @property
    def refused(self):
        return self.error is not None


def attempt(what):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    base, began = peak(), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        outcome = Outcome(what())
    except Hung:
        outcome = Outcome(wrong="hung")
    except EnvironmentFault as error:
        outcome = Outcome(error=error, wrong="" if error.errno else f"{error!r}")
    except RingmapError as error:
        outcome = Outcome(error=error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome(wrong=f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if peak() - base > MOST_NBYTES:
        outcome.wrong += f"took {(peak() - base) >> 20} MiB"
    if time.process_time() - began > SECONDS / 2:
        outcome.wrong += "took long"
    return outcome


def read_all(buf):
    """Return all that a buffer serves: (rows, data) of each episode; samples too."""
    found = []
    for i in range(buf.num_episodes):
        columns = buf.load_episode(i)
        found.append((columns, dict(buf.get_episode_data(i))))
    assert len(list(buf.episodes())) == len(found)
    try:
        found_clips = buf.sample(8, history_len=1)
        # A forged frameskip is a legal setting: the actions of the steps between come with the clip.
        if "action" in found_clips:
            found_clips["action"] = found_clips["action"].reshape(8, 1, -1)[:, :, :1]
    except NoClipsError:
        found_clips = {}
    if buf.num_episodes:
        buf.get_episode_data()
    return found, found_clips


def read(folder, plan):
    buf = ReplayBuffer.open(folder, "r")
    try:
        return read_all(buf)
    finally:
        buf.close()


def write(folder, plan):
    """Open for writing, read, write one more episode; read it back in another handle."""
    twins = plan.kind.startswith("retiring")
    buf = ReplayBuffer.open(folder, "r+", interrupted="keep")
    try:
        found = read_all(buf)
        buf.write_episode(episode_of(77, 3, twins))
        buf.flush()
    finally:
        buf.close()
    buf = ReplayBuffer.open(folder, "r")
    try:
        last = buf.load_episode(-1)
        assert all(np.array_equal(last[k], v) for k, v in rows_of(77, 3, twins).items())
    finally:
        buf.close()
    return found


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def number_in(columns):
    return int(str(np.ravel(columns["name"])[0]).partition(":")[0])


class Judge:
    """What is wrong with how a forged buffer was met."""

    def __init__(self, bench, plan, folder):
        self.bench, self.plan, self.folder = bench, plan, folder
        self.truth, self.wrong, self.seen = bench.truths[plan.kind], [], {}

    def attempt(self, name, what):
        outcome = attempt(what)
        if outcome.wrong:
            self.wrong.append(f"{name}: {outcome.wrong}")
        self.seen[name] = (
            f"{type(outcome.error).__name__}: {outcome.error}" if outcome.error else outcome.wrong or "works"
        )
        return outcome

    def copy(self):
        folder = self.folder.with_name("copy")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return folder

    def fault_in(self, found):
        """Return what was served that was never written, by its rows: data of a blob may be forged."""
        episodes, clips = found
        for columns, _ in episodes:
            try:
                number = number_in(columns)
                if same(columns, self.truth.rows(number)):
                    continue
            except (ValueError, KeyError):
                pass
            if number_in(columns) == 99:  # the one that was being recorded
                continue
            return "an episode that was never written"
        for i in range(len(next(iter(clips.values()), ()))):
            if not str(np.ravel(clips["name"][i])[0]).startswith("99:"):
                fault = self.truth.clip_fault({k: v[i, 0] for k, v in clips.items()})
                if fault:
                    return fault
        return None

    def judge(self):
        checked = self.attempt("check", lambda: ringmap.check(self.folder))
        if checked.refused:
            self.wrong.append(f"check refused: {checked.error!r}")
        findings = checked.value or []
        reading = self.attempt("open r", lambda: read(self.folder, self.plan))
        writing = self.attempt("open r+", lambda: write(self.copy(), self.plan))
        if checked.value == []:
            for name, outcome in (("open r", reading), ("open r+", writing)):
                if outcome.refused:
                    self.wrong.append(f"sound, but {name}: {outcome.error}")
                elif outcome.value and (fault := self.fault_in(outcome.value)):
                    self.wrong.append(f"sound, but {name} serves {fault}")
        self.repair(findings)
        return {
            "case": str(self.plan),
            "findings": [str(f) for f in findings],
            "seen": self.seen,
            "wrong": self.wrong,
        }

    def repair(self, findings):
        folder = self.copy()
        planned = self.attempt("repair, dry", lambda: ringmap.repair(folder))
        done = self.attempt("repair", lambda: ringmap.repair(folder, dry_run=False))
        if planned.refused or done.refused:
            if not findings:
                self.wrong.append(f"sound, but repair: {done.error or planned.error}")
            return
        if planned.value is None or done.value is None:
            return
        if [str(a) for a in planned.value] != [str(a) for a in done.value]:
            self.wrong.append(f"planned {planned.value}, did {done.value}")
        if not findings and done.value:
            self.wrong.append(f"repaired what was sound: {done.value[0]}")
        if left := ringmap.check(folder):
            self.wrong.append(f"left after repair: {left[0]}")
        found = self.attempt("repaired, open r", lambda: read(folder, self.plan))
        if found.refused:
            self.wrong.append(f"repaired, but open r: {found.error}")
        if found.value:
            fault = self.fault_in(found.value)
            if fault:
                self.wrong.append(f"repaired, but serves {fault}")
            kept = {number_in(columns) for columns, _ in found.value[0]}
            expected = {n for seq, n in self.truth.episodes.items() if seq != self.plan.seq}
            if self.plan.newest and self.plan.field.startswith(("tail", "first")):  # its word is what is live
                expected = set()
            if not expected <= kept:
                self.wrong.append(f"lost whole episodes: {sorted(expected - kept)} of {len(expected)}")
        again = self.attempt("repaired, open r+", lambda: write(folder, self.plan))
        if again.refused:
            self.wrong.append(f"repaired, but open r+: {again.error}")


def judge(bench, plan, folder):
    with booted(plan.rebooted):
        return Judge(bench, plan, folder).judge()


def main(folder, seed, start, stop):
    logging.getLogger("ringmap").setLevel(logging.CRITICAL)
    undisturbed()
    bench = Bench(folder)
    judge(bench, *bench.case(seed, 0))  # imports what it takes
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MORE_NBYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _hang)
    for number in range(int(start), int(stop)):
        result = judge(bench, *bench.case(seed, number))
        print(json.dumps({"number": number, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
