"""Every value through every way in and every way out: exact, or refused by name; `holds` says which, and was written
first.

A way out writes two episodes of all columns that the target holds, and is asked for all others at once. Bytes are
compared.
"""

import gymnasium
import numpy as np
import pytest
import torch

import ringmap
from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.clips.facts import Facts
from ringmap.data import ShardedReplayBuffer, convert, load_dataset, merge
from ringmap.datasets.episode import stored_layout
from ringmap.errors import InputError, RingmapError
from ringmap.extras import missing
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.registry import get_format
from tests.contract.holds import (
    ALL,
    DATA,
    LOSSY,
    MASKED,
    REFUSED_WAYS,
    REFUSES,
    REFUSES_DATA,
    STEPS,
    VALUES,
)

EPISODES = slice(0, 3), slice(2, STEPS)
THEIRS = ("lerobot", "lerobot videos", "minari", "robomimic")
"""Layouts of T steps: the last of T + 1 rows is an observation alone."""

NAMES = {kind: "part/of/it" if kind == "nested" else kind.replace(" ", "_") for kind in VALUES}
PLACES = {
    "hdf5": ("set.h5", "hdf5", {}),
    "zarr": ("set.zarr", "zarr", {}),
    "lance": ("set.lance", "lance", {}),
    "parquet": ("set.parquet", "parquet", {}),
    "folder png": ("png", "folder", {"image_format": "png"}),
    "folder": ("jpeg", "folder", {}),
    "video lossless": ("exact", "video", {"lossless": True}),
    "video": ("films", "video", {}),
    "lerobot": ("frames", "lerobot", {"videos": False}),
    "lerobot videos": ("lerobot", "lerobot", {}),
    "minari": ("set-v0", "minari", {}),
    "robomimic": ("demos.hdf5", "robomimic", {}),
}


def same(given, got, is_lossy=False):
    """Say how a value differs from what was given; "" if it does not."""
    given, got = np.asarray(given), np.asarray(got)
    given = given.astype(given.dtype.newbyteorder("<"))
    if given.shape != got.shape:
        return f"shape {got.shape} for {given.shape}"
    if given.dtype.kind == "U" == got.dtype.kind:  # of any width
        return "" if given.tolist() == got.tolist() else f"{got.tolist()} for {given.tolist()}"
    if given.dtype != got.dtype:
        return f"dtype {got.dtype} for {given.dtype}"
    return "" if is_lossy or given.tobytes() == got.tobytes() else "other bytes"


def episodes_with(kinds, data):
    """Return two episodes of these columns, beside those that each target wants."""
    made = []
    for number, part in enumerate(EPISODES):
        rows = {NAMES[kind]: VALUES[kind][part] for kind in kinds}
        count = len(next(iter(VALUES.values()))[part])
        rows |= {"obs": np.zeros((count, 2)), "action": np.ones((count, 2)), "reward": np.arange(1.0 * count)}
        made.append({**rows, EPISODE_DATA_KEY: data} if data and not number else rows)
    return made


def ring_of(episodes, path=None, **options):
    buf = ReplayBuffer(100, path=path, reward_at="next", **options)
    buf.write_episodes(episodes)
    return buf


def by_writer(episodes, path, format, **options):
    writer = get_format(format).open_writer(path, mode="error", **options)
    writer.expect_facts(Facts(reward_at="next"), "test")
    with writer:
        writer.write_episodes(episodes)


def by_dump(episodes, path, format, **options):
    ring_of(episodes).dump(path, format, mode="error", progress=False, **options)


def by_convert(episodes, path, format, **options):
    source = path.with_name(f"{path.name}-source")
    ring_of(episodes, source).close()
    convert(str(source), path, dest_format=format, progress=False, **options)


def by_merge(episodes, path, format, **options):
    parts = [ring_of([episode]) for episode in episodes]
    merge(parts, path, dest_format=format, progress=False, **options)


def by_fleet(episodes, path, format, **options):
    ring_of(episodes, path.with_name("rings") / "one").close()
    with ShardedReplayBuffer(path.with_name("rings")) as fleet:
        fleet.dump(path, format, mode="error", **options)


VERBS = {
    "writer": by_writer,
    "fleet": by_fleet,
    "dump": by_dump,
    "convert": by_convert,
    "merge": by_merge,
}
ASKED = ("hdf5",)
"""The targets of all verbs by default; the others' are slow: what a verb does to values is the same for all."""


