"""The room of open episodes: those that are still being recorded, step by step.

    open_episode   appends steps to a file of their own, finishes or abandons it
    stream_file    how such a file is read back after a kill

A finished episode is committed like any other, and the commit names the file that it came from, so that it is stored once.
"""
