"""The face of Stable-Baselines3's replay buffers on a ring, loaded when first used."""

from ringmap.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
