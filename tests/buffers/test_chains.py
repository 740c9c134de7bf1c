"""Episodes committed in parts, against a plain model: a list of rows for each episode.

Each row carries its episode and its step, so that whatever is read proves itself.
"""

import pickle
import random

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.clips.computed.hindsight import Hindsight
from ringmap.clips.computed.nstep import NStep
from ringmap.clips.computed.place import Index, TimeToEnd
from ringmap.clips.computed.returns import ReturnToGo
from ringmap.clips.window import Window
from ringmap.errors import InputError, NoClipsError

SCHEMA = {
    "episode": ((), "i8"), "step": ((), "i8"), "reward": ((), "f8"), "terminated": ((), "?"),
}  # fmt: skip
EDGE = {"step": Window(range(-7, 8), pad="edge"), "episode": Window(range(-7, 8), pad="edge")}


def row(episode, step, last=False):
    return {"episode": episode, "step": step, "reward": float(step % 7), "terminated": last}


class Model:
    """What is stored: the newest rows, in the order of commits, and what each episode is."""

    def __init__(self, max_steps):
        self.max_steps = max_steps
        self.parts = []  # (episode, first step, stop)
        self.ended = set()
        self.first_of = {}

    def commit(self, episode, first, stop):
        self.parts.append((episode, first, stop))
        self.first_of.setdefault(episode, len(self.first_of))
        while sum(stop - first for _, first, stop in self.parts) > self.max_steps:
            self.parts.pop(0)

    def episodes(self):
        """Return episode -> its live steps, in the order in which they began."""
        found = {}
        for episode, first, stop in self.parts:
            found.setdefault(episode, []).extend(range(first, stop))
        return dict(sorted(found.items(), key=lambda item: self.first_of[item[0]]))


