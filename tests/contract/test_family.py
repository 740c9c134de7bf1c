"""Everything that can be drawn from, with everything that draws from it, while it is evicted: against plain lists.

Each step says which ring, episode and step it is, and each episode its task: an item proves by itself that it may come.
"""

import contextlib
import copy
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset

import ringmap
from ringmap import TransitionReplayBuffer
from ringmap.buffers.engine import Engine
from ringmap.clips.gather import ClipReader
from ringmap.data import (
    ConcatDataset,
    GoalDataset,
    MergeDataset,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    Sequences,
    ShardedReplayBuffer,
    convert,
    get_format,
    load_dataset,
    merge,
)
from ringmap.errors import ClipIndexError, InputError, NoClipsError, RoleError, SubscriptError
from ringmap.samplers import (
    EpisodeSampler,
    EpochSampler,
    MixtureSampler,
    PrioritizedSampler,
    RecencySampler,
    UniformSampler,
)

pytestmark = pytest.mark.usefixtures("workers_end_soon")

MAX_STEPS, HISTORY = 60, 2
LENGTHS = (7, 9, 2, 14, 12, 1, 8)
TASKS = ("even", "odd")


@dataclass
class Plain:
    """Rings as lists of `(episode, length)`, oldest first; whole ones are evicted. Imports nothing of ringmap."""

    rings: list = field(default_factory=list)

    def write(self, ring, number, length):
        self.rings[ring].append((number, length))
        while sum(n for _, n in self.rings[ring]) > MAX_STEPS:
            del self.rings[ring][0]

    def episodes(self, chosen=None):
        """Return `(ring, episode) -> length`, of those among `chosen`, if given."""
        live = {(ring, n): length for ring, of in enumerate(self.rings) for n, length in of}
        return {key: length for key, length in live.items() if chosen is None or key in chosen}

    def clips(self, chosen=None, history=HISTORY):
        live = self.episodes(chosen).items()
        return {(*key, step) for key, length in live for step in range(length - history + 1)}


def told(ring, number, step):
    """Return the text of a step: some are longer than all before."""
    return f"{ring} {number}{' and on' * (number % 5)} {step // 2}"


def rows(ring, number, length, has_text=False):
    where = np.stack([np.full(length, ring), np.full(length, number), np.arange(length)], 1)
    return {
        "where": where,
        "action": where[:, 2:].astype("f4"),
        "reward": where[:, 2].astype("f8"),
        **({"told": np.array([told(*step) for step in where.tolist()])} if has_text else {}),
        "_episode_data": {"task": TASKS[number % 2], "number": number},
    }


class World:
    """Writers of some rings in a folder, and the plain rings beside them.

    `has_text`: whether there is a column of text, which is read ring by ring; else the rings are read side by side.
    """

    def __init__(self, folder, count, has_text=False, **options):
        self.has_text = has_text
        self.folder, self.plain, self.number = folder, Plain([[] for _ in range(count)]), 0
        self.writers = [self.make(f"ring{ring}", **options) for ring in range(count)]
        for _ in range(3):
            self.write(*LENGTHS)  # each ring has wrapped
        self.opened = []

    def make(self, name, **options):
        return ReplayBuffer(MAX_STEPS, HISTORY, path=self.folder / name, spare_rows=17, seed=0, **options)

    def write(self, *lengths):
        for length in lengths:
            for ring, writer in enumerate(self.writers):
                writer.write_episode(rows(ring, self.number, length, self.has_text))
                self.plain.write(ring, self.number, length)
            self.number += 1

    def open(self, made):
        self.opened.append(made)
        return made

    def close(self):
        for opened in [*self.opened, *self.writers]:
            opened.close()


# -- what can be drawn from ------------------------------------------------------------------------


