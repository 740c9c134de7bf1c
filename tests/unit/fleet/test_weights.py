"""Weights reach a collector whole or not at all: tied tensors, kills, errors of the disk, readers beside a
publisher."""

import errno
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from functools import partial

import pytest
import safetensors.torch
import torch

from ringmap import Weights
from ringmap.errors import CorruptError, EnvironmentFault, InputError, LockedError, NewerVersionError
from ringmap.fleet import weights as module
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.lock import WriterLock
from ringmap.testing.kills import killed_after, reason_why_not
from tests import ROOT
from tests.disks import FaultyDisk
from tests.tiers import few
from tests.unit.fleet.models import Tied, filled, net, values
from tests.unit.fleet.publisher import publish


def same(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)


NAME = "policy.safetensors"


# -- what goes in comes out ---------------------------------------------------------------------


def test_a_model_comes_out_as_it_went_in(tmp_path):
    learned, acting = Tied(), Tied()
    learned.norm(torch.rand(4, 3))  # running statistics
    assert not same(learned, acting)
    Weights(tmp_path).publish(learned, 7)
    weights = Weights(str(tmp_path))
    assert weights.step is None
    assert weights.load_into(acting)
    assert weights.step == 7 and same(learned, acting)
    assert acting.head.weight is acting.embed.weight


def tied_pair():
    """A model that the library's own loader takes: no buffers that are views."""
    pair = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    pair[1].weight = pair[0].weight
    return pair


def test_tied_tensors_are_stored_once_and_the_library_reads_them(tmp_path):
    Weights(tmp_path).publish(Tied(), 7)
    stored = safetensors.torch.load_file(tmp_path / NAME)
    assert "embed.weight" in stored and "head.weight" not in stored
    path, plain, acting = tmp_path / "plain", tied_pair(), tied_pair()
    Weights(path).publish(plain, 7)
    safetensors.torch.load_model(acting, path / NAME)
    assert same(plain, acting) and acting[0].weight is acting[1].weight
    with safetensors.safe_open(tmp_path / NAME, "pt") as file:
        assert file.metadata()["step"] == "7"


def test_a_set_takes_the_place_of_the_one_before(tmp_path):
    weights = Weights(tmp_path)
    for step in (1, 2, 5, 2):  # a learner that went back
        weights.publish(filled(step), step)
        assert sorted(os.listdir(tmp_path)) == ["lock", NAME]
        model, reader = net(8), Weights(tmp_path)
        assert reader.load_into(model) and reader.step == step and values(model) == {step}


# -- what is new --------------------------------------------------------------------------------


def calls_of(work):
    """Return the names of the calls of the system that `work` makes."""
    seen = []

    def note(frame, event, what):
        if event == "c_call" and what.__module__ in ("posix", "_io"):
            seen.append(what.__name__)

    sys.setprofile(note)
    try:
        found = work()
    finally:
        sys.setprofile(None)
    return found, seen


def test_nothing_new_costs_one_stat(tmp_path):
    Weights(tmp_path).publish(filled(1), 1)
    reader, model = Weights(tmp_path), net(8)
    loaded, calls = calls_of(lambda: reader.load_into(model))
    assert loaded and "open" in calls
    assert calls_of(lambda: reader.load_into(model)) == (False, ["stat"])


def reused(folder, holds):
    """Publish again and again; tell whether the set ever was in a file of the same inode number as the one that was
    read."""
    publisher, reader, model = Weights(folder), Weights(folder), net(8)
    for step in range(4):  # by now the numbers of removed files come round
        publisher.publish(filled(step), step)
    reader.load_into(model)
    found = [os.stat(os.path.join(folder, NAME)).st_ino]
    if not holds:
        del reader
    for step in range(1, 20 if holds else 300):
        publisher.publish(filled(step), step)
        found.append(os.stat(os.path.join(folder, NAME)).st_ino)
        if found[-1] == found[0]:
            return True
    return False


def test_a_file_that_is_held_keeps_its_number():
    """On tmpfs numbers are not used again soon, on ext4 they are."""
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        assert not reused(os.path.join(folder, "held"), holds=True)
        if not reused(os.path.join(folder, "control"), holds=False):
            pytest.skip("this file system does not use inode numbers again: no control")


