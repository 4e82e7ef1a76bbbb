"""How `make docs` builds the site: Sphinx, MyST for Markdown and notebooks, furo for the look.

Owns the settings of the build, the colours of commands, the pages of public names that it makes (docs/api_pages.py),
and llms.txt. Notebooks are kept without outputs and run here.
"""

import re
import sys
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from pygments.lexer import RegexLexer, bygroups
from pygments.token import Comment, Generic, Keyword, Name, Operator, String, Text
from sphinx.application import Sphinx

from elixir_moe import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "elixir_moe"
html_title = "elixir_moe"
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["jupyter_execute"]
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
html_context = {"elixir_version": __version__}
highlight_language = "none"
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_merge_streams = True
nb_output_stderr = "remove"
nb_execution_cache_path = str(HERE.parent / "build" / "notebooks")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
copybutton_exclude = ".linenos, .gp, .go"

PROGRAMS = (
    *("conda", "docker", "elixir-moe", "git", "llama-quantize", "make", "ollama", "pip", "python", "python3", "srun"),
    *("torchrun", "vllm"),
)


class Commands(RegexLexer):
    """Commands of a shell: the program, its verb, its options and its comments; and what it prints, after ``$ ``."""

    name = "commands"
    aliases: ClassVar = ["commands"]
    tokens: ClassVar = {
        "root": [
            (r"(?m)^( *)(\$ )", bygroups(Text, Generic.Prompt)),
            (r"#.*", Comment),
            (r"'[^']*'|\"[^\"]*\"", String),
            (r"(?<![\w-])--?[A-Za-z][\w.-]*", Name.Attribute),
            (rf"(?<![\w./-])({'|'.join(PROGRAMS)})(?![\w./-])", Keyword),
            (r"[A-Z_]+(?==)|\$\{?\w+\}?", Name.Variable),
            (r"\\$|[|&;]+", Operator),
            (r"\s+|[^\s]", Text),
        ]
    }


def _colour_commands(app: Sphinx, tree: nodes.document) -> None:
    """Blocks of a shell, and those without a language, are coloured as commands if they begin with one."""
    begins = re.compile(rf"(?:\$ |!)?(?:{'|'.join(PROGRAMS)}) ")
    for block in tree.findall(nodes.literal_block):
        if block.get("language", "none") in ("none", "default", "text", "bash") and begins.match(block.astext()):
            block["language"] = "commands"


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
    """Connects the three."""
    app.add_lexer("commands", Commands)
    app.connect("doctree-read", _colour_commands)
    app.connect("builder-inited", _write_api)
    app.connect("build-finished", _write_llms)
