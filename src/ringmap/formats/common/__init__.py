"""Code that formats share.

    writing    writer     who may write, modes, the log, kills and full disks; a format's writer is a subclass
               log        episodes that the dataset does not have yet, and how they are read with it
               swap       replaces a dataset as a whole
               disk       the calls that change the disk under a dataset
               refusals   what a target can't hold, told before a byte is written
    reading    source     files: pickling, forks, whole episodes
               untrusted, safe_hdf5    limits on what a dataset may make us open
    layouts    npz, names, transitions, arrow    arrays in archives; names for any file system; steps; Arrow arrays

Not here: any one format (the modules beside this package).
"""
