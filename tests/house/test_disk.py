"""Only `ringmap.storage.disk.files` (and `system` below it) changes the disk: faults have one door."""

import ast

from tests import ROOT

SRC = ROOT / "src/ringmap"
DOOR = {SRC / "storage/disk/files.py", SRC / "storage/disk/system.py"}
MODULES = sorted({*(SRC / "storage").rglob("*.py"), *(SRC / "clips").rglob("*.py")} - DOOR)

NAMES = {
    "os": """chmod chown copy_file_range fdatasync fsync ftruncate link makedirs mkdir mkfifo mknod
        posix_fallocate pwrite pwritev remove removedirs removexattr rename renames replace rmdir
        sendfile setxattr splice symlink sync truncate unlink utime write writev""",
    "shutil": "copy copy2 copyfile copyfileobj copytree make_archive move rmtree unpack_archive",
    "tempfile": "NamedTemporaryFile TemporaryDirectory TemporaryFile mkdtemp mkstemp",
    "numpy": "save savetxt savez savez_compressed",
    "METHOD": """chmod hardlink_to mkdir posix_fallocate pwrite rename rmdir symlink_to tofile touch
        truncate unlink write_bytes write_text""",
}
CHANGES = {f"{owner}.{name}" for owner, names in NAMES.items() for name in names.split()}
OPENS = {"open": 1, "io.open": 1, "os.fdopen": 1}  # at which argument the mode stands
MAPS = {"numpy.memmap": 2, "numpy.lib.format.open_memmap": 1}


def mode_of(call, place, default, unknown="+"):
    given = [word.value for word in call.keywords if word.arg == "mode"] or call.args[place:][:1]
    if not given:
        return default
    return str(given[0].value) if isinstance(given[0], ast.Constant) else unknown


def import_names(tree):
    """Return what each imported name stands for: `{"np": "numpy", "rename": "os.rename"}`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def changes(source):
    """Return the lines, as `number: code`, where a module may change the disk by itself."""
    tree = ast.parse(source)
    names = import_names(tree)

    def dotted(node):
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"

    def is_change(node):
        if isinstance(node, ast.Attribute | ast.Name):
            return dotted(node) in CHANGES
        if not isinstance(node, ast.Call):
            return False
        name = dotted(node.func)
        owner, _, method = name.rpartition(".")
        if owner.rpartition(".")[2] in {"disk", "_disk"}:
            return False
        if name in OPENS:
            return bool(set("wax+") & set(mode_of(node, OPENS[name], "r")))
        if name in MAPS:
            return mode_of(node, MAPS[name], "r+") not in {"r", "c"}
        if name == "os.open":
            return any(flag in ast.unparse(node) for flag in ("O_RDWR", "O_WRONLY", "O_CREAT"))
        if name == "mmap.mmap":
            return "_READ" not in ast.unparse(node)
        if method == "open":
            return bool(set("wax+") & set(mode_of(node, 0, "r", unknown="r")))
        if method == "replace":  # that of str has two arguments, and that of dataclasses keywords
            return owner != "" and len(node.args) == 1 and not node.keywords
        return owner != "" and f"METHOD.{method}" in CHANGES

    lines = source.splitlines()
    found = {node.lineno for node in ast.walk(tree) if is_change(node)}
    return [f"{line}: {lines[line - 1].strip()}" for line in sorted(found)]


def test_modules_leave_the_disk_alone():
    assert len(MODULES) > 50
    found = {str(module.relative_to(SRC)): changes(module.read_text()) for module in MODULES}
    assert {module: lines for module, lines in found.items() if lines} == {}


PLANTED = """
import os, shutil, tempfile, io, mmap
import os as system
import numpy as np
from os import rename as mv
os.rename(a, b)
os.pwrite(fd, data, 0)
system.fsync(fd)
mv(a, b)
sync = os.fdatasync
os.open(path, os.O_RDWR | os.O_CREAT)
shutil.rmtree(path)
tempfile.mkdtemp()
open(path, "wb")
open(path, mode=given)
io.open(path, "r+")
path.open("a")
Path(path).write_text("x")
path.unlink()
(folder / "x").rename(folder / "y")
path.replace(other)
self.path.mkdir()
rows.tofile(path)
np.save(path, rows)
np.memmap(path, np.uint8)
np.lib.format.open_memmap(path, "w+")
mmap.mmap(fd, 0)
""".strip()

HARMLESS = """
import os, mmap
import numpy as np
open(path); open(path, "rb"); path.open(); path.read_bytes(); Store.open(disk, path)
os.open(path, os.O_RDONLY); os.pread(fd, 8, 0); os.path.join(a, b); os.close(fd)
name.replace("a", "b"); replace(record, flags=1); names.remove(name)
dataclasses.replace(record, flags=1)
disk.rename(a, b); self.disk.open(path, write=True); self._disk.replace(a)
np.memmap(path, np.uint8, "r"); np.load(path); mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
""".strip()


def test_control():
    assert len(changes(PLANTED)) == len(PLANTED.splitlines()) - 4
    assert changes(HARMLESS) == []


LOCAL = {SRC / "storage/disk/paths.py", SRC / "formats/common/disk.py"}


def absolute_paths(source):
    """Return the lines in which a module makes a path absolute by itself."""
    return [line.strip() for line in source.splitlines() if "os.path.abspath(" in line]


def test_one_module_makes_given_paths_absolute():
    """It refuses addresses, which would become folders: "s3:" in the current one."""
    assert absolute_paths("folder = os.path.abspath(path)") == ["folder = os.path.abspath(path)"]
    found = {str(p): absolute_paths(p.read_text()) for p in {*SRC.rglob("*.py")} - LOCAL}
    assert not {name: lines for name, lines in found.items() if lines}
