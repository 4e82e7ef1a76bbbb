"""Equal experts on several ranks: with one seed on all ranks, every rank of ``ep`` draws the same ones.

Owns the marks of experts' first values that ranks compare, and the warning. Equal experts are no error: a model of E
experts that begins with E / ep different ones trains, but is worse than it should be.
"""

import warnings
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.distributed.waits import named
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.pattern import EXPERT_AXIS
from elixir_moe.parallel.rules import pattern_of

_SAMPLE = 16
"""Most elements that are read along each dim."""
NOTHING = 0
"""The mark of values that may be equal without a warning: no experts, on meta, constant, or copies of each other."""


def marks_of(parameters: Sequence[nn.Parameter]) -> list[int]:
    """A number for the values of each parameter, for `warn_of_twins`; from at most 16 elements along each dim."""
    marks = [_mark(parameter) for parameter in parameters]
    times = Counter(marks)
    return [mark if times[mark] == 1 else NOTHING for mark in marks]


def warn_of_twins(parameters: Mapping[nn.Parameter, str], everyone: Sequence[Sequence[int]]) -> None:
    """Warns once if ranks along ``ep`` have equal experts, on the first rank of each expert mesh.

    Args:
        parameters: the parameters with their names, in the order of the marks.
        everyone: the results of `marks_of`, by rank.
    """
    found: list[tuple[str, list[int]]] = []
    for i, (parameter, name) in enumerate(parameters.items()):
        pattern = pattern_of(parameter)
        if pattern is None or everyone[dist.get_rank()][i] == NOTHING or pattern.mesh.rank != pattern.mesh.ranks[0]:
            continue  # other lines of ranks along ep copy the first line's values
        line = pattern.mesh.ranks_along((EXPERT_AXIS,))
        by_mark: dict[int, list[int]] = {}
        for rank in line:
            by_mark.setdefault(everyone[rank][i], []).append(rank)
        found += [(name, ranks) for mark, ranks in by_mark.items() if mark != NOTHING and len(ranks) > 1]
    if found:
        name, ranks = found[0]
        more = f", and {len(found) - 1} other parameters are equal like this" if len(found) > 1 else ""
        warnings.warn(
            f"parameter {name!r} has the same values on {named(ranks)}{more}, though ranks along axis {EXPERT_AXIS!r} "
            f"hold different experts: draw them after torch.manual_seed(seed + the rank's place along that axis), or "
            f"from their numbers in the layer, as elixir_moe.moe.layer.MoE does. If they are copies on purpose, all "
            f"is well",
            stacklevel=4,
        )


@torch.no_grad()
def _mark(parameter: nn.Parameter) -> int:
    pattern = pattern_of(parameter)
    local = local_of(parameter)
    if pattern is None or EXPERT_AXIS not in dict(pattern.shard) or pattern.mesh.size(EXPERT_AXIS) == 1:
        return NOTHING
    if local.is_meta or local.numel() == 0:
        return NOTHING
    sample = local.detach()[tuple(slice(_SAMPLE) for _ in local.shape)].cpu().contiguous()
    raw = sample.flatten().view(torch.uint8).view(sample.numel(), -1)
    experts = raw.view(len(sample), -1)
    if (raw == raw[0]).all() or (len(experts) > 1 and torch.equal(experts[0], experts[1])):
        return NOTHING
    return 1 + zlib.crc32(raw.numpy().tobytes())
