"""Datasets: episodes read as clips.

    base              the contract: two methods to supply, clips and episodes derived from them
    stored            the same over the columns of a file
    joined, goal      datasets made of datasets; a goal with each clip
    choose, where, selected     which episodes are wanted, conditions on them, and a dataset of these
    stored_episodes   whole episodes of any dataset, for a writer
    episode_rows, image_axes    T + 1 rows and blanks; the axes of images
    batch, loader_batches, worker_slots, slot_maps    batches on their way through PyTorch's DataLoader, without a copy

Not here: files on disk (formats/).
"""
