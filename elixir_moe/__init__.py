"""elixir_moe: train mixture-of-experts models that do not fit the GPUs you have.

The public names are those of `public.py`. They are imported at the first use of one, and torch with them: the command
line explains itself without either.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = version("elixir-moe")

if TYPE_CHECKING:
    from elixir_moe.public import *  # noqa: F403
    from elixir_moe.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Returns a name that is not here yet: a file, which is imported by itself, or a public name."""
        if name not in _Package.functions and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        if "__all__" not in globals():
            public = import_module("elixir_moe.public")
            known = {each: getattr(public, each) for each in ("__all__", *public.__all__)}
            globals().update({**known, **globals()})  # what a user has set before stays
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())


class _Package(ModuleType):
    """Python binds each file that is imported to its name in the package; these names are functions."""

    functions = frozenset({"accumulate", "wrap", "inspect", "linear_cross_entropy"})

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in self.functions and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)  # cloudpickle knows modules by their very type


sys.modules[__name__].__class__ = _Package
