"""Adapts the tree to the tools of the site: notebooks, links out of `docs/`, the heading of examples in docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe


def on_config(config: Any) -> Any:
    """Lists all notebooks in the navigation, in the order of their numbers."""
    folder = Path(config.docs_dir) / "notebooks"
    for section in config.nav:
        if "Notebooks" in section:
            section["Notebooks"] = sorted(f"notebooks/{path.name}" for path in folder.glob("*.ipynb"))
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces a link to a file outside `docs/`, which a forge shows and the site does not have, by the file's path."""
    up = re.escape("../" * (page.file.src_uri.count("/") + 1))
    return re.sub(rf"\[([^\]]*)\]\({up}([^)]*)\)", _name_file, markdown)


def _name_file(link: re.Match[str]) -> str:
    label, path = link[1], f"`{link[2]}`"
    return path if label == path else f"{label} ({path})"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Turns a notebook's links to files of `docs/` into links to pages of the site."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return re.sub(r'href="\.\./docs/([\w/]+)\.md', r'href="../../\1/', html)


class ExampleSections(griffe.Extension):
    """Renders `Example:` as griffe renders `Examples:`, which has code and output."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the heading in the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
