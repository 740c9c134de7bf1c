"""A model of the commit protocol, in all interleavings: `python -m tests.faults.crash.model`."""
