"""Code that formats share.

    writing    writer     the `with` block: who may write, what is checked first
               staged     the writer of every format that has `export`: the code for kills and full disks
               log        encoded episodes that are not in the dataset yet
               exported   binds a format's `export` and `extend` to the staged writer
               swap       replaces a dataset as a whole
               disk       the calls that change the disk under a dataset
    reading    pending    a dataset together with the episodes in its log
               directory, source_format, episode_cache    files: pickling, forks, whole episodes
               untrusted  limits on what a dataset may make us open
    layouts    tabular, npz, names    .npz columns with images beside them; names for any file system

Not here: any one format (the modules beside this package).
"""
