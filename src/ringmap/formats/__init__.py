"""Formats: what a dataset looks like on disk.

    catalog           load_dataset, convert, merge: by path, name or prefix
    registry          the formats by name, those of third parties too
    builtin           those that come with ringmap: how each knows a path
    hdf5, zarr, ...   a layout each, its reader and its writer; none imports another
    common            what they share: the writer that survives kills, sources of columns, limits on untrusted files
    media             pictures and videos
    base, episode     the contract of a format; an episode before it is written

Not here: clips and batches (datasets/), the ring (storage/).
"""
