"""The open_episodes package: episodes that are still being recorded, step by step.

    open_episode   appends steps to a separate file, finishes or abandons it

A finished episode is committed like any other, and the commit names its file, so that it is stored once.
"""
