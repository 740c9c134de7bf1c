"""The records package: the files that describe what is stored, and the bytes of each.

    manifest     manifest.json: the columns, the capacity, the uuid, the kind of its rows, their rate
    table        episodes.npy: a record of 128 bytes for each episode, or part, of a commit
    blobs        data/N.bin: checksums, episode data and the small state of each commit
    step_file    open/ID/: the rows of an episode, or of a group, that are not committed yet
    state        state.bin: the newest committed state, in two slots, for readers

Each module knows the bytes of one file: how to write them, how to read them, and how to tell whether they are whole.
The commit package decides which of them are written, and in which order.
"""
