from ringmap.exits.grain_source import Source, source

__all__ = ["Source", "source"]
