"""A Griffe extension: our docstrings say `Example:`, and Griffe knows `Examples:` only."""

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Render what stands under `Example:` as code, not as prose."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rename the section of one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
