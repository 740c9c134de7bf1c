from tests.house import PYTHON, run

PROBE = """
import sys, time
start = time.perf_counter()
import ringmap
print(time.perf_counter() - start, *{name.split(".")[0] for name in sys.modules})
"""


def test_import_is_quick_and_brings_nothing_in():
    probes = [run(PYTHON, "-c", PROBE).split() for _ in range(5)]
    assert min(float(seconds) for seconds, *_ in probes) < 0.1
    assert not {"gymnasium", "h5py", "lance", "numpy", "torch", "zarr"} & set(probes[0])
