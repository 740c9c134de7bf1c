"""The ring package: positions, slots and live episodes, in integers only.

    ring     positions to slots; which positions an append overwrites
    live     the start and the length of each live episode
    links    which parts make an episode
    arrays   one that grows at one end; extremes of small ones

A position counts every step ever stored and never wraps. A slot is `position % rows`, the row of a column that holds
it. The live positions are `[tail, head)`. An eviction moves the tail, and changes nothing else.

No data arrays, no files: every function can be tested by counting.
"""
