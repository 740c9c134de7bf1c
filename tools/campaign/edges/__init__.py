"""Signals, threads, forks, replaced directories: what a caller does around a buffer, at random moments.

python -m tools.campaign.edges --rounds 2000 --seed 1

rounds.py    host: forks the actor, sends signals, kills it, waits, judges what is left
ledger.py    what the actor says it did, in memory that outlives it; and what may be stored then
proof.py     episodes that prove themselves, files of a stranger
actor.py     what every scenario needs: calls with an entry in the ledger, reads that are proved
signals.py, threads.py, forks.py, replaced.py, others.py    the scenarios
planted.py   bugs, each of which must be caught
"""
