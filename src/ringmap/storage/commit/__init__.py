"""The commit package: the writer of a buffer, and the files that make a call count.

    create            turns a directory into a buffer, in steps that a kill may interrupt
    commit            all that one call stores, and the order in which it becomes durable and shown
    files             the files of a commit, and which of their content is durable
    group             rows that are stored alone, and committed together
    open_episode      an episode that is being recorded
    background        the thread that syncs every few seconds, and commits old groups
    store             the writer: roles, the lock, recovery after an interrupt, flushes, the end

A commit writes rows, then the blob, then the record, which is the commit, then `state.bin`, which shows it to readers.
If its rows are to lie where live ones are, a record of its own retires those episodes first. Opening a directory takes
the newest whole record: there is no log to replay, and nothing to undo. Only rows that wait in `open/` are committed
then, or dropped.
"""
