"""Buffers: what users write to and sample from.

    offline_to_online | distillation    a dataset and experience together; labels of a teacher
    transitions | rollout               rows of many lanes, for DQN and SAC; on-policy steps, for PPO
    steps | torchrl_storage             a ring of rows, the base of those; the same for TorchRL
    replay                              the buffer of episodes: its options, and what it writes
    sampled                             what it reads: by id, by draw, by pass
    passes                              each clip of one moment once, in an order that can be resumed
    view                                the episodes of one moment, as a dataset
    prefetch | cuts | lookup            batches drawn ahead; windows that were asked for; clips by id
    engine                              what every buffer holds: open rings, the sampler, the role of this process
    sharded                             the rings of a fleet, where their clips are, and what reads them
    pins, loader_state                  ids that do not change, in every worker
    rings | episodes                    the rings that a buffer was given; episodes read whole
    options | emit, nested | batch      valid settings; the form of the output; a batch with its ids
    base | worker_generator             what each buffer is asked; the generator of buffers of rows

Each module imports only from those below it. Begin with `sampled`, then `engine`; clips themselves are in
`ringmap.clips`.
"""
