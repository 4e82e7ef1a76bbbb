"""Words that code, messages and pages do not use: a reader should need no dialect.

Owns the list, with what to write instead, and the paths that are held to it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rules import ROOT, assert_none, place, tree_of

DONE = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "README.md",
    "benchmarks",
    "docs/*.md",
    "docs/*.py",
    "docs/design/*.md",
    "csrc",
    "elixir_moe/*.py",
    "elixir_moe/chunks",
    "elixir_moe/distributed",
    "elixir_moe/ext",
    "elixir_moe/hf",
    "elixir_moe/memory",
    "elixir_moe/moe",
    "elixir_moe/optim",
    "elixir_moe/page",
    "elixir_moe/parallel",
    "elixir_moe/planner",
    "elixir_moe/quantized",
    "elixir_moe/runtime",
    "elixir_moe/state",
    "elixir_moe/wrapping",
    "elixir_tools",
    "examples",
    "recipes",
)
"""Files and folders without these words; patterns as in `Path.glob`."""
RECORDS = ("docs/certificate.md",)
"""Pages that a command has written, in the words of its day."""
KINDS = {".py", ".md", ".ipynb", ".yaml", ".sh", ".cpp", ".hpp"}
WORDS = {
    r"(?<!there )\b(is|are|was|were) no\b(?! (longer|more|less|\w+er than)\b)": "is not a",
    r"\banew\b": "again, newly",
    r"\bbeside\b": "next to, during, asynchronously, in addition to",
    r"(?<!left )(?<!leave )\balone\b": "only, by itself",
    r"\ba text\b(?! file)": "a string, a text file",
    r"\b(mean|means) nothing\b": "has no effect, is not supported",
    r"\bof (his|hers|theirs)\b": "the noun",
    r"(?<!turns )\b(go|goes|going|went) on\b": "continue",
    r"\b(is|are|was|were) said\b": "is documented, is reported",
    r"\bat home\b": "in its tier, in the shard",
    r"\bsays so\b": "the noun",
    r"\bas ever\b": "as usual",
    r"\b(who|what)ever (asks|is|wants)\b": "the noun",
    r"\blets? go\b": "release",
    r"\bgoes by\b": "uses, follows",
    r"\bthat there (is|are)\b": "all of them, or nothing",
}
"""{regular expression: what to write instead}."""
BEGINNINGS = re.compile(r"\s*(Of|Those|What|As|The same)\b")
"""Beginnings of docstrings that are not sentences about the thing itself."""


def files() -> Iterator[Path]:
    """The files that are held to the list."""
    for pattern in DONE:
        for found in sorted(ROOT.glob(pattern)):
            paths = [path for path in sorted(found.rglob("*")) if path.is_file()] if found.is_dir() else [found]
            yield from (path for path in paths if path.suffix in KINDS and str(path.relative_to(ROOT)) not in RECORDS)


def used(path: Path) -> Iterator[str]:
    """The places in a file with a word of the list."""
    text = path.read_text()
    for pattern, instead in WORDS.items():
        for found in re.finditer(pattern.replace(" ", r"\s"), text, re.IGNORECASE):
            yield f"{place(path, text.count(chr(10), 0, found.start()) + 1)}: {found[0]!r}; write: {instead}"


def fragments(path: Path) -> Iterator[str]:
    """The docstrings in a file, those of attributes too, that begin as none should."""
    for node in ast.walk(tree_of(path)):
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(text, str) and BEGINNINGS.match(text):
            yield f"{place(path, node.lineno)}: a docstring begins with {text.split()[0]!r}"


def test_no_file_uses_a_word_of_the_list() -> None:
    paths = list(files())
    assert len(paths) > 100
    assert_none(found for path in paths for found in used(path))


def test_no_docstring_begins_with_a_fragment() -> None:
    assert_none(found for path in files() if path.suffix == ".py" for found in fragments(path))


@pytest.mark.parametrize("pattern", WORDS)
def test_each_word_is_found(pattern: str) -> None:
    """A pattern that matches nothing would hold nobody to it."""
    samples = "is no list; anew; beside it; rank 0 alone; a text; means nothing; of his; goes on; is said; at home"
    more = "says so; as ever; whoever asks; lets go; goes by; that there are"
    assert re.search(pattern, f"{samples}; {more}", re.IGNORECASE)
    allowed = "there is no list; is no longer; is no larger than; left alone; a text file; besides; mean something"
    assert not re.search(pattern, allowed, re.IGNORECASE)
