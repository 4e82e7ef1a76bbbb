"""A processor that divides falsely is told from one that does not."""

import numpy as np

from tests.support.divider import false_quotients


def test_quotients_that_are_not_the_nearest_numbers_are_found() -> None:
    mantissas = np.arange(2**23, 2**24, 12345)
    nearest = [(2**48 + m) // (2 * m) for m in mantissas.tolist()]  # by Python's integers: no processor's quotients
    quotients = np.array(nearest, np.float32) * np.float32(2**-24)
    assert not len(false_quotients(mantissas, quotients))
    for place, toward in ((1, 0.0), (500, 1.0)):
        quotients[place] = np.nextafter(quotients[place], np.float32(toward))
    assert false_quotients(mantissas, quotients).tolist() == [1, 500]
