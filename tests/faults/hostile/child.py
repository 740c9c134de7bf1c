"""Opens what is hostile, in a process of its own: little memory, little time, and eyes on what lies outside.

python child.py KIND ... -> a line of JSON per case and surface
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import hashlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
sys.path.insert(0, ROOT)

MORE_NBYTES = 3 << 30  # of address space, than once everything is imported
SECONDS = 10

_EVENTS = 0xFFF  # whatever is done to a file: opened, read, written, removed ...


class Hung(BaseException):
    """A surface did not come back."""


def _hang(*_):
    raise Hung


class Eyes:
    """Tell what is opened, read or changed in a folder, by whichever library; nothing where the system can't.

    One of them looks at one folder after the other: to close one takes the system 10 ms.
    """

    def __init__(self):
        self.fd = -1
        with contextlib.suppress(AttributeError, OSError):
            self._libc = ctypes.CDLL(None, use_errno=True)
            self.fd = self._libc.inotify_init1(os.O_NONBLOCK)

    def open_at(self, folder):
        """Look at a folder, and at those in it."""
        if self.fd >= 0:
            for at, _, _ in os.walk(folder):
                self._libc.inotify_add_watch(self.fd, os.fsencode(at), _EVENTS)
            self._read()  # what the walk itself did, and what was done since to the folder before

    def _read(self):
        found = b""
        with contextlib.suppress(OSError):
            while events := os.read(self.fd, 1 << 20):
                found += events
        return found

    def seen(self):
        """Return what was done since."""
        events, found = self._read(), []
        while events:
            mask, size = (
                int.from_bytes(events[4:8], "little"),
                int.from_bytes(events[12:16], "little"),
            )
            found.append(f"{mask:x} {events[16 : 16 + size].strip(bytes(1)).decode()}")
            events = events[16 + size :]
        return found


def state_of(folder):
    """Return what lies in a folder, to the byte."""
    found = {}
    for at, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(at, name)
            stat = os.lstat(path)
            content = ""
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
            found[os.path.relpath(path, folder)] = [
                stat.st_mode,
                stat.st_size,
                stat.st_mtime_ns,
                content,
            ]
    return found


def peak():
    """Return the most memory this process held since `forget_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


# -- surfaces --------------------------------------------------------------------------------------


def told(value):
    """Return all that was read, as bytes: whoever reads what he should not shows it."""
    if isinstance(value, dict):
        return b"".join(told(k) + told(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(told, value))
    if hasattr(value, "numpy"):
        value = value.numpy()
    return value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()


def open_buffer(mode, kind):
    def run(at, place):
        from ringmap import ReplayBuffer, TransitionReplayBuffer

        cls = TransitionReplayBuffer if kind == "transitions" else ReplayBuffer
        options = {"interrupted": "keep"} if mode == "r+" and kind != "transitions" else {}
        buf = cls.open(at, mode, **options)
        try:
            if kind == "transitions":
                return told(buf.sample(4))
            return told(list(buf.episodes()))
        finally:
            buf.close()

    return run


def check(at, place):
    import ringmap

    return [str(finding) for finding in ringmap.check(at)]


def repair(dry_run):
    def run(at, place):
        import ringmap

        ringmap.repair(at, dry_run=dry_run)
        return b""

    return run


def snapshot(at, place):
    from ringmap import ReplayBuffer

    buf = ReplayBuffer.open(at)
    try:
        buf.snapshot(os.path.join(place, "copy"))
    finally:
        buf.close()
    return b""


def load(at, place, **options):
    from ringmap.data import load_dataset

    dataset = load_dataset(at, **options)
    try:
        found = [told(dataset.load_episode(i)) for i in range(min(4, len(dataset.lengths)))]
        if len(dataset):
            found += [told(clip) for clip in dataset.__getitems__([0, len(dataset) - 1])]
        return b"".join(found) + told(dataset.get_episode_data())
    finally:
        dataset.close()


def convert(at, place, source_format=None):
    from ringmap.data import convert

    copy = os.path.join(place, "copy.h5")
    convert(at, copy, dest_format="hdf5", source_format=source_format, progress=False)
    return b""


def stream(at, place):
    from ringmap.data import detect_format, get_format

    if detect_format(at) is None:
        return load(at, place)  # it says what it is not
    found = get_format("rlds").open_stream(at)
    return b"".join(told(columns) + told(data) for columns, data in found)


def load_rollout(at, place):
    from tests.faults.hostile.sound import empty_rollout

    buf = empty_rollout()
    buf.load(at)
    return b""


def surfaces(kind):
    from tests.faults.hostile.makers import FORMATS

    if kind == "rollout":
        return {"load": load_rollout}
    if kind in FORMATS:
        if kind == "rlds":
            return {"stream": stream, "convert": convert}
        given = "robomimic" if kind == "robomimic" else None  # it ends as any HDF5 file
        return {
            "load": functools.partial(load, format=given),
            "convert": functools.partial(convert, source_format=given),
        }
    found = {
        "open r": open_buffer("r", kind),
        "open r+": open_buffer("r+", kind),
        "check": check,
        "repair, dry": repair(True),
        "repair": repair(False),
    }
    return found | (
        {} if kind == "transitions" else {"snapshot": snapshot, "as a dataset": functools.partial(load, output="numpy")}
    )


# -- running ---------------------------------------------------------------------------------------


EYES = Eyes()


def prepare(place, sound, kind, harm):
    """Make a place with a hostile thing in it, and a folder outside; return both paths."""
    from tests.faults.hostile.makers import SECRET
    from tests.faults.hostile.sound import SUFFIX

    out = os.path.join(place, "out")
    os.makedirs(os.path.join(out, "victim"))
    for name in (
        "victim/ep_0_step_0.png",
        "victim/ep_9_step_0.png",
        "victim/steps.bin",
        "victim/a.npz",
        "secret",
    ):
        with open(os.path.join(out, name), "wb") as file:
            file.write(SECRET)
    at = os.path.join(place, "given" + SUFFIX.get(kind, ""))
    for name in os.listdir(sound):
        source, target = os.path.join(sound, name), os.path.join(place, name)
        if os.path.isdir(source):
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy(source, target)
    harm(at, out)
    return at, out


def attempt(run, at, out, place):
    from ringmap.errors import RingmapError

    before = state_of(out)
    gc.collect()  # what an earlier case left open is closed now
    EYES.open_at(out)
    forget_peak()
    base, start = peak(), time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        found = run(at, place)
        outcome = {
            "kind": "found" if isinstance(found, list) else "opened",
            "told": "\n".join(found) if isinstance(found, list) else "",
        }
        data = b"" if isinstance(found, list) else found
    except Hung:
        outcome, data = {"kind": "hung", "told": ""}, b""
    except RingmapError as error:
        outcome, data = {"kind": "refused", "told": f"{type(error).__name__}: {error}"}, b""
    except BaseException as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        outcome, data = {"kind": "raw", "told": f"{type(error).__name__}: {error}\n{where}"}, b""
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    from tests.faults.hostile.makers import SECRET

    seconds, most, seen = time.perf_counter() - start, peak() - base, EYES.seen()
    return outcome | {
        "seconds": seconds,
        "nbytes": most,
        "seen": seen,
        "leaked": SECRET in data or SECRET.decode() in outcome["told"],
        "changed": state_of(out) != before,
    }


def main(kinds):
    from tests.disks import undisturbed
    from tests.faults.hostile.makers import CASES
    from tests.faults.hostile.sound import KINDS, SUFFIX

    undisturbed(peeks=200)  # half of them with a sleep
    faulthandler.dump_traceback_later(850, exit=True)  # a busy machine is no hang
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as home:
            sound = os.path.join(home, "sound")
            os.mkdir(sound)
            KINDS[kind](os.path.join(sound, "given" + SUFFIX.get(kind, "")))
            runs = surfaces(kind)
            # Once on what is sound, which imports what it takes, and shows that it can be opened.
            for name, run in runs.items():
                place = os.path.join(home, "first " + name)
                at, out = prepare(place, sound, kind, lambda at, out: None)
                run(at, place)
                shutil.rmtree(place)
                at, out = prepare(place, sound, kind, lambda at, out: None)
                print(
                    json.dumps({"case": f"{kind}: sound", "surface": name} | attempt(run, at, out, place)), flush=True
                )
            with open("/proc/self/statm") as file:
                taken = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + MORE_NBYTES, resource.RLIM_INFINITY))
            signal.signal(signal.SIGALRM, _hang)
            for number, (name, case) in enumerate(CASES.items()):
                for surface, run in runs.items() if case.kind == kind else ():
                    place = os.path.join(home, f"{number} {surface}")
                    at, out = prepare(place, sound, kind, case.harm)
                    result = attempt(run, at, out, place)
                    print(json.dumps({"case": name, "surface": surface} | result), flush=True)
                    shutil.rmtree(place)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.argv[1:])
