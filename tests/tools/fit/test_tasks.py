"""The planning problem that the arguments of `plan` describe."""

import pytest

from elixir_moe.ext.hardware import Hardware
from elixir_tools.cli.arguments import parser_of
from elixir_tools.fit.tasks import model_of, task_of

MACHINE = "a100-80g-pcie-x4"


@pytest.mark.parametrize("early", [False, True])
def test_updates_begin_in_backward_where_the_user_says_so(early: bool) -> None:
    words = ["plan", "gpt2-4b", "--hardware", MACHINE, "--batch", "1", "--seq", "8", *["--update-in-backward"] * early]
    known = parser_of(None).parse_args(words)
    task = task_of(known, Hardware.named(MACHINE), model_of(known, None, layers=1), 1, 8)
    assert task.updates_in_backward is early and task.overlaps_updates
