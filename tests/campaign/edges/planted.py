"""Bugs, planted in an actor: each must be caught."""

PLANTS = {}


def plant(name):
    """Plant a bug in this process."""
    if name is not None:
        PLANTS[name]()
