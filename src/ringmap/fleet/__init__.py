"""The fleet: what collectors and a learner tell each other through files; there is no server.

    pace       collectors ◄► learners: how often a step is used
    weights    learner ─► collectors: the newest policy, whole

Imports `storage` only, and knows no buffer: collecting is handed an object of this package.
"""
