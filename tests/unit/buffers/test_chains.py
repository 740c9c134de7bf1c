"""Episodes committed in parts: each row carries its episode and its step, so that whatever is read proves itself.

Every way to read them, against a plain model, is in `tests/contract/test_reads.py`.
"""

import contextlib
import json
import multiprocessing
import os
import pickle
import sys
import warnings

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.buffers import sampled
from ringmap.clips import bounds as bounds_module
from ringmap.clips import draws as draws_module
from ringmap.clips import gather as gather_module
from ringmap.clips.items import Computed
from ringmap.clips.samplers.episodes import EpisodeSampler
from ringmap.clips.samplers.prioritized import PrioritizedSampler
from ringmap.clips.window import Window
from ringmap.data import ReturnToGo, Sequences, ShardedReplayBuffer, convert, load_dataset
from ringmap.errors import ClipIndexError, CorruptError, InputError, NoClipsError, RoleError
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.disk.checksums import framed
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.table import EpisodeTable

SCHEMA = {
    "episode": ((), "i8"),
    "step": ((), "i8"),
    "reward": ((), "f8"),
    "terminated": ((), "?"),
}


def row(episode, step, last=False):
    return {"episode": episode, "step": step, "reward": float(step % 7), "terminated": last}


# -- what others do with them ------------------------------------------------------------------------


def recorded(buf, number, steps, every=5):
    """Record the first steps of an episode."""
    episode = buf.begin_episode(commit_every=every)
    for step in range(steps):
        episode.append(row(number, step))
    return episode


def lanes_of(buf, steps, count=3, every=5):
    """Record some episodes side by side."""
    episodes = [buf.begin_episode(commit_every=every) for _ in range(count)]
    for step in range(steps):
        for number, episode in enumerate(episodes):
            episode.append(row(number, step))
    return episodes


def prove(batch):
    step, number = np.asarray(batch["step"]), np.asarray(batch["episode"])
    assert (np.diff(step, axis=1) == 1).all()
    assert (np.diff(number, axis=1) == 0).all()
    return set(zip(number[:, 0].tolist(), step[:, 0].tolist(), strict=True))


def make(max_steps=60, **options):
    return ReplayBuffer(max_steps, seed=0, schema=SCHEMA, spare_rows=8, reward_at="same", **options)


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_it_is_drawn_from_before_it_ends(tmp_path, place):
    buf = make(history_len=3, path=tmp_path / "buf" if place == "disk" else None)
    episode = recorded(buf, 7, 4)
    with pytest.raises(NoClipsError):
        buf.sample(1)
    episode.append(row(7, 4))
    assert prove(buf.sample(50)) == {(7, 0), (7, 1), (7, 2)}
    for step in range(5, 1000):
        episode.append(row(7, step))
    assert buf.lengths.tolist() == [60]
    assert prove(buf.sample(500)) == {(7, step) for step in range(940, 998)}
    assert buf.get_episode_data() == {"first_step": [940]}
    assert episode.num_steps == 1000
    episode.finish(truncated=True, episode_data={"seed": 3})
    assert buf.get_episode_data() == {"seed": [3], "first_step": [940]}


@pytest.mark.parametrize("kind", ["proportional", "rank"])
def test_priorities_of_steps_whose_clips_end_in_a_later_part(kind):
    buf = make(sampler=PrioritizedSampler(0, kind=kind), history_len=4)
    episodes = [buf.begin_episode(commit_every=5) for _ in range(2)]
    for step in range(200):
        for number, episode in enumerate(episodes):
            episode.append(row(number, step))
        if step % 5 == 4:
            batch = buf.sample(2000)
            seen = prove(batch)
            first = max(0, step - 29)
            assert seen == {(n, s) for n in range(2) for s in range(first, step - 2)}
            assert buf.update_priorities(batch.ids, np.ones(2000)) == 2000
    assert buf.check() == []


