"""Python's collector, told to wait while modules are imported.

Owns the pause. Torch's modules are a million objects that stay to the end; walked again and again while they are made,
they take a tenth longer.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection begins in it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
