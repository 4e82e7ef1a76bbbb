"""The documents: every snippet runs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["training_loop.md"])
def test_the_snippets_run_one_after_another(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / name).read_text()
    scope: dict[str, object] = {"__name__": "snippets"}
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) > 8
    for snippet in snippets:
        line = text[: text.index(snippet)].count("\n")
        exec(compile("\n" * line + snippet, str(DOCS / name), "exec"), scope)
    assert '"scatter": true' in capsys.readouterr().out
