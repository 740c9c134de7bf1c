"""What stands beside the columns keeps its promises, of whichever kind it is: one suite, run for all of them."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

import ringmap
from ringmap.errors import CorruptError, ReadOnlyError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import ENTRIES, NAMES
from ringmap.storage.sidecars import SIDECARS
from ringmap.storage.sidecars.priorities import PriorityFile
from ringmap.storage.sidecars.successors import Successors
from tests.unit.storage.sidecars.kinds import KINDS, check, files_of


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def values_at(kind, path, mode="r+"):
    with kind.open(path, mode) as buf:
        values = kind.values(buf)
    buf.close()
    return values


def made(kind, path, *tags):
    buf = kind.make(path)
    for tag in tags:
        kind.give(buf, tag)
    buf.close()


def refused_until_repaired(kind, path):
    assert check(kind, path)
    for mode in ("r", "r+"):
        with pytest.raises(CorruptError, match=kind.files[0]):
            values_at(kind, path, mode)
    ringmap.repair(path, dry_run=False)
    assert check(kind, path) == []


def killed(work):
    """Do work in a child process that ends by SIGKILL."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_what_was_given_survives_a_kill(kind, tmp_path):
    path = tmp_path / "buf"

    def work():
        buf = kind.make(path)
        kind.give(buf, 1)
        kind.give(buf, 2)

    killed(work)
    assert values_at(kind, path, "r") == kind.expected(2)
    assert values_at(kind, path) == kind.expected(2)
    assert check(kind, path) == []


def test_it_is_kept_from_handle_to_handle(kind, tmp_path):
    path = tmp_path / "buf"
    made(kind, path, 1)
    with kind.open(path) as buf:
        assert kind.values(buf) == kind.expected(1)
        kind.give(buf, 2)
    buf.close()
    assert values_at(kind, path) == kind.expected(2)


def test_damage_is_found_and_mended(kind, tmp_path):
    path = tmp_path / "buf"
    made(kind, path, 1, 2)
    for file in files_of(kind, path):
        flip(file, 94 if file.name == "priorities.bin" else 4096 + 40 if file.stat().st_size > 4096 else 30)
        if file.name == "successors.bin":  # of which the other header may be the one that counts
            flip(file, 40)
    findings = check(kind, path)
    assert findings
    names = {os.path.basename(name) for name in map(str, files_of(kind, path))}
    assert {os.path.basename(finding.file) for finding in findings} <= names
    for ring in kind.rings(path):
        ringmap.repair(ring, dry_run=False)
    for finding in check(kind, path):
        assert finding.file == "marks.json", "what people wrote is left to them"
        (path / finding.file).unlink()
    known = [kind.empty(), kind.expected(1), kind.expected(2)]
    for at, value in values_at(kind, path).items():
        assert any(of.get(at) == value for of in known) or value == 2 + 39 / 64  # the highest
    with kind.open(path) as buf:
        kind.give(buf, 3)
        assert kind.values(buf) == kind.expected(3)
    buf.close()


@pytest.mark.parametrize("mode", ["r+", "r"])
def test_a_copy_has_what_was_there(kind, tmp_path, mode):
    path, copy = tmp_path / "buf", tmp_path / "copy"
    buf = kind.make(path)
    kind.give(buf, 1)
    if mode == "r" and kind is KINDS["labels"]:
        with kind.open(path, mode) as reader, pytest.raises(ReadOnlyError):
            kind.copy(reader, copy)
        mode = "r+"
    handle = buf if mode == "r+" else kind.open(path, mode)
    kind.copy(handle, copy)
    kind.give(buf, 2)
    if handle is not buf:
        handle.close()
    buf.close()
    assert check(kind, copy) == []
    assert values_at(kind, copy) == kind.expected(1)
    assert values_at(kind, path) == kind.expected(2)


def test_a_copy_that_was_killed_is_no_obstacle(kind, tmp_path):
    """It ends before it has its name, with all its files there."""
    path, copy = tmp_path / "buf", tmp_path / "copy"
    made(kind, path, 1)

    def work():
        whole = Disk.rename

        def rename(self, source, target):
            if target == str(copy):
                os.kill(os.getpid(), signal.SIGKILL)
            whole(self, source, target)

        Disk.rename = rename
        kind.copy(kind.open(path), copy)

    killed(work)
    assert not copy.exists()
    with kind.open(path) as buf:
        kind.copy(buf, copy)
    buf.close()
    assert values_at(kind, copy) == kind.expected(1)


