"""Imports and construction without garbage collection, which takes a third of their time.

Owns the switch. Knows no verb.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """While open, no garbage is collected. What was made then is not looked at later, nor at the interpreter's exit.

    Triton's bindings report what is not looked at then as leaks, thirty lines of them: with triton, all is looked at.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if "triton" not in sys.modules:
            gc.freeze()
        if collects:
            gc.enable()
