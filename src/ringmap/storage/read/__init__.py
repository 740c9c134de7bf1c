"""The read package: the committed state of a directory, and reading a ring, also while another process writes it.

    recovery    finds the committed state, whatever was interrupted
    handle      an open buffer: what a writer and a reader share
    episodes    whole episodes of a handle, parts joined, and what they were first stored as
    reader      follows a writer in another process, and never writes
    read_live   the one loop of all reads: copy, validate by the newest tail, redraw what was lost

A writer publishes a new tail before it overwrites a row before that tail. So rows at or after the tail, read once the
copy is complete, did not change during the copy. All reads of rows and blobs go through `read_live`.
"""
