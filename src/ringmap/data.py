"""The face of ringmap's data: buffers, datasets and formats by name, loaded when first used."""

from ringmap.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