def is_installed(target):
    extra = {"lerobot videos": "lerobot"}.get(target, target.split()[0])
    return extra not in ("lance", "parquet", "video", "lerobot", "minari") or not missing(extra)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return where a target has what it holds, by a verb; each is written once."""
    made = {}

    def write(target, verb):
        if not is_installed(target):
            pytest.skip(f"{target} is not installed")
        if (target, verb) not in made:
            name, format, options = PLACES[target]
            path = tmp_path_factory.mktemp("out") / name
            data = {n: v for n, v in DATA.items() if n not in REFUSES_DATA[target]}
            VERBS[verb](episodes_with(sorted(ALL - REFUSES[target]), data), path, format, **options)
            made[target, verb] = path
        return made[target, verb]

    return write


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Return what a target says of all that it does not hold, asked by a verb once."""
    made = {}

    def refused(target, verb):
        if not is_installed(target):
            pytest.skip(f"{target} is not installed")
        if (target, verb) not in made:
            name, format, options = PLACES[target]
            path = tmp_path_factory.mktemp("no") / name
            data = {n: DATA[n] for n in REFUSES_DATA[target]}
            with pytest.raises(InputError) as caught:
                VERBS[verb](episodes_with(sorted(REFUSES[target]), data), path, format, **options)
            assert verb == "writer" or not path.exists()
            made[target, verb] = str(caught.value)
        return made[target, verb]

    return refused


@pytest.fixture(scope="module")
def opened(written):
    """Return the datasets of a target: as it is stored, and its episodes in a ring by `extend_from`."""
    made = {}

    def open_(target, verb):
        if (target, verb) not in made:
            path, format = written(target, verb), PLACES[target][1]
            ring = ReplayBuffer(100)
            ring.extend_from(load_dataset(path, format=format))
            made[target, verb] = load_dataset(path, format=format, layout="HWC"), ring
        return made[target, verb]

    yield open_
    for dataset, ring in made.values():
        dataset.close()
        ring.close()


def name_in(kind, columns):
    """Return what a column is called there."""
    name = NAMES[kind]
    known = (name, f"info/{name}", name.replace("/", "."), f"observation.images.{name}")
    return next(n for n in known if n in columns)


def cells(verbs):
    """Yield each target, verb and kind; the verbs that share their code with another one are slow."""
    for target in PLACES:
        for verb in verbs:
            marks = () if verb == "writer" or target in ASKED else pytest.mark.slow
            for kind in VALUES:
                yield pytest.param(target, verb, kind, marks=marks, id=f"{target}-{verb}-{kind}")


@pytest.mark.parametrize(("target", "verb", "kind"), [*cells(VERBS)])
def test_a_value_is_exact_or_refused(opened, refusals, target, verb, kind):
    if kind in REFUSES[target]:
        said = refusals(target, verb)
        assert f"column {NAMES[kind]!r} ({VALUES[kind].dtype.newbyteorder('<')}" in said
        assert repr(NAMES[kind]) in said.rpartition("drop=")[2]
        return
    is_lossy = kind in LOSSY.get(target, ())
    dataset, ring = opened(target, verb)
    name = name_in(kind, dataset.column_names)
    given = [VALUES[kind][part] for part in EPISODES]
    given = [rows[:-1] for rows in given] if target in THEIRS else given
    for of, each in (("dataset", dataset), ("ring", ring)):
        got = [stored_layout(each.load_episode(n))[name] for n in range(2)]
        assert [same(a, b, is_lossy) for a, b in zip(given, got, strict=True)] == ["", ""], of
    assert not same(np.concatenate(given), dataset.get_col_data(name), is_lossy)


def data_cells(verbs):
    for target in PLACES:
        for verb in verbs:
            marks = () if verb == "writer" or target in ASKED else pytest.mark.slow
            for name in DATA:
                yield pytest.param(target, verb, name, marks=marks, id=f"{target}-{verb}-{name}")


def same_datum(given, got, is_attribute):
    """Say whether a datum is what was given; an attribute does not know a number from an array of no axes, nor whose
    number it is."""
    if isinstance(given, np.ndarray | np.generic) or is_attribute:
        return not same(given, got) and (is_attribute or type(got) is type(given))
    return type(got) is type(given) and got == given


