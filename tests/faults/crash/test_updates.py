"""Values that change, in a whole buffer: what a kill or a power cut may leave of them.

Scripts of episodes, updates, syncs, closes, kills and errors run on a recording disk. After each change of the disk a
kill, and
several power cuts, are tried: what is left is opened by the real code, which is killed and cut in its turn. A value
tells its episode, its step and its update, in all its bytes.
"""

import errno
import os
from dataclasses import dataclass, field

import numpy as np
import pytest

import ringmap
from ringmap import Column, ReplayBuffer
from ringmap.errors import CorruptError, EnvironmentFault, SyncFailedError
from ringmap.storage.sidecars import values
from ringmap.storage.sidecars.values import MutableValues
from tests.disks import ram_folder
from tests.faults.crash.harness import LEVELS, Draw, Subject, Violation, at_length, crash
from tests.faults.crash.recording import Always, Model, materialise
from tests.tiers import few

__all__ = ["crash"]

SCHEMA = {
    "at": ((2,), "<i8"),
    "latent": Column((20,), "<i8", mutable=True),
    "label": Column((), "<i4", mutable=True),
}


@dataclass(frozen=True)
class Values:
    """Numbers of updates by row, `(episode, step)`: `last`, that have returned; `synced`, that no cut takes at "power";
    `most`, that were begun."""

    last: dict = field(default_factory=dict)
    synced: dict = field(default_factory=dict)
    most: dict = field(default_factory=dict)


def latent_of(rows, update):
    values = [episode * 10**6 + step * 1000 + update for episode, step in rows]
    return np.repeat(np.array(values)[:, None], 20, 1)


def look(buf):
    """Return the number of each row's newest update, having compared every byte; -1 where it was stored without a
    value."""
    found, position = {}, 0
    whole = [buf.load_episode(i) for i in range(buf.num_episodes)]
    names = ("at", "latent", "label") if whole else ()
    quick = {name: buf.get_col_data(name) for name in names}
    for episode in whole:
        for at, latent, label in zip(*(episode[name] for name in names), strict=True):
            row = tuple(at.tolist())
            value = int(latent[0])
            assert (latent == value).all(), f"torn at {row}: {latent}"
            assert value == 0 or value // 1000 == row[0] * 1000 + row[1], f"{value} at {row}"
            assert label == value % 1000, f"{label} and {value} at {row}"
            assert (quick["latent"][position] == value).all(), f"{row} read in two ways"
            found[row] = value % 1000 if value else -1
            position += 1
    return found