def test_a_directory_that_is_replaced_is_new(tmp_path):
    path = tmp_path / "policy"
    Weights(path).publish(filled(5), 5)
    reader, model = Weights(path), net(8)
    assert not Weights(tmp_path / "none").load_into(model)
    assert reader.load_into(model)
    path.rename(tmp_path / "old")
    assert not reader.load_into(model) and values(model) == {5}, "there is nothing newer"
    Weights(path).publish(filled(1), 1)
    assert reader.load_into(model) and values(model) == {1} and reader.step == 1


def test_each_model_is_filled(tmp_path):
    weights, one, two = Weights(tmp_path), net(8), net(8)
    Weights(tmp_path).publish(filled(1), 1)
    assert weights.load_into(one) and weights.load_into(two)
    assert not weights.load_into(one) and not weights.load_into(two)
    assert values(one) == values(two) == {1}
    bound = pickle.loads(pickle.dumps(Weights(tmp_path, one)))
    assert bound.model is not one and bound.step is None
    assert bound.load_into() and values(bound.model) == {1}


def test_a_learner_that_collects_by_itself_keeps_what_it_learned(tmp_path):
    model = filled(1)
    weights = Weights(tmp_path, model)
    weights.publish(model, 10)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    assert not weights.load_into() and 2.0 in values(model) and weights.step == 10


# -- kills, errors of the disk, readers beside ----------------------------------------------------


def attempt(path, disk=None):
    weights = Weights(path, disk=disk)
    weights.publish(filled(2, 64), 2)


def left(path, steps):
    """Return the step that is there after a kill: one of these, whole; and publish the next."""
    reader, model = Weights(path), net()
    found = reader.load_into(model)
    assert (reader.step if found else None) in steps
    assert not found or values(model) == {reader.step}
    Weights(path).publish(filled(9, 64), 9)
    assert reader.load_into(model) and values(model) == {9}
    assert sorted(os.listdir(path)) == ["lock", NAME]
    return found and model


@pytest.mark.skipif(bool(reason_why_not()), reason=reason_why_not())
@pytest.mark.parametrize("published", few([3, 1, 0]))
def test_killed_before_every_change(tmp_path, published):
    steps, changes = set(), 0
    while True:
        path = tmp_path / str(changes)
        for _ in range(published):
            Weights(path).publish(filled(1, 64), 1)
        outcome = killed_after(changes, partial(attempt, path))
        assert outcome.killed or changes > 5
        expected = {1 if published else None, 2} if outcome.killed else {2}
        reader, model = Weights(path), net()
        reader.load_into(model)
        steps.add(reader.step)
        left(path, expected)
        if not outcome.killed:
            break
        changes += 1
    assert steps == {1 if published else None, 2}