class Script:
    """A buffer, lanes that record into it, and the model of it."""

    def __init__(self, seed, path=None, **options):
        self.rng = random.Random(seed)
        self.np_rng = np.random.default_rng(seed)
        self.max_steps = self.rng.choice([30, 60, 120])
        self.every = self.rng.choice([1, 3, 5, 8])
        self.model = Model(self.max_steps)
        self.buf = ReplayBuffer(
            self.max_steps,
            path=path,
            seed=seed,
            schema=SCHEMA,
            spare_rows=8,
            reward_at="same",
            **options,
        )
        self.lanes = [None] * self.rng.randint(1, 4)
        self.number = 0

    def act(self):
        lane = self.rng.randrange(len(self.lanes))
        kind = self.rng.random()
        if kind < 0.1:
            length = self.rng.randint(1, 8)
            number, self.number = self.number, self.number + 1
            rows = [row(number, step, step == length - 1) for step in range(length)]
            self.buf.write_episode({n: np.array([r[n] for r in rows]) for n in SCHEMA})
            self.model.commit(number, 0, length)
            self.model.ended.add(number)
            return
        if self.lanes[lane] is None:
            self.lanes[lane] = [self.buf.begin_episode(commit_every=self.every), self.number, 0, 0]
            self.number += 1
        open_one = self.lanes[lane]
        episode, number, steps, committed = open_one
        if kind < 0.16:
            if kind < 0.12:
                episode.abandon()
            else:
                episode.finish(terminated=True, episode_data={"number": number})
                if steps > committed:
                    self.model.commit(number, committed, steps)
            self.model.ended.add(number)
            self.lanes[lane] = None
            return
        for _ in range(self.rng.randint(1, 6)):
            episode.append(row(number, open_one[2]))
            open_one[2] += 1
            if open_one[2] - open_one[3] == self.every:
                self.model.commit(number, open_one[3], open_one[2])
                open_one[3] = open_one[2]
        assert episode.num_steps == open_one[2]

    # -- looks -------------------------------------------------------------------------------

    def look(self, buf):
        expected = self.model.episodes()
        assert buf.num_episodes == len(expected)
        assert buf.lengths.tolist() == [len(steps) for steps in expected.values()]
        assert buf.num_steps_stored == sum(map(len, expected.values()))
        for i, (number, steps) in enumerate(expected.items()):
            loaded = buf.load_episode(i)
            assert loaded["step"].tolist() == steps
            assert (loaded["episode"] == number).all()
            middle = len(steps) // 2
            chunk = buf.load_chunk([i], [middle], [len(steps)])[0]
            assert np.asarray(chunk["step"]).tolist() == steps[middle:]
        seen = [(int(e["episode"][0]), [int(s) for s in e["step"]]) for e in buf.episodes()]
        assert seen == list(expected.items())
        assert buf.get_col_data("step").tolist() == [s for run in expected.values() for s in run]
        if expected:
            data = buf.get_episode_data()
            firsts = data.get("first_step", [None] * len(expected))
            assert [first or 0 for first in firsts] == [steps[0] for steps in expected.values()]
            assert buf.get_row_data([-1])["step"].tolist() == [list(expected.values())[-1][-1]]
        self.look_at_items(buf, expected)

    def look_at_items(self, buf, expected):
        for span in (1, 2, 4, 9):
            clips = {
                (n, s) for n, run in expected.items() for s in run[: max(0, len(run) - span + 1)]
            }
            if not clips:
                with pytest.raises(NoClipsError):
                    buf.sample(3, history_len=span)
                continue
            batch = buf.sample(24, history_len=span)
            assert (np.diff(batch["step"], axis=1) == 1).all()
            assert (np.diff(batch["episode"], axis=1) == 0).all()
            assert (
                set(zip(batch["episode"][:, 0].tolist(), batch["step"][:, 0].tolist(), strict=True))
                <= clips
            )
            window = {n: Window(range(-(span // 2), span - span // 2)) for n in ("episode", "step")}
            view = buf.view(window=window)
            assert len(view) == len(clips)
            every = view[np.arange(len(view))]
            assert (
                set(zip(every["episode"][:, 0].tolist(), every["step"][:, 0].tolist(), strict=True))
                == clips
            )
            assert (np.diff(every["step"], axis=1) == 1).all()
        if expected:
            self.look_at_padded(buf, expected)
            self.look_at_computed(buf, expected)
            self.look_at_split(buf, expected)

    def look_at_padded(self, buf, expected):
        view = buf.view(window=EDGE)
        assert len(view) == sum(map(len, expected.values()))
        for batch in (buf.sample(24, window=EDGE), view[np.arange(len(view))]):
            for number, steps, pad in zip(
                batch["episode"], batch["step"], batch["step_is_pad"], strict=True
            ):
                run = expected[int(number[0])]
                anchor = int(steps[7])
                wanted = np.arange(anchor - 7, anchor + 8)
                assert (number == number[0]).all()
                assert steps.tolist() == np.clip(wanted, run[0], run[-1]).tolist()
                assert pad.tolist() == ((wanted < run[0]) | (wanted > run[-1])).tolist()

    def look_at_computed(self, buf, expected):
        window = {
            "n": NStep(5, gamma=0.5, next=("step",)), "at": Index(), "left": TimeToEnd(),
            "goal": Hindsight(lambda a, g: (a == g) * 1.0, "episode", goal="step", achieved="step"),
        }  # fmt: skip
        numbers = list(expected)
        view = buf.view(window=window, columns=["episode", "step", *window])
        batch = view[np.arange(len(view))]
        ids = [(n, s) for n, run in expected.items() for s in run]
        assert batch["episode"].tolist() == [n for n, _ in ids]
        for i, (number, step) in enumerate(ids):
            run = expected[number]
            assert batch["at_step"][i] == step - run[0]
            assert batch["at_episode"][i] == numbers.index(number)
            assert batch["left"][i] == run[-1] - step
            count = min(5, run[-1] - step)
            assert batch["n_steps"][i] in (count, min(5, count + 1))
            total = sum(0.5**k * ((step + k) % 7) for k in range(int(batch["n_steps"][i])))
            assert batch["n"][i] == pytest.approx(total)
            assert run[0] <= batch["step"][i] <= run[-1]
        ended = [i for i, number in enumerate(expected) if number in self.model.ended]
        back = buf.view(window={"back": ReturnToGo()}, columns=["episode", "step", "back"])
        if len(ended) < len(expected):
            with pytest.raises(InputError, match=r"^ReturnToGo: .*has not ended"):
                back[np.arange(len(back))]
        if ended:
            some = back.take(ended)
            for _ in range(2):  # the second time the sums are known
                batch = some[np.arange(len(some))]
                for number, step, total in zip(
                    batch["episode"].tolist(),
                    batch["step"].tolist(),
                    batch["back"].tolist(),
                    strict=True,
                ):
                    assert total == sum(s % 7 for s in expected[number] if s >= step)

    def look_at_split(self, buf, expected):
        one, other = buf.split(0.5, seed=3, window=EDGE)
        mine = [
            set(np.unique(v[np.arange(len(v))]["episode"]).tolist()) if len(v) else set()
            for v in (one, other)
        ]
        assert not mine[0] & mine[1]
        assert mine[0] | mine[1] == set(expected)
        for view, numbers in zip((one, other), mine, strict=True):
            if numbers:
                assert set(view.sample(16)["episode"][:, 0].tolist()) <= numbers


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_it_holds_what_the_model_holds(tmp_path, place):
    for seed in range(4):
        path = tmp_path / str(seed) if place == "disk" else None
        script = Script(seed, path)
        reader = None
        for move in range(60):
            script.act()
            if move % 10 == 9:
                script.look(script.buf)
                assert script.buf.check() == []
                if path is not None:
                    reader = reader or ReplayBuffer.open(path)
                    reader.refresh()
                    script.look(reader)
        copied = pickle.loads(pickle.dumps(script.buf))
        script.look(copied)
        if path is not None:
            assert ringmap.check(path) == []
            reader.close()
            snapshot = tmp_path / f"{seed}-copy"
            script.buf.snapshot(snapshot)
            copied.close()
            with ReplayBuffer.open(snapshot) as copied:
                script.look(copied)
        script.buf.close()