class Updates(Subject):
    """A buffer with values that change, from one crash to the next."""

    max_steps = 9

    def __init__(self, case, root, tree, boot, expect, *more, **options):
        super().__init__(case, root, tree, boot, expect, *more, **options)
        self.updates = max(expect.most.values(), default=0)
        self.episodes = max((episode for episode, _ in expect.most), default=0)

    @classmethod
    def nothing(cls, case):
        return Values()

    def inherit(self, before, expect, boots):
        pass

    def make(self):
        return ReplayBuffer(
            self.max_steps,
            path=self.path,
            schema=SCHEMA,
            spare_rows=4,
            seed=3,
            sync_every_s=0,
            durability=self.level,
            disk=self.disk,
        )

    def read(self):
        """Judge what a reader shows after a kill, before a writer has recovered anything."""
        if not self.cut and os.path.exists(os.path.join(self.path, "manifest.json")):
            with ReplayBuffer.open(self.path, "r", disk=self.disk) as self.buf:
                self.judge(self.now, self.cut)
            self.buf.close()
            self.buf = None

    def open(self):
        expect = self.now
        self.buf = self.make()
        self.during(expect)
        seen = self.judge(expect, self.cut)
        findings = [f for f in ringmap.check(self.path) if f.file == "mutable.bin"]
        assert not findings, findings
        self.buf.flush()
        self.after(Values(seen, dict(seen), {**expect.most, **seen}))
        self.opened()

    def judge(self, expect, cut):
        """Return what is there, having compared it with what a crash may show."""
        seen = look(self.buf)
        low = expect.last if not cut else expect.synced if self.power else {}
        for row, update in seen.items():
            least, most = low.get(row, -1), expect.most.get(row, -1)
            assert least <= update <= most, f"{row} has {update}, expected {least} to {most}"
        return seen

    def call(self, do, begun=None, fault=None, synced=False):
        """Make a call; `synced`: at any level it makes all values durable, at "power" those of the rows in `begun`."""
        before = self.now
        self.during(Values(before.last, before.synced, {**before.most, **(begun or {})}))
        returned = self.attempt(do, fault, partial=True)
        if returned is None:
            return
        seen = self.judge(self.now, False)
        lost = {row for row in begun or () if returned and seen.get(row, begun[row]) != begun[row]}
        assert not lost, f"the values of {lost} are not there after a call that returned"
        done = {row: n for row, n in before.synced.items() if row in seen}
        if returned and synced:
            done = dict(seen)
        elif returned and self.power:
            # What an interrupted update left is durable with the next sync of values.
            done |= {row: seen[row] for row in begun or () if row in seen}
        self.after(Values(seen, done, self.now.most))

    def step(self, rng):
        kinds, odds = ["write", "update", "flush", "sync", "clear", "close", "kill"], [4, 8, 1, 1.5, 0.3, 0.7, 0.7]
        kind, ring = rng.choices(kinds, odds)[0], self.buf
        if kind == "write":
            self.episodes += 1
            rows = [(self.episodes, step) for step in range(rng.randint(1, 5))]
            given = {"at": np.array(rows)}
            if rng.random() < 0.5:
                given |= {"latent": latent_of(rows, 0), "label": np.zeros(len(rows))}
            number = 0 if "latent" in given else -1
            self.call(lambda: ring.write_episode(given), dict.fromkeys(rows, number), self.fault(rng, 5))
        elif kind == "update" and ring.num_episodes:
            self.updates += 1
            rows = sorted(look(ring))
            count = rng.randint(1, min(3, len(rows)))
            first = rng.randrange(len(rows) - count + 1)
            some = rows[first : first + count] if rng.random() < 0.5 else rng.sample(rows, count)
            live = ring.engine.source.live
            by_episode = {ring.load_episode(i)["at"][0, 0]: int(s) for i, s in enumerate(live.starts)}
            ids = [by_episode[episode] + step for episode, step in some]
            values = {"latent": latent_of(some, self.updates), "label": np.full(count, self.updates)}
            begun = dict.fromkeys(some, self.updates)
            self.call(lambda: ring.update(ids, values), begun, self.fault(rng, 5), synced=self.power)
        elif kind == "flush":
            self.call(ring.flush, synced=True)
        elif kind == "sync":
            self.call(ring.engine.owned.sync_behind, synced=True)
        elif kind == "clear":
            self.call(ring.clear)
        elif kind in ("close", "kill"):
            if kind == "close":
                self.call(ring.flush, synced=True)
                ring.close()
            else:
                self.kill()
            self.open()


@LEVELS
def test_a_value_is_whole_and_of_its_own_row(crash, power):
    assert crash(Updates, Draw(power), 1, samples=0, share=0.06, prefixes=0.12, kills=1, halves=True).states > 10


@pytest.mark.campaign
@LEVELS
def test_values_at_length(crash, power):
    at_length(lambda seed: crash(Updates, Draw(power, 12), seed, samples=1, share=0.06, prefixes=0.4, kills=1).states)


def written_in_place(patch):
    patch.setattr(values, "_OTHER", np.array([0, 1]))


def without_checksums(patch):
    patch.setattr(values, "_checks_of", lambda rows, seed: np.full(len(rows), 7))


def never_synced(patch):
    patch.setattr(MutableValues, "sync", lambda self, note=True: None)


def nothing_is_blanked(patch):
    patch.setattr(MutableValues, "_blank", lambda self, slots, which: None)


