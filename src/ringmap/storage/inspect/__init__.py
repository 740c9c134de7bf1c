"""Look at a directory from outside: check, repair, snapshot, describe.

    check       what a directory holds, whether or not it can be opened, and what is wrong with it
    repair      drops what is not whole, in place
    snapshot    a copy as of one commit, made while the writer goes on
    describe    what a directory says of its buffer, for `ringmap info`

What opening refuses, `check` names, and what `check` names, `repair` repairs, or refuses by name.
"""
