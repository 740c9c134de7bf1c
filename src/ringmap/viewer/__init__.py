"""The viewer: a local web page over rings, fleets and datasets, while they are written. `ringmap view` serves it.

    paths -> places (find) -> Source: one reader per ring, or dataset -> index of its episodes (in the background)
                                  |                                        |
                                  v                                        v
                    pictures, columns, thinned                 table: of one index, or of a fleet's; sorted, filtered
                                  |                                        |
                                  +------> app (Starlette) <---------------+------> static/: the page

Invariants: it reads through the public API, changes nothing, and serves what lies below the given paths; a reply has at
most `limits.MOST_NBYTES`; what data say is never a path, nor HTML.
Not here: the command (cli/view.py).
"""
