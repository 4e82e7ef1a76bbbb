"""Frozen chunks that lie once in the memory of a host: which they are, and the memory they lie in.

Owns the agreement of ranks on it. Copies no weight: each rank fills its own part (`materialize`). Chunks of one process
group lie one behind the other in one mapping, which the group's first rank makes. All its ranks share it, or none.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from elixir_moe.chunks.packing import ChunkSpec, Layout
from elixir_moe.chunks.plan import Plan
from elixir_moe.distributed.all_ranks import gathered, raise_on_all_ranks
from elixir_moe.memory.host_mapping import HostMapping, SharedFile

Ranks = tuple[int, ...]
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class OneHome:
    """The chunks that this rank shares with others of its host."""

    memory: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """{chunk: (numel,) in its compute dtype} of the chunks that are shared."""
    refused: Mapping[Ranks, str] = field(default_factory=dict)
    """{ranks of a process group: why its chunks, which the plan would share, are not shared}."""


def one_home(plan: Plan, layout: Layout, device: torch.device) -> OneHome:
    """The memory of the chunks that the plan shares. Collective over the world, whatever the plan.

    Raises TierError on all ranks if host memory is too small.
    """
    groups: dict[Ranks, list[ChunkSpec]] = {}
    for chunk in layout.chunks:
        if plan.shares(chunk, plan.tier_of(layout, chunk)):
            groups.setdefault(chunk.key.ranks, []).append(chunk)
    everyone = gathered((_host(), bool(groups)))
    if not any(wants for _, wants in everyone):
        return OneHome()
    hosts = [host for host, _ in everyone]
    counts = {ranks: len({hosts[rank] for rank in ranks}) for ranks in groups}
    refused = {ranks: f"they are on {count} hosts" for ranks, count in counts.items() if count > 1}
    wanted = {ranks: sum(chunk.nbytes for chunk in those) for ranks, those in groups.items() if ranks not in refused}
    files: dict[Ranks, SharedFile] = {}
    mappings: dict[Ranks, HostMapping] = {}
    try:
        offers = raise_on_all_ranks("made the memory that ranks of a host share", lambda: _offers(wanted, files))
        problems = gathered(_attach(wanted, offers, mappings, device))
        for file in files.values():
            file.clear_token()
    finally:
        for file in files.values():
            file.close()
    for ranks in wanted:
        found = [f"rank {rank}: {problems[rank][ranks]}" for rank in ranks if ranks in problems[rank]]
        if found:
            refused[ranks] = found[0]
    shared = {ranks: mapping.memory for ranks, mapping in mappings.items() if ranks not in refused}
    memory: dict[int, torch.Tensor] = {}
    for ranks, whole in shared.items():
        start = 0
        for chunk in groups[ranks]:
            memory[chunk.index] = whole[start : start + chunk.nbytes].view(chunk.key.dtype)
            start += chunk.nbytes
    return OneHome(memory, refused)


def _host() -> str:
    """Returns a string that is equal in all processes of one running system."""
    return f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"


_Offer = tuple[int, int, bytes, int]
"""(process, its descriptor, token, bytes) of a file."""


def _offers(wanted: Mapping[Ranks, int], files: dict[Ranks, SharedFile]) -> dict[Ranks, _Offer | str]:
    """The memory that this rank has made as the first of its process groups, or why it could not."""
    offers: dict[Ranks, _Offer | str] = {}
    for ranks, nbytes in wanted.items():
        if ranks[0] == dist.get_rank():
            try:
                file = files[ranks] = SharedFile(nbytes)
            except OSError as error:
                offers[ranks] = str(error)
            else:
                offers[ranks] = os.getpid(), file.descriptor, file.token, file.nbytes
    return offers


def _attach(
    wanted: Mapping[Ranks, int],
    offers: list[dict[Ranks, _Offer | str]],
    mappings: dict[Ranks, HostMapping],
    device: torch.device,
) -> dict[Ranks, str]:
    """Maps what the first ranks have made; returns why not, by process group."""
    problems: dict[Ranks, str] = {}
    for ranks in wanted:
        offer = offers[ranks[0]][ranks]
        try:
            if isinstance(offer, str):
                raise OSError(offer)
            mappings[ranks] = HostMapping.of(*offer, device)
        except (OSError, ValueError) as error:
            problems[ranks] = str(error)
    return problems
