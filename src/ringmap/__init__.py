"""ringmap: replay buffers on a memory-mapped ring.

    cli                  `ringmap info DIR` and the other commands
    ray                  the rings of many machines as one buffer, over Ray
    collection           many processes that collect, each into a ring of its own
    world, recording     collecting: environments in a pool; wrappers around a Gymnasium environment
    exits                classes for other libraries: Stable-Baselines3, grain
    buffers              what users write to and sample from: begin with `buffers/replay.py`
    formats              datasets on disk: HDF5, Zarr, Lance, folders, video, ...
    datasets             episodes read as clips, and the way into PyTorch's DataLoader
    fleet                weights: how a policy reaches its collectors; pace: how often a step is used
    clips                which clips exist, which to draw, how they are read
    storage              the ring on disk: rows, commits, recovery; begin with its docstring
    errors, extras, lazy below all: exceptions, optional packages, names loaded when first used

Each package imports only from those below it, which `lint-imports` enforces. `data`, `samplers`, `policy`, `sb3` and
`grain` only give names of these packages the import paths that users know; `testing` has the test suites for parts of
your own.
"""

from ringmap.lazy import attach

__version__ = "0.1.0.dev0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
