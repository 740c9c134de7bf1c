"""Many rings, each with a writer of its own, read as one buffer."""
