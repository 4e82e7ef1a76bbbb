"""Runs tests in processes that have the accelerator of threads, so that no other test meets it."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

Test = Callable[..., None]


def on_device(ranks: int = 1) -> Callable[[Test], Test]:
    """A decorator of a test: its body runs on so many ranks, whose device is "threads"."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(threads: Any, **arguments: Any) -> None:
            threads(ranks).run(_body, test.__module__, test.__name__, arguments)

        threads = inspect.Parameter("threads", inspect.Parameter.KEYWORD_ONLY)
        own = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([*own, threads])  # type: ignore[attr-defined]  # the fixtures pytest gives
        return run

    return decorate


def _body(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
