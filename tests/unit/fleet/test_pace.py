"""The pace: both sides wait for each other, for nobody who is dead, and never for themselves; counts survive."""

import contextlib
import errno
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap import Pace, ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import CorruptError, EnvironmentFault, InputError, LockedError, NoClipsError
from ringmap.storage.disk.checksums import decode_signed, encode_signed
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from ringmap.storage.inspect.describe import facts_of
from ringmap.testing.kills import killed_after, reason_why_not
from tests.unit.fleet.paced import BATCH, COMMIT, NUMBERS, collect, learn, learn_and_hold, seen_by_learner

SLACK = 0.5 * 4 * 400  # in steps drawn

context = multiprocessing.get_context("forkserver")


@contextmanager
def process(target, *args, **options):
    """Run a process that talks through a pipe; kill it at the end if it is still there."""
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(*args, theirs), kwargs=options)
    child.start()
    theirs.close()
    try:
        with ours:
            yield child, ours
    finally:
        child.kill()
        child.join()


def fill(buf, times=1, count=COMMIT):
    for _ in range(times):
        buf.write_episode({"obs": np.zeros((count, 2), np.float32)})


def write(buf, pace, count=COMMIT, times=1):
    for _ in range(times):
        with pace.insert(count, buf.flush):
            fill(buf, count=count)


@pytest.fixture
def pace(tmp_path):
    with Pace(tmp_path, **NUMBERS) as made:
        yield made


@pytest.fixture
def ring(tmp_path):
    buf = ReplayBuffer(1000, path=tmp_path / "ring")
    yield buf
    buf.close()


# -- the ratio, both directions -------------------------------------------------------------------


def heard(pipe):
    """Return what a process said until it ended."""
    said = []
    try:
        while True:
            said.append(pipe.recv())
    except EOFError:
        return said


def ahead(inserted, drawn):
    return 4 * (inserted - 400) - drawn


def test_two_collectors_and_a_learner_stay_within_the_slack(tmp_path):
    """Each commit and each draw is looked at under the lock: nobody else acts at that moment."""
    with (
        process(learn, tmp_path, 150) as (_, drawn),
        process(collect, tmp_path, "a", 80, max_ahead=0) as (_, one),
        process(collect, tmp_path, "b", 80, max_ahead=0) as (_, two),
    ):
        draws = heard(drawn)
        commits = [pipe.recv() for pipe in (one, two) for _ in range(20)]
        commits += waiting(one) + waiting(two)
    assert [drawn for _, drawn in draws] == [BATCH * (k + 1) for k in range(150)]
    assert max(ahead(*counts) for counts in commits) <= SLACK
    assert min(ahead(*counts) for counts in draws) >= -SLACK
    inserted, drawn = draws[-1]
    paid_for = 4 * (inserted - 400)
    assert abs(drawn / paid_for - 1) <= SLACK / paid_for


def waiting(pipe):
    """Return what was said and not read yet: the process may be killed by now, or wait."""
    said = []
    with contextlib.suppress(EOFError):
        while pipe.poll():
            said.append(pipe.recv())
    return said


class NoPace(Pace):
    """Nobody waits."""

    def _may_draw(self, count, drawn):
        return True

    def _may_insert(self, count, where):
        return True


class NoReservation(Pace):
    """Each looks, then acts, whoever does so at the same moment."""

    def _reserved(self):
        return 0


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_control_without_waits_the_ratio_is_lost(tmp_path, ring):
    pace = NoPace(tmp_path, **NUMBERS)
    write(ring, pace, times=40)
    assert ahead(pace.inserted, pace.drawn) > SLACK
    in_thread(lambda: [pace.draw(BATCH) for _ in range(60)]).join()
    assert ahead(*seen_by_learner(tmp_path)) < -SLACK
    pace.close()