@dataclass
class Source:
    """`made`: the object; `chosen`: its episodes for life, None where it shows what is stored now."""

    world: World
    made: object
    chosen: set | None = None
    is_live: bool = True

    def __post_init__(self):
        self.plain = self.world.plain if self.is_live else copy.deepcopy(self.world.plain)

    def evict(self, what):
        """Write until that is evicted; what follows writers has seen it."""
        self.world.write(*EVICTED[what])
        if self.chosen is None:
            self.made.refresh()

    @property
    def episodes(self):
        return self.plain.episodes(self.chosen)

    @property
    def clips(self):
        return self.plain.clips(self.chosen)

    @property
    def steps(self):
        return self.plain.clips(self.chosen, 1)

    @property
    def is_whole(self):
        return self.chosen is None or len(self.episodes) == len(self.chosen)

    def newest(self, count):
        """Return the newest clips: rings were written in turn."""
        order = sorted(self.clips, key=lambda clip: (clip[1], clip[0], clip[2]))
        return set(order[-count:])


def chosen_by(world, test):
    return {key for key in world.plain.episodes() if test(key)}


def is_odd(key):
    return key[1] % 2 == 1


def buffer(world, **options):
    made = world.writers[0]
    made.sampler = options.get("sampler")
    return Source(world, made)


def reader(world, **options):
    return Source(world, world.open(ReplayBuffer.open(world.folder / "ring0", **options)))


def unbranched(make):
    """Return what makes a source of one ring that is drawn from, and read, as many are."""

    def made(world, **options):
        engine = world.writers[0].engine
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "has_branch", False)
            engine.read_with(ClipReader)
            found = make(world, **options)
        assert (getattr(found.made, "engine", engine)).many is not None
        return found

    return made


def view(world, **options):
    return Source(world, buffer(world, **options).made.view(), chosen_by(world, lambda _: True))


def filtered(world, **options):
    made = buffer(world, **options).made.view(where="task = 'odd'")
    return Source(world, made, chosen_by(world, is_odd))


def half(world, **options):
    return sided(world, buffer(world, **options).made)


def sided(world, made):
    train, validation = made.split(0.6, seed=3)
    sides = [episodes_of(side) for side in (train, validation)]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == chosen_by(world, lambda _: True)
    return Source(world, train, sides[0])


def episodes_of(made):
    return {tuple(made.load_episode(n)["where"][0, :2].tolist()) for n in range(len(made.lengths))}


def file(world, where=None, **options):
    path = world.folder / f"file-{len(world.opened)}.h5"
    world.writers[0].dump(path, progress=False)
    made = world.open(load_dataset(path, num_steps=HISTORY, output="numpy", where=where))
    test = is_odd if where else lambda _: True
    return Source(world, made, chosen_by(world, test), is_live=False)


def filtered_file(world, **options):
    return file(world, "task = 'odd'")


def fleet(world, **options):
    made = ShardedReplayBuffer(sorted(world.folder.glob("ring*")), seed=0, **options)
    return Source(world, world.open(made))


def fleet_view(world, **options):
    return Source(world, fleet(world, **options).made.view(), chosen_by(world, lambda _: True))


def fleet_filtered(world, **options):
    made = fleet(world, **options).made.view(where="task = 'odd'")
    return Source(world, made, chosen_by(world, is_odd))


def fleet_half(world, **options):
    return sided(world, fleet(world, **options).made)


SOURCES = {
    "buffer": (1, buffer),
    "reader": (1, reader),
    "view": (1, view),
    "filtered view": (1, filtered),
    "split": (1, half),
    "file": (1, file),
    "filtered file": (1, filtered_file),
    "fleet of one": (1, fleet),
    "fleet of three": (3, fleet),
    "view of a fleet": (3, fleet_view),
    "filtered view of a fleet": (3, fleet_filtered),
    "split of a fleet": (3, fleet_half),
}
SOURCES |= {f"{name} without the branch": (1, unbranched(SOURCES[name][1])) for name in ("buffer", "reader", "split")}
FLEETS = [name for name, (count, _) in SOURCES.items() if count > 1]
FILES = ["file", "filtered file"]


# -- what draws ------------------------------------------------------------------------------------


def firsts(where):
    """Return the first step of each clip `(B, history, 3)`, each of consecutive steps of one episode."""
    where = np.asarray(where)
    expected = np.repeat(where[:, :1], where.shape[1], 1)
    expected[..., 2] += np.arange(where.shape[1])
    np.testing.assert_array_equal(where, expected)
    return [tuple(first) for first in where[:, 0].tolist()]


