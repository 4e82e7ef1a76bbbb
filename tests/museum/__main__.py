"""Writes docs/museum.md."""

from pathlib import Path

from tests.museum.cases import page

Path("docs/museum.md").write_text(page())