class InPlace(Disk):
    """A disk on which a file is written where it lies, not beside: the fault that the campaign must find."""

    def put(self, path, beside, data, synced):
        with open(path, "wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            file.write(data[len(data) // 2 :])


@pytest.mark.skipif(bool(reason_why_not()), reason=reason_why_not())
def test_control_of_the_kills(tmp_path):
    found = []
    for changes in range(30):
        path = tmp_path / str(changes)
        Weights(path).publish(filled(1, 64), 1)
        outcome = killed_after(changes, partial(attempt, path, InPlace()))
        try:
            Weights(path).load_into(net())
        except CorruptError as error:
            found.append(str(error))
        if not outcome.killed:
            break
    assert found and not outcome.killed


def test_an_error_of_the_disk_leaves_the_set_before(tmp_path):
    disk, struck = FaultyDisk(), 0
    for at in range(1, 60):
        path = tmp_path / str(at)
        Weights(path).publish(filled(1, 64), 1)
        disk.fail(at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        try:
            attempt(path, disk)
        except EnvironmentFault as error:
            assert error.errno == errno.ENOSPC and "Weights.publish: No space" in str(error)
        done = not disk.struck
        struck += disk.struck
        disk.lift()
        left(path, {2} if done else {1, 2})
        if done:
            break
    assert done and struck > 5


class Noted(Disk):
    def __init__(self):
        super().__init__()
        self.changes = []

    def before(self, change, path, *details):
        self.changes.append((change, os.path.basename(path)))


def test_a_set_is_on_the_disk_before_it_has_its_name(tmp_path):
    disk = Noted()
    Weights(tmp_path, disk=disk).publish(filled(1), 1)
    order = [(c, n) for c, n in disk.changes if c in ("sync", "rename", "sync_folder")]
    assert order == [("sync", f"{NAME}.tmp"), ("rename", f"{NAME}.tmp"), ("sync_folder", tmp_path.name)]


def started(path):
    """Start a process that publishes flat out; return it, and the end of a pipe that it watches."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=publish, args=(str(path), theirs))
    process.start()
    theirs.close()
    return process, ours


def followed(path, wanted, reader, model):
    """Load beside a publisher `wanted` times; return the steps, those that were torn, and the last one published."""
    steps, torn = [], []
    process, pipe = started(path)
    with pipe:
        while len(steps) < wanted and process.is_alive():
            if reader.load_into(model):
                steps.append(reader.step)
                if values(model) != {reader.step}:
                    torn.append(reader.step)
        pipe.send("stop")
        last = pipe.recv()
    process.join()
    return steps, torn, last


def test_beside_a_publisher_every_set_is_whole(tmp_path):
    reader, model = Weights(tmp_path), net()
    steps, torn, last = followed(tmp_path, 100, reader, model)
    assert torn == [] and steps == sorted(set(steps)) and len(steps) == 100
    reader.load_into(model)
    assert reader.step == last and values(model) == {last}


class Halves(Weights):
    """A reader that takes each half of a set at another time: what one file that is written over would do."""

    def load_into(self, model=None):
        found = super().load_into(model)
        if found:
            before = [value.clone() for value in list(model.state_dict().values())[:2]]
            while not super().load_into(model):
                pass
            with torch.no_grad():
                for value, old in zip(model.state_dict().values(), before, strict=False):
                    value.copy_(old)
        return found


def test_control_of_the_reader_beside(tmp_path):
    assert followed(tmp_path, 5, Halves(tmp_path), net())[1]


def test_a_publisher_is_killed_again_and_again(tmp_path):
    reader, model = Weights(tmp_path), net()
    for strike in range(4):
        process, pipe = started(tmp_path)
        loads = 0
        with pipe:
            while loads < 5 + 7 * strike and process.is_alive():
                if reader.load_into(model):
                    loads += 1
                    assert values(model) == {reader.step}
            process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL
        reader.load_into(model)
        assert values(model) == {reader.step}
    Weights(tmp_path).publish(filled(9, 64), 9)
    assert sorted(os.listdir(tmp_path)) == ["lock", NAME]


def test_a_set_that_another_host_replaces_meanwhile_is_read_again(tmp_path, monkeypatch):
    """As NFS says it: the file that is open is gone."""
    for step in (1, 2):
        Weights(tmp_path / str(step)).publish(filled(step), step)
    read, struck = File.read, []

    def stale(self, size, offset):
        if not struck:
            struck.append(os.replace(tmp_path / "2" / NAME, tmp_path / "1" / NAME))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(self, size, offset)

    reader, model = Weights(tmp_path / "1"), net(8)
    monkeypatch.setattr(File, "read", stale)
    assert reader.load_into(model) and reader.step == 2 and values(model) == {2}


def test_one_publishes_at_a_time(tmp_path):
    Weights(tmp_path).publish(filled(1), 1)
    lock = WriterLock(Disk(), str(tmp_path / "lock"), str(tmp_path))
    lock.acquire()
    with pytest.raises(LockedError, match=rf"Weights.publish: .*process {os.getpid()} .*one learner"):
        Weights(tmp_path).publish(filled(2), 2)
    lock.release()
    Weights(tmp_path).publish(filled(2), 2)


# -- what is damaged ----------------------------------------------------------------------------


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.fixture
def published(tmp_path):
    Weights(tmp_path).publish(filled(1), 1)
    return tmp_path


def test_a_damaged_set_is_never_loaded(published, monkeypatch):
    path = published / NAME
    data = path.read_bytes()
    cases = [
        b"",
        data[:7],
        data[:-1],
        data + b"\0",
        bytes(len(data)),
        *(flipped(data, at) for at in range(0, len(data), 7)),
    ]
    for case in cases:
        path.write_bytes(case)
        model = filled(8)
        with pytest.raises(CorruptError, match=rf"Weights.load_into: {path} .*publish again"):
            Weights(published).load_into(model)
        assert values(model) == {8}
    path.unlink()
    assert not Weights(published).load_into(net(8)), "nothing is published any more"
    path.symlink_to(published / "elsewhere")
    with pytest.raises(CorruptError, match="symbolic link"):
        Weights(published).load_into(net(8))
    path.unlink()
    path.write_bytes(flipped(data, len(data) - 1))
    monkeypatch.setattr(module, "_checksum", lambda data, at: data[at : at + 16])
    assert Weights(published).load_into(net(8)), "the control: without the checksum it is loaded"


def test_a_damaged_set_is_published_again(published):
    (published / NAME).write_bytes(b"damaged")
    Weights(published).publish(filled(3), 3)
    model = net(8)
    assert Weights(published).load_into(model) and values(model) == {3}


def test_a_newer_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_VERSION", 2)
    Weights(tmp_path).publish(filled(1), 1)
    monkeypatch.undo()
    with pytest.raises(NewerVersionError, match="version 2, expected 1: install a newer"):
        Weights(tmp_path).load_into(net(8))


# -- other models, bad input ----------------------------------------------------------------------


def changed(**parts):
    model = net(8)
    for name, part in parts.items():
        setattr(model, name, part)
    return model


OTHERS = {
    "wider": (lambda: net(9), r"'0.weight' is float32 \(8, 8\) there, and float32 \(9, 8\) in this one"),
    "of another dtype": (lambda: net(8).double(), r"'0.weight' is float32 \(8, 8\) there, and float64 \(8, 8\)"),
    "more": (lambda: changed(last=torch.nn.Linear(8, 3)), r"'last.weight' is nothing there, and float32 \(3, 8\)"),
    "fewer": (lambda: net(8)[:1], r"'1.bias' is float32 \(8,\) there, and nothing in this one"),
    "renamed": (lambda: torch.nn.ModuleDict({"a": net(8)}), r"'a.0.weight' is nothing there"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_of_another_model_are_named(published, name):
    make, message = OTHERS[name]
    model, weights = make(), Weights(published)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):  # it is not taken for loaded
        with pytest.raises(InputError, match=f"Weights.load_into: .*another model: {message}"):
            weights.load_into(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert weights.step is None


def test_tied_is_another_model_than_not_tied(tmp_path):
    for published, loaded, message in [
        (True, False, r"'head.weight' is nothing there, and float32 \(5, 3\) in this one"),
        (False, True, r"'head.weight' is float32 \(5, 3\) of its own there, and .* tied to 'embed.weight' in this one"),
    ]:
        Weights(tmp_path).publish(Tied(published), 1)
        with pytest.raises(InputError, match=message):
            Weights(tmp_path).load_into(Tied(loaded))


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return {"anything": 1}

    def set_extra_state(self, state):
        pass


def lacking(value):
    model = net(8)
    model.register_buffer("odd", value)
    return model


REFUSED = {
    "no module": (lambda: {"w": torch.zeros(2)}, "expected a torch.nn.Module, got dict"),
    "extra state": (lambda: Extra(2, 2), "'_extra_state' is a dict"),
    "lazy": (lambda: torch.nn.LazyLinear(2), "'bias' is not initialised"),
    "sparse": (lambda: lacking(torch.eye(3).to_sparse()), "'odd' is sparse"),
    "meta": (lambda: torch.nn.Linear(2, 2, device="meta"), "'bias' is on the device meta"),
    "dtype": (lambda: lacking(torch.zeros(2, dtype=torch.complex128)), "complex128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_can_not_be_stored(tmp_path, name):
    make, message = REFUSED[name]
    with pytest.raises(InputError, match=f"Weights.publish: .*{message}"):
        Weights(tmp_path / "policy").publish(make(), 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_a_step_is_a_number(tmp_path, step):
    with pytest.raises(InputError, match=f"Weights.publish: step must be a number, 0 or more, got {step!r}"):
        Weights(tmp_path / "policy").publish(net(), step)
    assert os.listdir(tmp_path) == []


def test_no_model_and_no_folder(tmp_path):
    with pytest.raises(
        InputError, match="Weights.load_into: expected a torch.nn.Module, got NoneType; .*Weights.path, model"
    ):
        Weights(tmp_path).load_into()
    with pytest.raises(InputError, match="Weights: expected a torch.nn.Module, got int"):
        Weights(tmp_path, 3)
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="Weights.publish|file"):
        Weights(tmp_path / "file").publish(net(), 1)
    assert not Weights(tmp_path / "file").load_into(net())
