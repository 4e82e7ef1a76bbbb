"""Imports and construction without garbage collection, which takes a third of their time.

Owns the switch. Knows no verb.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """While open, no garbage is collected. What was made then is not looked at later, nor at the interpreter's exit."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
