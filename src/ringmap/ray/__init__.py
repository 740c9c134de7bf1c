"""Collectors and learners on many machines, over Ray (extra `ray`); loaded when first used.

    import ringmap.ray as rr

    node a   rings on its disk ◄── reader ──┐
    node b   rings on its disk ◄── reader ──┼──► object store ──► rr.ReplayBuffer    in a learner, on any node
    node c   rings on its disk ◄── reader ──┘

    cluster      nodes by name, where their rings lie, what is at a place, which node reads which ring
    reader       an actor on a node: counts clips, and hands out parts of batches
    readers      the readers of a learner: started, followed, lost and back again
    memory       arrays that are used again once nobody refers to them
    buffer       ReplayBuffer: parts of a batch put together
    census       which seeds the rings of all nodes hold, counted under their locks
    actors       collectors as actors: what they say, where they are, how they end
    collect      collect: counted, then played under the supervisor of ringmap.collection

Ray does what it has: placing, restarting, transfers, waiting. There is no server, port or protocol here.
Not here: rows, rings, draws within a node (ringmap.buffers.sharded).
"""

from ringmap.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
