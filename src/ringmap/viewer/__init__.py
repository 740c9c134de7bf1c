"""The viewer: a local web page over rings, fleets and datasets, while they are written. `ringmap view` serves it.

    paths -> places -> library -> open_dataset: a source each, its index (in the background), a table of its episodes
                                     |
                                     +------> app (Starlette), drawing <------> static/: the page

Invariants: it reads through the public API, changes nothing, and serves what lies below the given paths; a reply has at
most `drawing.MOST_NBYTES`; what data say is never a path, nor HTML.
Not here: the command (cli/view.py).
"""
