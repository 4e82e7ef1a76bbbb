"""Measures of this machine: speeds, free memory and disks, instruction sets."""

from elixir_moe.kernels import cpu_features
from elixir_moe.memory.disk import disk_bytes_left, file_system
from elixir_moe.memory.out_of_memory import is_out_of_memory
from elixir_moe.memory.slabs import device_left, host_bytes_left
from elixir_moe.planner.measure import cache_folder, measured_again, measured_here, processor
