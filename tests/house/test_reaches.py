"""No class reaches into another's private names, and no modules import each other in a circle."""

import ast
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "src" / "ringmap"
OTHERS = {
    ("buffers/workers.py", "sys._getframe"): "Python's call stack: decision 085",
    ("datasets/base.py", "sys._getframe"): "who asks for a length: PyTorch's sampler, or the user",
    ("buffers/torchrl_storage.py", "made._cursor"): "TorchRL's writer has no public name for its cursor",
    ("recording/wrapper.py", "base._env_obs"): "Gymnasium's SyncVectorEnv hands out its memory, not a copy",
    ("buffers/sharded/rings.py", "lock._is_owned"): "Python's reentrant lock has no public name for who holds it",
    ("testing/kills.py", "os._exit"): "Python's own way to end a forked child",
    ("world/workers.py", "self._envs._state"): "Gymnasium's AsyncVectorEnv can't be closed in the middle of a call",
}
"""The private names of strangers' objects that are used all the same, and why."""
OF_TUPLES = {"_replace", "_fields", "_asdict", "_make", "_field_defaults"}
"""Public names of every `NamedTuple`, with the underscore that keeps them apart from fields."""


def owned_by(cls):
    """Return the names that a class defines, or sets on itself."""
    names = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def reaches(node, own=frozenset()):
    """Yield each `x._name` that is no name of the class around it, nor of what it inherits."""
    if isinstance(node, ast.ClassDef):
        own = own | owned_by(node)
    if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[:2] != "__" and node.attr not in OF_TUPLES:
        whose = ast.unparse(node.value)
        if whose not in ("self", "cls", "super()") and node.attr not in own:
            yield f"{whose}.{node.attr}"
    for child in ast.iter_child_nodes(node):
        yield from reaches(child, own)


def buffer_classes(paths):
    """Return the names of the classes below `Buffer`, of views and of engines, without `Buffer` itself."""
    known = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
                known[node.name] = {ast.unparse(base) for base in bases}
    found = {"Buffer", "BufferView", "Engine"}
    while new := {name for name, bases in known.items() if bases & found} - found:
        found |= new
    return found - {"Buffer"}


def asks(node, classes):
    """Yield the classes among these that a value is compared with: its base says what it can do."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
        yield from (n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name) and n.id in classes)
    elif isinstance(node, ast.MatchClass) and ast.unparse(node.cls) in classes:
        yield ast.unparse(node.cls)
    elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
        yield from (ast.unparse(n) for n in node.comparators if ast.unparse(n) in classes)
    for child in ast.iter_child_nodes(node):
        yield from asks(child, classes)


def imports(module, path):
    """Yield what a module imports of the package, whenever it does: for type checkers as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def circles(folder):
    """Return the sets of modules below a folder that import each other."""
    known = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        known[".".join(parts).removesuffix(".__init__")] = path
    after = {m: set(imports(m, path)) & known.keys() - {m} for m, path in known.items()}

    def reached(module):
        found, ahead = set(), [module]
        while ahead:
            new = after[ahead.pop()] - found
            found |= new
            ahead += new
        return found

    far = {m: reached(m) for m in known}
    return {frozenset(n for n in far[m] if m in far[n]) for m in known if m in far[m]}


@pytest.mark.slow
def test_no_class_reaches_into_another():
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in reaches(ast.parse(path.read_text()))
    }
    assert found == OTHERS.keys()


def test_no_class_of_buffers_is_asked_for():
    """What a buffer can do, its base says: a list of classes would forget one."""
    classes = buffer_classes((PACKAGE / "buffers").rglob("*.py"))
    assert {"ReplayBuffer", "Sampled", "BufferView", "OfflineToOnlineReplayBuffer", "StepRing"} <= classes
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in asks(ast.parse(path.read_text()), classes)
    }
    assert found == set()


@pytest.mark.slow
def test_no_circles():
    assert circles(PACKAGE) == set()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(x): return x._y", ["x._y"]),
        ("class A:\n    def f(self, x): return x._y", ["x._y"]),
        ("class A:\n    def f(self, x): return self.x._y", ["self.x._y"]),
        ("class A:\n    def f(self, x): self._y = x._y", []),
        ("def f(x): return x._replace(y=1)._z", ["x._replace(y=1)._z"]),
        ("class A:\n    def f(self): return super()._y, self._y, self.__dict__", []),
    ],
)
def test_control_of_reaches(code, expected):
    assert list(reaches(ast.parse(code))) == expected


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(x, Ring)",
        "isinstance(x, str | Ring)",
        "issubclass(type(x), (Ring, str))",
        "type(x) is Ring",
        "match x:\n    case Ring():\n        pass",
    ],
)
def test_control_of_classes_that_are_asked_for(code, tmp_path):
    (tmp_path / "rings.py").write_text("class Kept(Buffer, Generic[T]): ...\nclass Ring(Kept[int]): ...\nclass A: ...")
    classes = buffer_classes([tmp_path / "rings.py"])
    assert classes == {"Kept", "Ring", "BufferView", "Engine"}
    assert list(asks(ast.parse(code), classes)) == ["Ring"]
    assert not list(asks(ast.parse(code.replace("Ring", "Buffer")), classes))


def test_control_of_circles(tmp_path, monkeypatch):
    folder = tmp_path / "ringmap"
    folder.mkdir()
    monkeypatch.setattr("tests.house.test_reaches.PACKAGE", folder)
    lines = {"a": "from ringmap.b import x", "b": "from ringmap import c", "c": "", "d": ""}
    for name, line in lines.items():
        Path(folder / f"{name}.py").write_text(line)
    assert circles(folder) == set()
    (folder / "c.py").write_text("def late():\n    from ringmap.a import x")
    assert circles(folder) == {frozenset({"ringmap.a", "ringmap.b", "ringmap.c"})}