def every_boot_is_this_one(patch):
    patch.setattr(values._Header, "is_of", lambda self, boot: True)


PLANTED = [
    (written_in_place, False),
    (without_checksums, False),
    (never_synced, True),
    (nothing_is_blanked, False),
    (every_boot_is_this_one, False),
]


@pytest.mark.parametrize(("plant", "power"), few(PLANTED, 3))
def test_the_campaign_sees_a_missing_guard(crash, monkeypatch, plant, power):
    plant(monkeypatch)
    with pytest.raises(Violation) as caught:
        for seed in range(30):
            crash(Updates, Draw(power), seed, samples=1, prefixes=0.4, share=0.06, kills=1, halves=True)
    print(f"{plant.__name__}: {crash.last.states} states of script {seed}: {caught.value.__cause__}")


# -- one cut each, and its control ------------------------------------------------------------------


def cut_after(folder, power, *calls):
    """Return what is there after a power cut that loses all that no sync covers, but for the values."""
    root = os.path.join(folder, "first")
    materialise({}, root)
    session = Updates(Draw(power), root, {}, 1, Values(), False)
    session.open()
    for call in calls:
        call(session.buf)
    session.kill()
    model = Model({})
    for change in session.disk.log:
        model.apply(change)
    tree, kept = model.crash(Always(0)), model.live()
    if not power:
        tree["buf"]["mutable.bin"] = kept["buf"]["mutable.bin"]
    tree["buf"].pop("lock", None)
    again = os.path.join(folder, "again")
    materialise(tree, again)
    session = Updates(Draw(power), again, tree, 2, Values(), False)
    session.buf = session.make()
    return session.buf


def store(number, length=3):
    rows = [(number, step) for step in range(length)]
    return lambda buf: buf.write_episode({"at": np.array(rows)})


def put(number, position, update):
    rows = [(number, 0)]
    values = {"latent": latent_of(rows, update), "label": [update]}
    return lambda buf: buf.update([position], values)


def the_next_row_has_no_value_of_one_that_was_lost(folder):
    buf = cut_after(folder, False, store(1), ReplayBuffer.flush, store(2), put(2, 3, 1))
    assert look(buf) == dict.fromkeys([(1, 0), (1, 1), (1, 2)], -1)
    store(3)(buf)
    assert look(buf)[3, 0] == -1
    buf.close()


def an_update_at_power_is_durable(folder):
    buf = cut_after(folder, True, store(1), put(1, 0, 1), put(1, 0, 2))
    assert look(buf)[1, 0] == 2
    buf.close()


CUTS = [the_next_row_has_no_value_of_one_that_was_lost, an_update_at_power_is_durable]


@pytest.mark.parametrize("judge", CUTS)
def test_one_cut(judge):
    with ram_folder() as folder:
        judge(str(folder))


@pytest.mark.parametrize("judge", CUTS)
def test_a_missing_guard_is_seen(monkeypatch, judge):
    monkeypatch.setattr(values._Header, "is_of", lambda self, boot: True)
    monkeypatch.setattr(MutableValues, "sync", lambda self, note=True: None)
    with ram_folder() as folder, pytest.raises(AssertionError):
        judge(str(folder))


# -- an update that stops in the middle ---------------------------------------------------------------

ROWS = [(1, 0), (1, 1), (1, 2)]

STOPS = {
    "between two rows": (2, KeyboardInterrupt(), False),
    "between two rows, and the disk fails": (2, OSError(errno.EIO, "planted"), True),
    "within a row, and the disk fails": (1, OSError(errno.EIO, "planted"), True),
}
"""The change before which an update stops, with which error, and whether the disk then fails until it is mended."""