def proved(batch):
    """Return what `firsts` does, and assert that the text of each step is its own."""
    steps = np.asarray(batch["where"]).reshape(-1, 3).tolist()
    assert "told" not in batch or np.asarray(batch["told"]).ravel().tolist() == [told(*step) for step in steps]
    return firsts(batch["where"])


def among(found, allowed):
    assert set(found) <= allowed, sorted(set(found) - allowed)[:5]


def sampled(source, allowed=None, least=8):
    found = [first for _ in range(4) for first in proved(source.made.sample(32))]
    among(found, source.clips if allowed is None else allowed)
    assert len(set(found)) >= min(least, len(source.clips) // 4)
    return found


def batched(source):
    with contextlib.closing(source.made.batches(16, steps=3)) as batches:
        assert len([among(proved(batch), source.clips) for batch in batches]) == 3


def passed(source, workers=0, **options):
    """A pass: each item that is still stored comes as itself, in place of any other comes one of these."""
    loader = DataLoader(source.made, batch_size=16, num_workers=workers, **options)
    found = [first for batch in loader for first in proved(batch)]
    assert set(found) == source.clips
    assert len(found) == (len(source.clips) if source.chosen is None else len(source.made))


def loader(source):
    passed(source, shuffle=True)


def workers(source):
    passed(source, workers=2, shuffle=True)


def order(source):
    return {"sampler": source.made.pass_sampler(seed=1)} if source.is_live else {"shuffle": True}


def pass_sampler(source):
    passed(source, **order(source))


def overtaken(source):
    """Episodes are evicted in the middle of a pass: what is read later is stored then."""
    allowed, found = set(source.clips), []
    try:
        for batch in DataLoader(source.made, batch_size=8, **order(source)):
            found += proved(batch)
            among(found[-len(batch["where"]) :], allowed)
            source.world.write(5)
            allowed = source.clips
    except NoClipsError:
        if source.clips or not found:
            raise


def grain(source):
    made = ringmap.grain.source(source.made)
    assert {first for n in range(len(made)) for first in firsts(made[n]["where"][None])} == source.clips


def mixed(source):
    online = ReplayBuffer(MAX_STEPS, HISTORY)
    online.write_episode({n: v for n, v in rows(9, 9, 9, source.world.has_text).items() if n[0] != "_"})
    made = OfflineToOnlineReplayBuffer(source.made, online_storage=online, seed=0)
    where = np.asarray(made.sample(32)["where"])
    among(firsts(where[:16]), source.clips)
    assert (where[16:, :, 0] == 9).all()


def concatenated(source):
    online = ReplayBuffer(MAX_STEPS, HISTORY)
    online.write_episode(rows(9, 9, 9, source.world.has_text))
    made = ConcatDataset([source.made, online])
    found = [f for batch in DataLoader(made, batch_size=16) for f in proved(batch)]
    assert {first for first in found if first[0] != 9} == source.clips
    assert len([first for first in found if first[0] == 9]) == 8


def merged(source):
    made = MergeDataset([source.made, source.made], [["where"], ["action"]])
    for batch in DataLoader(made, batch_size=16):
        among(firsts(batch["where"]), source.clips)
        np.testing.assert_array_equal(batch["where"][..., 2:], batch["action"])


def goals(source):
    made = GoalDataset(source.made, (0.5, 0.25, 0.25, 0), goal_keys={"where": "goal"}, seed=0)
    for batch in DataLoader(made, batch_size=16):
        among(proved(batch), source.clips)
        among(firsts(batch["goal"]), source.steps)


# -- what takes all of it --------------------------------------------------------------------------


def all_rows(source):
    """`get_col_data`, `get_row_data`, `lengths`, `load_episode`, `get_episode_data`: what statistics are made of."""
    made = source.made
    np.testing.assert_array_equal(sorted(map(tuple, made.get_col_data("where").tolist())), sorted(source.steps))
    assert set(firsts(made.get_row_data(np.arange(len(source.steps)))["where"][:, None])) == source.steps
    check_episodes(source, made)


def check_episodes(source, made):
    keys = [tuple(made.load_episode(n)["where"][0, :2].tolist()) for n in range(len(made.lengths))]
    assert dict(zip(keys, np.asarray(made.lengths).tolist(), strict=True)) == source.episodes
    data = made.get_episode_data()
    assert data["number"] == [number for _, number in keys]
    assert data["task"] == [TASKS[number % 2] for _, number in keys]


def converted(source):
    path = source.world.folder / "converted.h5"
    convert(source.made, path, progress=False)
    check_episodes(source, source.world.open(load_dataset(path, output="numpy")))


def merged_files(source):
    path = source.world.folder / "merged.h5"
    merge([source.made], path, progress=False)
    check_episodes(source, source.world.open(load_dataset(path, output="numpy")))


def extended(source):
    made = source.world.open(ReplayBuffer(10 * MAX_STEPS, HISTORY))
    made.extend_from(source.made)
    check_episodes(source, made)


DRAWS = {
    "sample": sampled,
    "batches": batched,
    "loader": loader,
    "workers": workers,
    "pass": pass_sampler,
    "overtaken": overtaken,
    "grain": grain,
    "mix": mixed,
    "concat": concatenated,
    "merge": merged,
    "goals": goals,
}
TAKES = {"rows": all_rows, "convert": converted, "merge files": merged_files, "extend": extended}
EVICTED = {"nothing": (), "some": (3, 9, 6), "all": (*LENGTHS, *LENGTHS)}


@pytest.mark.parametrize("evicted", EVICTED)
@pytest.mark.parametrize("use", {**DRAWS, **TAKES})
@pytest.mark.parametrize("name", SOURCES)
def test_what_comes_is_what_the_source_has(tmp_path, name, use, evicted):
    count, make = SOURCES[name]
    with contextlib.closing(World(tmp_path, count, evicted == "some")) as world:
        source = make(world)
        source.evict(evicted)
        if use in DRAWS and source.clips:
            DRAWS[use](source)
        elif use in DRAWS:
            with pytest.raises(NoClipsError):
                DRAWS[use](source)
        elif source.is_whole:
            TAKES[use](source)
        else:  # an episode of the view is gone: nothing is left out without a word
            with pytest.raises(ClipIndexError, match="evicted"):
                TAKES[use](source)


# -- samplers --------------------------------------------------------------------------------------


def any_order(step, buffer, batch_size, history_len):
    return np.random.default_rng(step).integers(0, buffer.num_valid_ends(history_len), batch_size)


any_order.any_order = True


def newest_first(step, buffer, batch_size, history_len):
    return buffer.num_valid_ends(history_len) - 1 - np.arange(batch_size) % 4


SAMPLERS = {
    "uniform": lambda: UniformSampler(0),
    "recency": lambda: RecencySampler(window=12, rng=0),
    "epochs": lambda: EpochSampler(0),
    "episodes": lambda: EpisodeSampler(0),
    "priorities": lambda: PrioritizedSampler(rng=0),
    "ranks": lambda: PrioritizedSampler(kind="rank", rng=0),
    "callable": lambda: any_order,
    "in order": lambda: newest_first,
    "mixture": lambda: MixtureSampler([(UniformSampler(0), 0.5), (RecencySampler(window=12, rng=0), 0.5)], rng=0),
}
REFUSED = {
    **{(name, "ranks"): (InputError, "rank") for name in FLEETS},
    **{(name, "in order"): (InputError, "any_order") for name in FLEETS},
}
"""What means nothing, with its error."""


def cells():
    for name, by, evicted in itertools.product(SOURCES, SAMPLERS, EVICTED):
        if name not in FILES:
            yield name, by, evicted


@pytest.mark.parametrize(("name", "by", "evicted"), list(cells()))
def test_each_sampler_draws_from_what_the_source_has(tmp_path, name, by, evicted):
    (count, make), sampler = SOURCES[name], SAMPLERS[by]()
    with contextlib.closing(World(tmp_path, count, evicted == "some")) as world:
        if (name, by) in REFUSED:
            error, match = REFUSED[name, by]
            with pytest.raises(error, match=match):
                make(world, sampler=sampler).made.sample(8)
            return
        source = make(world, sampler=sampler)
        source.evict(evicted)
        if not source.clips:
            with pytest.raises(NoClipsError):
                source.made.sample(8)
            return
        newest = source.newest(4 if by == "in order" else 12)
        allowed = newest if by in ("recency", "in order") else source.clips
        found = sampled(source, allowed, least=3)
        if by == "mixture":
            assert sum(first in newest for first in found) > len(found) * 0.4
        if by == "priorities":
            prefers(source, sampler)


def prefers(source, sampler):
    """The clip with the only high priority comes nearly always."""
    batch = source.made.sample(32)
    hot = tuple(np.asarray(batch["where"])[0, 0].tolist())
    is_hot = [first == hot for first in proved(batch)]
    assert sampler.update_priorities(batch.ids, np.where(is_hot, 1e6, 0.0)) == 32
    assert sampled(source, least=1).count(hot) > 64


# -- transitions -----------------------------------------------------------------------------------

CAPACITY = 40


class Steps:
    """Writers of transitions, and the transitions of each ring, oldest first."""

    def __init__(self, folder, count, sampler=None):
        self.folder, self.kept, self.number = folder, [[] for _ in range(count)], 0
        self.writers = [
            TransitionReplayBuffer(CAPACITY, (3,), obs_dtype="f8", seed=0, sampler=sampler, path=folder / f"ring{ring}")
            for ring in range(count)
        ]
        self.opened = []
        self.add(*LENGTHS)

    def add(self, *lengths):
        for length in lengths:
            for step, (ring, writer) in itertools.product(range(length), enumerate(self.writers)):
                after = np.array([[ring, self.number, step + 1]], "f8")
                writer.add(after - [0, 0, 1], [step], [step], after, [step == length - 1])
                self.kept[ring] = [*self.kept[ring], (ring, self.number, step)][-CAPACITY:]
            self.number += 1

    @property
    def stored(self):
        return {step for ring in self.kept for step in ring}

    def close(self):
        for opened in [*self.opened, *self.writers]:
            opened.close()


def transitions_of(batch):
    """Return the steps of a batch, each with its own next observation."""
    steps = np.asarray(batch["observations"], np.int64)
    np.testing.assert_array_equal(np.asarray(batch["next_observations"]) - steps, np.eye(3)[[2] * len(steps)])
    np.testing.assert_array_equal(np.asarray(batch["rewards"]).ravel(), steps[:, 2])
    return [tuple(step) for step in steps.tolist()]


def one_ring(steps, **options):
    return steps.writers[0]


def its_reader(steps, **options):
    steps.writers[0].flush()
    return TransitionReplayBuffer.open(steps.folder / "ring0", **options)


def its_fleet(steps, **options):
    for writer in steps.writers:
        writer.flush()
    return ShardedReplayBuffer(sorted(steps.folder.glob("ring*")), seed=0, **options)


BUFFERS = {
    "transitions": (1, one_ring),
    "reader of transitions": (1, its_reader),
    "fleet of transitions": (3, its_fleet),
}


def draw_transitions(made, stored):
    among([step for _ in range(4) for step in transitions_of(made.sample(32))], stored)


def batches_of_transitions(made, stored):
    with contextlib.closing(made.batches(16, steps=3)) as batches:
        assert len([among(transitions_of(batch), stored) for batch in batches]) == 3


def pass_of_transitions(made, stored, workers=0):
    loader = DataLoader(made, batch_size=16, sampler=made.pass_sampler(seed=1), num_workers=workers)
    found = [step for batch in loader for step in transitions_of(batch)]
    assert sorted(found) == sorted(stored)


def workers_on_transitions(made, stored):
    pass_of_transitions(made, stored, 2)


def view_of_transitions(made, stored):
    view = made.view()
    assert sorted(transitions_of(view[np.arange(len(view))])) == sorted(stored)
    among(transitions_of(view.sample(32)), stored)


def split_of_transitions(made, stored):
    one, other = (transitions_of(side[np.arange(len(side))]) for side in made.split(0.5))
    assert sorted(one + other) == sorted(stored)
    assert not {step[:2] for step in one} & {step[:2] for step in other}


TRANSITIONS = {
    "sample": draw_transitions,
    "batches": batches_of_transitions,
    "pass": pass_of_transitions,
    "workers": workers_on_transitions,
    "view": view_of_transitions,
    "split": split_of_transitions,
}


@pytest.mark.parametrize("evicted", EVICTED)
@pytest.mark.parametrize("use", TRANSITIONS)
@pytest.mark.parametrize("name", BUFFERS)
def test_each_transition_is_stored(tmp_path, name, use, evicted):
    count, make = BUFFERS[name]
    with contextlib.closing(Steps(tmp_path, count)) as steps:
        made = make(steps)
        steps.opened.append(made)
        steps.add(*EVICTED[evicted])
        for writer in steps.writers:
            writer.flush()
        made.refresh()
        TRANSITIONS[use](made, steps.stored)


# -- what means nothing ----------------------------------------------------------------------------


def a_mix(folder):
    offline = folder / "offline.h5"
    with get_format("hdf5").open_writer(offline) as writer:
        writer.write_episode({"where": np.zeros((9, 3)), "action": np.zeros(9)})
    return OfflineToOnlineReplayBuffer(str(offline), online_capacity=50, batch_size=8, seed=0)


def some_transitions(folder):
    return Steps(folder, 1).writers[0]


def some_episodes(folder, **options):
    return World(folder, 1, **options).writers[0]


def recorded_in_parts(folder):
    made = ReplayBuffer(MAX_STEPS, path=folder / "parts", seed=0)
    for lane in range(2):
        episode = made.begin_episode(commit_every=3, lane=lane)
        for step in range(9):
            episode.append({"where": [0, lane, step]})
        episode.finish(terminated=True)
    return made


def in_a_worker(folder):
    made = some_episodes(folder, sampler=PrioritizedSampler(rng=0))
    made.sample(8)
    return next(iter(DataLoader(Drawing(made), batch_size=None, num_workers=1)))


class Drawing(IterableDataset):
    """Draws in a worker by itself."""

    def __init__(self, buffer):
        self.buffer = buffer

    def __iter__(self):
        yield self.buffer.sample(8)


MEANINGLESS = {
    "across in a view of some episodes": (
        lambda f: recorded_in_parts(f).view(Sequences(4, across=True)).take([0]),
        InputError,
        "across",
    ),
    "samplers by episode on transitions": (
        lambda f: Steps(f, 1, sampler=EpisodeSampler(0)).writers[0].sample(8),
        InputError,
        "EpisodeSampler",
    ),
    "windows on transitions": (lambda f: some_transitions(f).sample(8, window=Sequences(4)), TypeError, "window"),
    "priorities in a worker": (in_a_worker, RoleError, "batches"),
    "ring weights without a live ring": (lambda f: a_file(f).sample(8, weights={"ring0": 1}), TypeError, "weights"),
    "a mix in a pass": (lambda f: next(iter(DataLoader(a_mix(f), batch_size=8))), SubscriptError, "sample"),
    "a mix in grain": (lambda f: ringmap.grain.source(a_mix(f)), InputError, "OfflineToOnlineReplayBuffer"),
    "a mix in a ConcatDataset": (lambda f: ConcatDataset([a_mix(f)]), InputError, "OfflineToOnlineReplayBuffer"),
    "a mix in a MergeDataset": (lambda f: MergeDataset([a_mix(f)]), InputError, "OfflineToOnlineReplayBuffer"),
    "a mix in a GoalDataset": (lambda f: GoalDataset(a_mix(f)), InputError, "OfflineToOnlineReplayBuffer"),
    "transitions in a GoalDataset": (lambda f: GoalDataset(some_transitions(f)), InputError, "TransitionReplayBuffer"),
}


def a_file(folder):
    return World(folder, 1).writers[0].dump(folder / "a.h5", progress=False) or load_dataset(folder / "a.h5")


@pytest.mark.parametrize("what", MEANINGLESS)
def test_what_means_nothing_is_refused_by_name(tmp_path, what):
    call, error, match = MEANINGLESS[what]
    with pytest.raises(error, match=match):
        call(tmp_path)
