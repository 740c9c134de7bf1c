"""The records room: the files that say what is stored, and how each of them is laid out.

    layout     the table of what a buffer's directory is made of
    manifest   manifest.json: the columns, the capacity, the uuid
    table      episodes.npy: one record of 128 bytes for each commit
    blobs      data/N.bin: checksums, episode data and the small state of each commit
    state      state.bin: the newest committed state, in two slots, for readers

Each module knows the bytes of one file: how to write them, how to read them back, and how to tell whether they are whole.
Which of them are written, and in which order, is the commit room's.
"""
