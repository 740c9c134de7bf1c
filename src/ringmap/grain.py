"""The face of grain's data source over a buffer, loaded when first used."""

from ringmap.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
