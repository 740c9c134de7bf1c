"""Windows of a buffer: samplers, loaders, views, the place of rewards, and what bad input gets."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.clips.facts import Facts
from ringmap.data import Window
from ringmap.errors import InputError, NoClipsError
from ringmap.samplers import (
    EpisodeSampler,
    MixtureSampler,
    PrioritizedSampler,
    RecencySampler,
    UniformSampler,
)
from tests.unit.clips.windows import model

OFFSETS = [-2, -1, 0, 1]
WINDOW = {"where": Window(OFFSETS), "flag": Window([-1, 0, 3], pad="zero")}


def filled(episodes=20, **options):
    options = {"max_steps": 400, "seed": 0, "spare_rows": 50, **options}
    buf = ReplayBuffer(**options)
    for number in range(episodes):
        buf.write_episode(model.episode(number, 2 + number % 9))
    return buf


def prove(batch):
    """Check each item against what it says of itself."""
    where = np.asarray(batch["where"])
    for row in range(len(where)):
        number, t = where[row, 2].tolist()
        want = model.item(model.episode(number, 2 + number % 9), t, WINDOW)
        model.same({name: np.asarray(values)[row] for name, values in batch.items()}, want)


@pytest.mark.parametrize(
    "make",
    [
        lambda: UniformSampler(0),
        lambda: EpisodeSampler(0),
        lambda: RecencySampler(half_life=20, rng=0),
        lambda: PrioritizedSampler(rng=0),
        lambda: PrioritizedSampler(kind="rank", rng=0),
        lambda: MixtureSampler([(UniformSampler(0), 1), (PrioritizedSampler(rng=0), 1)], rng=0),
        lambda: None,
        lambda: lambda step, buffer, size, history: np.arange(size) % buffer.num_valid_ends(history),
    ],
)
def test_samplers_draw_anchors(make):
    """Every sampler draws items of a window as it draws clips, from a buffer and from a view of it."""
    buf = filled(sampler=make())
    view = buf.view(window=WINDOW)
    half = view.take(range(0, len(view.lengths), 2))
    anchors = set(view.positions(np.arange(len(view))).tolist())
    for _ in range(5):
        batch = buf.sample(32, window=WINDOW)
        prove(batch)
        now = buf.view(window=WINDOW)
        assert set(batch.ids.tolist()) <= set(now.positions(np.arange(len(now))).tolist())
        assert set(view.sample(4).ids.tolist()) <= anchors
        prove(view.sample(16))
        drawn = half.sample(16)
        prove(drawn)
        assert (drawn["where"][:, 2, 0] % 2 == 0).all(), "an episode that the view has not"
        buf.write_episode(model.episode(20, 2 + 20 % 9))
    assert all((b["where"][:, 2, 0] >= 0).all() for b in buf.batches(8, steps=3, window=WINDOW))
    assert [len(b["where"]) for b in half.batches(8, steps=3)] == [8, 8, 8]


def test_priorities_belong_to_anchors():
    """A priority given through a window counts for the clip that starts at the same step, and the other way round."""
    buf = filled(sampler=PrioritizedSampler(alpha=1, rng=0))
    late = {"where": Window([-2, 0])}
    every = buf.view(window=late)
    anchors = every.positions(np.arange(len(every)))
    buf.sample(4, window=late)
    assert buf.update_priorities(anchors, np.where(np.arange(len(anchors)) == 7, 1e6, 1e-6)) == len(anchors)
    for _ in range(3):
        assert (buf.sample(16, window=late).ids == anchors[7]).mean() > 0.9
        drawn = buf.sample(400)  # steps that are no anchors of the window keep the highest priority so far
        assert set(drawn.ids[drawn.ids != anchors[7]].tolist()).isdisjoint(anchors.tolist())
        assert (buf.sample(64, window={"where": Window([0])}).ids == anchors[7]).any()
    clip = buf.sample(4)
    buf.update_priorities(np.array([anchors[7]]), [1e-6])
    buf.update_priorities(np.array([anchors[9]]), [1e6])
    assert (buf.sample(16, window=late).ids == anchors[9]).mean() > 0.9
    assert len(clip.ids) == 4


def test_steps_before_the_first_anchor_have_a_priority():
    """A new step has the highest priority, even if a window that does not reach it saw it first."""
    buf = ReplayBuffer(100, seed=0, spare_rows=20, sampler=PrioritizedSampler(alpha=1, eps=1e-9, rng=0))
    buf.write_episode({"x": np.arange(20)})
    buf.sample(4, window={"x": Window([-10, 0])})
    assert buf.sample(400)["x"].min() < 10


def test_out_is_filled():
    """Columns and masks go into arrays of the caller's."""
    buf = filled()
    first = buf.sample(8, window=WINDOW)
    kept = dict(first)
    again = buf.sample(8, window=WINDOW, out=first)
    assert all(again[name] is values for name, values in kept.items())
    prove(again)
    with pytest.raises(InputError, match="out has a column 'other'"):
        buf.sample(8, window=WINDOW, out={"other": np.empty(3)})


