"""What is run whole, as a user runs it: examples, benchmarks, the blocks of the documentation, its site, the bare
wheel.

`python -m pytest` leaves this folder out: `python -m pytest tests/programs` runs it.
"""