@pytest.mark.parametrize(("target", "verb", "name"), [*data_cells(VERBS)])
def test_a_datum_is_exact_or_refused(opened, refusals, target, verb, name):
    if name in REFUSES_DATA[target]:
        said = refusals(target, verb)
        assert f"episode data {name!r}" in said
        assert repr(name) in said.rpartition("drop=")[2]
        return
    for dataset in opened(target, verb):
        got = dataset.get_episode_data()[name]
        assert same_datum(DATA[name], got[0], target in THEIRS), got[0]
        assert got[1] is None


@pytest.mark.parametrize("target", PLACES)
def test_what_is_masked_goes_nowhere(tmp_path, target):
    if not is_installed(target):
        pytest.skip(f"{target} is not installed")
    (episode, _), (name, format, options) = episodes_with(["bool"], {}), PLACES[target]
    with get_format(format).open_writer(tmp_path / name, **options) as writer:
        for masked in ({"x": MASKED[1:]}, {EPISODE_DATA_KEY: {"x": MASKED}}):
            with pytest.raises(InputError, match=r"x'?.*mask.*filled|place for the task alone"):
                writer.write_episode(episode | masked)


def test_control_a_format_that_narrows(tmp_path, monkeypatch):
    @np.errstate(over="ignore")
    def narrowed(self, columns, data, refused, where):
        return {n: v.astype("f4") if v.dtype == "f8" else v for n, v in columns.items()}, data

    monkeypatch.setattr(EpisodeWriter, "layout", narrowed)
    by_writer(episodes_with(["inf"], {}), tmp_path / "set.h5", "hdf5")
    dataset = load_dataset(tmp_path / "set.h5")
    assert same(VALUES["inf"][EPISODES[0]], dataset.load_episode(0)["inf"])
    dataset.close()


def test_control_a_payload_that_is_lost():
    assert same(VALUES["NaN"], np.where(np.isnan(VALUES["NaN"]), np.float32(np.nan), VALUES["NaN"]))
    assert not same(VALUES["NaN"], VALUES["NaN"].astype(">f4").astype("<f4"))


# -- ways in --------------------------------------------------------------------------------------


def steps_of(rows):
    return [{name: values[t] for name, values in rows.items()} for t in range(STEPS)]


def in_bulk(rows, buf):
    buf.write_episode(rows)


def in_lists(rows, buf):
    buf.write_episode({name: list(values) for name, values in rows.items()})


def in_arrays(rows, buf):
    """A list of arrays, those of no axes among them."""
    buf.write_episode({name: [np.array(step) for step in values] for name, values in rows.items()})


def in_python(rows, buf):
    """Python's own numbers, texts and lists, where these are of one dtype."""
    plain = {
        n: v.tolist() if v.dtype.str in ("<f8", "<i8", "|b1", "<c16") or v.dtype.kind == "U" else v
        for n, v in rows.items()
    }
    buf.write_episode(plain)


def in_tensors(rows, buf):
    def tensor(values):
        try:
            return torch.from_numpy(np.ascontiguousarray(values))
        except (TypeError, ValueError):
            return values

    buf.write_episode({name: tensor(values) for name, values in rows.items()})


def in_nested(rows, buf):
    rows = dict(rows)
    nested = rows.pop(NAMES["nested"], None)
    buf.write_episode(rows if nested is None else {**rows, "part": {"of": {"it": nested}}})


def in_steps(rows, buf):
    with buf.begin_episode() as episode:
        for step in steps_of(rows):
            episode.append(step)
        episode.finish(True, False)


def in_parts(rows, buf):
    with buf.begin_episode(commit_every=2) as episode:
        for step in steps_of(rows):
            episode.append(step)
        episode.finish(True, False)


def in_updates(rows, buf):
    """Values that come after the row, in mutable columns; text is never mutable."""
    late = {name: values for name, values in rows.items() if values.dtype.kind != "U"}
    schema = {n: ringmap.Column(v.shape[1:], v.dtype, mutable=n in late) for n, v in rows.items()}
    with ReplayBuffer(100, schema=schema) as other:
        other.write_episode({n: np.zeros_like(v) if n in late else v for n, v in rows.items()})
        other.update(np.arange(STEPS), late)
        buf.extend_from(other)


def in_copies(rows, buf):
    with ReplayBuffer(100) as other:
        other.write_episode(rows)
        buf.extend_from(other)


class Told(gymnasium.Env):
    """An environment whose infos are the rows."""

    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (2,))
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, rows=None, render_mode=None):
        self.rows, self.render_mode = rows, render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), steps_of(self.rows)[0]

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 0.0, self.t == STEPS - 1, False, steps_of(self.rows)[self.t]


