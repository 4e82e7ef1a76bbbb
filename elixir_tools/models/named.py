"""A function of the user's, by its name.

Owns the search for ``package.module:function``. Knows nothing of what the function returns.
"""

import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from elixir_moe.errors import ConfigError, did_you_mean


def named_function(path: str, option: str, wanted: str) -> Callable[[], Any]:
    """The function called ``package.module:function``; modules of the working directory are found, too.

    `option` is where the user has named it, and `wanted` what it should be, both for messages. Raises ConfigError if
    there is none, importing its module fails, or it wants an argument.
    """
    package, _, name = path.partition(":")
    if not (package and name.isidentifier()):
        raise ConfigError(f"{option}: expected package.module:function, got {path!r}: {wanted}")
    if {os.getcwd(), ""}.isdisjoint(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise ConfigError(f"{option}: importing {package} fails: {error}") from error
        raise ConfigError(f"{option}: there is no module {error.name!r} here or among the installed ones") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{option}: {package} has no function {name!r}; {did_you_mean(name, vars(module)) or wanted}")
    needed = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty and p.kind < 2]
    if needed:
        raise ConfigError(f"{option}: {path} wants an argument {needed[0].name!r}; expected {wanted}")
    return found  # type: ignore[no-any-return]
