"""The ring room: positions, slots and live episodes, in integers only.

    arithmetic   positions to slots; which positions an append overwrites
    live         where each live episode starts, and how long it is

A position counts every step ever stored and never wraps. A slot is `position % rows`, the row of a column that holds it.
The live positions are `[tail, head)`. An eviction moves the tail, and changes nothing else.

No arrays of data, no files: every function can be tested by counting.
"""
