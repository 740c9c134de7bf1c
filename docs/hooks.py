"""The navigation: sections by hand, and a new page falls into the section of its folder.

A section is a title and places: a page, or a folder for all of its pages that no other place names. Pages of a folder
are in the order of its index page, then by name.
"""

import re
from fnmatch import fnmatch
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files

SECTIONS = {
    "Home": ["index.md"],
    "Start": ["tutorials/index.md", "tutorials/install.md", "tutorials/*"],
    "How-to": ["how-to/index.md", "how-to/*"],
    "Migrate": ["migrate/index.md", "migrate/*"],
    "Concepts": ["explanation/index.md", "explanation/*"],
    "API": ["reference/index.md", "reference/api/*", "reference/*"],
    "Performance": ["performance/index.md", "performance/*"],
    "For contributors": [
        "explanation/architecture.md",
        "explanation/storage.md",
        "explanation/where-a-call-goes.md",
        "explanation/campaigns.md",
        "reference/on-disk-format.md",
        "explanation/decisions/index.md",
        "explanation/decisions/*",
    ],
}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Write the navigation."""
    pages = {file.src_uri: file for file in files.documentation_pages()}
    places = [place for section in SECTIONS.values() for place in section]

    def section_of(page: str) -> str:
        """Return the section that names the page, or the longest folder that it is in."""
        fits = [place for place in places if fnmatch(page, place)] or ["index.md"]
        best = max(fits, key=lambda place: ("*" not in place, len(place)))
        return next(title for title, section in SECTIONS.items() if best in section)

    def rank(title: str, page: str) -> tuple[int, int, str]:
        """Return where a page is in its section."""
        place = next(i for i, place in enumerate(SECTIONS[title]) if fnmatch(page, place))
        index = Path(page).with_name("index.md").as_posix()
        text = pages[index].content_string if index in pages else ""
        found = re.search(rf"\]\({re.escape(Path(page).name)}\)", text)
        return place, found.start() if found else len(text), page

    sections: dict[str, list[str]] = {title: [] for title in SECTIONS}
    for page in pages:
        sections[section_of(page)].append(page)
    config.nav = [
        {title: sorted(found, key=lambda page: rank(title, page))}
        for title, found in sections.items()
        if found and title != "Home"
    ]
    config.nav[:0] = sections["Home"]
