import contextlib

import pytest

from ringmap import ReplayBuffer
from ringmap.errors import ReplacedError
from ringmap.storage.columns.memmap import AdjacentColumn, MemmapColumn
from ringmap.storage.disk.system import System
from tests.disks import ram_folder
from tests.unit.buffers.steps import columns, episode


class Fleet:
    """Rings below one directory, with writers in this process, and the model: number -> length of every episode, by
    ring."""

    def __init__(self, folder):
        self.folder = folder
        self.writers = {}
        self.model = {}
        self.next = 0

    def ring(self, name, max_steps=400, **options):
        """Make a ring."""
        self.writers[name] = ReplayBuffer(max_steps, path=self.folder / name, **options)
        self.model[name] = {}
        return self.writers[name]

    def write(self, name, length, data=None):
        """Write the next episode to a ring."""
        self.writers[name].write_episode(episode(self.next, length, data or {"ring": name}))
        self.model[name][self.next] = length
        kept = len(self.writers[name].lengths)
        for number in list(self.model[name])[:-kept]:
            del self.model[name][number]
        self.next += 1

    def write_in_parts(self, name, length):
        """Write the next episode to a ring, in parts of 10 steps."""
        with self.writers[name].begin_episode(commit_every=10) as recording:
            for at in range(length):
                step = columns(self.next, at, at + 1)
                recording.append({name: values[0] for name, values in step.items()})
        self.model[name][self.next] = length
        self.next += 1

    @property
    def lengths(self):
        """Number -> length, of all stored episodes."""
        return {number: n for ring in self.model.values() for number, n in ring.items()}

    def clips(self, span):
        """Return the `(episode, first step)` of every clip of the model."""
        return {(e, s) for e, n in self.lengths.items() for s in range(n - span + 1)}


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path / "fleet")
    yield made
    for writer in made.writers.values():
        with contextlib.suppress(ReplacedError):  # a test removed it
            writer.close()


@pytest.fixture
def three(fleet):
    """Three rings of 2, 3 and 4 episodes, of other capacities."""
    for number, name in enumerate(("a", "b", "c")):
        fleet.ring(name, 200 + 50 * number)
        for _ in range(2 + number):
            fleet.write(name, 10 + fleet.next)
    return fleet


@pytest.fixture(params=["side by side", "ring by ring"])
def copies(request, monkeypatch):
    """The class that copies rows: of all rings at once, or of each ring, as where the system can't map files side by
    side."""
    if request.param == "side by side":
        return AdjacentColumn
    monkeypatch.setattr(System, "room", lambda self, nbytes: None)
    return MemmapColumn


@pytest.fixture
def fast():
    """A folder where a sync costs nothing, if there is one: then no writer waits for a disk."""
    with ram_folder() as folder:
        yield folder
