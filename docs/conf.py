"""How `make docs` builds the site: Sphinx, MyST for Markdown, furo for the look.

Owns the settings of the build, the pages of public names that it makes (docs/api_pages.py), and llms.txt.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "elixir_moe"
html_title = "elixir_moe"
extensions = ["myst_parser"]
exclude_patterns = ["notebooks"]
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
highlight_language = "none"
myst_heading_anchors = 3


def _write_api(app: Sphinx) -> None:
    import api_pages  # takes the seconds that torch takes to import

    api_pages.write(HERE / "api")


def _write_llms(app: Sphinx, error: Exception | None) -> None:
    """llms.txt: every page in the order of the site, with its first sentence."""
    if error is not None or app.builder.name != "html":
        return
    lines = ["# elixir_moe", "", "> Trains PyTorch models that do not fit on the few GPUs at hand.", ""]
    for name in app.env.toctree_includes["index"]:
        source = HERE / f"{name}.md"
        head, _, rest = source.read_text().partition("\n")
        first = " ".join(rest.strip().partition("\n\n")[0].split())
        said = "" if first.startswith(("```", "#")) else f": {first}"
        lines.append(f"- [{head.lstrip('# ')}]({name}.html){said}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n")


def setup(app: Sphinx) -> None:
    """Connects the two."""
    app.connect("builder-inited", _write_api)
    app.connect("build-finished", _write_llms)
