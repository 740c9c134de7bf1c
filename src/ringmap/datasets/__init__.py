"""Datasets: episodes read as clips.

    base              the contract: two methods to supply, clips and episodes derived from them
    stored            the same over the columns of a file
    joined, goal      datasets made of datasets; a goal with each clip
    episode_table, marks, split     which episodes are wanted, by conditions on them, their marks, or by chance
    stored_episodes   whole episodes of any dataset, for a writer
    episode           the axes of images, T + 1 rows, blanks
    batch, loader_batches, worker_slots     batches on their way through PyTorch's DataLoader, without a copy

Not here: files on disk (formats/).
"""
