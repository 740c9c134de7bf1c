"""The columns package: the rows, one file or folder for each column.

schema, values, text            names, shapes and dtypes; what a user gives, as arrays of these
base                            a column: what each backend does, and what it need not
memmap, zarr                    the backends
backends                        which there are, and which one a column gets
rows                            all columns at a position, of one ring and of several
copying                         new arrays, threads and requests to the disk
"""
