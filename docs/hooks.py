"""The navigation is the folders, in the order from learning to understanding, then by name."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.utils import nest_paths

ORDER = ["index.md", "tutorials", "how-to", "reference", "explanation"]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Write the navigation, which MkDocs would sort by name alone."""

    def place(page: str) -> tuple[int, bool, str]:
        return ORDER.index(page.split("/")[0]), not page.endswith("/index.md"), page

    pages = [file.src_uri for file in files.documentation_pages()]
    config.nav = nest_paths(sorted(pages, key=place))
