"""Open datasets by path, name or prefix, and copy them: the functions of `ringmap.data` above all formats."""