def test_columns_of_plain_clips():
    """Only the named ones are read, alike for clips."""
    buf = filled(history_len=2, frameskip=2)
    batch = buf.sample(5, columns=["flag", "action"])
    assert {name: values.shape for name, values in batch.items()} == {"flag": (5, 2), "action": (5, 2, 4)}
    assert buf.view(columns=["flag"])[0].keys() == {"flag"}
    assert [set(b) for b in buf.batches(4, steps=2, columns=["flag"])] == [{"flag"}] * 2
    assert buf.sample(3, columns=["flag"], anchors=slice(1, -5))["flag"].shape == (3, 2)


def test_frameskip_multiplies_steps_and_seconds_are_seconds():
    buf = filled(frameskip=2, fps=10)
    steps = buf.view(window={"where": Window([0, 1])})[0]
    assert steps["where"][:, 1].tolist() == [0, 2]
    seconds = buf.view(window={"where": Window(seconds=[0, 0.11])})[0]
    assert seconds["where"][:, 1].tolist() == [0, 1]
    with pytest.raises(InputError, match=r"'where' asks for 0.05 s, which at fps=10 is 0.50 steps"):
        buf.sample(2, window={"where": Window(seconds=[0.05])})
    with pytest.raises(InputError, match="the rate of the steps is not known; pass fps="):
        filled().sample(2, window={"where": Window(seconds=[0])})


PADS = [
    ("f4", 1e300, None),
    ("f4", 0.1, np.float32(0.1)),
    ("f2", 1e-30, None),
    ("f2", np.inf, np.float16(np.inf)),
    ("f4", 2**24 + 1, None),
    ("f8", 2**53 + 1, None),
    ("f4", 2**70, np.float32(2**70)),
    ("f8", 2**2000, None),
    ("i8", 2**70, None),
    ("i8", 1e30, None),
    ("i4", True, 1),
    ("i4", 1.5, None),
    ("i4", np.nan, None),
    ("u1", -1, None),
    ("?", 2, None),
    ("?", 1, True),
    ("f4", 1j, None),
    ("c8", 1j, np.complex64(1j)),
    ("c8", 1e300j, None),
    ("S2", b"abc", None),
    ("S3", b"abc", b"abc"),
    ("M8[s]", np.datetime64("NaT"), np.datetime64("NaT")),
    ("M8[s]", np.datetime64(1, "ms"), None),
]


@pytest.mark.parametrize(("dtype", "pad", "wanted"), PADS, ids=[str(n) for n in range(len(PADS))])
def test_padding_comes_as_it_was_given(dtype, pad, wanted):
    """A fraction is rounded as the column rounds it; what does not fit is refused by name, before anything is drawn."""
    buf = ReplayBuffer(10, seed=0)
    buf.write_episode({"x": np.zeros(2, dtype)})
    window = {"x": Window([5], pad=pad)}
    if wanted is None:
        with pytest.raises(InputError, match="'x' has pad="):
            buf.sample(1, window=window)
        with pytest.raises(InputError, match="'x' has pad="):
            buf.view(window)
        return
    value = buf.sample(1, window=window)["x"][0, 0]
    assert value == wanted or (value != value and wanted != wanted)


def test_equal_windows_are_equal_in_every_process():
    """The hash that is kept in a window does not travel: texts hash otherwise in another process."""
    window = Window(range(3), pad="edge")
    made = (
        "import pickle, sys; from ringmap.data import Window; sys.stdout.buffer.write(pickle.dumps(Window(range(3), "
        "pad='edge')))"
    )
    sent = subprocess.run(
        [sys.executable, "-c", made], capture_output=True, check=True, env=os.environ | {"PYTHONHASHSEED": "7"}
    ).stdout
    assert {window: 1}[pickle.loads(sent)] == 1
    assert Window([0], pad=np.array(3)) == Window([0], pad=3)


# -- where rewards stand ------------------------------------------------------------------------


def test_the_place_of_rewards_is_remembered(home):
    buf = ReplayBuffer(100, path=home / "ring", reward_at="next", fps=5)
    buf.close()
    with ReplayBuffer(100, path=home / "ring") as again:
        assert (again.reward_at, again.fps) == ("next", 5)
        again.close()
    assert ReplayBuffer.open(home / "ring").reward_at == "next"
    with pytest.raises(InputError, match="reward_at='same', but the buffer on disk has reward_at='next'"):
        ReplayBuffer(100, path=home / "ring", reward_at="same")
    with pytest.raises(InputError, match="reward_at must be one of"):
        ReplayBuffer(100, reward_at="later")
    with pytest.raises(InputError, match="fps must be a positive number"):
        ReplayBuffer(100, fps=0)