def test_an_episode_in_parts_counts_as_one():
    buf = make(sampler=EpisodeSampler(0), history_len=2)
    recorded(buf, 0, 40).finish()
    buf.write_episode({name: np.array([row(1, s)[name] for s in range(5)]) for name in SCHEMA})
    seen = [number for _ in range(400) for number, _ in prove(buf.sample(1))]
    assert 120 < seen.count(1) < 280


def test_a_copy_in_ram_keeps_how_episodes_ended():
    """One whose last part was committed before, one that is still open."""
    buf = make()
    recorded(buf, 0, 10).finish(terminated=True, episode_data={"seed": 3})
    open_one = recorded(buf, 1, 10)
    for one in (buf, pickle.loads(pickle.dumps(buf))):
        assert one.get_episode_data() == {"seed": [3, None]}
        assert one.engine.owned.live.whole.is_open.tolist() == [False, True]
        assert one.view(window=Sequences(10))[0]["is_last"].tolist() == [False] * 9 + [True]
        with pytest.raises(InputError, match="has not ended, so the sum"):
            one.sample(40, window={"return": ReturnToGo()})
    open_one.abandon()


def test_a_dump_holds_one_episode(tmp_path):
    buf = make(path=tmp_path / "buf")
    episodes = lanes_of(buf, 100)
    episodes[1].finish(episode_data={"seed": 5})
    buf.dump(tmp_path / "out.h5", progress=False)
    for path in (tmp_path / "out.h5", tmp_path / "buf"):
        dataset = load_dataset(path, output="numpy")
        assert dataset.lengths.tolist() == [20, 20, 20]
        for number in range(3):
            loaded = dataset.load_episode(number)
            assert loaded["step"].tolist() == list(range(80, 100))
            assert (loaded["episode"] == number).all()
        assert dataset.get_episode_data(1)["first_step"] == [80]
        assert dataset.get_episode_data(1)["seed"] == [5]


@pytest.mark.parametrize("copy", [ReplayBuffer.dump, convert])
def test_a_chain_that_does_not_fit_into_memory_twice_is_copied_in_pieces(tmp_path, monkeypatch, copy):
    buf = ReplayBuffer(max_steps=100, spare_rows=20)
    buf.write_episode({"x": np.arange(3.0) - 10, "_episode_data": {"seed": 1}})
    with buf.begin_episode(commit_every=7, episode_data={"seed": 2}) as episode:
        for t in range(60):
            episode.append({"x": np.float64(t)})
    monkeypatch.setattr(sampled, "memory_left", lambda: 2 * 8 * 40.0)
    with pytest.warns(
        UserWarning,
        match=r"episode 1 of 60 steps \(0 MiB\) .* episodes of up to 20 steps, with 'first_step'",
    ):
        copy(buf, tmp_path / "out.h5", progress=False)
    out = load_dataset(tmp_path / "out.h5")
    assert out.lengths.tolist() == [3, 14, 14, 14, 18]
    assert out.get_episode_data()["seed"] == [1, 2, 2, 2, 2]
    assert out.get_episode_data()["first_step"][2:] == [14, 28, 42]
    found = np.concatenate([out.load_episode(i)["x"] for i in range(1, 5)])
    assert found.tolist() == list(range(60))
    monkeypatch.setattr(sampled, "memory_left", lambda: 2 * 8 * 60.0)
    copy(buf, tmp_path / "whole.h5", progress=False)
    assert load_dataset(tmp_path / "whole.h5").lengths.tolist() == [3, 60]


