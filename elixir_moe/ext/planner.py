"""The trace of a step, the cost of a plan, and the search for the fastest one that fits."""

from elixir_moe.chunks.events import ModuleInfo, StepEvent
from elixir_moe.planner import cost
from elixir_moe.planner.decoding import bytes_a_weight
from elixir_moe.planner.explain import explain
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import Packings, PlanCandidate, Task, device_bytes_for, price, shortage, solve
from elixir_moe.planner.trace import trace
from elixir_moe.wrapping.checks import check_adapted_bytes
from elixir_moe.wrapping.tiling import tile_for
