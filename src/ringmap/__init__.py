"""ringmap: replay buffers on a memory-mapped ring."""

from ringmap.lazy import attach

__version__ = "0.1.0.dev0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
