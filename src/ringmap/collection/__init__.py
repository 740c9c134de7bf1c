"""A collection by many collectors: each plays some of its seeds into a ring of its own.

    collect      the call: what it counts before anything is played
    job          what it refuses, and what each collector is told
    supervisor   the loop of the parent: leases, deaths, restarts, the end
    collector    what each collector does
    process      collectors as processes of this machine
    rings        the rings of a directory, counted under all of their locks
    seeds        which seeds are finished, leased or waiting: no process, no file

What the rings hold is the only record: no other file says which seeds are finished.
"""
