"""Clips: which clips exist, which to draw, how to read them. NumPy only; rows come from `storage`.

    gather                  reads a batch: copies the rows of clips, and validates them
    bounds | rings          items that need the bounds of their episodes; a batch from several rings
    rewards | sequences     columns that are computed
    samplers                what chooses the clips of a batch
    window                  what a user asks for, as a cut
    items | clip_range      a batch as computed columns see it; the clips of a moment as samplers see them
    cut                     which steps an item holds, and which steps can be its anchor
    index, draws            clip numbers to episodes and steps, in integers only; which clips cross parts
    facts                   where rewards stand, steps per second, names of columns of rewards and ends
    sumtree                 masses of priorities

Begin with `cut`, then `gather`: everything that draws and everything that reads meets there.
"""
