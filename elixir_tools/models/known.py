"""Models by the names that people know: hub names whose shapes ship with the package, other hub names, and folders.

Owns the folder `configs`, whose files have the part of each model's config.json that its shapes and its memory depend
on; the facts are those of the files on huggingface.co. `names.json` there lists the names, with those of models of the
same shape. Builds no model, and needs no torch.
"""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from elixir_moe.errors import ConfigError
from elixir_tools.models import shapes

_CONFIGS = Path(__file__).parent / "configs"
_FILES = ("config.json", "tokenizer_config.json")
"""The files that are fetched from the hub: no weights."""


@dataclass(frozen=True, slots=True)
class Known:
    """A model that was asked for."""

    name: str
    """The name under which `sft` finds it: a hub name or a folder; or that of a paper's model."""
    config: str | None
    """Its config.json; None for a paper's model."""


def names() -> list[str]:
    """The hub names whose shapes ship with the package."""
    return list(_same_shape())


def find(asked: str) -> Known:
    """The model called `asked`: a folder, a file, a name that ships, a paper's model, or any other name on the hub.

    Names that ship are found without their owner, in small letters, and by their beginning if one shape has it. Raises
    ConfigError if nothing has that name, or the hub does not give its config.
    """
    path = Path(asked).expanduser()
    if asked and path.is_dir():
        return Known(str(path), str(path / "config.json"))
    if asked and path.is_file():
        return Known(str(path.parent), str(path))
    if asked in shapes.names():
        return Known(asked, None)
    if (file := _spelled(asked.lower())) is not None:
        return Known(_spellings().get(asked.lower(), file), str(_CONFIGS / f"{file}.json"))
    if asked.count("/") == 1 and not asked.startswith((".", "~", "/")) and path.suffix not in (".json", ".yaml"):
        return Known(asked, _fetched(asked))
    if "/" in asked or path.suffix:
        raise ConfigError(f"cannot read {asked!r}: no such file; expected a Hugging Face config.json or its directory")
    raise ConfigError(
        f"no model is called {asked!r}{_hint(asked)} There are: {', '.join([*names(), *shapes.names()])}; any other "
        "name on the hub as owner/name, or a folder with config.json"
    )


def _fetched(name: str) -> str:
    """The path of a hub model's config.json, which is fetched unless it is there already."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(f"{name!r} is not among the models that ship, and huggingface_hub is missing: "
                          "pip install huggingface_hub, or give a folder with config.json") from error  # fmt: skip
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub's client has many types for what is missing or out of reach
        why = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{name!r} is not among the models that ship{_hint(name)} The hub says: {why}. Give a folder with its "
            "config.json"
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{name!r} on the hub has no config.json: expected a transformers model")
    return str(folder / "config.json")


def _hint(asked: str) -> str:
    """The end of a sentence, with a near name as it is written on the hub if there is one."""
    by_spelling = _spellings() | {name: name for name in shapes.names()}
    near = get_close_matches(asked.lower(), by_spelling, n=1)
    return f"; did you mean {by_spelling[near[0]]!r}?" if near else "."


@cache
def _same_shape() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((_CONFIGS / "names.json").read_text(encoding="utf-8"))
    return found


def _spelled(asked: str) -> str | None:
    """The file for a name in small letters, or for all names that begin with its words; None if it is not one file."""
    exact = _spellings().get(asked)
    names = [exact] if exact else [name for spelling, name in _spellings().items() if spelling.startswith(f"{asked}-")]
    files = {file for file, others in _same_shape().items() if not {file, *others}.isdisjoint(names)}
    return files.pop() if len(files) == 1 else None


@cache
def _spellings() -> dict[str, str]:
    """{a name in small letters, with or without its owner: the hub name}."""
    listed = [name for file, others in _same_shape().items() for name in (file, *others)]
    return {name.lower().partition("/")[2]: name for name in listed} | {name.lower(): name for name in listed}
