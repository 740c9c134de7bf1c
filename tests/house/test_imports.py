import ast
from importlib import import_module

import pytest

from ringmap.errors import MissingExtraError
from ringmap.extras import missing
from tests.house import PYTHON, ROOT, run

NEEDS = {"ringmap.sb3": "sb3"}
"""Faces whose names are subclasses of a library's: the extra that brings it."""

PROBE = """
import sys, time
start = time.process_time()  # the machine may be busy
import ringmap
print(time.process_time() - start, *{name.split(".")[0] for name in sys.modules})
"""


def test_import_is_quick_and_brings_nothing_in():
    probes = [run(PYTHON, "-c", PROBE).split() for _ in range(5)]
    assert min(float(seconds) for seconds, *_ in probes) < 0.1
    assert not {"gymnasium", "h5py", "lance", "numpy", "torch", "zarr"} & set(probes[0])


def test_each_stub_lists_what_it_imports():
    """`attach` takes the names from the imports of a stub, type checkers and `import *` from its `__all__`."""
    stubs = sorted((ROOT / "src" / "ringmap").rglob("*.pyi"))
    assert len(stubs) >= 7
    for stub in stubs:
        body = ast.parse(stub.read_text()).body
        listed = next(ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign))
        imported = [a.name for n in body if isinstance(n, ast.ImportFrom) for a in n.names]
        assert sorted(imported) == sorted(listed), stub
        parts = stub.relative_to(ROOT / "src").with_suffix("").parts
        module = import_module(".".join(p for p in parts if p != "__init__"))
        assert module.__all__ == [n for n in dir(module) if n[:2] != "__"] == sorted(listed)
        if (extra := NEEDS.get(module.__name__)) and missing(extra):
            with pytest.raises(MissingExtraError, match=extra):
                getattr(module, listed[0])
        else:
            assert all(getattr(module, name) is not None for name in listed)