def stopped_update(folder, power, stop, close):
    """Stop update 2 of rows 0 and 2 in the middle, update row 1, flush, and close the buffer or kill its writer; open
    it in the same boot, and after a power cut."""
    at, error, sticky = STOPS[stop]
    root = os.path.join(folder, "first")
    materialise({}, root)
    session = Updates(Draw(power), root, {}, 1, Values(), False)
    buf = session.buf = session.make()
    store(1)(buf)
    buf.update([0, 1, 2], {"latent": latent_of(ROWS, 1), "label": [1, 1, 1]})
    some = [ROWS[0], ROWS[2]]
    session.disk.fail(at, error, sticky, partial=True)
    changes = []

    def torn_once(change, path):  # else half of what blanks the copy again would do
        changes.append(change)
        session.disk.partial = len(changes) <= at

    session.disk.hook = torn_once
    with pytest.raises((KeyboardInterrupt, EnvironmentFault)):
        buf.update([0, 2], {"latent": latent_of(some, 2), "label": [2, 2]})
    session.disk.lift()
    session.disk.hook = None
    buf.update([1], {"latent": latent_of([ROWS[1]], 3), "label": [3]})
    buf.flush()
    judge_stopped(buf, root)
    if close:
        buf.close()
    else:
        session.kill()
    tree = session.disk.model.live()
    model = Model({})
    for change in session.disk.log:
        model.apply(change)
    for name, left, boot in (("kill", tree, 1), ("cut", model.crash(Always(0)), 2)):
        left["buf"].pop("lock", None)
        again = os.path.join(folder, name)
        materialise(left, again)
        after = Updates(Draw(power), again, left, boot, Values(), False)
        buf = after.buf = after.make()
        judge_stopped(buf, again)
        buf.update([0, 2], {"latent": latent_of(some, 4), "label": [4, 4]})
        assert look(buf) == {ROWS[0]: 4, ROWS[1]: 3, ROWS[2]: 4}
        after.kill()


def judge_stopped(buf, root):
    seen = look(buf)
    assert seen.pop(ROWS[1]) == 3
    assert set(seen.values()) <= {1, 2}, seen
    assert ringmap.check(os.path.join(root, "buf")) == []


@LEVELS
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("close", [True, False])
def test_an_update_that_stops_in_the_middle_is_no_damage(tmp_path, power, stop, close):
    stopped_update(str(tmp_path), power, stop, close)


@LEVELS
def test_control_what_a_stopped_update_tore_stays(tmp_path, power, monkeypatch):
    """Later updates are synced, and so it counts as whole: at the latest once the file is closed."""
    monkeypatch.setattr(MutableValues, "undo", lambda self: None)
    with pytest.raises(CorruptError, match="is damaged"):
        stopped_update(str(tmp_path), power, "within a row, and the disk fails", True)


def unsynced_headers(session, since):
    """Yield the places of headers that a power cut may tear, after each change of the disk from number `since` on."""
    node, places = session.disk.model.find(["buf", "mutable.bin"]), set()
    for change, number, *details in session.disk.log[since:]:
        if number == node:
            if change == "write" and details[0] < 8192:
                places.add(details[0])
            elif change == "sync":
                places.clear()
            yield set(places)


def is_sync_of_values(change, path):
    if change == "sync" and path.endswith("mutable.bin"):
        raise OSError(errno.EIO, "planted")


@pytest.mark.parametrize("ends", ["closed", "failed"])
def test_a_cut_tears_one_header_at_most(tmp_path, ends):
    """A flush notes in a header what it made durable, a close that all is, a failed sync that it failed: no sync covers
    these."""
    materialise({}, str(tmp_path / "first"))
    session = Updates(Draw(False), str(tmp_path / "first"), {}, 1, Values(), False)
    session.buf = session.make()
    store(1)(session.buf)  # makes the file
    since = len(session.disk.log)
    for call in (put(1, 0, 1), ReplayBuffer.flush):
        call(session.buf)
    if ends == "failed":
        put(1, 0, 2)(session.buf)
        session.disk.hook = is_sync_of_values
        with pytest.raises(SyncFailedError):
            session.buf.flush()
        session.disk.hook = None
    session.buf.close()
    assert max(map(len, unsynced_headers(session, since))) == 1
