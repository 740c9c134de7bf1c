"""`ringmap formats`: what each format can do."""

from __future__ import annotations

from ringmap.cli.console import show_json, show_table
from ringmap.cli.options import AsJson


def formats(as_json: AsJson = False) -> None:
    """List the formats of datasets, and what each can do.

    Lossless: what is written comes back bit for bit, pictures too, without any option.
    """
    from ringmap.formats.registry import describe_formats

    found = describe_formats()
    if as_json:
        show_json(
            [
                {
                    "name": f.name,
                    "reads": f.reads,
                    "writes": f.writes,
                    "appends": f.appends,
                    "lossless": f.lossless,
                    "installed": f.available,
                    "install": f.install,
                }
                for f in found
            ]
        )
        return
    rows = [
        (
            f.name,
            _word(f.reads),
            _word(f.writes),
            _word(f.appends),
            _word(f.lossless),
            "yes" if f.available else f'pip install "{f.install}"' if f.install else "no",
        )
        for f in found
    ]
    show_table(("format", "read", "write", "append", "lossless", "installed"), rows)


def _word(answer: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[answer]
