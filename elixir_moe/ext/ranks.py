"""Ranks as one: their agreement, the time they wait for each other, and how they end."""

from elixir_moe.distributed.all_ranks import agree, gathered, raise_on_all_ranks
from elixir_moe.distributed.collectives import abort_nccl, world_timeout
from elixir_moe.distributed.waits import BusyTime
from elixir_moe.parallel.mesh import prepare_process
from elixir_moe.torch_private import default_store, fake_store, on_all_threads
