"""Test suites that our parts pass, and a third party's should."""

from ringmap.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