def _dump_with_little_memory(path, out, said, left):
    import resource

    buf = ReplayBuffer.open(path)
    tiny = ReplayBuffer(10)
    tiny.write_episode({"x": np.zeros((5, 10), np.uint8)})
    tiny.dump(out + ".tiny.h5", progress=False)  # what is imported counts before
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (taken + left, -1))
    if said == "control":
        sampled.memory_left = lambda: float("inf")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            buf.dump(out, progress=False)
    except MemoryError:
        os._exit(3)
    os._exit(len(told))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_it_is_dumped_with_little_memory(tmp_path):
    """48 MB of steps with 60 MB left; the control needs more than there is."""
    path, size = tmp_path / "buf", 1 << 14
    with ReplayBuffer(max_steps=3000, path=path, spare_rows=100) as buf:
        with buf.begin_episode(commit_every=100) as episode:
            for t in range(3000):
                episode.append({"x": np.full(size, t % 251, np.uint8)})
        buf.close()
    fork = multiprocessing.get_context("fork")
    codes = {}
    for kind in ("pieces", "control"):
        out = str(tmp_path / f"{kind}.h5")
        process = fork.Process(target=_dump_with_little_memory, args=(path, out, kind, 60 << 20))
        process.start()
        process.join()
        codes[kind] = process.exitcode
    assert codes == {"pieces": 1, "control": 3}
    found = load_dataset(tmp_path / "pieces.h5")
    assert len(found.lengths) > 1
    assert found.lengths.sum() == 3000


def test_what_bad_input_gets(tmp_path):
    buf = make(path=tmp_path / "buf")
    for wrong in (0, -1, 2.5, True, "5"):
        with pytest.raises(InputError, match=r"^ReplayBuffer.begin_episode: commit_every"):
            buf.begin_episode(commit_every=wrong)
    episode = recorded(buf, 0, 7)
    for wrong in ({"other": 1}, {**row(0, 7), "step": "x"}, {**row(0, 7), "more": 1}):
        with pytest.raises(InputError, match=r"^OpenEpisode.append"):
            episode.append(wrong)
    assert (episode.num_steps, buf.lengths.tolist()) == (7, [5])
    episode.finish()
    for again in (episode.finish, lambda: episode.append(row(0, 7))):
        with pytest.raises(RoleError, match="has ended"):
            again()
    assert buf.lengths.tolist() == [7]
    empty = buf.begin_episode(commit_every=3)
    empty.finish(terminated=True)
    assert buf.lengths.tolist() == [7]
    with pytest.raises(ZeroDivisionError), buf.begin_episode(commit_every=3) as broken:
        for step in range(4):
            broken.append(row(1, step))
        raise ZeroDivisionError
    assert buf.lengths.tolist() == [7, 3]
    assert not buf.engine.source.live.whole.is_open.any()
    assert buf.check() == []


