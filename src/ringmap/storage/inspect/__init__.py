"""Look at a directory from outside: check, repair, snapshot, describe.

    scan               what a directory holds, whether or not it can be opened
    raw_files          its files as their bytes show them
    identity           which buffer it is, although its manifest may be lost
    check, faults      what is wrong, file by file
    repair             keeps what is whole, drops and names the rest
    snapshot, copying  a copy as of one commit, made while the writer goes on
    describe           what a directory says of its buffer, for `ringmap info`

What opening refuses, `check` names, and what `check` names, `repair` mends: all three read by the same code.
"""
