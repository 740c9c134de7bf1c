"""Rows on disk: one writer, any number of readers, no server."""
