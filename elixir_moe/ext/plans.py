"""Plans, their tiers and their numbers; sizes and times as text."""

from elixir_moe.chunks.ledger import HELD_HEAD, held_line, held_rows
from elixir_moe.chunks.param_spec import ParamSpec, Precision
from elixir_moe.chunks.plan import AutoPlan, Plan, Tier, seconds_text, size_bytes, size_text