@pytest.mark.parametrize("kind", [Pace, NoReservation])
def test_two_commits_do_not_find_the_same_room(tmp_path, ring, kind):
    """Room for one commit, and two that come at the same moment; the control lets both in."""
    learner, one, two = Pace(tmp_path, **NUMBERS), kind(tmp_path, **NUMBERS), kind(tmp_path, **NUMBERS)
    write(ring, one, times=29)
    in_thread(lambda: learner.draw(60)).join()
    assert SLACK - 80 < ahead(one.inserted + COMMIT, one.drawn) <= SLACK
    other, entered, after = ReplayBuffer(1000, path=tmp_path / "other"), threading.Event(), []

    def second():
        with two.insert(COMMIT):
            fill(other)
            after.append(ahead(one.inserted, one.drawn))
            entered.set()

    with one.insert(COMMIT):
        thread = in_thread(second)
        if kind is NoReservation:
            entered.wait()
        fill(ring)
        found = ahead(one.inserted, one.drawn)
    assert (found > SLACK) == (kind is NoReservation)
    in_thread(lambda: learner.draw(60)).join()
    thread.join()
    assert kind is NoReservation or after[0] <= SLACK
    learner.close()
    other.close()


def test_a_commit_does_not_hold_up_those_that_have_room(tmp_path, ring):
    one, two = Pace(tmp_path, **NUMBERS), Pace(tmp_path, **NUMBERS)
    other = ReplayBuffer(1000, path=tmp_path / "other")
    with one.insert(COMMIT):
        in_thread(lambda: write(other, two)).join(10)
        assert two.inserted == COMMIT, "the first one has not ended yet"
        write(ring, one)
    other.close()
    assert sorted(os.listdir(tmp_path / "pace")) == ["lock", "pace.json"]


def test_a_commit_of_the_dead_reserves_nothing(tmp_path, pace, ring):
    with process(collect, tmp_path, "dead", 1, is_killed=True) as (child, pipe):
        pipe.recv()
        child.join()
    assert any(name.startswith("commit-") for name in os.listdir(tmp_path / "pace"))
    write(ring, pace)
    assert sorted(os.listdir(tmp_path / "pace")) == ["lock", "pace.json"]


def test_a_commit_larger_than_the_slack_is_let_through(tmp_path, ring):
    """In turn with a learner, which draws all that it paid for: neither waits for ever."""
    learner, pace = Pace(tmp_path, **NUMBERS), Pace(tmp_path, **NUMBERS)
    in_thread(lambda: write(ring, pace, 400)).join()
    learner.draw(BATCH)
    draws = in_thread(lambda: [learner.draw(800) for _ in range(6)])
    large = 300  # 1,200 steps drawn, of a slack of 800
    for _ in range(4):
        with pace.insert(large, ring.flush):
            before = ahead(pace.inserted, pace.drawn)
            fill(ring, count=large)
        assert before <= 0
    draws.join(20)
    assert (pace.inserted, pace.drawn) == (1600, BATCH + 4800)
    learner.close()


class NoRoomError(Exception):
    pass


class Impatient(Pace):
    """Raises where it would wait."""

    def _may_insert(self, count, where):
        if not super()._may_insert(count, where):
            raise NoRoomError
        return True


class Ends(Impatient):
    """Another commit ends between its two looks, at what came in and at what is reserved."""

    def _reserved(self):
        self.end()
        return super()._reserved()


def test_a_commit_that_ends_during_a_look_counts(tmp_path, ring):
    learner, one, two = (kind(tmp_path, **NUMBERS) for kind in (Pace, Pace, Ends))
    write(ring, one, times=29)
    in_thread(lambda: learner.draw(60)).join()
    commit = one.insert(COMMIT)
    commit.__enter__()

    def end():
        fill(ring)
        commit.__exit__(None, None, None)

    two.end = end
    with pytest.raises(NoRoomError):
        write(ring, two)
    learner.close()