def test_what_is_of_another_buffer_is_not_served(kind, tmp_path):
    path, other = tmp_path / "buf", tmp_path / "other"
    made(kind, path, 1)
    made(kind, other, 5)
    for name in kind.files:
        place = path / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        (other / name).rename(place)
    if kind is not KINDS["labels"]:  # which are of a row by its stamp, and of none here
        assert check(kind, path)
    if kind.is_needed:
        refused_until_repaired(kind, path)
    assert values_at(kind, path) == kind.empty()


def test_what_is_missing_begins_empty(kind, tmp_path):
    path = tmp_path / "buf"
    made(kind, path, 1)
    for name in kind.files:
        place = path / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    if kind.is_needed:
        refused_until_repaired(kind, path)
    assert check(kind, path) == []
    assert values_at(kind, path) == kind.empty()
    with kind.open(path) as buf:
        kind.give(buf, 2)
    buf.close()
    assert values_at(kind, path) == kind.expected(2)


# -- the table -------------------------------------------------------------------------------------


def test_all_that_lies_in_a_buffer_is_in_the_table(kind, tmp_path):
    path = tmp_path / "buf"
    killed(lambda: made(kind, path, 1, 2))
    for ring in kind.rings(path):
        assert set(os.listdir(ring)) <= NAMES


def test_no_name_stands_twice():
    names = [name for entry in ENTRIES for name in (entry.name, *entry.temporary)]
    assert len(names) == len(set(names)) == len(NAMES)
    assert {name for sidecar in SIDECARS for name in sidecar.names} < NAMES


def test_the_reference_has_every_name():
    page = os.path.join(os.path.dirname(__file__), "../../../../docs/reference/on-disk-format.md")
    with open(page, encoding="utf-8") as file:
        text = file.read()
    assert [e.name for e in ENTRIES if f"`{e.name}`" not in text and f"`{e.name}/" not in text] == []


NEW_SIDECAR = """
import pathlib, sys
import numpy as np
from ringmap.storage import sidecars
from ringmap.storage.disk import paths

paths.NAMES |= {"notes.bin"}

class Notes(sidecars.Sidecar):
    names = ("notes.bin",)

    @classmethod
    def recover(cls, home, head):
        with open(home.path("recovered"), "w"):
            return []

    @classmethod
    def faults(cls, home, newest):
        return [] if home.disk.read_file(home.path("notes.bin"), 99) == home.uuid else ["wrong"]

    @classmethod
    def repair(cls, home, newest):
        return "write it again", lambda: home.disk.replace_file(home.path("notes.bin"), home.uuid)

    @classmethod
    def copy(cls, source, target, state, kept):
        assert state.newest.head == state.head == 3
        target.disk.replace_file(target.path("notes.bin"), target.uuid)

    def sync(self): ...
    def close(self): ...

sidecars.SIDECARS = (*sidecars.SIDECARS, Notes)
import ringmap

path = pathlib.Path(sys.argv[1])
with ringmap.ReplayBuffer(10, path=path / "buf") as buf:
    (path / "buf/recovered").unlink()
    buf.write_episode({"x": np.arange(3)})
    (path / "buf/notes.bin").write_bytes(b"?")
    assert [str(f) for f in ringmap.check(path / "buf")] == ["notes.bin: wrong"]
    buf.snapshot(path / "copy")
buf.close()
assert "notes.bin: write it again" in map(str, ringmap.repair(path / "buf", dry_run=False))
for name in ("buf", "copy"):
    assert ringmap.check(path / name) == []
    assert (path / name / "notes.bin").exists()
"""


def test_a_new_sidecar_is_a_name_and_a_class(tmp_path):
    subprocess.run([sys.executable, "-c", NEW_SIDECAR, str(tmp_path)], check=True)


# -- controls --------------------------------------------------------------------------------------


def _nothing(*_):
    return None


PLANTED = {
    "priorities are not copied": ("priorities", PriorityFile, "copy", "copy"),
    "next observations are not copied": ("next observations", Successors, "copy", "copy"),
    "check overlooks priorities": ("priorities", PriorityFile, "faults", "damage"),
    "check overlooks next observations": ("next observations", Successors, "faults", "damage"),
    "an update of priorities is not written": ("priorities", PriorityFile, "append", "kill"),
    "what follows is not written": ("next observations", Successors, "write", "kill"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_control(tmp_path, monkeypatch, name):
    which, owner, method, test = PLANTED[name]
    wrong = {"faults": lambda *_: []}.get(method, _nothing)
    monkeypatch.setattr(owner, method, wrong)
    tests = {
        "copy": lambda: test_a_copy_has_what_was_there(KINDS[which], tmp_path, "r+"),
        "damage": lambda: test_damage_is_found_and_mended(KINDS[which], tmp_path),
        "kill": lambda: test_what_was_given_survives_a_kill(KINDS[which], tmp_path),
    }
    with pytest.raises(AssertionError):
        tests[test]()
