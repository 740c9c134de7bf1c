"""What is asked: a module for each question. A suite is a function of a module, which yields tables."""

_MODULES = {
    "growth": "importing commit opening growth",
    "storing": "write updates recording world",
    "from_memory": "sampling rollout gpu",
    "transitions": "transitions",
    "dataloader": "loading where workers exits",
    "windows": "windows",
    "from_disk": "cold codecs",
    "safety": "torn safety snapshot",
    "many_rings": "parts fleet ray",
    "formats": "formats dumping",
    "viewer": "viewer",
}
SUITES = {suite: module for module, suites in _MODULES.items() for suite in suites.split()}
"""Suite -> its module."""
