"""Ranges for torch.profiler by the field's names: ``elixir::gather chunk 3 (...)``, ``reduce``, ``fetch``, ``update``.

Owns the form of their names. Never decides what runs, and without a profiler costs one check of a flag.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from elixir_moe.torch_private import dispatch_depth, profiler_runs

_T = TypeVar("_T")
_NONE = nullcontext()


def span(verb: str, what: str) -> AbstractContextManager[object]:
    """Returns a context that is the range ``elixir::VERB WHAT`` of a running torch.profiler.

    A range begins with an operator, which dispatch modes would see: while one is on, there is no range.
    """
    if not profiler_runs() or dispatch_depth():
        return _NONE
    return torch.profiler.record_function(f"elixir::{verb} {what}")


def in_span(verb: str, what: str, work: Callable[[], _T]) -> _T:
    """Runs the work in a `span`."""
    with span(verb, what):
        return work()
