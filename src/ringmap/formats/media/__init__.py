"""Pictures and videos: encoded and decoded in one place, for formats, worlds and the command line."""