@pytest.mark.parametrize("rings", [1, 2])
def test_transitions_count_before_they_are_committed(tmp_path, rings):
    numbers = {"samples_per_insert": 1, "min_steps": 100, "slack": 0.1}
    learner, added = Pace(tmp_path, **numbers), 0
    collectors = [
        (Impatient(tmp_path, **numbers), TransitionReplayBuffer(1000, (3,), (), None, path=tmp_path / f"{number}"))
        for number in range(rings)
    ]
    draw = in_thread(lambda: learner.draw(1))
    while not learner.has_learner:
        time.sleep(0.001)
    with pytest.raises(NoRoomError):
        for added in range(10_000):
            pace, buf = collectors[added % rings]
            with pace.insert(1, buf.flush):
                buf.add(np.zeros(3), 1, 0.5, np.zeros(3), False)
    assert 110 <= added <= 110 + learner.drawn
    for _, buf in collectors:
        buf.close()
    draw.join()
    learner.close()


def test_a_collector_waits_above_and_a_learner_below(tmp_path, pace, ring):
    """To the step: each side acts only when the other one made room."""
    with process(learn_and_hold, tmp_path) as (_, pipe):
        write(ring, pace, times=400 // COMMIT)
        pipe.send(BATCH)
        assert pipe.recv() == (400, BATCH), "a learner is alive from here on"
        with process(collect, tmp_path, "other", 1000) as (_, seen):
            most = 400 + (SLACK + BATCH) // 4 // COMMIT * COMMIT
            while seen.recv()[0] < most:
                pass
            pipe.send(COMMIT * 4)  # room for one commit more
            pipe.recv()
            assert seen.recv() == (most + COMMIT, BATCH + COMMIT * 4), "not before"
        inserted, drawn = pace.inserted, pace.drawn
        for _ in range(int(ahead(inserted, drawn) + SLACK) // BATCH):
            pipe.send(BATCH)
            assert pipe.recv()[0] == inserted
        pipe.send(BATCH)  # one more is too many
        write(ring, pace)
        assert pipe.recv()[0] == inserted + COMMIT, "not before"
        assert ahead(pace.inserted, pace.drawn) >= -SLACK


def test_two_learners_add_up(tmp_path, pace, ring):
    write(ring, pace, times=30)
    with Pace(tmp_path, **NUMBERS, rank=1) as one, Pace(tmp_path, **NUMBERS, rank=2) as two:
        threads = [threading.Thread(target=lambda p=p: [p.draw(BATCH) for _ in range(9)]) for p in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert pace.drawn == 18 * BATCH
    assert ahead(600, 19 * BATCH) >= -SLACK
    with (
        pytest.raises(LockedError, match="learner of rank 3 .*rank of its own"),
        Pace(tmp_path, **NUMBERS, rank=3) as three,
    ):
        three.draw(1)
        Pace(tmp_path, **NUMBERS, rank=3).draw(1)


# -- restarts -------------------------------------------------------------------------------------


def test_counts_survive_kills_of_either_side(tmp_path):
    drawn = inserted = 0
    for _ in range(2):
        with process(collect, tmp_path, "ring", 40) as (collector, seen):
            inserted += 20 * COMMIT
            while seen.recv()[0] < inserted:
                pass
            os.kill(collector.pid, signal.SIGKILL)
            collector.join()
        with process(learn_and_hold, tmp_path) as (learner, pipe):
            for _ in range(3):
                pipe.send(BATCH)
                drawn += BATCH
                assert pipe.recv()[1] == drawn
            os.kill(learner.pid, signal.SIGKILL)
            learner.join()
        found = Pace(tmp_path, **NUMBERS)
        assert found.drawn == drawn
        assert found.inserted == facts_of(tmp_path / "ring").steps_written >= inserted
        inserted = found.inserted


class Killed:
    """A process of the campaign that is killed and started again."""

    def __init__(self, target, *args, **options):
        self.make = lambda: process(target, *args, **options)
        self.begin()

    def begin(self):
        self.open = contextlib.ExitStack()
        self.process, self.pipe = self.open.enter_context(self.make())

    def said(self):
        return waiting(self.pipe)

    def kill(self):
        self.process.kill()
        self.process.join()
        said = self.said()
        self.open.close()
        return said


def paced_for(folder, seconds, seed):
    """Let two collectors and two learners, of which one is killed every second or so, go on; return what was violated,
    and counts."""
    rng = random.Random(seed)
    sides = [Killed(collect, folder, name, None, max_ahead=0) for name in "ab"]
    sides += [Killed(learn, folder, None, rank=rank) for rank in (0, 1)]
    commits, draws, kills, worst = 0, 0, [0] * 4, [0.0, 0.0]
    until, then = time.monotonic() + seconds, time.monotonic()

    def look(number, said):
        nonlocal commits, draws
        for inserted, drawn in said:
            found = ahead(inserted, drawn)
            if number < 2:  # draws go on while a collector looks: for the upper bound only
                commits += 1
                worst[1] = max(worst[1], found)
            else:  # both counts at one moment, under the lock
                draws += 1
                worst[0] = min(worst[0], found)

    try:
        while time.monotonic() < until:
            time.sleep(0.02)
            for number, side in enumerate(sides):
                look(number, side.said())
            if time.monotonic() > then:
                then = time.monotonic() + rng.expovariate(1.0)
                number = rng.randrange(4)
                look(number, sides[number].kill())
                kills[number] += 1
                sides[number].begin()
    finally:
        for number, side in enumerate(sides):
            look(number, side.kill())
    with Pace(folder, **NUMBERS) as pace:
        return worst, (commits, draws, sum(kills)), (pace.inserted, pace.drawn)


@pytest.mark.campaign
def test_campaign_of_the_slack(tmp_path):
    """Both bounds, with two collectors and two learners, killed and started again."""
    seconds = float(os.environ.get("LASTS_S", 600))
    worst, (commits, draws, kills), (inserted, drawn) = paced_for(tmp_path, seconds, int(os.environ.get("SEED", 1)))
    print(
        f"\n{seconds:g} s: {commits:,} commits, {draws:,} draws, {kills} kills; ahead {worst[0]:g} to {worst[1]:g} of "
        f"+-{SLACK:g}; {drawn / (inserted - 400):.3f} drawn for each that came in, asked for 4"
    )
    assert -SLACK <= worst[0] <= 0 <= worst[1] <= SLACK
    assert abs(ahead(inserted, drawn)) <= SLACK + BATCH
    assert min(commits, draws) > seconds


@pytest.mark.parametrize("how", ["deleted", "cleared", "made again", "copied"])
def test_a_ring_takes_nothing_back(tmp_path, pace, how):
    buf = ReplayBuffer(1000, path=tmp_path / "ring")
    write(buf, pace, times=25)
    thread = threading.Thread(target=pace.draw, args=(1,))  # another thread: this one collects
    thread.start()
    thread.join()
    assert pace.inserted == 500
    expected = 500
    if how == "cleared":
        buf.clear()
    buf.close()
    if how == "copied":
        shutil.copytree(tmp_path / "ring", tmp_path / "copy")
    if how in ("deleted", "made again"):
        shutil.rmtree(tmp_path / "ring")
    if how == "made again":
        again = ReplayBuffer(1000, path=tmp_path / "ring")
        write(again, pace)
        again.close()
        expected += COMMIT
    assert pace.inserted == expected
    assert Pace(tmp_path, **NUMBERS).inserted == expected, "as another process counts"


# -- who is dead ----------------------------------------------------------------------------------


def test_without_a_learner_collectors_go_on_and_say_so(tmp_path, ring, caplog):
    pace = Pace(tmp_path, **NUMBERS)
    with caplog.at_level(logging.WARNING, "ringmap"):
        write(ring, pace, times=100)
    assert pace.inserted == 2000
    assert (
        len(caplog.records) == 1
        and "no learner is alive (none has come yet); this collector goes on, without limit" in caplog.text
    )


def test_max_ahead(tmp_path):
    with (
        process(learn_and_hold, tmp_path, max_ahead=300) as (learner, pipe),
        process(collect, tmp_path, "ring", 1000, max_ahead=300) as (_, seen),
    ):
        pipe.send(BATCH)
        pipe.recv()
        os.kill(learner.pid, signal.SIGKILL)
        learner.join()
        last = 400 + (300 + BATCH // 4) // COMMIT * COMMIT
        while seen.recv()[0] < last:
            pass
        with Pace(tmp_path, **NUMBERS, max_ahead=300) as again:
            for _ in range(8):
                again.draw(BATCH)
            assert seen.recv()[1] > BATCH, "a learner came: it goes on, and not before"


def test_without_a_collector_a_learner_raises(tmp_path):
    with process(collect, tmp_path, "ring", 10) as (collector, seen):
        heard(seen)
        collector.join()
    pace = Pace(tmp_path, **NUMBERS, timeout_s=0.05)
    with pytest.raises(
        NoClipsError,
        match=rf"Pace.draw: waited 0.05 s, and no collector is alive; 200 steps came in and 0 were drawn here; the "
        rf"last was seen: process {collector.pid} .*ring; start",
    ):
        pace.draw(1)
    pace.close()
    with pytest.raises(NoClipsError, match="no ring is below"):
        Pace(tmp_path / "none", **NUMBERS, timeout_s=0.05).draw(1)


@pytest.mark.skipif(bool(reason_why_not()), reason=reason_why_not())
def test_a_draw_killed_before_every_change(tmp_path):
    """The counter is the one before or the new one, and the next learner goes on with it."""
    counts, changes, killed = set(), 0, True
    while killed:
        path = tmp_path / str(changes)
        buf = ReplayBuffer(1000, path=path / "ring")
        fill(buf, 25)
        killed = killed_after(changes, partial(draw_twice, path)).killed
        with Pace(path, **NUMBERS) as pace:
            before = pace.drawn
            counts.add(before)
            pace.draw(BATCH)
            assert pace.drawn == before + BATCH
        buf.close()
        changes += 1
    assert counts == {0, BATCH, 2 * BATCH} and changes > 12


def draw_twice(path):
    pace = Pace(path, **NUMBERS)
    pace.draw(BATCH)
    pace.draw(BATCH)


def test_control_a_live_collector_is_waited_for(tmp_path, ring):
    pace, raised = Pace(tmp_path, **NUMBERS, timeout_s=0.05), []

    def draw():
        try:
            pace.draw(1)
        except NoClipsError as error:
            raised.append(error)

    other = Pace(tmp_path, **NUMBERS)
    write(ring, other)
    thread = threading.Thread(target=draw)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and not raised
    ring.close()
    thread.join()
    assert raised


# -- one loop, loaders ----------------------------------------------------------------------------


def test_one_loop_only_counts(pace, ring):
    for k in range(40):
        write(ring, pace)
        if k >= 1:
            ring.sample(32, pace=pace)
    assert (pace.inserted, pace.drawn) == (800, 39 * 32)
    for _ in range(int(SLACK) // 32 - 1):
        ring.sample(32, pace=pace)
    assert pace.drawn == 38 * 32 + SLACK
    write(ring, pace)
    ring.sample(1000, pace=pace)  # more than the slack


@pytest.mark.parametrize("is_open", [True, False])
def test_a_thread_that_filled_the_buffer_is_a_learner_afterwards(tmp_path, ring, is_open):
    pace = Pace(tmp_path, **NUMBERS, timeout_s=0.05)
    write(ring, pace, times=400 // COMMIT)
    if not is_open:
        ring.close()
    with pytest.raises(NoClipsError, match=r"no other collector is alive; 400 steps came in"):
        for _ in range(250):
            pace.draw(BATCH)
    assert SLACK - BATCH < pace.drawn <= SLACK
    with pytest.raises(InputError, match="slack=0.5 .*a batch of 801 steps is more"):
        pace.draw(801)
    pace.close()


def test_a_thread_that_drew_once_is_a_collector_afterwards(tmp_path, ring):
    """While another one draws; and as long as none does, it waits for nobody."""
    pace = Impatient(tmp_path, **NUMBERS)
    write(ring, pace, 400)
    pace.draw(BATCH)
    write(ring, pace, times=30)
    in_thread(lambda: pace.draw(BATCH)).join()
    with pytest.raises(NoRoomError):
        write(ring, pace)
    pace.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_what_it_hands_out(tmp_path, pace, ring, workers):
    fill(ring, 40)
    loader = DataLoader(ring, batch_size=50, num_workers=workers)
    counts = []
    for number, batch in enumerate(pace.over(loader, 50)):
        assert len(batch["obs"]) == 50
        counts.append(pace.drawn)
        if number == 5:
            break
    assert counts == [50 * (k + 1) for k in range(6)]


def test_windows_count_their_widest_column(pace, ring):
    from ringmap.data import Window

    write(ring, pace, times=40)
    ring.sample(8, window={"obs": Window(range(3))}, pace=pace)
    assert pace.drawn == 24


def test_a_copy_counts_as_the_first_one(tmp_path, pace, ring):
    write(ring, pace, times=25)
    again = pickle.loads(pickle.dumps(pace))
    assert repr(again) == repr(pace)
    again.draw(8)
    child = multiprocessing.get_context("fork").Process(target=again.insert(COMMIT).__enter__)
    child.start()
    child.join()
    assert child.exitcode == 0 and pace.drawn == 8
    again.close()
    again.draw(8)
    assert pace.drawn == 16
    again.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_forked_child_is_no_learner_of_its_parents_rank(pace, ring, closes):
    write(ring, pace, times=25)
    pace.draw(8)

    def child():
        if closes:
            pace.close()
        with pytest.raises(LockedError, match="is the learner of rank 0"):
            pace.draw(8)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert pace.has_learner, "the child ended the learner of its parent"
    assert pace.drawn == 8


def test_a_thread_that_draws_too_waits_for_other_learners(tmp_path, pace, ring):
    write(ring, pace, times=25)
    pace.draw(8)
    with Pace(tmp_path, **NUMBERS, rank=1) as other:
        other.draw(8)
        while pace.ahead <= 0 or pace.ahead + 4 * COMMIT <= SLACK:
            write(ring, pace)
        drew = threading.Event()

        def draw():
            drew.set()
            other.draw(2 * BATCH)

        timer = threading.Timer(0.3, draw)
        timer.start()
        write(ring, pace)
        assert drew.is_set(), "it did not wait"
        timer.join()


def test_counts_are_decoded_where_another_process_changed_them(tmp_path, pace, ring, monkeypatch):
    write(ring, pace, times=25)
    pace.draw(8)
    decoded = []
    monkeypatch.setattr("ringmap.fleet.pace.decode_signed", lambda data: decoded.append(data) or decode_signed(data))
    for _ in range(3):
        pace.draw(8)
        write(ring, pace)
    assert not decoded
    with Pace(tmp_path, **NUMBERS, rank=1) as other:
        other.draw(8)
    decoded.clear()
    write(ring, pace, times=3)
    assert len(decoded) == 1


# -- bad input ------------------------------------------------------------------------------------

NUMBERS_REFUSED = [
    ({"samples_per_insert": 0}, "samples_per_insert must be a positive number, got 0"),
    ({"samples_per_insert": float("nan")}, "samples_per_insert must be a positive"),
    ({"min_steps": 0}, "min_steps must be an integer, 1 or more, got 0"),
    ({"min_steps": 1.5}, "min_steps must be an integer"),
    ({"slack": 0}, "slack must be a positive number"),
    ({"max_ahead": -1}, "max_ahead must be an integer that is not negative"),
    ({"timeout_s": 0}, "timeout_s must be a positive"),
    ({"rank": -1}, "rank must be an integer that is not negative"),
]


@pytest.mark.parametrize(("given", "message"), NUMBERS_REFUSED)
def test_numbers(tmp_path, given, message):
    with pytest.raises(InputError, match=f"Pace: {message}"):
        Pace(tmp_path / "runs", **{**NUMBERS, **given})
    assert os.listdir(tmp_path) == []


def test_too_little_slack_is_refused_with_the_numbers(tmp_path, pace, ring):
    other = Pace(tmp_path, **NUMBERS)
    write(ring, other, times=20)
    with pytest.raises(
        InputError,
        match=r"Pace.draw: slack=0.5 of min_steps=400 lets a side be 800 steps drawn ahead, and a batch of 801 steps "
        r".*raise slack to 0.501",
    ):
        pace.draw(801)


def test_other_numbers_and_damage(tmp_path, pace, ring):
    write(ring, pace)
    with pytest.raises(InputError, match="of a fleet with other numbers.*'min_steps': 400.*'min_steps': 500"):
        write(ring, Pace(tmp_path, **{**NUMBERS, "min_steps": 500}))
    with pytest.raises(InputError, match="is a ring itself; give the directory above"):
        Pace(tmp_path / "ring", **NUMBERS)
    pace.draw(8)
    path = tmp_path / "pace" / "pace.json"
    data = path.read_bytes()
    body, _ = decode_signed(data)
    assert body["drawn"] == {"0": 8}
    odd = [{**body, "drawn": drawn} for drawn in ({"0": -1}, {"0": 1.5}, [8], None)]
    for case in (b"", b"[]", data[:-1], data.replace(b'{"0": 8}', b'{"0": 9}'), *map(encode_signed, odd)):
        path.write_bytes(case)
        with pytest.raises(CorruptError, match="pace.json: is not what was written"):
            pace.drawn  # noqa: B018
        with pytest.raises(CorruptError, match="Pace.draw: .*pace.json: is not what was written"):
            Pace(tmp_path, **NUMBERS).draw(8)
    path.write_bytes(data)
    (tmp_path / "fleet.json").write_text("{")
    with pytest.raises(CorruptError, match=r"fleet.json: is not what was written"):
        Pace(tmp_path, **NUMBERS).draw(8)


def test_who_only_looks_sees_the_numbers_and_changes_nothing(tmp_path, pace, ring):
    assert Pace.kept_at(tmp_path / "none") is None
    write(ring, pace, 50)
    before = sorted(os.listdir(tmp_path / "pace"))
    seen = Pace.kept_at(tmp_path)
    assert seen.slack_drawn == SLACK
    assert (seen.inserted, seen.drawn, seen.ahead) == (50, 0, ahead(50, 0))
    assert not seen.has_learner
    write(ring, pace, 400)
    pace.draw(BATCH)
    assert (seen.inserted, seen.drawn, seen.ahead) == (450, BATCH, ahead(450, BATCH))
    assert seen.has_learner  # control of the first look
    pace.close()
    assert not seen.has_learner
    assert set(os.listdir(tmp_path / "pace")) - set(before) == {"learner-0.lock"}
    body, _ = decode_signed((tmp_path / "pace/pace.json").read_bytes())
    for numbers in ({"min_steps": 5}, {"samples_per_insert": -1, "min_steps": 5, "slack": 1}, []):
        (tmp_path / "pace/pace.json").write_bytes(encode_signed({**body, "numbers": numbers}))
        with pytest.raises(CorruptError, match=r"pace\.json: is not what was written"):
            Pace.kept_at(tmp_path)


def test_a_buffer_elsewhere(tmp_path, pace):
    for path, place in ((None, "in RAM"), (tmp_path / "deeper" / "ring", "deeper")):
        with pytest.raises(InputError, match=f"X: pace= counts the rings in .*{place}"):
            pace.check_ring(path, "X")


@pytest.mark.parametrize("path", [None, "deeper/ring"])
def test_a_draw_from_a_buffer_that_it_does_not_count(tmp_path, pace, path):
    with ReplayBuffer(1000, path=path and tmp_path / path) as buf:
        fill(buf, count=500)
        with pytest.raises(InputError, match="ReplayBuffer.sample: pace= counts the rings in"):
            buf.sample(8, pace=pace)
        buf.pace = pace
        with pytest.raises(InputError, match="ReplayBuffer.batches: pace= counts the rings in"):
            buf.batches(8)
    assert pace.drawn == 0


def test_a_listing_that_fails_counts_nothing_down(tmp_path, pace, ring, monkeypatch):
    """As where the process has too many open files: the call says so, and the next one goes on."""
    write(ring, pace, 400)

    def fails(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    learner = Pace(tmp_path, **NUMBERS)
    for call in (lambda: learner.draw(8), lambda: write(ring, pace)):
        with (
            monkeypatch.context() as patch,
            pytest.raises(EnvironmentFault, match=r"Pace\.(draw|insert): Too many open files .*ulimit"),
        ):
            patch.setattr(os, "listdir", fails)
            call()
        call()
    assert (pace.inserted, pace.drawn) == (420, 8)
    learner.close()


class Distant(System):
    def is_network(self, path):
        return True


def test_a_network_file_system(tmp_path):
    pace = Pace(tmp_path, **NUMBERS, disk=Disk(Distant()))
    with pytest.raises(EnvironmentFault, match="Pace.draw: .*pace lies on a network file system"):
        pace.draw(1)


@pytest.mark.parametrize("name", ["pace.json", "pace"])
def test_a_file_of_another_fleet(tmp_path, name):
    for fleet in ("one", "two"):
        ReplayBuffer(1000, path=tmp_path / fleet / "ring").close()
        with Pace(tmp_path / fleet, **NUMBERS) as pace, pace.insert(COMMIT):
            pass
    with Pace(tmp_path / "one", **NUMBERS) as pace:
        with pace.insert(COMMIT):
            pass
        pace.draw(8)
    source, target = (tmp_path / fleet / "pace" for fleet in ("one", "two"))
    if name == "pace":
        shutil.rmtree(target)
        (tmp_path / "two" / "fleet.json").unlink()  # a directory that never had a pace
        shutil.copytree(source, target)
    else:
        shutil.copy(source / name, target / name)
    with pytest.raises(
        InputError, match="pace.json belongs to fleet .* copied from elsewhere; stop the fleet and remove .*two/pace"
    ):
        Pace(tmp_path / "two", **NUMBERS, timeout_s=0.01).draw(8)
    shutil.rmtree(target)  # as the message says
    with Pace(tmp_path / "two", **NUMBERS) as pace:
        with pace.insert(COMMIT):
            pass
        pace.draw(8)
        assert pace.drawn == 8


def test_a_fleet_that_is_copied_or_moved_whole_counts_on(tmp_path):
    ReplayBuffer(1000, path=tmp_path / "one" / "ring").close()
    with Pace(tmp_path / "one", **NUMBERS) as pace:
        with pace.insert(COMMIT):
            pass
        pace.draw(8)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "three")
    for fleet in ("two", "three"):
        with Pace(tmp_path / fleet, **NUMBERS) as pace:
            with pace.insert(COMMIT):
                pass
            pace.draw(8)
            assert pace.drawn == 16


def test_steps_of_a_ring_that_is_gone_count_for_those_who_never_saw_it(tmp_path):
    """A learner and a collector that were started again, after a ring was removed: none counts from zero."""
    with ReplayBuffer(5000, path=tmp_path / "a") as buf, Pace(tmp_path, **NUMBERS) as pace:
        write(buf, pace, times=500 // COMMIT)
    with Pace(tmp_path, **NUMBERS) as learner:
        learner.draw(BATCH)
    shutil.rmtree(tmp_path / "a")
    with Pace(tmp_path, **NUMBERS, timeout_s=1) as learner:
        learner.draw(BATCH)  # min_steps came in, though no ring is here
    assert Pace(tmp_path, **NUMBERS).inserted == 500, "its draw kept what others had seen"
    with Pace(tmp_path, **NUMBERS, timeout_s=1) as learner, Pace(tmp_path, **NUMBERS) as collector:
        learner.draw(BATCH)
        left = int(SLACK - ahead(500, 3 * BATCH)) // 4
        may_insert = [collector._act("test", lambda n=n: collector._may_insert(n, "test")) for n in (left, left + 1)]
        assert may_insert == [True, False]
