"""The commit room: the one writer of a buffer, and what makes a call count.

    create     how a directory becomes a buffer, in steps that a kill may interrupt
    store      the writer: commits, clears, flushes, closing
    journal    the files of a commit, in their order, and what of them the disk itself has
    recovery   which committed state a directory is in, whatever was interrupted
    sync       the background sync

A commit writes rows, then the blob, then the record, which is the commit, then `state.bin`, which shows it to readers.
Rows that a live episode holds are retired by a record of their own before they are overwritten. Opening a directory reads
the newest record that is whole: there is no log to replay, and nothing to undo.
"""
