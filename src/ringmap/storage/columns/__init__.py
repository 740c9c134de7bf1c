"""The columns package: the rows, one file or folder for each column.

schema, casting             names, shapes and dtypes, and which values a column takes
base                        the protocols of a column and of a backend
memmap, zarr                the backends
backends                    which there are, and which one a column gets
rows                        all columns at a position
readahead                   which rows to request from the disk, and when
codecs, decompression_limit, chunk_cache    how a chunk becomes bytes, and which ones are kept in memory
"""
