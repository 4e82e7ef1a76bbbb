"""What the tests of documents read: links and headings of Markdown, and the pages that the site makes.

Owns a small reader of the Markdown that the pages use. Follows no link of the network.
"""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """The targets of all links and pictures that are not addresses."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text)):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> set[str]:
    """The anchors of all headings, as GitHub and the site make them."""
    heads = re.findall(r"(?m)^#+ (.*)$", _FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", head.strip().lower().replace("`", "")).replace(" ", "-") for head in heads}


def made_pages() -> dict[str, tuple[str, list[str]]]:
    """{file: (title, public names)} of the pages made from docstrings."""
    pages = runpy.run_path(str(_DOCS / "api_pages.py"))["PAGES"]
    return {file: (title, names.split()) for file, (title, names) in pages.items()}