def test_a_place_that_is_assigned_is_stored_at_once(home):
    buf = ReplayBuffer(100, path=home / "ring")
    buf.reward_at = "next"
    assert ReplayBuffer.open(home / "ring").reward_at == "next"
    buf.expect_facts(Facts("next"), "here")
    with pytest.raises(InputError, match="here: it writes rewards at reward_at='same'"):
        buf.expect_facts(Facts("same"), "here")
    buf.close()


# -- short episodes -----------------------------------------------------------------------------


def test_short_episodes_are_not_skipped_in_silence(caplog):
    buf = ReplayBuffer(200, history_len=8, seed=0)
    for length in (3, 4, 20, 3):
        buf.write_episode({"x": np.arange(length)})
    assert buf.num_unreachable_steps == 10
    assert buf.view().num_unreachable_steps == 10
    for _ in range(2):
        buf.sample(2, window={"x": Window(range(8))})
        assert sum(map(len, buf.split(0.5, window={"x": Window([0])}))) == 30
    told = [
        r
        for r in caplog.records
        if "10 of 30 stored steps are in no clip: episodes shorter than 8 steps have none (the longest has 20)"
        in r.getMessage()
    ]
    assert len(told) == 1
    caplog.clear()
    buf.sample(2)
    buf.sample(2)
    assert len(caplog.records) == 1
    caplog.clear()
    buf.sample(2, window={"x": Window(range(8), pad="edge")})
    assert not caplog.records
    with pytest.raises(
        NoClipsError,
        match=r"needs episodes of at least 31 steps .* has 20 steps; give the columns a pad=",
    ):
        buf.sample(2, window={"x": Window(range(31))})


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give offsets= or seconds="),
        ({"offsets": [0], "seconds": [0]}, "not both"),
        ({"offsets": []}, "offsets is empty"),
        ({"offsets": [0.5]}, "offsets must be integers"),
        ({"offsets": 3}, r"for one step write \[3\]"),
        ({"offsets": [[0, 1]]}, "must be integers"),
        ({"offsets": ["a"]}, "must be integers"),
        ({"offsets": [0], "pad": "mirror"}, "pad must be one of"),
        ({"offsets": [0], "pad": [1, 2]}, "pad must be one value"),
        ({"offsets": [0], "pad": {}}, "pad must be one value"),
        ({"offsets": [0], "mask": ""}, "mask must be a name"),
        ({"seconds": [np.nan]}, "must be finite"),
        ({"offsets": [True]}, "must be integers"),
    ],
)
def test_what_is_no_window(arguments, message):
    with pytest.raises(InputError, match=message):
        Window(**arguments)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"window": {"wheer": Window([0])}}, "'wheer' that is not stored, but 'where' is"),
        ({"window": {"where": 3}}, "must be a Window, a Computed or a function"),
        ({"window": 3}, "window must be a mapping"),
        ({"window": {"flag": Window([0], pad="nan")}}, "has pad='nan', but the column holds uint8"),
        ({"window": {"flag": Window([0], pad=300)}}, "pad=300, which the column"),
        ({"window": {"flag": Window([0], pad="edge", mask="where")}}, "'where', but one of that name is stored"),
        ({"window": {"flag": lambda b: 0}}, "is stored"),
        ({"window": {"flag": Window([0], pad=0, mask="m"), "where": Window([0], pad=0, mask="m")}}, "comes from"),
        ({"columns": ["flagg"]}, "'flagg' that is not stored, but 'flag' is"),
        ({"columns": "flag"}, "columns must be a list"),
        ({"anchors": slice(-3, None)}, "anchors must be a slice"),
        ({"anchors": slice(0, 4)}, "anchors must be a slice"),
        ({"anchors": slice(0, -4, 2)}, "anchors must be a slice"),
        ({"anchors": lambda d: True}, "which episodes are wanted says where="),
        ({"drop_all_padded": True}, "drop_all_padded is for padded columns"),
        ({"window": {}, "history_len": 3}, "history_len=3 and a window contradict"),
        ({"window": {"bad": lambda b: np.zeros(3)}}, "the function returned shape"),
    ],
)
def test_what_can_not_be_drawn(request_, message):
    """Each is refused, in `sample` and in `batches`, and nothing is changed."""
    buf = filled()
    before = buf.state_dict() if "function" not in message else None
    with pytest.raises(InputError, match=message):
        buf.sample(4, **request_)
    assert before in (None, buf.state_dict())


def test_nothing_is_stored_yet():
    with pytest.raises(NoClipsError, match="nothing is stored yet"):
        ReplayBuffer(10).sample(2, window=WINDOW)
    with pytest.raises(NoClipsError, match="nothing is stored yet"):
        ReplayBuffer(10).view(window=WINDOW)
