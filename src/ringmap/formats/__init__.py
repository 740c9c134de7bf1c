"""Formats: what a dataset looks like on disk.

    catalog           load_dataset, convert, merge: by path, name or prefix
    registry          the formats by name, each loaded when first used
    folder, video, hdf5, zarr, lance, minari, lerobot, parquet, robomimic, rlds, ringmap    one format each; none
    imports another
    common            what they share: the writer that survives kills, folders as columns, limits on untrusted files
    media             pictures and videos
    base, episode     the contract of a format; an episode before it is written

Not here: clips and batches (datasets/), the ring (storage/).
"""