def in_collections(rows, buf):
    gymnasium.registry.pop("Matrix/Told-v0", None)
    gymnasium.register("Matrix/Told-v0", entry_point=Told)
    with ringmap.World("Matrix/Told-v0", 1, add_pixels=False, rows=rows) as world:
        world.set_policy(ringmap.policy.RandomPolicy(seed=0))
        world.collect(writer=buf, episodes=1, progress=False)


def in_transitions(rows, buf):
    """`add` of transitions, whose further columns are these."""
    extra = {name: (v.shape[1:], v.dtype) for name, v in rows.items()}
    with TransitionReplayBuffer(100, (2,), (), None, extra=extra, seed=0) as other:
        for t, step in enumerate(steps_of(rows)):
            other.add(np.zeros(2), 0, 0.0, np.zeros(2), t == STEPS - 1, extra=step)
        episode = other.episode_dataset().load_episode(0)
        buf.write_episode({name: episode[name][:STEPS] for name in rows})  # then the last observation


WAYS = {
    "bulk": in_bulk,
    "lists": in_lists,
    "arrays": in_arrays,
    "python": in_python,
    "tensors": in_tensors,
    "nested": in_nested,
    "steps": in_steps,
    "parts": in_parts,
    "updates": in_updates,
    "extend_from": in_copies,
    "collect": in_collections,
    "add": in_transitions,
}
STORAGE = {"ram": {}, "memmap": {}, "zarr": {"storage": ringmap.Zarr()}}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    made = {}

    def store(way, storage):
        if (way, storage) not in made:
            path = None if storage == "ram" else tmp_path_factory.mktemp("in") / "ring"
            taken = {NAMES[kind]: rows for kind, rows in VALUES.items() if kind not in REFUSED_WAYS.get(way, ())}
            schema = {n: (v.shape[1:], v.dtype) for n, v in taken.items()} if way in ("steps", "parts") else None
            buf = ReplayBuffer(100, path=path, schema=schema, **STORAGE[storage])
            WAYS[way](taken, buf)
            kept = [name for name in NAMES.values() if name in buf.column_names]
            clips = buf.view(columns=kept)[np.arange(STEPS)]
            read = [
                buf.load_episode(0),
                {name: rows[:, 0] for name, rows in clips.items()},
                dict(next(buf.episodes())),
            ]
            buf.close()
            if path is not None:
                for output in ("numpy", "torch"):
                    dataset = load_dataset(path, layout="HWC", output=output)
                    read.append(dataset.load_episode(0))
                    items = [ringmap.grain.source(dataset)[t] for t in range(STEPS)]
                    read.append({name: np.concatenate([item[name] for item in items]) for name in kept})
                    dataset.close()
            made[way, storage] = read
        return made[way, storage]

    return store


def way_cells():
    for way in WAYS:
        for storage in STORAGE:
            marks = pytest.mark.slow if storage == "zarr" and way != "bulk" else ()
            for kind in VALUES:
                yield pytest.param(way, storage, kind, marks=marks, id=f"{way}-{storage}-{kind}")


@pytest.mark.parametrize(("way", "storage", "kind"), [*way_cells()])
def test_a_ring_gives_back_what_it_was_given(stored, way, storage, kind):
    rows = VALUES[kind]
    if kind in REFUSED_WAYS.get(way, ()):
        with (
            ReplayBuffer(100) as buf,
            pytest.raises(
                InputError,
                match=rf"{NAMES[kind]}'.*no dtype of numbers|without slashes, got '{NAMES[kind]}'",
            ),
        ):
            WAYS[way]({NAMES[kind]: rows}, buf)
        return
    for got in stored(way, storage):
        found = got[NAMES[kind]]
        if kind == "bytes":  # one at a time they are as wide as they are
            found = np.asarray(found).astype(rows.dtype)
        assert not same(rows, found)


@pytest.mark.parametrize("way", sorted({*WAYS} - {"python", "arrays", "tensors", "add"}))  # which see no mask
def test_what_is_masked_is_refused(way):
    rows = {"x": MASKED, "y": np.arange(STEPS)}
    with ReplayBuffer(100) as buf:
        with pytest.raises(RingmapError, match=r"x'?.*mask.*filled"):
            WAYS[way](rows, buf)
        assert buf.num_steps_stored == (2 if way == "parts" else 0)
