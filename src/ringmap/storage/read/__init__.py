"""The read room: reading a ring, also while another process writes it.

    source      what a writer's and a reader's view have in common
    reader      follows a writer in another process, and never writes
    read_live   the protocol of two looks: copy, look at the tail again, read again what was lost

A writer publishes a new tail before it overwrites a row before that tail. So what is at or after the tail once its copy is
complete was not touched while it was copied. Whatever reads rows, blobs or labels goes through `read_live`.
"""
