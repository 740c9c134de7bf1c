"""Test suites that our parts pass, and a third party's should."""
