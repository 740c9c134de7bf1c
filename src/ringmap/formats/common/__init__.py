"""Code that formats share.

    writing    writer     the writer: who may write, modes, the log, kills and full disks; a format's is a subclass
               log        encoded episodes that are not in the dataset yet
               swap       replaces a dataset as a whole
               disk       the calls that change the disk under a dataset
               refusals, fill    what a target can't hold, told before a byte is written
    reading    pending    a dataset together with the episodes in its log
               directory, source_format, episode_cache    files: pickling, forks, whole episodes
               untrusted  limits on what a dataset may make us open
    layouts    tabular, npz, names    .npz columns with images beside them; names for any file system
               arrow      columns as Arrow arrays, and back
               safe_hdf5, hdf5_trial    files of HDF5 of other programs

Not here: any one format (the modules beside this package).
"""
