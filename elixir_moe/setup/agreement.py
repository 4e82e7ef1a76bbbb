"""What all ranks have to agree on before a model is wrapped: what they were given, what they hold, what fits a host.

Owns the comparisons and their messages. Collective throughout; what one rank can see by itself is `checks`' matter.
"""

import hashlib
import socket
from collections.abc import Iterator

import torch

from elixir_moe.chunks.plan import Plan
from elixir_moe.distributed.all_ranks import gathered
from elixir_moe.errors import ConfigError, LayoutError
from elixir_moe.memory.slabs import check_fits, host_bytes_left
from elixir_moe.parallel.rules import pattern_of, replicated_everywhere
from elixir_moe.parallel.twins import marks_of, warn_of_twins
from elixir_moe.runtime.model_spec import ModelSpec


def check_alike(optimizer: torch.optim.Optimizer, **given: object) -> None:
    """Raises ConfigError on all ranks if some were given what makes them take another way through `wrap`."""
    kinds = {name: value if value in (None, "auto") else type(value).__name__ for name, value in given.items()}
    everyone = gathered({"optimizer": type(optimizer).__name__, **kinds})
    for rank, theirs in enumerate(everyone):
        for name, kind in theirs.items():
            if kind != everyone[0][name]:
                raise ConfigError(
                    f"wrap was given {name}={everyone[0][name]} on rank 0 and {name}={kind} on rank {rank}: give all "
                    f"ranks the same"
                )


def agree_on(plan: Plan, model: ModelSpec) -> None:
    """Compares what the ranks that wrap this model are about to do; raises LayoutError with the first difference.

    These are all ranks in the meshes of its patterns. Another pipeline stage has ranks and a model of its own.
    """
    lines = [f"plan {plan.to_json()}"]
    for parameter, spec in zip(model.parameters, model.params, strict=True):
        pattern = pattern_of(parameter) or replicated_everywhere()
        lines.append(
            f"parameter {spec.name} {spec.shape} {spec.key.dtype} trainable={spec.key.trainable} {pattern.describe()}"
        )
    told = gathered((model.ranks, hashlib.sha256("\n".join(lines).encode()).hexdigest(), marks_of(model.parameters)))
    everyone = [(theirs, digest) for theirs, digest, _ in told]
    if all(everyone[rank] == everyone[theirs[0]] for theirs, _ in everyone for rank in theirs):
        names = {p: spec.name for p, spec in zip(model.parameters, model.params, strict=True)}
        warn_of_twins(names, [marks for *_, marks in told])
        return
    models = gathered(lines)
    for theirs, _ in everyone:
        for rank in theirs:
            for one, other in _differences(models[theirs[0]], models[rank]):
                raise LayoutError(
                    f"ranks disagree about the plan or the model. Rank {theirs[0]}: {one}. Rank {rank}: {other}. "
                    f"Build the same model, patterns and plan on every rank of the patterns' meshes"
                )
    raise LayoutError(f"ranks disagree about who wraps this model: {[theirs for theirs, _ in everyone]}")


def _differences(a: list[str], b: list[str]) -> Iterator[tuple[str, str]]:
    for i in range(max(len(a), len(b))):
        mine, other = a[i] if i < len(a) else "nothing", b[i] if i < len(b) else "nothing"
        if mine != other:
            yield mine, other


def check_host_memory(nbytes: int) -> None:
    """Raises TierError on all ranks if those of one host need more than it has left."""
    everyone = gathered((socket.gethostname(), nbytes, host_bytes_left()))
    for host in dict.fromkeys(host for host, *_ in everyone):
        needs = [(theirs, left) for name, theirs, left in everyone if name == host]
        check_fits(sum(theirs for theirs, _ in needs), min(left for _, left in needs), f"{len(needs)} ranks on {host}")
