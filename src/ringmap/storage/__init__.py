"""Rows on disk: one writer, any number of readers, no server.

    inspect     a directory seen from outside: check, repair, snapshot, describe
    commit      the writer: what makes a call count; episodes that are still being recorded
    read        the committed state, and reading it beside a writer
    sidecars    files beside the columns
    records     the files that say what is stored: manifest, table, blobs, state; rows that wait
    columns     the rows themselves
    disk | ring the operating system; positions and slots, in integers only

Each package imports only from those below it, which `lint-imports` enforces.
"""
