"""Whether this processor divides: looks at quotients until it is killed, or finds false ones, which it prints.

Most tests compare bits. There are processors of which one core rounds a few quotients falsely; the host moves a virtual
machine on to that core and off again, and now and then an exact test fails. `.ci/run` has this program run beside the
tests: what has failed runs once more if, and only if, the processor was caught.
"""

import time

import numpy as np
from numpy.typing import NDArray

_SECONDS = 0.1
"""Between two looks, each of two milliseconds: all numbers of [1, 2) in three seconds."""
_NUMBERS = 1 << 18
"""Looked at together."""


def false_quotients(mantissas: NDArray[np.int64], quotients: NDArray[np.float32]) -> NDArray[np.intp]:
    """Where 1 / x is not the nearest number in fp32: found by integers alone.

    With x = m / 2^23 in [1, 2) and a quotient k / 2^24, the error is at most half of the last place, 2^-25, exactly if
    2 |2^47 - k m| <= m.

    Args:
        mantissas: (n,), m.
        quotients: (n,), what the processor says 1 / x is.

    Returns:
        The places of the false ones.
    """
    k = (quotients * np.float32(2**24)).astype(np.int64)
    return np.flatnonzero(2 * np.abs(2**47 - k * mantissas) > mantissas)


def main() -> None:
    first = 2**23
    while True:
        mantissas = np.arange(first, first + _NUMBERS)
        x = mantissas.astype(np.float32) * np.float32(2**-23)
        quotients = np.float32(1) / x
        false = false_quotients(mantissas, quotients)
        if len(false):
            break
        first = first + _NUMBERS if first + _NUMBERS < 2**24 else 2**23
        time.sleep(_SECONDS)
    said = [f"1 / {float(x[at]).hex()} = {float(quotients[at]).hex()}" for at in false]
    print(f"This processor divides falsely, so that no exact test holds on it: {', '.join(said)}")


if __name__ == "__main__":
    main()
