"""The directory package: which files a buffer is made of, and what is at a path.

entries   the table of all files in a buffer's directory: when each is made, and how it is called
opening   tells a buffer from an empty or foreign directory, and reads its manifest
"""