def files_of(folder):
    """Return every byte below a folder, but for who holds the lock."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path.name: path.read_bytes() for path in found}


def test_bad_input_changes_nothing_in_the_middle_of_a_chain(tmp_path):
    """Bad input gets an error before anything changes, and the episode goes on."""
    buf = make(path=tmp_path / "buf", durability="power")
    episode = buf.begin_episode(commit_every=5, episode_data={"seed": 3}, lane=2)
    for step in range(8):
        episode.append(row(0, step))
    before = files_of(tmp_path / "buf")
    calls = {
        "episode data": lambda: buf.begin_episode(commit_every=5, episode_data={"seed": object()}),
        "names are strings": lambda: buf.begin_episode(commit_every=5, episode_data={1: 2}),
        "of 2097[0-9]+ bytes would be stored with each part": lambda: buf.begin_episode(
            commit_every=5, episode_data={"map": np.zeros(1 << 21, np.uint8)}
        ),
        "lane must be": lambda: buf.begin_episode(commit_every=5, lane=-1),
        "lane must be an integer": lambda: buf.begin_episode(commit_every=5, lane=1 << 32),
        "lane must be an integer that": lambda: buf.begin_episode(commit_every=5, lane="left"),
        "steps don't fit in the 8 spare rows": lambda: buf.begin_episode(commit_every=buf.engine.source.ring.spare + 1),
        "must be positive": lambda: buf.begin_episode(commit_every=-5),
        "schema mismatch": lambda: episode.append({"other": 1}),
        "reward": lambda: episode.append({**row(0, 8), "reward": "x"}),
        "step": lambda: episode.append({**row(0, 8), "step": np.zeros(2)}),
        "OpenEpisode.finish": lambda: episode.finish(episode_data={"seed": object()}),
    }
    for why, call in calls.items():
        with pytest.raises(InputError, match=why):
            call()
        assert files_of(tmp_path / "buf") == before, why
    with ReplayBuffer.open(tmp_path / "buf") as reader, pytest.raises(RoleError):
        reader.begin_episode(commit_every=5)
    for step in range(8, 12):
        episode.append(row(0, step))
    episode.finish(terminated=True, episode_data={"more": 1})
    with pytest.raises(RoleError, match="this episode has ended"):
        episode.finish()
    episode.abandon()  # which is fine
    assert buf.get_episode_data() == {"seed": [3], "more": [1]}
    assert buf.load_episode(0)["step"].tolist() == list(range(12))
    assert buf.check() == []


@pytest.mark.parametrize("data", ["!!", "YWJj", 7, None, ["a"], "é"])
def test_a_file_of_a_part_whose_data_make_no_sense(tmp_path, data):
    """It is named by check and dropped at the next opening; no error comes out of it."""
    path = tmp_path / "buf"
    with make(path=path) as buf:
        recorded(buf, 0, 5).finish()
        buf.close()
    described = {"columns": [["x", [], "<i8"]], "part": [-1, 0, 0, 0], "data": data}
    head = json.dumps(described).encode()
    (path / "open" / "a").mkdir()
    (path / "open" / "a" / "steps.bin").write_bytes(framed(head, 0))
    (finding,) = ringmap.check(path)
    assert "frame 0, which names the columns, does not make sense" in finding.what
    with ReplayBuffer.open(path, "r+", interrupted="keep") as again:
        assert again.lengths.tolist() == [5]
        assert again.check() == []
        again.close()


def test_another_schema_before_the_first_part_is_committed(tmp_path):
    buf = ReplayBuffer(100, path=tmp_path / "buf", spare_rows=10)
    episode = buf.begin_episode(commit_every=3)
    for step in range(2):
        episode.append({"x": np.float32(step)})
    buf.write_episode({"y": np.arange(4)})  # fixes the columns
    for _ in range(2):
        with pytest.raises(InputError):
            episode.append({"x": np.float32(2)})
        assert buf.lengths.tolist() == [4]
    with pytest.raises(InputError):
        episode.append({"y": 5})  # its other steps are of the first schema
        episode.append({"y": 6})
    with pytest.raises(InputError):
        episode.finish()
    episode.abandon()
    assert buf.lengths.tolist() == [4]
    assert buf.check() == []
    buf.close()
    with ReplayBuffer.open(tmp_path / "buf", "r+", interrupted="keep") as again:
        assert again.lengths.tolist() == [4]
        assert again.check() == []
        again.close()


def test_a_chain_longer_than_the_ring_is_no_error(tmp_path):
    buf = ReplayBuffer(30, path=tmp_path / "buf", spare_rows=8)
    buf.write_episode({"x": np.arange(10.0)})
    with buf.begin_episode(commit_every=8) as episode:
        for step in range(200):
            episode.append({"x": np.float64(step)})
    assert buf.num_episodes == 1
    first = buf.get_episode_data()["first_step"][0]
    assert buf.load_episode(0)["x"].tolist() == list(range(first, 200))
    assert 30 - 8 < len(buf.load_episode(0)["x"]) <= 30
    assert buf.check() == []


def test_a_damaged_part_is_named_and_taken_out(tmp_path):
    path = tmp_path / "buf"
    with make(path=path) as buf:
        lanes_of(buf, 20)
        buf.close()
    name = next((path / "columns").glob("*step*"))
    with open(name, "r+b") as file:  # the second part of the second episode, at position 20
        file.seek(4096 + 8 * 22)
        file.write(b"\xff")
    findings = ringmap.check(path)
    assert [finding.seq for finding in findings] == [5]
    ringmap.repair(path, dry_run=False)
    assert ringmap.check(path) == []
    with ReplayBuffer.open(path, "r+") as buf:
        found = [[int(s) for s in e["step"]] for e in buf.episodes()]
        assert found == [list(range(20)), list(range(5)), list(range(20)), list(range(10, 20))]
        assert buf.get_episode_data()["first_step"] == [None, None, None, 10]
        prove(buf.sample(200, history_len=4))


def test_a_manifest_that_is_lost_is_made_again(tmp_path):
    path = tmp_path / "buf"
    with make(path=path) as buf:
        recorded(buf, 1, 13).finish(terminated=True, episode_data={"seed": 4})
        expected = [{n: np.stack(v).tolist() for n, v in e.items() if n != "_episode_data"} for e in buf.episodes()]
        buf.close()
    before = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").unlink()
    (finding, *others) = ringmap.check(path)
    assert finding.file == "manifest.json"
    assert not others
    assert [action.file for action in ringmap.repair(path)] == ["manifest.json", "state.bin"]
    ringmap.repair(path, dry_run=False)
    assert ringmap.check(path) == []
    after = json.loads((path / "manifest.json").read_text())
    assert {n: after[n] for n in ("kind", "lineage")} == {n: before[n] for n in ("kind", "lineage")}
    with ReplayBuffer.open(path, "r+") as buf:
        found = [{n: np.stack(v).tolist() for n, v in e.items() if n != "_episode_data"} for e in buf.episodes()]
        assert found == expected
        assert buf.get_episode_data() == {"seed": [4]}
        buf.close()


@pytest.mark.parametrize("number", range(1, 5))
def test_a_record_of_a_part_that_is_lost(tmp_path, number):
    """Repaired, the rest of the episode is there, once, and has ended."""
    path = tmp_path / "buf"
    with make(path=path) as buf:
        recorded(buf, 1, 20).finish(terminated=True)
        parts = len(buf.engine.source.live)
        assert (parts, buf.engine.source.seq) == (4, 5)
        buf.close()
    with open(path / "episodes.npy", "r+b") as file:
        file.seek(4096 + 128 * number + 30)
        file.write(b"\x77")
    assert ringmap.check(path)[0].seq == number
    ringmap.repair(path, dry_run=False)
    assert ringmap.check(path) == []
    for _ in range(2):
        with ReplayBuffer.open(path, "r+") as buf:
            found = [[int(s) for s in e["step"]] for e in buf.episodes()]
            left = [s for s in range(20) if s // 5 != number - 1]
            assert sorted(s for steps in found for s in steps) == left
            assert len(found) == (1 if number in (1, 4) else 2)
            assert not buf.engine.source.live.whole.is_open.any()
            prove(buf.sample(50, history_len=2))
            assert buf.check() == []
            buf.close()


@pytest.mark.parametrize("changes", [{"chain": 99}, {"step": 3}, {"part": 2}, {"chain": -5}])
def test_a_forged_part_is_refused(tmp_path, changes):
    with make(path=tmp_path / "buf") as buf:
        lanes_of(buf, 20)
        table = buf.engine.source.table
        record = table.read(6)
        buf.close()
        with contextlib.closing(
            EpisodeTable.open(
                Disk(),
                str(tmp_path / "buf/episodes.npy"),
                table.slots,
                buf.engine.owned.manifest.uuid,
                True,
            )
        ) as forged:
            forged.write(record._replace(**changes))
    words = "given before" if changes == {"part": 2} else "chain"  # what no part is counts ordinals of its own
    assert any(words in str(finding) for finding in ringmap.check(tmp_path / "buf"))
    with pytest.raises(CorruptError, match="record 6 (.* chain|gives an ordinal)"):
        ReplayBuffer.open(tmp_path / "buf")


# -- while it is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["clip", "padded", "computed"])
def test_the_second_look_sees_the_lowest_position(cut, monkeypatch):
    """A part that is overwritten during the copy makes an item bad whose anchor lies in a later part. With a
    control."""

    def draw():
        buf = make(max_steps=20)
        episode = recorded(buf, 0, 20)
        window = {"step": Window(range(-12, 1)), "episode": Window(range(-12, 1))}
        if cut == "padded":
            window = {name: Window(range(-12, 1), pad="edge") for name in window}
        if cut == "computed":
            window = {"before": Before()}
        one = buf.view(window=window, columns=["step", "episode", *window])
        anchor = 0 if cut == "clip" else 12  # its steps begin in the first part
        position = one.positions(np.array([anchor]))
        rows, real = buf.engine.source.rows, type(buf.engine.source.rows.by_name["step"]).take
        calls = iter(range(100))

        def take(self, *args, **options):
            if next(calls) == 0:  # after the slots were found
                for step in range(20, 30):
                    episode.append(row(0, step))
            return real(self, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(type(rows.by_name["step"]), "take", take)
            batch = buf.engine.read(position, one.cut)
        if cut == "padded":  # one that is drawn in its place may begin with padding
            return np.isin(np.diff(batch["step"], axis=1), (0, 1))
        return batch["before"] if cut == "computed" else np.diff(batch["step"], axis=1)

    assert (draw() == 1).all()
    with monkeypatch.context() as patch:
        patch.setattr(draws_module.Crossing, "still_whole", lambda self, source, count: None)
        patch.setattr(bounds_module.Bounds, "still_whole", lambda self, good: good)
        assert not (draw() == 1).all()


@pytest.mark.branch
@pytest.mark.parametrize("lowest", [0, -5])
def test_rows_are_overwritten_between_a_draw_and_the_second_look(lowest, monkeypatch):
    """The draw says which clips cross parts; some of their parts are gone when they are read. With a control."""
    window = {name: Window(range(lowest, lowest + 6)) for name in ("step", "episode")}

    def draws():
        buf = make(max_steps=60)
        lanes = lanes_of(buf, 30)
        cut = buf.cut_of(window=window, columns=["step", "episode"])
        crossing, wrong, step = 0, 0, 30
        for _ in range(20):
            drawn = buf.engine.draw(buf.view(window=window), 32, cut)
            real, calls = MemmapColumn.take, iter(range(100))

            def take(self, *args, real=real, calls=calls, **options):
                nonlocal step
                if next(calls) == 0:
                    for _ in range(5):
                        for number, lane in enumerate(lanes):
                            lane.append(row(number, step))
                        step += 1
                return real(self, *args, **options)

            with monkeypatch.context() as patch:
                patch.setattr(MemmapColumn, "take", take)
                batch = buf.engine.read(drawn.positions, cut, crossing=drawn.crossing)
            crossing += len(drawn.crossing)
            wrong += int((np.diff(batch["step"], axis=1) != 1).sum())
            wrong += int((np.diff(batch["episode"], axis=1) != 0).sum())
        assert crossing > 100
        return wrong

    assert draws() == 0
    with monkeypatch.context() as patch:
        if lowest:
            patch.setattr(draws_module.Crossing, "still_whole", lambda self, source, count: None)
        else:
            patch.setattr(gather_module, "lost", lambda *_: None)
        assert draws() > 0


class Before(Computed):
    """How far the step twelve before each anchor is from it, less eleven."""

    def compute(self, items):
        now, _ = items.take("step", items.step)
        before, _ = items.take("step", items.step - 12)
        return np.where(items.step >= 12, now - before - 11, 1)


def test_the_number_of_evicted_steps_takes_no_name_of_a_user():
    buf = ReplayBuffer(20, spare_rows=10)
    with pytest.raises(InputError, match="'first_step' is what the data .* rename it"):
        buf.begin_episode(commit_every=5, episode_data={"first_step": 1})
    episode = buf.begin_episode(commit_every=5)
    episode.append({"x": 1})
    with pytest.raises(InputError, match="'first_step' is what the data"):
        episode.finish(episode_data={"first_step": 1})
    episode.finish()
    whole = buf.begin_episode(episode_data={"first_step": 1})
    whole.append({"x": 1})
    whole.finish()
    assert [buf.episode_data(i) for i in range(2)] == [{}, {"first_step": 1}]


@pytest.mark.parametrize("parts", [(), (2, 3), range(7)], ids=["plain", "mixed", "parts"])
def test_an_episode_that_is_taken_twice_counts_twice(parts):
    """As in any dataset: the view has it twice, and it is drawn twice as often, by age too, open or ended."""
    buf = ReplayBuffer(300, history_len=2, seed=0)
    for number in range(7):
        rows = {"x": np.arange(number + 3) + 100 * number}
        if number not in parts:
            buf.write_episode(rows)
            continue
        episode = buf.begin_episode(commit_every=2)
        for step in rows["x"]:
            episode.append({"x": step})
        if number != 2:
            episode.finish()
    stored = buf.lengths[2]
    view = buf.view().take([5, 2, 2])
    assert len(view) == view.num_valid_ends(2) == view.clip_window(2).count == 7 + 2 * (stored - 1)
    drawn = view.sample(4000)["x"][:, 0] // 100
    assert set(drawn.tolist()) == {2, 5}
    share = 2 * (stored - 1) / len(view)
    assert abs((drawn == 2).mean() - share) < 0.04  # 0.4 where it counts once
    again = buf.view().take([2]).take([0, 0, 0])
    assert again.num_valid_ends(2) == 3 * (stored - 1)


@pytest.mark.parametrize("parts", [False, True], ids=["plain", "parts"])
def test_one_taken_twice_stands_for_no_other_that_was_left_out(parts):
    """Of equally long episodes the view has as many steps as there are from its first to its last one."""
    buf = ReplayBuffer(300, seed=0)
    for number in range(3):
        if not parts:
            buf.write_episode({"x": np.full(4, number)})
            continue
        with buf.begin_episode(commit_every=3) as recording:
            for _ in range(4):
                recording.append({"x": number})
    view = buf.view().take([0, 2, 2])
    drawn = view.sample(3000)["x"].ravel()
    assert set(drawn.tolist()) == {0, 2}
    assert abs((drawn == 2).mean() - 2 / 3) < 0.05
    assert view.clip_window(1).starts(0, 12).tolist() == [True] * 4 + [False] * 4 + [True] * 4


@pytest.mark.parametrize("kind", ["ring", "fleet"])
def test_a_view_counts_the_steps_of_an_episode_as_they_were_whatever_parts_of_it_are_gone(tmp_path, kind):
    """Its first parts went before the view was made, and more of them since."""
    with ReplayBuffer(40, path=tmp_path / "ring", spare_rows=10) as buf:
        recording = buf.begin_episode(commit_every=5)
        for step in range(50):
            recording.append({"step": step})
        read = buf if kind == "ring" else ShardedReplayBuffer(tmp_path, wait_s=0)
        view = read.view()
        (length,) = view.lengths.tolist()
        first = 50 - length
        assert first > 0
        moved = pickle.loads(pickle.dumps(view))
        for step in range(50, 65):
            recording.append({"step": step})
        read.refresh()
        gone = 65 - int(read.lengths[0]) - first
        assert 0 < gone < length
        for one in (view, moved, read.view(at=view.moment)):
            one._buffer.refresh()
            assert one.load_steps(0, gone, length)["step"].tolist() == list(range(first + gone, 50))
            assert one.load_steps(0, length - 2, length - 1, columns=["step"])["step"].tolist() == [48]
            for start in (0, gone - 1):
                with pytest.raises(ClipIndexError, match="was evicted since"):
                    one.load_steps(0, start, length)
        recording.finish()
        if read is not buf:
            read.close()
