"""Order among streams and threads: however late a stream is, a run leaves the same bits.

In runs of one rank, a stream that is late begins nothing before another stream or the host waits for it.
"""

from typing import Any

import pytest

from tests.accelerator.order import DELAYS, differing, leaves
from tests.support.order_cases import LATE, TELLING, TOGETHER, Case


@pytest.mark.parametrize(("world", "case"), [*TELLING, *((1, case) for case in LATE), *TOGETHER])
def test_late_streams_change_no_bit(threads: Any, world: int, case: Case) -> None:
    wanted = threads(world).run(leaves, case)[0]
    for late in DELAYS[world]:
        assert not differing(threads(world).run(leaves, case, late)[0], wanted), late
