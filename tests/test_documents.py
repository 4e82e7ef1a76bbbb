"""The documents: every snippet runs."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_public_names_is_made_from_the_docstrings() -> None:
    made = runpy.run_path(str(DOCS / "make_api.py"))
    assert (DOCS / "api.md").read_text() == made["page"](), "run: python docs/make_api.py"


@pytest.mark.parametrize(
    ("name", "number", "printed"), [("training_loop.md", 13, '"scatter": true'), ("i_want_to.md", 8, "host")]
)
def test_the_snippets_run_one_after_another(
    name: str, number: int, printed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = (DOCS / name).read_text()
    scope: dict[str, object] = {"__name__": "snippets", "out": tmp_path}
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == number
    for snippet in snippets:
        line = text[: text.index(snippet)].count("\n")
        exec(compile("\n" * line + snippet, str(DOCS / name), "exec"), scope)
    assert printed in capsys.readouterr().out
