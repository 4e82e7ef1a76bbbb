"""Classes that a module gets in place: a class of this library in front of the module's former class.

Owns their creation, once for each pair, so that modules of equal layers have the same class, and their support for
pickle and deepcopy, which find classes only by name. Never changes the class of a module.
"""

import sys
from functools import cache
from typing import Any

from torch import nn


class Joined:
    """The base of the library's classes that are put in front of others."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new, (_recipe(type(self)),), self.__dict__


def joined(name: str, front: type, plain: type) -> Any:
    """Returns the class `name` that puts `front` in front of the class `plain`."""
    return _joined(name, front, plain)


@cache
def _joined(name: str, *bases: Any) -> type:
    return type(name, bases, {"__module__": __name__})


def plain_class(module: nn.Module) -> Any:
    """Returns the class that a module of a joined class had before."""
    return type(module).__bases__[1]


def _recipe(kind: type) -> Any:
    """Describes a class for pickle: itself if its module has it, else its name and the recipes of its bases."""
    if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind or kind.__module__ != __name__:
        return kind
    return kind.__name__, *map(_recipe, kind.__bases__)


def _new(recipe: Any) -> Any:
    kind = _made(recipe)
    return kind.__new__(kind)


def _made(recipe: Any) -> Any:
    if isinstance(recipe, type):
        return recipe
    name, front, plain = recipe
    return joined(name, _made(front), _made(plain))
