"""A model of the commit protocol, in all interleavings: see `explore.py`. `python -m tests.crash.model` prints it."""
